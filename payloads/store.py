"""The payload store of one node: where each group's long-lived payloads are, which of them are dead, and what may be dropped.

Invariants: per group, homes are disjoint ranges of indexes; per (generation, run, group) the live bytes are the sizes of its slots not marked
dead; deadness only grows; a generation is dropped only when it is sealed, nothing in it lives, nobody pins it and no job may have written
to it. The caller makes the payload floor durable before it drops (law 4). Called by the host (any thread; one lock, held briefly).
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from . import checkpoints, compaction, probe
from .checkpoints import Home
from .compaction import MigrateJob, MigrateReport, Reader, RewriteJob
from .copies import END, Copies, Owner, Place
from .errors import GenerationFailed, PayloadCorrupt, PayloadMissing
from .generation import Generation
from .journal import Journal
from .layout import SourceRow, StoredEntry
from .measuring import Measured
from .shelf import DiskDoor, Shelf, allocated
from .writing import GenerationConfig, Step, quiet


class StoreConfig(NamedTuple):
    """Limits. `generation_bytes`: a map's fixed size. `transaction_bytes`: one sync while migrating. `ledger_slots`: sizes kept in
    memory, 20 bytes each. `drop_current_bytes`: a current generation with nothing live and this much in it is sealed and dropped too.
    `remote_writer`: jobs run in another process; here nothing is opened for writing."""

    generation_bytes: int = 1 << 30
    transaction_bytes: int = 8 << 20
    ledger_slots: int = 2_000_000
    drop_current_bytes: int = 64 << 20
    remote_writer: bool = False


class GenerationInfo(NamedTuple):
    """One generation: bytes ever stored, bytes that live, the rest, allocated bytes of disk, and whether it is written no more."""

    id: int
    total: int
    live: int
    dead: int
    disk: int
    sealed: bool


class Counts(NamedTuple):
    """What `recount` finds in a generation, from its rows and not from any counter."""

    entries: int
    total: int
    live: int


class PayloadStore:
    """The constructor does no I/O; `open` reads, `restore` takes what `checkpoint` gave."""

    __slots__ = (
        "directory", "config", "shelf", "_journal", "_disk", "_lock", "_homes", "_copies", "_totals",
        "_pins", "_job", "_meanwhile", "_dirty", "_lost", "_next_job", "_probe",
    )  # fmt: skip

    def __init__(
        self,
        directory: str | os.PathLike[str],
        config: StoreConfig,
        disk: DiskDoor,
        *,
        probe_generation: Callable[[str, int], bool] = probe.survives,
    ) -> None:
        self.directory = os.fspath(directory)
        self.config = config
        self._disk = disk
        self._journal = Journal(os.path.join(self.directory, "in-use.reader" if config.remote_writer else "in-use"))
        maps = GenerationConfig(config.generation_bytes, config.transaction_bytes)
        self.shelf = Shelf(self.directory, maps, disk, journal=self._journal, writer=not config.remote_writer)
        self._lock = threading.RLock()
        self._homes: dict[int, list[Home]] = {}
        self._copies = Copies(self.shelf, config.ledger_slots)
        self._totals: dict[int, int] = {}
        self._pins: dict[int, int] = {}
        self._job: MigrateJob | RewriteJob | None = None
        self._meanwhile: dict[int, list[tuple[Place, Place, bool]]] = {}
        self._dirty: set[int] = set()
        self._lost: list[tuple[int, int, int]] = []
        self._next_job = 1
        self._probe = probe_generation

    # Opening

    def open(self) -> list[int]:
        """Open what is there. Generations that a process died inside of are probed and, if need be, set aside: their numbers are returned.

        Raises `FormatNewer` and then has touched nothing but the journal.
        """
        os.makedirs(self.directory, mode=0o700, exist_ok=True)
        aside: list[int] = []
        for number in self._journal.open():
            if os.path.isdir(self.shelf.path(number)) and not self._probe(self.shelf.path(number), number):
                self.shelf.set_aside(number)
                aside.append(number)
        self.shelf.clear_unfinished()
        for number in self.shelf.numbers():
            try:
                statistics = self.shelf.get(number).statistics()
            except (GenerationFailed, PayloadCorrupt) as error:
                self._fail(number, error)
                continue
            self._totals[number] = statistics.total
            self._next_job = max(self._next_job, statistics.run + 1)
        self.shelf.sweep()
        return aside

    def close(self) -> None:
        """Close every environment."""
        self.shelf.close()
        self._journal.close()

    def suspects(self) -> list[int]:
        """Generations that are not served: set aside after a crash inside them, or failing. Their homes are in `lost`."""
        return sorted({*self.shelf.set_aside_numbers(), *self.shelf.failed()})

    def lost(self) -> list[tuple[int, int, int]]:
        """(uid, first, last) whose generation is gone or failing: whatever of it lives must come from peers."""
        with self._lock:
            return list(self._lost)

    # Reading

    def homes(self, uid: int) -> list[Home]:
        """A group's homes, rising and disjoint."""
        with self._lock:
            return list(self._homes.get(uid, ()))

    def home(self, uid: int, index: int) -> Home | None:
        """Where an entry's payload would be, or None."""
        homes = self._homes.get(uid)
        if homes:
            at = bisect_right(homes, index, key=_first) - 1
            if at >= 0 and homes[at].last >= index:
                return homes[at]
        return None

    def lookup(self, uid: int, index: int) -> StoredEntry:
        """Metadata and packs of one entry. Raises `PayloadMissing`, `PayloadCorrupt`, `GenerationFailed`: each is repaired from peers."""
        home = self.home(uid, index)
        if home is None:
            raise PayloadMissing(uid, index)
        return self.generation(home.generation).entry(home.run, uid, index)

    def read_unit(self, uid: int, index: int, unit: int, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes start to stop of one unit. Raises as `lookup`."""
        home = self.home(uid, index)
        if home is None:
            raise PayloadMissing(uid, index, unit)
        return self.generation(home.generation).read_unit(home.run, uid, index, unit, start, stop)

    def scan(self, uid: int, first: int, last: int, *, bodies: bool = True) -> Iterator[StoredEntry]:
        """The entries between two indexes that are here, rising, over all homes. Raises as `lookup`, after what is whole before."""
        for home in self.homes(uid):
            if home.last >= first and home.first <= last:
                generation = self.generation(home.generation)
                yield from generation.scan(home.run, uid, max(first, home.first), min(last, home.last), bodies=bodies)

    def generation(self, number: int) -> Generation:
        """A generation, open, for callers that keep homes of their own. Raises `GenerationFailed`."""
        try:
            return self.shelf.get(number)
        except GenerationFailed as error:
            self._fail(number, error)
            raise

    def _fail(self, number: int, error: Exception) -> None:
        """Serve nothing more of a generation, and name what it held."""
        failure = error if isinstance(error, GenerationFailed) else GenerationFailed(self.shelf.path(number), str(error))
        with self._lock:
            if os.path.isdir(self.shelf.path(number)):
                self.shelf.fail(number, failure)
            for uid, homes in list(self._homes.items()):
                gone = [home for home in homes if home.generation == number]
                if gone:
                    self._lost += [(uid, home.first, home.last) for home in gone]
                    self._set_homes(uid, [home for home in homes if home.generation != number])
            self._copies.drop(number)

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
        """The units from `first` up to, but without, `end` = (index, unit) are dead; bytes freed by generation.

        Idempotent, so a restart replays marks freely. Marks made while a job runs also count for what it copies.
        """
        with self._lock:
            if self._job is not None:
                self._remember(uid, first, end, False)
            return self._mark(uid, first, end, None)

    def truncate(self, uid: int, from_index: int) -> dict[int, int]:
        """The log dropped its entries from here on: their copies are dead, and another entry may come under the same index."""
        with self._lock:
            first, end = (from_index, 0), (END, 0)
            if self._job is not None:
                self._remember(uid, first, end, True)
            freed = self._mark(uid, first, end, None)
            self._set_homes(uid, _without(self._homes.get(uid, []), from_index, END))
            return freed

    def delete_group(self, uid: int) -> dict[int, int]:
        """Everything of a group is dead; costs nothing per entry."""
        with self._lock:
            if self._job is not None:
                self._remember(uid, (0, 0), (END, 0), True)
            freed: dict[int, int] = {}
            for owner in {(home.generation, home.run, uid) for home in self._homes.get(uid, ())}:
                freed[owner[0]] = freed.get(owner[0], 0) + self._copies.forget(owner)
            self._set_homes(uid, [])
            return freed

    def drop_run(self, uid: int, first: int, last: int, generation: int, run: int) -> int:
        """One copy of these entries is nobody's home any more; bytes freed. Other copies of them stay."""
        with self._lock:
            owner = (generation, run, uid)
            homes = self._homes.get(uid, [])
            held = [home for home in homes if (home.generation, home.run) == (generation, run)]
            died = self._mark(uid, (first, 0), (last + 1, 0), owner).get(generation, 0)
            others = [home for home in homes if home not in held]
            self._set_homes(uid, sorted(others + _without(held, first, last)))
            return died

    def adopt_runs(self, uid: int, runs: Iterable[tuple[int, int, int, int]]) -> None:
        """Homes (first, last, generation, run) that the caller keeps itself. What was this copy's home already stays as it was; the rest
        of a range counts as live until it is marked again. Runs whose generation is gone are in `lost`."""
        with self._lock:
            for first, last, generation, run in runs:
                known = [Home(first, last, generation, run)]
                for home in self._homes.get(uid, ()):
                    if (home.generation, home.run) == (generation, run):
                        known = _without(known, home.first, home.last)
                if known:
                    self._place(uid, known)

    def _place(self, uid: int, fresh: list[Home]) -> None:
        """Ranges of one copy become homes of their entries."""
        owner = (fresh[0].generation, fresh[0].run, uid)
        try:
            for home in fresh:
                self._copies.revive(owner, home.first, home.last)
            self._totals[owner[0]] = self.shelf.get(owner[0]).statistics().total
        except (GenerationFailed, PayloadCorrupt):
            self._lost += [(uid, home.first, home.last) for home in fresh]
            return
        for home in fresh:
            self._overlay(uid, home)

    def _overlay(self, uid: int, new: Home) -> None:
        """A fresh copy takes over: older ones of the same indexes are dead."""
        owner = (new.generation, new.run, uid)
        for other in {(home.generation, home.run, uid) for home in self._homes.get(uid, ())} - {owner}:
            self._mark(uid, (new.first, 0), (new.last + 1, 0), other)
        self._set_homes(uid, sorted([*_without(self._homes.get(uid, []), new.first, new.last), new]))

    def _remember(self, uid: int, first: Place, end: Place, truncated: bool) -> None:
        """A mark for the running job's copies; marks that continue one another are one."""
        marks = self._meanwhile.setdefault(uid, [])
        if marks and not truncated and not marks[-1][2] and marks[-1][1] == first:
            marks[-1] = (marks[-1][0], end, False)
        else:
            marks.append((first, end, truncated))

    def _mark(self, uid: int, first: Place, end: Place, only: Owner | None) -> dict[int, int]:
        """Mark in every home that overlaps, or in those of one copy only."""
        freed: dict[int, int] = {}
        homes = self._homes.get(uid)
        if not homes or first >= end:
            return freed
        at = max(bisect_right(homes, first[0], key=_first) - 1, 0)
        touched: set[Owner] = set()
        for home in homes[at:]:
            if home.first > end[0]:
                break
            owner = (home.generation, home.run, uid)
            if only is not None and owner != only:
                continue
            try:
                died = self._copies.mark(owner, max(first, (home.first, 0)), min(end, (home.last + 1, 0)))
            except (GenerationFailed, PayloadCorrupt) as error:
                self._fail(home.generation, error)
                continue
            if died:
                touched.add(owner)
                freed[owner[0]] = freed.get(owner[0], 0) + died
        for owner in touched:
            self._dirty.add(uid)
            if self._copies.is_empty(owner):
                self._copies.forget(owner)
                kept = [home for home in self._homes[uid] if (home.generation, home.run) != owner[:2]]
                self._set_homes(uid, kept)
        return freed

    def _set_homes(self, uid: int, homes: list[Home]) -> None:
        self._dirty.add(uid)
        if homes:
            self._homes[uid] = homes
        else:
            self._homes.pop(uid, None)

    # Jobs

    def migrate_job(self, ranges: Sequence[tuple[int, int, int]] = (), source: bytes = b"", number: int = 0) -> MigrateJob:
        """A job to copy (uid, first, last) out of a WAL file. One job at a time: `adopt` or `abandon` it.

        `number` 0: the store's next; else the caller's, above every number used before. Without ranges, give `run` the rows.
        """
        with self._lock:
            job = MigrateJob(self._take_job(number), self._current(), sorted(ranges), source)
            self._job, self._meanwhile = job, {}
            return job

    def rewrite_job(self, generation: int, number: int = 0) -> RewriteJob:
        """A job to copy what lives in a sealed generation to the newest."""
        with self._lock:
            assert self.shelf.sealed(generation), "only sealed generations are rewritten"
            homes = sorted(
                (uid, home.first, home.last, home.run)
                for uid, found in self._homes.items()
                for home in found
                if home.generation == generation
            )
            dead = [(uid, run, marks.encode()) for (_, run, uid), marks in self._copies.of_generation(generation)]
            job = RewriteJob(self._take_job(number), self._current(), generation, homes, dead)
            self._job, self._meanwhile = job, {}
            return job

    def resume(self, job: MigrateJob | RewriteJob) -> None:
        """Take up a job that an earlier process had built and saved. Marks made between building it and now must be made again after `adopt`."""
        with self._lock:
            assert self._job is None, "one job at a time"
            self._next_job = max(self._next_job, job.job + 1)
            self._job, self._meanwhile = job, {}

    def run(
        self,
        job: MigrateJob | RewriteJob,
        read: Reader | None = None,
        *,
        rows: Iterable[SourceRow] | None = None,
        step: Step = quiet,
    ) -> MigrateReport:
        """Run a job in this thread (never the event loop's), with this store's environments: a migration from `read`, or from `rows`."""
        if isinstance(job, RewriteJob):
            return compaction.run_rewrite(self.directory, job, disk=self._disk, shelf=self.shelf, step=step)
        if rows is not None:
            assert not job.ranges
            return compaction.run_rows(self.shelf, job, rows, is_home=self._is_home, step=step)
        assert read is not None
        return compaction.run_migrate(self.directory, job, read, disk=self._disk, shelf=self.shelf, step=step)

    def _is_home(self, uid: int, first: int, last: int) -> bool:
        return any(home.first <= last and home.last >= first for home in self.homes(uid))

    def abandon(self) -> None:
        """Give the running job up. What it wrote counts as dead and goes with its generation."""
        with self._lock:
            self._job, self._meanwhile = None, {}

    def _take_job(self, number: int) -> int:
        assert self._job is None, "one job at a time"
        number = max(number, self._next_job)
        self._next_job = number + 1
        return number

    def _current(self) -> int:
        """The generation to write to: the newest, or the number after it when that is sealed or failing."""
        known = [*self.shelf.numbers(), *self.shelf.set_aside_numbers()]
        known += [home.generation for homes in self._homes.values() for home in homes[-1:]]
        newest = max(known, default=0)
        if newest and newest in self.shelf.numbers() and newest not in self.shelf.failed() and not self.shelf.sealed(newest):
            return newest
        return newest + 1

    def adopt(self, report: MigrateReport) -> None:
        """Switch the references to what a job wrote; then commit `changes`, and only then let the WAL file or generation go.

        Older copies of the same indexes are dead from here on; what died while the job ran is dead in the new copy too.
        """
        with self._lock:
            job = self._job
            assert job is not None and job.job == report.job, "not the running job's report"
            owners: dict[Owner, list[tuple[int, int]]] = {}
            for uid, first, last, generation, run in report.runs:
                owners.setdefault((generation, run, uid), []).append((first, last))
            for (generation, run, uid), ranges in owners.items():
                self._copies.reread(generation, run)
                if self._copies.adopt((generation, run, uid), ranges):
                    for first, last in ranges:
                        self._overlay(uid, Home(first, last, generation, run))
            for number in {owner[0] for owner in owners}:
                self._totals[number] = self.shelf.get(number).statistics().total
            if report.source:
                self._leave(report.source)
            meanwhile, self._meanwhile, self._job = self._meanwhile, {}, None
            for uid, marks in meanwhile.items():
                for first_place, end, truncated in marks:
                    for owner in owners:
                        if owner[2] == uid:
                            self._mark(uid, first_place, end, owner)
                    if truncated:
                        kept = [
                            piece
                            for home in self._homes.get(uid, [])
                            for piece in (_without([home], first_place[0], END) if (*home[2:], uid) in owners else [home])
                        ]
                        self._set_homes(uid, kept)

    def _leave(self, generation: int) -> None:
        """Nothing of a rewritten generation is anybody's home any more."""
        for uid, homes in list(self._homes.items()):
            if any(home.generation == generation for home in homes):
                self._set_homes(uid, [home for home in homes if home.generation != generation])
        for owner, _ in self._copies.of_generation(generation):
            self._copies.forget(owner)

    # Dropping and counting

    def seal_current(self) -> None:
        """Write no more to the current generation: the next job begins another."""
        with self._lock:
            assert self._job is None, "a job may be writing"
            current = self._current()
            if current in self.shelf.numbers():
                self.shelf.seal(current)

    def dead_generations(self) -> list[int]:
        """Generations that `drop` would take: nothing in them lives, nobody pins them, no job may have written to them."""
        with self._lock:
            numbers = self.shelf.numbers()
            return [number for number in numbers if self._droppable(number, number == numbers[-1])]

    def _droppable(self, number: int, newest: bool) -> bool:
        if self._copies.live(number) or number in self._pins or self._in_job(number) or number in self.shelf.failed():
            return False
        if newest:
            # Numbers are never used twice, so the newest needs a successor, which only a writer can make.
            return not self.config.remote_writer and self._totals.get(number, 0) >= max(self.config.drop_current_bytes, 1)
        return self.shelf.sealed(number)

    def drop(self, generation: int) -> int:
        """Unlink a generation in which nothing lives; bytes of disk given back, 0 if it may not go yet. Blocking; works on a full disk."""
        with self._lock:
            numbers = self.shelf.numbers()
            if generation not in numbers or not self._droppable(generation, generation == numbers[-1]):
                return 0
            if generation == numbers[-1]:
                self.shelf.seal(generation)
                self.shelf.create(generation + 1, self._next_job - 1)
                self._totals[generation + 1] = 0
            self.shelf.retire(generation)
            self._totals.pop(generation, None)
            self._copies.drop(generation)
        return self.shelf.sweep()

    def unlink_dead(self) -> int:
        """`drop` every dead generation; bytes of disk given back. Blocking: not in the event loop."""
        return sum(self.drop(generation) for generation in self.dead_generations())

    def _in_job(self, number: int) -> bool:
        job = self._job
        return job is not None and (number >= job.generation or (isinstance(job, RewriteJob) and number == job.source))

    def generations(self) -> list[GenerationInfo]:
        """What there is, rising."""
        with self._lock:
            found = []
            for number in self.shelf.numbers():
                total, live = self._totals.get(number, 0), self._copies.live(number)
                disk = allocated(self.shelf.path(number))
                found.append(GenerationInfo(number, total, live, total - live, disk, self.shelf.sealed(number)))
            return found

    @property
    def live_bytes(self) -> int:
        """Bytes that live, over all generations."""
        return self._copies.live_bytes

    def disk_bytes(self) -> int:
        """Allocated bytes of all generations, those being dropped or set aside included."""
        return self.shelf.disk_bytes()

    def measure(self, generation: int) -> Measured:
        """Scan and verify all of a generation; `damage` names what does not."""
        return self.generation(generation).measure()

    def recount(self) -> dict[int, Counts]:
        """Counts by a full scan of the rows; they equal `generations()`, or a counter is wrong. Reads every byte."""
        found: dict[int, Counts] = {}
        for number in self.shelf.numbers():
            measured = self.measure(number)
            live = 0
            for run, columns in measured.runs.items():
                for uid, ledger in columns.ledgers():
                    marks = self._copies.marks((number, run, uid))
                    if marks is not None:
                        live += sum(ledger.size(slot) for slot in marks.live_slots(len(ledger)))
            found[number] = Counts(measured.entries, measured.total, live)
        return found

    # Checkpoints

    def changes(self) -> list[tuple[bytes, bytes | None]]:
        """Rows for the host's meta store since the last call: one a group that changed, None where a group has nothing left."""
        with self._lock:
            rows = [(checkpoints.key(uid), self._row(uid)) for uid in sorted(self._dirty)]
            self._dirty.clear()
            return rows

    def _row(self, uid: int) -> bytes | None:
        homes = self._homes.get(uid)
        if not homes:
            return None
        owners = dict.fromkeys((home.generation, home.run) for home in homes)
        found = [(*owner, marks) for owner in owners if (marks := self._copies.marks((*owner, uid))) is not None]
        return checkpoints.encode(uid, homes, found)

    def checkpoint(self) -> bytes:
        """All of it in one value: homes, dead slots and live bytes of every group."""
        with self._lock:
            rows = [(checkpoints.key(uid), self._row(uid)) for uid in sorted(self._homes)]
            return checkpoints.join([(key, body) for key, body in rows if body is not None])

    def restore(self, saved: bytes | Iterable[tuple[bytes, bytes]]) -> None:
        """Take a `checkpoint`, or the rows that `changes` gave. Call after `open`, then replay the marks made since.

        Homes whose generation is gone (dropped after the checkpoint, or set aside) are in `lost`. Raises `PayloadCorrupt`.
        """
        rows = checkpoints.split(saved) if isinstance(saved, bytes) else list(saved)
        with self._lock:
            assert not self._homes, "restore comes first"
            present = set(self.shelf.numbers()) - set(self.shelf.failed())
            for key, body in rows:
                uid, homes, marks = checkpoints.decode(key, body)
                self._lost += [(uid, home.first, home.last) for home in homes if home.generation not in present]
                kept = [home for home in homes if home.generation in present]
                if kept:
                    self._homes[uid] = kept
                for generation, run, found in marks:
                    self._next_job = max(self._next_job, run + 1)
                    if generation in present:
                        self._copies.restore((generation, run, uid), found)
            self._dirty.clear()


def _first(home: Home) -> int:
    return home.first


def _without(homes: Iterable[Home], first: int, last: int) -> list[Home]:
    """The homes less the indexes first to last."""
    kept: list[Home] = []
    for home in homes:
        if home.last < first or home.first > last:
            kept.append(home)
            continue
        if home.first < first:
            kept.append(home._replace(last=first - 1))
        if home.last > last:
            kept.append(home._replace(first=last + 1))
    return kept
