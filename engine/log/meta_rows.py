"""Rows of the meta store with their types: groups, their durable state, small snapshots, files. msgpack, fields in
order.

Invariant: fields are only ever added at the end, so an older row reads with defaults. Keys start with one letter for
the kind and sort by group or file number. Called by the host, which commits what `put` gives.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import msgpack

from ..identity import Origin
from ..ranges import subtract

KEY = struct.Struct(">Q")
LIFE = struct.Struct("<QQ")
ALL = (1 << 64) - 1
STORE = b"p"
"""Prefix of the payload store's own rows."""
DELETED = b"d"
"""Prefix of the uids of deleted groups: they never come back."""
DAMAGED = b"x"
"""Prefix of the uids of groups that lost records here: what is known of it (`damage.Damaged`), also when the damaged
file is long gone."""
DEPARTED = b"r"
"""Prefix of the uids of groups that this node was removed from: the promises of the replica that went."""
CHUNK = b"c"
"""Prefix of large sections' chunks: name, uid."""
INTENT = b"i"
"""Prefix of the uids of groups that a snapshot is on its way to: what is there of it already (`Intent`)."""
SCRUB = b"\x00scrub"
"""When the last scrub ended, ms since 1970."""
EPOCH = b"e"
"""The node's epoch: raised and synced before its first frame of each start."""
DIRECTORY = b"\x00directory"
"""The random number of this data directory, u64: drawn when it is made."""
UNMET = b"\x00unmet"
"""A life that no other node has answered: its epoch, and how many durable batches it claims, u64 each. It is removed
when one has, before that one is told of more."""
OUTDATED = b"\x00outdated"
"""Why the other nodes refuse this directory: a start refuses it, too."""
PLACES = b"\x00places"
"""Where the other nodes are reached, as the catalogue has it: msgpack ``[[node, peer, client], ...]`` of addresses."""
PEER = b"k"
"""Prefix of other nodes' numbers (u32, big-endian): the last that was known of their directories."""


class SegmentRun(NamedTuple):
    """Entries first..last of a group lie in segment `segment`; their payloads in the WAL file of that number until it
    is migrated."""

    first: int
    last: int
    segment: int


class RingRun(NamedTuple):
    """Entries first..last of a system group, all of `term`, lie in its ring, whatever segments have of them."""

    first: int
    last: int
    term: int


Run = TypeVar("Run", SegmentRun, RingRun)


def cut_runs(runs: list[Run], index: int) -> list[Run]:
    """Return the runs below `index` only."""
    if not runs or runs[-1].last < index:
        return runs
    return [run._replace(last=min(run.last, index - 1)) for run in runs if run.first < index]


def join_runs(runs: Sequence[RingRun], more: Sequence[RingRun]) -> list[RingRun]:
    """Return the runs with later ones behind them, as few as possible."""
    found = list(runs)
    for run in more:
        if found and (found[-1].last + 1, found[-1].term) == (run.first, run.term):
            found[-1] = found[-1]._replace(last=run.last)
        else:
            found.append(run)
    return found


def runs_above(runs: list[RingRun], index: int) -> list[RingRun]:
    """Return the runs above `index` only."""
    if not runs or runs[0].first > index:
        return runs
    return [run._replace(first=max(run.first, index + 1)) for run in runs if run.last > index]


def places(segments: Sequence[SegmentRun], ring: Sequence[RingRun]) -> list[SegmentRun]:
    """Return which file has which entries, rising and disjoint; segment 0 is the ring. A segment's run may have gaps,
    and what the ring has is in no segment."""
    in_ring = [(run.first, run.last) for run in ring]
    found = [SegmentRun(first, last, 0) for first, last in in_ring]
    for run in segments:
        found += [SegmentRun(first, last, run.segment) for first, last in subtract([(run.first, run.last)], in_ring)]
    return sorted(found)


def _pack(values: list[Any]) -> bytes:
    packed: bytes = msgpack.packb(values)
    return packed


