"""`logyard bench cluster`: what a catalogue of many logs costs.

On real nodes: logs created in batches a second, a look-up over a connection, the memory that they take on a node that
only learns, and a restart until every node knows all of them again. In this process, on a catalogue that is told the
same as theirs was: a look-up from memory, and what a snapshot writes after one log has changed. Linux only (/proc).
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from logyard.engine.machine import Context
from logyard.engine.snapshot.format import Snapshot, split
from logyard.machines.catalog import Catalog
from logyard.machines.catalog.command import REQUEST_BYTES, command, question, result_of
from logyard.machines.catalog.logs import Logs

from ..calibrate import describe_machine
from ..cluster import Cluster, log_names, reach
from ..processes import anonymous_bytes, resident_bytes
from ..settings import ClusterSettings

if TYPE_CHECKING:
    from logyard.client.sync import Yard

MEMBERS = (1, 2, 3)
LEARNER = 4
"""The first node that has no vote, and no member of a log."""
BATCH = 256
"""Logs of one command, as nodes send them."""
PATIENCE_S = 120.0
LOGS_PER_S_MIN = 50
UID = 1
FIRST = 1 << 62
"""The first log's number: of as many bytes as numbers that are drawn."""


def limits_of(settings: ClusterSettings) -> dict[str, object]:
    """Return what the nodes' configuration has to say for so many logs."""
    return {"groups_max": max(100_000, 2 * settings.logs)}


