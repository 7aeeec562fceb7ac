"""A scan's answer as Arrow record batches, built from the frame's sections: no object is made of a record.

With `verify` each pack and each body is checked here against the hash that was stored with it, bound to its log, place
and term. Payload hashes are computed where bytes are present. Called by `network`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import xxhash

from logyard.client.scans import Scan
from logyard.engine.entry import unit_hash
from logyard.protocol.columns import ABSENT, BODY, LONG_UNIT, RUN, Sections, sections
from logyard.protocol.compression import originals, parse
from logyard.protocol.errors import Corrupt, LogyardError
from logyard.protocol.frame import ENVELOPE_BYTES, LARGE, MARK, Buffer

from .schema import arrow_schema
from .sources import GAP, RECORD, Reading

RUN_TYPE = np.dtype(
    [
        ("first", "<u8"), ("index", "<u8"), ("term", "<u8"), ("stamp", "<i8"), ("number", "<u4"), ("records", "<u4"),
        ("skip", "<u4"), ("packed", "<u4"), ("unit", "<u4"), ("heads", "<u4"), ("smalls", "<u4"), ("extras", "<u4"),
        ("digest", "V16"),
    ]
)  # fmt: skip
BODY_TYPE = np.dtype([("record", "<u4"), ("unit", "<u4"), ("size", "<u8"), ("sent", "<u8"), ("digest", "V16")])
assert RUN_TYPE.itemsize == RUN.size and BODY_TYPE.itemsize == BODY.size

Fetch: TypeAlias = Callable[[int, int, int], Iterator[bytes]]
"""(number of the range, offset, size) -> the bytes of a body that did not come along, in pieces."""
Array: TypeAlias = np.ndarray[Any, Any]


class Damaged(Corrupt):
    """Bytes of an answer do not match their stored hash. `number` is the range they are of."""

    number = 0


class Frame(NamedTuple):
    """An answer's sections and, by row of all packs, where things are."""

    parts: Sections
    runs: Array
    table: Array
    heads: Array
    marked: Array
    """By row, whether its payload is compressed: an envelope stands in front of its metadata."""
    per: Array
    starts: Array
    offsets: Array
    keep: Array
    sizes: Array
    absent: Array
    bodies: dict[int, memoryview]
    """By row, the bodies that are not in packs and came along."""
    left_out: list[int]
    """Rows whose bodies did not come along."""


def decode(scan: Scan, names: Sequence[str], reading: Reading, fetch: Fetch) -> Iterator[pa.RecordBatch]:
    """Yield batches of a scan of ranges of the logs `names`. Raises `Damaged`, `LogyardError` for a frame that is
    none."""
    try:
        frame = read_frame(scan)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise LogyardError(f"a scan's answer of node {scan.node} cannot be read: {error!r}") from None
    if not len(frame.runs):
        return
    if reading.verify:
        check_units(frame, scan, names)
    batch = pa.record_batch(_columns(frame, names, reading), schema=arrow_schema(reading.payloads))
    wanted = [
        row
        for row in sorted({*frame.left_out, *np.flatnonzero(frame.marked & frame.keep).tolist()})
        if frame.keep[row]
        and (frame.marked[row] or reading.verify or (reading.payloads and frame.sizes[row] <= reading.inline_bytes))
    ]
    at = 0
    for row in wanted:
        if row > at:
            yield from _kept(batch, frame.keep, at, row, reading.batch_rows)
        number = int(frame.runs["number"][np.searchsorted(frame.starts, row, side="right") - 1])
        one = batch.slice(row, 1)
        if frame.marked[row]:
            yield _original(frame, row, one, fetch, number, reading)
        else:
            yield _with_body(one, _fetched(one, fetch, number), reading)
        at = row + 1
    yield from _kept(batch, frame.keep, at, batch.num_rows, reading.batch_rows)


def gap_batch(log: str, first: int, count: int | None, payloads: bool) -> pa.RecordBatch:
    """Return one row of kind `GAP`; `count` None: nobody knows how many records."""
    row = {"log": log, "offset": first, "kind": GAP, "payload_size": count}
    return pa.RecordBatch.from_pylist([row], schema=arrow_schema(payloads))


