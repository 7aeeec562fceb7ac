"""The stream cases of `logyard bench spark`: all there is in one batch and in limited ones, live micro-batches, a dead
node, and what a stream costs that has nothing to do.

Times are Spark's own, of each batch's progress.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cluster import log_names
from ..processes import command_line, cpu_seconds, family, peak_bytes
from .spark_batch import metadata_of
from .spark_rounds import Ground, Took, alternating, took, with_ratio

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LIMIT = 100_000
LIVE_S = 20.0
LIVE_LOGS = 20
LIVE_ROWS = 100
LIVE_PAUSE_S = 0.05
NULL_ROWS = 8_000
IDLE_S = 15.0
TRIGGER_S = 1.0
FIRST = 3
"""Batches of a live run that do not count: workers start, the backlog is read."""
PARTS = {"latestOffset": "latest_offset", "addBatch": "add_batch", "walCommit": "wal", "commitOffsets": "commit"}
SOURCE = "python_streaming_source_runner"


def stream_case(ground: Ground) -> dict[str, Any]:
    """Read everything in one batch, and in batches of `LIMIT`, beside PySpark's own."""
    begin = {**metadata_of(ground), "startingOffsets": "earliest"}
    rows = ground.settings.logs * ground.settings.rows
    spark = ground.spark
    found = alternating({
        "one": lambda: added(spark, "logyard", begin),
        "null": lambda: added(spark, "logyard_ceiling", {"rows": str(rows)}),
        "limited": lambda: added(spark, "logyard", {**begin, "maxOffsetsPerTrigger": str(LIMIT)}),
    })  # fmt: skip
    figures = with_ratio("stream_rows_per_s", rows, found["one"], found["null"])
    return figures | {"stream_limited_rows_per_s": round(rows / found["limited"].wall_s)}


def live_case(ground: Ground) -> dict[str, Any]:
    """Measure micro-batches while records are appended, beside PySpark's own, and the source's process."""
    given = metadata_of(ground)
    found = live(ground, given)
    null = batches(run(ground.spark, "logyard_ceiling", {"each": str(NULL_ROWS)}, LIVE_S / 2))
    figures = {f"stream_{key}": value for key, value in found.items()}
    return figures | {"stream_null_batch_ms": null["batch_ms"]}


def dead_case(ground: Ground) -> dict[str, Any]:
    """Measure micro-batches with one node of three dead, beside those with all alive. It is there again afterwards."""
    given = metadata_of(ground)
    alive = live(ground, given)
    ground.cluster.kill9(ground.cluster.count)
    try:
        dead = live(ground, given)
    finally:
        ground.cluster.start()
    return {
        "alive_batch_ms": alive["batch_ms"], "dead_node_batch_ms": dead["batch_ms"],
        "dead_node_batch_p90_ms": dead["batch_p90_ms"],
        "dead_node_ratio": round(dead["batch_ms"] / alive["batch_ms"], 2),
    }  # fmt: skip


def idle_case(ground: Ground) -> dict[str, Any]:
    """Measure what a stream costs that finds nothing new: calls, and processor time, of the source's process and
    of the nodes beyond what they use anyway."""
    from logyard.pipeline.network import NetworkSource
    from logyard.pipeline.options import STREAM, parse_options
    from logyard.pipeline.stream import StreamReader

    calls: list[object] = []

    class Counted:
        """A client whose calls are counted."""

        def __init__(self, yard: Any) -> None:
            self.yard = yard

        def run(self, call: Any, timeout: float) -> Any:
            calls.append(call)
            return self.yard.run(call, timeout)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.yard, name)

    class Source(NetworkSource):
        """A source with such a client."""

        @property
        def yard(self) -> Any:
            return Counted(super().yard)

    class Reader(StreamReader):
        """A stream over such a source."""

        counted = Source(ground.cluster.addresses)

        @property
        def source(self) -> Source:
            return self.counted

    options = parse_options({**metadata_of(ground), "startingOffsets": "latest"}, STREAM)
    reader = Reader(lambda: options)
    pause = threading.Event().wait
    offset = reader.initialOffset()
    offset = reader.latestOffset(offset, reader.getDefaultReadLimit())
    nodes = ground.cluster.pids
    began = sum(map(cpu_seconds, nodes))
    pause(IDLE_S)
    resting = sum(map(cpu_seconds, nodes)) - began
    triggers = int(IDLE_S / TRIGGER_S)
    calls.clear()
    began, own = sum(map(cpu_seconds, nodes)), time.process_time()
    for _ in range(triggers):
        offset = reader.latestOffset(offset, reader.getDefaultReadLimit())
        pause(TRIGGER_S)
    own = time.process_time() - own
    asked = sum(map(cpu_seconds, nodes)) - began
    reader.counted.close()
    return {
        "idle_calls_per_node_and_trigger": round(len(calls) / triggers / ground.cluster.count, 3),
        "idle_source_core_percent": round(100 * own / IDLE_S, 2),
        "idle_nodes_core_percent": round(100 * max(0.0, asked - resting) / IDLE_S, 2),
    }  # fmt: skip


def added(spark: SparkSession, kind: str, given: Mapping[str, str]) -> Took:
    """Return the seconds of addBatch, over all batches, and the processor time of the whole query."""
    progress: list[Any] = []
    used = took(lambda: progress.extend(run(spark, kind, given, None)))
    return used._replace(wall_s=sum(one["durationMs"].get("addBatch", 0) for one in progress) / 1000)


def live(ground: Ground, given: Mapping[str, str]) -> dict[str, Any]:
    """Return medians of micro-batches, in ms, while records are appended."""
    done = threading.Event()
    names = log_names(ground.settings.logs)
    peak = 0

    def append() -> None:
        number = 0
        while not done.is_set():
            for _ in range(LIVE_LOGS):
                ground.yard.log(names[number % len(names)]).append_many([(bytes(100), None)] * LIVE_ROWS)
                number += 7
            done.wait(LIVE_PAUSE_S)

    def look() -> None:
        nonlocal peak
        pids = family([os.getpid()]) - family(ground.cluster.pids)
        peak = max(peak, *(peak_bytes(pid) for pid in pids if SOURCE in command_line(pid)), 0)

    appender = threading.Thread(target=append)
    appender.start()
    try:
        progress = run(ground.spark, "logyard", given, LIVE_S, look)
    finally:
        done.set()
        appender.join()
    return {**batches(progress), "driver_process_mib": round(peak / 2**20, 1)}


def batches(progress: Sequence[Any]) -> dict[str, Any]:
    """Return the medians of a run's batches."""
    counted = [one for one in progress if one["numInputRows"]][FIRST:]
    lasted = sorted(one["durationMs"]["triggerExecution"] for one in counted)
    rows = sorted(one["numInputRows"] for one in counted)
    return {
        "batches": len(counted), "batch_rows": rows[len(rows) // 2], "batch_ms": lasted[len(lasted) // 2],
        "batch_p90_ms": lasted[len(lasted) * 9 // 10],
        **{
            f"{key}_ms": sorted(one["durationMs"].get(part, 0) for one in counted)[len(counted) // 2]
            for part, key in PARTS.items()
        },
    }  # fmt: skip


def run(
    spark: SparkSession, kind: str, given: Mapping[str, str], seconds: float | None,
    look: Callable[[], None] = lambda: None,
) -> list[Any]:  # fmt: skip
    """Return the progress of a query that keeps nothing, over what is there now or for some seconds. `look` is called
    each second of these."""
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
                look()
            query.stop()
        if (error := query.exception()) is not None:
            raise error
        return list(query.recentProgress)
