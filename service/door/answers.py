"""Bytes of answers: what is being read for them, and what waits to be sent, for one client door.

Invariant: room is taken before an answer's bytes are read, so a client that reads nothing costs at most
`CONNECTION_BYTES` of its own, and all of them `limit`. The door tells the task of each call where its room is;
whoever reads payloads for an answer asks for it, as late as it can: a poll that waits for records holds none. Called by
`server`, and by the readers of payloads.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import TypeAlias

import trio

CONNECTION_BYTES = 16 << 20
"""Of one connection: above it nothing more is read for it."""
STALL_S = 2.0
"""While others wait for room, a client that takes nothing of its answers for so long is cut."""

Take: TypeAlias = Callable[[int], Awaitable[None]]
TAKE: ContextVar[Take] = ContextVar("logyard_answer_room")
"""How the call of this task takes room."""
GIVE_BACK: ContextVar[Callable[[], None]] = ContextVar("logyard_answer_room_back")
"""How it gives all of it back, before its end."""


async def take(size: int) -> None:
    """Wait until about `size` bytes may be read for the answer of this task's call. Nothing to wait for elsewhere."""
    found = TAKE.get(None)
    if found is not None:
        await found(size)


def give_back() -> None:
    """Count what a call that lasts has read and pushed as what waits to be sent from here on."""
    found = GIVE_BACK.get(None)
    if found is not None:
        found()


class AnswerBytes:
    """`used` bytes of `limit`: taken and not computed yet, or not sent."""

    __slots__ = ("limit", "used", "waiting", "changed")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.waiting = 0
        self.changed = trio.lowlevel.ParkingLot()

    def count(self, size: int) -> None:
        """Count so many bytes more, or less."""
        self.used += size
        if size < 0 and self.changed:
            self.changed.unpark_all()

    def fits(self, size: int) -> bool:
        """Return whether `size` bytes more have room; what is above the limit alone does so when there is nothing
        else."""
        return not self.used or self.used + size <= self.limit

    async def wait(self) -> None:
        """Wait until something was sent, or ended."""
        self.waiting += 1
        try:
            await self.changed.park()
        finally:
            self.waiting -= 1