def _unpack(value: bytes) -> list[Any]:
    found: list[Any] = msgpack.unpackb(value, strict_map_key=False, use_list=True)
    return found


@dataclass(slots=True)
class GroupRow:
    """A group of this node, registered before its first WAL record (invariant 6). `created`: ms since 1970."""

    PREFIX: ClassVar[bytes] = b"g"

    uid: int
    name: str
    machine: str
    arguments: dict[str, Any] = field(default_factory=dict)
    configuration: bytes = b""
    created: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    def put(self) -> tuple[bytes, bytes]:
        """Return key and value for `MetaStore.commit`."""
        values = [self.name, self.machine, self.arguments, self.configuration, self.created, self.extra]
        return group_key(self.uid), _pack(values)

    @classmethod
    def unpack(cls, key: bytes, value: bytes) -> GroupRow:
        """Return the row of `scan`'s key and value."""
        return cls(KEY.unpack(key[1:])[0], *_unpack(value))


@dataclass(slots=True)
class StateRow:
    """A checkpoint of a group's durable state: what stays true when its WAL files are recycled.

    `runs` locate entries in segments, `term_runs` are (first index, term), `payload_runs` whatever the payload side
    keeps: lists of plain values.
    """

    PREFIX: ClassVar[bytes] = b"s"

    uid: int
    term: int = 0
    vote: int = 0
    commit: int = 0
    snapshot_index: int = 0
    snapshot_term: int = 0
    floor: int = 0
    runs: list[SegmentRun] = field(default_factory=list)
    term_runs: list[tuple[int, int]] = field(default_factory=list)
    payload_runs: list[Any] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)

    def put(self) -> tuple[bytes, bytes]:
        """Return key and value for `MetaStore.commit`."""
        return state_key(self.uid), _pack(
            [
                self.term, self.vote, self.commit, self.snapshot_index, self.snapshot_term, self.floor,
                self.runs, self.term_runs, self.payload_runs, self.extra,
            ]
        )  # fmt: skip

    @property
    def ring(self) -> list[RingRun]:
        """What the group's ring has of its log."""
        return [RingRun(*map(int, run)) for run in self.extra.get("ring", ())]

    def cut(self, index: int) -> None:
        """Let segments and ring have nothing from `index` on."""
        self.runs = cut_runs(self.runs, index)
        if "ring" in self.extra:
            self.extra["ring"] = [list(run) for run in cut_runs(self.ring, index)]

    @classmethod
    def unpack(cls, key: bytes, value: bytes) -> StateRow:
        """Return the row of `scan`'s key and value."""
        row = cls(KEY.unpack(key[1:])[0], *_unpack(value))
        row.runs = [SegmentRun(*run) for run in row.runs]
        row.term_runs = [(first, term) for first, term in row.term_runs]
        return row


@dataclass(slots=True)
class SnapshotRow:
    """A snapshot small enough to need no file; `data` is its encoding by the snapshot store."""

    PREFIX: ClassVar[bytes] = b"n"

    uid: int
    index: int
    term: int
    data: bytes

    def put(self) -> tuple[bytes, bytes]:
        """Return key and value for `MetaStore.commit`."""
        return snapshot_key(self.uid), _pack([self.index, self.term, self.data])

    @classmethod
    def unpack(cls, key: bytes, value: bytes) -> SnapshotRow:
        """Return the row of `scan`'s key and value."""
        return cls(KEY.unpack(key[1:])[0], *_unpack(value))


@dataclass(slots=True)
class FileRow:
    """A file whose existence is a fact others rely on: `kind` is wal, segment or generation; `fields` are its own."""

    PREFIX: ClassVar[bytes] = b"f"

    kind: str
    id: int
    fields: dict[str, Any] = field(default_factory=dict)

    def put(self) -> tuple[bytes, bytes]:
        """Return key and value for `MetaStore.commit`."""
        return file_key(self.kind, self.id), _pack([self.fields])

    @classmethod
    def unpack(cls, key: bytes, value: bytes) -> FileRow:
        """Return the row of `scan`'s key and value."""
        kind, _, number = key[1:].partition(b"\0")
        return cls(kind.decode(), KEY.unpack(number)[0], *_unpack(value))


