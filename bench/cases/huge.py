"""`logyard bench huge`: many logs on few nodes, most of which nobody uses.

They are created in batches, measured asleep, restarted, one is appended to here and there, and some of them are loaded
as `bench append` does it: the same load was measured before on a cluster that has only those. Memory is that of all
processes of a node, with the logs less without them, a log and node. Linux only (/proc).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..calibrate import describe_machine
from ..cluster import Cluster, log_names, reach, statuses
from ..processes import Meter
from ..report import append_figures
from ..settings import AppendSettings, HugeSettings
from .append import run_processes, specifications
from .idle import Memory

if TYPE_CHECKING:
    from logyard.client.sync import Yard

CLIENTS, WINDOW = 5, 500
FIRST_APPENDS = 21
ASLEEP_S_MAX = 60.0
PATIENCE_S = 60.0
"""For one batch of logs, or one append, on a busy machine."""


def limits_of(settings: HugeSettings) -> dict[str, object]:
    """Return what the nodes' configuration has to say for so many logs."""
    return {"groups_max": max(100_000, 2 * settings.logs)}


def run_alone(
    settings: HugeSettings, cluster: Cluster, directory: Path, say: Callable[[str], None]
) -> dict[str, float]:
    """Load the active logs on a cluster that has no others. Returns what `run_huge` compares with."""
    from logyard.client.sync import connect_sync

    with connect_sync(cluster.addresses, timeout=PATIENCE_S) as yard:
        say(f"{settings.active_logs} logs alone, on {cluster.count} nodes")
        yard.create_batch(log_names(settings.active_logs))
    return _load(settings, cluster, say)


def run_huge(
    settings: HugeSettings, cluster: Cluster, directory: Path, alone: dict[str, float], say: Callable[[str], None]
) -> dict[str, Any]:
    """Create the logs, measure them asleep, restart, append, load. Returns the report with `ok`."""
    from logyard.client.sync import connect_sync

    began = time.monotonic()
    machine = describe_machine(directory)
    with connect_sync(cluster.addresses, timeout=PATIENCE_S) as yard:
        without = Memory.of(cluster.pids)
        say(f"creating {settings.logs} logs on {cluster.count} nodes")
        marked = time.monotonic()
        created = yard.create_batch(log_names(settings.logs))
        created_s = time.monotonic() - marked
        _asleep(yard, cluster, settings.logs)
        found = {**_memory("", settings, cluster, without), **_first_appends("", settings, yard)}
    say("stopping all nodes and starting them again")
    cluster.stop()
    marked = time.monotonic()
    cluster.start()
    restart_s = time.monotonic() - marked
    with connect_sync(cluster.addresses, timeout=PATIENCE_S) as yard:
        groups = [int(status["groups"]) for status in statuses(yard, cluster)]
        found |= {**_memory("restarted_", settings, cluster, without), **_first_appends("restarted_", settings, yard)}
    beside = _load(settings, cluster, say)
    return {
        "ok": created == settings.logs and set(groups) == {settings.logs} and not beside["failed"] + beside["lost"],
        "case": "huge",
        "nodes": cluster.count,
        **asdict(settings),
        "created_s": round(created_s, 3),
        "created_per_s": round(created / created_s),
        "restart_s": round(restart_s, 3),
        **found,
        **{f"alone_{key}": value for key, value in alone.items()},
        **{f"beside_{key}": value for key, value in beside.items()},
        "rate_ratio": round(beside["per_s"] / alone["per_s"], 3),
        "cpu_ratio": round(alone["server_cpu_us"] / beside["server_cpu_us"], 3),
        "total_s": round(time.monotonic() - began, 3),
        "filesystem": machine["filesystem"],
        "machine": machine,
    }


def _asleep(yard: Yard, cluster: Cluster, logs: int) -> None:
    """Wait until every node has all of them, asleep."""
    reach(
        "every log sleeps",
        lambda: all(status["hibernating"] == logs for status in statuses(yard, cluster)),
        ASLEEP_S_MAX,
    )


def _memory(prefix: str, settings: HugeSettings, cluster: Cluster, without: Memory) -> dict[str, Any]:
    found, logs = Memory.of(cluster.pids), settings.logs
    resident = max(new - old for new, old in zip(found.resident, without.resident, strict=True))
    anonymous = max(new - old for new, old in zip(found.anonymous, without.anonymous, strict=True))
    return {
        f"{prefix}bytes_per_log": round(resident / logs),
        f"{prefix}anonymous_bytes_per_log": round(anonymous / logs),
        f"{prefix}resident_mib": round(max(found.resident) / (1 << 20)),
    }


def _first_appends(prefix: str, settings: HugeSettings, yard: Yard) -> dict[str, float]:
    """Return the milliseconds of the first append to a log that nobody used, of a client that is connected."""
    chosen = random.SystemRandom().sample(range(settings.active_logs, settings.logs), FIRST_APPENDS + 1)
    took = []
    for name in (log_names(settings.logs)[number] for number in chosen):
        marked = time.perf_counter()
        yard.log(name).append(b"x")
        took.append((time.perf_counter() - marked) * 1000)
    took = sorted(took[1:])
    return {
        f"{prefix}first_append_ms_p50": round(took[len(took) // 2], 2),
        f"{prefix}first_append_ms_max": round(took[-1], 2),
    }


def _load(settings: HugeSettings, cluster: Cluster, say: Callable[[str], None]) -> dict[str, float]:
    told = AppendSettings(
        logs=settings.active_logs, size=settings.size, clients=CLIENTS, window=WINDOW, seconds=settings.seconds,
        warmup_s=settings.warmup_s,
    )  # fmt: skip
    meter = Meter(cluster.pids)
    results = run_processes(specifications(told, cluster), say)
    used = meter.figures(sum(int(result["acknowledged"]) for result in results))
    figures = append_figures(results, size=told.size, clients=CLIENTS, window=WINDOW, seconds=told.seconds)
    return {
        "per_s": figures["ops_per_s"],
        "p50_ms": figures["p50_ms"],
        "p99_ms": figures["p99_ms"],
        "failed": figures["failed"],
        "lost": sum(int(result["lost"]) for result in results),
        "server_cpu_us": used["server_cpu_us_per_op"],
        "resident_mib": round(used["server_resident_bytes"] / (1 << 20) / cluster.count),
    }
