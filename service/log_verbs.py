"""The append log's verbs of a node: they need both the machine and the payload homes. `service.node.Node` has them.

`local` reads this member as it is, `leader` the leader, once it has applied what was committed before its term, without
asking anybody, `linearizable` after a ReadIndex round, `bounded` any member, once it has applied what was committed so
and so long ago (`engine.host.follower_reads`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack

from logyard.engine.config import SystemConfig
from logyard.engine.host.engine import System
from logyard.engine.replica.member import Member
from logyard.engine.replica.submit import Answer, check_leader
from logyard.engine.types import Buffer
from logyard.machines.log.command import TRUNCATE_REPLY, retain_command, truncate_command
from logyard.protocol.errors import BadRequest, LogyardError
from logyard.protocol.frame import Epoch, encode_frame, epoch_done_command
from logyard.protocol.verbs import Range

from . import log_audit, log_reader, log_scan
from .log_changes import LogChanges

PRODUCERS_VERSION = 2
"""Of the append log: the first one that knows producers and retention."""
EPOCHS_VERSION = 3
"""The first one that knows fenced producers."""


class LogVerbs:
    """Reads and changes of append logs, by group name."""

    system: System
    node_id: int
    config: SystemConfig
    log_changes: LogChanges

    async def consistent(self, name: str, consistency: str, staleness_s: float = 0.0, uid: int = 0) -> Member:
        """Return the member of a group, once a read of it is as consistent as that. `uid`: unless the name is another
        group's by now. Raises `NotLeader`, `UnknownGroup`, `Busy` when nobody can tell how old this member's state
        is."""
        member = log_scan.member_of(self.system, name, uid)
        if consistency == "leader":
            await self.system.leadership.led(member)
        elif consistency == "linearizable":
            check_leader(member)
            await self.system.leadership.read_index(member)
        elif consistency == "bounded":
            await self.system.follower_reads.within(member, staleness_s)
        elif consistency != "local":
            raise BadRequest(f"consistency {consistency!r} is not one of local, leader, linearizable, bounded")
        return member

    async def poll(
        self, name: str, offset: int, max_records: int, max_bytes: int, wait_s: float, bodies: bool, consistency: str,
        *, staleness_s: float = 0.0, since: int | None = None, uid: int = 0,
    ) -> tuple[dict[str, int], list[Buffer]]:  # fmt: skip
        """Return record blocks from `offset`, or, with `since` (ms since 1970), from the first record stamped then or
        later; the header says which offset that is."""
        member = await self.consistent(name, consistency, staleness_s, uid)
        if since is not None:
            machine = log_reader.append_log(member)
            offset = max(log_scan.offset_at(self.system, member, machine, since), machine.start)
        config = self.config
        header, blocks = await log_reader.poll(
            self.system, member, offset, min(max_records, config.entry_records_max),
            min(max_bytes, config.poll_bytes_max), min(wait_s, config.poll_wait_s_max), bodies,
        )  # fmt: skip
        return (header if since is None else {**header, "offset": offset}), blocks

    async def read_body(
        self, name: str, offset: int, start: int, stop: int | None, stored: bool = False
    ) -> Buffer | log_reader.Encoded:
        """Return bytes start..stop of one record's body, from this member; see `log_reader.read_body`."""
        return await log_reader.read_body(self.system, self.system.member(name), offset, start, stop, stored)

    async def log_rows(self, after: str, names: Sequence[str] | None, limit: int) -> list[list[Any]]:
        """Return this node's append logs, by name; wakes none."""
        return await log_scan.log_rows(self.system, after, names, limit)

    async def changed_logs(self, since: int) -> list[Any]:
        """Return this node's append logs that changed since a mark of an earlier answer; wakes none."""
        return await self.log_changes.since(since)

    async def scan(
        self, ranges: Sequence[Range], max_bytes: int, max_records: int, body_bytes: int | None
    ) -> tuple[dict[str, Any], list[Buffer]]:
        """Return columns of records of many logs, from the members on this node."""
        return await log_scan.scan(self.system, ranges, max_bytes, max_records, body_bytes)

    async def audit(self, name: str, uid: int, index: int, offset: int, max_bytes: int) -> dict[str, Any]:
        """Take a step of an audit of this node's copy of a log."""
        return await log_audit.audit(self.system, name, uid, index, offset, max_bytes)

    async def seek(self, times: Sequence[tuple[str, int, int]]) -> list[int | dict[str, Any]]:
        """Return offsets by time."""
        return await log_scan.seek(self.system, times)

    async def bounds(
        self, name: str, consistency: str = "local", *, staleness_s: float = 0.0, uid: int = 0
    ) -> dict[str, int]:
        """Start and end of an append log."""
        machine = log_reader.append_log(await self.consistent(name, consistency, staleness_s, uid))
        return {"start": machine.start, "end": machine.end, "node": self.node_id}

    async def truncate(self, name: str, before: int) -> int:
        """Drop the records before an offset; return the log's start. On the leader only; raises `NotLeader`,
        `Rejected`."""
        member = self.system.member(name)
        check_leader(member)
        machine = log_reader.append_log(member)
        if before > machine.end:
            await self.system.leadership.read_index(member)
        before = min(before, machine.end) if before <= machine.end else before
        position = log_reader.position_of(self.system, member, min(before, machine.end))
        reply = await self.command(member, truncate_command(before, position), reserved=True)
        start: int = TRUNCATE_REPLY.unpack(reply)[0]
        return start

    async def retain(self, name: str, ms: int, size: int, records: int) -> int:
        """Limit what a log keeps (0: no limit), from now on; return its start afterwards. On the leader only; raises
        `NotLeader`, `Rejected`, `Refused` while too few nodes know how."""
        member = self.system.member(name)
        check_leader(member)
        log_reader.append_log(member)
        await self.system.versions.require(member, PRODUCERS_VERSION)
        reply = await self.command(member, retain_command(ms, size, records), reserved=True)
        start: int = TRUNCATE_REPLY.unpack(reply)[0]
        return start

    async def open_producer(self, name: str, producer: int) -> int:
        """Return the highest sequence that a producer has written, 0 for a new one, whose appends the log takes from
        now on. On the leader only; raises `NotLeader`, `Refused` while too few nodes know how."""
        member = self.system.member(name)
        check_leader(member)
        machine = log_reader.append_log(member)
        await self.system.versions.require(member, PRODUCERS_VERSION)
        # What an earlier run of the producer had acknowledged is applied here.
        await self.system.leadership.read_index(member)
        last: int = msgpack.unpackb(machine.query(msgpack.packb(["producer", producer])))
        return last

    async def open_epoch(self, name: str, producer: int, incarnation: int, epoch: int) -> None:
        """Make a log take the frames of a fenced producer's epoch. On the leader only; raises `NotLeader`, a
        `LogyardError` of code `fenced` for one that is past, `Refused` while too few nodes know how."""
        state = await self.epoch_state(name, producer)
        if state is not None and ((incarnation, epoch) < state[:2] or state == (incarnation, epoch, False)):
            raise LogyardError(f"producer {producer} of log {name!r} is past epoch {epoch}", code="fenced")

    async def epoch_state(self, name: str, producer: int) -> tuple[int, int, bool] | None:
        """Return a fenced producer's incarnation, its epoch and whether that is open; None for a new one. On the leader
        only; raises `NotLeader`, `Refused` while too few nodes know how."""
        member = self.system.member(name)
        check_leader(member)
        machine = log_reader.append_log(member)
        await self.system.versions.require(member, EPOCHS_VERSION)
        await self.system.leadership.read_index(member)
        found = msgpack.unpackb(machine.query(msgpack.packb(["epoch", producer])))
        return None if found is None else (found[0], found[1], found[2])

    async def close_epoch(self, name: str, producer: int, incarnation: int, epoch: int) -> None:
        """Take no more frames of an epoch of a fenced producer. On the leader only; raises `NotLeader`, `Rejected`."""
        member = self.system.member(name)
        check_leader(member)
        log_reader.append_log(member)
        await self.system.versions.require(member, EPOCHS_VERSION)
        await self.command(member, epoch_done_command(Epoch(producer, incarnation, epoch)), reserved=True)

    async def command(self, member: Member, command: bytes, *, reserved: bool = False) -> bytes:
        """Commit one command without payload and return the machine's reply. `reserved`: it frees space."""
        (frame,) = encode_frame([(b"", None)], command=command)
        return await self.commit(member, [frame], reserved=reserved)

    async def commit(self, member: Member, frame: Sequence[Buffer], *, reserved: bool = False) -> bytes:
        """Commit one frame from inside this process. Raises what the frame's reply says."""
        sink = Answer()
        whole = memoryview(frame[0] if len(frame) == 1 else b"".join(frame))
        self.system.commands.submit(member.uid, whole, sink, 0, reserved=reserved)
        return await sink.wait()
