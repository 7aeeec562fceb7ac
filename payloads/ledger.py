"""Exact sizes and deaths of what one run of a generation holds of one group.

A *slot* is one stored unit, or an entry's own bytes (header, directory, metadata), which die with its last unit.
`Ledger` is the sizes, written once with the rows and loaded only while somebody marks; `Marks` is one bit per slot
and the live bytes, always in memory. Invariant: live bytes = sum of the sizes of slots not marked; deadness only
grows. Called by `store`, written by `generation`.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate

from pyroaring import BitMap

from .bits import stretch_end

ENTRY_SLOT = 0xFFFFFFFF
"""As a unit number: the entry's own bytes. It sorts after the entry's units."""
_SECTION = struct.Struct("<QI")
_COUNT = struct.Struct("<IQ")
_MARKS = struct.Struct("<QI")


class Ledger:
    """Slots in (index, unit) order, in columns: 20 bytes a slot. `sums[n]` is the size of the first n slots, in
    bytes."""

    __slots__ = ("indexes", "units", "sums")

    def __init__(self, indexes: array[int], units: array[int], sizes: Iterable[int]) -> None:
        self.indexes = indexes
        self.units = units
        self.sums = array("Q", accumulate(sizes, initial=0))
        assert len(self.sums) == len(indexes) + 1 == len(units) + 1

    def __len__(self) -> int:
        return len(self.indexes)

    @property
    def total(self) -> int:
        """Bytes of all slots."""
        return self.sums[-1]

    def at(self, index: int, unit: int) -> int:
        """Return the number of slots before (index, unit)."""
        indexes = self.indexes
        low = bisect_left(indexes, index)
        if not unit or low == len(indexes) or indexes[low] != index:
            return low
        return bisect_left(self.units, unit, low, bisect_left(indexes, index + 1, low))

    def entry(self, index: int) -> tuple[int, int] | None:
        """Return (first slot, entry slot) of an entry, or None when it is not here."""
        low = bisect_left(self.indexes, index)
        if low == len(self.indexes) or self.indexes[low] != index:
            return None
        return low, bisect_left(self.indexes, index + 1, low) - 1

    def size(self, slot: int) -> int:
        """Return bytes of one slot."""
        return self.sums[slot + 1] - self.sums[slot]


class Columns:
    """Slots being collected for several groups; becomes one ledger row a transaction."""

    __slots__ = ("groups", "slots", "total")

    def __init__(self) -> None:
        self.groups: dict[int, tuple[array[int], array[int], array[int]]] = {}
        self.slots = 0
        self.total = 0

    def add(self, uid: int, index: int, unit: int, size: int) -> None:
        """Add one slot; slots of a group come in (index, unit) order."""
        found = self.groups.get(uid)
        if found is None:
            found = self.groups[uid] = (array("Q"), array("I"), array("Q"))
        found[0].append(index)
        found[1].append(unit)
        found[2].append(size)
        self.slots += 1
        self.total += size

    def encode(self) -> bytes:
        """Return the ledger row's body: zlib over sections and columns (rising numbers pack to a few bytes a slot)."""
        parts: list[bytes] = []
        for uid, (indexes, units, sizes) in self.groups.items():
            parts += (_SECTION.pack(uid, len(indexes)), indexes.tobytes(), units.tobytes(), sizes.tobytes())
        raw = b"".join(parts)
        return _COUNT.pack(len(self.groups), len(raw)) + zlib.compress(raw, 1)

    def merge(self, body: memoryview) -> None:
        """Add what `encode` wrote; the body was verified by its row's hash."""
        sections, size = _COUNT.unpack_from(body)
        raw = memoryview(zlib.decompress(body[_COUNT.size :], bufsize=max(size, 1)))
        assert len(raw) == size
        at = 0
        for _ in range(sections):
            uid, count = _SECTION.unpack_from(raw, at)
            at += _SECTION.size
            found = self.groups.setdefault(uid, (array("Q"), array("I"), array("Q")))
            for column, width in zip(found, (8, 4, 8), strict=True):
                column.frombytes(raw[at : at + count * width])
                at += count * width
            self.slots += count
            self.total += sum(found[2][-count:]) if count else 0

    def ledgers(self) -> Iterator[tuple[int, Ledger]]:
        """Yield (uid, ledger) of each group."""
        for uid, (indexes, units, sizes) in self.groups.items():
            yield uid, Ledger(indexes, units, sizes)


