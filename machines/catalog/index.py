"""Numbers of rows by a key of theirs, without the keys: some twenty bytes a row.

A hash table with open addressing. A slot holds 32 bits of the key's hash above the number; whether the key is the one
looked for, the row itself says. A number that goes leaves no mark: those behind it in its run move up (Knuth, The Art
of Computer Programming 3, algorithm 6.4R).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Generic, TypeVar

BITS = 32
TAG = (1 << BITS) - 1
SPREAD = 0x9E3779B97F4A7C15
"""The golden ratio of 2**64: numbers in a row come to lie apart."""
SLOTS_MIN = 16


Row = TypeVar("Row")


class Index(Generic[Row]):
    """Numbers (1 to 2**32 - 1) by key. `row_of(number)` returns a row that is there, `key_of(row)` its key."""

    __slots__ = ("_row_of", "_key_of", "_slots", "_mask", "_count")

    def __init__(self, row_of: Callable[[int], Row], key_of: Callable[[Row], str | int]) -> None:
        self._row_of = row_of
        self._key_of = key_of
        self._resize(SLOTS_MIN, array("Q"))
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: str | int) -> bool:
        return self.get(key) is not None

    def get(self, key: str | int) -> int | None:
        """Return the number of the row that has a key, or None. Rows must be there for as long as their numbers are."""
        found = self.find(key)
        return None if found is None else found[0]

    def find(self, key: str | int) -> tuple[int, Row] | None:
        """Return the same with the row, which is read once."""
        tag = _tag(key)
        place = tag & self._mask
        while slot := self._slots[place]:
            if slot >> BITS == tag and self._key_of(row := self._row_of(slot & TAG)) == key:
                return slot & TAG, row
            place = (place + 1) & self._mask
        return None

    def add(self, key: str | int, number: int) -> None:
        """Store the number of a row whose key no other has."""
        if 3 * self._count >= 2 * len(self._slots):
            self._resize(2 * len(self._slots), self._slots)
        self._store(_tag(key) << BITS | number)
        self._count += 1

    def discard(self, key: str | int, number: int) -> None:
        """Forget a number, if it was stored under that key."""
        slots, mask = self._slots, self._mask
        wanted = _tag(key) << BITS | number
        hole = wanted >> BITS & mask
        while slots[hole] != wanted:
            if not slots[hole]:
                return
            hole = (hole + 1) & mask
        place = (hole + 1) & mask
        while slot := slots[place]:
            # It may move up unless its own place lies behind the hole.
            if (place - (slot >> BITS)) & mask >= (place - hole) & mask:
                slots[hole] = slot
                hole = place
            place = (place + 1) & mask
        slots[hole] = 0
        self._count -= 1

    def _store(self, slot: int) -> None:
        place = slot >> BITS & self._mask
        while self._slots[place]:
            place = (place + 1) & self._mask
        self._slots[place] = slot

    def _resize(self, size: int, slots: array[int]) -> None:
        self._slots = array("Q", bytes(8 * size))
        self._mask = size - 1
        for slot in filter(None, slots):
            self._store(slot)


def _tag(key: str | int) -> int:
    return hash(key) * SPREAD >> BITS & TAG
