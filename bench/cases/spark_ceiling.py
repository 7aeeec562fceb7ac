"""A source of rows that come from nowhere, and a sink that drops them: what PySpark itself can take. Runs in Spark's
workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.types import StructType

BATCH_BYTES = 4 << 20
BATCH_ROWS = 10_000
META_BYTES = 100


class CeilingSource(DataSource):
    """``format("logyard_ceiling")`` with options rows, size (bytes of a payload, 0: none), partitions, and of a stream
    each (rows of every trigger). With `logs`, a prefix, it gives a sink's columns, rows of 25 logs in each partition.
    As a sink it drops what it gets."""

    @classmethod
    def name(cls) -> str:
        """Return the format's name."""
        return "logyard_ceiling"

    def schema(self) -> StructType | str:
        """Return Logyard's own columns, or a sink's."""
        from logyard.pipeline.schema import spark_schema

        if "logs" in self.options:
            return "log string not null, payload binary"
        return spark_schema(int(self.options.get("size", "0")) > 0)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return a reader of equal partitions."""
        get = self.options.get
        rows, size, parts = int(get("rows", "0")), int(get("size", "0")), int(get("partitions", "4"))
        if "logs" in self.options:
            return SinkRows(rows, size, parts, self.options["logs"])
        return CeilingReader(rows, size, parts)

    def streamReader(self, schema: StructType) -> CeilingStream:
        """Return the same as a stream of one batch, or of many."""
        get = self.options.get
        return CeilingStream(
            int(get("rows", "0")), int(get("size", "0")), int(get("partitions", "4")), int(get("each", "0"))
        )

    def writer(self, schema: StructType, overwrite: bool) -> NullSink:
        """Return a sink that drops its rows."""
        return NullSink()


class CeilingStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """All rows in one batch, or `each` at every trigger."""

    def __init__(self, rows: int, size: int, partitions: int, each: int) -> None:
        self.rows, self.size, self.parts, self.each = rows, size, partitions, each

    def initialOffset(self) -> dict[str, int]:
        """Begin with none."""
        return {"rows": 0}

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        """Return the end."""
        return {"rows": start["rows"] + self.each if self.each else self.rows}

    def prepareForTriggerAvailableNow(self) -> None:
        """Pin nothing: there is never more."""

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        """Equal shares."""
        rows = end["rows"] - start["rows"]
        return CeilingReader(rows, self.size, self.parts).partitions() if rows else []

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """Yield the share's rows."""
        return CeilingReader(self.rows, self.size, self.parts).read(partition)


class CeilingReader(DataSourceReader):
    """One batch, given again and again."""

    def __init__(self, rows: int, size: int, partitions: int) -> None:
        self.rows = rows
        self.size = size
        self.parts = partitions

    def partitions(self) -> list[InputPartition]:
        """Return equal shares."""
        return [InputPartition(self.rows // self.parts) for _ in range(self.parts)]

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """Yield the share's rows."""
        import pyarrow

        from logyard.pipeline.schema import arrow_schema

        left = int(partition.value or 0)
        count = min(BATCH_ROWS, BATCH_BYTES // self.size if self.size else BATCH_ROWS)
        row = {
            "log": "log", "offset": 1, "index": 1, "term": 1, "timestamp": 0, "kind": "record",
            "meta": bytes(META_BYTES), "payload_size": self.size, "payload_hash": bytes(16) if self.size else None,
            "payload": bytes(self.size),
        }  # fmt: skip
        schema = arrow_schema(self.size > 0)
        columns = [pyarrow.array([row[field.name]] * count, field.type) for field in schema]
        batch = pyarrow.record_batch(columns, schema=schema)
        while left > 0:
            yield batch.slice(0, min(left, count))
            left -= count


class SinkRows(DataSourceReader):
    """Payloads for 25 logs a partition, one log after the other, as a stream source gives them."""

    LOGS = 25

    def __init__(self, rows: int, size: int, partitions: int, prefix: str) -> None:
        self.rows, self.size, self.parts, self.prefix = rows, size, partitions, prefix

    @classmethod
    def names(cls, prefix: str, partition: int) -> list[str]:
        """Return a partition's logs."""
        return [f"{prefix}-{partition}-{log}" for log in range(cls.LOGS)]

    def partitions(self) -> list[InputPartition]:
        """Return equal shares."""
        return [InputPartition(number) for number in range(self.parts)]

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """Yield the share's rows."""
        import os

        import pyarrow

        each = self.rows // self.parts // self.LOGS
        count = min(BATCH_ROWS, max(1, BATCH_BYTES // self.size))
        blob = os.urandom(self.size + count)
        payloads = pyarrow.array([blob[at : at + self.size] for at in range(count)], pyarrow.binary())
        schema = pyarrow.schema([pyarrow.field("log", pyarrow.string(), False), ("payload", pyarrow.binary())])
        for name in self.names(self.prefix, partition.value):
            batch = pyarrow.record_batch([pyarrow.array([name] * count, pyarrow.string()), payloads], schema=schema)
            for first in range(0, each, count):
                yield batch.slice(0, min(count, each - first))


class NullSink(DataSourceArrowWriter):
    """Drops its rows."""

    def write(self, iterator: Iterator[pyarrow.RecordBatch]) -> WriterCommitMessage:
        """Take a task's rows."""
        for _ in iterator:
            pass
        return WriterCommitMessage()

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Do nothing."""

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Do nothing."""
