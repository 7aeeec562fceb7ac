"""`logyard bench groups`: records consumed and committed a second by a group of processes, and how old records are when
they come, at a tenth of that.

First the topic is filled; then the members, processes of their own, read all of it and commit every second; then
records are sent at a tenth of what was consumed. Every record is counted.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from logyard.protocol.errors import LogyardError

from ..calibrate import describe_machine
from ..cluster import Cluster, reach
from ..groups_load import HEAD, GroupsSpec
from ..processes import Meter
from ..settings import GroupsSettings
from .append import expect
from .queue import tell

if TYPE_CHECKING:
    from logyard.client.sync import Yard

TOPIC, GROUP = "bench", "bench-group"
FILL_RECORDS = 4096
"""Records of one call while the topic is filled."""
SHARE = 10
"""Latency is looked at at this part of what was consumed."""
TICK_S = 0.005
PATIENCE_S = 300.0


def run_groups(
    settings: GroupsSettings, cluster: Cluster, directory: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Fill, consume, send at a rate, compare. Returns the report with `ok`."""
    from logyard.client.sync import connect_sync

    with connect_sync(cluster.addresses) as yard:
        yard.topic(TOPIC).create(settings.partitions)
        say(f"filling {settings.partitions} partitions with {settings.records} records of {settings.size} bytes")
        fill_s = fill(yard, settings)
        processes: list[subprocess.Popen[str]] = []
        try:
            for _ in range(settings.members):
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "logyard.bench.groups_load"],
                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                    )
                )  # fmt: skip
                spec = GroupsSpec(cluster.addresses, TOPIC, GROUP, settings.runtime)
                tell(processes[-1], json.dumps(spec._asdict()))
            for process in processes:
                expect(process, "ready")
            meter = Meter(cluster.pids)
            say(f"{settings.members} members consume")
            for process in processes:
                tell(process, "go")
            began = time.monotonic()
            reach("everything committed", lambda: is_read(yard, settings.records), PATIENCE_S)
            used = meter.figures(settings.records)
            rate = settings.records / (time.monotonic() - began)
            say(f"sending {rate / SHARE:.0f} a second for {settings.seconds:g} s")
            sent = send(yard, settings, rate / SHARE)
            for process in processes:
                tell(process, "end")
            results = [json.loads(expect(process)) for process in processes]
        finally:
            for process in processes:
                if process.poll() is None and sys.exc_info()[0] is not None:
                    process.kill()
                process.communicate()
        told = yard.consumer_group(GROUP).describe()
    return report(settings, cluster, directory, results, sent, fill_s, told) | used


def body(settings: GroupsSettings, number: int, sent_ns: int) -> bytes:
    """Return a record's body."""
    return HEAD.pack(sent_ns, number).ljust(settings.size, b"\0")


def fill(yard: Yard, settings: GroupsSettings) -> float:
    """Send what is to be there before anybody reads; return the seconds that took."""
    topic, began = yard.topic(TOPIC), time.monotonic()
    for first in range(0, settings.records, FILL_RECORDS):
        numbers = range(first, min(settings.records, first + FILL_RECORDS))
        topic.send_many([(b"key-%d" % (number % 1000), b"", body(settings, number, 0)) for number in numbers])
    return time.monotonic() - began


def is_read(yard: Yard, records: int) -> bool:
    """Return whether the group has committed everything."""
    try:
        partitions = yard.consumer_group(GROUP).describe()["partitions"]
    except LogyardError:
        # Nobody has joined yet.
        return False
    return sum(one["offset"] or 0 for one in partitions) >= records


def send(yard: Yard, settings: GroupsSettings, rate: float) -> int:
    """Send at a rate; return how many that were."""
    topic, began, sent = yard.topic(TOPIC), time.monotonic(), 0
    while (passed := time.monotonic() - began) < settings.seconds:
        wanted = int(rate * passed) - sent
        if wanted > 0:
            now = time.monotonic_ns()
            numbers = range(settings.records + sent, settings.records + sent + wanted)
            topic.send_many([(b"key-%d" % (number % 1000), b"", body(settings, number, now)) for number in numbers])
            sent += wanted
        else:
            # The rate is what is measured at: it is time that is waited for.
            threading.Event().wait(TICK_S)
    return sent


def report(
    settings: GroupsSettings,
    cluster: Cluster,
    directory: Path,
    results: list[dict[str, Any]],
    sent: int,
    fill_s: float,
    told: dict[str, Any],
) -> dict[str, Any]:
    """Return the report of what the members did."""
    filled = [one for one in results if one["filled"]]
    seconds = max(one["last"] for one in filled) - min(one["first"] for one in filled) if filled else 0.0
    latencies = sorted(one for result in results for one in result["latencies_us"])
    consumed, twice = sum(one["consumed"] for one in results), sum(one["twice"] for one in results)
    lost = settings.records + sent - (consumed - twice)
    lag = sum(one["lag"] or 0 for one in told["partitions"])
    return {
        "ok": not lost and not lag and consumed > 0,
        "case": "groups",
        "nodes": cluster.count,
        **asdict(settings),
        "fill_per_s": round(settings.records / fill_s, 1),
        "consumed_per_s": round(settings.records / seconds, 1) if seconds else 0,
        "consume_s": round(seconds, 3),
        "sent_at_rate": sent,
        "latency_p50_ms": quantile(latencies, 0.5),
        "latency_p99_ms": quantile(latencies, 0.99),
        "consumed": consumed,
        "twice": twice,
        "lost": lost,
        "lag": lag,
        "rebalances": told["rebalances"],
        "consumer_cpu_s": round(sum(one["cpu_s"] for one in results), 3),
        "machine": describe_machine(directory),
    }


def quantile(values: list[int], share: float) -> float | None:
    """Return the value below which that share lies, in ms."""
    return round(values[min(len(values) - 1, int(len(values) * share))] / 1000, 3) if values else None