def run_cluster(
    settings: ClusterSettings, cluster: Cluster, directory: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Create, look up, restart, compare. Returns the report with `ok`."""
    from logyard.client.sync import connect_sync

    began, machine = time.monotonic(), describe_machine(directory)
    with connect_sync(cluster.addresses, timeout=PATIENCE_S) as yard:
        reach("a catalogue of all nodes", lambda: active(yard, cluster), PATIENCE_S)
        # It would give the learner its share of members while they are counted.
        yard.change_catalog("plan", "pause", {"why": "what a catalogue costs is measured"})
        empty = memory(cluster)
        say(f"creating {settings.logs} logs on nodes {', '.join(map(str, MEMBERS))} of {cluster.count}")
        marked = time.monotonic()
        created = yard.create_batch(log_names(settings.logs), members=MEMBERS)
        created_s = time.monotonic() - marked
        reach("the learner knows all", lambda: held(yard, LEARNER) >= settings.logs, PATIENCE_S)
        full = memory(cluster)
        found_ms = find(yard, settings)
    say("stopping all nodes and starting them again")
    cluster.stop()
    marked = time.monotonic()
    cluster.start()
    ready_s = time.monotonic() - marked
    with connect_sync(cluster.addresses, timeout=PATIENCE_S) as yard:

        def known() -> bool:
            return all(held(yard, node) >= settings.logs for node in range(1, cluster.count + 1))

        reach("every node knows all", known, PATIENCE_S)
        restart_s = time.monotonic() - marked
        again = memory(cluster)
    say("the same in this process")
    return {
        "ok": created == settings.logs,
        "case": "cluster",
        "nodes": cluster.count,
        **asdict(settings),
        "created_s": round(created_s, 3),
        "created_per_s": round(created / created_s, 1),
        "find_ms_p50": found_ms,
        "learner_bytes_per_log": round((full[0] - empty[0]) / settings.logs),
        "learner_anonymous_bytes_per_log": round((full[1] - empty[1]) / settings.logs),
        "learner_restarted_bytes_per_log": round((again[0] - empty[0]) / settings.logs),
        "learner_restarted_anonymous_bytes_per_log": round((again[1] - empty[1]) / settings.logs),
        "restart_ready_s": round(ready_s, 3),
        "restart_s": round(restart_s, 3),
        **in_memory(settings),
        "total_s": round(time.monotonic() - began, 3),
        "filesystem": machine["filesystem"],
        "machine": machine,
    }


def memory(cluster: Cluster) -> tuple[int, int]:
    """Return the bytes that the learner has resident, and those of them that are no file's."""
    pid = cluster.pids[LEARNER - 1]
    return resident_bytes(pid), anonymous_bytes(pid)


def active(yard: Yard, cluster: Cluster) -> bool:
    """Return whether the catalogue has all nodes, and the learner knows it."""
    rows = yard.catalog("nodes", "list", node=LEARNER, consistency="local")["result"]
    return [row["state"] for row in rows] == ["active"] * cluster.count


def held(yard: Yard, node: int) -> int:
    """Return how many logs a node knows of that have a member on the first one."""
    rows = yard.catalog("nodes", "list", node=node, consistency="local")["result"]
    return next((int(row["held"]) for row in rows if row["node"] == MEMBERS[0]), 0)


def find(yard: Yard, settings: ClusterSettings) -> float:
    """Return the median milliseconds of looking up a name on the node that learns, over a connection."""
    took = []
    for name in random.SystemRandom().choices(log_names(settings.logs), k=settings.finds):
        marked = time.perf_counter()
        yard.catalog("logs", "find", {"name": name}, node=LEARNER, consistency="local")
        took.append((time.perf_counter() - marked) * 1000)
    return round(sorted(took)[len(took) // 2], 3)


def in_memory(settings: ClusterSettings) -> dict[str, Any]:
    """Return what a look-up takes, and what a snapshot writes after one log's members have changed."""
    catalog, names = told(settings.logs), log_names(settings.logs)
    chosen = random.SystemRandom().choices(names, k=settings.lookups)
    logs = catalog.sections["logs"]
    assert isinstance(logs, Logs)
    marked = time.perf_counter()
    found = sum(logs.find(name) is not None for name in chosen)
    lookup_s = time.perf_counter() - marked
    assert found == settings.lookups
    before = split(snapshot(catalog), catalog.inline_bytes)
    told_of(catalog, "report", {"logs": [[FIRST, 9, [1, 2, 4], []]]})
    after = split(snapshot(catalog), catalog.inline_bytes)
    fresh = sum(len(after.chunks[name]) for name in after.chunks.keys() - before.chunks.keys())
    written = len(after.manifest) + fresh
    return {
        "lookup_us": round(lookup_s / settings.lookups * 1e6, 2),
        "snapshot_bytes": after.size,
        "snapshot_written_bytes": written,
        "snapshot_written_share": round(written / after.size, 4),
    }


def told(count: int) -> Catalog:
    """Return a catalogue that was told of so many logs as nodes tell it: made, alive, led by somebody."""
    catalog, names = Catalog(), log_names(count)
    for first in range(0, count, BATCH):
        uids = [FIRST + at for at in range(first, min(count, first + BATCH))]
        model = {"machine": "log", "arguments": {}, "members": list(MEMBERS)}
        told_of(catalog, "create", {"logs": [{**model, "name": names[uid - FIRST], "uid": uid} for uid in uids]})
        told_of(catalog, "live", {"uids": uids})
        told_of(catalog, "report", {"logs": [[uid, 1, list(MEMBERS), []] for uid in uids]})
    answer = result_of(catalog.query(question("logs", "find", {"name": names[-1]})))
    assert answer["state"] == "live" and answer["seen"], answer
    return catalog


def told_of(catalog: Catalog, name: str, values: dict[str, Any]) -> None:
    """Apply a command to the logs, under a request of its own. Raises what it is refused with."""
    data = command("logs", name, values, os.urandom(REQUEST_BYTES))
    now = time.time_ns() // 1_000_000
    result_of(catalog.apply(Context(UID, 1, 1, now, catalog.version), data, ()).reply)


def snapshot(catalog: Catalog) -> Snapshot:
    """Return a snapshot as a node would store it."""
    return Snapshot(UID, 1, 1, b"", catalog.version, 0, 0, catalog.snapshot(), b"")
