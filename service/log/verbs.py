"""The append log's verbs of a node: they need both the machine and the payload homes. Made by `node`, which has them
under their names.

Reads of one log by offset or by time, what becomes of it (`truncate`, `retain`), and its producers. Many logs at once:
`scan`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

import msgpack

from logyard.engine.replica.member import Member
from logyard.engine.replica.submit import check_leader
from logyard.engine.types import Buffer
from logyard.machines.log.command import TRUNCATE_REPLY, retain_command, truncate_command
from logyard.protocol.errors import BadRequest, LogyardError, Refused
from logyard.protocol.frame import Epoch, epoch_done_command
from logyard.protocol.topics import PARTITION_CODES

from ..consistency import Consistency
from .reader import Encoded, LogReader, append_log

PRODUCERS_VERSION = 2
"""Of the append log: the first one that knows producers and retention."""
EPOCHS_VERSION = 3
"""The first one that knows fenced producers."""
PARTITIONS_VERSION = 5
"""The first one that may be a topic's partition as today's clients know it."""
BOUNDED_VERSION = 6
"""The first one whose partitions keep a window of what producers wrote wherever slots were before."""


class Limits(NamedTuple):
    """Of one poll."""

    records: int
    size: int
    wait_s: float


class Leader(NamedTuple):
    """What the member that leads a log can do."""

    read_index: Callable[[Member], Awaitable[object]]
    """Wait until what was acknowledged before this is applied here. Raises `NotLeader`."""
    require: Callable[[Member, int], Awaitable[object]]
    """Bring the machine to a version. Raises `Refused` while too few nodes know it."""
    commit: Callable[[Member, bytes], Awaitable[bytes]]
    """Commit a command that frees space, or takes none; return the machine's reply."""


