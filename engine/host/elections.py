"""Whose turn it is to stand for election, when many groups lose their leader at once.

A node that dies may have led tens of thousands of groups. If all of the others' members campaign within an election
timeout, no election ends before the next begins, and none ever does. So of the members here that know no leader no more
than `STANDING_MAX` are ticked at a time; the others neither campaign nor count time until it is their turn, and take
part in elections that other nodes begin. First come groups that somebody asks for, then those that this node is to lead
(of the voters that live each has a share, so that two do not campaign for one group), then the rest, which by then have
leaders. Invariants: who stands without success makes room after `TURN_TICKS` while others wait; who waits is ticked
again. Nothing here decides an election. Called by `ticker`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container

from ..replica.build import first_leader
from ..replica.member import Member

STANDING_MAX = 256
"""Elections of so many groups are some tens of milliseconds of the loop: one tick's."""
TURN_TICKS = 40
"""More than the longest election timeout: of one that is not denied."""


class Elections:
    """One node's. `live`: the nodes that are up, this one among them; `most`: how many stand at once, if not the usual number."""

    __slots__ = ("_node", "_live", "_most", "_tick", "_standing", "_asked", "_own", "_others")

    def __init__(self, node: int, live: Container[int], most: int = 0) -> None:
        self._node = node
        self._live = live
        self._most = most or STANDING_MAX
        self._tick = 0
        self._standing: dict[Member, int] = {}
        self._asked: OrderedDict[Member, None] = OrderedDict()
        self._own: OrderedDict[Member, None] = OrderedDict()
        self._others: OrderedDict[Member, None] = OrderedDict()

    @property
    def is_waiting(self) -> bool:
        """Whether any member waits for its turn."""
        return bool(self._asked or self._own or self._others)

    def begin(self) -> list[Member]:
        """Begin a tick: return the members whose turn begins, to be ticked from now on."""
        self._tick += 1
        standing = self._standing
        for member in [member for member in standing if _has_settled(member)]:
            del standing[member]
        found: list[Member] = []
        for queue in (self._asked, self._own, self._others):
            while queue and len(standing) < self._most:
                member, _ = queue.popitem(last=False)
                if not _has_settled(member):
                    standing[member] = self._tick
                    found.append(member)
                    if queue is self._own:
                        member.raft.campaign()
        return found

    def stands(self, member: Member) -> bool:
        """Return whether a member that knows no leader is to be ticked on; if not, it waits for its turn from now on.
        One that waits already, and is active again, is asked for."""
        if member.raft.mend is not None:
            # It asks for what it lost.
            return True
        began = self._standing.get(member)
        if began is None:
            if len(self._standing) < self._most and not self.is_waiting:
                self._standing[member] = self._tick
                return True
            self._queue(member)
            return False
        if self._tick - began < TURN_TICKS or not self.is_waiting:
            return True
        del self._standing[member]
        self._others[member] = None
        return False

    def _queue(self, member: Member) -> None:
        if member in self._asked:
            return
        if member in self._own or member in self._others:
            self._own.pop(member, None)
            self._others.pop(member, None)
            self._asked[member] = None
            return
        voters = [node for node in member.raft.configuration.voters if node in self._live]
        queue = self._own if first_leader(member.uid, voters) == self._node else self._others
        queue[member] = None


def _has_settled(member: Member) -> bool:
    """Return whether a member needs no election, or may begin none."""
    raft = member.raft
    return raft.stopped or raft.leader != 0 or raft.is_quiet
