"""One load process: clients with a window each, or a rate, over one connection set, in one loop.

Run as ``python -m logyard.bench.load``: it reads a specification (one JSON line) from standard input, prints "ready",
waits for a line "go", loads, verifies its sample, prints one JSON line. A client keeps `window` appends outstanding;
an answered frame submits as many new appends as it held, from its callback, so no task is switched per command.

With a rate the appends are due at fixed times, whatever became of earlier ones, and a latency counts from when its
append was due: a stall is in the latency of all that should have been sent meanwhile.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from logyard.protocol.errors import OutOfRange

from .histogram import Histogram
from .loops import run_process
from .workload import Workload

if TYPE_CHECKING:
    from logyard.client.aio import Log
    from logyard.client.lane import Batch
    from logyard.client.runtime import Runtime

DRAIN_S = 60.0
APPEND_TIMEOUT_S = 30.0
READERS = 16
PACE_S = 0.001
BACKLOG_MAX = 100_000
"""Outstanding with a rate; what is due beyond waits, and its waiting counts."""
WINDOW_BYTES_MIN = 64 << 20
RECORD_BYTES = 64
"""Added to a body for its share of tables and heads, generously: windows and limits in bytes count them too."""
PROBLEMS_MAX = 5


class LoadSpec(NamedTuple):
    """What one process does. `lane` tells the processes' bodies apart; sizes in bytes, times in seconds."""

    addresses: list[str]
    logs: list[str]
    size: int
    clients: int
    window: int
    seed: int
    lane: int
    warmup_s: float
    seconds: float
    sample_one_in: int
    runtime: str = "trio"
    rate: float = 0.0
    keep: int = 0


class Flight:
    """The appends of one frame: when each was submitted, by which client, and which are in the sample."""

    __slots__ = ("batch", "clients", "log", "samples", "starts")

    def __init__(self, batch: Batch, log: int) -> None:
        self.batch = batch
        self.log = log
        self.starts: list[float] = []
        self.clients: list[int] = []
        self.samples: list[tuple[int, int]] = []


