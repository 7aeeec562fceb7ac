"""The bytes of a generation's rows: keys, headers, pieces, and how each row proves itself.

Invariant: every value begins with an xxh3-128 of the rest of the value, seeded with its key, so that a flipped
byte, or a value that LMDB returned under another key, never verifies (LMDB pages carry no checksum). Called by
`generation` only.

Keys are big-endian (run, uid, index, term, unit, piece): runs rise, and a job writes in (uid, index) order, so that
writes append. Run 0 holds the generation's own rows (header, statistics, job positions, ledgers). A stored unit n
has key field n + 1; 0 is the entry row.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import xxhash

from logyard.protocol.errors import PayloadCorrupt

Buffer: TypeAlias = bytes | bytearray | memoryview

KEY = struct.Struct(">QQQQII")
"""run, uid, index, term, unit + 1 (0: the entry row), piece."""
ENTRY_ROW = struct.Struct("<16sQIIIIQ")
"""hash, term, flags (0), data bytes, units, reserved (0), inline bytes; then the unit directory, data, inline units."""
UNIT_ROW = struct.Struct("<IIQ")
"""number, flags, length: one stored unit in an entry row's directory."""
PIECE_ROW = struct.Struct("<16sQ")
"""hash, length of the whole unit; then the piece's bytes."""
INLINE = 1
HASH_BYTES = 16
PAGE = 4096
PAGE_HEAD = 16
"""LMDB's own header at the start of an overflow run: a value of n * 4096 - 16 bytes wastes nothing."""
PLACE_ROW = struct.Struct("<16sQQ")
"""Of a piece in the file beside: hash, length of the whole unit, where the piece's bytes begin."""
PIECE_BYTES = 256 * PAGE - PAGE_HEAD - PIECE_ROW.size
"""Payload bytes of a full piece: about 1 MiB, what one read copies and verifies at most."""
LEAF_BYTES = 1900
"""Rows up to about this size share a leaf page; larger ones take whole overflow pages."""
TAIL_BYTES = LEAF_BYTES - PIECE_ROW.size
TAILS_BYTES = 3400
"""A unit that reaches so little into a last page gets that rest as one small row in a leaf, or two: half a page a unit
would be 6 % of the space at 64 KiB, and as much as the unit itself at 4 KiB."""
FORMAT_1_TAIL_BYTES = 1024
FORMAT = 2
"""How units are cut; a generation's own format says how its units are. 1: one tail at most, and none of a single
page."""
BESIDE = 3
"""The format with units of `BESIDE_BYTES` and more in a file beside the environment (`bodies`), without tails."""
NEWEST = BESIDE
BESIDE_BYTES = 16 << 10
"""Below it LMDB costs no more than the row that says where a body is."""

OWN = 0
"""The run number of the generation's own rows."""
HEADER, STATISTICS, JOB, LEDGER, BODIES = 1, 2, 3, 4, 5
END_ROW = struct.Struct("<Q")
"""Of the file beside: where what rows name ends."""


class SourceUnit(NamedTuple):
    """One unit of an entry to be stored: `small` says pack. With `hash` given, the bytes are checked while they are
    copied (xxh3-128 under `seed`), so that rot in the source is never given a fresh, valid row."""

    number: int
    length: int
    small: bool
    seed: int = 0
    hash: bytes = b""


@dataclass(slots=True)
class SourceRow:
    """One entry to be stored. `units` lists *all* its units, in the order of its payload bytes; `live_units` those
    to keep (None: all).

    `read(offset, length)` gives bytes of the entry's payload, good until the next read of any row; it may raise
    `PayloadCorrupt`: the entry is then left out and reported.
    """

    uid: int
    index: int
    term: int
    data: Buffer
    units: Sequence[SourceUnit]
    live_units: set[int] | None
    read: Callable[[int, int], Buffer]


class StoredUnit(NamedTuple):
    """A unit that is here. `at` is its offset in `StoredEntry.inline`, or -1 when it has rows of its own."""

    number: int
    length: int
    at: int


@dataclass(slots=True)
class StoredEntry:
    """What a generation holds of one entry: its metadata, which units are present, and the packs' bytes."""

    uid: int
    index: int
    term: int
    data: bytes
    units: tuple[StoredUnit, ...]
    inline: bytes

    def pack(self, number: int) -> memoryview | None:
        """Return the bytes of an inline unit, or None when it is absent or has rows of its own (see `read_unit`)."""
        for unit in self.units:
            if unit.number == number and unit.at >= 0:
                return memoryview(self.inline)[unit.at : unit.at + unit.length]
        return None


def row_hash(key: bytes, body: Buffer) -> bytes:
    """Return the proof at the head of every value."""
    return xxhash.xxh3_128_digest(body, xxhash.xxh3_64_intdigest(key))


def own_key(kind: int, first: int = 0, second: int = 0) -> bytes:
    """Return the key of one of the generation's own rows."""
    return KEY.pack(OWN, kind, first, second, 0, 0)


