"""The batch cases of `logyard bench spark`: rows and payload bytes a second, planning, an audit, a worker's memory."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..cluster import log_names
from ..processes import command_line, family, peak_bytes
from ..workload import Workload
from .spark_rounds import Ground, alternating, took, with_ratio

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from logyard.client.sync import Yard

META = b"m" * 100
FRAME_RECORDS = 1000
PAYLOAD_BYTES = 64 << 10
PAYLOAD_LOGS = 100
HELD_S = 60.0
CREATED = 200
"""Logs of one question."""
WORKER = "pyspark.daemon pyspark.worker"


def rows_case(ground: Ground) -> dict[str, Any]:
    """Read the metadata of all logs, beside PySpark's own."""
    given, rows = metadata_of(ground), ground.settings.logs * ground.settings.rows
    found = alternating({
        "ours": lambda: took(lambda: read(ground.spark, "logyard", given)),
        "null": lambda: took(lambda: read(ground.spark, "logyard_ceiling", {"rows": str(rows)})),
    })  # fmt: skip
    return with_ratio("rows_per_s", rows, found["ours"], found["null"])


def payload_case(ground: Ground) -> dict[str, Any]:
    """Read payloads of 64 KiB with every hash checked, beside PySpark's own."""
    given, count = payloads_of(ground)
    ceiling = {"rows": str(count), "size": str(PAYLOAD_BYTES)}
    found = alternating({
        "ours": lambda: took(lambda: read(ground.spark, "logyard", given)),
        "null": lambda: took(lambda: read(ground.spark, "logyard_ceiling", ceiling)),
    })  # fmt: skip
    mb = count * PAYLOAD_BYTES / 1e6
    return with_ratio("mb_per_s", mb, found["ours"], found["null"])


def plan_case(ground: Ground) -> dict[str, Any]:
    """Plan the ranges of all tasks over many logs."""
    metadata_of(ground)
    have = len(ground.yard.list())
    extra = [f"planned-{number}" for number in range(max(0, ground.settings.planned - have))]
    for first in range(0, len(extra), CREATED):
        some = extra[first : first + CREATED]
        ground.yard.create_many(some, members=list(range(1, ground.cluster.count + 1)))
    plan_s, tasks = plan({**ground.servers, "subscribePattern": ".*"})
    return {"plan_s": round(plan_s, 3), "plan_logs": have + len(extra), "plan_tasks": tasks}


def audit_case(ground: Ground) -> dict[str, Any]:
    """Audit every copy; what it finds are the bench's problems."""
    from logyard.pipeline.jobs.audit import run_audit

    metadata_of(ground)
    payloads_of(ground)
    began = time.monotonic()
    found = run_audit(ground.spark, {**ground.servers, "subscribePattern": ".*"})
    audit_s = time.monotonic() - began
    return {
        "audit_mb_per_s": round(found["bytes"] / audit_s / 1e6, 1), "audit_s": round(audit_s, 3),
        "audit_worker_peak_mib": round(found["worker_peak_bytes"] / 2**20, 1), "audit_copies": found["copies"],
        "problems": list(found["problems"]),
    }  # fmt: skip


def memory_case(ground: Ground) -> dict[str, Any]:
    """Measure the largest of Spark's Python workers after payloads of 64 KiB were read twice, and a minute later."""
    given, _ = payloads_of(ground)
    for _ in range(2):
        read(ground.spark, "logyard", given)
    first = workers_peak_bytes(ground)
    until = time.monotonic() + HELD_S
    while time.monotonic() < until:
        read(ground.spark, "logyard", given)
    last = workers_peak_bytes(ground)
    return {
        "worker_peak_mib": round(last / 2**20, 1), "worker_peak_growth_mib": round((last - first) / 2**20, 1),
        "memory_held_s": HELD_S,
    }  # fmt: skip


def workers_peak_bytes(ground: Ground) -> int:
    """Return the most memory that any of the session's Python workers ever had."""
    pids = family([os.getpid()]) - family(ground.cluster.pids)
    return max((peak_bytes(pid) for pid in pids if WORKER in command_line(pid)), default=0)


def metadata_of(ground: Ground) -> dict[str, str]:
    """Return the options of the logs of small records, which are filled once."""
    names = log_names(ground.settings.logs)
    if "metadata" not in ground.filled:
        ground.filled.add("metadata")
        ground.say(f"creating {len(names)} logs with {ground.settings.rows} records of {len(META)} bytes each")
        for first in range(0, len(names), CREATED):
            some = names[first : first + CREATED]
            ground.yard.create_many(some, members=list(range(1, ground.cluster.count + 1)))
        fill(ground.yard, names, ground.settings.rows)
    return {**ground.servers, "subscribePattern": f"{names[0].rstrip('0123456789')}.*"}


def payloads_of(ground: Ground) -> tuple[dict[str, str], int]:
    """Return the options of the logs of large payloads, which are filled once, and how many there are."""
    each = max(1, (ground.settings.mib << 20) // PAYLOAD_BYTES // PAYLOAD_LOGS)
    if "payload" not in ground.filled:
        ground.filled.add("payload")
        ground.say(f"appending {ground.settings.mib} MiB of payload")
        fill_payloads(ground.yard, each)
    given = {**ground.servers, "subscribePattern": "payload-.*", "includePayload": "inline", "verify": "true"}
    return given, each * PAYLOAD_LOGS


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


def fill(yard: Yard, names: Sequence[str], rows: int) -> None:
    """Append `rows` records without payload to each log."""
    for name in names:
        log = yard.log(name)
        for first in range(0, rows, FRAME_RECORDS):
            log.append_many([(META, None)] * min(FRAME_RECORDS, rows - first))


def fill_payloads(yard: Yard, each: int) -> None:
    """Append `each` payloads of 64 KiB to some logs."""
    workload = Workload(PAYLOAD_BYTES, random.SystemRandom().getrandbits(32), 0)
    names = [f"payload-{number}" for number in range(PAYLOAD_LOGS)]
    yard.create_many(names)
    for number, name in enumerate(names):
        for first in range(0, each, 15):
            some = range(number * each + first, number * each + min(first + 15, each))
            yard.log(name).append_many([(META, workload.body(one)) for one in some])
