"""Records of a stopped log as Arrow batches: which entries they are in, their units read and checked, their columns.

Invariant: offsets are counted from an anchor of the machine and must meet the next one, so that a lost entry is never
taken for one without records. Used by `source`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import pyarrow
from xxhash import xxh3_128, xxh3_128_digest

from logyard.engine.entry import Unit, frames_of, timestamp_of, units_of
from logyard.machines.log.slices import Long, Slice, slices
from logyard.protocol.compression import Encoding, originals, parse
from logyard.protocol.frame import ABSENT, ENVELOPE_BYTES, LARGE, MARK, table_of

from ..schema import COLUMNS, arrow_schema
from ..sources import GAP, RECORD, Reading
from .reading import Located, StoppedLog

NAMES = [name for name, *_ in COLUMNS] + ["payload"]


class Pack(NamedTuple):
    """A frame's units: its pack, and its large bodies by ordinal."""

    unit: Unit
    large: dict[int, Unit]


def walk(log: StoppedLog, first: int, end: int) -> Iterator[tuple[Located, list[Slice]]]:
    """Yield the entries that hold records `first` to, without, `end`, with their slices. Raises `Corrupt` when an entry
    is missing."""
    machine = log.machine
    if first >= end:
        return
    offset, position = machine.anchor(first)
    index, gap = position.index, False
    marks = [(at, known) for known, at in machine.anchors if at >= index] + [(log.applied + 1, machine.end)]
    passed = 0
    for located in log.located(index, log.applied):
        gap = gap or located.index > index + 1 or (index == position.index < located.index)
        index, before = located.index, offset
        ordinal = position.ordinal if index == position.index else 0
        found, offset = slices(frames_of(located.data), offset, ordinal, machine.holes_of(index))
        while marks[passed][0] <= index:
            at, known = marks[passed]
            if at < index or (gap and known != before):
                raise log.corrupt(log.node.directory, f"entries before {index} are missing: offset {known} is not met")
            passed, gap = passed + 1, False
        if offset > first and before < end:
            yield located, found
        if offset >= end and not gap:
            return
    if offset != machine.end and (gap or offset < end):
        raise log.corrupt(log.node.directory, f"the entries up to {log.applied} end at offset {offset}")


class Rows:
    """Columns in the making. `next` is the offset after the last row that was added."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._schema = arrow_schema(reading.payloads)
        self._columns: list[list[Any]] = []
        self._bytes = 0
        self.next = 0
        self._clear()

    def _clear(self) -> None:
        self._columns = [[] for _ in NAMES]
        self._bytes = 0

    def full(self) -> Iterator[pyarrow.RecordBatch]:
        """Yield a batch, if there is enough for one."""
        if len(self._columns[0]) >= self._reading.batch_rows or self._bytes >= self._reading.batch_bytes:
            yield from self.rest()

    def rest(self) -> Iterator[pyarrow.RecordBatch]:
        """Yield what there is."""
        if self._columns[0]:
            columns = self._columns[: len(self._schema)]
            yield pyarrow.record_batch(
                [pyarrow.array(column, field.type) for column, field in zip(columns, self._schema, strict=True)],
                schema=self._schema,
            )
            self._clear()

    def gap(self, log: str, first: int, count: int) -> None:
        """Add a row for records that are gone."""
        self._add(log, first, None, None, None, GAP, None, count, None, None)
        self.next = first + count

    def _add(self, *row: object) -> None:
        for column, value in zip(self._columns, row, strict=True):
            column.append(value)

    def read(self, log: StoppedLog, first: int, end: int) -> Iterator[int]:
        """Add the records `first` to, without, `end`; yield the next offset whenever a batch may be full."""
        self.next = first
        for located, found in walk(log, first, end):
            packs = _packs(located)
            for one in found:
                low, high = max(one.offset, self.next), min(one.offset + one.records, end)
                if low < high:
                    yield from self._slice(log, located, packs[one.frame], one, low, high)
            if self.next >= end:
                return

    def _slice(self, log: StoppedLog, located: Located, pack: Pack, one: Slice, low: int, high: int) -> Iterator[int]:
        data = memoryview(log.unit(located, pack.unit))
        table = table_of(data, pack.unit.records)
        heads = [head & (MARK - 1) for head in table[::2]]
        long = log.machine.long.get(one.offset)
        stamp = timestamp_of(located.data) * 1000
        skip = one.skip + low - one.offset
        head_at = 4 * len(table) + sum(heads[:skip])
        small_at = 4 * len(table) + sum(heads) + sum(size for size in table[1 : 2 * skip : 2] if size < LARGE)
        reading = self._reading
        for offset in range(low, high):
            number = one.skip + offset - one.offset
            head, size = heads[number], table[2 * number + 1]
            meta = bytes(data[head_at : head_at + head])
            head_at += head
            encoding = parse(meta) if table[2 * number] & MARK else None
            body: bytes | memoryview | None = None
            absent = size == ABSENT and long is None
            small = size < LARGE
            if small:
                body = data[small_at : small_at + size]
                small_at += size
            if long is not None:
                size = long.size
            if encoding is not None:
                meta, stored, size = meta[ENVELOPE_BYTES:], size, encoding.size
            inline = reading.payloads and size <= reading.inline_bytes
            digest = None
            if not absent and (reading.verify or inline):
                if long is None and not small:
                    body = log.unit(located, pack.large[pack.unit.first_ordinal + number])
                if encoding is not None:
                    body, digest = _gathered(originals(encoding, stored, _ranges(log, long, body)), inline)
                elif long is not None:
                    body, digest = _gathered(_pieces(log, long), inline)
                digest = digest or xxh3_128_digest(body or b"")
            kept = bytes(body) if body is not None and inline else None
            row = (log.name, offset, located.index, located.term, stamp, RECORD, meta)
            self._add(*row, None if absent else size, digest, kept)
            self._bytes += len(meta) + 64 + (len(kept) if kept is not None else 0)
            self.next = offset + 1
            if kept is not None and self._bytes >= reading.batch_bytes:
                yield self.next
        yield self.next


def body_of(log: StoppedLog, offset: int) -> Iterator[bytes]:
    """Yield one record's payload, in pieces. Raises `Corrupt`."""
    long = log.machine.long.get(offset)
    if long is None:
        rows = Rows(Reading(payloads=True, inline_bytes=1 << 40))
        for _ in rows.read(log, offset, offset + 1):
            pass
        for batch in rows.rest():
            yield batch.column("payload")[0].as_py() or b""
        return
    encoding = _encoding_of(log, offset)
    yield from map(
        bytes, _pieces(log, long) if encoding is None else originals(encoding, long.size, _ranges(log, long))
    )


