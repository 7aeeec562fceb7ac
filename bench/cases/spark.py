"""`logyard bench spark`: metadata rows and payload bytes a second, planning, streams, and the audit's memory, on
``local[2]``.

Each reading is done twice on the same session and the second one counts. Beside each stands what PySpark moves from a
source that costs nothing (`spark_ceiling`), measured in the same run.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..calibrate import describe_machine
from ..cluster import Cluster, create_logs, log_names
from ..settings import SparkSettings
from ..workload import Workload

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS_PER_S = 500_000
MB_PER_S = 300
PLAN_S = 2.0
PEAK_BYTES = 1 << 30
STREAM_ROWS_PER_S = 800_000
STREAM_LIMITED_ROWS_PER_S = 400_000
STREAM_BATCH_MS = 400
STREAM_DEAD_NODE_RATIO = 1.5
META = b"m" * 100
FRAME_RECORDS = 1000
PAYLOAD_BYTES = 64 << 10
PAYLOAD_LOGS = 100


def run_spark(
    settings: SparkSettings, cluster: Cluster, directory: Path, spark: SparkSession, say: Callable[[str], None]
) -> dict[str, Any]:
    """Fill, read, plan, audit. Returns the report with `ok`."""
    from logyard.client.sync import connect_sync
    from logyard.pipeline.jobs.audit import run_audit

    from .spark_ceiling import CeilingSource
    from .spark_stream import run_streams

    machine = describe_machine(directory)
    spark.dataSource.register(CeilingSource)
    servers = {"servers": ",".join(cluster.addresses)}
    names = log_names(settings.logs)
    with connect_sync(cluster.addresses) as yard:
        say(f"creating {settings.logs} logs with {settings.rows} records of {len(META)} bytes each")
        create_logs(yard, cluster, settings.logs)
        fill(yard, names, settings.rows)
        rows = settings.logs * settings.rows
        metadata = {**servers, "subscribePattern": f"{names[0].rstrip('0123456789')}.*"}
        rows_s = best(lambda: read(spark, "logyard", metadata))
        rows_ceiling_s = best(lambda: read(spark, "logyard_ceiling", {"rows": str(rows)}))
        say(f"{rows / rows_s:,.0f} rows/s; appending {settings.mib} MiB of payload")
        count = fill_payloads(yard, settings.mib << 20)
        size = count * PAYLOAD_BYTES
        payloads = {**servers, "subscribePattern": "payload-.*", "includePayload": "inline", "verify": "true"}
        bytes_s = best(lambda: read(spark, "logyard", payloads))
        ceiling = {"rows": str(count), "size": str(PAYLOAD_BYTES)}
        bytes_ceiling_s = best(lambda: read(spark, "logyard_ceiling", ceiling))
        say(f"{size / bytes_s / 1e6:,.0f} MB/s; auditing")
        began = time.monotonic()
        audit = run_audit(spark, {**servers, "subscribePattern": ".*"})
        audit_s = time.monotonic() - began
        say(f"planning over {settings.planned} logs")
        have = settings.logs + PAYLOAD_LOGS
        extra = [f"planned-{number}" for number in range(max(0, settings.planned - have))]
        for first in range(0, len(extra), 200):
            yard.create_many(extra[first : first + 200], members=list(range(1, cluster.count + 1)))
        plan_s, tasks = plan({**servers, "subscribePattern": ".*"})
        streams = run_streams(spark, metadata, names, rows, yard, cluster, say)
    figures = {
        "rows_per_s": round(rows / rows_s), "rows_per_s_ceiling": round(rows / rows_ceiling_s),
        "rows_ratio": round(rows_ceiling_s / rows_s, 3), "mb_per_s": round(size / bytes_s / 1e6, 1),
        "mb_per_s_ceiling": round(size / bytes_ceiling_s / 1e6, 1), "mb_ratio": round(bytes_ceiling_s / bytes_s, 3),
        "plan_s": round(plan_s, 3), "plan_logs": have + len(extra), "plan_tasks": tasks,
        "audit_mb_per_s": round(audit["bytes"] / audit_s / 1e6, 1), "audit_s": round(audit_s, 3),
        "audit_worker_peak_mib": round(audit["worker_peak_bytes"] / 2**20, 1), "audit_copies": audit["copies"],
        **streams,
    }  # fmt: skip
    problems = [*missed(figures), *audit["problems"]]
    return {
        "ok": not problems, "case": "spark", "nodes": cluster.count, **asdict(settings), **figures,
        "problems": problems, "filesystem": machine["filesystem"], "machine": machine,
    }  # fmt: skip


def missed(figures: Mapping[str, Any]) -> list[str]:
    """Return what was asked for and not reached."""
    found = []
    if figures["rows_per_s"] < ROWS_PER_S:
        found.append(f"{figures['rows_per_s']} rows/s; {ROWS_PER_S} were asked for")
    if figures["mb_per_s"] < MB_PER_S:
        found.append(f"{figures['mb_per_s']} MB/s of payload; {MB_PER_S} were asked for")
    if figures["plan_s"] > PLAN_S:
        found.append(f"planning took {figures['plan_s']} s; {PLAN_S} were asked for")
    if figures["stream_rows_per_s"] < STREAM_ROWS_PER_S:
        found.append(f"{figures['stream_rows_per_s']} rows/s of a stream; {STREAM_ROWS_PER_S} were asked for")
    if figures["stream_limited_rows_per_s"] < STREAM_LIMITED_ROWS_PER_S:
        found.append(
            f"{figures['stream_limited_rows_per_s']} rows/s of a stream with a limit; {STREAM_LIMITED_ROWS_PER_S} were "
            "asked for"
        )
    if figures["stream_batch_ms"] > STREAM_BATCH_MS:
        found.append(f"a micro-batch took {figures['stream_batch_ms']} ms; {STREAM_BATCH_MS} were asked for")
    if figures.get("stream_dead_node_ratio", 1.0) > STREAM_DEAD_NODE_RATIO:
        found.append(
            f"with a dead node a micro-batch took {figures['stream_dead_node_ratio']} times as long; "
            f"{STREAM_DEAD_NODE_RATIO} were allowed"
        )
    if figures["audit_worker_peak_mib"] * 2**20 > PEAK_BYTES:
        found.append(f"a worker of the audit had {figures['audit_worker_peak_mib']} MiB")
    return found


def best(run: Callable[[], None]) -> float:
    """Return seconds of the second run: the first one starts workers."""
    run()
    began = time.monotonic()
    run()
    return time.monotonic() - began


def read(spark: SparkSession, kind: str, given: Mapping[str, str]) -> None:
    """Read everything, to a sink that keeps nothing. A new load plans anew."""
    spark.read.format(kind).options(**given).load().write.format("noop").mode("overwrite").save()


def plan(given: Mapping[str, str]) -> tuple[float, int]:
    """Return seconds for the ranges of all tasks, and how many there are."""
    from logyard.pipeline.datasource import plan as planned
    from logyard.pipeline.options import parse_options

    options = parse_options(given)
    planned(options)
    began = time.monotonic()
    tasks = planned(options)
    return time.monotonic() - began, len(tasks)


def fill(yard: Any, names: list[str], rows: int) -> None:
    """Append `rows` records without payload to each log."""
    for name in names:
        log = yard.log(name)
        for first in range(0, rows, FRAME_RECORDS):
            log.append_many([(META, None)] * min(FRAME_RECORDS, rows - first))


def fill_payloads(yard: Any, size: int) -> int:
    """Append payloads of 64 KiB to some logs; return how many."""
    workload = Workload(PAYLOAD_BYTES, random.SystemRandom().getrandbits(32), 0)
    names = [f"payload-{number}" for number in range(PAYLOAD_LOGS)]
    yard.create_many(names)
    each = max(1, size // PAYLOAD_BYTES // PAYLOAD_LOGS)
    number = 0
    for name in names:
        for first in range(0, each, 15):
            some = range(number + first, number + min(first + 15, each))
            yard.log(name).append_many([(META, workload.body(one)) for one in some])
        number += each
    return number
