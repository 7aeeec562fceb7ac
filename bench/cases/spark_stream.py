"""The stream cases of `logyard bench spark`: all there is in one batch and in limited ones, and live micro-batches.

Times are Spark's own, of each batch's progress. A dead node comes last: the cluster is not whole afterwards.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cluster import Cluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LIMIT = 100_000
LIVE_S = 20.0
LIVE_LOGS = 20
LIVE_ROWS = 100
LIVE_PAUSE_S = 0.05
FIRST = 3
"""Batches of a live run that do not count: workers start, the backlog is read."""
PARTS = {"latestOffset": "latest_offset", "addBatch": "add_batch", "walCommit": "wal", "commitOffsets": "commit"}


def run_streams(
    spark: SparkSession, given: Mapping[str, str], names: Sequence[str], rows: int, yard: Any, cluster: Cluster,
    say: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """Return the figures of streams over logs that have `rows` records in all."""
    begin = {**given, "startingOffsets": "earliest"}
    one = rows_per_s(spark, "logyard", begin)
    ceiling = rows_per_s(spark, "logyard_ceiling", {"rows": str(rows)})
    limited = rows_per_s(spark, "logyard", {**begin, "maxOffsetsPerTrigger": str(LIMIT)})
    say(f"stream: {one:,.0f} rows/s in one batch, {limited:,.0f} in batches of {LIMIT:,}; live micro-batches")
    figures: dict[str, Any] = {
        "stream_rows_per_s": round(one), "stream_rows_per_s_ceiling": round(ceiling),
        "stream_rows_ratio": round(one / ceiling, 3), "stream_limited_rows_per_s": round(limited),
    }  # fmt: skip
    alive = live(spark, given, names, yard)
    figures |= {f"stream_{key}": value for key, value in alive.items()}
    if cluster.count > 2:
        cluster.kill9(cluster.count)
        say(f"stream: micro-batches of {alive['batch_ms']} ms (median); one node is killed")
        dead = live(spark, given, names, yard)
        figures |= {f"stream_dead_node_{key}": dead[key] for key in ("batch_ms", "batch_p90_ms")}
        figures["stream_dead_node_ratio"] = round(dead["batch_ms"] / alive["batch_ms"], 2)
    return figures


def rows_per_s(spark: SparkSession, kind: str, given: Mapping[str, str]) -> float:
    """Return rows a second of addBatch, of the second run."""
    found = 0.0
    for _ in range(2):
        progress = run(spark, kind, given, None)
        found = (
            sum(one["numInputRows"] for one in progress)
            * 1000
            / sum(one["durationMs"].get("addBatch", 0) for one in progress)
        )
    return found


def live(spark: SparkSession, given: Mapping[str, str], names: Sequence[str], yard: Any) -> dict[str, Any]:
    """Return medians of micro-batches, in ms, while records are appended."""
    done = threading.Event()

    def append() -> None:
        number = 0
        while not done.is_set():
            for _ in range(LIVE_LOGS):
                yard.log(names[number % len(names)]).append_many([(bytes(100), None)] * LIVE_ROWS)
                number += 7
            done.wait(LIVE_PAUSE_S)

    appender = threading.Thread(target=append)
    appender.start()
    try:
        progress = [one for one in run(spark, "logyard", given, LIVE_S) if one["numInputRows"]][FIRST:]
    finally:
        done.set()
        appender.join()
    took = sorted(one["durationMs"]["triggerExecution"] for one in progress)
    rows = sorted(one["numInputRows"] for one in progress)
    return {
        "batches": len(progress), "batch_rows": rows[len(rows) // 2], "batch_ms": took[len(took) // 2],
        "batch_p90_ms": took[len(took) * 9 // 10],
        **{
            f"{key}_ms": sorted(one["durationMs"].get(part, 0) for one in progress)[len(progress) // 2]
            for part, key in PARTS.items()
        },
    }  # fmt: skip


def run(spark: SparkSession, kind: str, given: Mapping[str, str], seconds: float | None) -> list[Any]:
    """Return the progress of a query that keeps nothing, over what is there now or for some seconds."""
    with tempfile.TemporaryDirectory(prefix="logyard-stream-") as place:
        df = spark.readStream.format(kind).options(**given).load()
        writer = df.writeStream.format("noop").option("checkpointLocation", str(Path(place) / "point"))
        if seconds is None:
            query = writer.trigger(availableNow=True).start()
            query.awaitTermination()
        else:
            query = writer.start()
            until = time.monotonic() + seconds
            while time.monotonic() < until and query.isActive:
                query.awaitTermination(1)
            query.stop()
        if (error := query.exception()) is not None:
            raise error
        return list(query.recentProgress)
