"""How current a read is: the member that answers it, when it may.

`local` reads this member as it is, `leader` the leader, once it has applied what was committed before its term, without
asking anybody, `linearizable` after a ReadIndex round, `bounded` any member, once it has applied what was committed so
and so long ago (`engine.host.follower_reads`). Used by the verbs of logs and of KV, and by `node`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from logyard.engine.replica.member import Member
from logyard.engine.replica.submit import check_leader
from logyard.protocol.errors import BadRequest


class Waits(NamedTuple):
    """What a member waits for before it may answer."""

    led: Callable[[Member], Awaitable[None]]
    """What was committed before its term is applied: it leads."""
    read_index: Callable[[Member], Awaitable[object]]
    """A ReadIndex round, and its index is applied."""
    within: Callable[[Member, float], Awaitable[None]]
    """What was committed so many seconds ago is applied."""


class Consistency:
    """Gives members to read from. `find(name, uid)` gives a group's member, or raises `UnknownGroup`."""

    __slots__ = ("_find", "_waits")

    def __init__(self, find: Callable[[str, int], Member], waits: Waits) -> None:
        self._find = find
        self._waits = waits

    async def member(self, name: str, consistency: str, staleness_s: float = 0.0, uid: int = 0) -> Member:
        """Return the member of a group, once a read of it is as consistent as that. `uid`: unless the name is another
        group's by now. Raises `NotLeader`, `UnknownGroup`, `Busy` when nobody can tell how old this member's state
        is."""
        member = self._find(name, uid)
        if consistency == "leader":
            await self._waits.led(member)
        elif consistency == "linearizable":
            check_leader(member)
            await self._waits.read_index(member)
        elif consistency == "bounded":
            await self._waits.within(member, staleness_s)
        elif consistency != "local":
            raise BadRequest(f"consistency {consistency!r} is not one of local, leader, linearizable, bounded")
        return member
