"""`logyard bench churn`: how often a payload byte is written, and how much disk a living one takes.

Appends and truncates go on together. `young`: a record is removed while its WAL file is still its home. `old`: records
stay until they were migrated to generations; then half of them are removed, which leaves generations to rewrite. Both
modes run under the same limits, which shrink with the run, so that a short one goes through every phase too.

written_per_payload_byte = write_bytes of /proc/PID/io, all processes of all nodes, from before the first append until
the nodes are quiet again / (payload bytes appended x nodes).
disk_per_payload_byte = allocated bytes of WAL files in use (spares are stock and do not count), generations, segments
and meta store, all nodes, once they are quiet / (payload bytes that live x nodes).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..calibrate import describe_machine
from ..cluster import Cluster, NotReached, create_logs, log_names, reach, statuses
from ..processes import written_bytes
from ..settings import ChurnSettings
from ..workload import Workload

MIB = 1 << 20
YOUNG, OLD = "young", "old"
ROUND_BYTES = 4 * MIB
"""Appended between two truncations."""
YOUNG_SHARE = 16
"""A young log keeps a 16th of the run alive."""
WAL_FILE_SHARE, WAL_FILE_MIN, WAL_FILE_MAX = 64, MIB, 64 * MIB
BUDGET_SHARE = 4
"""Sealed WAL files may take a quarter of the run: what lives longer than that is migrated."""
GENERATION_SHARE, GENERATION_MIN, GENERATION_MAX = 4, 16 * MIB, 1 << 30
SAMPLE_ONE_IN = 20
QUIET_S_MAX = 120.0


def limits_of(settings: ChurnSettings) -> Mapping[str, object]:
    """Return the limits of the nodes, the same in both modes."""
    file = min(WAL_FILE_MAX, max(WAL_FILE_MIN, settings.total // WAL_FILE_SHARE))
    return {
        "wal_file_bytes": file,
        "migrate_budget_bytes": settings.total // BUDGET_SHARE,
        "generation_bytes": min(GENERATION_MAX, max(GENERATION_MIN, settings.total // GENERATION_SHARE)),
        "hibernate_after_ms": 0,
    }


def run_churn(
    settings: ChurnSettings,
    cluster: Cluster,
    directory: Path,
    say: Callable[[str], None],
    step: Callable[[int], None],
) -> dict[str, Any]:
    """Append and truncate, wait for quiet, measure, read back. `step` is told of records. Returns the report."""
    from logyard.client.sync import connect_sync

    machine = describe_machine(directory)
    workload = Workload(settings.size, random.SystemRandom().getrandbits(32), 0)
    (name,) = log_names(1)
    problems: list[str] = []
    with connect_sync(cluster.addresses) as yard:
        setup_s = create_logs(yard, cluster, 1)
        wait_quiet(yard, cluster, settings.settle_s, problems)
        written = sum(written_bytes(pid) for pid in cluster.pids)
        began = time.monotonic()
        log = yard.log(name)
        say(f"appending {settings.records} records of {settings.size} bytes, mode {settings.mode}")
        start = fill(settings, log, workload, step)
        fill_s = time.monotonic() - began
        if settings.mode == OLD:
            wait_quiet(yard, cluster, settings.settle_s, problems)
            start = settings.records // 2
            log.truncate(start)
            say(f"removed {start} of them")
        quiet_s = wait_quiet(yard, cluster, settings.settle_s, problems)
        written = sum(written_bytes(pid) for pid in cluster.pids) - written
        after = statuses(yard, cluster)
        per_node = [disk_of(directory / f"node-{number}" / "data") for number in range(1, cluster.count + 1)]
        say("reading back")
        for node in range(1, cluster.count + 1):
            problems += differences(log, workload, start, settings.records, node)
    live = (settings.records - start) * settings.size
    parts = {part: sum(disk[part] for disk in per_node) for part in per_node[0]}
    return {
        "ok": not problems,
        "case": "churn",
        "nodes": cluster.count,
        **asdict(settings),
        "written_per_payload_byte": round(written / (settings.records * settings.size * cluster.count), 3),
        "disk_per_payload_byte": round(sum(parts.values()) / (live * cluster.count), 3),
        "records": settings.records,
        "payload_bytes": settings.records * settings.size,
        "live_bytes": live,
        "written_bytes": written,
        **{f"{part}_bytes": size for part, size in parts.items()},
        "migrated_files": sum(int(status["migrated_files"]) for status in after),
        "migrated_bytes": sum(int(status["migrated_bytes"]) for status in after),
        "fill_s": round(fill_s, 3),
        "quiet_s": round(quiet_s, 3),
        "setup_s": round(setup_s, 3),
        "filesystem": machine["filesystem"],
        "machine": machine,
        "problems": problems,
    }


def fill(settings: ChurnSettings, log: Any, workload: Workload, step: Callable[[int], None]) -> int:
    """Append everything, a MiB a call; in mode young with a truncation after every round. Returns the log's start."""
    # A call is at most a MiB, so that a record above 4 KiB is a payload by itself in an entry of ordinary size.
    batch = max(1, MIB // settings.size)
    keep = max(1, settings.total // YOUNG_SHARE // settings.size)
    start = unremoved = 0
    for first in range(0, settings.records, batch):
        numbers = range(first, min(settings.records, first + batch))
        log.append_many([(b"", workload.body(number)) for number in numbers])
        step(len(numbers))
        unremoved += len(numbers) * settings.size
        if settings.mode == YOUNG and (unremoved >= ROUND_BYTES or numbers.stop == settings.records):
            unremoved = 0
            if numbers.stop > keep:
                start = numbers.stop - keep
                log.truncate(start)
    return start


def wait_quiet(yard: Any, cluster: Cluster, settle_s: float, problems: list[str]) -> float:
    """Wait until no node's storage changed for `settle_s`; return the seconds it took. One that never rests is a
    problem."""
    last: list[Any] = []
    since = time.monotonic()

    def quiet() -> bool:
        nonlocal last, since
        now = [_standing(status) for status in statuses(yard, cluster)]
        if now != last:
            last, since = now, time.monotonic()
        return time.monotonic() - since >= settle_s

    try:
        return reach("quiet nodes", quiet, QUIET_S_MAX)
    except NotReached as error:
        problems.append(str(error))
        return QUIET_S_MAX


def _standing(status: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what changes while a node's storage works."""
    return (
        status["applied"], status["commit"], status["migrated_files"], status["payload_live_bytes"],
        status["wal"]["sealed"], status["wal"]["batches"], status["snapshots_taken"],
        [tuple(one.values()) for one in status["generations"]],
    )  # fmt: skip


def disk_of(data: Path) -> dict[str, int]:
    """Return the allocated bytes below a node's data directory, by what they are for."""
    return {
        "wal": allocated(data / "wal", "*.wal"),
        "generations": allocated(data / "payloads", "**/*"),
        "segments": allocated(data / "segments", "**/*"),
        "meta": allocated(data / "meta", "**/*"),
    }


def allocated(folder: Path, pattern: str) -> int:
    """Return the blocks of the files that match, in bytes; one that goes away meanwhile counts nothing."""
    total = 0
    for path in folder.glob(pattern):
        try:
            if path.is_file():
                total += path.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


def differences(log: Any, workload: Workload, start: int, end: int, node: int) -> list[str]:
    """Return what is wrong with a member's bounds, its first and last record and a random sample of the others."""
    found = tuple(log.latest(node=node, consistency="local"))
    if found != (start, end):
        return [f"node {node}: the log is {found[0]}..{found[1]}, it should be {start}..{end}"]
    count = end - start
    numbers = {start, end - 1, *random.sample(range(start, end), -(-count // SAMPLE_ONE_IN))}
    return [
        f"node {node}: record {number} came back different"
        for number in sorted(numbers)
        if log.read(number, node=node).payload != workload.body(number)
    ]