def read_frame(scan: Scan) -> Frame:
    """Return the parts of an answer; raise ValueError when they do not add up."""
    parts = sections(scan.header, scan.data)
    runs: Array = np.frombuffer(parts.runs, RUN_TYPE)
    table: Array = np.frombuffer(parts.table, "<u4").reshape(-1, 2)
    marked = (table[:, 0] & MARK) != 0
    lengths = table[:, 0] & (MARK - 1)
    per = runs["packed"].astype(np.int64)
    rows = int(per.sum())
    ends = np.cumsum(per)
    starts = ends - per
    extras = np.frombuffer(parts.directory, BODY_TYPE)
    small = table[:, 1] < LARGE
    if (
        rows != len(table)
        or int(lengths.sum(dtype=np.int64)) != len(parts.heads)
        or (len(parts.smalls) and int(table[:, 1][small].sum(dtype=np.int64)) != len(parts.smalls))
        or int(runs["extras"].sum(dtype=np.int64)) != len(extras)
        or int(extras["sent"].sum(dtype=np.uint64)) != len(parts.bodies)
        or (len(runs) and int(runs["number"].max()) >= len(scan.outcomes))
    ):
        raise ValueError("tables and sections differ")
    skip = runs["skip"].astype(np.int64)
    within = np.arange(rows) - np.repeat(starts, per)
    offsets = np.repeat(runs["first"].astype(np.int64) - skip, per) + within
    keep = (within >= np.repeat(skip, per)) & (within < np.repeat(skip + runs["records"], per))
    sizes = table[:, 1].astype(np.int64)
    absent = table[:, 1] == ABSENT
    bodies: dict[int, memoryview] = {}
    left = set(np.flatnonzero(~small & ~absent & keep).tolist())
    at = 0
    for extra, run in zip(extras, np.repeat(np.arange(len(runs)), runs["extras"]), strict=True):
        row, sent = int(starts[run] + extra["record"]), int(extra["sent"])
        if row >= ends[run]:
            raise ValueError("a body of no record")
        if extra["unit"] == LONG_UNIT:
            sizes[row], absent[row] = int(extra["size"]), False
            left.add(row)
        if sent or not extra["size"]:
            bodies[row] = parts.bodies[at : at + sent]
            left.discard(row)
        at += sent
    return Frame(parts, runs, table, lengths, marked, per, starts, offsets, keep, sizes, absent, bodies, sorted(left))


def check_units(frame: Frame, scan: Scan, names: Sequence[str]) -> None:
    """Check each pack and body against its stored hash. Raises `Damaged`. (The pieces of a long payload were checked by
    the node.)"""
    parts, at, heads, smalls, body = frame.parts, 0, 0, 0, 0
    extras = iter(np.frombuffer(parts.directory, BODY_TYPE))
    for run in frame.runs:
        number, index, term = int(run["number"]), int(run["index"]), int(run["term"])
        uid = scan.outcomes[number].uid
        table_end, heads_end, small_end = (
            at + 8 * int(run["packed"]), heads + int(run["heads"]), smalls + int(run["smalls"])
        )  # fmt: skip
        pack = b"".join((parts.table[at:table_end], parts.heads[heads:heads_end], parts.smalls[smalls:small_end]))
        at, heads, smalls = table_end, heads_end, small_end
        sound = unit_hash(uid, index, term, int(run["unit"]), pack) == _digest(run)
        for _ in range(int(run["extras"])):
            extra = next(extras)
            end = body + int(extra["sent"])
            if extra["unit"] != LONG_UNIT and end > body:
                data = parts.bodies[body:end]
                sound = sound and unit_hash(uid, index, term, int(extra["unit"]), data) == _digest(extra)
            body = end
        if not sound:
            error = Damaged.told(
                f"log {names[number]!r}: bytes of entry {index} (offset {int(run['first'])}) from node {scan.node} do "
                "not match their stored hash"
            )
            error.number = number
            raise error


def _digest(row: Any) -> bytes:
    found: bytes = row["digest"].tobytes()
    return found


def _columns(frame: Frame, names: Sequence[str], reading: Reading) -> list[pa.Array]:
    runs, per, rows = frame.runs, frame.per, len(frame.table)
    stamps = pa.array(np.repeat(runs["stamp"] * 1000, per)).view(pa.timestamp("us", tz="UTC"))
    columns = [
        pa.array(list(names), pa.string()).take(pa.array(np.repeat(runs["number"], per))),
        pa.array(frame.offsets),
        pa.array(np.repeat(runs["index"], per).astype(np.int64)),
        pa.array(np.repeat(runs["term"], per).astype(np.int64)),
        stamps,
        pa.repeat(RECORD, rows).cast(pa.string()),
        _binary(frame.heads, frame.parts.heads, None),
        pa.array(frame.sizes, mask=frame.absent),
    ]
    if not (reading.payloads or reading.verify):
        return [*columns, pa.nulls(rows, pa.binary())]
    small = frame.table[:, 1] < LARGE
    lengths = np.where(small, frame.table[:, 1], 0).astype(np.int64)
    present = small.copy()
    values: bytes | memoryview = frame.parts.smalls
    if frame.bodies:
        values, lengths = _interleaved(frame, lengths)
        present[list(frame.bodies)] = True
    columns.append(_hashes(values, lengths, present))
    if reading.payloads:
        inline = present & (frame.sizes <= reading.inline_bytes)
        if not np.array_equal(inline, present):
            dropped = present & ~inline
            values = _without(values, lengths, dropped)
            lengths = np.where(dropped, 0, lengths)
        columns.append(_binary(lengths, values, inline))
    return columns


