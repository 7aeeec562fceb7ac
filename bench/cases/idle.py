"""`logyard bench idle`: what a log costs that nobody uses, in memory and processor time, and a clean restart with all.

Measured twice: when every log has gone to sleep in the processes that created it, and again in the processes of a
restart. Memory is that of all processes of a node, with the logs less without them, a log and node: `bytes` are
resident, `anonymous_bytes` without what maps files (the kernel may take that back). Linux only (/proc).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from ..calibrate import describe_machine
from ..cluster import Cluster, create_logs, log_names, reach, statuses, threading_wait
from ..processes import anonymous_bytes, cpu_seconds, resident_bytes
from ..settings import IdleSettings

ASLEEP_S_MIN = 120.0
LOGS_PER_S_MIN = 50
"""What is waited for them to go to sleep, on a busy machine."""


class Memory(NamedTuple):
    """Bytes of each node."""

    resident: list[int]
    anonymous: list[int]

    @classmethod
    def of(cls, pids: Sequence[int]) -> Memory:
        """Measure the memory as of now."""
        return cls([resident_bytes(pid) for pid in pids], [anonymous_bytes(pid) for pid in pids])


def run_idle(settings: IdleSettings, cluster: Cluster, directory: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Create the logs, let them sleep, measure, restart the nodes, measure. Returns the report with `ok`."""
    from logyard.client.sync import connect_sync

    began = time.monotonic()
    machine = describe_machine(directory)
    with connect_sync(cluster.addresses) as yard:
        without = Memory.of(cluster.pids)
        say(f"creating {settings.logs} logs on {cluster.count} nodes")
        setup_s = create_logs(yard, cluster, settings.logs)
        say("waiting until all of them sleep")

        def asleep() -> bool:
            return all(status["hibernating"] == settings.logs for status in statuses(yard, cluster))

        asleep_s = reach("every log sleeps", asleep, max(ASLEEP_S_MIN, settings.logs / LOGS_PER_S_MIN))
    first = _measure(settings, cluster, without, say)
    say("stopping all nodes and starting them again")
    cluster.stop()
    marked = time.monotonic()
    cluster.start()
    ready_s = time.monotonic() - marked
    with connect_sync(cluster.addresses) as yard:
        recovered = [int(status["groups"]) for status in statuses(yard, cluster)]
        restart_s = time.monotonic() - marked
        yard.log(log_names(settings.logs)[-1]).append(b"x")
        append_s = time.monotonic() - marked
    second = _measure(settings, cluster, without, say)
    return {
        "ok": bool(without.resident and all(without.resident)) and set(recovered) == {settings.logs},
        "case": "idle",
        "nodes": cluster.count,
        **asdict(settings),
        **first,
        "restart_s": round(restart_s, 3),
        "restart_ready_s": round(ready_s, 3),
        "restart_append_s": round(append_s, 3),
        **{f"restarted_{key}": value for key, value in second.items()},
        "setup_s": round(setup_s, 3),
        "asleep_s": round(asleep_s, 3),
        "total_s": round(time.monotonic() - began, 3),
        "filesystem": machine["filesystem"],
        "machine": machine,
    }


def _measure(
    settings: IdleSettings, cluster: Cluster, without: Memory, say: Callable[[str], None]
) -> dict[str, float | list[float]]:
    """Settle, then the processor time of some seconds, then memory."""
    wait = threading_wait()
    say(f"settling for {settings.settle_s:g} s, then measuring for {settings.seconds:g} s")
    wait(settings.settle_s)
    cpu = [cpu_seconds(pid) for pid in cluster.pids]
    marked = time.monotonic()
    wait(settings.seconds)
    elapsed = time.monotonic() - marked
    spent = [(cpu_seconds(pid) - old) / elapsed * 100 for pid, old in zip(cluster.pids, cpu, strict=True)]
    found = Memory.of(cluster.pids)
    resident = [(new - old) / settings.logs for new, old in zip(found.resident, without.resident, strict=True)]
    anonymous = [(new - old) / settings.logs for new, old in zip(found.anonymous, without.anonymous, strict=True)]
    return {
        "bytes_per_log": round(sum(resident) / len(resident)),
        "bytes_per_log_per_node": [round(value) for value in resident],
        "anonymous_bytes_per_log": round(sum(anonymous) / len(anonymous)),
        "cpu_percent": round(sum(spent) / len(spent), 3),
        "cpu_percent_per_node": [round(value, 3) for value in spent],
        "resident_bytes_per_node": [float(value) for value in found.resident],
    }
