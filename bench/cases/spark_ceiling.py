"""A source of records that come from nowhere: what PySpark itself can take. Runs in Spark's workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.types import StructType

BATCH_BYTES = 4 << 20
BATCH_ROWS = 10_000
META_BYTES = 100


class CeilingSource(DataSource):
    """``format("logyard_ceiling")`` with options rows, size (bytes of a payload, 0: none) and partitions."""

    @classmethod
    def name(cls) -> str:
        """Return the format's name."""
        return "logyard_ceiling"

    def schema(self) -> StructType:
        """Return Logyard's own columns."""
        from logyard.pipeline.schema import spark_schema

        return spark_schema(int(self.options.get("size", "0")) > 0)

    def reader(self, schema: StructType) -> CeilingReader:
        """Return a reader of equal partitions."""
        get = self.options.get
        return CeilingReader(int(get("rows", "0")), int(get("size", "0")), int(get("partitions", "4")))

    def streamReader(self, schema: StructType) -> CeilingStream:
        """Return the same as a stream of one batch."""
        get = self.options.get
        return CeilingStream(int(get("rows", "0")), int(get("size", "0")), int(get("partitions", "4")))


class CeilingStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """All rows in one batch."""

    def __init__(self, rows: int, size: int, partitions: int) -> None:
        self.rows = rows
        self.reader = CeilingReader(rows, size, partitions)

    def initialOffset(self) -> dict[str, int]:
        """Begin with none."""
        return {"rows": 0}

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        """Return the end."""
        return {"rows": self.rows}

    def prepareForTriggerAvailableNow(self) -> None:
        """Pin nothing: there is never more."""

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        """Equal shares."""
        return self.reader.partitions() if start != end else []

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """Yield the share's rows."""
        return self.reader.read(partition)


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