class Marks:
    """Which slots of one (generation, run, group) are dead. All slots below `prefix` are; `dead` holds the others."""

    __slots__ = ("live", "prefix", "dead")

    def __init__(self, live: int, prefix: int = 0, dead: BitMap | None = None) -> None:
        self.live = live
        self.prefix = prefix
        self.dead = dead

    def is_dead(self, slot: int) -> bool:
        """Return whether a slot is dead."""
        return slot < self.prefix or (self.dead is not None and slot in self.dead)

    def all_dead(self, low: int, high: int) -> bool:
        """Return whether every slot from low up to, but without, high is dead."""
        low = max(low, self.prefix)
        return low >= high or (self.dead is not None and self.dead.contains_range(low, high))

    def live_slots(self, count: int) -> Iterator[int]:
        """Yield the slots still live, of `count`."""
        dead = self.dead
        for slot in range(self.prefix, count):
            if dead is None or slot not in dead:
                yield slot

    def _mark(self, ledger: Ledger, low: int, high: int) -> int:
        """Mark a range of slots; return the bytes that died now."""
        low = max(low, self.prefix)
        if low >= high:
            return 0
        freed = ledger.sums[high] - ledger.sums[low]
        if self.dead is not None:
            for slot in self.dead & BitMap(range(low, high)):
                freed -= ledger.size(slot)
        if low == self.prefix:
            self.prefix = high
            if self.dead is not None:
                self._absorb()
        else:
            if self.dead is None:
                self.dead = BitMap()
            self.dead.add_range(low, high)
        self.live -= freed
        assert self.live >= 0, "more bytes died than lived"
        return freed

    def _absorb(self) -> None:
        """Let the prefix run over the dead slots that follow it, and forget those."""
        dead = self.dead
        assert dead is not None
        self.prefix = stretch_end(dead, self.prefix)
        dead.remove_range(0, self.prefix)
        if not dead:
            self.dead = None

    def mark(self, ledger: Ledger, first: tuple[int, int], end: tuple[int, int]) -> int:
        """Mark the units from `first` up to, but without, `end` = (index, unit), and entries whose last unit died;
        return the bytes freed."""
        low, high = ledger.at(*first), ledger.at(*end)
        opening = ledger.entry(first[0]) if first[1] else None
        freed = 0
        if opening is not None and low <= opening[1] < high and not self.all_dead(opening[0], low):
            # The range begins inside an entry whose earlier units live on: so does the entry.
            freed += self._mark(ledger, low, opening[1])
            low = opening[1] + 1
        freed += self._mark(ledger, low, high)
        for index in {first[0], end[0]}:
            span = ledger.entry(index)
            if span is not None and not self.is_dead(span[1]) and self.all_dead(*span):
                freed += self._mark(ledger, span[1], span[1] + 1)
        return freed

    def encode(self) -> bytes:
        """Return live bytes, prefix and bitmap, for a checkpoint."""
        if self.dead is not None:
            self.dead.run_optimize()
        return _MARKS.pack(self.live, self.prefix) + (b"" if self.dead is None else self.dead.serialize())

    @classmethod
    def decode(cls, body: bytes) -> Marks:
        """Return what `encode` wrote; the caller verified it."""
        live, prefix = _MARKS.unpack_from(body)
        return cls(live, prefix, BitMap.deserialize(body[_MARKS.size :]) if len(body) > _MARKS.size else None)
