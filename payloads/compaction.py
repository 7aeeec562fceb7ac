"""What moves payloads: the jobs that copy, as plain data in and out.

Invariant: a job only adds. New rows are durable before its report exists; references change when the report is
adopted, and old bytes go after that. So a job may die at any step and be run again: rows that are there are kept,
in a generation or spread over several. Called by `store` (jobs, adoption) and by whoever runs them: a thread of the
process, or a writer process with a catalog of its own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from logyard.protocol.errors import GenerationUnfinished, JobStale, PayloadCorrupt, PayloadMissing

from .catalog import Catalog, DiskDoor
from .generation import Generation
from .layout import Buffer, SourceRow, SourceUnit, StoredEntry
from .ledger import ENTRY_SLOT, Ledger, Marks
from .writing import GenerationConfig, JobState, Step, quiet

Run = tuple[int, int, int, int, int]
"""(uid, first index, last index, generation, run): where the payloads of these entries are."""
Reader = Callable[[int, int, int], Iterable[SourceRow]]
"""(uid, first, last) -> the entries to store, rising in index; entries without live units may be left out."""


class MigrateJob(NamedTuple):
    """Copy entries out of a sealed WAL file. `job` is also the run number; `generation` is where to begin; `ranges`
    are (uid, first, last), rising and disjoint; `source` is the reader's own and opaque here (which file, which
    payloads are dead)."""

    job: int
    generation: int
    ranges: list[tuple[int, int, int]]
    source: bytes = b""


class RewriteJob(NamedTuple):
    """Copy what lives in generation `source`. `homes` are (uid, first, last, run), rising; `dead` are (uid, run,
    encoded marks)."""

    job: int
    generation: int
    source: int
    homes: list[tuple[int, int, int, int]]
    dead: list[tuple[int, int, bytes]]


class MigrateReport(NamedTuple):
    """What a job did. `rows` entries and `bytes_written` count this call only; `runs` cover the whole job.
    `damaged` is (uid, index, reason) of the entry whose source did not verify, if one did not: the job ended there, and
    is to be given up. `source`: the generation rewritten, or 0."""

    job: int
    rows: int
    bytes_written: int
    runs: list[Run]
    damaged: list[tuple[int, int, str]]
    source: int = 0


def run_migrate(
    store_dir: str,
    job: MigrateJob,
    read: Reader,
    *,
    disk: DiskDoor,
    config: GenerationConfig | None = None,
    catalog: Catalog | None = None,
    step: Step = quiet,
) -> MigrateReport:
    """Copy the job's entries into generations. Blocking; idempotent. In the process that has the store open, pass
    its `catalog`.

    Raises `StoreFull` (nothing is lost; run it again), `GenerationFailed`, `JobStale`.
    """
    own = catalog or Catalog(store_dir, config or GenerationConfig(), disk)
    try:
        portions = _portions(own, job.job, job.generation)
        rows = _fresh(job.ranges, read, portions)
        return _pour(own, job.job, job.generation, job.ranges, rows, portions, step)
    finally:
        if catalog is None:
            own.close()


def run_rewrite(
    store_dir: str,
    job: RewriteJob,
    *,
    disk: DiskDoor,
    config: GenerationConfig | None = None,
    catalog: Catalog | None = None,
    step: Step = quiet,
) -> MigrateReport:
    """Copy a generation's survivors to the newest one. As `run_migrate`."""
    own = catalog or Catalog(store_dir, config or GenerationConfig(), disk)
    try:
        survivors = _Survivors(own.get(job.source), job)
        ranges = [(uid, first, last) for uid, first, last, _ in job.homes]
        portions = _portions(own, job.job, job.generation)
        rows = _fresh(ranges, survivors.read, portions)
        report = _pour(own, job.job, job.generation, ranges, rows, portions, step)
        return report._replace(damaged=survivors.damaged + report.damaged, source=job.source)
    finally:
        if catalog is None:
            own.close()


def _portions(catalog: Catalog, job: int, start: int) -> list[tuple[int, JobState]]:
    """Return where an earlier attempt put rows: (generation, state), rising. All rows up to the last state's `last` are
    there."""
    found: list[tuple[int, JobState]] = []
    for number in catalog.numbers():
        if number < start:
            continue
        try:
            state = catalog.get(number).job_state(job)
        except GenerationUnfinished:
            continue  # A writer died while it made this one: it holds nothing, and is made anew.
        if state is not None:
            if state.previous != (found[-1][0] if found else 0):
                raise JobStale(
                    f"job {job} continues in generation {number}, but what came before is gone: build a new job"
                )
            found.append((number, state))
    return found


def run_rows(
    catalog: Catalog,
    job: MigrateJob,
    rows: Iterable[SourceRow],
    *,
    is_home: Callable[[int, int, int], bool] = lambda uid, first, last: False,
    step: Step = quiet,
) -> MigrateReport:
    """Run a job as `run_migrate` does, for a source that gives its rows itself, rising in (uid, index), and without
    ranges.

    A group's run is what lies between its first and last row, but for gaps with something in them that `is_home`
    elsewhere.
    """
    portions = _portions(catalog, job.job, job.generation)
    done = portions[-1][1].last if portions else (-1, -1)
    ranges: list[tuple[int, int, int]] = []

    def fresh() -> Iterator[SourceRow]:
        for row in rows:
            uid, index = row.uid, row.index
            last = ranges[-1][2] if ranges and ranges[-1][0] == uid else -1
            if last >= 0 and (last + 1 == index or not is_home(uid, last + 1, index - 1)):
                ranges[-1] = (uid, ranges[-1][1], index)
            else:
                ranges.append((uid, index, index))
            if (uid, index) > done:
                yield row

    return _pour(catalog, job.job, job.generation, ranges, fresh(), portions, step)


