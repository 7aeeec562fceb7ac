"""Payloads of one group: every unit that lives is found at its home and hashed, and its counters are recounted.

Invariant: what must be here is what lives after the whole log is applied (invariant 4); what is dead may be here or
not, and a member below its payload floor may lack what it likes. Called by `service.check.process` and `reading`.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from pathlib import Path

from logyard.engine.disk.door import Disk
from logyard.engine.entry import Entry, Unit, frames_of, unit_hash, units_of
from logyard.engine.ranges import subtract, union
from logyard.engine.recovery.inspect import Facts, Wal
from logyard.machines.log import AppendLog
from logyard.machines.log.slices import slices
from logyard.payloads.generation import Generation
from logyard.payloads.homes import Home
from logyard.payloads.layout import StoredEntry
from logyard.payloads.ledger import Marks
from logyard.protocol.errors import GenerationFailed, PayloadCorrupt, PayloadError

from .files import Segments, wal_path
from .generations import Generations
from .groups import RECORDS_MAX, GroupLog, in_order
from .report import DAMAGE, UNKNOWN, Report, lacks


def check_payloads(
    group: GroupLog, directory: Path, wal: Wal, segments: Segments, generations: Generations, facts: Facts,
    report: Report,
) -> dict[str, tuple[int, int]]:  # fmt: skip
    """Check everything of one group that must be here. Return, by WAL file and generation, the bytes of the group's
    payloads that live there, and of all that are stored there."""
    checking = _Group(group, directory, wal, segments, generations, facts, report)
    try:
        for home in checking.homes:
            checking.home(home)
        for _, entry, _, _ in in_order(group, segments):
            if entry is not None:
                checking.entry(entry)
        checking.lost()
        checking.needed()
        checking.holes()
        checking.counters()
    finally:
        checking.close()
    return {path: (live, stored) for path, (live, stored) in checking.space.items()}


class _Group:
    """One group's payloads."""

    def __init__(
        self, group: GroupLog, directory: Path, wal: Wal, segments: Segments, generations: Generations,
        facts: Facts, report: Report,
    ) -> None:  # fmt: skip
        self.group = group
        self.uid = group.spec.uid
        self.homes = generations.homes.get(self.uid, [])
        self._directory = directory
        self._wal = wal
        self._segments = segments
        self._generations = generations
        self._facts = facts
        self._report = report
        self._starts = [home.first for home in self.homes]
        self._seen: set[int] = set()
        self._terms: dict[int, int] = {}
        self._covered: list[tuple[int, int]] = [(home.first, home.last) for home in self.homes]
        self._fds: dict[int, int] = {}
        self._leaked: dict[int, int] = {}
        self.space: dict[str, list[int]] = {}
        if not group.resolves:
            text = f"below its payload floor ({group.floor}, its log ends at {group.last}): payloads may be missing"
            report.warning("floor", text, path="meta", group=group.name)

    def close(self) -> None:
        """Close the WAL files."""
        for fd in self._fds.values():
            os.close(fd)

    def _live(self, index: int, units: list[Unit]) -> set[int]:
        places = [(unit.number, unit.first_ordinal, unit.records) for unit in units]
        return self.group.live_at_end.live_units(index, places)

    def _missing(self, text: str, path: str) -> None:
        """Report a live payload that is not where it should be, or one that may have died where what lives is not
        known."""
        if self.group.resolves:
            self._report.add(self._severity, "payload", text, path=path, group=self.group.name)

    @property
    def _severity(self) -> str:
        return UNKNOWN if self.group.unknown else DAMAGE

    def lost(self) -> None:
        """Report what went with a generation before the last start, as far as its entries are not in the log any
        more."""
        for first, last in subtract(self._generations.lost.get(self.uid, ()), union(self._covered)):
            if self.group.live_at_end.live_within((first, 0), (last + 1, 0)):
                self._missing(f"payloads of entries {first} to {last} were lost with their generation", "payloads")

    def _takes(self, path: str, live: int, stored: int) -> None:
        found = self.space.setdefault(path, [0, 0])
        found[0] += live
        found[1] += stored

    # Generations

    def home(self, home: Home) -> None:
        """Check all entries of one home: what lives is there and verifies."""
        generation = self._generations.get(home.generation)
        path = self._generations.data(home.generation)
        if generation is None:
            gone = "set aside" if home.generation in self._generations.aside else "gone or unreadable"
            text = f"payloads of entries {home.first} to {home.last} are lost: generation {home.generation} is {gone}"
            self._missing(text, self._generations.path(home.generation))
            return
        if (home.generation, home.run, self.uid) not in self._generations.marks:
            text = f"the home of entries {home.first} to {home.last} has no counters: it would be dropped as dead"
            self._report.damage("counter", text, path="meta", group=self.group.name)
        at = home.first
        while at <= home.last:
            try:
                for stored in generation.scan(home.run, self.uid, at, home.last):
                    at = stored.index + 1
                    self._seen.add(stored.index)
                    self._stored(generation, home, stored, path)
                return
            except PayloadCorrupt as error:
                self._seen.add(error.index)
                if not self.group.live_at_end.is_entry_dead(error.index, RECORDS_MAX):
                    self._missing(error.what + " does not verify", path)
                if not at <= error.index <= home.last:
                    return
                at = error.index + 1
            except GenerationFailed as error:
                if lacks(error):
                    raise
                self._missing(f"entries {at} to {home.last}: {error.reason}", path)
                return

    def _stored(self, generation: Generation, home: Home, stored: StoredEntry, path: str) -> None:
        index = stored.index
        self._terms[index] = stored.term
        term = self.group.log.term(index) or 0
        if term and term != stored.term:
            text = f"entry {index} is of term {stored.term} here and of term {term} in the log"
            self._report.damage("payload", text, path=path, group=self.group.name)
            return
        units = units_of(stored.data)
        live = self._live(index, units)
        present = {unit.number for unit in stored.units}
        self._marked(home, index, units, live, present)
        kept = [unit for unit in units if unit.number in present]
        self._takes(path, sum(unit.length for unit in kept if unit.number in live), sum(unit.length for unit in kept))
        for unit in units:
            if unit.number not in live:
                continue
            if unit.number not in present:
                self._missing(f"unit {unit.number} of entry {index} lives and is not stored", path)
                continue
            try:
                body = stored.pack(unit.number)
                data = generation.read_unit(home.run, self.uid, index, unit.number) if body is None else body
            except PayloadError as error:
                if lacks(error):
                    raise
                where, text = self._generations.damaged(generation, str(error))
                self._missing(f"unit {unit.number} of entry {index}: {text}", where)
                continue
            self._hash(index, stored.term, unit, data, f"unit {unit.number} of entry {index}", path)

    def _marked(self, home: Home, index: int, units: list[Unit], live: set[int], present: set[int]) -> None:
        """Report what lives and is counted as dead. The other way round is a leak, unless a start will mark it
        again."""
        group = self.group
        ledger = self._generations.ledger(home.generation, home.run, self.uid)
        marks = self._generations.marks.get((home.generation, home.run, self.uid))
        if ledger is None or marks is None or not group.resolves:
            return
        settled = group.snapshot is not None and index <= group.snapshot.index
        for unit in units:
            if unit.number not in present:
                continue
            dead = marks.is_dead(ledger.at(index, unit.number))
            if dead and unit.number in live:
                text = f"unit {unit.number} of entry {index} lives and is counted as dead"
                self._report.add(self._severity, "counter", text, path="meta", group=group.name)
            elif not dead and settled and not group.live.unit_is_live(index, unit.first_ordinal, unit.records):
                self._leaked[home.generation] = self._leaked.get(home.generation, 0) + unit.length

    def _hash(self, index: int, term: int, unit: Unit, data: bytes | memoryview, where: str, path: str) -> None:
        if len(data) != unit.length or unit_hash(self.uid, index, term, unit.number, data) != unit.hash:
            self._missing(f"{where} does not match its hash", path)
            return
        self._report.count("units")
        self._report.count("bytes", unit.length)

    # The WAL

    def _home_of(self, index: int) -> Home | None:
        at = bisect_right(self._starts, index) - 1
        return self.homes[at] if at >= 0 and self.homes[at].last >= index else None

    def entry(self, entry: Entry) -> None:
        """Check an entry of the log: its payload is in its generation, or else in its WAL file."""
        index = entry.index
        self._terms[index] = entry.term
        if self._covered and self._covered[-1][1] + 1 == index:
            self._covered[-1] = (self._covered[-1][0], index)
        else:
            self._covered.append((index, index))
        if not entry.body_bytes:
            return
        if entry.tombstone:
            if entry.tombstone > self.group.floor:
                text = f"entry {index} came without payload and raises the floor to {entry.tombstone}; the floor is "
                path = wal_path(entry.file) if entry.file else "meta"
                self._report.damage("floor", text + str(self.group.floor), path=path, group=self.group.name)
            return
        units = units_of(entry.data)
        live = self._live(index, units)
        if self._home_of(index) is None and entry.file in self._wal.sizes:
            living = sum(unit.length for unit in units if unit.number in live)
            self._takes(wal_path(entry.file), living, entry.body_bytes)
        if not live:
            return
        home = self._home_of(index)
        if home is not None:
            if index not in self._seen and self._generations.get(home.generation) is not None:
                text = f"entry {index} lives and is not in its generation"
                self._missing(text, self._generations.data(home.generation))
            return
        fd = self._file(entry.file)
        if fd is None:
            self._missing(f"entry {index} lives, and its file is gone", wal_path(entry.file))
            return
        for unit in units:
            if unit.number in live:
                at = entry.offset + unit.offset
                where = f"at byte {at}: unit {unit.number} of entry {index}"
                try:
                    data = Disk().read(fd, unit.length, at)
                except OSError as error:
                    if lacks(error):
                        raise
                    self._missing(f"{where}: {error.strerror}", wal_path(entry.file))
                    continue
                self._hash(index, entry.term, unit, data, where, wal_path(entry.file))

    def _file(self, number: int) -> int | None:
        """Return the descriptor of a WAL file that is a home: one without a segment, or one that the meta store
        names."""
        fd = self._fds.get(number)
        if fd is None:
            home = number > self._facts.flushed or number in self._facts.wal_files
            if not home or number not in self._wal.sizes:
                return None
            fd = self._fds[number] = Disk().open_file(str(self._directory / wal_path(number)))
        return fd

    # The whole

    def needed(self) -> None:
        """Check that every entry whose payload the group's state names is somewhere: other entries leave no trace when
        they had none (sessions that begin and end, one a term, changes of members)."""
        group = self.group
        if group.replay is None or not group.resolves or not group.whole:
            return
        for first, end in group.replay.named():
            for index in range(max(first, 1), end):
                if index in self._terms or index in self._seen or group.live_at_end.is_entry_dead(index, RECORDS_MAX):
                    continue
                home = self._home_of(index)
                if home is None or self._generations.get(home.generation) is not None:
                    path = self._generations.data(home.generation) if home is not None else "meta"
                    self._missing(f"the payload of entry {index} is needed, and nothing is known of it", path)

    def holes(self) -> None:
        """Report stretches that live by the snapshot and of which nothing is known. Entries without payload leave such
        ones; where a state names ranges and not entries, a stretch is a loss if those can't explain it."""
        group = self.group
        if group.snapshot is None or not group.resolves or not group.whole:
            return
        configurations = group.image.state.extra.get("configurations") or [[0, 0, b""]]
        plain = len(configurations) == 1 and configurations[0][0] == 0
        covered = sorted(self._covered)
        known = sorted(self._terms)
        ranges = group.replay.spans() if group.replay is not None else [(0, group.last + 1)]
        for live in group.live_at_end.live_ranges(group.snapshot.index):
            at = max(live.first.index, 1)
            stop = live.end.index if live.end.ordinal else live.end.index - 1
            for first, last in [*(pair for pair in covered if pair[1] >= at), (stop + 1, stop + 1)]:
                low, high = at, min(first - 1, stop)
                if low <= high and any(begin <= high and low < end for begin, end in ranges):
                    self._hole(low, high, known, plain)
                at = max(at, last + 1)
                if at > stop:
                    break

    def _hole(self, first: int, last: int, known: list[int], plain: bool) -> None:
        group = self.group
        assert group.snapshot is not None
        at = bisect_right(known, first)
        low = self._terms[known[at - 1]] if at else 0
        high = self._terms[known[at]] if at < len(known) else group.snapshot.term
        log = group.replay is not None and isinstance(group.replay.machine, AppendLog)
        if last - first + 1 <= high - low + 1 or (log and self._adds_up()):
            return
        text = f"entries {first} to {last} live by the snapshot, and nothing is known of them"
        if not plain:
            text += "; some may be changes of members"
            self._report.warning("payload", text, path="meta", group=group.name)
        elif log:
            self._missing(text, "meta")
        else:
            text += "; they may have had no payload"
            self._report.unknown("payload", text, path="meta", group=group.name)

    def _adds_up(self) -> bool:
        """Return whether an append log's records are all there, by their number: then what leaves no trace had none.
        (The engine's own commands have no payload either: sessions that begin and end.)"""
        machine = self.group.replay.machine if self.group.replay is not None else None
        if not isinstance(machine, AppendLog):
            return False
        found: dict[int, bytes] = {}
        for home in self.homes:
            try:
                generation = self._generations.reader(home.generation)
                for stored in generation.scan(home.run, self.uid, home.first, home.last, bodies=False):
                    found[stored.index] = stored.data
            except (PayloadError, OSError) as error:
                if lacks(error):
                    raise
                return False
        for index, entry, _, _ in in_order(self.group, self._segments):
            if entry is not None:
                found.setdefault(index, entry.data)
        start, offset = machine.start_position, machine.start
        for index in sorted(found):
            if index >= start.index:
                ordinal = start.ordinal if index == start.index else 0
                _, offset = slices(frames_of(found[index]), offset, ordinal, machine.holes_of(index))
        return offset == machine.end

    def counters(self) -> None:
        """Check that counters equal a recount, and that what lives is not counted as dead."""
        for (number, run, uid), marks in self._generations.marks.items():
            if uid == self.uid and self._generations.get(number) is not None:
                self._marks(number, run, marks)
        for number, size in self._leaked.items():
            text = f"{size} bytes were released before the snapshot and are still counted as live"
            self._report.warning("leak", text, path=self._generations.data(number), group=self.group.name)

    def _marks(self, number: int, run: int, marks: Marks) -> None:
        report, name = self._report, self.group.name
        ledger = self._generations.ledger(number, run, self.uid)
        if ledger is None:
            text = f"counters of run {run} of generation {number}, which has no rows of this group"
            report.damage("counter", text, path="meta", group=name)
            return
        live = sum(ledger.size(slot) for slot in marks.live_slots(len(ledger)))
        if live != marks.live:
            text = f"run {run} of generation {number}: {marks.live} live bytes are counted, {live} live"
            report.damage("counter", text, path="meta", group=name)
