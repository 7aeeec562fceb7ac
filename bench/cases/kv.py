"""`logyard bench kv`: puts, linearizable gets and watch fan-out of one KV group, each with its latency.

Nodes and load are processes of their own. What was acknowledged is read back and compared; every watcher must see
every write once.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..calibrate import describe_machine
from ..cluster import Cluster, all_led, reach, statuses
from ..kv_load import KvSpec
from ..processes import Meter
from ..report import append_figures, shares
from ..settings import KvSettings
from ..terms import Beside
from .append import run_processes

NAME = "bench-kv"
TERMS = "bench-kv-terms"
"""A group of its own, whose leases are looked at meanwhile."""
MODULE = "logyard.bench.kv_load"


def run_kv(settings: KvSettings, cluster: Cluster, directory: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Create the group, load it, verify. Returns the report with `ok`."""
    from logyard.client.sync import connect_sync

    machine = describe_machine(directory)
    with connect_sync(cluster.addresses) as yard:
        yard.create(NAME, members=list(range(1, cluster.count + 1)), machine="kv")
        reach("a leader", lambda: all_led(yard, cluster, 1), 60.0)
        syncs = sum(int(status["fdatasyncs"]) for status in statuses(yard, cluster))
        yard.create(TERMS, members=list(range(1, cluster.count + 1)), machine="kv")
        with Beside(cluster.addresses, TERMS, "kv") as terms:
            meter = Meter(cluster.pids)
            results = run_processes(specifications(settings, cluster), say, MODULE)
            used = meter.figures(sum(int(result["acknowledged"]) for result in results))
        after = statuses(yard, cluster)
        state = yard.kv(NAME).status()
    parallel = settings.clients if settings.mode != "watch" else settings.watchers
    figures = append_figures(results, size=settings.size, clients=parallel, window=1, seconds=settings.seconds)
    lost = sum(int(result["lost"]) for result in results)
    return {
        "ok": not lost
        and not terms.early
        and not figures["failed"]
        and figures["acknowledged"] > 0
        and not figures["problems"],
        "case": "kv",
        "nodes": cluster.count,
        **asdict(settings),
        **figures,
        **used,
        "lost": lost,
        **terms.row(),
        "revision": state["revision"],
        "keys_there": state["keys"],
        "fdatasyncs": sum(int(status["fdatasyncs"]) for status in after) - syncs,
        "filesystem": machine["filesystem"],
        "machine": machine,
    }


def specifications(settings: KvSettings, cluster: Cluster) -> list[KvSpec]:
    """Return one for each process. Of those that watch the first one writes, too."""
    watch = settings.mode == "watch"
    processes = min(settings.processes, settings.watchers if watch else settings.clients)
    watchers = shares(settings.watchers, processes) if watch else [0] * processes
    clients = [1] * processes if watch else shares(settings.clients, processes)
    seed = random.SystemRandom().getrandbits(32)
    return [
        KvSpec(
            cluster.addresses, NAME, settings.mode, settings.size, clients[lane], settings.keys, watchers[lane], seed,
            lane, settings.warmup_s, settings.seconds, settings.runtime,
        )
        for lane in range(processes)
    ]  # fmt: skip
