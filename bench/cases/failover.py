"""`logyard bench failover`: kill -9 of the node that leads every log; how long until each acknowledges a write again.

Three nodes, one client writing to all logs at a steady pace. A log counts as writable again when an append that was
submitted after the kill is acknowledged. At the end every log holds at least what was acknowledged. Called by
`service.cli.bench`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import trio

from ..calibrate import describe_machine
from ..cluster import Cluster, create_logs, log_names
from ..histogram import Histogram
from ..settings import FailoverSettings
from ..workload import Workload

if TYPE_CHECKING:
    from logyard.client.aio import Log, Yard
    from logyard.client.lane import Batch

VICTIM = 1
TRANSFERS = 64
FAILOVER_S_MAX = 60.0
STEADY_S_MAX = 60.0
WATCH_S = 0.05
PROBLEMS_MAX = 5


class Writer:
    """One log's client: at most one append under way, the next one `interval` after the answer."""

    __slots__ = ("acknowledged", "back_at", "batch", "began", "due", "failed", "log")

    def __init__(self, log: Log, due: float) -> None:
        self.log = log
        self.due = due
        self.began = 0.0
        self.batch: Batch | None = None
        self.acknowledged = 0
        self.failed = ""
        self.back_at = 0.0

    def submit(self, now: float, body: bytes, done: Callable[[], None]) -> None:
        """Submit one append; its answer is taken in `done`, in the receiving task."""
        pending = self.log.append_nowait(b"", body)
        self.began, self.batch = now, pending.batch
        pending.on_done(done)

    def answered(self, due: float) -> bool:
        """Take the answer; the next append is due then. Returns whether it was acknowledged."""
        assert self.batch is not None
        error, self.batch = self.batch.pending.error, None
        self.due = due
        if error is not None:
            self.failed = str(error)
            return False
        self.acknowledged += 1
        return True

    def hurry(self, now: float) -> None:
        """Write again at once, if there is nothing under way."""
        self.due = now

    def back(self, now: float) -> None:
        """Note that its log acknowledges again."""
        self.back_at = now


class Load:
    """All writers. `killed_at` is 0 before the kill; `back` is set when every log acknowledged a write after it."""

    def __init__(self, logs: Sequence[Log], settings: FailoverSettings) -> None:
        self.settings = settings
        self.workload = Workload(settings.size, random.SystemRandom().getrandbits(32), 0)
        now = time.perf_counter()
        # Spread over the interval, so that the pace is even from the start.
        self.writers = [Writer(log, now + settings.interval_s * at / len(logs)) for at, log in enumerate(logs)]
        self.number = 0
        self.killed_at = 0.0
        self.latency = Histogram()
        self.missing = len(logs)
        self.wrote_all = trio.Event()
        self.back = trio.Event()

    def submit(self, writer: Writer, now: float) -> None:
        """Submit one append of a writer."""
        writer.submit(now, self.workload.body(self.number), partial(self.done, writer))
        self.number += 1

    def done(self, writer: Writer) -> None:
        """Take an answer: an append submitted after the kill ends its log's outage."""
        now = time.perf_counter()
        if not writer.answered(now + self.settings.interval_s):
            return
        if not self.killed_at:
            self.latency.add(now - writer.began)
            if writer.acknowledged == 1:
                self.missing -= 1
                if not self.missing:
                    self.wrote_all.set()
        elif not writer.back_at:
            if writer.began < self.killed_at:
                writer.hurry(now)
                return
            writer.back(now)
            self.missing -= 1
            if not self.missing:
                self.back.set()

    async def run(self) -> None:
        """Submit what is due until cancelled."""
        while True:
            now = time.perf_counter()
            for writer in self.writers:
                if writer.batch is None and writer.due <= now and not writer.failed:
                    self.submit(writer, now)
            await trio.sleep(0.005)

    def kill(self, now: float) -> None:
        """Count a log as missing from now on until it acknowledges again; those that rest write at once."""
        self.killed_at, self.missing = now, len(self.writers)
        for writer in self.writers:
            writer.hurry(0.0)


class Outcome(NamedTuple):
    """What one run measured; seconds count from the kill. `outages` has a figure for each log that came back."""

    load: Load
    dead_s: float
    led_again_s: float
    outages: list[float]
    stored: int


