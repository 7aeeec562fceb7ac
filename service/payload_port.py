"""The payload store behind the engine's port: its errors become the engine's, its jobs run one at a time in a
thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import trio

from logyard.engine.config import SystemConfig
from logyard.engine.disk import Disk
from logyard.engine.entry import unit_seed, units_of
from logyard.engine.errors import Corrupt, Gone, LogyardError, NoSpace
from logyard.engine.ports import SourceEntry
from logyard.payloads.checkpoints import Home
from logyard.payloads.compaction import MigrateJob, RewriteJob, choose_rewrite
from logyard.payloads.errors import PayloadCorrupt, PayloadError, PayloadMissing, StoreFull
from logyard.payloads.layout import SourceRow, SourceUnit, StoredEntry
from logyard.payloads.liveness import Liveness, decode_live_set
from logyard.payloads.reference import PayloadRange, Position
from logyard.payloads.store import GenerationInfo, PayloadStore, StoreConfig
from logyard.payloads.transfer import subtract


class StoreAdapter:
    """`engine.ports.StorePort` over a `PayloadStore`."""

    def __init__(self, directory: Path, config: SystemConfig, disk: Disk) -> None:
        limits = StoreConfig(config.generation_bytes, config.generation_transaction_bytes)
        self._store = PayloadStore(directory, limits, disk)
        self._job = trio.Lock()

    def open(self) -> Sequence[int]:
        """BLOCKING."""
        with _translated():
            return self._store.open()

    def close(self) -> None:
        """Close every environment."""
        self._store.close()

    def restore(self, pairs: Iterable[tuple[bytes, bytes]]) -> None:
        """The rows of earlier `changes`."""
        with _translated():
            self._store.restore(pairs)

    def changes(self) -> list[tuple[bytes, bytes | None]]:
        """Rows for the meta store."""
        return self._store.changes()

    def new_liveness(self) -> Liveness:
        """Everything lives."""
        return Liveness()

    def decode_liveness(self, live_set: bytes) -> Liveness:
        """Of a snapshot. A missing or damaged live set is an error."""
        with _translated():
            return decode_live_set(live_set).liveness

    def missing(self, live_set: bytes, have_through: int) -> list[tuple[int, int]]:
        """Entry ranges to ask for."""
        with _translated():
            wanted = decode_live_set(live_set).ranges()
        held = [PayloadRange(Position(0, 0), Position(have_through + 1, 0))]
        left = subtract(wanted, held)
        return [(first.index, end.index if end.ordinal else end.index - 1) for first, end in left]

    def home(self, uid: int, index: int) -> Home | None:
        """Where an entry's payload is."""
        return self._store.home(uid, index)

    def homes(self, uid: int) -> Sequence[Home]:
        """All homes of a group."""
        return self._store.homes(uid)

    def scan(self, uid: int, first: int, last: int) -> Iterator[StoredEntry]:
        """Metadata of stored entries."""
        with _translated():
            yield from self._store.scan(uid, first, last, bodies=False)

    def read_unit(self, uid: int, index: int, unit: int, start: int, stop: int) -> bytes:
        """Verified bytes."""
        with _translated():
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
            await self._run(job, lambda uid, first, last: map(_source_row, read(uid, first, last)))

    async def rewrite_sparse(self, live_ratio: float) -> int:
        """Rewrite what lives too little."""
        done = 0
        async with self._job:
            for number in choose_rewrite(self._store.generations(), live_ratio):
                await self._run(self._store.rewrite_job(number), None)
                done += 1
        return done

    async def _run(
        self, job: MigrateJob | RewriteJob, read: Callable[[int, int, int], Iterable[SourceRow]] | None
    ) -> None:
        try:
            with _translated():
                report = await trio.to_thread.run_sync(self._store.run, job, read)
                if report.damaged:
                    uid, index, reason = report.damaged[0]
                    raise Corrupt(f"payload of entry {index} of group {uid:016x}", 0, "its hash", reason)
                self._store.adopt(report)
        except BaseException:
            self._store.abandon()
            raise

    def mark_dead(self, uid: int, first: tuple[int, int], end: tuple[int, int]) -> object:
        """These units are dead."""
        with _translated():
            return self._store.mark_dead(uid, first, end)

    def truncate(self, uid: int, from_index: int) -> object:
        """The log's tail was overwritten."""
        with _translated():
            return self._store.truncate(uid, from_index)

    def delete_group(self, uid: int) -> object:
        """All of it is dead."""
        return self._store.delete_group(uid)

    def seal_current(self) -> None:
        """BLOCKING."""
        with _translated():
            self._store.seal_current()

    def dead_generations(self) -> Sequence[int]:
        """Those of which nothing lives and which may go now."""
        return self._store.dead_generations()

    def unlink_dead(self, generations: Sequence[int]) -> int:
        """BLOCKING."""
        with _translated():
            return sum(map(self._store.drop, generations))

    def generations(self) -> Sequence[GenerationInfo]:
        """What there is."""
        return self._store.generations()

    def disk_bytes(self) -> int:
        """Allocated bytes."""
        return self._store.disk_bytes()


def _source_row(entry: SourceEntry) -> SourceRow:
    """All units with seed and hash, so that the copy is checked against the proposer's own hashes."""
    units = [
        SourceUnit(
            unit.number,
            unit.length,
            bool(unit.records),
            unit_seed(entry.uid, entry.index, entry.term, unit.number),
            unit.hash,
        )
        for unit in units_of(entry.data)
    ]
    return SourceRow(entry.uid, entry.index, entry.term, entry.data, units, entry.live, entry.read)


class _translated:
    """The store's errors as the engine's."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, PayloadError):
            return
        if isinstance(error, PayloadMissing):
            raise Gone(str(error)) from error
        if isinstance(error, StoreFull):
            raise NoSpace(str(error)) from error
        if isinstance(error, PayloadCorrupt):
            corrupt = Corrupt("payload store", 0, "", "")
            Exception.__init__(corrupt, str(error))
            raise corrupt from error
        raise LogyardError(str(error)) from error