class Load:
    """The state of one load process; see `LoadSpec` for what drives it."""

    def __init__(self, spec: LoadSpec, logs: Sequence[Log], runtime: Runtime) -> None:
        self.spec = spec
        self.runtime = runtime
        self.logs = logs
        self.workload = Workload(spec.size, spec.seed, spec.lane)
        self.random = random.Random(spec.seed * 1009 + spec.lane)
        self.histogram = Histogram()
        self.flights: list[Flight | None] = [None] * len(logs)
        # Each client walks over all logs; the walks begin spread apart.
        self.places = [client * len(logs) // spec.clients for client in range(spec.clients)]
        self.number = 0
        # The first one in any case: a short run has a sample, too.
        self.next_sample = 0
        self.sample: list[tuple[int, int, int]] = []
        self.outstanding = 0
        self.acknowledged = 0
        self.frames = 0
        self.counted = 0
        self.failed = 0
        self.problems: list[str] = []
        self.measure_from = self.measure_until = 0.0
        self.drained = runtime.event()

    def skip(self) -> int:
        """Return how many bodies until the next one of the sample: geometric, so that each has the same chance."""
        return 1 + int(self.random.expovariate(1.0 / self.spec.sample_one_in))

    def submit(self, clients: Sequence[int], now: float) -> None:
        """Submit one append for each of `clients` (a client may be named several times)."""
        places, flights, logs = self.places, self.flights, self.logs
        body, count = self.workload.body, len(logs)
        number = self.number
        for client in clients:
            place = places[client]
            places[client] = place + 1 if place + 1 < count else 0
            pending = logs[place].append_nowait(b"", body(number))
            flight = flights[place]
            batch = pending.batch
            if flight is None or flight.batch is not batch:
                flight = flights[place] = Flight(batch, place)
                batch.pending.on_done(partial(self.answered, flight))
            flight.starts.append(now)
            flight.clients.append(client)
            if number >= self.next_sample:
                flight.samples.append((pending.position, number))
                self.next_sample = number + self.skip()
            number += 1
        self.outstanding += number - self.number
        self.number = number

    def answered(self, flight: Flight) -> None:
        """Count the frame that is answered, and submit as many appends again."""
        pending, starts = flight.batch.pending, flight.starts
        now = time.perf_counter()
        count = len(starts)
        self.outstanding -= count
        if pending.error is not None:
            self.fail(count, pending.error)
            return
        self.acknowledged += count
        self.frames += 1
        if self.measure_from <= now < self.measure_until:
            self.counted += count
        if self.spec.rate:
            # By when each was due: what a stall at the end of the time holds up counts with all that it waits.
            for start in starts:
                if self.measure_from <= start < self.measure_until:
                    self.histogram.add(now - start)
        elif self.measure_from <= now < self.measure_until:
            if starts[0] == starts[-1]:
                self.histogram.add(now - starts[0], count)
            else:
                for start in starts:
                    self.histogram.add(now - start)
        for ordinal, number in flight.samples:
            self.sample.append((flight.log, pending.value.first + ordinal, number))
        if now < self.measure_until and not self.spec.rate:
            self.submit(flight.clients, now)
        elif not self.outstanding and now >= self.measure_until:
            self.drained.set()

    def fail(self, count: int, error: Exception) -> None:
        """Count appends that failed: their clients stop, so that a broken cluster is not hammered."""
        self.failed += count
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(str(error))
        if not self.outstanding:
            self.drained.set()

    async def run(self) -> None:
        """Warm up, measure, drain."""
        spec = self.spec
        began = time.perf_counter()
        self.measure_from = began + spec.warmup_s
        self.measure_until = self.measure_from + spec.seconds
        if spec.rate:
            await self.pace(began)
        for client in range(0 if spec.rate else spec.clients):
            self.submit([client] * spec.window, time.perf_counter())
            await self.runtime.sleep(0)
        with self.runtime.scope(self.runtime.now() + spec.warmup_s + spec.seconds + DRAIN_S):
            await self.drained.wait()

    async def pace(self, began: float) -> None:
        """Submit each append when it is due; those that became due during a stall at once, with their own times."""
        spec, number = self.spec, 0
        total = int((self.measure_until - began) * spec.rate)
        # To the end of the time, also when all are sent: only what is answered after it looks whether it was the last.
        while (now := time.perf_counter()) < self.measure_until or number < total:
            if self.failed:
                break
            due = min(total, int((now - began) * spec.rate) + 1)
            while number < due and self.outstanding < BACKLOG_MAX:
                self.submit([number % spec.clients], began + number / spec.rate)
                number += 1
            await self.runtime.sleep(PACE_S)
        if not self.outstanding:
            self.drained.set()

    async def verify(self) -> tuple[int, int]:
        """Read the sample back and compare; return (verified, lost or different). What a log did not have to keep, and
        has given up, is neither."""
        waiting = iter(self.sample)
        good = bad = 0

        async def reader() -> None:
            nonlocal good, bad
            for log, offset, number in waiting:
                try:
                    page = await self.logs[log].poll(offset, max_records=1, max_bytes=1)
                except OutOfRange as error:
                    if not self.spec.keep or offset >= cast(int, error.details["start"]):
                        raise
                    continue
                records = page.records
                if records and records[0].offset == offset and records[0].payload == self.workload.body(number):
                    good += 1
                else:
                    bad += 1
                    if len(self.problems) < PROBLEMS_MAX:
                        self.problems.append(f"{self.spec.logs[log]} offset {offset} is not what was acknowledged")

        async with self.runtime.nursery() as nursery:
            for _ in range(READERS):
                nursery.start_soon(reader)
        return good, bad

    def result(self, verified: int, lost: int, cpu_s: float) -> dict[str, Any]:
        """Return what the parent merges."""
        return {
            "counted": self.counted,
            "acknowledged": self.acknowledged,
            "frames": self.frames,
            "failed": self.failed + self.outstanding,
            "verified": verified,
            "lost": lost,
            "histogram": self.histogram.dump(),
            "problems": self.problems,
            "cpu_s": round(cpu_s, 3),
        }


async def load_main(spec: LoadSpec) -> None:
    """Load, verify, print."""
    from logyard.client.aio import connect

    # The byte window must never be the limit: the number of outstanding calls is.
    window_bytes = WINDOW_BYTES_MIN + 2 * spec.clients * spec.window * (spec.size + RECORD_BYTES)
    async with connect(spec.addresses, timeout=APPEND_TIMEOUT_S, window_bytes=window_bytes) as yard:
        load = Load(spec, [yard.log(name) for name in spec.logs], yard.runtime)
        print("ready", flush=True)
        if sys.stdin.readline().strip() != "go":
            return
        cpu, slept = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        await load.run()
        cpu = time.process_time() - cpu
        slept = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - slept
        verified, lost = await load.verify()
        print(json.dumps({**load.result(verified, lost, cpu), "wake_ups": slept}), flush=True)


def main() -> None:
    """Enter the process: its specification is the first line that it reads."""
    spec = LoadSpec(**json.loads(sys.stdin.readline()))
    run_process(load_main, spec, spec.runtime, "load process")


if __name__ == "__main__":
    main()
