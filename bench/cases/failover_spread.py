"""`logyard bench failover --leaders spread`: kill -9 of one of the nodes that share the leaderships of very many logs.

All logs are awake: each was written to once, and none sleeps in this case. After the kill appends to random logs are
due at a steady rate, and each waits from then on, whatever became of the others (open loop); the survivors say when all
logs have a leader again. At the end a sample of the logs holds what was acknowledged. Called by `service.cli.bench`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import trio

from ..calibrate import describe_machine
from ..cluster import Cluster, log_names
from ..histogram import Histogram
from ..settings import FailoverSettings
from ..workload import Workload

if TYPE_CHECKING:
    from logyard.client.aio import Log, Yard
    from logyard.client.lane import Batch

VICTIM = 1
LED_S_MAX = 120.0
PATIENCE_S = 60.0
AFTER_S = 3.0
"""Probes go on for so long when all logs are led again."""
LOOK_S = 1.0
"""Between two looks at the survivors: to answer, each goes over all of its groups."""
SAMPLE = 1000
CHECKS = 64
PROBLEMS_MAX = 5
UNDER_WAY_MAX = 2000
UNDER_WAY_BYTES = 16 << 20
"""Less than a client may have under way. What is due beyond waits, and its waiting counts."""
PACE_S = 0.002


class Outcome(NamedTuple):
    """What one run measured; seconds count from the kill. `led_again_s` is 0 where that was not reached."""

    probes: Probes
    noticed_s: float
    led_again_s: float
    lost: int


class Probes:
    """Appends to random logs at a rate."""

    def __init__(self, logs: Sequence[Log], size: int) -> None:
        self.logs = logs
        self.workload = Workload(size, random.SystemRandom().getrandbits(32), 0)
        self.under_way_max = max(1, min(UNDER_WAY_MAX, UNDER_WAY_BYTES // size))
        self.number = 0
        self.under_way = 0
        self.waits = Histogram()
        self.wait_s_max = 0.0
        self.written_at = 0.0
        self.acknowledged: dict[str, int] = {}
        self.failed: list[str] = []

    def submit(self, log: Log, due: float) -> None:
        """Submit one that was due at `due`; its answer is taken in the receiving task."""
        pending = log.append_nowait(b"", self.workload.body(self.number))
        self.number += 1
        self.under_way += 1
        pending.on_done(partial(self._done, log, pending.batch, due))

    def _done(self, log: Log, batch: Batch, due: float) -> None:
        self.under_way -= 1
        if batch.pending.error is not None:
            self.failed.append(f"{log.name}: {batch.pending.error}")
            return
        waited = time.perf_counter() - due
        self.waits.add(waited)
        self.wait_s_max = max(self.wait_s_max, waited)
        self.acknowledged[log.name] = self.acknowledged.get(log.name, 0) + 1

    async def each_once(self) -> None:
        """Write to each log once, as fast as they are acknowledged."""
        for log in self.logs:
            while self.under_way >= self.under_way_max:
                await trio.sleep(PACE_S)
            self.submit(log, time.perf_counter())
        while self.under_way:
            await trio.sleep(PACE_S)
        self.waits, self.wait_s_max = Histogram(), 0.0
        self.written_at = time.monotonic()

    async def run(self, rate: float) -> None:
        """Submit to random logs until cancelled."""
        due = time.perf_counter()
        draw = random.SystemRandom()
        while True:
            now = time.perf_counter()
            while due <= now and self.under_way < self.under_way_max:
                self.submit(draw.choice(self.logs), due)
                due += 1 / rate
            await trio.sleep(PACE_S)


def run_failover_spread(
    settings: FailoverSettings, cluster: Cluster, directory: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Create, write to all, kill one, probe. Returns the report with `ok`."""
    from logyard.client.sync import connect_sync

    machine = describe_machine(directory)
    began = time.monotonic()
    with connect_sync(cluster.addresses, timeout=PATIENCE_S) as yard:
        say(f"creating {settings.logs} logs on {cluster.count} nodes")
        yard.create_batch(log_names(settings.logs))
    found = trio.run(_measure, settings, cluster, say, began)
    probes = found.probes
    problems = probes.failed[:PROBLEMS_MAX]
    if not found.led_again_s:
        problems.append(f"not every log had a leader within {LED_S_MAX:g} s of the kill")
    if found.lost:
        problems.append(f"{found.lost} acknowledged records are lost")
    return {
        "ok": not problems,
        "case": "failover",
        "nodes": cluster.count,
        **asdict(settings),
        "failover_s": round(found.led_again_s, 3) or None,
        "noticed_s": round(found.noticed_s, 3),
        "led_again_s": round(found.led_again_s, 3),
        "probes": probes.number - settings.logs,
        "append_p50_ms": round(probes.waits.quantile(0.5) * 1e3, 3),
        "append_p99_ms": round(probes.waits.quantile(0.99) * 1e3, 3),
        "append_max_ms": round(probes.wait_s_max * 1e3, 3),
        "acknowledged": sum(probes.acknowledged.values()),
        "lost": found.lost,
        "failed": len(probes.failed),
        "setup_s": round(probes.written_at - began, 3),
        "problems": problems,
        "filesystem": machine["filesystem"],
        "machine": machine,
    }