def wrap(key: bytes, body: bytes) -> bytes:
    """Return an own row's value."""
    return row_hash(key, body) + body


def corrupt(path: str, key: bytes, want: object, got: object) -> PayloadCorrupt:
    """Return the error for a row that does not verify."""
    run, uid, index, *_ = KEY.unpack(key)
    return PayloadCorrupt(path, describe(key), want, got, *((0, 0) if run == OWN else (uid, index)))


def describe(key: bytes) -> str:
    """Return a row's name in an error message."""
    run, uid, index, _, unit, piece = KEY.unpack(key)
    if run == OWN:
        return f"own row {uid} ({index})"
    if not unit:
        return f"entry {index} of group {uid:016x}"
    return f"piece {piece} of unit {unit - 1} of entry {index} of group {uid:016x}"


def unwrap(path: str, key: bytes, value: memoryview) -> memoryview:
    """Verify a row and give its body."""
    want, got = bytes(value[:HASH_BYTES]), row_hash(key, value[HASH_BYTES:])
    if want != got:
        raise corrupt(path, key, want.hex(), got.hex())
    return value[HASH_BYTES:]


def aligned(end: int) -> int:
    """Return where the page ends that reaches up to `end`."""
    return -(-end // PAGE) * PAGE


def is_beside(length: int, form: int) -> bool:
    """Return whether a unit of this length, if it has rows of its own, lies in the file beside."""
    return form >= BESIDE and length >= BESIDE_BYTES


def piece_lengths(length: int, form: int = FORMAT) -> list[int]:
    """Return how a unit of `length` bytes is cut into rows. A pure function of length and format: nothing about it is
    stored."""
    full, rest = divmod(length, PIECE_BYTES)
    lengths = [PIECE_BYTES] * full
    if is_beside(length, form):
        return [*lengths, rest] if rest else lengths
    spare = (rest + PIECE_ROW.size + PAGE_HEAD) % PAGE
    if form == 1:
        if rest > PAGE and 0 < spare <= FORMAT_1_TAIL_BYTES:
            return [*lengths, rest - spare, spare]
    elif rest > spare > 0:
        if spare <= TAIL_BYTES:
            return [*lengths, rest - spare, spare]
        if spare <= TAILS_BYTES:
            return [*lengths, rest - spare, spare - spare // 2, spare // 2]
    if rest or not full:
        lengths.append(rest)
    return lengths


def pieces_between(length: int, start: int, stop: int, form: int = FORMAT) -> Iterator[tuple[int, int, int]]:
    """Yield (piece, its offset in the unit, its length) of the pieces that hold bytes start to stop."""
    full = length // PIECE_BYTES
    skipped = min(start // PIECE_BYTES, full)
    at = skipped * PIECE_BYTES
    lengths = piece_lengths(length, form)
    for piece in range(skipped, len(lengths)):
        if at >= stop and piece > skipped:
            return
        if at + lengths[piece] > start or lengths[piece] == 0:
            yield piece, at, lengths[piece]
        at += lengths[piece]


def row_pages(value_bytes: int) -> int:
    """Return an upper estimate of the bytes of map that a row takes."""
    if value_bytes <= LEAF_BYTES:
        return value_bytes + KEY.size + 24
    return -(-(value_bytes + PAGE_HEAD) // PAGE) * PAGE + KEY.size + 32


class Plan(NamedTuple):
    """How one entry will be stored: kept units as (unit, offset in the payload, inline?), and an estimate of the bytes
    that it takes, of the map and of the file beside."""

    units: list[tuple[SourceUnit, int, bool]]
    map_bytes: int
    inline_bytes: int

    @property
    def overhead(self) -> int:
        """Bytes of the entry row that are not units: what dies with the entry's last unit, `data` apart."""
        return ENTRY_ROW.size + UNIT_ROW.size * len(self.units)


def plan(row: SourceRow, form: int = FORMAT) -> Plan:
    """Decide what is inline: packs, until the entry row reaches the size of a piece; everything else gets rows of
    its own."""
    kept: list[tuple[SourceUnit, int, bool]] = []
    live = row.live_units
    offset = inline_bytes = map_bytes = beside = 0
    for given in row.units:
        unit = given if type(given) is SourceUnit else SourceUnit(*given)
        if live is None or unit.number in live:
            inline = unit.small and inline_bytes + unit.length <= PIECE_BYTES
            kept.append((unit, offset, inline))
            if inline:
                inline_bytes += unit.length
            elif is_beside(unit.length, form):
                map_bytes += row_pages(PLACE_ROW.size) * len(piece_lengths(unit.length, form))
                beside += unit.length
            else:
                map_bytes += sum(row_pages(size + PIECE_ROW.size) for size in piece_lengths(unit.length))
        offset += unit.length
    found = Plan(kept, 0, inline_bytes)
    map_bytes += row_pages(found.overhead + len(row.data) + inline_bytes)
    return found._replace(map_bytes=map_bytes + map_bytes // 50 + beside)


def entry_value(key: bytes, term: int, data: Buffer, planned: Plan, inline: Sequence[Buffer]) -> bytes:
    """Return the entry row's value."""
    directory = b"".join(
        UNIT_ROW.pack(unit.number, INLINE if is_inline else 0, unit.length) for unit, _, is_inline in planned.units
    )
    head = ENTRY_ROW.pack(b"", term, 0, len(data), len(planned.units), 0, planned.inline_bytes)[HASH_BYTES:]
    body = b"".join((head, directory, data, *inline))
    return row_hash(key, body) + body


def parse_entry(path: str, key: bytes, value: memoryview, *, bodies: bool = True) -> StoredEntry:
    """Verify an entry row and copy it out; with `bodies` false the packs' bytes stay where they are."""
    _, uid, index, term, _, _ = KEY.unpack(key)
    if len(value) < ENTRY_ROW.size:
        raise corrupt(path, key, f"{ENTRY_ROW.size} bytes", len(value))
    unwrap(path, key, value)
    _, row_term, _, data_bytes, count, _, inline_bytes = ENTRY_ROW.unpack_from(value)
    data_at = ENTRY_ROW.size + count * UNIT_ROW.size
    inline_at = data_at + data_bytes
    if row_term != term or inline_at + inline_bytes != len(value):
        got = f"term {row_term}, {inline_at + inline_bytes}"
        raise corrupt(path, key, f"term {term}, {len(value)} bytes", got)
    units: list[StoredUnit] = []
    at = 0
    for number, flags, length in UNIT_ROW.iter_unpack(value[ENTRY_ROW.size : data_at]):
        if flags & INLINE:
            units.append(StoredUnit(number, length, at))
            at += length
        else:
            units.append(StoredUnit(number, length, -1))
    inline = bytes(value[inline_at:]) if bodies else b""
    return StoredEntry(uid, index, term, bytes(value[data_at:inline_at]), tuple(units), inline)


def piece_value(key: bytes, unit_bytes: int, piece: Buffer) -> bytes:
    """Return a piece row's value: one copy of the bytes, which LMDB needs in one buffer."""
    length = unit_bytes.to_bytes(8, "little")
    seed = xxhash.xxh3_64_intdigest(key + length)
    return b"".join((xxhash.xxh3_128_digest(piece, seed), length, piece))


def parse_piece(path: str, key: bytes, value: memoryview) -> tuple[int, memoryview]:
    """Verify a piece row; give the whole unit's length and this piece's bytes, still in the map."""
    if len(value) < PIECE_ROW.size:
        raise corrupt(path, key, f"{PIECE_ROW.size} bytes", len(value))
    length = bytes(value[HASH_BYTES : PIECE_ROW.size])
    got = xxhash.xxh3_128_digest(value[PIECE_ROW.size :], xxhash.xxh3_64_intdigest(key + length))
    if value[:HASH_BYTES] != got:
        raise corrupt(path, key, bytes(value[:HASH_BYTES]).hex(), got.hex())
    return int.from_bytes(length, "little"), value[PIECE_ROW.size :]


def place_value(key: bytes, unit_bytes: int, place: int, piece: Buffer) -> bytes:
    """Return the row of a piece that lies in the file beside."""
    where = unit_bytes.to_bytes(8, "little") + place.to_bytes(8, "little")
    return xxhash.xxh3_128_digest(piece, xxhash.xxh3_64_intdigest(key + where)) + where


def parse_place(path: str, key: bytes, value: memoryview, form: int) -> tuple[int, int] | None:
    """Return (the whole unit's length, where this piece begins) of a row of a piece in the file beside; None for one
    that holds its bytes. Nothing is verified yet: see `check_placed`."""
    if len(value) < PIECE_ROW.size:
        raise corrupt(path, key, f"{PIECE_ROW.size} bytes", len(value))
    length = int.from_bytes(value[HASH_BYTES : PIECE_ROW.size], "little")
    if not is_beside(length, form):
        return None
    if len(value) != PLACE_ROW.size:
        raise corrupt(path, key, f"{PLACE_ROW.size} bytes", len(value))
    return length, int.from_bytes(value[PIECE_ROW.size :], "little")


def placed_length(path: str, key: bytes, unit_bytes: int) -> int:
    """Return how long a piece in the file beside is. What the row says of the unit is not verified yet: no memory goes
    by it."""
    piece: int = KEY.unpack(key)[5]
    left = unit_bytes - piece * PIECE_BYTES
    if left <= 0:
        raise corrupt(path, key, f"a piece of {unit_bytes} bytes", piece)
    return min(left, PIECE_BYTES)


def check_placed(path: str, key: bytes, value: bytes, body: bytes) -> None:
    """Verify the bytes of a piece that lay where its row says."""
    got = xxhash.xxh3_128_digest(body, xxhash.xxh3_64_intdigest(key + value[HASH_BYTES:]))
    if value[:HASH_BYTES] != got:
        raise corrupt(path, key, value[:HASH_BYTES].hex(), got.hex())
