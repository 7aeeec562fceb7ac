"""Reads of many logs at once: what there is, columns of records, offsets by time (see `client.scans`).

Answered from this node's own members as far as they have applied, so only what is committed. `log_rows` wakes no
hibernating group; a scan and a seek wake those they read. The loop is given back after each step of a scan, so that
a long one delays nobody. Made by `service.node`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import trio

from logyard.engine.entry import Unit, timestamp_of
from logyard.engine.quiesce.quiesced_table import QuiescedTable
from logyard.engine.replica.member import RUNNING, Member
from logyard.engine.replica.reader import Located, Wanted
from logyard.engine.types import Buffer
from logyard.machines.log.machine import ANCHOR_BYTES, AppendLog
from logyard.machines.log.slices import Long, Slice
from logyard.payloads.reference import Position
from logyard.protocol.columns import LONG_UNIT, Columns, Extra
from logyard.protocol.errors import Corrupt, LogyardError, OutOfRange, Refused
from logyard.protocol.verbs import Range

from ..door import answers
from .reader import Payloads, Walk, append_log, long_parts, packs_of

STEP_PACKS = 512
STEP_BYTES = 4 << 20
"""Packs, and their bytes, that are read before the loop is given back: a few milliseconds, and what a scan of metadata
holds in memory beside its answer."""
ROWS_STEP = 1000
LAST_ORDINAL = 1 << 62


Find = Callable[[str, int], Member]
"""Gives a group's member, woken; raises `UnknownGroup`, also when the name is another group's than that uid (0:
any)."""


class Groups(NamedTuple):
    """This node's groups, by name."""

    names: Mapping[str, int]
    members: Mapping[int, Member]
    quiesced: QuiescedTable
    find: Find


class PayloadsOfMany(Payloads, Protocol):
    """`Payloads`, and those of several members at once."""

    async def read_all(self, parts: Sequence[tuple[Member, Sequence[Wanted]]]) -> list[list[Buffer] | LogyardError]:
        """Return what `read` does of each member, or why that one's can't be read."""
        ...


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


class Step(NamedTuple):
    """Runs that are located and not read yet, of range `number`, which began at `offset`; `outcome` is that range's."""

    member: Member
    number: int
    offset: int
    runs: list[Run]
    outcome: list[Any]


class Scanning:
    """One scan: the columns so far, and what may still come. What is located of several logs is read at once."""

    def __init__(
        self, find: Find, payloads: PayloadsOfMany, max_bytes: int, max_records: int, body_bytes: int | None
    ) -> None:
        self._find = find
        self._payloads = payloads
        self.columns = Columns()
        self.max_bytes = max_bytes
        self.max_records = max_records
        self.body_bytes = body_bytes
        self._steps: list[Step] = []
        # Of the steps: rows, bytes of the answer by estimate, packs and their bytes.
        self._rows = self._size = self._packs = self._packed = 0

    @property
    def full(self) -> bool:
        """Whether the answer is complete, with what is located."""
        return self.columns.size + self._size >= self.max_bytes or self.columns.rows + self._rows >= self.max_records

    async def run(self, ranges: Sequence[Range]) -> tuple[list[list[Any]], dict[str, Any], list[Buffer]]:
        """Return what came of each range, and of their columns the counts and sections."""
        outcomes: list[list[Any]] = []
        for number, one in enumerate(ranges):
            if self.full:
                await self._read()
                if self.full:
                    break
            outcomes.append([one[2], 0, 0, 0, None])
            await self._range(number, one, outcomes[-1])
        await self._read()
        counts, parts = self.columns.finish()
        return outcomes, counts, parts

    async def _range(self, number: int, wanted: Range, outcome: list[Any]) -> None:
        """Locate a range's records, and read where enough is located. `outcome`: (next, start, end, uid, error)."""
        name, uid, offset, end = wanted
        try:
            member = self._find(name, uid)
            outcome[3] = member.uid
            at: tuple[int, Position] | None = None
            while outcome[4] is None:
                machine = append_log(member)
                if machine.keys is not None:
                    raise Refused(f"log {name!r} is keyed, which scans can't read yet: read it with the client")
                outcome[1], outcome[2] = start, stop = machine.start, machine.end
                if not start <= offset <= stop:
                    why = f"log {name!r}: offset {offset} is outside of {start}..{stop}"
                    raise OutOfRange(why, start=start, end=stop)
                last = min(end, stop)
                if offset >= last:
                    break
                if self.full:
                    # By estimate, perhaps.
                    await self._read()
                    if self.full:
                        break
                    continue
                runs, following, at = self._locate(member, machine, offset, last, at)
                self._add(Step(member, number, offset, runs, outcome))
                outcome[0] = offset = following
                if self._packed >= STEP_BYTES or self._packs >= STEP_PACKS:
                    await self._read()
        except LogyardError as refusal:
            outcome[4] = plain_error(refusal)

    def _add(self, step: Step) -> None:
        self._steps.append(step)
        for run in step.runs:
            self._rows += run.records
            self._size += self._weight(run)
            self._packed += run.pack.length
        self._packs += len(step.runs)

    def _locate(
        self, member: Member, machine: AppendLog, offset: int, end: int, at: tuple[int, Position] | None
    ) -> tuple[list[Run], int, tuple[int, Position] | None]:
        """Return some runs from `offset` on, the offset behind them, and where the next step goes on. Raises
        `Corrupt`."""
        walk = Walk(self._payloads, member, machine, offset, at)
        left = min(self.max_records - self.columns.rows - self._rows, end - offset)
        size, packed = 0, self._packed
        room = self.max_bytes - self.columns.size - self._size
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
            if left <= 0 or size >= room or packed >= STEP_BYTES or self._packs + len(runs) >= STEP_PACKS:
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
                parts = long_parts(self._payloads, member, long, 0, long.size)
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

    async def _read(self) -> None:
        """Read what is located, of all logs at once, and give the loop back. Where that fails, a range ends in front of
        it."""
        steps, self._steps = self._steps, []
        if not steps:
            return
        self._rows = self._size = self._packs = self._packed = 0
        found = await self._payloads.read_all([(step.member, _wanted(step.runs)) for step in steps])
        for step, data in zip(steps, found, strict=True):
            if step.outcome[4] is not None and step.offset >= step.outcome[0]:
                # Behind a step of the same range that failed.
                continue
            if isinstance(data, LogyardError):
                step.outcome[0], step.outcome[4] = step.offset, plain_error(data)
            else:
                self._keep(step.number, step.runs, data)
        await trio.lowlevel.checkpoint()

    def _keep(self, number: int, runs: Sequence[Run], read: Sequence[Buffer]) -> None:
        data = iter(read)
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


