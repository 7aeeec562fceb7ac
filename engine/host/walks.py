"""What has to be done to every member of a node, in steps: a node that appears or dies concerns all groups at once.

Invariant: a step is at most so many members, and then others have their turn; the first one is taken at once, so a node
with few groups notices nothing of this. What is done twice, or late, must be harmless: it looks at the state of then.
Called by `inbound` and `ticker`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from itertools import islice

import trio

from ..replica.member import Member

STEP = 256
"""Members a step, and so in the turn that follows it: some 10 ms of the loop each."""


class Walks:
    """One node's, in the order they were begun. `spawn` starts a task of the node."""

    __slots__ = ("_members", "_spawn", "_queue")

    def __init__(self, members: Mapping[int, Member], spawn: Callable[[Callable[[], Awaitable[None]]], None]) -> None:
        self._members = members
        self._spawn = spawn
        self._queue: deque[tuple[Callable[[Member], None], Iterator[Member]]] = deque()

    def over_members(self, act: Callable[[Member], None]) -> None:
        """Call `act` with every member there is now that still runs when it is its turn."""
        walk = (act, iter(list(self._members.values())))
        if self._queue:
            self._queue.append(walk)
        elif self._step(*walk):
            self._queue.append(walk)
            self._spawn(self._run)

    async def _run(self) -> None:
        while self._queue:
            await trio.lowlevel.cancel_shielded_checkpoint()
            if not self._step(*self._queue[0]):
                self._queue.popleft()

    def _step(self, act: Callable[[Member], None], members: Iterator[Member]) -> bool:
        """Act on the next members; return whether there may be more."""
        count = 0
        for member in islice(members, STEP):
            count += 1
            if not member.raft.stopped:
                act(member)
        return count == STEP
