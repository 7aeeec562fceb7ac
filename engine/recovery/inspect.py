"""A stopped directory as a start would find it, read and left as it is: rows, what the WAL says, the image of each
group.

Invariant: nothing is written and nothing raises for what damaged bytes say; what a start would raise is in an image's
findings, in `Wal.damaged` or among the rows that can't be read. Only a newer format raises, `WrongIdentity`. Used by
`pipeline.directory`, for `logyard check`, Spark and audits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Protocol

from logyard.protocol.errors import WrongIdentity

from ..disk.door import Disk
from ..identity import Origin
from ..log import meta_rows
from ..log.meta_rows import FileRow, GroupRow, SnapshotRow, StateRow
from ..log.recovered import Collector, Recovered
from ..log.replay_result import ReplayResult
from ..log.wal_files import wal_epochs, wal_name
from ..log.wal_replay import replay
from ..snapshot import format as snapshot_format
from ..types import Spec
from .damage import Damaged, cuts_of, judge
from .rebuild import Finding, Image, rebuild, spec_of

Unreadable = Callable[[bytes, Exception], None]
"""Called with the key of a row whose value can't be read, and why."""


class Rows(meta_rows.Rows, Protocol):
    """A meta store that is open."""

    def get(self, key: bytes) -> bytes | None:
        """Return a row's value."""
        ...


class Facts:
    """What the meta store says. `complete`: no row is lost, so what nothing names is nobody's."""

    __slots__ = (
        "node", "cluster", "epoch", "groups", "states", "snapshots", "chunks", "wal_files", "flushed", "claimed",
        "deleted", "departed", "store", "lost", "damaged", "complete", "directory", "peers", "refused",
    )  # fmt: skip

    def __init__(self) -> None:
        self.node = 0
        self.cluster = ""
        self.epoch = 0
        self.directory = 0
        self.refused = ""
        """Why the other nodes refuse this directory."""
        self.peers: dict[int, Origin] = {}
        """What this node knew of the others' directories."""
        self.groups: dict[int, Spec] = {}
        self.states: dict[int, StateRow] = {}
        self.snapshots: dict[int, SnapshotRow] = {}
        self.chunks: dict[bytes, bytes] = {}
        """Chunks of large sections, by key."""
        self.wal_files: dict[int, int] = {}
        """Sealed WAL files that are homes: number -> where their batches end, in bytes."""
        self.flushed = 0
        self.claimed = meta_rows.ALL
        """How many batches the last life may claim at most."""
        self.deleted: set[int] = set()
        self.departed: dict[int, meta_rows.Departed] = {}
        """What replicas that went from here promised."""
        self.store: list[tuple[bytes, bytes]] = []
        self.lost: set[bytes] = set()
        """Keys of rows that verify in neither copy, as whoever compared the copies found."""
        self.damaged: dict[int, Damaged] = {}
        """Groups that lost records here at some time."""
        self.complete = True

    def name(self, uid: int) -> str:
        """Return a group's name, or its uid where that is all there is."""
        spec = self.groups.get(uid)
        return spec.name if spec is not None else f"{uid:016x}"

    def identify(self, node: int, cluster: str) -> None:
        """Note whose directory it is."""
        self.node, self.cluster = node, cluster

    def miss(self) -> None:
        """Note that there were rows that can't be read: what nothing names may be somebody's."""
        self.complete = False

    def gather(self, meta: Rows, unreadable: Unreadable) -> None:
        """Read every row there is."""

        def take(prefix: bytes, put: Callable[[bytes, bytes], None]) -> None:
            for key, value in meta.scan(prefix):
                try:
                    put(key, value)
                except Exception as error:  # a row that verifies may say anything
                    self.complete = False
                    unreadable(key, error)

        self.epoch = int.from_bytes(meta.get(meta_rows.EPOCH) or b"", "little")
        self.directory = int.from_bytes(meta.get(meta_rows.DIRECTORY) or b"", "little")
        self.claimed = meta_rows.claimed(meta.get(meta_rows.UNMET), self.epoch)
        self.refused = (meta.get(meta_rows.OUTDATED) or b"").decode("utf-8", "replace")
        take(GroupRow.PREFIX, self._take_group)
        take(StateRow.PREFIX, self._take_state)
        take(SnapshotRow.PREFIX, self._take_snapshot)
        take(FileRow.PREFIX, self._take_file)
        take(meta_rows.CHUNK, self.chunks.__setitem__)
        take(meta_rows.DELETED, lambda key, _: self.deleted.add(int.from_bytes(key[1:], "big")))
        take(meta_rows.DEPARTED, lambda key, value: self.departed.update(meta_rows.departed([(key, value)])))
        take(meta_rows.STORE, lambda key, value: self.store.append((key[1:], value)))
        take(meta_rows.PEER, lambda key, value: self.peers.update(meta_rows.peers([(key, value)])))
        for key, value in meta.scan(meta_rows.DAMAGED):
            self.damaged[int.from_bytes(key[1:], "big")] = Damaged.unpack(value)
        # A group that was left has rows again when this node is a member again.
        self.deleted |= self.departed.keys() - self.groups.keys()

    def _take_group(self, key: bytes, value: bytes) -> None:
        spec = spec_of(GroupRow.unpack(key, value))
        self.groups[spec.uid] = spec

    def _take_state(self, key: bytes, value: bytes) -> None:
        row = StateRow.unpack(key, value)
        self.states[row.uid] = row

    def _take_snapshot(self, key: bytes, value: bytes) -> None:
        row = SnapshotRow.unpack(key, value)
        self.snapshots[row.uid] = row

    def _take_file(self, key: bytes, value: bytes) -> None:
        row = FileRow.unpack(key, value)
        if row.kind == "wal":
            self.wal_files[row.id] = int(row.fields["length"])
        elif row.kind == "flushed":
            self.flushed = int(row.fields["file"])


