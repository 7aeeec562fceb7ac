"""`logyard bench recover`: from the start of killed nodes until every log is led and every member has applied all.

The nodes are killed with SIGKILL, all at once, after `entries` rounds of one append to each log: each append is an
entry of its own.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import trio

from ..calibrate import describe_machine
from ..cluster import Cluster, all_applied, create_logs, log_names, reach
from ..settings import RecoverSettings
from ..workload import Workload

RECOVER_S_MAX = 300.0
OUTSTANDING_MAX = 2000


def run_recover(
    settings: RecoverSettings, cluster: Cluster, directory: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Fill, kill all, start all, wait. Returns the report with `ok`."""
    from logyard.client.sync import connect_sync

    machine = describe_machine(directory)
    names = log_names(settings.logs)
    with connect_sync(cluster.addresses) as yard:
        say(f"creating {settings.logs} logs on {cluster.count} nodes")
        setup_s = create_logs(yard, cluster, settings.logs)
    say(f"appending {settings.entries} entries to each")
    began = time.monotonic()
    trio.run(fill, cluster.addresses, names, settings)
    fill_s = time.monotonic() - began
    cluster.kill9(*range(1, cluster.count + 1))
    say("killed all nodes; starting them again")
    began = time.monotonic()
    cluster.start()
    ready_s = time.monotonic() - began
    with connect_sync(cluster.addresses) as yard:
        reach("every log recovered", lambda: all_applied(yard, cluster, settings.logs), RECOVER_S_MAX)
        recovery_s = time.monotonic() - began
        stored = sum(yard.log(name).latest()[1] for name in names)
    wanted = settings.logs * settings.entries
    return {
        "ok": stored >= wanted,
        "case": "recover",
        "nodes": cluster.count,
        **asdict(settings),
        "recovery_s": round(recovery_s, 3),
        "ready_s": round(ready_s, 3),
        "setup_s": round(setup_s, 3),
        "fill_s": round(fill_s, 3),
        "acknowledged": wanted,
        "stored": stored,
        "lost": max(0, wanted - stored),
        "filesystem": machine["filesystem"],
        "machine": machine,
    }


async def fill(addresses: list[str], names: list[str], settings: RecoverSettings) -> None:
    """Append `entries` rounds of one record to each log, each round answered before the next."""
    from logyard.client.aio import connect

    workload = Workload(settings.size, random.SystemRandom().getrandbits(32), 0)
    async with connect(addresses) as yard:
        logs = [yard.log(name) for name in names]
        number = 0
        for _ in range(settings.entries):
            for first in range(0, len(logs), OUTSTANDING_MAX):
                pending = []
                for log in logs[first : first + OUTSTANDING_MAX]:
                    pending.append(log.append_nowait(b"", workload.body(number)))
                    number += 1
                for each in pending:
                    await each.wait()