def _encoding_of(log: StoppedLog, offset: int) -> Encoding | None:
    """Return how a long payload is compressed, as its record says."""
    for located, found in walk(log, offset, offset + 1):
        for one in found:
            if one.offset <= offset < one.offset + one.records:
                pack = _packs(located)[one.frame]
                data = memoryview(log.unit(located, pack.unit))
                table, number = table_of(data, pack.unit.records), one.skip + offset - one.offset
                at = 4 * len(table) + sum(head & (MARK - 1) for head in table[: 2 * number : 2])
                return parse(data[at : at + ENVELOPE_BYTES]) if table[2 * number] & MARK else None
    return None


def _packs(located: Located) -> list[Pack]:
    """Return the packs by frame."""
    found: list[Pack] = []
    for unit in units_of(located.data):
        if unit.records:
            found.append(Pack(unit, {}))
        else:
            found[-1].large[unit.first_ordinal] = unit
    return found


def _pieces(log: StoppedLog, long: Long) -> Iterator[bytes | memoryview]:
    """Yield a payload that came in pieces. One at a time in memory."""
    for first, size, count in long.runs:
        for index in range(first, first + count):
            yield log.piece(index, size)


def _ranges(
    log: StoppedLog, long: Long | None, body: bytes | memoryview | None = None
) -> Callable[[int, int], bytes | memoryview]:
    """Return what reads ranges of a stored payload: of `body`, or of the pieces of a long one."""
    if long is None:
        data = memoryview(body or b"")
        return lambda first, end: data[first:end]

    def read(first: int, end: int) -> bytes:
        found, at = [], 0
        for index, size, count in long.runs:
            low = max(0, (first - at) // size)
            for number in range(low, min(count, -(-(end - at) // size))):
                begins = at + number * size
                piece = log.piece(index + number, size)
                found.append(piece[max(0, first - begins) : max(0, end - begins)])
            at += size * count
        return b"".join(found)

    return read


def _gathered(pieces: Iterable[bytes | bytearray | memoryview], inline: bool) -> tuple[bytes | None, bytes]:
    """Return a payload's bytes where they are wanted, and its hash."""
    state, kept = xxh3_128(), []
    for piece in pieces:
        state.update(piece)
        if inline:
            kept.append(piece)
    return (b"".join(kept) if inline else None), state.digest()
