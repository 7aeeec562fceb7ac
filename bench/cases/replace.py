"""`logyard bench replace`: a node killed for good; how long until the reconciler has replaced all of its members.

Nodes 1 to 3 have every log, node 4 none. Some of the logs are appended to, one append at a time, from beginning to end.
Once every one of those acknowledges again after the kill, appends are counted for a while by themselves; then the node
is declared dead, and time counts from there. At the end no log has a member on it, and every log of the load holds at
least what was acknowledged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from ..calibrate import describe_machine
from ..cluster import Cluster, log_names, reach
from ..histogram import Histogram
from ..settings import ReplaceSettings
from .cluster import MEMBERS, PATIENCE_S, active, held

if TYPE_CHECKING:
    from logyard.client.aio import Log, Yard

VICTIM = 3
POLL_S = 0.5
REPLACE_S_PER_LOG = 0.1
"""After so long a log, it is given up."""
PER_10_000 = 10_000


def limits_of(settings: ReplaceSettings) -> dict[str, object]:
    """Return what the nodes' configuration has to say for so many logs."""
    return {"groups_max": max(100_000, 2 * settings.logs)}


class Load:
    """Appends to some logs, one at a time each. `latency` is where they are counted now."""

    def __init__(self, logs: Sequence[Log], settings: ReplaceSettings) -> None:
        self.logs = logs
        self.latency = Histogram()
        self.acknowledged = dict.fromkeys((log.name for log in logs), 0)
        self._pause_s = settings.interval_s
        self._body = bytes(settings.size)
        # Of those that wait in `all_acknowledge`: since when, and which logs have not acknowledged since.
        self._since = time.perf_counter()
        self._late: set[str] = set()
        self._caught_up = trio.Event()

    async def run(self) -> None:
        """Append until cancelled."""
        async with trio.open_nursery() as nursery:
            for at, log in enumerate(self.logs):
                nursery.start_soon(self._append, log, self._pause_s * at / len(self.logs))

    async def _append(self, log: Log, first: float) -> None:
        await trio.sleep(first)
        while True:
            began = time.perf_counter()
            await log.append(b"", self._body)
            ended = time.perf_counter()
            self.acknowledged[log.name] += 1
            self.latency.add(ended - began)
            if began >= self._since:
                self._late.discard(log.name)
                if not self._late:
                    self._caught_up.set()
            await trio.sleep(max(0.0, self._pause_s - (ended - began)))

    def count_anew(self) -> Histogram:
        """Return what was counted, and begin another histogram."""
        found, self.latency = self.latency, Histogram()
        return found

    async def all_acknowledge(self) -> None:
        """Wait until each log acknowledged an append that began from now on."""
        self._since, self._late = time.perf_counter(), {log.name for log in self.logs}
        self._caught_up = trio.Event()
        await self._caught_up.wait()


def run_replace(
    settings: ReplaceSettings, cluster: Cluster, directory: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Create, load, kill, declare dead, wait. Returns the report with `ok`."""
    from logyard.client.sync import connect_sync

    machine = describe_machine(directory)
    with connect_sync(cluster.addresses, timeout=PATIENCE_S) as yard:
        reach("a catalogue of all nodes", lambda: active(yard, cluster), PATIENCE_S)
        yard.change_catalog("plan", "pause", {"why": "nothing is to be moved before a node is killed"})
        say(f"creating {settings.logs} logs on nodes {', '.join(map(str, MEMBERS))} of {cluster.count}")
        yard.create_batch(log_names(settings.logs), members=MEMBERS)
        reach("all are known", lambda: held(yard, 1) >= settings.logs, PATIENCE_S)
    return {
        **trio.run(_measure, settings, cluster, say),
        "filesystem": machine["filesystem"],
        "machine": machine,
    }


async def _measure(settings: ReplaceSettings, cluster: Cluster, say: Callable[[str], None]) -> dict[str, Any]:
    from logyard.client.aio import connect

    async with connect(cluster.addresses, timeout=PATIENCE_S) as yard, trio.open_nursery() as nursery:
        load = Load([yard.log(name) for name in log_names(settings.clients)], settings)
        nursery.start_soon(load.run)
        await load.all_acknowledge()
        load.count_anew()
        await trio.sleep(settings.steady_s)
        quiet = load.count_anew()
        say(f"killing node {VICTIM} for good")
        cluster.kill9(VICTIM)
        killed = time.perf_counter()
        await load.all_acknowledge()
        back_s = time.perf_counter() - killed
        load.count_anew()
        # Of what is left both copies have to store each append: that is none of the reconciler's work.
        await trio.sleep(settings.steady_s)
        short = load.count_anew()
        await yard.change_catalog("plan", "resume", {})
        await yard.change_catalog("nodes", "declare_dead", {"node": VICTIM, "force": True})
        load.count_anew()
        began = time.perf_counter()
        left = await _wait(yard, settings, began, say)
        replace_s = time.perf_counter() - began
        busy = load.count_anew()
        nursery.cancel_scope.cancel()
    async with connect(cluster.addresses, timeout=PATIENCE_S) as yard:
        lost = await _lost(yard, load.acknowledged)
    return _report(settings, cluster, left, replace_s, back_s, quiet, short, busy, lost)


async def _lost(yard: Yard, acknowledged: Mapping[str, int]) -> int:
    """Return how many acknowledged records their logs do not hold."""
    ends = {name: (await yard.log(name).latest(consistency="linearizable")).end for name in acknowledged}
    return sum(max(0, count - ends[name]) for name, count in acknowledged.items())


async def _wait(yard: Yard, settings: ReplaceSettings, began: float, say: Callable[[str], None]) -> int:
    """Wait until no log has a member on the node, or for as long as that may take; return how many have."""
    told = began
    while True:
        rows = (await yard.catalog("nodes", "list", node=1, consistency="local"))["result"]
        left = next((int(row["held"]) for row in rows if row["node"] == VICTIM), 0)
        now = time.perf_counter()
        if not left or now - began > PATIENCE_S + settings.logs * REPLACE_S_PER_LOG:
            return left
        if now - told > 10:
            told = now
            say(f"{left} members of node {VICTIM} are left")
        await trio.sleep(POLL_S)


def _report(
    settings: ReplaceSettings, cluster: Cluster, left: int, replace_s: float, back_s: float, quiet: Histogram,
    short: Histogram, busy: Histogram, lost: int,
) -> dict[str, Any]:  # fmt: skip
    quiet_ms, busy_ms = (found.quantile(0.99) * 1e3 for found in (quiet, busy))
    return {
        "ok": not left and not lost,
        "case": "replace",
        "nodes": cluster.count,
        **asdict(settings),
        "back_s": round(back_s, 3),
        "replace_s": round(replace_s, 3),
        "replaced_per_s": round((settings.logs - left) / replace_s, 1),
        "replace_s_per_10000": round(replace_s * PER_10_000 / max(1, settings.logs - left), 3),
        "left": left,
        "lost": lost,
        "quiet_p50_ms": round(quiet.quantile(0.5) * 1e3, 3),
        "quiet_p99_ms": round(quiet_ms, 3),
        "short_p50_ms": round(short.quantile(0.5) * 1e3, 3),
        "short_p99_ms": round(short.quantile(0.99) * 1e3, 3),
        "replacing_p50_ms": round(busy.quantile(0.5) * 1e3, 3),
        "replacing_p99_ms": round(busy_ms, 3),
        "p99_ratio": round(busy_ms / quiet_ms, 2) if quiet_ms else None,
        "appends": quiet.samples + short.samples + busy.samples,
    }
