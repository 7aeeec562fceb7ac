"""`logyard bench replay`: what an entry costs to apply and to replay, which must not depend on its payload (law 5).

One node, one client that waits for each append, so that every append is an entry and a batch of its own whatever its
size. Both costs are processor time that the node itself counts: of the applier while the log is filled, and, after
SIGKILL and a new start, of the replay of the write-ahead log and of applying everything again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..calibrate import describe_machine
from ..cluster import Cluster, all_applied, create_logs, log_names, reach, statuses
from ..settings import ReplaySettings
from ..workload import Workload

REPLAY_S_MAX = 300.0
SAMPLE_ONE_IN = 20
WAL_FILE_BYTES_MAX = 4 << 30
BLOCK_BYTES = 4096
HEAD_BYTES = 1024
"""More than a batch of one record has beside its payload."""
SLACK_BYTES = 4 << 20
"""Free space of the WAL file, the same for all sizes: a start searches it for lost batches, whatever lies before it."""


def wal_file_bytes(settings: ReplaySettings) -> int:
    """Return the size of a file that just holds the whole run: every size is then replayed from the write-ahead log,
    none from segments.

    Raises `ValueError` for a run that is too long for one file.
    """
    blocks = -(-(settings.size + HEAD_BYTES) // BLOCK_BYTES)
    wanted = settings.entries * blocks * BLOCK_BYTES + SLACK_BYTES
    if wanted > WAL_FILE_BYTES_MAX:
        raise ValueError(f"{settings.entries} entries of {settings.size} bytes are too much for one WAL file of 4 GiB")
    return wanted


def limits_of(settings: ReplaySettings) -> Mapping[str, object]:
    """Return the limits of the node: one WAL file, and no snapshot that would spare the replay."""
    size = wal_file_bytes(settings)
    return {
        "wal_file_bytes": size,
        "wal_unflushed_bytes_max": max(512 << 20, size),
        "wal_stock_files": 0,
        "snapshot_entries": 1 << 40,
        "hibernate_after_ms": 0,
    }


def run_replay(
    settings: ReplaySettings,
    cluster: Cluster,
    directory: Path,
    say: Callable[[str], None],
    step: Callable[[int], None],
) -> dict[str, Any]:
    """Fill, kill, start, compare. `step` is told of each append. Returns the report with `ok`."""
    from logyard.client.sync import connect_sync

    machine = describe_machine(directory)
    workload = Workload(settings.size, random.SystemRandom().getrandbits(32), 0)
    (name,) = log_names(1)
    with connect_sync(cluster.addresses) as yard:
        setup_s = create_logs(yard, cluster, 1)
        log = yard.log(name)
        before = statuses(yard, cluster)[0]["apply"]
        say(f"appending {settings.entries} entries of {settings.size} bytes, one after another")
        began = time.monotonic()
        for number in range(settings.entries):
            log.append(b"", workload.body(number))
            step(1)
        fill_s = time.monotonic() - began
        status = statuses(yard, cluster)[0]
        after, sealed = status["apply"], int(status["wal"]["sealed"])
    cluster.kill9(1)
    say("killed the node; starting it again")
    began = time.monotonic()
    cluster.start()
    with connect_sync(cluster.addresses) as yard:
        reach("everything applied again", lambda: all_applied(yard, cluster, 1), REPLAY_S_MAX)
        recovery_s = time.monotonic() - began
        again = statuses(yard, cluster)[0]["apply"]
        problems = differences(yard.log(name), workload, settings.entries)
    applied = int(after["entries"]) - int(before["entries"])
    replayed = int(again["entries"])
    if applied < settings.entries or replayed < settings.entries:
        problems.append(f"{applied} entries applied and {replayed} replayed: each of {settings.entries} is wanted")
    if sealed:
        problems.append("the run did not fit into one WAL file: a part was replayed from segments")
    log_us, apply_us = int(again["replay_cpu_us"]), int(again["cpu_us"])
    return {
        "ok": not problems,
        "case": "replay",
        "nodes": cluster.count,
        **asdict(settings),
        "apply_us": round((int(after["cpu_us"]) - int(before["cpu_us"])) / max(1, applied), 2),
        "replay_us": round((log_us + apply_us) / max(1, replayed), 2),
        "replay_log_us": round(log_us / max(1, replayed), 2),
        "replay_apply_us": round(apply_us / max(1, replayed), 2),
        "applied": applied,
        "replayed": replayed,
        "recovery_s": round(recovery_s, 3),
        "fill_s": round(fill_s, 3),
        "setup_s": round(setup_s, 3),
        "filesystem": machine["filesystem"],
        "machine": machine,
        "problems": problems,
    }


def differences(log: Any, workload: Workload, count: int) -> list[str]:
    """Return what is wrong with the log's bounds, its last record and a random sample of the others."""
    start, end = log.latest()
    if (start, end) != (0, count):
        return [f"the log is {start}..{end}, {count} records were acknowledged"]
    numbers = {count - 1, *random.sample(range(count), -(-count // SAMPLE_ONE_IN))}
    return [
        f"record {number} came back different"
        for number in sorted(numbers)
        if log.read(number).payload != workload.body(number)
    ]
