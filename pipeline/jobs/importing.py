"""Import: an export back into a cluster, with the same logs, offsets and payloads. Run again, it changes nothing.

What a log holds already is compared with the export; what is missing is appended at the offset it must get, or not at
all. So neither a retry, nor a second import, nor one that was killed in the middle stores anything twice. Raft's
indexes, terms and times are the new cluster's own; the old ones stay in the export.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from logyard.client.sync import Log, Yard
from logyard.client.upload import WHOLE_BYTES
from logyard.protocol.errors import BadRequest, GroupExists, LogyardError, NotLeader, OutOfRange, Unknown, UnknownGroup

from ..errors import DataLoss
from ..network import NetworkSource
from ..options import Options, parse_options
from ..sources import Reading, Wanted
from .digests import Digest
from .manifest import ExportError, LogPart, read_manifest
from .parts import Row, pieces_of, read_part
from .running import Progress, Result, bins, run_tasks, silent

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FRAME_BYTES = 1 << 20
FRAME_RECORDS = 4096
TASKS = 16
TRIES = 8


class ImportFailed(LogyardError):
    """A log of the cluster is not what the export says."""

    code = "import"


class Import(NamedTuple):
    """The directory of an export, the client addresses of a cluster (and `given`: more options of the data source, as
    tlsCa), nodes for new logs (all), and which logs (all)."""

    source: Path
    given: dict[str, str]
    members: tuple[int, ...] | None = None
    logs: tuple[str, ...] | None = None

    @property
    def options(self) -> Options:
        """As the data source's."""
        return parse_options({**self.given, "subscribePattern": ".*"})


def run_import(spark: SparkSession, job: Import, progress: Progress = silent) -> dict[str, Any]:
    """Import; return plain figures. `progress` counts records. Raises `ExportError` for an export that is not whole,
    `ImportFailed` for a log that differs."""
    header, logs = read_manifest(job.source)
    if header["payloads"] == "none":
        raise ExportError(f"{job.source}: this export has no payloads (--payloads none)")
    if job.logs is not None:
        missing = sorted(set(job.logs) - {log.log for log in logs})
        if missing:
            raise ExportError(f"{job.source}: there is no log {missing[0]!r} in this export")
        logs = [log for log in logs if log.log in job.logs]
    create_logs(job, logs)
    appended = compared = passed_over = 0
    weighed = [(log.sum.payload_bytes + 1024 * (log.sum.rows + 1), log) for log in logs]
    failures: list[str] = []
    for result in run_tasks(spark, partial(import_logs, job), bins(weighed, TASKS)):
        appended += result["appended"]
        compared += result["compared"]
        passed_over += result["passed_over"]
        if result["failure"]:
            failures.append(result["failure"])
        progress(result["appended"] + result["compared"] + result["passed_over"])
    total = Digest()
    for log in logs:
        total = total.plus(log.sum)
    return {
        "ok": not failures, "source": str(job.source), "logs": len(logs), "rows": total.rows,
        "payload_bytes": total.payload_bytes, "appended": appended, "compared": compared,
        "passed_over": passed_over, "digest": total.text, "failures": sorted(failures),
    }  # fmt: skip


def opened(options: Options) -> NetworkSource:
    """Return the cluster."""
    from ..opening import open_source

    found = open_source(options)
    if not isinstance(found, NetworkSource):
        raise ExportError("an import needs a running cluster: give servers")
    return found


def create_logs(job: Import, logs: Sequence[LogPart]) -> None:
    """Create what is not there, each with its own first offset. What is there is compared later."""
    with closing(opened(job.options)) as cluster:
        known = {info.name for info in cluster.logs()}
        starts: dict[int, list[str]] = {}
        for log in logs:
            if log.log not in known:
                starts.setdefault(log.start, []).append(log.log)
        for start, names in starts.items():
            try:
                cluster.yard.create_many(names, members=job.members, start=start)
            except GroupExists:
                for name in names:
                    try:
                        cluster.yard.create_many([name], members=job.members, start=start)
                    except GroupExists:
                        continue


def import_logs(job: Import, logs: Sequence[LogPart]) -> Iterator[Result]:
    """Run one task: some logs, one after another. What is wrong with one is its failure, and the others go on."""
    with closing(opened(job.options)) as cluster:
        for log in logs:
            one = LogImport(job.source, cluster, log)
            failure = ""
            try:
                one.run()
            except (ImportFailed, ExportError, UnknownGroup) as error:
                failure = str(error)
            except LogyardError as error:
                if error.retry != "never":
                    # Of the cluster just now, and not of this log.
                    raise
                failure = f"log {log.log!r}: {error}"
            yield {
                "log": log.log, "appended": one.appended, "compared": one.compared, "passed_over": one.passed_over,
                "failure": failure,
            }  # fmt: skip


