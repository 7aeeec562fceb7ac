"""The storage jobs as they travel: plain values in, plain values out, and the functions that run them.

Invariant: a job only adds, so it may be cut off at any step and sent again: segments are published whole, and each
transaction of a generation stores how far the job came. The same functions run in a thread of an embedded system.
Called by `writer` (the process) and `payload_port` (both ways). Imports no trio: the process is small.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from logyard.engine.disk.door import Disk
from logyard.engine.entry import unit_seed, units_of
from logyard.engine.log.payload_source import FileReader, FileSource
from logyard.engine.log.segment_job import SegmentJob, run_segment_job
from logyard.engine.ports import SourceEntry
from logyard.payloads.catalog import Catalog
from logyard.payloads.compaction import MigrateJob, MigrateReport, RewriteJob, run_migrate, run_rewrite
from logyard.payloads.journal import IN_USE_WRITER, Journal
from logyard.payloads.layout import SourceRow, SourceUnit
from logyard.payloads.writing import GenerationConfig, Step
from logyard.protocol.errors import SHORT_RETRY_S, SHORTAGE, Busy, Corrupt, LogyardError, NoSpace

SEGMENT, FILE, ROWS, REWRITE = "segment", "file", "rows", "rewrite"
OK, ERROR = "ok", "error"
PAUSE_S_MIN = 0.001
"""A shorter pause is not worth a wake-up; it adds up and is taken later."""


class Pacer:
    """Keeps a job at `bytes_s` bytes a second (0: no limit): a step callback. `wait(seconds)` pauses."""

    __slots__ = ("_bytes_s", "_wait", "_clock", "_begun", "_bytes")

    def __init__(
        self, bytes_s: int, wait: Callable[[float], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bytes_s = bytes_s
        self._wait = wait
        self._clock = clock
        self._begun = clock()
        self._bytes = 0

    def __call__(self, step: str, size: int) -> None:
        """Wait as long as the rate asks for after `size` bytes became durable."""
        self._bytes += size
        if size and self._bytes_s:
            ahead = self._bytes / self._bytes_s - (self._clock() - self._begun)
            if ahead >= PAUSE_S_MIN:
                self._wait(ahead)


class Jobs:
    """Runs jobs on the data directory `directory`, one at a time, with environments that are open for one job only: in
    between, the main process may seal, drop and unlink generations. `wait(seconds)` pauses a job."""

    def __init__(
        self, directory: str, maps: GenerationConfig, disk: Disk, step: Step, wait: Callable[[float], object]
    ) -> None:
        self._payloads = os.path.join(directory, "payloads")
        self._maps = maps
        self._disk = disk
        self._step = step
        self._wait = wait

    def run(self, kind: str, arguments: Sequence[Any], body: memoryview) -> list[object]:
        """Return the reply to one job: `OK` and its result, or `ERROR`, a kind and what it says."""
        try:
            return [OK, *self._run(kind, arguments, body)]
        except (LogyardError, OSError) as error:
            return [ERROR, *encode_failure(error)]

    def _run(self, kind: str, arguments: Sequence[Any], body: memoryview) -> list[object]:
        if kind == SEGMENT:
            self._step("before segment", 0)
            written = run_segment_job(self._disk, SegmentJob.unpack(arguments[0]))
            self._step("after segment", written.info.bytes)
            return written.pack()
        pacer = Pacer(arguments[0], self._wait)

        def step(name: str, size: int) -> None:
            self._step(name, size)
            pacer(name, size)

        journal = Journal(os.path.join(self._payloads, IN_USE_WRITER))
        journal.open()
        catalog = Catalog(self._payloads, self._maps, self._disk, journal=journal)
        try:
            return pack_report(self._payload_job(catalog, kind, arguments[1:], body, step))
        finally:
            catalog.close()
            journal.close()

    def _payload_job(
        self, catalog: Catalog, kind: str, arguments: Sequence[Any], body: memoryview, step: Step
    ) -> MigrateReport:
        if kind == REWRITE:
            job, generation, source, homes, dead = arguments[0]
            rewrite = RewriteJob(job, generation, source, [tuple(home) for home in homes], [tuple(one) for one in dead])
            return run_rewrite(self._payloads, rewrite, disk=self._disk, catalog=catalog, step=step)
        job, generation, ranges, _ = arguments[0]
        migrate = MigrateJob(job, generation, [tuple(one) for one in ranges])
        if kind == FILE:
            return migrate_file(FileSource.unpack(arguments[1]), migrate, self._disk, catalog, step)
        assert kind == ROWS, f"no job of ours: {kind}"
        entries = unpack_rows(arguments[1], body)
        return run_migrate(self._payloads, migrate, reader_of(entries), disk=self._disk, catalog=catalog, step=step)


def migrate_file(source: FileSource, job: MigrateJob, disk: Disk, catalog: Catalog, step: Step) -> MigrateReport:
    """Copy what lives in a sealed WAL file into generations. Raises `Corrupt`, and what `run_migrate` raises."""
    with FileReader(disk, source) as reader:
        return run_migrate(
            catalog.directory,
            job,
            lambda *one: map(source_row, reader.read(*one)),
            disk=disk,
            catalog=catalog,
            step=step,
        )


def reader_of(entries: Sequence[SourceEntry]) -> Callable[[int, int, int], Iterable[SourceRow]]:
    """Return a job's source from entries in memory."""
    return lambda uid, first, last: (
        source_row(entry) for entry in entries if entry.uid == uid and first <= entry.index <= last
    )


