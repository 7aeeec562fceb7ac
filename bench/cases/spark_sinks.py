"""The sink cases of `logyard bench spark`: rows of 100 B and of 64 KiB into 100 logs, beside a sink that drops them.

What a round wrote is counted in its logs; that every row is there once is for tests to show.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any

from .spark_rounds import Ground, Took, alternating, took, with_ratio

if TYPE_CHECKING:
    pass

SMALL, LARGE = 100, 64 << 10
TASKS = 4


def direct_case(ground: Ground) -> dict[str, Any]:
    """Write by `exactly-once-direct`, beside a sink that drops what it gets."""
    figures: dict[str, Any] = {}
    for name, size, rows in sizes(ground):
        source = {"rows": str(rows), "size": str(size), "partitions": str(TASKS)}

        def write(size: int = size, source: Mapping[str, str] = source, rows: int = rows) -> Took:
            return took(lambda: to_logs(ground, source, rows, "exactly-once-direct"))

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
            return took(lambda: to_logs(ground, source, rows, "exactly-once"))

        def alone(rows: int = rows, size: int = size) -> Took:
            return took(lambda: without_spark(ground, rows, size))

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


def to_logs(ground: Ground, source: Mapping[str, str], rows: int, guarantee: str) -> None:
    """Write rows to the logs of a sink that is new. Raises AssertionError unless they are as many there."""
    name = f"sink{ground.number()}"
    df = ground.spark.read.format("logyard_ceiling").options(**source, logs=name).load()
    given = {"sinkId": name, "deliveryGuarantee": guarantee, "batchId": "0", "createLogs": "true"}
    df.write.format("logyard").mode("append").options(**ground.servers, **given).save()
    check(ground, name, rows)


def to_nothing(ground: Ground, source: Mapping[str, str]) -> None:
    """Write the same rows to the sink that drops them."""
    df = ground.spark.read.format("logyard_ceiling").options(**source, logs="null").load()
    df.write.format("logyard_ceiling").mode("append").save()


def without_spark(ground: Ground, rows: int, size: int) -> None:
    """Write the same rows by the sink's tasks, one after another, and its commit, all in this process."""
    from logyard.pipeline.sink.core import Writing, open_sink
    from logyard.pipeline.sink.options import parse_sink

    from .spark_ceiling import SinkRows

    name = f"sink{ground.number()}"
    given = {**ground.servers, "sinkId": name, "createLogs": "true", "batchId": "0"}
    sink = open_sink(parse_sink({**given, "deliveryGuarantee": "exactly-once"}, False))
    reader = SinkRows(rows, size, TASKS, name)
    with closing(sink.yard):
        parts = reader.partitions()
        written = [sink.write(reader.read(part), Writing(0, "", name), task) for task, part in enumerate(parts)]
        sink.commit(written, 0)
    check(ground, name, rows)


def check(ground: Ground, prefix: str, rows: int) -> None:
    """Count what a round wrote, and delete it."""
    logs = [one["name"] for one in ground.yard.list() if one["name"].startswith(f"{prefix}-")]
    found = sum(ground.yard.log(name).latest().end for name in logs)
    assert found == rows, f"{found} of {rows} rows are there"
    for name in logs:
        ground.yard.delete(name)
