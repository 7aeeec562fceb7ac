"""An audit of one group's own copy on this node: every live unit read from disk and hashed, never mended from a peer.

In steps of bounded bytes; between two of them the group may go on. A unit counts as live by the group's liveness, and
what the machine needs is compared with it. Of an append log the offsets are counted, too, so that a lost entry shows by
itself. Made by `service.node`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import trio

from logyard.engine.entry import Unit, frames_of, unit_hash, units_of
from logyard.engine.ports import StorePort
from logyard.engine.replica.member import Member
from logyard.engine.replica.reader import Located, Pins
from logyard.engine.types import Buffer
from logyard.machines.log import AppendLog
from logyard.machines.log.slices import slices
from logyard.payloads.layout import StoredEntry
from logyard.protocol.errors import Gone, LogyardError

from .scan import Find

BATCH_BYTES = 4 << 20
STEP_BYTES_MAX = 256 << 20
PROBLEMS = 20
"""Problems that are spelt out in one answer; the rest is counted."""
MASK = (1 << 128) - 1
RECORDS_MAX = 1 << 31
"""More records than any entry has."""


class Stored(NamedTuple):
    """Where this node has payloads, and nothing that a peer would mend."""

    store: StorePort
    """The generations."""
    entries: Callable[[Member, int, int], Iterator[Located]]
    """The entries with payload from one index to another."""
    read_wal: Callable[[int, int, int], Buffer]
    """Bytes of a WAL file: its number, from where, how many."""
    pins: Pins


class LogAudit:
    """Audits of this node's copies. `compare(member, index)` counts the ranges that the machine needs and released."""

    def __init__(self, node_id: int, find: Find, stored: Stored, compare: Callable[[Member, int], int]) -> None:
        self._node_id = node_id
        self._find = find
        self._stored = stored
        self._compare = compare

    async def audit(self, name: str, uid: int, index: int, offset: int, max_bytes: int) -> dict[str, Any]:
        """Take one step from entry `index` (0: the first one) on; see `client.scans.AuditStep`. Raises `UnknownGroup`,
        `Gone` for a member that is below its payload floor, `GroupStopped`."""
        member = self._find(name, uid)
        machine = member.machine if isinstance(member.machine, AppendLog) else None
        if not member.resolves:
            raise Gone(f"{name!r} on node {self._node_id} has not caught up with a release yet; audit it again later")
        step = Step(self._stored, member, machine, offset)
        if not index and (found := self._compare(member, member.raft.applied)):
            step.needs_released(found)
        await step.run(index, min(max_bytes, STEP_BYTES_MAX))
        return step.fields


