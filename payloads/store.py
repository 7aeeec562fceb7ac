"""The payload store of one node: where each group's long-lived payloads are, which of them are dead, and what may
be dropped.

Invariants: per group, homes are disjoint ranges of indexes; per (generation, run, group) the live bytes are the
sizes of its slots not marked dead; deadness only grows; a generation is dropped only when it is sealed, nothing in
it lives, nobody pins it and no job may have written to it. The caller makes the payload floor durable before it
drops (law 4). Called by the host (any thread; one lock, held briefly).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from logyard.protocol.errors import GenerationFailed, PayloadCorrupt, PayloadMissing, StoreFull, StoreShort

from . import compaction, probe
from .catalog import Catalog, DiskDoor, allocated
from .compaction import MigrateJob, MigrateReport, Reader, RewriteJob
from .copies import END, Owner, Place
from .generation import Generation
from .homes import Home
from .journal import IN_USE, IN_USE_WRITER, Journal, take_suspects
from .layout import SourceRow, StoredEntry
from .measuring import Counts, Measured
from .placement import Placement
from .running import Running
from .verify import is_passing
from .writing import GenerationConfig, Step, quiet


class StoreConfig(NamedTuple):
    """Limits. `generation_bytes`: a map's fixed size. `transaction_bytes`: one sync while migrating.
    `ledger_slots`: sizes kept in memory, 20 bytes each. `drop_current_bytes`: a current generation with nothing
    live and this much in it is sealed and dropped too. `remote_writer`: jobs run in another process; here
    generations are opened for reading only. `beside`: new ones have a file for large bodies."""

    generation_bytes: int = 1 << 30
    transaction_bytes: int = 8 << 20
    ledger_slots: int = 2_000_000
    drop_current_bytes: int = 64 << 20
    remote_writer: bool = False
    beside: bool = False


class GenerationInfo(NamedTuple):
    """One generation: bytes ever stored, bytes that live, the rest, allocated bytes of disk, and whether it is
    written no more."""

    id: int
    total: int
    live: int
    dead: int
    disk: int
    sealed: bool


class PayloadStore:
    """The constructor does no I/O; `open` reads, `restore` takes what `checkpoint` gave."""

    __slots__ = ("directory", "config", "catalog", "_journal", "_disk", "_lock", "_placement", "_totals", "_pins",
                 "_running", "_probe")  # fmt: skip

    def __init__(
        self,
        directory: str | os.PathLike[str],
        config: StoreConfig,
        disk: DiskDoor,
        *,
        probe_generation: Callable[[str, int, int], bool] = probe.survives,
    ) -> None:
        self.directory = os.fspath(directory)
        self.config = config
        self._disk = disk
        self._journal = Journal(os.path.join(self.directory, IN_USE))
        maps = GenerationConfig(config.generation_bytes, config.transaction_bytes, config.beside)
        self.catalog = Catalog(self.directory, maps, disk, journal=self._journal, writer=not config.remote_writer)
        self._lock = threading.RLock()
        self._placement = Placement(self.catalog, config.ledger_slots, self.fail)
        self._totals: dict[int, int] = {}
        self._pins: dict[int, int] = {}
        self._running = Running()
        self._probe = probe_generation

    # Opening

    def open(self) -> list[int]:
        """Open what is there. Generations that a process died inside of are probed; returns those set aside.

        Raises `FormatNewer`, having touched nothing but the journal; `GenerationFailed` for what is no generation's
        fault and lasts no longer than its cause (no rights, say).
        """
        os.makedirs(self.directory, mode=0o700, exist_ok=True)
        self._disk.sync_directory(os.path.dirname(os.path.abspath(self.directory)))
        aside: list[int] = []
        writer = os.path.join(self.directory, IN_USE_WRITER)
        for number in sorted({*self._journal.open(), *take_suspects(writer)}):
            if not self._survives(number):
                self.catalog.set_aside(number)
                aside.append(number)
        self.catalog.clear_unfinished()
        for number in self.catalog.numbers():
            try:
                statistics = self.catalog.get(number).statistics()
            except (GenerationFailed, PayloadCorrupt) as error:
                if is_passing(error):
                    raise
                self.fail(number, error)
                continue
            self._totals[number] = statistics.total
            self._placement.note(number, statistics.run)
        self.catalog.sweep()
        return aside

    def examine(self) -> list[int]:
        """Probe, as the writer process died, what it was inside of, and set aside what kills a process; return their
        numbers. BLOCKING."""
        aside: list[int] = []
        for number in take_suspects(os.path.join(self.directory, IN_USE_WRITER)):
            if not self._survives(number):
                self.fail(number, GenerationFailed(self.catalog.path(number), "it killed the writer process"))
                self.catalog.set_aside(number)
                aside.append(number)
        return aside

    def _survives(self, number: int) -> bool:
        """Return whether a generation, if it is there, can be read without dying of it."""
        path = self.catalog.path(number)
        return not os.path.isdir(path) or self._probe(path, number, self.config.generation_bytes)

    def close(self) -> None:
        """Close every environment."""
        self.catalog.close()
        self._journal.close()

    def suspects(self) -> list[int]:
        """Return the generations not served: set aside after a crash inside them, or failing. Their homes are in
        `lost`."""
        return sorted({*self.catalog.set_aside_numbers(), *self.catalog.failed()})

    def lost(self) -> list[tuple[int, int, int]]:
        """Return (uid, first, last) whose generation is gone or failing: whatever of it lives must come from peers."""
        with self._lock:
            return [(uid, *home[:2]) for uid, homes in sorted(self._placement.lost.items()) for home in homes]

    def is_lost(self, uid: int, first: int, last: int) -> bool:
        """Return whether any of these entries is in `lost`."""
        return any(home.first <= last and home.last >= first for home in self._placement.lost.get(uid, ()))

    def lose(self, uid: int, first: int, last: int) -> None:
        """Count these entries as `lost`: nobody can tell any more where their payloads are."""
        with self._lock:
            self._placement.lose([(uid, Home(first, last, 0, 0))])

    def found(self, uid: int, first: int, last: int) -> None:
        """Count these entries as `lost` no more: what lives of them was stored anew."""
        with self._lock:
            self._placement.found(uid, first, last)

    # Reading

    def homes(self, uid: int) -> list[Home]:
        """Return a group's homes, rising and disjoint."""
        with self._lock:
            return list(self._placement.homes.of(uid))

    def home(self, uid: int, index: int) -> Home | None:
        """Return where an entry's payload would be, or None."""
        return self._placement.homes.find(uid, index)

    def lookup(self, uid: int, index: int) -> StoredEntry:
        """Return metadata and packs of one entry. Raises `PayloadMissing`, `PayloadCorrupt`, `GenerationFailed`: each
        is repaired from peers."""
        home = self.home(uid, index)
        if home is None:
            raise PayloadMissing(uid, index)
        return self.generation(home.generation).entry(home.run, uid, index)

    def read_unit(self, uid: int, index: int, unit: int, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes start to stop of one unit. Raises as `lookup`."""
        home = self.home(uid, index)
        if home is None:
            raise PayloadMissing(uid, index, unit)
        return self.generation(home.generation).read_unit(home.run, uid, index, unit, start, stop)

    def scan(self, uid: int, first: int, last: int, *, bodies: bool = True) -> Iterator[StoredEntry]:
        """Yield the entries between two indexes that are here, rising, over all homes. Raises as `lookup`, after what
        is whole before."""
        for home in self.homes(uid):
            if home.last >= first and home.first <= last:
                generation = self.generation(home.generation)
                yield from generation.scan(home.run, uid, max(first, home.first), min(last, home.last), bodies=bodies)

    def generation(self, number: int) -> Generation:
        """Return a generation, open, for callers that keep homes of their own. Raises `GenerationFailed`."""
        try:
            return self.catalog.get(number)
        except GenerationFailed as error:
            self.fail(number, error)
            raise

    def fail(self, number: int, error: Exception) -> None:
        """Serve nothing more of a generation, and name what it held."""
        path = self.catalog.path(number)
        failure = error if isinstance(error, GenerationFailed) else GenerationFailed(path, str(error))
        with self._lock:
            if os.path.isdir(path):
                self.catalog.fail(number, failure)
            self._placement.lose(self._placement.leave(number))
            self._placement.copies.drop(number)

    def live_in(self, generation: int) -> int:
        """Return the bytes of a generation that live; 0 of one that is gone."""
        return self._placement.copies.live(generation)

    def sparse(self, live_ratio: float) -> list[int]:
        """Return which sealed generations live below `live_ratio`, the least live first; not those that do not live at
        all, which are unlinked. Asks the disk about none but these."""
        with self._lock:
            lives = [(self._placement.copies.live(number), number, total) for number, total in self._totals.items()]
        found = sorted((live, number) for live, number, total in lives if 0 < live < live_ratio * total)
        return [number for _, number in found if self.catalog.sealed(number)]

    def homes_in(self, generation: int) -> list[tuple[int, Home]]:
        """Return (uid, home) of all that is at home in a generation."""
        with self._lock:
            return self._placement.homes.in_generation(generation)

    def pin(self, generation: int) -> None:
        """Keep a generation's bytes while somebody reads or transfers them."""
        with self._lock:
            self._pins[generation] = self._pins.get(generation, 0) + 1

    def unpin(self, generation: int) -> None:
        """Undo one `pin`."""
        with self._lock:
            self._pins[generation] -= 1
            if not self._pins[generation]:
                del self._pins[generation]

    # Dying

    def mark_dead(self, uid: int, first: Place, end: Place) -> dict[int, int]:
        """Mark the units from `first` up to, but without, `end` = (index, unit) as dead; return the bytes freed by
        generation.

        Idempotent, so a restart replays marks freely. Marks made while a job runs also count for what it copies.
        """
        with self._lock:
            self._running.remember(uid, first, end, False)
            return self._placement.mark(uid, first, end)

    def truncate(self, uid: int, from_index: int) -> dict[int, int]:
        """End the homes of the entries that the log dropped from here on: their copies are dead, and another entry may
        come under the same index. Return the bytes freed by generation."""
        with self._lock:
            self._running.remember(uid, (from_index, 0), (END, 0), True)
            return self._placement.truncate(uid, from_index)

    def delete_group(self, uid: int) -> dict[int, int]:
        """Count everything of a group as dead; costs nothing per entry."""
        with self._lock:
            self._running.remember(uid, (0, 0), (END, 0), True)
            return self._placement.delete(uid)

    def _retotal(self, generation: int) -> None:
        """Learn how much a generation holds now."""
        try:
            self._totals[generation] = self.catalog.get(generation).statistics().total
        except (GenerationFailed, PayloadCorrupt):
            self._totals.pop(generation, None)

    # Jobs

    def migrate_job(
        self, ranges: Sequence[tuple[int, int, int]] = (), source: bytes = b"", number: int = 0
    ) -> MigrateJob:
        """Return a job to copy (uid, first, last) out of a WAL file. One job at a time: `adopt` or `abandon` it.

        `number` 0: the store's next; else the caller's, above every number used before. Without ranges, give `run`
        the rows.
        """
        with self._lock:
            job = MigrateJob(max(number, self._placement.newest_run + 1), self._current(), sorted(ranges), source)
            self._start(job)
            return job

    def rewrite_job(self, generation: int, number: int = 0) -> RewriteJob:
        """Return a job to copy what lives in a sealed generation to the newest."""
        with self._lock:
            assert self.catalog.sealed(generation), "only sealed generations are rewritten"
            homes = sorted(
                (uid, home.first, home.last, home.run) for uid, home in self._placement.homes.in_generation(generation)
            )
            dead = [
                (uid, run, marks.encode()) for (_, run, uid), marks in self._placement.copies.of_generation(generation)
            ]
            job = RewriteJob(max(number, self._placement.newest_run + 1), self._current(), generation, homes, dead)
            self._start(job)
            return job

    def resume(self, job: MigrateJob | RewriteJob) -> None:
        """Take up a job that an earlier process had built and saved. Marks made between building it and now must be
        made again after `adopt`."""
        with self._lock:
            self._start(job)

    def run(
        self,
        job: MigrateJob | RewriteJob,
        read: Reader | None = None,
        *,
        rows: Iterable[SourceRow] | None = None,
        step: Step = quiet,
    ) -> MigrateReport:
        """Run a job in this thread (never the event loop's), with this store's environments: a migration from
        `read`, or from `rows`."""
        if isinstance(job, RewriteJob):
            return compaction.run_rewrite(self.directory, job, disk=self._disk, catalog=self.catalog, step=step)
        if rows is not None:
            assert not job.ranges
            return compaction.run_rows(self.catalog, job, rows, is_home=self._placement.is_home, step=step)
        assert read is not None
        return compaction.run_migrate(self.directory, job, read, disk=self._disk, catalog=self.catalog, step=step)

    def abandon(self) -> None:
        """Give the running job up. What it wrote counts as dead and goes with its generation."""
        with self._lock:
            self._running.stop()

    def _start(self, job: MigrateJob | RewriteJob) -> None:
        self._placement.note(0, job.job)
        self._running.start(job)

    def _current(self) -> int:
        """Return the generation to write to: the newest, or the number after the highest ever used when that is sealed
        or failing."""
        numbers = self.catalog.numbers()
        newest = numbers[-1] if numbers else 0
        if newest and newest not in self.catalog.failed() and not self.catalog.sealed(newest):
            return newest
        return max([newest, self._placement.newest, *self.catalog.set_aside_numbers()]) + 1

    def reach(self, report: MigrateReport) -> None:
        """Open the generations that a job wrote to: `adopt` reads them, and is no place to learn that it can't. Raises
        `StoreShort`, `GenerationFailed`."""
        for generation in {run[3] for run in report.runs}:
            self.catalog.get(generation)

    def adopt(self, report: MigrateReport) -> None:
        """Switch the references to what a job wrote; then commit `changes`, and only then let its source go. Older
        copies of the same indexes are dead from here on; in the new copy is dead what died while the job ran."""
        with self._lock:
            job = self._running.job
            assert job is not None and job.job == report.job, "not the running job's report"
            owners: dict[Owner, list[tuple[int, int]]] = {}
            for uid, low, high, generation, run in report.runs:
                owners.setdefault((generation, run, uid), []).append((low, high))
            for generation, run in {owner[:2] for owner in owners}:
                self._placement.renew(generation, run)
            for owner, ranges in owners.items():
                self._placement.adopt(owner, ranges)
            for number in {owner[0] for owner in owners}:
                self._retotal(number)
            if report.source:
                self._placement.leave(report.source)
            for owner in owners:
                for first, end, truncated in self._running.marks(owner[2]):
                    self._placement.mark(owner[2], first, end, owner)
                    if truncated:
                        self._placement.homes.cut(owner[2], first[0], END, owner[:2])
            self._running.stop()

    # Dropping and counting

    def seal_current(self) -> bool:
        """Have the next job begin another generation. False while a job may be writing to the current one."""
        with self._lock:
            current = self._current()
            if self._running.job is not None or current not in self.catalog.numbers():
                return False
            self.catalog.seal(current)
            return True

    def dead_generations(self) -> list[int]:
        """Return the generations that `drop` would take: nothing in them lives, nobody pins them, no job may have
        written to them."""
        with self._lock:
            numbers = self.catalog.numbers()
            return [number for number in numbers if self._droppable(number, number == numbers[-1])]

    def _droppable(self, number: int, newest: bool) -> bool:
        if (
            self._placement.copies.live(number)
            or number in self._pins
            or self._running.may_touch(number)
            or number in self.catalog.failed()
        ):
            return False
        if newest:
            return self._totals.get(number, 0) >= max(self.config.drop_current_bytes, 1)
        return self.catalog.sealed(number)

    def drop(self, generation: int) -> int:
        """Unlink a generation in which nothing lives; return the bytes of disk given back, 0 if it may not go yet.
        Blocking; works on a full disk."""
        with self._lock:
            numbers = self.catalog.numbers()
            if generation not in numbers or not self._droppable(generation, generation == numbers[-1]):
                return 0
            if generation == numbers[-1]:
                # Numbers are never used twice, so the newest needs a successor. No job runs: no writer has either open.
                self.catalog.seal(generation)
                self.catalog.create(generation + 1, self._placement.newest_run)
                self._placement.note(generation + 1, 0)
                self._totals[generation + 1] = 0
            self.catalog.retire(generation)
            self._totals.pop(generation, None)
            self._placement.copies.drop(generation)
        return self.catalog.sweep()

    def unlink_dead(self) -> int:
        """Drop (`drop`) every dead generation; return the bytes of disk given back. Blocking: not in the event loop."""
        return sum(self.drop(generation) for generation in self.dead_generations())

    def generations(self) -> list[GenerationInfo]:
        """Return what there is, rising."""
        with self._lock:
            found = []
            for number in self.catalog.numbers():
                total, live = self._totals.get(number, 0), self._placement.copies.live(number)
                disk = allocated(self.catalog.path(number))
                found.append(GenerationInfo(number, total, live, total - live, disk, self.catalog.sealed(number)))
            return found

    @property
    def live_bytes(self) -> int:
        """Bytes that live, over all generations."""
        return self._placement.copies.live_bytes

    def disk_bytes(self) -> int:
        """Return the allocated bytes of all generations, those being dropped or set aside included."""
        return self.catalog.disk_bytes()

    def measure(self, generation: int) -> Measured:
        """Scan and verify all of a generation; `damage` names what does not."""
        return self.generation(generation).measure()

    def recount(self) -> dict[int, Counts]:
        """Return counts by a full scan of the rows; they equal `generations()`, or a counter is wrong. Reads every
        byte."""
        found: dict[int, Counts] = {}
        for number in self.catalog.numbers():
            measured = self.measure(number)
            live = self._placement.copies.recount(number, measured.runs)
            found[number] = Counts(measured.entries, measured.total, live)
        return found

    # Checkpoints

    def changes(self) -> list[tuple[bytes, bytes | None]]:
        """Return rows for the host's meta store since the last call: one a group that changed, None where a group has
        nothing left."""
        with self._lock:
            return self._placement.changes()

    def checkpoint(self) -> bytes:
        """Return all of it in one value: homes, dead slots and live bytes of every group."""
        with self._lock:
            return self._placement.checkpoint()

    def restore(self, saved: bytes | Iterable[tuple[bytes, bytes]]) -> None:
        """Take a `checkpoint`, or the rows that `changes` gave. Call after `open`, then replay the marks since.

        Homes whose generation is gone (dropped after that, or set aside) or failing are in `lost`. Raises
        `PayloadCorrupt`."""
        with self._lock:
            assert not len(self._placement.homes), "restore comes first"
            failed = self.catalog.failed()
            self._placement.restore(saved, set(self.catalog.numbers()) - set(failed), failed)
            if not self._placement.lost:
                self._seal_passed_over()

    def _seal_passed_over(self) -> None:
        """Seal what an earlier process gave up writing to, as it failed, and what opens again now: then it may be
        dropped. While anything is lost its bytes may be the last ones of that, and stay."""
        for number in self.catalog.numbers()[:-1]:
            if number not in self.catalog.failed() and not self.catalog.sealed(number):
                with suppress(StoreFull, StoreShort):
                    self.catalog.seal(number)