def source_row(entry: SourceEntry) -> SourceRow:
    """Return all units with seed and hash, so that the copy is checked against the proposer's own hashes."""
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


def pack_rows(entries: Iterable[SourceEntry]) -> tuple[list[object], list[Any]]:
    """Return entries in memory as (plain rows, their payloads in order)."""
    rows: list[object] = []
    bodies: list[Any] = []
    for entry in entries:
        size = sum(unit.length for unit in units_of(entry.data))
        live = None if entry.live is None else sorted(entry.live)
        rows.append([entry.uid, entry.index, entry.term, entry.data, live, size])
        bodies.append(entry.read(0, size))
    return rows, bodies


def unpack_rows(rows: Sequence[Any], body: memoryview) -> list[SourceEntry]:
    """Return what `pack_rows` took apart, with the payloads joined in `body`."""
    entries = []
    at = 0
    for uid, index, term, data, live, size in rows:
        part = body[at : at + size]
        at += size

        def read(offset: int, length: int, part: memoryview = part) -> memoryview:
            return part[offset : offset + length]

        entries.append(SourceEntry(uid, index, term, data, None if live is None else set(live), read))
    return entries


def pack_report(report: MigrateReport) -> list[object]:
    """Return a report as nested lists."""
    return [*report[:3], [list(run) for run in report.runs], [list(one) for one in report.damaged], report.source]


def unpack_report(plain: Sequence[Any]) -> MigrateReport:
    """Return the report that `pack_report` was given."""
    job, rows, written, runs, damaged, source = plain
    return MigrateReport(job, rows, written, [tuple(run) for run in runs], [tuple(one) for one in damaged], source)


def encode_failure(error: Exception) -> list[object]:
    """Return (kind, number, message) of a failed job."""
    if isinstance(error, Corrupt):
        return ["corrupt", 0, str(error)]
    if isinstance(error, NoSpace):
        return ["no_space", errno.ENOSPC, str(error)]
    if isinstance(error, Busy):
        return ["busy", 0, str(error)]
    if isinstance(error, OSError):
        return ["os", error.errno or 0, str(error)]
    return ["error", 0, str(error)]


def decode_failure(kind: str, number: int, message: str) -> LogyardError | OSError:
    """Return the exception that the job would have raised here."""
    if kind == "corrupt":
        return Corrupt.told(message)
    if kind == "no_space":
        return NoSpace(message)
    if kind == "busy":
        return Busy.told(message, {"cause": SHORTAGE, "retry_after": SHORT_RETRY_S})
    if kind == "os":
        return OSError(number, message)
    return LogyardError(message)