def _wanted(runs: Sequence[Run]) -> list[Wanted]:
    wanted: list[Wanted] = []
    for run in runs:
        wanted.append(Wanted(run.located, run.pack, 0, run.pack.length))
        wanted += (Wanted(run.located, unit, 0, unit.length) for unit in run.larges)
        wanted += run.parts
    return wanted


def plain_error(error: LogyardError) -> dict[str, Any]:
    """Return an error as an answer has it."""
    return {"code": error.code, "message": str(error), "retry": error.retry, "details": error.details}


class LogScan:
    """Answers about many logs. `bytes_max` bounds one of them. `since(member, ms since 1970)` finds the first offset of
    a time (`LogReader.offset_since`)."""

    def __init__(
        self,
        node_id: int,
        bytes_max: int,
        groups: Groups,
        payloads: PayloadsOfMany,
        since: Callable[[Member, int], Awaitable[int]],
    ) -> None:
        self._since = since
        self._node_id = node_id
        self._bytes_max = bytes_max
        self._groups = groups
        self._payloads = payloads

    async def log_rows(self, after: str, names: Sequence[str] | None, limit: int) -> list[list[Any]]:
        """Return rows of `client.scans.LogRow` of the append logs behind the name `after`, by name, at most `limit`."""
        here = self._groups
        chosen = sorted(name for name in (here.names if names is None else set(names)) if name > after)
        found: list[list[Any]] = []
        for number, name in enumerate(chosen):
            if number % ROWS_STEP == ROWS_STEP - 1:
                await trio.lowlevel.checkpoint()
            uid = here.names.get(name, 0)
            if uid in here.quiesced:
                row = here.quiesced.row(uid)
                if row.shape.machine == "log":
                    found.append(
                        [name, uid, row.leader, row.start, row.end, 0, [*row.shape.voters, *row.shape.learners]]
                    )
            elif (member := here.members.get(uid)) is not None and member.state == RUNNING:
                machine = member.machine
                if isinstance(machine, AppendLog):
                    size = ANCHOR_BYTES * len(machine.anchors) + sum(long.size for long in machine.long.values())
                    members = sorted(member.raft.configuration.nodes())
                    found.append([name, uid, member.raft.leader, machine.start, machine.end, size, members])
            if len(found) == limit:
                break
        return found

    async def scan(
        self, ranges: Sequence[Range], max_bytes: int, max_records: int, body_bytes: int | None
    ) -> tuple[dict[str, Any], list[Buffer]]:
        """Return columns of records of `ranges`; see `client.scans.Scan`. What goes wrong with one range is its
        outcome."""
        max_bytes = min(max_bytes, self._bytes_max)
        await answers.take(max_bytes)
        scanning = Scanning(self._groups.find, self._payloads, max_bytes, max_records, body_bytes)
        outcomes, counts, parts = await scanning.run(ranges)
        return {"node": self._node_id, "ranges": outcomes, **counts}, parts

    async def seek(self, times: Sequence[tuple[str, int, int]]) -> list[int | dict[str, Any]]:
        """Return for each (log, uid, ms since 1970) the first offset stamped at or after it, or the log's end; or an
        error."""
        found: list[int | dict[str, Any]] = []
        for name, uid, stamp in times:
            try:
                member = self._groups.find(name, uid)
                found.append(await self._since(member, stamp))
            except LogyardError as error:
                found.append(plain_error(error))
            await trio.lowlevel.checkpoint()
        return found
