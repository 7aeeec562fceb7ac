"""Rows of a task, as Arrow brings them, into frames: cut by the rows and bytes of each log in the task alone.

The same rows in the same order make the same frames, however Arrow's batches are cut: only so a task that is repeated
writes what is there already. Rows stay columns, from Spark to the wire: no object is made of one. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from logyard.client.upload import WHOLE_BYTES

from ..errors import OptionError
from .blocks import NONE, Block, content_of, filled, offsets_of
from .record import Cut, SinkError

PAYLOAD_MAX = 63 << 20
META_MAX = 64 << 10
HELD_BYTES = 64 << 20
"""Bytes of all logs' unfinished frames in one task; above, the largest one goes as it is."""
LONG_RUNS = 16
"""Rows of one log that follow one another, on the average of a batch: with fewer they are sorted by logs first."""
COLUMNS = ("payload", "meta", "log")
KINDS = ("binary", "string")
Array: TypeAlias = np.ndarray[Any, Any]


class Batch(NamedTuple):
    """One frame: rows of a log. `size`: bytes of metadata and payload."""

    log: str
    metas: pa.BinaryArray
    payloads: pa.BinaryArray
    size: int

    @property
    def records(self) -> list[tuple[bytes, bytes | None]]:
        """Return the rows as (metadata, payload)."""
        return list(zip(self.metas.to_pylist(), self.payloads.to_pylist(), strict=True))

    @property
    def rows(self) -> int:
        """Return how many there are."""
        return len(self.metas)

    @property
    def largest(self) -> int:
        """Return the bytes of its largest payload."""
        return int(np.diff(offsets_of(self.payloads)).max())

    @property
    def content(self) -> bytes:
        """Return the hash of the rows, as `client.numbering.content_hash` has it."""
        return content_of(self.metas, self.payloads)

    def frame(self, command: bytes = b"") -> Block:
        """Return the rows as a frame of the wire."""
        return Block(self.metas, self.payloads, command)


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


def frames(batches: Iterable[pa.RecordBatch], log: str | None, cut: Cut) -> Iterator[Batch]:
    """Yield the frames of a task's rows. Raises `SinkError` for a row that can't be stored."""
    framing = Framing(cut)
    for batch in batches:
        yield from framing.add(batch, log)
    yield from framing.finish()


class Held:
    """A log's rows that are no frame yet. `settled`: parts that are copies."""

    __slots__ = ("parts", "settled", "rows", "size")

    def __init__(self) -> None:
        self.parts: list[tuple[pa.BinaryArray, pa.BinaryArray]] = []
        self.settled = self.rows = self.size = 0

    def add(self, metas: pa.BinaryArray, payloads: pa.BinaryArray, size: int) -> None:
        """Take rows that follow."""
        self.parts.append((metas, payloads))
        self.rows += len(metas)
        self.size += size

    def take(self, log: str) -> Batch:
        """Return all of it as a frame, and begin anew."""
        metas, payloads = zip(*self.parts, strict=True)
        found = Batch(log, joined(metas), joined(payloads), self.size)
        self.parts, self.settled, self.rows, self.size = [], 0, 0, 0
        return found

    def settle(self) -> None:
        """Copy what was added of one batch: a few rows would keep all of Arrow's in memory."""
        metas, payloads = zip(*self.parts[self.settled :], strict=True)
        self.parts[self.settled :] = [(pa.concat_arrays([*metas, NONE]), pa.concat_arrays([*payloads, NONE]))]
        self.settled = len(self.parts)


def joined(parts: Sequence[pa.BinaryArray]) -> pa.BinaryArray:
    """Return arrays as one."""
    return parts[0] if len(parts) == 1 else pa.concat_arrays(parts)


