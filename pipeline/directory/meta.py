"""The meta store, read without touching it: rows of both copies, judged as a start would judge them.

Invariant: the copies are opened read-only and without LMDB's lock file; their rows are poured into a fresh pair in a
temporary directory, and `MetaStore` reconciles that pair, so that what is checked is what a start would get. Called by
`service.check_process`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgpack
from xxhash import xxh3_64_intdigest

from logyard.engine.disk import Disk
from logyard.engine.identity import Origin
from logyard.engine.log import meta_rows
from logyard.engine.log.meta import (
    COMMIT,
    HEADER_BYTES,
    IDENTITY,
    NAMES,
    MetaStore,
    fill_environment,
    read_environment,
)
from logyard.engine.log.meta_rows import FileRow, GroupRow, SnapshotRow, StateRow
from logyard.engine.recovery.damage import Damaged
from logyard.engine.recovery.rebuild import spec_of
from logyard.engine.types import Spec
from logyard.payloads.measuring import check_file
from logyard.protocol.errors import Corrupt, GenerationFailed, WrongIdentity

from .report import Report

KINDS = {
    b"g": "definition", b"s": "checkpoint", b"n": "snapshot", b"f": "file", b"p": "payload homes", b"d": "deletion",
    b"e": "epoch", b"x": "damage", b"c": "section", b"i": "transfer", b"k": "peer", b"r": "departure",
}  # fmt: skip
GROUP_ROWS = (b"g", b"s", b"n", b"d", b"x", b"i", b"r")


class Facts:
    """What the meta store says. `complete`: no row is lost, so what nothing names is nobody's."""

    __slots__ = (
        "node", "cluster", "epoch", "groups", "states", "snapshots", "chunks", "wal_files", "flushed", "deleted",
        "departed", "store", "lost", "damaged", "complete", "directory", "peers",
    )  # fmt: skip

    def __init__(self) -> None:
        self.node = 0
        self.cluster = ""
        self.epoch = 0
        self.directory = 0
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
        self.deleted: set[int] = set()
        self.departed: dict[int, meta_rows.Departed] = {}
        """What replicas that went from here promised."""
        self.store: list[tuple[bytes, bytes]] = []
        self.lost: set[int] = set()
        """Groups with a row that verifies in neither copy."""
        self.damaged: dict[int, Damaged] = {}
        """Groups that lost records here at some time."""
        self.complete = True

    def name(self, uid: int) -> str:
        """A group's name, or its uid where that is all there is."""
        spec = self.groups.get(uid)
        return spec.name if spec is not None else f"{uid:016x}"


def holds(key: bytes, raw: bytes) -> bool:
    """Whether a row's checksum is that of its key and value."""
    if len(raw) < HEADER_BYTES:
        return False
    return xxh3_64_intdigest(raw[8:], xxh3_64_intdigest(key)) == int.from_bytes(raw[:8], "little")


def uid_of(key: bytes) -> int:
    """The group that a row belongs to; 0: none."""
    if key[:1] in GROUP_ROWS and len(key) == 1 + meta_rows.KEY.size:
        return int.from_bytes(key[1:], "big")
    if key[:1] in (meta_rows.STORE, meta_rows.CHUNK) and len(key) > 8:
        return int.from_bytes(key[-8:], "big")
    return 0


def describe(key: bytes) -> str:
    """A row's name."""
    if key in (IDENTITY, COMMIT, meta_rows.DIRECTORY, meta_rows.OUTDATED):
        return f"the {key[1:].decode()} row"
    kind = KINDS.get(key[:1], "unknown")
    uid = uid_of(key)
    return f"the {kind} row of group {uid:016x}" if uid else f"the {kind} row {key!r}"


def read_meta(directory: Path, skip: frozenset[str], report: Report) -> Facts:
    """Facts from both copies; what is wrong with them is reported. Raises `WrongIdentity` for a newer format."""
    facts = Facts()
    copies = [_read_copy(directory, f"meta/{name}", skip, report) for name in NAMES]
    readable = [copy for copy in copies if copy is not None]
    for name, copy in zip(NAMES, copies, strict=True):
        if copy is None and readable:
            report.healed("meta", "this copy can't be read; the other one can", path=f"meta/{name}")
    if not readable:
        report.damage("meta", "neither copy of the meta store can be read: no group is known here", path="meta")
        facts.complete = False
        return facts
    for name in _set_aside(directory / "meta"):
        report.warning("meta", "a copy that an earlier start set aside", path=f"meta/{name}")
    with tempfile.TemporaryDirectory(prefix="logyard-check-") as temporary:
        for name, copy in zip(NAMES, copies, strict=True):
            if copy is not None:
                fill_environment(os.path.join(temporary, name), copy)
        store = MetaStore(Disk(), temporary)
        try:
            store.open()
            _compare(store, copies, facts, report)
            _gather(store, facts, report)
        except WrongIdentity as error:
            raise WrongIdentity(str(error).replace(temporary, str(directory / "meta"))) from None
        finally:
            store.close()
    return facts


def _set_aside(meta: Path) -> list[str]:
    return sorted(name for name in os.listdir(meta) if ".bad-" in name)


def _read_copy(directory: Path, relative: str, skip: frozenset[str], report: Report) -> dict[bytes, bytes] | None:
    path = directory / relative
    data = f"{relative}/data.mdb"
    if relative in skip:
        report.warning("meta", "reading it kills the process: a page is unreadable or nonsense", path=data)
        return None
    try:
        check_file(str(path / "data.mdb"))
        report.inside(relative)
        try:
            found, most = read_environment(str(path))
        finally:
            report.inside("")
    except (GenerationFailed, Corrupt, OSError) as error:
        report.warning("meta", f"it can't be read: {error}", path=data)
        return None
    if len(found) != most:
        report.healed("meta", f"{len(found)} of {most} rows can be reached", path=data)
    return found


