"""Bytes that all client connections hold: received, or about to be, and not answered.

Invariants: a large frame's memory is counted before it is allocated, and frames that find no room get it in the order
in which they asked, each whole, so that neither many small ones nor an endless stream of others starve it. What is
larger than the limit goes alone. A share of the limit is kept for small frames. Called by `rpc`, one for each node.
"""

from __future__ import annotations

from collections import deque

import trio


class Waiting:
    """A large frame in line; `granted` once its bytes are counted."""

    __slots__ = ("size", "granted", "event")

    def __init__(self, size: int) -> None:
        self.size = size
        self.granted = False
        self.event = trio.Event()


class Room:
    """`used` bytes of `limit`; large frames get up to `large_limit` of them."""

    __slots__ = ("limit", "large_limit", "used", "_line", "_small")

    def __init__(self, limit: int, reserved_ratio: float) -> None:
        self.limit = limit
        self.large_limit = int(limit * (1.0 - reserved_ratio))
        self.used = 0
        self._line: deque[Waiting] = deque()
        self._small = trio.lowlevel.ParkingLot()

    @property
    def waiting(self) -> int:
        """Large frames in line."""
        return len(self._line)

    @property
    def full(self) -> bool:
        """Even small frames have to wait, those of connections that wait for answers already."""
        return self.used >= self.limit

    def count(self, size: int) -> None:
        """Bytes that were received into a connection's own buffer."""
        self.used += size

    def give(self, size: int) -> None:
        """Bytes that were answered or dropped."""
        self.used -= size
        assert self.used >= 0
        line = self._line
        while line and self._fits(line[0].size):
            first = line.popleft()
            self.used += first.size
            first.granted = True
            first.event.set()
        if self._small and not self.full:
            self._small.unpark_all()

    def _fits(self, size: int) -> bool:
        return not self.used or self.used + size <= self.large_limit

    async def take(self, size: int) -> None:
        """Count `size` bytes, as soon as there is room and nobody waits longer."""
        if not self._line and self._fits(size):
            self.used += size
            return
        mine = Waiting(size)
        self._line.append(mine)
        try:
            await mine.event.wait()
        except BaseException:
            if mine.granted:
                self.give(size)
            else:
                self._line.remove(mine)
                self.give(0)
            raise

    async def wait_small(self) -> None:
        """Until small frames are taken again."""
        while self.full:
            await self._small.park()
