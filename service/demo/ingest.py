"""The demo's ingest: records go in over several connections with bounded bytes in flight, a node dies meanwhile.

The ledger says, for every acknowledged (log, offset), which record must be found there: everything verified later is
compared with it. Called by `service.demo.run`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import trio

from .source import SourceFile, SourceRecord, content, log_name

if TYPE_CHECKING:
    from logyard.client.aio import Log, Yard

IN_FLIGHT_BYTES_MAX = 32 * 1024 * 1024
WORKERS_MAX = 64
APPEND_TIMEOUT_S = 60.0
PROBLEMS_MAX = 20


class Ledger:
    """What was acknowledged, and what went wrong. `offsets[log]` maps an offset to its record's number."""

    __slots__ = ("acknowledged", "offsets", "payload_bytes", "problems", "records")

    def __init__(self, records: Sequence[SourceRecord], logs: int) -> None:
        self.records = list(records)
        self.offsets: list[dict[int, int]] = [{} for _ in range(logs)]
        self.acknowledged = 0
        self.payload_bytes = 0
        self.problems: list[str] = []

    def acknowledge(self, record: SourceRecord, offset: int) -> None:
        """Note an acknowledged append; two records at one offset are a loss and are named."""
        log = self.offsets[record.log]
        if offset in log:
            self.problem(f"{log_name(record.log)} acknowledged offset {offset} twice")
        log[offset] = record.number
        self.acknowledged += 1
        self.payload_bytes += record.file.size

    def problem(self, text: str) -> None:
        """Keep the first few, for the report."""
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(text)

    def extra(self, log: int, file: SourceFile) -> SourceRecord:
        """Return one more record for a log that has none left: `number` modulo the number of logs is still its log."""
        logs = len(self.offsets)
        number = len(self.records) + (log - len(self.records)) % logs
        while len(self.records) < number:
            # Numbers between are never appended; they keep `records[number]` a plain index.
            self.records.append(SourceRecord(len(self.records), len(self.records) % logs, file, -1))
        record = SourceRecord(number, log, file, number // max(1, logs))
        self.records.append(record)
        return record


class ByteBudget:
    """Bytes that may be in flight. One record larger than all of it is let through alone."""

    __slots__ = ("limit", "used", "waiting")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.waiting = trio.lowlevel.ParkingLot()

    async def take(self, size: int) -> None:
        """Wait until `size` bytes fit."""
        while self.used and self.used + size > self.limit:
            await self.waiting.park()
        self.used += size

    def give(self, size: int) -> None:
        """Return `size` bytes."""
        self.used -= size
        self.waiting.unpark_all()


class Ingest:
    """Appends all records; `in_flight` counts appends without an answer, per log in `flying`."""

    def __init__(
        self, ledger: Ledger, yards: Sequence[Yard], progress: Callable[[int], None] = lambda size: None
    ) -> None:
        self.ledger = ledger
        self.progress = progress
        self.handles: list[list[Log]] = [
            [yard.log(log_name(number)) for number in range(len(ledger.offsets))] for yard in yards
        ]
        self.queues: list[deque[SourceRecord]] = [deque() for _ in ledger.offsets]
        self.order: deque[int] = deque()
        for record in ledger.records:
            self.queues[record.log].append(record)
            self.order.append(record.log)
        self.budget = ByteBudget(IN_FLIGHT_BYTES_MAX)
        self.in_flight = 0
        self.flying: dict[int, int] = {}
        self.killed_at = math.inf
        self.waiting: set[int] = set()
        self.failed_over_at = math.nan
        self.changed = trio.Event()
        # The second half waits for `release`: a kill can't come too late, however small the source.
        self.held = len(self.order) // 2
        self.released = trio.Event()

    async def run(self) -> None:
        """Append until nothing is left."""
        workers = max(2, min(WORKERS_MAX, len(self.order) // 8))
        async with trio.open_nursery() as nursery:
            for number in range(workers):
                nursery.start_soon(self.work, number)
            self.nursery = nursery

    async def work(self, number: int) -> None:
        """Run one of the appenders: the next record of the order, until there is none."""
        handles = self.handles[number % len(self.handles)]
        while self.order:
            if len(self.order) <= self.held and not self.released.is_set():
                await self.released.wait()
                continue
            log = self.order.popleft()
            # A log whose record was taken out of turn after the kill has one more turn than records.
            if self.queues[log]:
                await self.append(handles[log], self.queues[log].popleft())

    async def append(self, handle: Log, record: SourceRecord) -> None:
        """Append one record and note where it is."""
        size = record.file.size
        await self.budget.take(size)
        try:
            payload = content(record.file)
            began = trio.current_time()
            self.in_flight += 1
            self.flying[record.log] = self.flying.get(record.log, 0) + 1
            self.changed.set()
            try:
                offset = await handle.append(record.metadata, payload=payload, timeout=APPEND_TIMEOUT_S)
            finally:
                self.in_flight -= 1
                self.flying[record.log] -= 1
        finally:
            self.budget.give(size)
        self.ledger.acknowledge(record, offset)
        self.progress(size)
        if began >= self.killed_at and record.log in self.waiting:
            self.waiting.discard(record.log)
            if not self.waiting:
                self.failed_over_at = trio.current_time()
        self.changed.set()

    async def until(self, reached: Callable[[], bool]) -> None:
        """Wait until `reached()`, looked at after every start and end of an append, or until all are done."""
        while not reached() and (self.order or self.in_flight):
            self.changed = trio.Event()
            await self.changed.wait()

    def in_flight_to(self, logs: Iterable[int]) -> int:
        """Return the number of appends without an answer to some logs."""
        return sum(self.flying.get(log, 0) for log in logs)

    def node_killed(self, led: set[int], smallest: SourceFile) -> None:
        """Give, at the moment of the kill, each log the victim led its next record at once, or one more."""
        self.killed_at = trio.current_time()
        self.waiting = set(led)
        for turn, log in enumerate(sorted(led)):
            record = self.queues[log].popleft() if self.queues[log] else self.ledger.extra(log, smallest)
            self.nursery.start_soon(self.append, self.handles[turn % len(self.handles)][log], record)

    async def failover(self) -> float:
        """Return seconds from the kill until every log the victim led acknowledged a new append."""
        while self.waiting:
            self.changed = trio.Event()
            await self.changed.wait()
        return self.failed_over_at - self.killed_at
