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

TURN_TICKS = 40
"""More than the longest election timeout: of one that is not denied."""


class Elections:
    """One node's. `live`: the nodes that are up, this one among them; `most`: how many may stand at once."""

    __slots__ = ("_node", "_live", "_most", "_tick", "_standing", "_asked", "_own", "_others")

    def __init__(self, node: int, live: Container[int], most: int) -> None:
        self._node = node
        self._live = live
        self._most = most
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
        """Begin a tick: return the members whose turn begins, to be ticked from now on. They campaign at once."""
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
                    member.raft.campaign()
        return found

    def stands(self, member: Member) -> bool:
        """Return whether a member that knows no leader is to be ticked on; if not, it waits for its turn from now
        on."""
        if member.raft.mend is not None:
            # It asks for what it lost.
            return True
        began = self._standing.get(member)
        if began is None:
            if len(self._standing) < self._most and not self.is_waiting:
                self._standing[member] = self._tick
                return True
            if member not in self._asked:
                voters = [node for node in member.raft.configuration.voters if node in self._live]
                mine = first_leader(member.uid, voters) == self._node
                (self._own if mine else self._others).setdefault(member)
            return False
        if self._tick - began < TURN_TICKS or not self.is_waiting:
            return True
        del self._standing[member]
        self._others[member] = None
        return False

    def ask(self, member: Member) -> None:
        """Let a member come first: somebody is going to use it."""
        for queue in (self._own, self._others):
            if member in queue:
                del queue[member]
                self._asked[member] = None


def _has_settled(member: Member) -> bool:
    """Return whether a member needs no election, or may begin none."""
    raft = member.raft
    return raft.stopped or raft.leader != 0 or raft.is_quiet
