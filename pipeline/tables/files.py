"""What a task does: rows of a stream into Parquet files, told as what a commit has to add. Nobody sees a file before.

Names of files are new ones each time a task is tried; those of a try that nothing came of are orphans, which a vacuum
finds. Columns by which a table is partitioned are not in its files, as Delta has it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from uuid import uuid4

import pyarrow
import pyarrow.parquet as parquet

from .rules import HOUR, LOST, TOO_LARGE, Bad, Rules, hour_of

HELD_BYTES = 64 << 20
"""Bytes of records that a task holds as rows; above, the partition with most of them is written."""
INSTANT = pyarrow.timestamp("us", tz="UTC")
KINDS = {
    "string": pyarrow.string(), "long": pyarrow.int64(), "double": pyarrow.float64(), "boolean": pyarrow.bool_(),
    "timestamp": INSTANT, "json": pyarrow.string(),
}  # fmt: skip
REJECTED_SCHEMA = pyarrow.schema(
    [("_log", pyarrow.string()), ("_offset", pyarrow.int64()), ("_time", INSTANT), ("reason", pyarrow.string()),
     ("detail", pyarrow.string()), ("size", pyarrow.int64()), ("bytes", pyarrow.binary())]
)  # fmt: skip
"""Of the table of rejects: its `_time` is the log's, null for records that are lost. `bytes` are null where the source
left them out for their size."""


def table_schema(rules: Rules) -> pyarrow.Schema:
    """Return the columns of a table's files."""
    fields = [(name, KINDS[kind]) for name, kind in rules.fields.items() if name not in rules.clashes]
    own = [("_rest", pyarrow.string()), ("_time", INSTANT), ("_log", pyarrow.string()), ("_offset", pyarrow.int64())]
    return pyarrow.schema([*fields, *own])


def partitioned(schema: pyarrow.Schema, columns: Iterable[str]) -> pyarrow.Schema:
    """Return a table's whole schema."""
    return pyarrow.schema([*schema, *((name, pyarrow.string()) for name in columns)])


class Added(NamedTuple):
    """A file that a task wrote: its path in the table, what its partition is, its rows by its own footer."""

    path: str
    size: int
    rows: int
    values: Mapping[str, str | None]


Judged: TypeAlias = tuple[bool, tuple[str | None, ...], tuple[Any, ...], int]


class Files:
    """The files of one table that a task writes."""

    def __init__(self, table: Path, schema: pyarrow.Schema, columns: Sequence[str]) -> None:
        self.table = table
        self.schema = schema
        self.columns = columns
        self.added: list[Added] = []
        self.held = 0
        self._rows: dict[tuple[str | None, ...], tuple[list[tuple[Any, ...]], int]] = {}

    def put(self, partition: tuple[str | None, ...], row: tuple[Any, ...], size: int) -> None:
        """Hold a row of about `size` bytes, or write those of its kind."""
        rows, weight = self._rows.setdefault(partition, ([], 0))
        rows.append(row)
        self._rows[partition] = rows, weight + size
        self.held += size
        if self.held > HELD_BYTES:
            self._write(max(self._rows, key=lambda one: self._rows[one][1]))

    def close(self) -> None:
        """Write what is held."""
        for partition in list(self._rows):
            self._write(partition)

    def _write(self, partition: tuple[str | None, ...]) -> None:
        rows, weight = self._rows.pop(partition)
        self.held -= weight
        kinds = [one.type for one in self.schema]
        columns = [pyarrow.array(column, kind) for kind, column in zip(kinds, zip(*rows, strict=True), strict=True)]
        # The hour is the last of what a table is partitioned by.
        path = f"{partition[-1]}/part-{uuid4().hex}.parquet"
        file = self.table / path
        file.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pyarrow.Table.from_arrays(columns, schema=self.schema), file, compression="zstd")
        values = dict(zip(self.columns, partition, strict=True))
        self.added.append(Added(path, file.stat().st_size, parquet.read_metadata(file).num_rows, values))


@dataclass(frozen=True)
class Task:
    """What a task needs to know: the two tables' directories and the rules."""

    table: Path
    rejected: Path
    rules: Rules

    def run(self, batches: Iterable[pyarrow.RecordBatch]) -> dict[str, Any]:
        """Write a task's records, (log, offset, timestamp, meta, payload_size, payload); return how many it read and
        what it added where, as JSON has it."""
        good = Files(self.table, table_schema(self.rules), self.rules.partitioned_by)
        bad = Files(self.rejected, REJECTED_SCHEMA, [HOUR])
        read = 0
        for batch in batches:
            read += batch.num_rows
            for fits, partition, row, size in judge(self.rules, batch):
                (good if fits else bad).put(partition, row, size)
        good.close()
        bad.close()
        return {"read": read, "added": good.added, "rejected": bad.added}


def judge(rules: Rules, batch: pyarrow.RecordBatch) -> Iterator[Judged]:
    """Yield for each record whether it fits, its partition, its row in the table or among the rejects, and about how
    many bytes that has."""
    # What clashes has no column; a record that has it is no row.
    kept = [number for number, name in enumerate(rules.fields) if name not in rules.clashes]
    kept += [len(rules.fields), len(rules.fields) + 1]
    for log, offset, at, meta, size, payload in zip(*cells(batch), strict=True):
        if at is None:
            # A gap, with failOnDataLoss=false: it has no time of its own, and its size is how many are missing.
            lost = "records from here on" if size is None else f"{size} records"
            yield False, (hour_of(0),), (log, offset, at, LOST, f"{lost} are gone", None, None), 100
            continue
        # A record without a payload is its metadata.
        data = payload if size is not None else meta or b""
        weight = size if size is not None else len(meta or b"")
        try:
            if data is None:
                raise Bad(TOO_LARGE, f"{size} bytes, more than are read")
            partition, values = rules.row(data)
            yield True, partition, (*(values[number] for number in kept), log, offset), weight + 100
        except Bad as error:
            row = (log, offset, at, error.reason, error.detail, weight, data)
            yield False, (hour_of(at),), row, weight + 100


def cells(batch: pyarrow.RecordBatch) -> list[list[Any]]:
    """Return the columns of a batch as plain values; times as microseconds."""
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    at = columns["timestamp"].cast(pyarrow.int64())
    names = ("log", "offset", "timestamp", "meta", "payload_size", "payload")
    return [(at if name == "timestamp" else columns[name]).to_pylist() for name in names]


def result_of(text: str) -> tuple[int, list[Added], list[Added]]:
    """Return what a task said: records read, files of the table, files of the rejects."""
    found = json.loads(text)
    added, rejected = ([Added(*one) for one in found[name]] for name in ("added", "rejected"))
    return found["read"], added, rejected
