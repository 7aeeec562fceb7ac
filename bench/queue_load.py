"""One process of `bench queue`: publishers with a window each, or consumers that acknowledge all they get.

Run as ``python -m logyard.bench.queue_load``: it reads a specification (one JSON line), prints "ready", waits for "go",
works, prints one JSON line. Consumers go on until "end" was said and nothing comes any more. Every body is checked.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, NamedTuple

from logyard.client.aio import Yard, connect
from logyard.client.pending import PendingAppend
from logyard.client.queue import Consumer, Queue

from .load import APPEND_TIMEOUT_S, RECORD_BYTES, WINDOW_BYTES_MIN, Load, LoadSpec
from .loops import run_process
from .workload import Workload

IDLE_S = 1.0
DRAIN_S = 120.0


class QueueSpec(NamedTuple):
    """`publish` is what the publishing process does; with `consumers` this one consumes what that publishes."""

    publish: dict[str, Any]
    consumers: int = 0
    prefetch: int = 1000


class Target:
    """A queue in the place of a log."""

    __slots__ = ("queue",)

    def __init__(self, queue: Queue) -> None:
        self.queue = queue

    def append_nowait(self, metadata: bytes, body: bytes) -> PendingAppend:
        """Publish."""
        return self.queue.publish_nowait(body)


async def publish(yard: Yard, spec: LoadSpec) -> dict[str, Any]:
    """Load the queues."""
    targets: Any = [Target(yard.queue(name)) for name in spec.logs]
    load = Load(spec, targets, yard.runtime)
    cpu = time.process_time()
    await load.run()
    return load.result(0, 0, time.process_time() - cpu)


class Consumers:
    """Consumers of one process, spread over the queues."""

    def __init__(self, yard: Yard, spec: LoadSpec, count: int, prefetch: int) -> None:
        self.yard = yard
        self.spec = spec
        self.count = count
        self.prefetch = prefetch
        self.workload = Workload(spec.size, spec.seed, spec.lane)
        self.seen = bytearray(1 << 20)
        self.different = self.twice = self.total = self.counted = 0
        self.last = time.perf_counter()
        self.measure_from = self.measure_until = 0.0

    async def run(self) -> dict[str, Any]:
        """Consume until "end" was said and the queues are empty."""
        cpu = time.process_time()
        self.measure_from = time.perf_counter() + self.spec.warmup_s
        self.measure_until = self.measure_from + self.spec.seconds
        runtime = self.yard.runtime
        async with runtime.nursery() as nursery:
            for number in range(self.count):
                nursery.start_soon(self.consume, self.spec.logs[number % len(self.spec.logs)])
            await runtime.in_thread(sys.stdin.readline)
            with runtime.scope(runtime.now() + DRAIN_S):
                while time.perf_counter() - self.last < IDLE_S:
                    await runtime.sleep(0.1)
            nursery.cancel_scope.cancel()
        return {
            "consumed": self.total,
            "counted": self.counted,
            "different": self.different,
            "twice": self.twice,
            "cpu_s": round(time.process_time() - cpu, 3),
        }

    async def consume(self, name: str) -> None:
        """Run one consumer."""
        async with self.yard.queue(name).consume(prefetch=self.prefetch, prefetch_bytes=8 << 20) as consumer:
            while True:
                self.take(consumer, await consumer.__anext__())

    def take(self, consumer: Consumer, message: Any) -> None:
        """Check and acknowledge one message."""
        consumer.ack_nowait(message)
        self.last = now = time.perf_counter()
        self.total += 1
        if self.measure_from <= now < self.measure_until:
            self.counted += 1
        number = self.workload.number_of(message.body)
        if number is None or (number % 100 == 0 and self.workload.body(number) != message.body):
            self.different += 1
            return
        if number >> 3 >= len(self.seen):
            self.seen += bytes(max(len(self.seen), number >> 3))
        bit = 1 << (number & 7)
        self.twice += bool(self.seen[number >> 3] & bit)
        self.seen[number >> 3] |= bit


async def load_main(wanted: QueueSpec) -> None:
    """Work, print."""
    spec = LoadSpec(**wanted.publish)
    window_bytes = WINDOW_BYTES_MIN + 2 * spec.clients * spec.window * (spec.size + RECORD_BYTES)
    async with connect(spec.addresses, timeout=APPEND_TIMEOUT_S, window_bytes=window_bytes) as yard:
        print("ready", flush=True)
        if sys.stdin.readline().strip() != "go":
            return
        if wanted.consumers:
            result = await Consumers(yard, spec, wanted.consumers, wanted.prefetch).run()
        else:
            result = await publish(yard, spec)
        print(json.dumps(result), flush=True)


def main() -> None:
    """Enter the process: its specification is the first line that it reads."""
    wanted = QueueSpec(**json.loads(sys.stdin.readline()))
    run_process(load_main, wanted, wanted.publish["runtime"], "queue load process")


if __name__ == "__main__":
    main()
