"""One load process on a KV group: closed-loop clients that put or get, or one writer and many who watch.

Run as ``python -m logyard.bench.kv_load``, with the same conversation as `bench.load`. Each client has keys of its own,
so what it reads back must be what it wrote last; a get is compared byte for byte; a watcher counts every revision.
"""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from .histogram import Histogram
from .loops import run_process
from .workload import Workload

if TYPE_CHECKING:
    from logyard.client.kv import KV
    from logyard.client.kv_watch import Watch

TIMEOUT_S = 30.0
DRAIN_S = 30.0
PROBLEMS_MAX = 5
FILLERS = 64
WATCHED = b"watched"
WRITER, LAST = 0, 0
"""The lane of the process that writes what all watch, and the number of its last body."""


class KvSpec(NamedTuple):
    """What one process does. `mode`: put, get, watch; `keys` of each client; sizes in bytes, times in seconds."""

    addresses: list[str]
    name: str
    mode: str
    size: int
    clients: int
    keys: int
    watchers: int
    seed: int
    lane: int
    warmup_s: float
    seconds: float
    runtime: str = "trio"


class KvLoad:
    """The state of one load process."""

    def __init__(self, spec: KvSpec, kv: KV) -> None:
        self.spec = spec
        self.kv = kv
        self.runtime = kv.yard.runtime
        self.workload = Workload(spec.size, spec.seed, WRITER if spec.mode == "watch" else spec.lane)
        self.histogram = Histogram()
        self.number = 0
        self.acknowledged = 0
        self.counted = 0
        self.failed = 0
        self.verified = 0
        self.lost = 0
        self.problems: list[str] = []
        self.measure_from = self.measure_until = 0.0
        # What each key holds: the number of its body.
        self.written: dict[bytes, int] = {}

    def key(self, client: int, number: int) -> bytes:
        """Return a client's key."""
        return b"%d/%d/%d" % (self.spec.lane, client, number % self.spec.keys)

    async def prepare(self) -> None:
        """Prepare what has to be there before the load."""
        if self.spec.mode == "get":
            keys = iter([self.key(client, n) for client in range(self.spec.clients) for n in range(self.spec.keys)])

            async def fill() -> None:
                for key in keys:
                    await self._put(key)

            async with self.runtime.nursery() as nursery:
                for _ in range(FILLERS):
                    nursery.start_soon(fill)

    async def _put(self, key: bytes) -> int:
        self.number += 1
        number = self.number
        done = await self.kv.put(key, self.workload.body(number), timeout=TIMEOUT_S)
        self.written[key] = number
        return done.revision

    def start(self) -> None:
        """Measure from here on, after the warm-up."""
        self.measure_from = time.perf_counter() + self.spec.warmup_s
        self.measure_until = self.measure_from + self.spec.seconds

    def count(self, began: float, now: float) -> None:
        """Count an operation that is over."""
        self.acknowledged += 1
        if self.measure_from <= now < self.measure_until:
            self.counted += 1
            self.histogram.add(now - began)

    def problem(self, text: str) -> None:
        """Note what is not as it must be."""
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(text)

    async def client(self, client: int) -> None:
        """Run one closed loop."""
        from logyard.protocol.errors import LogyardError

        number = 0
        while (began := time.perf_counter()) < self.measure_until:
            number += 1
            key = self.key(client, number)
            try:
                if self.spec.mode == "put":
                    await self._put(key)
                else:
                    found = await self.kv.get(key, timeout=TIMEOUT_S)
                    if found is None or found.value != self.workload.body(self.written[key]):
                        self.lost += 1
                        self.problem(f"{key!r} is not what was acknowledged")
                    self.verified += 1
            except LogyardError as error:
                self.failed += 1
                self.problem(str(error))
                return
            self.count(began, time.perf_counter())

    async def read_back(self, client: int) -> None:
        """Read the newest keys of a client once more."""
        newest = sorted((number, key) for key, number in self.written.items() if key.split(b"/")[1] == b"%d" % client)
        for number, key in newest[-10:]:
            found = await self.kv.get(key, timeout=TIMEOUT_S)
            self.verified += 1
            if found is None or found.value != self.workload.body(number):
                self.lost += 1
                self.problem(f"{key!r} is not what was acknowledged")

    async def run(self) -> None:
        """Load, then look at what is there."""
        if self.spec.mode == "watch":
            await self._watch()
            return
        self.start()
        for work in (self.client, self.read_back):
            async with self.runtime.nursery() as nursery:
                for client in range(self.spec.clients):
                    nursery.start_soon(work, client)

    async def _watch(self) -> None:
        waiting, writes = self.spec.watchers, 0
        everybody = self.runtime.event()

        async def watcher() -> None:
            nonlocal waiting
            async with self.kv.watch(WATCHED) as changes:
                await changes.created()
                waiting -= 1
                if not waiting:
                    everybody.set()
                await self._follow(changes)

        patience = TIMEOUT_S + self.spec.warmup_s + self.spec.seconds + DRAIN_S
        with self.runtime.scope(self.runtime.now() + patience) as scope:
            async with self.runtime.nursery() as nursery:
                for _ in range(self.spec.watchers):
                    nursery.start_soon(watcher)
                await everybody.wait()
                self.start()
                if self.spec.lane == WRITER:
                    writes = await self._write()
        if self.spec.lane == WRITER and self.verified != writes * self.spec.watchers:
            # They were all there before the first write; those of other processes need not have been.
            self.lost += 1
            self.problem(f"{self.spec.watchers} watchers saw {self.verified} events of {writes} writes")
        if scope.cancelled_caught:
            self.lost += 1
            self.problem("some watchers have not seen the last write")

    async def _write(self) -> int:
        """Put as long as is measured; return how often, but for the last one. A body's number is when its put began:
        other processes have the same clock."""
        writes = 0
        while time.perf_counter() < self.measure_until:
            await self.kv.put(WATCHED, self.workload.body(time.perf_counter_ns()), timeout=TIMEOUT_S)
            writes += 1
        await self.kv.put(WATCHED, self.workload.body(LAST), timeout=TIMEOUT_S)
        return writes

    async def _follow(self, changes: Watch) -> None:
        """Count every version once, up to the last write."""
        last = 0
        async for change in changes:
            now = time.perf_counter()
            found = change.events[0].kv
            began = None if found is None else self.workload.number_of(found.value)
            if found is None or began is None:
                self.lost += 1
                self.problem("a watcher saw what nobody wrote")
                continue
            if last and found.version != last + 1:
                self.lost += 1
                self.problem(f"a watcher saw version {found.version} after {last}")
            last = found.version
            if began == LAST:
                return
            self.verified += 1
            self.count(began / 1e9, now)

    def result(self, cpu_s: float) -> dict[str, Any]:
        """Return what the parent merges."""
        return {
            "counted": self.counted, "acknowledged": self.acknowledged, "failed": self.failed,
            "verified": self.verified, "lost": self.lost, "histogram": self.histogram.dump(),
            "problems": self.problems, "cpu_s": round(cpu_s, 3),
        }  # fmt: skip


async def load_main(spec: KvSpec) -> None:
    """Load, verify, print."""
    from logyard.client.aio import connect

    window_bytes = (64 << 20) + 2 * spec.clients * spec.size
    async with connect(spec.addresses, timeout=TIMEOUT_S, window_bytes=window_bytes) as yard:
        load = KvLoad(spec, yard.kv(spec.name))
        await load.prepare()
        print("ready", flush=True)
        if sys.stdin.readline().strip() != "go":
            return
        cpu = time.process_time()
        await load.run()
        print(json.dumps(load.result(time.process_time() - cpu)), flush=True)


def main() -> None:
    """Enter the process: its specification is the first line that it reads."""
    spec = KvSpec(**json.loads(sys.stdin.readline()))
    run_process(load_main, spec, spec.runtime, "load process")


if __name__ == "__main__":
    main()
