"""The payload store behind the engine's port: its jobs run one at a time.

Invariant: a job is adopted or abandoned before the next is built. Jobs run in a thread, or, when the node has a writer
process, there: then this process opens generations for reading only. Wired by `node.build_system`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import trio

from logyard.engine.config import SystemConfig
from logyard.engine.disk.door import Disk
from logyard.engine.jobs import Jobs
from logyard.engine.log.payload_source import FileSource
from logyard.engine.ports import SourceEntry
from logyard.engine.ranges import union
from logyard.engine.types import Buffer
from logyard.payloads import verify
from logyard.payloads.bodies import NAME as BODIES
from logyard.payloads.checkpoints import Home
from logyard.payloads.compaction import MigrateReport, RewriteJob
from logyard.payloads.layout import StoredEntry
from logyard.payloads.liveness import Liveness, decode_live_set
from logyard.payloads.reference import PayloadRange, Position
from logyard.payloads.store import GenerationInfo, PayloadStore, StoreConfig
from logyard.payloads.transfer import subtract
from logyard.protocol.errors import (
    Busy,
    Corrupt,
    GenerationFailed,
    LogyardError,
    NoSpace,
)

from .writer.jobs import FILE, REWRITE, ROWS, Pacer, migrate_file, pack_rows, source_row, unpack_report
from .writer.process import WriterAway, WriterProcess

log = logging.getLogger(__name__)


class StoreAdapter:
    """`engine.ports.StorePort` over a `PayloadStore`."""

    def __init__(self, directory: Path, config: SystemConfig, disk: Disk, writer: WriterProcess | None = None) -> None:
        limits = StoreConfig(
            config.generation_bytes, config.generation_transaction_bytes, remote_writer=writer is not None,
            beside=bool(config.generation_files),
        )  # fmt: skip
        self._store = PayloadStore(directory, limits, disk)
        self._disk = disk
        self._writer = writer
        self.jobs = Jobs()
        self._job = trio.Lock()
        # Generations whose rewriting failed or killed the writer process: left as they are until the next start.
        self._poisoned: set[int] = set()

    def open(self) -> Sequence[int]:
        """Open what is there; return the generations set aside. BLOCKING."""
        return self._store.open()

    def close(self) -> None:
        """Close every environment."""
        self._store.close()

    def restore(self, pairs: Iterable[tuple[bytes, bytes]]) -> None:
        """Restore the rows of earlier `changes`."""
        self._store.restore(pairs)

    def changes(self) -> list[tuple[bytes, bytes | None]]:
        """Return rows for the meta store."""
        return self._store.changes()

    def new_liveness(self) -> Liveness:
        """Return an empty liveness: everything lives."""
        return Liveness()

    def decode_liveness(self, live_set: bytes) -> Liveness:
        """Return the liveness of a snapshot. A missing or damaged live set is an error."""
        return decode_live_set(live_set).liveness

    def missing(self, live_set: bytes, have_through: int) -> list[tuple[int, int]]:
        """Return entry ranges to ask for, rising and disjoint: of one entry several parts may live."""
        wanted = decode_live_set(live_set).ranges()
        held = [PayloadRange(Position(0, 0), Position(have_through + 1, 0))]
        left = subtract(wanted, held)
        return union((first.index, end.index if end.ordinal else end.index - 1) for first, end in left)

    def lost(self, uid: int, first: int, last: int) -> bool:
        """Return whether a failed generation took payloads of these entries that have no other home since."""
        return self._store.is_lost(uid, first, last)

    def lost_ranges(self) -> Sequence[tuple[int, int, int]]:
        """Return everything that was lost."""
        return self._store.lost()

    def lose(self, uid: int, first: int, last: int) -> None:
        """Count the home of these entries as lost."""
        self._store.lose(uid, first, last)

    def found(self, uid: int, first: int, last: int) -> None:
        """Count what lives of these entries as at home again."""
        self._store.found(uid, first, last)

    def home(self, uid: int, index: int) -> Home | None:
        """Return where an entry's payload is."""
        return self._store.home(uid, index)

    def homes(self, uid: int) -> Sequence[Home]:
        """Return all homes of a group."""
        return self._store.homes(uid)

    def scan(self, uid: int, first: int, last: int) -> Iterator[StoredEntry]:
        """Yield the metadata of stored entries."""
        yield from self._store.scan(uid, first, last, bodies=False)

    def read_unit(self, uid: int, index: int, unit: int, start: int, stop: int) -> bytes:
        """Return verified bytes."""
        return self._store.read_unit(uid, index, unit, start, stop)

    def pin(self, generation: int) -> None:
        """Keep a generation."""
        self._store.pin(generation)

    def unpin(self, generation: int) -> None:
        """Undo one pin."""
        self._store.unpin(generation)

    async def write(
        self, ranges: Sequence[tuple[int, int, int]], read: Callable[[int, int, int], Iterable[SourceEntry]]
    ) -> None:
        """Copy entries to the current generation and make it their home."""
        async with self._job:
            job = self._store.migrate_job(ranges)
            if self._writer is None:
                run = partial(self._store.run, job, lambda *one: map(source_row, read(*one)))
                await self._finish(trio.to_thread.run_sync(run))
                return

            async def there() -> MigrateReport:
                # What `read` gives may lie on the disk.
                found = partial(pack_rows, (entry for one in ranges for entry in read(*one)))
                rows, bodies = await trio.to_thread.run_sync(found)
                return await self._there("payloads of entries", lambda: [ROWS, 0, list(job), rows], bodies)

            await self._finish(there())

    async def migrate(self, build: Callable[[], FileSource], bytes_s: int) -> None:
        """Copy what lives in a sealed WAL file to the current generation and make it its home."""
        async with self._job:
            # In one step: what dies from here on is remembered for the copy.
            source = build()
            if not source.groups:
                # All of it died while the job waited: there is nothing to copy.
                return
            job = self._store.migrate_job(source.ranges)
            if self._writer is None:
                step = Pacer(bytes_s, _pause)
                run = partial(migrate_file, source, job, self._disk, self._store.catalog, step)
                await self._finish(trio.to_thread.run_sync(run))
                return
            what = f"migration of WAL file {source.file}"
            await self._finish(self._there(what, lambda: [FILE, bytes_s, list(job), source.pack()]))

    async def rewrite_sparse(
        self,
        live_ratio: float,
        bytes_s: int,
        may_copy: Callable[[int], bool],
        drop: Callable[[], Awaitable[object]],
    ) -> bool:
        """Rewrite what lives too little; return False where that was not all, for want of room. What can't be rewritten
        holds up none of the others; raises its error then."""
        roomy = True
        trouble: LogyardError | None = None
        for number in self._store.sparse(live_ratio):
            async with self._job:
                # As of now: others had their turn.
                live = self._store.live_in(number)
                if not live or number in self._poisoned:
                    continue
                if not may_copy(live):
                    roomy = False
                    continue
                try:
                    await self._rewrite(number, bytes_s)
                except (Busy, NoSpace, WriterAway):
                    # Nothing is wrong with it.
                    raise
                except LogyardError as error:
                    # Damaged or deadly: each try would fill the current generation with half a copy.
                    self._poisoned.add(number)
                    trouble = trouble or error
                    continue
            await drop()
        if trouble is not None:
            raise trouble
        return roomy

    async def _rewrite(self, number: int, bytes_s: int) -> None:
        job = self._store.rewrite_job(number)
        if self._writer is None:
            run = partial(self._store.run, job, step=Pacer(bytes_s, _pause))
            await self._finish(trio.to_thread.run_sync(run))
        else:
            await self._finish(self._rewrite_there(number, bytes_s, job))

    async def _rewrite_there(self, number: int, bytes_s: int, job: RewriteJob) -> MigrateReport:
        return await self._there(f"rewriting of generation {number}", lambda: [REWRITE, bytes_s, list(job)])

    async def _finish(self, run: Awaitable[MigrateReport]) -> None:
        """Wait for the running job, and adopt what it did. When this raises, nothing works on it any more."""
        try:
            report = await run
            if report.damaged:
                uid, index, reason = report.damaged[0]
                raise Corrupt(f"payload of entry {index} of group {uid:016x}", 0, "its hash", reason)
            self._store.reach(report)
        except BaseException:
            self._store.abandon()
            raise
        with self.jobs.switching("payloads that a job copied"):
            self._store.adopt(report)

    async def _there(
        self, what: str, pack: Callable[[], Sequence[object]], bodies: Sequence[Buffer] = ()
    ) -> MigrateReport:
        """Run a job in the writer process; what that was inside of when it died is looked at before it goes on."""
        assert self._writer is not None

        async def died() -> None:
            aside = await trio.to_thread.run_sync(self._store.examine)
            if aside:
                log.error("payloads: generations %s killed the writer process: they are set aside", aside)

        return unpack_report(await self._writer.call(what, pack, bodies, died))

    def mark_dead(self, uid: int, first: tuple[int, int], end: tuple[int, int]) -> object:
        """Mark these units as dead."""
        return self._store.mark_dead(uid, first, end)

    def truncate(self, uid: int, from_index: int) -> object:
        """End the homes of the log's tail, which was overwritten."""
        return self._store.truncate(uid, from_index)

    def delete_group(self, uid: int) -> object:
        """Count all payloads of a group as dead."""
        return self._store.delete_group(uid)

    def seal_current(self) -> None:
        """Have the next write start a new generation. BLOCKING."""
        self._store.seal_current()

    def dead_generations(self) -> Sequence[int]:
        """Return the generations of which nothing lives and which may go now."""
        return self._store.dead_generations()

    def unlink_dead(self, generations: Sequence[int]) -> int:
        """Unlink these, unless something keeps them; return the bytes of disk given back. BLOCKING."""
        return 0 if self.jobs.frozen else sum(map(self._store.drop, generations))

    def generations(self) -> Sequence[GenerationInfo]:
        """Return what there is."""
        return self._store.generations()

    def disk_bytes(self) -> int:
        """Return the allocated bytes."""
        return self._store.disk_bytes()

    def data_file(self, generation: int) -> str:
        """Return LMDB's name for it."""
        return os.path.join(self._store.catalog.path(generation), "data.mdb")

    def bodies_file(self, generation: int) -> str:
        """Return the name of the file beside it."""
        return os.path.join(self._store.catalog.path(generation), BODIES)

    async def verify(self, generation: int) -> tuple[Sequence[tuple[int, int]], str]:
        """Verify a generation in a process of its own, which may die of it. Raises OSError when that could not tell."""
        store = self._store
        path = store.catalog.path(generation)
        runs = {home.run for _, home in store.homes_in(generation)}
        command = verify.command(path, generation, store.config.generation_bytes, runs)
        done = await trio.run_process(
            command, capture_stdout=True, capture_stderr=True, check=False, env=verify.environment()
        )
        if generation not in store.catalog.numbers():
            return [], ""
        found = verify.Verified.of_process(done.returncode, done.stdout)
        homes = [(uid, index, run, store.home(uid, index)) for run, uid, index in found.entries]
        return [
            (uid, index)
            for uid, index, run, home in homes
            if home is not None and (home.generation, home.run) == (generation, run)
        ], found.reason

    def at_home(self, generation: int) -> Sequence[tuple[int, int, int]]:
        """Return what is at home there, of all groups."""
        return [(uid, home.first, home.last) for uid, home in self._store.homes_in(generation)]

    def fail(self, generation: int, reason: str) -> None:
        """Treat a generation as if it could not be opened."""
        self._store.fail(generation, GenerationFailed(self._store.catalog.path(generation), reason))


def _pause(seconds: float) -> None:
    """Wait, in a worker thread, by the loop's clock; over when its task is cancelled."""
    trio.from_thread.run(trio.sleep, seconds)
