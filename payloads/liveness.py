"""Which payloads of one group are dead: a released prefix, and exceptions behind it.

Invariants: deadness is monotone; two members with the same history hold equal values (the form is canonical); most
groups release in order and are two numbers. Positions are (index, ordinal); positions that never existed are dead
or live as nobody asks. Called by the host's applier (`release`), by snapshots (`encode_live_set`,
`install`) and by whoever resolves a reference (`is_live`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import xxhash
from pyroaring import BitMap64

from logyard.protocol.errors import PayloadCorrupt

from .bits import canonical, clear, stretch_end, stretches
from .reference import PayloadRange, Position

_MAGIC = b"LIVE"
_HEAD = struct.Struct("<4sIQQQIIII")
"""magic, version, upto, prefix index, prefix ordinal, bytes of the entries' bitmap, of the parts' bitmap, tails, 0."""
_TAIL = struct.Struct("<QQ")
_HASH_BYTES = 16
_VERSION = 1


class Liveness:
    """Everything before `prefix` is dead. Behind it: whole entries, the tails of entries from an ordinal on, and
    single ordinals (as index << 32 | ordinal). The three are None while they are empty."""

    __slots__ = ("index", "ordinal", "_entries", "_tails", "_parts")

    def __init__(self, index: int = 1, ordinal: int = 0) -> None:
        self.index = index
        self.ordinal = ordinal
        self._entries: BitMap64 | None = None
        self._tails: dict[int, int] | None = None
        self._parts: BitMap64 | None = None

    @property
    def released_before(self) -> Position:
        """The first position that may live: everything before it is dead."""
        return Position(self.index, self.ordinal)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Liveness) and self._state() == other._state()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        entries, parts = len(self._entries or ()), len(self._parts or ())
        tails = len(self._tails or ())
        return f"Liveness(prefix={self.index}.{self.ordinal} entries={entries} tails={tails} parts={parts})"

    def _state(self) -> tuple[object, ...]:
        return self.index, self.ordinal, self._entries or BitMap64(), self._tails or {}, self._parts or BitMap64()

    # Dying

    def release(self, first: tuple[int, int], end: tuple[int, int]) -> bool:
        """Count the positions from `first` up to, but without, `end` as dead. True if any was not before.

        The host also releases entries that have no payload at all when it applies them: else the prefix would wait
        for them.
        """
        assert first <= end and min(first[1], end[1]) >= 0 and end[1] < 1 << 32, "an ill-formed range"
        prefix = (self.index, self.ordinal)
        if end <= prefix or first == end:
            return False
        if first <= prefix:
            self.index, self.ordinal = end
            self._absorb()
            return True
        changed = self._add(first, end)
        if changed:
            self._absorb()
        return changed

    def _add(self, first: tuple[int, int], end: tuple[int, int]) -> bool:
        """Add a range behind the prefix."""
        index, ordinal = first
        if index == end[0]:
            return self._add_part(index, ordinal, end[1])
        changed = False
        if ordinal:
            changed = self._add_tail(index, ordinal)
            index += 1
        if index < end[0]:
            changed |= self._add_entries(index, end[0])
        if end[1]:
            changed |= self._add_part(end[0], 0, end[1])
        return changed

    def _add_entries(self, first: int, end: int) -> bool:
        if self._entries is None:
            self._entries = BitMap64()
        elif self._entries.contains_range(first, end):
            return False
        self._entries.add_range(first, end)
        if self._parts is not None:
            clear(self._parts, first << 32, end << 32)
        if self._tails:
            for index in [index for index in self._tails if first <= index < end]:
                del self._tails[index]
        return True

    def _add_tail(self, index: int, ordinal: int) -> bool:
        if self._entries is not None and index in self._entries:
            return False
        tails = self._tails if self._tails is not None else {}
        if tails.get(index, ordinal + 1) <= ordinal:
            return False
        key, parts = index << 32, self._parts
        if parts is not None:
            while ordinal and (key | ordinal - 1) in parts:
                ordinal -= 1
            parts.remove_range(key | ordinal, index + 1 << 32)
        if (index, ordinal) <= (index, self.ordinal if index == self.index else 0):
            return self._add_entries(index, index + 1)
        tails[index] = ordinal
        self._tails = tails
        return True

    def _add_part(self, index: int, ordinal: int, end: int) -> bool:
        if self._entries is not None and index in self._entries:
            return False
        tail = self._tails.get(index) if self._tails is not None else None
        if tail is not None:
            if ordinal >= tail:
                return False
            if end >= tail:
                return self._add_tail(index, ordinal)
        key = index << 32
        if self._parts is None:
            self._parts = BitMap64()
        elif self._parts.contains_range(key | ordinal, key | end):
            return False
        self._parts.add_range(key | ordinal, key | end)
        if tail is not None and (key | tail - 1) in self._parts:
            self._add_tail(index, tail - 1)
        return True

    def _absorb(self) -> None:
        """Let the prefix run over what is dead behind it, and forget what it passed."""
        entries, tails, parts = self._entries, self._tails, self._parts
        if entries is None and tails is None and parts is None:
            return
        index, ordinal = self.index, self.ordinal
        while True:
            if entries is not None and index in entries:
                index, ordinal = stretch_end(entries, index), 0
            elif tails is not None and tails.get(index, ordinal + 1) <= ordinal:
                index, ordinal = index + 1, 0
            elif parts is not None and (index << 32 | ordinal) in parts:
                ordinal = stretch_end(parts, index << 32 | ordinal) & 0xFFFFFFFF
            else:
                break
        self.index, self.ordinal = index, ordinal
        if entries is not None:
            entries.remove_range(0, index)
            self._entries = entries if entries else None
        if parts is not None:
            clear(parts, 0, index << 32 | ordinal)
            self._parts = parts if parts else None
        if tails is not None:
            self._tails = {at: tail for at, tail in tails.items() if at >= index} or None

    # Asking

    def is_live(self, index: int, ordinal: int) -> bool:
        """Return whether a position is not dead."""
        if (index, ordinal) < (self.index, self.ordinal):
            return False
        if self._entries is not None and index in self._entries:
            return False
        if self._tails is not None and self._tails.get(index, ordinal + 1) <= ordinal:
            return False
        return self._parts is None or (index << 32 | ordinal) not in self._parts

    def is_dead_range(self, first: tuple[int, int], end: tuple[int, int]) -> bool:
        """Return whether everything from `first` up to, but without, `end` is dead; both in one entry."""
        index = first[0]
        assert index == end[0]
        if end <= (self.index, self.ordinal) or (self._entries is not None and index in self._entries):
            return True
        low = max(first[1], self.ordinal if index == self.index else 0) if index >= self.index else end[1]
        high = end[1]
        if self._tails is not None:
            high = min(high, self._tails.get(index, high))
        if low >= high:
            return True
        return self._parts is not None and self._parts.contains_range(index << 32 | low, index << 32 | high)

    def is_entry_dead(self, index: int, records: int) -> bool:
        """Return whether every payload of an entry with this many records is dead. Without records there is nothing to
        keep."""
        return self.is_dead_range((index, 0), (index, records))

    def unit_is_live(self, index: int, first_ordinal: int, records: int) -> bool:
        """Return whether a unit is needed: a pack while any of its records lives, a large body (records = 0) while its
        own does."""
        return not self.is_dead_range((index, first_ordinal), (index, first_ordinal + max(records, 1)))

    def live_units(self, index: int, units: Iterable[tuple[int, int, int]]) -> set[int]:
        """Return the live ones of an entry's units, given as (number, first ordinal, records)."""
        if (index + 1, 0) <= (self.index, self.ordinal):
            return set()
        return {number for number, first, records in units if self.unit_is_live(index, first, records)}

    def live_ranges(self, upto_index: int) -> Iterator[PayloadRange]:
        """Yield what is not dead up to and with an index, as rising, disjoint ranges."""
        at, stop = self.released_before, Position(upto_index + 1, 0)
        for first, end in self._dead_ranges():
            if first >= stop:
                break
            if at < first:
                yield PayloadRange(at, first)
            at = max(at, end)
        if at < stop:
            yield PayloadRange(at, stop)

    def live_within(self, first: tuple[int, int], end: tuple[int, int]) -> list[PayloadRange]:
        """Return what is not dead from `first` up to, but without, `end`: what a release of that range kills. Its cost
        is in the exceptions within the range."""
        at, stop = max(Position(*first), self.released_before), Position(*end)
        found = []
        for low, high in self._dead_within(at, stop):
            if low >= stop:
                # The dead tail of the entry where the range ends begins behind it: what lives between is not asked for.
                break
            if at < low:
                found.append(PayloadRange(at, low))
            at = max(at, high)
        if at < stop:
            found.append(PayloadRange(at, stop))
        return found

    def _dead_within(self, first: Position, end: Position) -> list[tuple[Position, Position]]:
        """Return the exceptions that overlap a range, rising."""
        found: list[tuple[Position, Position]] = []
        if first >= end or (self._entries is None and self._tails is None and self._parts is None):
            return found
        for low, high in stretches(self._entries, first.index, end.index + 1):
            found.append((Position(low, 0), Position(high, 0)))
        for low, high in stretches(self._parts, first.index << 32, end.index << 32 | end.ordinal):
            found.append((Position(low >> 32, low & 0xFFFFFFFF), Position(high >> 32, high & 0xFFFFFFFF)))
        tails = self._tails or {}
        one = range(first.index, first.index + 1) if first.index == end.index else tails
        found += (
            (Position(index, tails[index]), Position(index + 1, 0))
            for index in one
            if index in tails and first.index <= index <= end.index
        )
        found.sort()
        return found

    def _dead_ranges(self) -> list[tuple[Position, Position]]:
        """Return the exceptions behind the prefix, rising."""
        found = [(Position(first, 0), Position(end, 0)) for first, end in stretches(self._entries)]
        found += [(Position(index, ordinal), Position(index + 1, 0)) for index, ordinal in (self._tails or {}).items()]
        for first, end in stretches(self._parts):
            # A stretch never crosses into another entry: ordinal 2**32 - 1 does not exist.
            found.append((Position(first >> 32, first & 0xFFFFFFFF), Position(end >> 32, end & 0xFFFFFFFF)))
        found.sort()
        return found

    # Snapshots

    def encode_live_set(self, upto: int) -> bytes:
        """Return the exact live set up to and with an index, checksummed. Equal on all members for equal histories."""
        stop = (upto + 1, 0)
        index, ordinal = min((self.index, self.ordinal), stop)
        tails: list[tuple[int, int]] = []
        entries = canonical(self._entries, upto + 1)
        parts = canonical(self._parts, upto + 1 << 32)
        if self._tails is not None:
            tails = sorted((at, tail) for at, tail in self._tails.items() if at <= upto)
        head = _HEAD.pack(_MAGIC, _VERSION, upto, index, ordinal, len(entries), len(parts), len(tails), 0)
        body = b"".join((head, entries, parts, *(_TAIL.pack(*tail) for tail in tails)))
        return body + xxhash.xxh3_128_digest(body)

    def install(self, live_set: LiveSet) -> None:
        """Install a snapshot's live set: at or below `upto` exactly that holds; what is dead above it stays dead.

        Asserts that nothing rises from the dead.
        """
        stop = Position(live_set.upto + 1, 0)
        theirs = live_set.liveness
        for live in theirs.live_ranges(live_set.upto):
            for own in self.live_ranges(live_set.upto):
                if own.first <= live.first and live.end <= own.end:
                    break
            else:
                raise AssertionError(f"{live} is live in the snapshot and was dead here")
        above = [
            (first, end) for first, end in [(Position(0, 0), self.released_before), *self._dead_ranges()] if end > stop
        ]
        copied = decode_live_set(theirs.encode_live_set(live_set.upto)).liveness
        for first, end in above:
            copied.release(max(first, stop), end)
        self.index, self.ordinal = copied.index, copied.ordinal
        self._entries, self._tails, self._parts = copied._entries, copied._tails, copied._parts


