"""The format "logyard" of Spark's Python Data Source API: a source of batches over append logs, and of streams
(`stream`); of KV groups with ``machine=kv`` (`kv_table`).

The range is fixed when a DataFrame is first used and stays: its actions all see the same records. No filter is pushed
down (PySpark 4.2 and 4.3 give wrong results then): narrow by options. Registered by `pyspark_logyard`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)

from .errors import OptionError
from .offsets import check_named
from .opening import open_source
from .options import STREAM, Options, parse_loaded, parse_options
from .partitions import pack, spread, weigh
from .ranges import ranges_now
from .sources import Wanted
from .topics import as_asked, named_logs

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.types import StructType


@dataclass
class LogPartition(InputPartition):
    """The ranges of one task."""

    ranges: tuple[Wanted, ...]


class LogyardDataSource(DataSource):
    """``spark.read.format("logyard")`` and ``spark.readStream``; options in `options.OPTIONS`."""

    @classmethod
    def name(cls) -> str:
        """Return the format's name."""
        return "logyard"

    def schema(self) -> StructType:
        """Return the columns, after all options were checked, and that the logs which are named are there."""
        from .schema import spark_schema

        if self._of_kv:
            from . import kv_table

            kv_table.parse_kv(self.options)
            return kv_table.spark_schema()
        options = parse_loaded(self.options)
        if options.names is not None or options.topics is not None:
            with closing(open_source(options)) as source:
                names = named_logs(options, source)
                check_named(options, source.logs(names), names)
        return spark_schema(options.payloads, options.topics is not None)

    @property
    def _of_kv(self) -> bool:
        """Return whether a KV group is meant."""
        return any(name.lower() == "machine" for name in self.options)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return a reader of what the options name."""
        if self._of_kv:
            from .kv_table import KvReader, parse_kv

            return KvReader(parse_kv(self.options, "startingRevision"))
        options = parse_options(self.options)
        check_schema(schema, options)
        return LogReader(options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return a reader of the stream. What is wrong with the options it says when it is first asked."""
        if self._of_kv:
            from .kv_table import KvStreamReader, parse_kv

            return KvStreamReader(lambda: parse_kv(self.options, "revision", "maxPartitionKeys"))
        from .stream import StreamReader

        def parsed() -> Options:
            options = parse_options(self.options, STREAM)
            check_schema(schema, options)
            return options

        return StreamReader(parsed)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return a batch's sink."""
        if self._of_kv:
            from .kv_table import KvSink, parse_kv_sink

            return KvSink(parse_kv_sink(self.options, schema, overwrite))
        from .sink.writers import BatchSink, parsed

        return BatchSink(parsed(self.options, schema, overwrite, False))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        """Return a stream's sink."""
        if self._of_kv:
            from .kv_table import KvStreamSink, parse_kv_sink

            return KvStreamSink(parse_kv_sink(self.options, schema, overwrite))
        from .sink.writers import StreamSink, parsed

        return StreamSink(parsed(self.options, schema, overwrite, True))


class LogReader(DataSourceReader):
    """Plans on the driver, reads in tasks."""

    def __init__(self, options: Options) -> None:
        self.options = options

    def partitions(self) -> list[InputPartition]:
        """Return the tasks: one question about all logs to each node, and one more where offsets are times."""
        return [LogPartition(task) for task in plan(self.options)]

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """Yield the records of one task."""
        # Without any task Spark makes one of its own.
        ranges = getattr(partition, "ranges", ())
        if ranges:
            with closing(open_source(self.options)) as source:
                yield from as_asked(source.read(ranges, self.options.reading), self.options)


def plan(options: Options, cores: int | None = None) -> list[tuple[Wanted, ...]]:
    """Return the ranges of each task. Raises `OptionError`, `DataLoss`, what a cluster says."""
    infos, ranges = ranges_now(options)
    by_name = {info.name: info for info in infos}
    bodies = options.payloads or options.verify
    weighed = [weigh(one, by_name[one.log], bodies) for one in ranges]
    placed = spread(weighed, {info.name: info.leader for info in infos})
    return pack(placed, options.max_partition_bytes, options.min_partitions, cores or os.cpu_count() or 1)


def check_schema(schema: StructType, options: Options) -> None:
    """Raise `OptionError` for a schema given by hand that is not the source's own."""
    from .schema import spark_schema

    own = spark_schema(options.payloads, options.topics is not None)
    if schema != own:
        raise OptionError(f"schema: the columns are fixed: {own.simpleString()}; choose them with select")
