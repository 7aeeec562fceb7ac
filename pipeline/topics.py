"""Topics as Spark reads them: the logs that are a topic's partitions, and each record's key in a column of its own.

A partition's records carry their key in front of their metadata (`protocol.topics`); here whole columns of them are
taken apart. Used by `datasource` and `stream`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow

from logyard.client._sync.topics import look_up
from logyard.client.sync import Yard
from logyard.protocol.errors import LogyardError
from logyard.protocol.topics import DELETING, ENVELOPE, HAS_KEY, MAGIC, Topic

from .errors import OptionError
from .options import Options
from .schema import arrow_schema
from .sources import LogSource


def named_logs(options: Options, source: LogSource) -> Collection[str] | None:
    """Return the logs that the options name, topics by their partitions; None for a pattern. Raises `OptionError` for
    a topic that is not there, and what the network says."""
    if options.topics is None:
        return options.names
    from .network import NetworkSource

    assert isinstance(source, NetworkSource), "a directory was refused"
    return partition_logs(topic_rows(source.yard, options.topics))


def topic_rows(yard: Yard, topics: Sequence[str], timeout_s: float | None = None) -> list[Topic]:
    """Return topics as they are now. Raises `OptionError`, `LogyardError`."""
    found: list[Topic] = []
    for name in topics:
        try:
            row = look_up(yard, name, timeout_s)
        except LogyardError as error:
            if error.code != "unknown_topic":
                raise
            raise OptionError(f"subscribeTopic: {error}") from None
        if row.state == DELETING:
            raise OptionError(f"subscribeTopic: topic {name!r} is being deleted")
        found.append(row)
    return found


def partition_logs(rows: Iterable[Topic]) -> list[str]:
    """Return the logs that are read of topics: also those of partitions that ended, as long as they are kept."""
    return [one.log for row in rows for one in row.readable]


def ended_logs(rows: Iterable[Topic]) -> dict[tuple[str, int], int]:
    """Return where logs of partitions ended, by name and uid: whoever has read one up to there misses nothing of it
    when it is gone."""
    found = {(one.log, one.uid): one.end for row in rows for one in row.ended}
    found |= {(one.log, one.uid): one.end for row in rows for one in row.partitions if one.end is not None}
    return found


def as_asked(batches: Iterator[pyarrow.RecordBatch], options: Options) -> Iterator[pyarrow.RecordBatch]:
    """Return what was read with the columns that the options ask for."""
    return batches if options.topics is None else with_keys(batches, options.payloads)


def with_keys(batches: Iterable[pyarrow.RecordBatch], payloads: bool) -> Iterator[pyarrow.RecordBatch]:
    """Yield rows of partitions with the column `key`, and `meta` without it. A record without an envelope was appended
    to the log directly: it has no key."""
    schema = arrow_schema(payloads, keys=True)
    for batch in batches:
        key, meta = taken_apart(batch.column("meta"))
        columns = {"key": key, "meta": meta}
        found = [columns[name] if name in columns else batch.column(name) for name in schema.names]
        yield pyarrow.record_batch(found, schema=schema)


def taken_apart(column: pyarrow.BinaryArray) -> tuple[pyarrow.BinaryArray, pyarrow.BinaryArray]:
    """Return keys and metadata of a column of metadata, as `protocol.topics.opened_envelope` of each."""
    rows = len(column)
    _, where, data = column.buffers()
    ends: Any = np.frombuffer(where, np.int32)[column.offset : column.offset + rows + 1].astype(np.int64)
    first, length = ends[:-1], np.diff(ends)
    valid = np.asarray(column.is_valid())
    values: Any = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    enveloped = valid & (length >= ENVELOPE.size)
    # Where there is none, the first bytes of the column stand in: what they say is not used.
    at = np.where(enveloped, first, 0)
    if not enveloped.any():
        return pyarrow.nulls(rows, pyarrow.binary()), column
    flags = values[at + 1]
    size = values[at + 2].astype(np.int64) | values[at + 3].astype(np.int64) << 8
    enveloped &= (values[at] == MAGIC) & (flags & ~np.uint8(HAS_KEY) == 0) & (ENVELOPE.size + size <= length)
    head = np.where(enveloped, ENVELOPE.size + size, 0)
    keyed = enveloped & (flags & HAS_KEY != 0)
    keys = _slices(values, first + ENVELOPE.size, np.where(keyed, size, 0), keyed)
    return keys, _slices(values, first + head, np.where(valid, length - head, 0), valid)


def _slices(values: Any, first: Any, length: Any, valid: Any) -> pyarrow.BinaryArray:
    """Return a binary column of pieces of `values`."""
    offsets = np.zeros(len(length) + 1, np.int32)
    np.cumsum(length, out=offsets[1:])
    rows = np.arange(int(offsets[-1])) + np.repeat(first - offsets[:-1], length)
    bitmap = pyarrow.py_buffer(np.packbits(valid, bitorder="little").tobytes())
    buffers = [bitmap, pyarrow.py_buffer(offsets), pyarrow.py_buffer(values[rows].tobytes())]
    return pyarrow.Array.from_buffers(pyarrow.binary(), len(length), buffers)
