"""The stream source: what Spark asks on the driver between batches, and the tasks that read them.

Spark keeps one process for `StreamReader` on the driver while a query runs, and its connection with it. What a batch
reads follows from its two offsets and the options alone (`stream_offsets.between`, `partitions.cut`); whom to ask is
found out in the task. Neither `commit` nor `stop` is relied on: Spark leaves both out at times.
"""

from __future__ import annotations

import json
import logging
import random
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from logyard.client.log import latest_call
from logyard.client.session import backoff
from logyard.protocol.errors import LogyardError
from logyard.protocol.topics import Ended, Topic

from .errors import DataLoss, OptionError
from .log_table import LogTable
from .offsets import check_named, first_offsets, starting_times
from .opening import KEPT, open_network
from .options import Options
from .partitions import ROW_BYTES, cut
from .sources import RECORD, LogInfo, Reading, Wanted
from .stream_offsets import (
    Limit,
    Lost,
    Position,
    StreamOffset,
    advance,
    between,
    came_and_went,
    is_read,
    parse_offset,
    unread,
    without_passed_over,
)
from .topics import as_asked, ended_logs, partition_logs, topic_rows

if TYPE_CHECKING:
    import pyarrow

    from .network import NetworkSource

log = logging.getLogger(__name__)

HINT_PATIENCE_S = 3.0
LEADER_PATIENCE_S = 3.0
HINT_PAUSE_S = 30.0
"""A consumer's hint that could not be written is not tried again for so long."""
GONE_MAX = 64
"""Logs that are looked for on every node in one trigger, because no node listed them."""
THERE_S = 10.0
"""A log that no node lists and that is not gone (it is halted, say) is not looked for again for so long."""
SAMPLE_ROWS = 100
SAMPLE_HOLDS = 1000
SAMPLES_MAX = 64
"""The sizes of so many records are looked at where a limit is in bytes; again after so many; of so many logs a time."""


