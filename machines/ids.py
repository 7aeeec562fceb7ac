"""Numbers that machines give out: the lowest free one, so a restored replica gives out the same ones.

Part of a machine's state: packed into its snapshot, and equal on every member at every index.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


class Ids:
    """Numbers from `first` up. Those that come back are given out again, the lowest first, before any new one."""

    __slots__ = ("next", "_free", "_heap")

    def __init__(self, first: int = 1) -> None:
        self.next = first
        self._free: set[int] = set()
        self._heap: list[int] = []

    def take(self) -> int:
        """Return the lowest number that nobody has."""
        if self._heap:
            found = heapq.heappop(self._heap)
            self._free.discard(found)
            return found
        self.next += 1
        return self.next - 1

    def give(self, number: int) -> None:
        """Take a number back. Raises ValueError for one that nobody has."""
        if number >= self.next or number in self._free:
            raise ValueError(f"{number} is not given out")
        self._free.add(number)
        heapq.heappush(self._heap, number)

    def pack(self) -> list[int]:
        """Return, for a snapshot, the next new number, and the free ones below it in order."""
        return [self.next, *sorted(self._free)]

    @classmethod
    def unpack(cls, packed: Sequence[int]) -> Ids:
        """Return the ids that `pack` gave."""
        found = cls(packed[0])
        found._heap = list(packed[1:])
        found._free = set(found._heap)
        return found