def _pour(
    catalog: Catalog,
    job: int,
    start: int,
    ranges: Sequence[tuple[int, int, int]],
    rows: Iterable[SourceRow],
    portions: Sequence[tuple[int, JobState]],
    step: Step,
) -> MigrateReport:
    """Write what is not there yet, going on to the next generation whenever one is full."""
    target = previous = portions[-1][0] if portions else 0
    target = target or start
    written = size = 0
    damaged: list[tuple[int, int, str]] = []
    while True:
        generation = catalog.writer_from(target, job - 1)
        step("open", 0)
        report = generation.write_entries(job, rows, job, previous=previous, step=step)
        written += report.entries
        size += report.written
        damaged += report.damaged
        if damaged or not report.full:
            break
        if generation.job_state(job) is not None:
            previous = generation.number
        catalog.seal(generation.number)
        step("sealed", 0)
        target = generation.number + 1
        rows = chain(report.unwritten, rows)
    step("written", 0)
    return MigrateReport(job, written, size, _runs(ranges, _portions(catalog, job, start), job), damaged)


def _fresh(
    ranges: Sequence[tuple[int, int, int]], read: Reader, portions: Sequence[tuple[int, JobState]]
) -> Iterator[SourceRow]:
    """Yield the source's rows that an earlier attempt had not made durable."""
    done = portions[-1][1].last if portions else (-1, -1)
    for uid, first, last in ranges:
        if uid < done[0] or (uid == done[0] and last <= done[1]):
            continue
        yield from read(uid, max(first, done[1] + 1) if uid == done[0] else first, last)


def _runs(ranges: Sequence[tuple[int, int, int]], portions: Sequence[tuple[int, JobState]], run: int) -> list[Run]:
    """Cut the job's ranges where one generation ended and the next began. Ranges after the last row have no run."""
    found: list[Run] = []
    for uid, first, last in ranges:
        at = first
        for position, (number, state) in enumerate(portions):
            if state.last < (uid, at):
                continue
            final = position == len(portions) - 1
            end = last if final or state.last[0] > uid else min(last, state.last[1])
            found.append((uid, at, end, number, run))
            at = end + 1
            if at > last:
                break
    return found


def _first(home: tuple[int, int]) -> int:
    return home[0]


class _Survivors:
    """Reads what still lives in a generation, by its ledgers and the job's marks."""

    __slots__ = ("damaged", "_source", "_runs", "_marks", "_ledgers")

    def __init__(self, source: Generation, job: RewriteJob) -> None:
        self.damaged: list[tuple[int, int, str]] = []
        self._source = source
        self._runs: dict[int, list[tuple[int, int]]] = {}
        for uid, first, _, run in job.homes:
            self._runs.setdefault(uid, []).append((first, run))
        self._marks = {(uid, run): Marks.decode(body) for uid, run, body in job.dead}
        # Jobs go by group and groups lie in many runs: all sizes of the generation are kept, 20 bytes a slot.
        self._ledgers: dict[int, dict[int, Ledger]] = {}

    def _ledger(self, run: int, uid: int) -> Ledger | None:
        found = self._ledgers.get(run)
        if found is None:
            found = self._ledgers[run] = dict(self._source.columns(run).ledgers())
        return found.get(uid)

    def read(self, uid: int, first: int, last: int) -> Iterator[SourceRow]:
        """Yield the surviving entries of one home, none from a damaged one on; `first` may lie inside it when the job
        was resumed."""
        if self.damaged:
            return
        runs = self._runs[uid]
        run = runs[bisect_right(runs, first, key=_first) - 1][1]
        ledger = self._ledger(run, uid)
        if ledger is None:
            return
        marks = self._marks.get((uid, run), Marks(0))
        live: dict[int, set[int]] = {}
        for slot in range(max(ledger.at(first, 0), marks.prefix), ledger.at(last + 1, 0)):
            if not marks.is_dead(slot) and ledger.units[slot] != ENTRY_SLOT:
                live.setdefault(ledger.indexes[slot], set()).add(ledger.units[slot])
        for index, units in live.items():
            try:
                entry = self._source.entry(run, uid, index)
            except (PayloadCorrupt, PayloadMissing) as error:
                self.damaged.append((uid, index, str(error)))
                return
            yield _row_of(self._source, run, entry, units)


def _row_of(source: Generation, run: int, entry: StoredEntry, live: set[int]) -> SourceRow:
    """Return a stored entry as a source for another generation: offsets run over the units that are stored."""

    def read(offset: int, length: int) -> Buffer:
        parts: list[Buffer] = []
        at = 0
        for unit in entry.units:
            low, high = max(offset - at, 0), min(offset + length - at, unit.length)
            if low < high:
                if unit.at >= 0:
                    parts.append(memoryview(entry.inline)[unit.at + low : unit.at + high])
                elif unit.number in live:
                    parts.append(_unit_bytes(source, run, entry, unit.number, low, high))
                else:
                    parts.append(bytes(high - low))  # Dead and between two live ones: nobody keeps these bytes.
            at += unit.length
        return parts[0] if len(parts) == 1 else b"".join(parts)

    units = [SourceUnit(unit.number, unit.length, unit.at >= 0) for unit in entry.units]
    return SourceRow(entry.uid, entry.index, entry.term, entry.data, units, live, read)


def _unit_bytes(source: Generation, run: int, entry: StoredEntry, unit: int, low: int, high: int) -> bytes:
    try:
        return source.read_unit(run, entry.uid, entry.index, unit, low, high)
    except PayloadMissing as error:
        raise PayloadCorrupt(source.path, str(error), "its rows", "none", entry.uid, entry.index) from error
