"""Reads of many logs at once: what there is, columns of records, offsets by time (see `client.scans`).

Answered from this node's own members as far as they have applied, so only what is committed. `log_rows` wakes no
hibernating group; a scan and a seek wake those they read. The loop is given back after each step of a scan, so that
a long one delays nobody. Called by `service.node`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

import trio

from logyard.engine.config import SystemConfig
from logyard.engine.entry import Unit, timestamp_of
from logyard.engine.host.engine import System
from logyard.engine.replica.member import RUNNING, Member
from logyard.engine.replica.reader import Located, Wanted
from logyard.engine.types import Buffer
from logyard.machines.log.machine import ANCHOR_BYTES, AppendLog
from logyard.machines.log.slices import Long, Slice
from logyard.payloads.reference import Position
from logyard.protocol.columns import LONG_UNIT, Columns, Extra
from logyard.protocol.errors import Corrupt, LogyardError, OutOfRange, Refused, UnknownGroup
from logyard.protocol.verbs import Range

from . import answers
from .log_reader import Walk, append_log, long_parts, packs_of

STEP_PACKS = 512
STEP_BYTES = 4 << 20
"""Packs, and their bytes, that are read before the loop is given back: a few milliseconds, and what a scan of metadata
holds in memory beside its answer."""
ROWS_STEP = 1000
LAST_ORDINAL = 1 << 62


async def log_rows(system: System, after: str, names: Sequence[str] | None, limit: int) -> list[list[Any]]:
    """Return rows of `client.scans.LogRow` of the append logs behind the name `after`, by name, at most `limit`."""
    chosen = sorted(name for name in (system.names if names is None else set(names)) if name > after)
    found: list[list[Any]] = []
    for number, name in enumerate(chosen):
        if number % ROWS_STEP == ROWS_STEP - 1:
            await trio.lowlevel.checkpoint()
        uid = system.names.get(name, 0)
        if uid in system.quiesced:
            row = system.quiesced.row(uid)
            if row.shape.machine == "log":
                found.append([name, uid, row.leader, row.start, row.end, 0, [*row.shape.voters, *row.shape.learners]])
        elif (member := system.members.get(uid)) is not None and member.state == RUNNING:
            machine = member.machine
            if isinstance(machine, AppendLog):
                size = ANCHOR_BYTES * len(machine.anchors) + sum(long.size for long in machine.long.values())
                members = sorted(member.raft.configuration.nodes())
                found.append([name, uid, member.raft.leader, machine.start, machine.end, size, members])
        if len(found) == limit:
            break
    return found


class Run(NamedTuple):
    """Records of one pack that were asked for; `larges` are bodies outside of it, `parts` those of a long payload."""

    located: Located
    slice: Slice
    skip: int
    records: int
    offset: int
    pack: Unit
    larges: list[Unit]
    long: Long | None
    parts: Sequence[Wanted]


class Scanning:
    """One scan: the columns so far, and what may still come."""

    def __init__(self, system: System, max_bytes: int, max_records: int, body_bytes: int | None) -> None:
        self.system = system
        self.columns = Columns()
        self.max_bytes = max_bytes
        self.max_records = max_records
        self.body_bytes = body_bytes

    @property
    def full(self) -> bool:
        """Whether the answer is complete."""
        return self.columns.size >= self.max_bytes or self.columns.rows >= self.max_records

    async def run(self, ranges: Sequence[Range]) -> tuple[dict[str, Any], list[Buffer]]:
        """Return the answer's header and sections."""
        outcomes: list[list[Any]] = []
        for number, one in enumerate(ranges):
            if self.full:
                break
            outcomes.append(await self._range(number, one))
        counts, parts = self.columns.finish()
        return {"node": self.system.node_id, "ranges": outcomes, **counts}, parts

    async def _range(self, number: int, wanted: Range) -> list[Any]:
        name, uid, offset, end = wanted
        start = stop = found = 0
        error = None
        try:
            member = member_of(self.system, name, uid)
            found = member.uid
            at: tuple[int, Position] | None = None
            while True:
                machine = append_log(member)
                if machine.keys is not None:
                    raise Refused(f"log {name!r} is keyed, which scans can't read yet: read it with the client")
                start, stop = machine.start, machine.end
                if not start <= offset <= stop:
                    why = f"log {name!r}: offset {offset} is outside of {start}..{stop}"
                    raise OutOfRange(why, start=start, end=stop)
                last = min(end, stop)
                if offset >= last or self.full:
                    break
                runs, following, at = self._locate(member, machine, offset, last, at)
                await self._read(member, number, runs)
                offset = following
        except LogyardError as refusal:
            error = {"code": refusal.code, "message": str(refusal), "retry": refusal.retry, "details": refusal.details}
        return [offset, start, stop, found, error]

    def _locate(
        self, member: Member, machine: AppendLog, offset: int, end: int, at: tuple[int, Position] | None
    ) -> tuple[list[Run], int, tuple[int, Position] | None]:
        """Return some runs from `offset` on, the offset behind them, and where the next step goes on. Raises
        `Corrupt`."""
        walk = Walk(self.system, member, machine, offset, at)
        left = min(self.max_records - self.columns.rows, end - offset)
        size = packed = 0
        room = self.max_bytes - self.columns.size
        runs: list[Run] = []
        for located, found in walk:
            if walk.offset <= offset:
                continue
            packs = list(packs_of(located.data))
            for piece in found:
                back = max(0, offset - piece.offset)
                if back >= piece.records or left <= 0 or (runs and size >= room):
                    continue
                records = min(piece.records - back, left)
                run = self._run(member, machine, located, piece, back, records, packs[piece.frame], room - size)
                runs.append(run)
                left -= run.records
                offset = run.offset + run.records
                size += self._weight(run)
                packed += run.pack.length
                if run.records < records:
                    size = max(size, room)
                    break
            if left <= 0 or size >= room or packed >= STEP_BYTES or len(runs) >= STEP_PACKS:
                break
        walk.verify()
        if not runs:
            raise Corrupt(f"log {walk.name}", offset, "a record", "nothing at its place")
        # Where this entry was not taken whole, the answer is full, and there is no next step.
        return runs, offset, (walk.offset, Position(walk.index, LAST_ORDINAL)) if offset == walk.offset else None

    def _run(
        self, member: Member, machine: AppendLog, located: Located, piece: Slice, back: int, records: int,
        packed: tuple[Unit, list[Unit]], room: int,
    ) -> Run:  # fmt: skip
        pack, larges = packed
        skip, offset = piece.skip + back, piece.offset + back
        long = machine.long.get(offset) if machine.long else None
        parts: Sequence[Wanted] = ()
        wanted: list[Unit] = []
        if self.body_bytes is not None:
            if long is not None and long.size <= self.body_bytes:
                parts = long_parts(self.system, member, long, 0, long.size)
            low = pack.first_ordinal + skip
            size = pack.length
            for unit in larges:
                if low <= unit.first_ordinal < low + records and unit.length <= self.body_bytes:
                    if size + unit.length > room and unit.first_ordinal > low:
                        # A frame of large bodies is cut where the answer is full.
                        records = unit.first_ordinal - low
                        break
                    size += unit.length
                    wanted.append(unit)
        return Run(located, piece, skip, records, offset, pack, wanted, long, parts)

    def _weight(self, run: Run) -> int:
        if self.body_bytes is None:
            # Its metadata is not known yet; most of a pack is.
            return min(run.pack.length, 64 * run.pack.records)
        return (
            run.pack.length + sum(unit.length for unit in run.larges) + (run.long.size if run.parts and run.long else 0)
        )

    async def _read(self, member: Member, number: int, runs: Sequence[Run]) -> None:
        wanted: list[Wanted] = []
        for run in runs:
            wanted.append(Wanted(run.located, run.pack, 0, run.pack.length))
            wanted += (Wanted(run.located, unit, 0, unit.length) for unit in run.larges)
            wanted += run.parts
        data = iter(await self.system.reader.read(member, wanted))
        for run in runs:
            pack = memoryview(next(data))
            first = run.pack.first_ordinal
            extras = [Extra(u.first_ordinal - first, u.number, u.length, u.hash, [next(data)]) for u in run.larges]
            if run.long is not None:
                extras.append(Extra(run.skip, LONG_UNIT, run.long.size, bytes(16), [next(data) for _ in run.parts]))
            located = run.located
            place = (run.offset, located.index, located.term, timestamp_of(located.data))
            self.columns.add(
                place, number, run.records, run.skip, pack, run.pack.records, run.pack.number, run.pack.hash,
                self.body_bytes is not None, extras,
            )  # fmt: skip