class Step:
    """One step over one member."""

    def __init__(self, stored: Stored, member: Member, machine: AppendLog | None, offset: int) -> None:
        self.stored = stored
        self.member = member
        self.machine = machine
        self.offset = offset
        self.fields: dict[str, Any] = {
            "next": 0, "offset": offset, "entries": 0, "units": 0, "bytes": 0, "dead": 0, "missing": 0, "corrupt": 0,
            "mismatches": 0, "digest": bytes(16), "problems": [], "applied": member.raft.applied,
            "start": 0 if machine is None else machine.start, "end": 0 if machine is None else machine.end,
        }  # fmt: skip
        self._digest = 0
        self._blind = False

    def problem(self, kind: str, text: str) -> None:
        """Note one more problem; `kind` is a field that counts."""
        self.fields[kind] += 1
        if len(self.fields["problems"]) < PROBLEMS:
            self.fields["problems"].append(f"{kind}: {text}")

    def needs_released(self, ranges: int) -> None:
        """Note that the machine needs what was released."""
        self.problem("mismatches", f"the machine needs {ranges} ranges, some of which are released")
        self.fields["mismatches"] = ranges

    async def run(self, index: int, max_bytes: int) -> None:
        """Walk, check, and say where to go on."""
        batch: list[tuple[Located, Unit]] = []
        size = last = 0
        machine = self.machine
        marks: list[tuple[int, int]] = []
        if machine is not None:
            start = machine.start_position.index
            marks = [(at, offset) for offset, at in machine.anchors if at > max(index - 1, start)]
        for located, present in self._entries(index):
            last = located.index
            if machine is not None:
                self._count(machine, located, marks)
            units = units_of(located.data)
            places = [(unit.number, unit.first_ordinal, unit.records) for unit in units]
            live = self.member.liveness.live_units(last, places)
            self.fields["entries"] += 1
            for unit in units:
                if unit.number in live:
                    batch.append((located, unit))
                    size += unit.length
                elif present is None or unit.number in present:
                    self.fields["dead"] += unit.length
            if size >= BATCH_BYTES:
                await self._check(batch)
                batch, size = [], 0
                if self.fields["bytes"] >= max_bytes:
                    self.fields["next"] = last + 1
                    break
        await self._check(batch)
        still = machine is not None and machine.end == self.fields["end"] and not self._blind
        if machine is not None and still and not self.fields["next"] and self.offset != machine.end:
            self.problem("missing", f"the entries on this node end at offset {self.offset}, not {machine.end}")
        self.fields["offset"] = self.offset
        self.fields["digest"] = self._digest.to_bytes(16, "big")

    def _entries(self, index: int) -> Iterator[tuple[Located, set[int] | None]]:
        """Yield entries with payload up to what was applied at the beginning, and the units that are stored of each
        (None: all)."""
        member, last = self.member, self.fields["applied"]
        at = max(index, 1)
        while at <= last:
            home = self.stored.store.home(member.uid, at)
            if home is not None:
                for stored in self._stored(at, min(last, home.last)):
                    kept = {unit.number for unit in stored.units}
                    yield Located(stored.index, stored.term, stored.data, None, home), kept
                at = min(last, home.last) + 1
                continue
            later = [home.first for home in self.stored.store.homes(member.uid) if home.first > at]
            stop = min([last, *(first - 1 for first in later)])
            for located in self.stored.entries(member, at, stop):
                yield located, None
            at = stop + 1

    def _stored(self, first: int, last: int) -> Iterator[StoredEntry]:
        """Yield entries in a generation; past a damaged one, one by one."""
        scan, uid, at = self.stored.store.scan, self.member.uid, first
        try:
            for stored in scan(uid, first, last):
                yield cast(StoredEntry, stored)
                at = stored.index + 1
            return
        except LogyardError:
            pass
        for index in range(at, last + 1):
            try:
                for stored in scan(uid, index, index):
                    yield cast(StoredEntry, stored)
            except LogyardError as error:
                if self.member.liveness.live_units(index, [(0, 0, RECORDS_MAX)]):
                    self.problem("corrupt", f"entry {index}: {error}")
                # It has some records that nobody can count now.
                self._blind = True

    def _count(self, machine: AppendLog, located: Located, marks: list[tuple[int, int]]) -> None:
        """Count offsets as a reader would: a lost entry shows where the count does not meet an anchor."""
        start, index = machine.start_position, located.index
        if machine.keys is not None:
            for one in machine.keys.slices(index, frames_of(located.data)):
                self.offset = one.offset + one.records
            return
        if index < start.index:
            self.offset = machine.start
            return
        self.offset = max(self.offset, machine.start)
        before = self.offset
        ordinal = start.ordinal if index == start.index else 0
        while marks and marks[0][0] <= index:
            at, known = marks.pop(0)
            if (at < index or known != before) and not self._blind:
                self.problem("missing", f"entries before {index}: offset {known} is at {before}")
            before, self._blind = known, False
        _, self.offset = slices(frames_of(located.data), before, ordinal, machine.holes_of(index))

    async def _check(self, batch: Sequence[tuple[Located, Unit]]) -> None:
        """Read and hash some units, in a thread; their homes stay meanwhile."""
        pins = self.stored.pins
        homes = {home for located, _ in batch if (home := _home(located)) is not None}
        for home in homes:
            pins.pin(home)
        try:
            found = await trio.to_thread.run_sync(self._hash_all, batch)
        finally:
            for home in homes:
                pins.unpin(home)
        for (located, unit), problem in zip(batch, found, strict=True):
            if problem is not None and not self._lives(located, unit):
                continue  # Released in the meantime.
            self.fields["units"] += 1
            self.fields["bytes"] += unit.length
            self._digest = (self._digest + int.from_bytes(unit.hash, "big")) & MASK
            if problem is not None:
                self.problem(problem[0], f"unit {unit.number} of entry {located.index}: {problem[1]}")

    def _lives(self, located: Located, unit: Unit) -> bool:
        return bool(self.member.liveness.live_units(located.index, [(0, unit.first_ordinal, unit.records)]))

    def _hash_all(self, batch: Sequence[tuple[Located, Unit]]) -> list[tuple[str, str] | None]:
        return [self._hash(located, unit) for located, unit in batch]

    def _hash(self, located: Located, unit: Unit) -> tuple[str, str] | None:
        """Return what is wrong with a unit: (kind, text)."""
        uid, entry = self.member.uid, located.entry
        try:
            if entry is None:
                data = self.stored.store.read_unit(uid, located.index, unit.number, 0, unit.length)
            elif entry.file:
                data = self.stored.read_wal(entry.file, entry.offset + unit.offset, unit.length)
            elif entry.bodies:
                data = entry.bodies[unit.number]
            else:
                return "missing", "it is not stored here"
        except Gone as error:
            return "missing", str(error)
        except LogyardError as error:
            return "corrupt" if error.code == "corrupt" else "missing", str(error)
        if len(data) != unit.length or unit_hash(uid, located.index, located.term, unit.number, data) != unit.hash:
            where = f"WAL file {entry.file} at byte {entry.offset + unit.offset}" if entry is not None else "generation"
            return "corrupt", f"{where}: it does not match its hash"
        return None


def _home(located: Located) -> tuple[str, int] | None:
    if located.home is not None:
        return "generation", located.home.generation
    return ("wal", located.entry.file) if located.entry is not None and located.entry.file else None
