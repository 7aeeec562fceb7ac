"""The pieces of a transfer: what a pull asks for and what its answer brings, as blobs.

Invariant: nothing of an answer is believed before it adds up: entries rise within what was asked for, every unit
matches the hash in its entry, every chunk its name. Called by `serving` (builds) and `pulling` (reads).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import xxhash

from logyard.protocol.errors import Corrupt

from ..entry import parse_entry, unit_hash, units_of
from ..machine import PayloadRange
from ..ports import LivenessPort, SourceEntry
from ..ranges import Range, covered
from ..types import Buffer

RANGES_MAX = 256
"""In one question."""
INDEX_MAX = 1 << 62
"""Above what any honest node says."""


class Piece(NamedTuple):
    """An answer. It covers what was asked for up to and with `through`; `release` is the newest release its sender has
    applied (0: none), `live` names what lives there of the covered ranges."""

    rows: list[SourceEntry]
    through: int
    release: int
    live: int
    chunks: dict[bytes, memoryview]
    size: int


def live_digest(liveness: LivenessPort, ranges: Iterable[Range]) -> int:
    """A number that two members share if and only if, but for chance, the same lives for both in these ranges."""
    found: list[PayloadRange] = []
    for first, last in ranges:
        found += liveness.live_within((first, 0), (last + 1, 0))
    return xxhash.xxh3_64_intdigest(repr([(*first, *end) for first, end in found]).encode())


def read_piece(
    uid: int, ranges: Sequence[Range], names: Sequence[bytes], header: Mapping[str, Any], body: Any
) -> Piece:
    """An answer to a pull of `ranges` and chunks `names`. Raises `Corrupt` unless all of it adds up."""
    where = f"snapshot piece of group {uid:016x}"
    data = memoryview(body)
    chunks: dict[bytes, memoryview] = {}
    at = 0
    for name, size in header["chunks"]:
        chunk = data[at : at + size]
        at += size
        if name not in names or len(chunk) != size or xxhash.xxh3_128_digest(chunk) != name:
            raise Corrupt(where, at, f"chunk {name.hex()}", "another")
        chunks[name] = chunk
    through, release = header["through"], header["release"]
    if through >= INDEX_MAX or release >= INDEX_MAX:
        raise Corrupt(where, 0, "indexes that may be", max(through, release))
    rows = _rows(uid, header["entries"], data[at:])
    asked = covered(ranges, through)
    last = 0
    for row in rows:
        if row.index <= last or not any(first <= row.index <= end for first, end in asked):
            raise Corrupt(where, at, "rising entries of what was asked for", f"entry {row.index}")
        last = row.index
    return Piece(rows, through, release, header["live"], chunks, len(data))


def _rows(uid: int, entries: Sequence[Sequence[Any]], body: memoryview) -> list[SourceEntry]:
    """The entries of one piece with their live units, whose bytes are sliced from `body` and verified. Raises
    `Corrupt`."""
    where = f"snapshot piece of group {uid:016x}"
    rows = []
    at = 0
    for index, term, data, numbers in entries:
        entry = parse_entry(data, where)
        live = set(numbers)
        count = 0
        # (offset in the entry's payload, bytes) of each unbroken stretch of live units.
        parts: list[tuple[int, memoryview]] = []
        begin = start = end = 0
        for unit in units_of(entry.data):
            if unit.number not in live:
                continue
            count += 1
            if unit.offset != end or not parts:
                begin, start = at, unit.offset
                parts.append((start, body[at:at]))
            if unit_hash(uid, entry.index, entry.term, unit.number, body[at : at + unit.length]) != unit.hash:
                raise Corrupt(where, at, unit.hash.hex(), "another hash")
            at += unit.length
            end = unit.offset + unit.length
            parts[-1] = (start, body[begin:at])
        if (entry.index, entry.term) != (index, term) or count != len(live) or at > len(body):
            raise Corrupt(where, at, "entries and bytes that add up", f"{len(body)} bytes")
        rows.append(SourceEntry(uid, entry.index, entry.term, bytes(data), live, slicer(parts)))
    if at != len(body):
        raise Corrupt(where, at, "entries and bytes that add up", f"{len(body)} bytes")
    return rows


def slicer(parts: Sequence[tuple[int, Buffer]]) -> Callable[[int, int], Buffer]:
    """Bytes of an entry's payload by offset. A reader may ask for a stretch with released units in it, which it then
    ignores."""

    def read(offset: int, length: int) -> Buffer:
        found = bytearray()
        for start, data in parts:
            if start <= offset and offset + length <= start + len(data):
                return memoryview(data)[offset - start : offset - start + length]
            found = found or bytearray(length)
            low, high = max(start, offset), min(start + len(data), offset + length)
            if low < high:
                found[low - offset : high - offset] = memoryview(data)[low - start : high - start]
        return found

    return read