def member_of(system: System, name: str, uid: int) -> Member:
    """Return a group's member, woken. Raises `UnknownGroup`, also when the name is another group's than `uid`."""
    known = system.names.get(name, 0)
    if uid and known and known != uid:
        raise UnknownGroup(f"log {name!r} of uid {uid:016x} is gone: another one has its name", name=name)
    return system.member(name)


async def scan(
    system: System, ranges: Sequence[Range], max_bytes: int, max_records: int, body_bytes: int | None
) -> tuple[dict[str, Any], list[Buffer]]:
    """Return columns of records of `ranges`; see `client.scans.Scan`. What goes wrong with one range is its outcome."""
    config: SystemConfig = system.config
    await answers.take(min(max_bytes, config.poll_bytes_max))
    scanning = Scanning(system, min(max_bytes, config.poll_bytes_max), max_records, body_bytes)
    return await scanning.run(ranges)


async def seek(system: System, times: Sequence[tuple[str, int, int]]) -> list[int | dict[str, Any]]:
    """Return for each (log, uid, ms since 1970) the first offset stamped at or after it, or the log's end; or an
    error."""
    found: list[int | dict[str, Any]] = []
    for name, uid, stamp in times:
        try:
            member = member_of(system, name, uid)
            found.append(offset_at(system, member, append_log(member), stamp))
        except LogyardError as error:
            found.append({"code": error.code, "message": str(error), "retry": error.retry, "details": error.details})
        await trio.lowlevel.checkpoint()
    return found


def offset_at(system: System, member: Member, machine: AppendLog, stamp: int) -> int:
    """Return the first offset stamped at `stamp` (ms since 1970) or later, or the log's end. Raises `Corrupt`.

    Log time never goes back, so anchors are searched by halves and the way from the best one is walked.
    """
    places = [(machine.start, machine.start_position)]
    places += ((offset, Position(index, 0)) for offset, index in machine.anchors if offset > machine.start)

    def time_of(place: tuple[int, Position]) -> int:
        index = place[1].index
        for located in system.reader.payload_entries(member, index, min(index + 1, member.raft.applied)):
            return timestamp_of(located.data)
        return -1

    last = max(0, bisect_left(places, stamp, key=time_of) - 1)
    walk = Walk(system, member, machine, machine.start, places[last])
    for located, slices in walk:
        if slices and timestamp_of(located.data) >= stamp:
            walk.verify()
            return max(slices[0].offset, machine.start)
        if walk.offset >= machine.end:
            break
    walk.verify()
    return machine.end
