"""The sink cases of `logyard bench spark`: rows of 100 B and of 64 KiB into 100 logs, beside a sink that drops them.

The logs are there, with their leaders, before a round begins. What a round wrote is counted in them when it is over;
that every row is there once is for tests to show.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

from .spark_rounds import Ground, Took, alternating, took, with_ratio

SMALL, LARGE = 100, 64 << 10
TASKS = 4


def direct_case(ground: Ground) -> dict[str, Any]:
    """Write by `exactly-once-direct`, beside a sink that drops what it gets."""
    figures: dict[str, Any] = {}
    for name, size, rows in sizes(ground):
        source = {"rows": str(rows), "size": str(size), "partitions": str(TASKS)}

        def write(source: Mapping[str, str] = source, rows: int = rows) -> Took:
            return into_logs(ground, rows, lambda sink: to_logs(ground, source, sink, "exactly-once-direct"))

        def drop(source: Mapping[str, str] = source) -> Took:
            return took(lambda: to_nothing(ground, source))

        found = alternating({"ours": write, "null": drop})
        units = rows if size == SMALL else rows * size / 1e6
        figures |= with_ratio(f"direct_{name}", units, found["ours"], found["null"])
    return figures


def once_case(ground: Ground) -> dict[str, Any]:
    """Write by `exactly-once` with the JVM, and by its tasks and its commit without one."""
    figures: dict[str, Any] = {}
    for name, size, rows in sizes(ground):
        source = {"rows": str(rows), "size": str(size), "partitions": str(TASKS)}

        def write(source: Mapping[str, str] = source, rows: int = rows) -> Took:
            return into_logs(ground, rows, lambda sink: to_logs(ground, source, sink, "exactly-once"))

        def alone(rows: int = rows, size: int = size) -> Took:
            return into_logs(ground, rows, lambda sink: without_spark(ground, rows, size, sink))

        def drop(source: Mapping[str, str] = source) -> Took:
            return took(lambda: to_nothing(ground, source))

        found = alternating({"ours": write, "alone": alone, "null": drop})
        units = rows if size == SMALL else rows * size / 1e6
        figures |= with_ratio(f"once_{name}", units, found["ours"], found["null"])
        figures[f"once_alone_{name}"] = round(units / found["alone"].wall_s)
    return figures


def sizes(ground: Ground) -> list[tuple[str, int, int]]:
    """Return for each size of payload the figure's unit, the size, and how many rows."""
    return [
        ("rows_per_s", SMALL, ground.settings.sink_rows // 100 * 100),
        ("mb_per_s", LARGE, (ground.settings.sink_mib << 20) // LARGE // 100 * 100),
    ]


def into_logs(ground: Ground, rows: int, write: Callable[[str], None]) -> Took:
    """Time what writes rows to the logs of a sink that is new. Raises AssertionError unless they are as many there."""
    from .spark_ceiling import SinkRows

    sink = f"sink{ground.number()}"
    names = [name for task in range(TASKS) for name in SinkRows.names(sink, task)]
    ground.yard.create_many(names, members=list(range(1, ground.cluster.count + 1)))
    for name in names:
        ground.yard.log(name).latest()
    spent = took(lambda: write(sink))
    found = sum(ground.yard.log(name).latest().end for name in names)
    assert found == rows, f"{found} of {rows} rows are there"
    for name in names:
        ground.yard.delete(name)
    return spent


def to_logs(ground: Ground, source: Mapping[str, str], name: str, guarantee: str) -> None:
    """Write rows by Spark."""
    df = ground.spark.read.format("logyard_ceiling").options(**source, logs=name).load()
    given = {"sinkId": name, "deliveryGuarantee": guarantee, "batchId": "0", "createLogs": "true"}
    df.write.format("logyard").mode("append").options(**ground.servers, **given).save()


def to_nothing(ground: Ground, source: Mapping[str, str]) -> None:
    """Write the same rows to the sink that drops them."""
    df = ground.spark.read.format("logyard_ceiling").options(**source, logs="null").load()
    df.write.format("logyard_ceiling").mode("append").save()


def without_spark(ground: Ground, rows: int, size: int, name: str) -> None:
    """Write the same rows by the sink's tasks, one after another, and its commit, all in this process."""
    from logyard.pipeline.sink.core import Writing, open_sink
    from logyard.pipeline.sink.options import parse_sink

    from .spark_ceiling import SinkRows

    given = {**ground.servers, "sinkId": name, "createLogs": "true", "batchId": "0"}
    sink = open_sink(parse_sink({**given, "deliveryGuarantee": "exactly-once"}, False))
    reader = SinkRows(rows, size, TASKS, name)
    with closing(sink.yard):
        parts = reader.partitions()
        written = [sink.write(reader.read(part), Writing(0, "", name), task) for task, part in enumerate(parts)]
        sink.commit(written, 0)