async def _measure(settings: FailoverSettings, cluster: Cluster, say: Callable[[str], None], began: float) -> Outcome:
    from logyard.client.aio import connect

    # Without sessions: one of each log would be another entry in it.
    async with connect(cluster.addresses, timeout=PATIENCE_S, exactly_once=False) as yard:
        probes = Probes([yard.log(name) for name in log_names(settings.logs)], settings.size)
        say("writing to each log, so that it is awake")
        await probes.each_once()
        await trio.sleep(settings.steady_s)
        say(f"killing node {VICTIM}")
        survivors = Survivors(yard, [node for node in range(1, cluster.count + 1) if node != VICTIM], settings.logs)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(probes.run, settings.rate)
            await trio.to_thread.run_sync(cluster.kill9, VICTIM)
            with trio.move_on_after(LED_S_MAX):
                await survivors.watch()
            await trio.sleep(AFTER_S)
            nursery.cancel_scope.cancel()
        while probes.under_way:
            await trio.sleep(PACE_S)
        say("reading back")
        lost = await _lost(yard, probes.acknowledged)
        return Outcome(probes, survivors.noticed_s, survivors.led_again_s, lost)


class Survivors:
    """What those nodes say that did not die; seconds from when this was made."""

    def __init__(self, yard: Yard, nodes: Sequence[int], logs: int) -> None:
        self.yard = yard
        self.nodes = nodes
        self.logs = logs
        self.began = time.perf_counter()
        self.noticed_s = self.led_again_s = 0.0

    async def watch(self) -> None:
        """Note when they noticed the death, and when they lead every log, to within `LOOK_S`."""
        from logyard.protocol.errors import LogyardError

        while not self.led_again_s:
            await trio.sleep(LOOK_S)
            try:
                rows = [await self.yard.status(node) for node in self.nodes]
            except LogyardError:
                continue
            now = time.perf_counter() - self.began
            if not self.noticed_s and all(VICTIM not in row["live_nodes"] for row in rows):
                self.noticed_s = now
            if self.noticed_s and sum(row["led"] for row in rows) >= self.logs:
                self.led_again_s = now


async def _lost(yard: Yard, acknowledged: Mapping[str, int]) -> int:
    """Return how many acknowledged records a sample of the logs lacks."""
    lost = 0
    limit = trio.CapacityLimiter(CHECKS)

    async def one(name: str) -> None:
        nonlocal lost
        async with limit:
            bounds = await yard.log(name).latest(consistency="linearizable")
        lost += max(0, acknowledged[name] - bounds.end)

    async with trio.open_nursery() as nursery:
        for name in random.SystemRandom().sample(sorted(acknowledged), min(SAMPLE, len(acknowledged))):
            nursery.start_soon(one, name)
    return lost
