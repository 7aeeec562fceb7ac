"""The same tables as Parquet files of Spark's own sink: one stream for the rows, one for the rejects.

Exactly-once for readers that know Spark's `_spark_metadata` alone; after a crash others see files twice. The rules are
read once, at the start. Used by `jobs.tables`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow

from .files import REJECTED_SCHEMA, judge, partitioned, table_schema
from .rules import HOUR, Rules

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

LOOK_S = 1
"""Spark keeps the last hundred batches' figures; so often they are looked at."""
SPARKS = {"string": "string", "int64": "long", "double": "double", "bool": "boolean", "binary": "binary"}


def rows_of(rules: Rules, rejects: bool, batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    """Yield the rows, or the rejects, of a task's records."""
    schema = schema_of(rules, rejects)
    for batch in batches:
        rows = [(*row, *partition) for fits, partition, row, _ in judge(rules, batch) if fits != rejects]
        if rows:
            columns = [
                pyarrow.array(column, one.type) for one, column in zip(schema, zip(*rows, strict=True), strict=True)
            ]
            yield pyarrow.RecordBatch.from_arrays(columns, schema=schema)


def schema_of(rules: Rules, rejects: bool) -> pyarrow.Schema:
    """Return the columns of either table, those of its partitions last."""
    return partitioned(REJECTED_SCHEMA, [HOUR]) if rejects else partitioned(table_schema(rules), rules.partitioned_by)


class Writing:
    """A stream into one of the tables, and its figures."""

    def __init__(self, df: DataFrame, rules: Rules, rejects: bool, path: Path, checkpoint: Path, when: Any) -> None:
        from pyspark.sql.functions import count, lit

        schema = schema_of(rules, rejects)
        columns = ", ".join(f"`{one.name}` {SPARKS.get(str(one.type), 'timestamp')}" for one in schema)
        rows = df.mapInArrow(partial(rows_of, rules, rejects), columns).observe("written", count(lit(1)).alias("rows"))
        stream = rows.writeStream.format("parquet").partitionBy(*([HOUR] if rejects else rules.partitioned_by))
        places = {"path": str(path), "checkpointLocation": str(checkpoint)}
        self.query: StreamingQuery = stream.options(**places).trigger(**when).start()
        self.batches = self.read = self.rows = 0
        self._batch = -1

    def look(self) -> int:
        """Add what batches did since; return how many records that were."""
        before = self.read
        for one in self.query.recentProgress:
            if one["batchId"] > self._batch and one["numInputRows"]:
                self._batch = one["batchId"]
                self.batches += 1
                self.read += one["numInputRows"]
                self.rows += one["observedMetrics"]["written"]["rows"]
        return self.read - before


def run_plain(
    df: DataFrame, rules: Rules, table: Path, rejected: Path, checkpoint: Path, when: Mapping[str, Any],
    progress: Callable[[int], object],
) -> tuple[Writing, Writing]:  # fmt: skip
    """Write both until they end, or until Ctrl-C. Raises what Spark raises."""
    streams: list[Writing] = []
    try:
        for rejects, path in ((False, table), (True, rejected)):
            place = checkpoint.with_name(f"{checkpoint.name}-{path.name}")
            streams.append(Writing(df, rules, rejects, path, place, when))
        ended = False
        while not ended:
            ended = all([one.query.awaitTermination(LOOK_S) for one in streams])
            progress(streams[0].look())
            streams[1].look()
    except KeyboardInterrupt:
        pass
    finally:
        for one in streams:
            one.query.stop()
    return streams[0], streams[1]
