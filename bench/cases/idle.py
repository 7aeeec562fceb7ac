"""`logyard bench idle`: what a log costs that nobody uses, in resident memory and processor time.

Memory is that of all processes of a node, with the logs less without them, a log and node; it is read after the nodes
have settled. Linux only (/proc).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ..calibrate import describe_machine
from ..cluster import Cluster, create_logs, threading_wait
from ..processes import cpu_seconds, resident_bytes


class IdleSettings(NamedTuple):
    """Flags of the command: how many logs, and for how many seconds the processor time is measured."""

    logs: int
    seconds: float
    settle_s: float


def run_idle(settings: IdleSettings, cluster: Cluster, directory: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Create the logs, let the nodes settle, measure. Returns the report with `ok`."""
    from logyard.client.sync import connect_sync

    began = time.monotonic()
    wait = threading_wait()
    machine = describe_machine(directory)
    with connect_sync(cluster.addresses) as yard:
        without = [resident_bytes(pid) for pid in cluster.pids]
        say(f"creating {settings.logs} logs on {cluster.count} nodes")
        setup_s = create_logs(yard, cluster, settings.logs)
    say(f"settling for {settings.settle_s:g} s, then measuring for {settings.seconds:g} s")
    wait(settings.settle_s)
    cpu = [cpu_seconds(pid) for pid in cluster.pids]
    marked = time.monotonic()
    wait(settings.seconds)
    elapsed = time.monotonic() - marked
    spent = [(cpu_seconds(pid) - old) / elapsed * 100 for pid, old in zip(cluster.pids, cpu, strict=True)]
    resident = [resident_bytes(pid) for pid in cluster.pids]
    per_node = [(new - old) / settings.logs for new, old in zip(resident, without, strict=True)]
    return {
        "ok": bool(resident and all(resident)),
        "case": "idle",
        "nodes": cluster.count,
        **settings._asdict(),
        "bytes_per_log": round(sum(per_node) / len(per_node)),
        "bytes_per_log_per_node": [round(value) for value in per_node],
        "cpu_percent": round(sum(spent) / len(spent), 2),
        "cpu_percent_per_node": [round(value, 2) for value in spent],
        "resident_bytes_per_node": resident,
        "setup_s": round(setup_s, 3),
        "total_s": round(time.monotonic() - began, 3),
        "filesystem": machine["filesystem"],
        "machine": machine,
    }
