"""Entries of a replica that its group's lineage has not: kept in a file before the replica goes.

A `force_shrink` begins a lineage of its own. Members that went on without the survivor and meet it later drop their
replicas, and with them what they acknowledged meanwhile. Before that, everything from the first entry that the lineage
has in another term on, and the pieces of payloads that it binds, is written to one file under `forks/`, durable before
anything of the replica is destroyed; where that can't be done (no room, damage) the replica stays, stopped. Nothing of
the file is ever read by a node: it is the operator's, and the group's uid lives on in it by name only. Called by
`replica_gc`, which decides that a replica goes; what of it must outlive it, and the format of the file (read by
`service.fork_files`), is a concept of its own.

The file: `MAGIC`, then msgpack values: a head (map), one map an entry (`index`, `term`, `kind`, `data`, `units`: bytes
of each unit, nil where it was released), and a last map with `entries` and `digest`, xxh3-128 of all before it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgpack
import trio
import xxhash

from logyard.protocol.errors import Gone, LogyardError, NoSpace
from logyard.protocol.frame import BINDS, PIECE

from ..disk.door import Disk
from ..entry import COMMANDS, Entry, frames_of, units_of
from ..replica.member import Member
from ..replica.reader import Located, Wanted
from ..types import FORCED_TERMS, Buffer

log = logging.getLogger(__name__)

DIRECTORY = "forks"
SUFFIX = ".fork"
TERMS_MAX = 1024
"""Terms that are told: what lies below them is not known to be another lineage's."""
MAGIC = b"LYFORK1\n"
Upload = tuple[int, int]
"""(session, number) of a payload that comes in pieces."""
Lineage = Sequence[Sequence[int]]
"""(first index, term), rising, of what a member of the group has applied; the first one may be a snapshot's."""


def lineage_of(member: Member) -> list[tuple[int, int]]:
    """Return what a member tells of its log: where terms begin, up to what it has applied."""
    raft = member.raft
    runs = [run for run in raft.log.runs if run[0] <= raft.applied][-TERMS_MAX:]
    if raft.log.snapshot_index:
        base = raft.log.snapshot_index
        runs = [(base, raft.log.snapshot_term), *(run for run in runs if run[0] > base)][-TERMS_MAX:]
    return [*runs, (raft.applied, raft.log.term(raft.applied) or 0)]