class Departed(NamedTuple):
    """What is kept of a replica that went. `removed_at`: a committed position (see `types.position`)
    where this node was no member (0: it never was, the group being unborn); `admitted`: that of a configuration above
    it that has it again (0: none yet)."""

    term: int
    vote: int
    last_term: int
    last_index: int
    removed_at: int
    admitted: int = 0


def peer_key(node: int) -> bytes:
    """Return the key of what is known of another node's directory."""
    return PEER + node.to_bytes(4, "big")


def peers(found: Iterable[tuple[bytes, bytes]]) -> dict[int, Origin]:
    """Return the rows of other nodes, read back."""
    return {int.from_bytes(key[1:], "big"): Origin(*msgpack.unpackb(value)[:4]) for key, value in found}


def unmet(epoch: int, claimed: int) -> bytes:
    """Return the row `UNMET` of a life that claims so many batches."""
    return LIFE.pack(epoch, claimed)


def claimed(row: bytes | None, epoch: int) -> int:
    """Return how many batches the life of that epoch claims at most: `ALL` where another node has answered it, or the
    row is of another life."""
    life, most = LIFE.unpack(row) if row is not None and len(row) == LIFE.size else (0, 0)
    return int(most) if life == epoch > 0 else ALL


def departed(found: Iterable[tuple[bytes, bytes]]) -> dict[int, Departed]:
    """Read the rows of replicas that went."""
    return {int.from_bytes(key[1:], "big"): Departed(*msgpack.unpackb(value)) for key, value in found}


def group_key(uid: int) -> bytes:
    """Return the key of a `GroupRow`."""
    return GroupRow.PREFIX + KEY.pack(uid)


def state_key(uid: int) -> bytes:
    """Return the key of a `StateRow`."""
    return StateRow.PREFIX + KEY.pack(uid)


def snapshot_key(uid: int) -> bytes:
    """Return the key of a `SnapshotRow`."""
    return SnapshotRow.PREFIX + KEY.pack(uid)


def file_key(kind: str, number: int) -> bytes:
    """Return the key of a `FileRow`."""
    return FileRow.PREFIX + kind.encode() + b"\0" + KEY.pack(number)


def chunk_key(uid: int, name: bytes) -> bytes:
    """Return the key of one chunk of a large section. As every row about one group, it ends with the uid."""
    return CHUNK + name + KEY.pack(uid)


def intent_key(uid: int) -> bytes:
    """Return the key of the row of a snapshot that is on its way."""
    return INTENT + KEY.pack(uid)


class Rows(Protocol):
    """What the rows are read from: a `MetaStore`."""

    def scan(self, prefix: bytes) -> Iterable[tuple[bytes, bytes]]:
        """Return (key, value) of every row with that prefix, by key."""
        ...


def group_rows(store: Rows) -> Iterator[GroupRow]:
    """Yield all groups, by uid."""
    return (GroupRow.unpack(key, value) for key, value in store.scan(GroupRow.PREFIX))


def state_rows(store: Rows) -> Iterator[StateRow]:
    """Yield all states, by uid."""
    return (StateRow.unpack(key, value) for key, value in store.scan(StateRow.PREFIX))


def snapshot_rows(store: Rows) -> Iterator[SnapshotRow]:
    """Yield all small snapshots, by uid."""
    return (SnapshotRow.unpack(key, value) for key, value in store.scan(SnapshotRow.PREFIX))


def file_rows(store: Rows, kind: str = "") -> Iterator[FileRow]:
    """Yield all files, or those of one kind, by number."""
    prefix = FileRow.PREFIX + (kind.encode() + b"\0" if kind else b"")
    return (FileRow.unpack(key, value) for key, value in store.scan(prefix))