class LogVerbs:
    """Reads and changes of append logs, by group name. `find` gives a group's member, or raises `UnknownGroup`."""

    def __init__(
        self,
        node_id: int,
        limits: Limits,
        find: Callable[[str], Member],
        reads: Consistency,
        reader: LogReader,
        leader: Leader,
    ) -> None:
        self._node_id = node_id
        self._limits = limits
        self._find = find
        self._reads = reads
        self._reader = reader
        self._leader = leader

    async def poll(
        self, name: str, offset: int, max_records: int, max_bytes: int, wait_s: float, bodies: bool, consistency: str,
        *, staleness_s: float = 0.0, since: int | None = None, uid: int = 0,
    ) -> tuple[dict[str, int], list[Buffer]]:  # fmt: skip
        """Return record blocks from `offset`, or, with `since` (ms since 1970), from the first record stamped then or
        later; the header says which offset that is."""
        member = await self._reads.member(name, consistency, staleness_s, uid)
        if since is not None:
            offset = await self._reader.offset_since(member, since)
        limits = self._limits
        header, blocks = await self._reader.poll(
            member, offset, min(max_records, limits.records), min(max_bytes, limits.size), min(wait_s, limits.wait_s),
            bodies,
        )  # fmt: skip
        return (header if since is None else {**header, "offset": offset}), blocks

    async def read_body(
        self, name: str, offset: int, start: int, stop: int | None, stored: bool = False, *, uid: int = 0
    ) -> tuple[int, Buffer | Encoded]:
        """Return the log's uid and bytes start..stop of one record's body, from this member; see
        `LogReader.read_body`."""
        member = await self._reads.member(name, "local", 0.0, uid)
        return member.uid, await self._reader.read_body(member, offset, start, stop, stored)

    async def bounds(
        self, name: str, consistency: str = "local", *, staleness_s: float = 0.0, uid: int = 0
    ) -> dict[str, int]:
        """Start and end of an append log."""
        member = await self._reads.member(name, consistency, staleness_s, uid)
        machine = append_log(member)
        return {"start": machine.start, "end": machine.end, "node": self._node_id, "uid": member.uid}

    async def truncate(self, name: str, before: int) -> int:
        """Drop the records before an offset; return the log's start. On the leader only; raises `NotLeader`,
        `Rejected`."""
        member = self._find(name)
        check_leader(member)
        machine = append_log(member)
        if before > machine.end:
            await self._leader.read_index(member)
        before = min(before, machine.end) if before <= machine.end else before
        position = await self._reader.position_of(member, min(before, machine.end))
        reply = await self._leader.commit(member, truncate_command(before, position))
        start: int = TRUNCATE_REPLY.unpack(reply)[0]
        return start

    async def retain(self, name: str, ms: int, size: int, records: int) -> int:
        """Limit what a log keeps (0: no limit), from now on; return its start afterwards. On the leader only; raises
        `NotLeader`, `Rejected`, `Refused` while too few nodes know how."""
        member = self._find(name)
        check_leader(member)
        append_log(member)
        await self._leader.require(member, PRODUCERS_VERSION)
        reply = await self._leader.commit(member, retain_command(ms, size, records))
        start: int = TRUNCATE_REPLY.unpack(reply)[0]
        return start

    async def open_producer(self, name: str, producer: int) -> int:
        """Return the highest sequence that a producer has written, 0 for a new one, whose appends the log takes from
        now on. On the leader only; raises `NotLeader`, `Refused` while too few nodes know how."""
        member = self._find(name)
        check_leader(member)
        machine = append_log(member)
        await self._leader.require(member, PRODUCERS_VERSION)
        # What an earlier run of the producer had acknowledged is applied here.
        await self._leader.read_index(member)
        last: int = msgpack.unpackb(machine.query(msgpack.packb(["producer", producer])))
        return last

    async def open_epoch(self, name: str, producer: int, incarnation: int, epoch: int) -> None:
        """Make a log take the frames of a fenced producer's epoch. On the leader only; raises `NotLeader`, a
        `LogyardError` of code `fenced` for one that is past, `Refused` while too few nodes know how, and for a log
        that takes no such frame: a keyed one, a partition that has ended."""
        state = await self.epoch_state(name, producer)
        machine = append_log(self._find(name))
        if machine.keys is not None:
            raise Refused(f"log {name!r} is keyed, and takes records with keys alone: none of a fenced producer")
        if machine.partition is not None and machine.partition.ended:
            raise Refused(f"log {name!r}: {machine.partition.end()}")
        if state is not None and ((incarnation, epoch) < state[:2] or state == (incarnation, epoch, False)):
            raise LogyardError(f"producer {producer} of log {name!r} is past epoch {epoch}", code="fenced")

    async def epoch_state(self, name: str, producer: int) -> tuple[int, int, bool] | None:
        """Return a fenced producer's incarnation, its epoch and whether that is open; None for a new one. On the leader
        only; raises `NotLeader`, `Refused` while too few nodes know how."""
        member = self._find(name)
        check_leader(member)
        machine = append_log(member)
        await self._leader.require(member, EPOCHS_VERSION)
        await self._leader.read_index(member)
        found = msgpack.unpackb(machine.query(msgpack.packb(["epoch", producer])))
        return None if found is None else (found[0], found[1], found[2])

    async def close_epoch(self, name: str, producer: int, incarnation: int, epoch: int) -> None:
        """Take no more frames of an epoch of a fenced producer. On the leader only; raises `NotLeader`, `Rejected`."""
        member = self._find(name)
        check_leader(member)
        append_log(member)
        await self._leader.require(member, EPOCHS_VERSION)
        await self._leader.commit(member, epoch_done_command(Epoch(producer, incarnation, epoch)))

    async def partition(self, name: str, command: bytes) -> bytes:
        """Commit what makes a log a topic's partition, or fences it; return the machine's reply. On the leader only;
        raises `NotLeader`, `Rejected`, `Refused` while too few nodes know how."""
        if not command or command[0] not in PARTITION_CODES:
            raise BadRequest("a partition's command fences, inherits, opens or adopts")
        member = self._find(name)
        check_leader(member)
        append_log(member)
        try:
            await self._leader.require(member, BOUNDED_VERSION)
        except Refused:
            await self._leader.require(member, PARTITIONS_VERSION)
        return bytes(await self._leader.commit(member, command))