def run_failover(
    settings: FailoverSettings, cluster: Cluster, directory: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Create, give all leaderships to one node, write, kill it, wait. Returns the report with `ok`."""
    from logyard.client.sync import connect_sync

    machine = describe_machine(directory)
    with connect_sync(cluster.addresses) as yard:
        say(f"creating {settings.logs} logs on {cluster.count} nodes")
        setup_s = create_logs(yard, cluster, settings.logs)
    found = trio.run(measure, settings, cluster, say)
    load, outages = found.load, sorted(found.outages)
    acknowledged = sum(writer.acknowledged for writer in load.writers)
    failed = [f"{writer.log.name}: {writer.failed}" for writer in load.writers if writer.failed]
    problems = failed[:PROBLEMS_MAX]
    missing = settings.logs - len(outages)
    if missing:
        problems.append(f"{missing} logs acknowledged no write within {FAILOVER_S_MAX:g} s of the kill")
    if found.stored < acknowledged:
        problems.append(f"{acknowledged - found.stored} acknowledged records are lost")
    return {
        "ok": not problems,
        "case": "failover",
        "nodes": cluster.count,
        **asdict(settings),
        "failover_s": round(outages[-1], 3) if outages and not missing else None,
        "p50_s": round(outages[len(outages) // 2], 3) if outages else None,
        "p99_s": round(outages[min(len(outages) - 1, len(outages) * 99 // 100)], 3) if outages else None,
        "first_s": round(outages[0], 3) if outages else None,
        "noticed_s": round(found.dead_s, 3),
        "led_again_s": round(found.led_again_s, 3),
        "append_p50_ms": round(load.latency.quantile(0.5) * 1e3, 3),
        "append_p99_ms": round(load.latency.quantile(0.99) * 1e3, 3),
        "acknowledged": acknowledged,
        "stored": found.stored,
        "lost": max(0, acknowledged - found.stored),
        "failed": len(failed),
        "setup_s": round(setup_s, 3),
        "problems": problems,
        "filesystem": machine["filesystem"],
        "machine": machine,
    }


async def measure(settings: FailoverSettings, cluster: Cluster, say: Callable[[str], None]) -> Outcome:
    """Run the case, in one trio loop."""
    from logyard.client.aio import connect

    names = log_names(settings.logs)
    async with connect(cluster.addresses, timeout=FAILOVER_S_MAX) as yard:
        say(f"giving all leaderships to node {VICTIM}")
        await gather_leaderships(yard, names)
        load = Load([yard.log(name) for name in names], settings)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(load.run)
            with trio.fail_after(STEADY_S_MAX):
                await load.wrote_all.wait()
            await trio.sleep(settings.steady_s)
            say(f"killing node {VICTIM}")
            load.kill(time.perf_counter())
            watched: dict[str, float] = {}
            async with trio.open_nursery() as inner:
                inner.start_soon(watch, yard, cluster, settings.logs, load.killed_at, watched)
                await trio.to_thread.run_sync(cluster.kill9, VICTIM)
                with trio.move_on_after(FAILOVER_S_MAX):
                    await load.back.wait()
                with trio.move_on_after(FAILOVER_S_MAX):
                    while "led" not in watched:
                        await trio.sleep(WATCH_S)
                inner.cancel_scope.cancel()
            nursery.cancel_scope.cancel()
        await yard.drain()
        outages = [writer.back_at - load.killed_at for writer in load.writers if writer.back_at]
        stored = await stored_records(load.writers)
        return Outcome(load, watched.get("dead", 0.0), watched.get("led", 0.0), outages, stored)


async def gather_leaderships(yard: Yard, names: Sequence[str]) -> None:
    """Have the victim lead every log when this returns."""
    from logyard.protocol.errors import Refused

    limit = trio.CapacityLimiter(TRANSFERS)

    async def move(name: str) -> None:
        """Ask again while the victim does not answer in time, as on a busy machine."""
        async with limit:
            with trio.fail_after(STEADY_S_MAX):
                while True:
                    try:
                        return await yard.transfer(name, VICTIM)
                    except Refused:
                        await trio.sleep(WATCH_S)

    async with trio.open_nursery() as nursery:
        for name in names:
            nursery.start_soon(move, name)


async def watch(yard: Yard, cluster: Cluster, logs: int, since: float, watched: dict[str, float]) -> None:
    """Note when the survivors noticed the death (`dead`) and when they led every log (`led`), to within WATCH_S."""
    from logyard.protocol.errors import LogyardError

    survivors = [node for node in range(1, cluster.count + 1) if node != VICTIM]
    while "led" not in watched:
        await trio.sleep(WATCH_S)
        try:
            rows = [await yard.status(node) for node in survivors]
        except LogyardError:
            continue
        now = time.perf_counter() - since
        if "dead" not in watched and all(VICTIM not in row["live_nodes"] for row in rows):
            watched["dead"] = now
        if sum(row["led"] for row in rows) >= logs:
            watched["led"] = now


async def stored_records(writers: Sequence[Writer]) -> int:
    """Return how many acknowledged records their logs hold; a log that holds more than it acknowledged counts only
    those."""
    total = 0
    limit = trio.CapacityLimiter(TRANSFERS)

    async def one(writer: Writer) -> None:
        nonlocal total
        async with limit:
            bounds = await writer.log.latest(consistency="linearizable")
        total += min(writer.acknowledged, bounds.end)

    async with trio.open_nursery() as nursery:
        for writer in writers:
            nursery.start_soon(one, writer)
    return total
