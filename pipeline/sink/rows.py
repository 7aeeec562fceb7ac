"""Rows of a task, as Arrow brings them, into frames: cut by the rows and bytes of each log in the task alone.

The same rows in the same order make the same frames, however Arrow's batches are cut: only so a task that is repeated
writes what is there already. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from logyard.client.upload import WHOLE_BYTES

from ..errors import OptionError
from .record import Cut, SinkError

if TYPE_CHECKING:
    import pyarrow

PAYLOAD_MAX = 63 << 20
META_MAX = 64 << 10
HELD_BYTES = 64 << 20
"""Bytes of all logs' unfinished frames in one task; above, the largest one goes as it is."""
COLUMNS = ("payload", "meta", "log")
KINDS = ("binary", "string")


class Batch(NamedTuple):
    """One frame: records of a log, as (metadata, payload)."""

    log: str
    records: list[tuple[bytes, bytes | None]]
    size: int


def check_columns(columns: Iterable[tuple[str, str]], log: str | None) -> None:
    """Raise `OptionError` for columns, as (name, Spark's type), that are not a sink's."""
    found = dict(columns)
    for name, kind in found.items():
        if name == "kind":
            continue
        if name not in COLUMNS:
            raise OptionError(
                f"{name}: a sink has no such column; it takes payload, meta and log: choose them with select"
            )
        if kind not in (KINDS if name != "log" else ("string",)):
            wanted = "string" if name == "log" else "binary or string"
            raise OptionError(f"{name}: this column is {kind}; {wanted} is expected")
    if "payload" not in found:
        raise OptionError("payload: a sink needs this column (binary or string; null is a record without payload)")
    if log is None and "log" not in found:
        raise OptionError("log: give the option, or a column of that name")


def as_bytes(value: bytes | str | None) -> bytes | None:
    """Return a cell's bytes."""
    return value.encode() if isinstance(value, str) else value


def frames(batches: Iterable[pyarrow.RecordBatch], log: str | None, cut: Cut) -> Iterator[Batch]:
    """Yield the frames of a task's rows. Raises `SinkError` for a row that can't be stored."""
    return framed((row for batch in batches for row in cells(batch, log)), cut)


def framed(rows: Iterable[tuple[str, bytes, bytes | None]], cut: Cut) -> Iterator[Batch]:
    """Yield the frames of rows, each (log, metadata, payload), those of each log in their order."""
    held: dict[str, tuple[list[tuple[bytes, bytes | None]], int]] = {}
    total = 0
    for name, metadata, payload in rows:
        size = len(metadata) + (0 if payload is None else len(payload))
        records, weight = held.get(name, ([], 0))
        alone = payload is not None and len(payload) > WHOLE_BYTES
        if records and (alone or len(records) >= cut.rows or weight + size > cut.size):
            yield Batch(name, records, weight)
            total -= weight
            records, weight = [], 0
        records.append((metadata, payload))
        held[name] = records, weight + size
        total += size
        if alone or total > HELD_BYTES:
            # A payload that travels in pieces is alone in its frame.
            largest = name if alone else max(held, key=lambda one: held[one][1])
            records, weight = held.pop(largest)
            yield Batch(largest, records, weight)
            total -= weight
    for name in sorted(held):
        yield Batch(name, *held[name])


def cells(batch: pyarrow.RecordBatch, log: str | None) -> Iterator[tuple[str, bytes, bytes | None]]:
    """Yield (log, metadata, payload) of each row."""
    columns = {name: batch.column(index).to_pylist() for index, name in enumerate(batch.schema.names)}
    count = batch.num_rows
    kinds = columns.get("kind")
    if kinds is not None and "gap" in kinds:
        raise SinkError("a row of kind gap counts lost records and is none: filter them out (kind = 'record')")
    logs = [log] * count if log is not None else columns["log"]
    metas = columns.get("meta") or [b""] * count
    for name, metadata, payload in zip(logs, metas, columns["payload"], strict=True):
        if not name:
            raise SinkError("a row has no log: give the column log, or the option")
        head, body = as_bytes(metadata) or b"", as_bytes(payload)
        if len(head) > META_MAX:
            raise SinkError(f"log {name!r}: a row's meta has {len(head)} bytes, above its limit of {META_MAX}")
        if body is not None and len(body) > PAYLOAD_MAX:
            raise SinkError(f"log {name!r}: a row's payload has {len(body)} bytes, above its limit of {PAYLOAD_MAX}")
        yield str(name), head, body
