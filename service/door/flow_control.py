"""Bytes that all client connections hold: received, or about to be, and not answered.

Invariants: a large frame's bytes are counted before they are received, a step at a time, so that announcing many takes
nothing from others. Frames that find no room get it in the order in which they asked; who has begun comes before who
has not, and of those that find none one at a time goes on above the limit, so that each frame ends. A share of the
limit is kept for small frames. Called by `server`, one for each node.
"""

from __future__ import annotations

from collections import deque

import trio

STEP_BYTES = 4 << 20
"""Of a frame larger than this so much is counted at a time."""


class Waiting:
    """A large frame in line; `granted` once its bytes are counted. `frame` names one that has begun."""

    __slots__ = ("size", "frame", "granted", "event")

    def __init__(self, size: int, frame: object = None) -> None:
        self.size = size
        self.frame = frame
        self.granted = False
        self.event = trio.Event()

    def grant(self) -> None:
        """Let it go on: its bytes are counted."""
        self.granted = True
        self.event.set()


class Room:
    """`used` bytes of `limit`; large frames get up to `large_limit` of them."""

    __slots__ = ("limit", "large_limit", "used", "_begun", "_line", "_small", "_above")

    def __init__(self, limit: int, reserved_ratio: float) -> None:
        self.limit = limit
        self.large_limit = int(limit * (1.0 - reserved_ratio))
        self.used = 0
        self._begun: deque[Waiting] = deque()
        self._line: deque[Waiting] = deque()
        # The frame that goes on although there is no room.
        self._above: object = None
        self._small = trio.lowlevel.ParkingLot()

    @property
    def waiting(self) -> int:
        """Large frames in line."""
        return len(self._line) + len(self._begun)

    @property
    def full(self) -> bool:
        """Even small frames have to wait, those of connections that wait for answers already."""
        return self.used >= self.limit

    def count(self, size: int) -> None:
        """Count bytes that were received into a connection's own buffer."""
        self.used += size

    def give(self, size: int) -> None:
        """Give back the room of bytes that were answered or dropped."""
        self.used -= size
        assert self.used >= 0
        begun = self._begun
        while begun and self._goes_on(begun[0].size, begun[0].frame):
            self._grant(begun.popleft())
        line = self._line
        while line and not begun and self._fits(line[0].size):
            self._grant(line.popleft())
        if self._small and not self.full:
            self._small.unpark_all()

    def _grant(self, first: Waiting) -> None:
        self.used += first.size
        first.grant()

    def _goes_on(self, size: int, frame: object) -> bool:
        if self._above is frame or self._fits(size):
            return True
        if self._above is not None:
            return False
        self._above = frame
        return True

    def _fits(self, size: int) -> bool:
        return not self.used or self.used + size <= self.large_limit

    def takes(self, size: int) -> bool:
        """Count `size` bytes if there is room and nobody waits longer; return whether."""
        if self._line or self._begun or not self._fits(size):
            return False
        self.used += size
        return True

    async def take(self, size: int) -> None:
        """Count `size` bytes, as soon as there is room and nobody waits longer."""
        if not self.takes(size):
            await self._wait(Waiting(size), self._line)

    async def go_on(self, size: int, frame: object) -> None:
        """Count the next `size` bytes of a frame that has begun, whose end is told to `ended`."""
        if self._above is frame or (not self._begun and self._goes_on(size, frame)):
            self.used += size
            return
        await self._wait(Waiting(size, frame), self._begun)

    def ended(self, frame: object) -> None:
        """Take note that a frame is complete, or comes no more."""
        if self._above is frame:
            self._above = None
            self.give(0)

    async def _wait(self, mine: Waiting, line: deque[Waiting]) -> None:
        line.append(mine)
        try:
            await mine.event.wait()
        except BaseException:
            if mine.granted:
                self.give(mine.size)
            else:
                line.remove(mine)
                self.give(0)
            raise

    async def wait_small(self) -> None:
        """Wait until small frames are taken again."""
        while self.full:
            await self._small.park()