@dataclass
class StreamPartition(InputPartition):
    """What one task of a batch reads."""

    ranges: tuple[Wanted, ...]
    lost: tuple[Lost, ...] = ()


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream over the logs that the options name. `options` are parsed when they are first needed: what a constructor
    raises, Spark hides behind an error of its own."""

    def __init__(self, options: Callable[[], Options]) -> None:
        self._parse = options
        self._parsed: Options | None = None
        self._source: NetworkSource | None = None
        self._table: LogTable | None = None
        self._pinned: Seen | None = None
        self._report: dict[str, int] | None = None
        # By uid: bytes of a record, and the offset up to which that is thought to hold.
        self._sizes: dict[int, tuple[int, int]] = {}
        self._there_until: dict[str, float] = {}
        self._hint_after = 0.0
        self._partitions: frozenset[str] = frozenset()
        # Where partitions ended, by name and uid of their log.
        self._ended: dict[tuple[str, int], int] = {}
        # Of those that are gone: (name, uid, end) by topic, the oldest first.
        self._gone_logs: dict[str, tuple[Ended, ...]] = {}
        self._topics_after = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {"options": self.options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        options = state["options"]
        StreamReader.__init__(self, lambda: options)

    @property
    def options(self) -> Options:
        """The stream's options. Raises `OptionError`."""
        if self._parsed is None:
            self._parsed = self._parse()
        return self._parsed

    @property
    def source(self) -> NetworkSource:
        """The cluster, connected as long as this process lives."""
        if self._source is None:
            self._source = open_network(self.options)
        return self._source

    # Between batches

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return the limit that the options ask for."""
        if self.options.max_offsets is not None:
            return ReadMaxRows(self.options.max_offsets)
        if self.options.max_bytes is not None:
            return ReadMaxBytes(self.options.max_bytes)
        return ReadAllAvailable()

    def initialOffset(self) -> dict[str, Any]:
        """Return where a new query begins. Raises `OptionError`, `DataLoss`."""
        names: Collection[str] | None = self.options.names
        if self.options.topics is not None:
            rows = topic_rows(self.source.yard, self.options.topics)
            self._note_ended(rows)
            names = partition_logs(rows)
        infos = self.source.survey(names, self.options.pattern).infos
        check_named(self.options, infos, names)
        times = starting_times(self.options, infos)
        firsts = first_offsets(self.options, infos, self.source.offsets_at(times) if times else {})
        logs = {info.name: Position(info.uid, firsts[info.name]) for info in infos}
        return StreamOffset(logs, initial=True, gone=self._newest_gone()).plain()

    def prepareForTriggerAvailableNow(self) -> None:
        """Pin the ends: what is appended from now on is not read by this run."""
        self._pinned = self._look()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return the end of the next batch, which is `start` when there is nothing new. Raises `DataLoss`."""
        options = self.options
        since = parse_offset(start)
        seen = self._pinned or self._look()
        ended = without_passed_over(self._ended, self._gone_logs, since)
        gone = self._gone(since, seen, ended)
        self._check_ends(since, seen)
        end = advance(since, seen.infos, gone, options, self._limit(limit, since, seen.infos), ended)
        lost = came_and_went(self._gone_logs, since) if options.new_logs != "latest" else []
        if lost and options.fail:
            raise unread(lost[0])
        self._report = report(end, seen.infos)
        if end is since and not since.initial and not lost:
            return start
        # An end is no start of a new query: what is missing behind it is missed.
        return replace(end, initial=False, gone=self._newest_gone(), lost=tuple(lost)).plain()

    def reportLatestOffset(self) -> dict[str, int] | None:
        """Return how many logs and records there are, and how far the last batch is behind them."""
        return self._report

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        """Return the tasks of a batch: the same for the same offsets and options, always."""
        batch = between(parse_offset(start), parse_offset(end))
        tasks = cut(batch.ranges, self.options.max_partition_rows, self.options.min_partitions)
        found: list[InputPartition] = [StreamPartition(task) for task in tasks]
        if batch.lost:
            found.append(StreamPartition((), tuple(batch.lost)))
        return found

    def commit(self, end: dict[str, Any]) -> None:
        """Leave a hint of how far the stream is, where `consumer` says so. Nothing reads it back; a hint that can't be
        written is a warning."""
        if self.options.consumer is None or time.monotonic() < self._hint_after:
            return
        group, key = self.options.consumer
        value = {"at_ms": time.time_ns() // 1_000_000, **end}
        try:
            self.source.yard.kv(group).put(key.encode(), json.dumps(value).encode(), timeout=HINT_PATIENCE_S)
        except LogyardError as error:
            log.warning("consumer: %s/%s could not be written: %s", group, key, error)
            self._hint_after = time.monotonic() + HINT_PAUSE_S

    def stop(self) -> None:
        """Close the connection; Spark calls this after an error only."""
        if self._source is not None:
            self._source.close()
            self._source = None

    # In a task

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """Yield the records of one task."""
        # Without any task Spark makes one of its own.
        ranges: tuple[Wanted, ...] = getattr(partition, "ranges", ())
        lost: tuple[Lost, ...] = getattr(partition, "lost", ())
        yield from as_asked(self._read(ranges, lost, self.options.reading), self.options)

    def _read(self, ranges: Sequence[Wanted], lost: Sequence[Lost], reading: Reading) -> Iterator[pyarrow.RecordBatch]:
        for one in lost:
            yield ended(one, reading)
        if ranges:
            source = KEPT.source(self.options)
            source.refresh()
            yield from source.read(source.place(ranges), reading)

    # What there is

    def _look(self) -> Seen:
        """Return what logs there are now. While no node answers, wait: all of them may be restarting."""
        chance, failures = random.Random(), 0
        deadline = time.monotonic() + self.options.timeout_s
        while True:
            try:
                self._look_up()
                if self._table is None:
                    self._table = LogTable(self._chosen)
                self.source.refresh()
                self.source.follow(self._table)
                return Seen(list(self._table.infos.values()), bool(self._table.missing), set())
            except OptionError:
                raise
            except LogyardError:
                # A connection that is kept may be the trouble.
                self.stop()
                if time.monotonic() > deadline:
                    raise
            threading.Event().wait(backoff(failures, chance))
            failures += 1

    def _look_up(self) -> None:
        """See which partitions the topics have by now. Those that are known are read on while nobody can tell. Raises
        `OptionError` for a topic that is not there."""
        topics = self.options.topics
        if topics is None or (self._partitions and time.monotonic() < self._topics_after):
            return
        try:
            rows = topic_rows(self.source.yard, topics, LEADER_PATIENCE_S)
        except OptionError:
            raise
        except LogyardError as error:
            if not self._partitions:
                raise
            log.warning("subscribeTopic: the topics could not be looked up: %s", error)
            self._topics_after = time.monotonic() + THERE_S
            return
        found = partition_logs(rows)
        self._note_ended(rows)
        if not self._partitions.issuperset(found):
            self._partitions = self._partitions.union(found)
            # It has left out what nodes told about them.
            self._table = None

    def _note_ended(self, rows: Sequence[Topic]) -> None:
        self._ended, self._gone_logs = ended_logs(rows), {row.name: row.ended for row in rows}

    def _newest_gone(self) -> dict[str, int] | None:
        """Return by topic the uid of the newest partition that is gone (0: none); None where no topics are read."""
        if self.options.topics is None:
            return None
        return {topic: lives[-1].uid if lives else 0 for topic, lives in self._gone_logs.items()}

    def _gone(self, since: StreamOffset, seen: Seen, ended: Mapping[tuple[str, int], int]) -> set[str]:
        """Return the logs of `since` that were deleted, for certain: each node has to say so. A partition that ended
        (`ended`) and was read keeps its place: nothing of it is missing."""
        if seen.partial or not seen.is_new():
            return seen.gone
        listed, now = {info.name for info in seen.infos}, time.monotonic()
        missing = [
            name for name in sorted(since.logs)
            if name not in listed and self._was_chosen(name) and self._there_until.get(name, now) <= now
            and not is_read(name, since.logs[name], ended)
        ]  # fmt: skip
        if missing:
            # The cluster may have nodes by now that this connection knows nothing of.
            self.stop()
        for name in missing[:GONE_MAX]:
            try:
                if self.source.is_gone(name, since.logs[name].uid):
                    seen.gone.add(name)
                    if self.options.fail:
                        break
                    continue
            except LogyardError as error:
                log.warning("log %s: no node lists it, and not all of them say that it is gone: %s", name, error)
            self._there_until[name] = now + THERE_S
        return seen.gone

    @cached_property
    def _names(self) -> frozenset[str] | None:
        return None if self.options.names is None else frozenset(self.options.names)

    def _check_ends(self, since: StreamOffset, seen: Seen) -> None:
        """Look for logs that end before what was read of them: whoever goes on there passes over new records. Members
        may be behind, so the leader is asked. Raises `DataLoss` unless gaps are allowed."""
        now = time.monotonic()
        for name, uid, _, end, *_ in seen.infos:
            known = since.logs.get(name)
            if known is None or known.next <= end or known.uid != uid or self._there_until.get(name, now) > now:
                continue
            self._there_until[name] = now + THERE_S
            try:
                found = self.source.yard.run(latest_call(name, None, None, None), LEADER_PATIENCE_S)
            except LogyardError as error:
                log.warning("log %s: it ends at %d, before what was read (%d): %s", name, end, known.next, error)
                continue
            if found.end >= known.next:
                continue
            why = (
                f"log {name!r}: it ends at {found.end}, and the checkpoint says that records up to {known.next} were "
                "read: an older copy of the log was put back, or the checkpoint is damaged or another cluster's"
            )
            if self.options.fail:
                raise DataLoss(f"{why}; start with a new checkpointLocation", log=name, first=found.end, end=known.next)
            log.warning("%s; what it has from there on will not be read", why)

    def _chosen(self, name: str) -> bool:
        """Return whether the options choose a log; a checkpoint may know others, which keep their places."""
        if self.options.topics is not None:
            return name in self._partitions
        if self._names is not None:
            return name in self._names
        return re.fullmatch(self.options.pattern or "", name) is not None

    def _was_chosen(self, name: str) -> bool:
        """Return whether a log of the checkpoint is one of the options': of a topic that was made anew, also one that
        is no partition any more."""
        if self.options.topics is not None:
            return name.rpartition(".")[0] in self.options.topics
        return self._chosen(name)

    def _limit(self, limit: ReadLimit, since: StreamOffset, infos: Sequence[LogInfo]) -> Limit | None:
        if isinstance(limit, ReadMaxRows):
            return Limit(limit.max_rows, self.options.min_rows, {})
        if isinstance(limit, ReadMaxBytes):
            return Limit(limit.max_bytes, self.options.min_rows, self._costs(since, infos))
        return None

    def _costs(self, since: StreamOffset, infos: Sequence[LogInfo]) -> dict[str, int]:
        """Return about how many bytes a record of each log has, by the sizes of the next few: what nodes say of a log's
        size is too rough. Those whose turn it is are looked at; others count as the average of all."""
        behind: dict[str, Wanted] = {}
        for info in sorted(infos, key=lambda info: (info.name <= since.turn, info.name)):
            known = since.logs.get(info.name)
            first = max(info.start, known.next) if known is not None and known.uid == info.uid else info.start
            if first < info.end:
                behind[info.name] = Wanted(info.name, info.uid, first, min(first + SAMPLE_ROWS, info.end))
        old = [one for one in behind.values() if one.first >= self._sizes.get(one.uid, (0, 0))[1]][:SAMPLES_MAX]
        if old:
            sums: dict[str, list[int]] = {one.log: [] for one in old}
            for batch in self.source.read(self.source.place(old), Reading(gaps=True)):
                columns = (batch.column(name).to_pylist() for name in ("log", "kind", "meta", "payload_size"))
                for name, kind, meta, size in zip(*columns, strict=True):
                    if kind == RECORD:
                        sums[name].append(len(meta or b"") + (size or 0))
            for one in old:
                if sizes := sums[one.log]:
                    self._sizes[one.uid] = max(1, sum(sizes) // len(sizes)), one.first + SAMPLE_HOLDS
        average = sum(size for size, _ in self._sizes.values()) // max(1, len(self._sizes)) or ROW_BYTES
        return {name: self._sizes.get(one.uid, (average, 0))[0] for name, one in behind.items()}


@dataclass
class Seen:
    """What logs there were. `partial`: some node did not answer, so that logs may be missing. `gone` are those that
    were deleted, once that was looked into."""

    infos: list[LogInfo]
    partial: bool
    gone: set[str]
    _looked: bool = False

    def is_new(self) -> bool:
        """Return whether nobody has looked into it yet; the next one is told that somebody has."""
        looked, self._looked = self._looked, True
        return not looked


def report(end: StreamOffset, infos: Sequence[LogInfo]) -> dict[str, int]:
    """Return the figures of ``progress["sources"][0]["latestOffset"]``."""
    behind = records = 0
    for _, _, first, following, *_ in infos:
        records += following - first
    for name, _, _, following, *_ in infos:
        known = end.logs.get(name)
        if known is not None and known.next < following:
            behind += following - known.next
    return {"logs": len(infos), "records": records, "behind": behind}


def ended(one: Lost, reading: Reading) -> pyarrow.RecordBatch:
    """Return the row of a log that ended before it was read. Raises `DataLoss` where none is allowed."""
    from . import frames

    if not reading.gaps:
        raise DataLoss(
            f"log {one.log!r}: it was deleted; records from {one.next} on may have been lost; set failOnDataLoss=false "
            "to go on with a row of kind 'gap'",
            log=one.log,
            first=one.next,
        )
    log.warning("log %s: it was deleted; records from offset %d on may have been lost", one.log, one.next)
    return frames.gap_batch(one.log, one.next, None, reading.payloads)