class Framing:
    """Makes frames of batches as they come."""

    def __init__(self, cut: Cut) -> None:
        self._cut = cut
        self._held: dict[str, Held] = {}
        self._total = 0

    def add(self, batch: pa.RecordBatch, log: str | None) -> Iterator[Batch]:
        """Yield the frames that are full with these rows. Raises `SinkError`."""
        if not batch.num_rows:
            return
        names, runs, metas, payloads = columns_of(batch, log)
        sizes = np.diff(offsets_of(metas)).astype(np.int64) + np.diff(offsets_of(payloads))
        if len(runs) > 1 and batch.num_rows < LONG_RUNS * len(runs) and self._total + sizes.sum() <= HELD_BYTES:
            # No frame is cut because all of them together are too much: the order among logs makes no difference.
            order = np.argsort(names.codes, kind="stable")
            names = Names(names.known, names.codes[order])
            runs = names.runs()
            metas, payloads, sizes = metas.take(pa.array(order)), payloads.take(pa.array(order)), sizes[order]
        ends = np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes)))
        alone = np.flatnonzero(np.diff(offsets_of(payloads)) > WHOLE_BYTES)
        added = set()
        for first, end in zip(runs, [*runs[1:], batch.num_rows], strict=True):
            name = names.known[names.codes[first]]
            added.add(name)
            yield from self._run(name, metas, payloads, ends, alone, first, end)
        for name in added:
            if (held := self._held.get(name)) is not None and held.rows:
                held.settle()

    def _run(
        self, name: str, metas: pa.BinaryArray, payloads: pa.BinaryArray, ends: Array, alone: Array, at: int, end: int
    ) -> Iterator[Batch]:
        """Take rows `at` to `end`, which are one log's. `ends`: bytes before each row; `alone`: rows whose payload
        travels in pieces, in a frame of its own."""
        cut = self._cut
        while at < end:
            held = self._held.get(name) or Held()
            found = int(np.searchsorted(alone, at))
            single = found < len(alone) and alone[found] == at
            before = int(alone[found]) if found < len(alone) else end
            fits = int(np.searchsorted(ends, ends[at] + cut.size - held.size, side="right")) - 1
            fits = min(fits, at + cut.rows - held.rows, before, end)
            if fits <= at and held.rows:
                self._total -= held.size
                yield held.take(name)
                continue
            # A frame takes one row, however large.
            over = int(np.searchsorted(ends, ends[at] + HELD_BYTES - self._total, side="right"))
            stop = max(at + 1, min(fits, over))
            size = int(ends[stop] - ends[at])
            held.add(metas.slice(at, stop - at), payloads.slice(at, stop - at), size)
            self._held[name] = held
            self._total += size
            if single or self._total > HELD_BYTES:
                largest = name if single else max(self._held, key=lambda one: (self._held[one].size, one))
                full = self._held.pop(largest)
                self._total -= full.size
                yield full.take(largest)
            at = stop

    def finish(self) -> Iterator[Batch]:
        """Yield what is left."""
        for name in sorted(self._held):
            if self._held[name].rows:
                yield self._held[name].take(name)
        self._held, self._total = {}, 0


class Names(NamedTuple):
    """The logs of rows: `known` by their codes."""

    known: list[str]
    codes: Array

    def runs(self) -> list[int]:
        """Return where another log begins."""
        return [0, *(np.flatnonzero(np.diff(self.codes)) + 1).tolist()]


def columns_of(batch: pa.RecordBatch, log: str | None) -> tuple[Names, list[int], pa.BinaryArray, pa.BinaryArray]:
    """Return the logs of a batch's rows, where one's rows begin, their metadata and their payloads. Raises `SinkError`
    for a row that can't be stored."""
    there = batch.schema.names
    count = batch.num_rows
    if "kind" in there and pc.any(pc.equal(batch.column("kind"), "gap")).as_py():
        raise SinkError("a row of kind gap counts lost records and is none: filter them out (kind = 'record')")
    if log is not None:
        names = Names([log], np.zeros(count, np.int64))
    else:
        encoded = batch.column("log").dictionary_encode()
        codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        names = Names(encoded.dictionary.to_pylist(), codes)
    if codes_of_nothing(names):
        raise SinkError("a row has no log: give the column log, or the option")
    metas = filled(batch.column("meta").cast(pa.binary())) if "meta" in there else empty(count)
    payloads = batch.column("payload").cast(pa.binary())
    for what, array, most in (("meta", metas, META_MAX), ("payload", payloads, PAYLOAD_MAX)):
        lengths = np.diff(offsets_of(array))
        if int(lengths.max()) > most:
            row = int(np.argmax(lengths > most))
            name = names.known[names.codes[row]]
            raise SinkError(f"log {name!r}: a row's {what} has {lengths[row]} bytes, above its limit of {most}")
    return names, names.runs(), metas, payloads


def codes_of_nothing(names: Names) -> bool:
    """Return whether some row has no log."""
    return bool((names.codes < 0).any()) or "" in names.known or None in names.known


def empty(count: int) -> pa.BinaryArray:
    """Return as many values without bytes."""
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(bytes(4 * (count + 1))), pa.py_buffer(b"")])