class Wal:
    """What the WAL says of each group. `damaged`: all groups that lost something, by rows and by what was met; `sizes`:
    bytes of each file there is."""

    __slots__ = ("groups", "result", "damaged", "sizes")

    def __init__(self) -> None:
        self.groups: dict[int, Recovered] = {}
        self.result = ReplayResult()
        self.damaged: dict[int, Damaged] = {}
        self.sizes: dict[int, int] = {}

    def read(self, directory: str, facts: Facts) -> None:
        """Read the files of a folder. Raises `WrongIdentity`, `OSError`."""
        epochs = wal_epochs(os.listdir(directory)) if os.path.isdir(directory) else []
        self.sizes = {epoch: os.path.getsize(os.path.join(directory, wal_name(epoch))) for epoch in epochs}
        self.groups, self.result = replay_wal(Disk(), directory, facts.flushed, facts.damaged, facts.epoch)
        hard_states = {uid for uid, one in self.groups.items() if one.hard_state is not None}
        self.damaged = judge(facts.damaged, self.result, hard_states, facts.groups, facts.lost)

    def suspects(self, facts: Facts) -> set[int]:
        """Return the groups that damage without a name may have hit."""
        return facts.groups.keys() - self.result.cleared if any(not one.uid for one in self.result.damage) else set()

    @property
    def written(self) -> int:
        """Return how many batches this directory may claim to have written; who lost some claims none."""
        return 0 if self.result.damage else self.result.next_batch


def replay_wal(
    disk: Disk, directory: str, flushed: int, known: Mapping[int, Damaged], lives: int
) -> tuple[dict[int, Recovered], ReplayResult]:
    """Return what the WAL says of groups, and the replay's result. `flushed`: files up to it are in segments; `known`:
    rows of damaged groups; `lives`: how many the directory has had."""
    sink, cuts = Collector(), cuts_of(known)
    result = replay(disk, directory, sink, flushed, cuts)
    if lives:
        result.look_for_last_file(flushed, cuts, lives)
    return sink.groups, result


def image_of(uid: int, facts: Facts, wal: Wal) -> Image:
    """Return one group's image. Of a damaged group it is what is certain, as of one that is being mended."""
    row, snapshot, finding = facts.snapshots.get(uid), None, None
    if row is not None:
        try:
            snapshot = snapshot_format.decode(
                row.data, uid, lambda name: facts.chunks.get(meta_rows.chunk_key(uid, name))
            )
        except WrongIdentity:
            raise
        except Exception as error:  # a checksum of nonsense may hold, and nonsense may raise anything
            finding = Finding("snapshot", f"{type(error).__name__}: {error}", error)
    said = wal.groups.get(uid) or Recovered()
    image = rebuild(
        facts.groups[uid], facts.states.get(uid), snapshot, said, facts.departed.get(uid), uid in wal.damaged
    )
    if finding is not None:
        image.findings.insert(0, finding)
    return image