def _compare(store: MetaStore, copies: list[dict[bytes, bytes] | None], facts: Facts, report: Report) -> None:
    """Report rows that are bad in one copy, bad in both, or older in one."""
    lost = set(store.lost)
    stale = dict.fromkeys(NAMES, 0)
    keys = sorted({key for copy in copies if copy is not None for key in copy})
    for key in keys:
        raws = [None if copy is None else copy.get(key) for copy in copies]
        good = [raw is not None and holds(key, raw) for raw in raws]
        for name, copy, raw, is_good in zip(NAMES, copies, raws, good, strict=True):
            if raw is not None and not is_good and key not in lost:
                text = f"{describe(key)} does not match its checksum; the other copy's does"
                report.healed("meta_row", text, path=f"meta/{name}/data.mdb", group=_group(key))
            elif copy is not None and is_good is False and raw is None:
                stale[name] += 1
        if all(good) and raws[0] != raws[1]:
            older = 0 if _commit_of(raws[0]) < _commit_of(raws[1]) else 1
            stale[NAMES[older]] += 1
        if key not in lost:
            continue
        if None in raws and None not in copies:
            # A key that only one copy has, and not even that one proves: a damaged key, whose true row is in the other.
            name = NAMES[0 if raws[0] is not None else 1]
            text = f"a row {key!r} that is nobody's: its key is damaged"
            report.healed("meta_row", text, path=f"meta/{name}/data.mdb")
            continue
        facts.complete = False
        facts.lost.add(uid_of(key))
        report.damage("meta_row", f"{describe(key)} is damaged in every copy: {key!r}", path="meta", group=_group(key))
    for name, many in stale.items():
        if many:
            text = f"{many} rows are older than in the other copy, or missing: a crash came between the two commits"
            report.healed("meta_row", text, path=f"meta/{name}/data.mdb")


def _commit_of(raw: bytes | None) -> int:
    return int.from_bytes((raw or b"")[8:HEADER_BYTES], "little")


def _group(key: bytes) -> str:
    uid = uid_of(key)
    return f"{uid:016x}" if uid else ""


def _gather(store: MetaStore, facts: Facts, report: Report) -> None:
    """The typed rows."""
    identity = store.identity
    if identity is not None:
        facts.node, facts.cluster = identity.node, identity.cluster
    with report.guarded("meta_row", path="meta"):
        facts.epoch = int.from_bytes(store.get(meta_rows.EPOCH) or b"", "little")

    def take(prefix: bytes, put: Callable[[bytes, bytes], None]) -> None:
        for key, value in store.scan(prefix):
            before = len(report.findings)
            with report.guarded("meta_row", path="meta", group=_group(key)):
                put(key, value)
            if len(report.findings) > before:
                facts.complete = False

    def group(key: bytes, value: bytes) -> None:
        spec = spec_of(GroupRow.unpack(key, value))
        facts.groups[spec.uid] = spec

    def state(key: bytes, value: bytes) -> None:
        row = StateRow.unpack(key, value)
        facts.states[row.uid] = row

    def snapshot(key: bytes, value: bytes) -> None:
        row = SnapshotRow.unpack(key, value)
        facts.snapshots[row.uid] = row

    def file(key: bytes, value: bytes) -> None:
        row = FileRow.unpack(key, value)
        if row.kind == "wal":
            facts.wal_files[row.id] = int(row.fields["length"])
        elif row.kind == "flushed":
            facts.flushed = int(row.fields["file"])

    def departure(key: bytes, value: bytes) -> None:
        facts.departed[uid_of(key)] = meta_rows.Departed(*msgpack.unpackb(value))

    take(GroupRow.PREFIX, group)
    take(StateRow.PREFIX, state)
    take(SnapshotRow.PREFIX, snapshot)
    take(FileRow.PREFIX, file)
    take(meta_rows.CHUNK, facts.chunks.__setitem__)
    take(meta_rows.DELETED, lambda key, _: facts.deleted.add(int.from_bytes(key[1:], "big")))
    take(meta_rows.DEPARTED, departure)
    # A group that was left has rows again when this node is a member again.
    facts.deleted |= facts.departed.keys() - facts.groups.keys()
    take(meta_rows.STORE, lambda key, value: facts.store.append((key[1:], value)))
    take(meta_rows.PEER, lambda key, value: facts.peers.update(meta_rows.peers([(key, value)])))
    facts.directory = int.from_bytes(store.get(meta_rows.DIRECTORY) or b"", "little")
    refused = store.get(meta_rows.OUTDATED)
    if refused is not None:
        text = f"the other nodes refuse this directory, and so does a start: {refused.decode('utf-8', 'replace')}"
        report.damage("outdated", text, path="meta")
    _damages(store, facts, report)
    report.count("groups", len(facts.groups))
    for uid in sorted(facts.states.keys() | facts.snapshots.keys()):
        if uid not in facts.groups:
            known = "was deleted" if uid in facts.deleted else "has no definition"
            report.damage("meta_row", f"a group with rows {known}", path="meta", group=facts.name(uid))


def _damages(store: MetaStore, facts: Facts, report: Report) -> None:
    """What this node knows to have lost."""
    for key, value in store.scan(meta_rows.DAMAGED):
        known = facts.damaged[uid_of(key)] = Damaged.unpack(value)
        group = facts.name(uid_of(key))
        if known.sound:
            report.healed("damaged", f"this group was mended by others: {known.reason}", path="meta", group=group)
        else:
            text = f"this group lost records here, and waits for others to mend it: {known.reason}"
            report.damage("damaged", text, path="meta", group=group)