def first_of(member: Member, lineage: Lineage) -> int:
    """Return the first entry of a replica that the lineage has in another term; 0: none that counts. What is not known
    to be committed counts if the lineage was forced: the others may have acknowledged it, and a restart forgets what
    was committed last."""
    raft = member.raft
    if not lineage:
        return 0
    (base, base_term), last = lineage[0], lineage[-1][0]
    at = min(raft.log.last_index, last)
    if at < base:
        # Only its snapshot is left there: which of these entries are below it can't be told.
        return int(base_term - raft.log.last_term >= FORCED_TERMS // 2 and raft.log.last_index > 0)
    first, forced = 0, False
    lowest = max(base, raft.log.snapshot_index, 1)
    while at >= lowest:
        theirs, mine = _term_at(lineage, at), raft.log.term(at) or 0
        if mine == theirs:
            break
        first, forced = at, theirs - mine >= FORCED_TERMS // 2
        at -= 1
    if not first or not (first <= raft.commit or forced):
        return 0
    # Where even its oldest entry differs, only what its payloads are stored with tells how far down that goes.
    return first if first > lowest else 1


def _term_at(lineage: Lineage, index: int) -> int:
    """Return the lineage's term at an index; 0: it is below what it tells."""
    return next((int(term) for begin, term in reversed(lineage) if begin <= index), 0)


class Reader(Protocol):
    """What forks need of the reader."""

    def log_entries(self, member: Member, first: int, last: int, bytes_max: int) -> list[Entry]:
        """Return entries of the log from `first`, at least one."""
        ...

    def payload_entries(self, member: Member, first: int, last: int) -> Iterator[Located]:
        """Yield the entries with payload, and where they are."""
        ...

    async def read(self, member: Member, wanted: Sequence[Wanted], mend: bool = True) -> list[Buffer]:
        """Return the bytes of each wanted range, verified."""
        ...


class Forks:
    """The files of this node's replicas that went, in a folder of its directory; `reserve_bytes` of the disk stay
    free."""

    def __init__(self, disk: Disk, path: Path, reserve_bytes: int, node_id: int, reader: Reader) -> None:
        self._disk = disk
        self._path = path
        self._reserve_bytes = reserve_bytes
        self._node_id = node_id
        self._reader = reader

    async def keep(self, member: Member, first: int, lineage: Lineage) -> str:
        """Write everything of a stopped replica from `first` on to a file, and return its path. Raises `NoSpace`,
        `Corrupt`, `Gone`, `OSError`."""
        if not member.resolves:
            raise Gone("it has not caught up with a release, and can't tell what of its payloads lives")
        disk, folder = self._disk, os.path.join(str(self._path), DIRECTORY)
        disk.make_directory(folder)
        raft = member.raft
        path = os.path.join(folder, f"{member.uid:016x}-{first}-{raft.log.last_index}{SUFFIX}")
        temporary = path + ".tmp"
        disk.unlink(temporary)
        fd = disk.create(temporary)
        digest = xxhash.xxh3_128()
        at = 0

        async def put(data: bytes) -> None:
            nonlocal at
            if disk.free_bytes(folder) - len(data) < self._reserve_bytes:
                raise NoSpace(f"no room to keep what only this replica of {member.spec.name!r} has")
            await trio.to_thread.run_sync(disk.gather_write, fd, [data], at)
            digest.update(data)
            at += len(data)

        try:
            try:
                head = {
                    "name": member.spec.name, "uid": member.uid, "machine": member.spec.machine,
                    "arguments": member.spec.arguments, "node": self._node_id, "first": first,
                    "last": raft.log.last_index, "commit": raft.commit, "term": raft.term,
                    "lineage": [list(run) for run in lineage],
                }  # fmt: skip
                await put(MAGIC + msgpack.packb(head))
                count = 0
                async for entry in self._entries(member, first, lineage):
                    await put(msgpack.packb(entry))
                    count += 1
                await put(msgpack.packb({"entries": count, "digest": digest.digest()}))
            finally:
                disk.close(fd)
            await trio.to_thread.run_sync(disk.publish, temporary, path)
        except BaseException:
            disk.unlink(temporary)
            raise
        return path

    async def _entries(self, member: Member, first: int, lineage: Lineage) -> AsyncIterator[dict[str, Any]]:
        """Yield what is left of each entry that the lineage has not, and of those with pieces of what such entries
        bind: the lineage lets these go."""
        bound: set[Upload] = set()
        for *_, data, _ in self._theirs(member, first, lineage):
            bound |= _uploads(data, BINDS)
        located: Located | None
        for located in self._reader.payload_entries(member, 1, first - 1) if bound else ():
            if bound & _uploads(located.data, PIECE):
                yield await self._entry(member, located.index, located.term, located.data, located)
        for index, term, data, located in self._theirs(member, first, lineage, bound):
            yield await self._entry(member, index, term, data, located)

    def _theirs(
        self, member: Member, first: int, lineage: Lineage, bound: Collection[Upload] = ()
    ) -> Iterator[tuple[int, int, bytes, Located | None]]:
        """Yield (index, term, data, place) of each entry from `first` on that the lineage has not, or with a piece of
        what is `bound`: below a snapshot those with payload, above it all."""
        raft, reader = member.raft, self._reader
        index = first

        def wanted(index: int, term: int, data: bytes) -> bool:
            return term != _term_at(lineage, index) or not _uploads(data, PIECE).isdisjoint(bound)

        while index <= raft.log.last_index:
            if index <= raft.log.snapshot_index:
                stop = raft.log.snapshot_index
                for located in reader.payload_entries(member, index, stop):
                    if wanted(located.index, located.term, located.data):
                        yield located.index, located.term, located.data, located
                index = stop + 1
                continue
            for entry in reader.log_entries(member, index, raft.log.last_index, 1 << 20):
                index = entry.index + 1
                if wanted(entry.index, entry.term, entry.data):
                    places = reader.payload_entries(member, entry.index, entry.index) if entry.body_bytes else iter(())
                    yield entry.index, entry.term, entry.data, next(places, None)

    async def _entry(
        self, member: Member, index: int, term: int, data: bytes, located: Located | None
    ) -> dict[str, Any]:
        units = units_of(data)
        live = member.liveness.live_units(index, [(unit.number, unit.first_ordinal, unit.records) for unit in units])
        bodies: list[bytes | None] = []
        for unit in units:
            body: bytes | None = None
            if located is not None and unit.number in live:
                try:
                    (found,) = await self._reader.read(member, [Wanted(located, unit, 0, unit.length)], mend=False)
                    body = bytes(found)
                except Gone:
                    pass
            bodies.append(body)
        return {"index": index, "term": term, "kind": data[0], "data": bytes(data), "units": bodies}


def _uploads(data: bytes, flag: int) -> set[Upload]:
    """Return the uploads that frames of an entry with this flag are of."""
    frames = frames_of(data) if data[0] == COMMANDS else ()
    return {(frame.session, frame.upload) for frame in frames if frame.flags & flag}


def why_it_stays(error: LogyardError | OSError) -> str:
    """Return the reason of a replica that could not be kept elsewhere."""
    return (
        f"forked: it holds entries that its group's lineage has not, and they could not be written to {DIRECTORY}/ "
        f"({error}); make room or repair it, and restart the node"
    )