class LogImport:
    """One log. `next` is the first offset that is neither compared nor appended, nor passed over: truncated there."""

    def __init__(self, source: Path, cluster: NetworkSource, part: LogPart) -> None:
        self.source = source
        self.cluster = cluster
        self.part = part
        self.yard: Yard = cluster.yard
        self.log: Log = self.yard.log(part.log)
        self.next = part.start
        self.appended = 0
        self.compared = 0
        self.passed_over = 0
        self._conditional = True

    def run(self) -> None:
        """Compare, append, and when somebody else appended meanwhile: again."""
        tries, last = TRIES, -1
        while tries:
            tries = TRIES if self.next > last else tries - 1
            last = self.next
            start, end = self.log.latest()
            if end < self.next:
                raise ImportFailed(f"log {self.part.log!r} ends at {end}, its records begin at {self.next}: delete it")
            if start > self.next:
                # Truncated since it was imported, unless it is another log: so something has to be compared.
                passed_over = min(start, self.part.end) - self.next
                self.passed_over += passed_over
                self.next += passed_over
                if not (self.compared or self.appended) and self.next in (self.part.end, end):
                    raise ImportFailed(
                        f"log {self.part.log!r} begins at {start}, behind all that could be compared with the export "
                        f"({self.part.start} to {self.part.end}): if it is not this one, delete it"
                    )
            try:
                self._compare(min(end, self.part.end))
            except DataLoss:
                # Truncated or deleted meanwhile: what is there now is looked at.
                continue
            if self.next == self.part.end:
                return
            try:
                self._append()
                return
            except (OutOfRange, Unknown, NotLeader):
                continue
        raise ImportFailed(f"log {self.part.log!r}: somebody else appends to it (it ends at {self.log.latest()[1]})")

    def _rows(self, first: int) -> Iterator[Row]:
        """Yield the export's records from `first` on; each part's digest is checked when it was read to its end."""
        for part in self.part.parts:
            if part.end > first:
                yield from read_part(self.source, part, first)

    def _compare(self, end: int) -> None:
        """Check that what the cluster has up to `end` is what the export has."""
        if self.next >= end:
            return
        wanted = Wanted(self.part.log, 0, self.next, end)
        rows = self._rows(self.next)
        for batch in self.cluster.read([wanted], Reading(verify=True)):
            names = ("offset", "meta", "payload_size", "payload_hash")
            columns = [batch.column(name).to_pylist() for name in names]
            for there, row in zip(zip(*columns, strict=True), rows, strict=False):
                if there != (row.offset, row.meta, row.size, row.hash):
                    raise ImportFailed(f"log {self.part.log!r}: its record {there[0]} is not the export's")
                self.next += 1
                self.compared += 1

    def _append(self) -> None:
        """Append everything from `next` on."""
        frame: list[tuple[bytes, bytes | None]] = []
        size = 0
        for row in self._rows(self.next):
            if (row.size or 0) > WHOLE_BYTES:
                self._send(frame)
                frame, size = [], 0
                self._send_long(row)
                continue
            if size + len(row.meta) + (row.size or 0) > FRAME_BYTES or len(frame) == FRAME_RECORDS:
                self._send(frame)
                frame, size = [], 0
            frame.append((row.meta, row.payload if row.place is None else b"".join(pieces_of(row))))
            size += len(row.meta) + (row.size or 0)
        self._send(frame)

    def _send(self, frame: Sequence[tuple[bytes, bytes | None]]) -> None:
        if not frame:
            return
        if self._conditional:
            try:
                self._sent(self.log.append_many(frame, at=self.next), len(frame))
                return
            except BadRequest:
                # It was made without a start, and takes plain appends only.
                self._conditional = False
        self._sent(self.log.append_many(frame), len(frame))

    def _send_long(self, row: Row) -> None:
        pieces = pieces_of(row)
        if self._conditional:
            try:
                offset = self.log.append_stream(row.meta, pieces, row.size, at=self.next)
                self._sent(range(offset, offset + 1), 1)
                return
            except BadRequest:
                self._conditional, pieces = False, pieces_of(row)
        offset = self.log.append_stream(row.meta, pieces, row.size)
        self._sent(range(offset, offset + 1), 1)

    def _sent(self, offsets: range, count: int) -> None:
        if offsets.start != self.next:
            raise ImportFailed(
                f"log {self.part.log!r}: somebody else appends to it: record {self.next} became {offsets.start}"
            )
        self.next += count
        self.appended += count