class LiveSet(NamedTuple):
    """What a snapshot says of payloads: everything up to and with index `upto`; `liveness` has nothing above it."""

    upto: int
    liveness: Liveness

    def ranges(self) -> list[PayloadRange]:
        """Return what lives."""
        return list(self.liveness.live_ranges(self.upto))


def decode_live_set(data: bytes, where: str = "snapshot") -> LiveSet:
    """Return what `encode_live_set` wrote. A missing live set is an error, never an empty one (law 4). Raises
    `PayloadCorrupt`."""
    body, want = data[:-_HASH_BYTES], data[-_HASH_BYTES:]
    if len(data) < _HEAD.size + _HASH_BYTES or xxhash.xxh3_128_digest(body) != want:
        raise PayloadCorrupt(where, "the live set", f"{_HEAD.size + _HASH_BYTES} bytes or more that verify", len(data))
    magic, version, upto, index, ordinal, entries, parts, tails, _ = _HEAD.unpack_from(body)
    if magic != _MAGIC or version != _VERSION or len(body) != _HEAD.size + entries + parts + tails * _TAIL.size:
        raise PayloadCorrupt(where, "the live set", f"version {_VERSION}", f"version {version}, {len(body)} bytes")
    found = Liveness(index, ordinal)
    at = _HEAD.size + entries
    try:
        if entries:
            found._entries = BitMap64.deserialize(body[_HEAD.size : at])
        if parts:
            found._parts = BitMap64.deserialize(body[at : at + parts])
    except ValueError as error:
        raise PayloadCorrupt(where, "the live set", "bitmaps", str(error)) from None
    at += parts
    if tails:
        found._tails = {first: tail for first, tail in _TAIL.iter_unpack(body[at:])}
    return LiveSet(upto, found)