def _interleaved(frame: Frame, lengths: Array) -> tuple[bytes, Array]:
    """Return small and large bodies in the order of their records, in one buffer."""
    ends = np.cumsum(lengths)
    parts: list[memoryview] = []
    last = 0
    filled = lengths.copy()
    for row in sorted(frame.bodies):
        end = int(ends[row])
        parts += (frame.parts.smalls[last:end], frame.bodies[row])
        filled[row] = len(frame.bodies[row])
        last = end
    parts.append(frame.parts.smalls[last:])
    return b"".join(parts), filled


def _without(values: bytes | memoryview, lengths: Array, dropped: Array) -> bytes:
    ends = np.cumsum(lengths)
    view, kept, last = memoryview(values), [], 0
    for row in np.flatnonzero(dropped):
        kept.append(view[last : int(ends[row] - lengths[row])])
        last = int(ends[row])
    return b"".join((*kept, view[last:]))


def _hashes(values: bytes | memoryview, lengths: Array, present: Array) -> pa.Array:
    """Return the xxh3-128 of each present value."""
    view, digest = memoryview(values), xxhash.xxh3_128_digest
    found: list[bytes] = []
    at = 0
    for length, there in zip(lengths.tolist(), present.tolist(), strict=True):
        if there:
            found.append(digest(view[at : at + length]))
            at += length
    return _binary(np.where(present, 16, 0), b"".join(found), present)


def _binary(lengths: Array, values: bytes | memoryview, valid: Array | None) -> pa.Array:
    """Return a binary column over `values` as they are."""
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    bitmap = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little").tobytes())
    buffers = [bitmap, pa.py_buffer(offsets), pa.py_buffer(values)]
    return pa.Array.from_buffers(pa.binary(), len(lengths), buffers)


def _kept(batch: pa.RecordBatch, keep: Array, at: int, end: int, rows: int) -> Iterator[pa.RecordBatch]:
    """Yield the kept rows of `at` to `end`, at most `rows` at a time."""
    part = batch.slice(at, end - at)
    if not keep[at:end].all():
        part = part.filter(pa.array(keep[at:end]))
    for first in range(0, part.num_rows, rows):
        yield part.slice(first, rows)


def _fetched(row: pa.RecordBatch, fetch: Fetch, number: int) -> Iterator[bytes]:
    return fetch(number, row.column("offset")[0].as_py(), row.column("payload_size")[0].as_py())


def _with_body(row: pa.RecordBatch, body: Iterable[Buffer], reading: Reading) -> pa.RecordBatch:
    """Return one row whose body comes in pieces; it is kept in memory only if it is to be returned."""
    offset, size = row.column("offset")[0].as_py(), row.column("payload_size")[0].as_py()
    inline = reading.payloads and size <= reading.inline_bytes
    state, pieces, got = xxhash.xxh3_128(), [], 0
    for piece in body:
        state.update(piece)
        got += len(piece)
        if inline:
            pieces.append(piece)
    if got != size:
        raise LogyardError(f"offset {offset}: {got} bytes of a payload of {size} came")
    changed: dict[str, object] = {"payload_hash": state.digest()}
    if reading.payloads:
        changed["payload"] = b"".join(pieces) if inline else None
    return _changed(row, changed)


def _original(
    frame: Frame, row: int, one: pa.RecordBatch, fetch: Fetch, number: int, reading: Reading
) -> pa.RecordBatch:
    """Return one row whose payload its client compressed, as the client was given it."""
    head = one.column("meta")[0].as_py()
    encoding = parse(head)
    changed: dict[str, object] = {"meta": head[ENVELOPE_BYTES:], "payload_size": encoding.size, "payload_hash": None}
    if reading.payloads:
        changed["payload"] = None
    one = _changed(one, changed)
    if not (reading.verify or (reading.payloads and encoding.size <= reading.inline_bytes)):
        return one
    stored = _stored(frame, row)
    if stored is None:
        return _with_body(one, _fetched(one, fetch, number), reading)
    return _with_body(one, originals(encoding, len(stored), lambda first, end: stored[first:end]), reading)


def _stored(frame: Frame, row: int) -> memoryview | None:
    """Return the bytes of a row's body that came along; None: none did."""
    sizes = frame.table[:, 1]
    if sizes[row] >= LARGE:
        return frame.bodies.get(row)
    at = int(np.where(sizes[:row] < LARGE, sizes[:row], 0).sum(dtype=np.int64))
    return memoryview(frame.parts.smalls)[at : at + int(sizes[row])]


def _changed(row: pa.RecordBatch, changed: Mapping[str, object]) -> pa.RecordBatch:
    columns = [
        pa.array([changed[field.name]], field.type) if field.name in changed else row.column(field.name)
        for field in row.schema
    ]
    return pa.record_batch(columns, schema=row.schema)
