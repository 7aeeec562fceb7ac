"""Whose turn it is to stand for election, when many groups lose their leader at once.

A node that dies may have led tens of thousands of groups. If all of the others' members campaign within an election
timeout, no election ends before the next begins, and none ever does. So of the members here that know no leader no more
than `election_groups` are ticked at a time; the others neither campaign nor count time until it is their turn, and
take part in elections that other nodes begin. First come groups that somebody asks for, then those that this node is to
lead (of the voters that live each has a share, so that two do not campaign for one group), then the rest, which by then
have leaders, and at last those without a quorum of nodes that live. Invariants: who campaigns at once does so when the
others can know that the leader is gone, and where this node is to lead; who stands without success makes room
after its turn while others wait, at once where it has no quorum, and comes behind them; who waits is ticked again;
while there is room for all, nothing is done here. Nothing here decides an election. Called by `ticker`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container

from ..raft.quorum import first_leader, has_quorum
from ..raft.state import FOLLOWER
from ..replica.member import Member

TURN = 4
"""A turn in election timeouts of the shortest kind: two campaigns of one that is not denied."""
NOTICED = 2
"""Ticks after which other nodes know as well that one is gone: until then they deny campaigns for its sake."""


class Elections:
    """One node's. `live`: the nodes that are up, this one among them; `most`: how many may stand at once."""

    __slots__ = ("_node", "_live", "_most", "_tick", "_standing", "_early", "_asked", "_own", "_others", "_hopeless")

    def __init__(self, node: int, live: Container[int], most: int) -> None:
        self._node = node
        self._live = live
        self._most = most
        # From 1: since when somebody waits is 0 only after a turn.
        self._tick = 1
        # When the turn of each began.
        self._standing: dict[Member, int] = {}
        # Of these, who took a place that was free, in the last ticks.
        self._early: list[Member] = []
        # Beside each that waits: since when; 0 if it had a turn before.
        self._asked: OrderedDict[Member, int] = OrderedDict()
        self._own: OrderedDict[Member, int] = OrderedDict()
        self._others: OrderedDict[Member, int] = OrderedDict()
        self._hopeless: OrderedDict[Member, int] = OrderedDict()

    @property
    def is_waiting(self) -> bool:
        """Whether any member waits for its turn."""
        return bool(self._asked or self._own or self._others or self._hopeless)

    def begin(self) -> list[Member]:
        """Begin a tick: return the members whose turn begins, to be ticked from now on. They campaign at once, but for
        those that another node is to lead, while that has had little time (also of one that is asked for: the other
        node was asked as well), and those of a node that is to lead only where no other one does."""
        self._tick += 1
        standing = self._standing
        crowded = bool(self._asked or self._own or self._others)
        for member in list(standing):
            if _has_settled(member):
                del standing[member]
            elif crowded and not self._has_quorum(member):
                del standing[member]
                self._hopeless[member] = 0
        self._look_at_early(crowded)
        found: list[Member] = []
        for queue in (self._asked, self._own, self._others, self._hopeless):
            # What is put behind others is not looked at twice.
            for _ in range(len(queue)):
                member, since = next(iter(queue.items()))
                if len(standing) >= self._most or self._tick - since < NOTICED - 1:
                    break
                del queue[member]
                if _has_settled(member):
                    continue
                if queue is not self._hopeless and not self._has_quorum(member):
                    self._hopeless[member] = 0
                    continue
                standing[member] = self._tick
                found.append(member)
                waits = queue is self._others or (queue is self._asked and not self._is_own(member))
                if not waits or self._tick - since >= _turn(member):
                    _campaign(member)
        return found

    def _look_at_early(self, crowded: bool) -> None:
        """Have those that came before there were too many not wait for their time while they have a place, nor have one
        before those that this node is to lead."""
        early, self._early = self._early, []
        for member in early:
            began = self._standing.get(member, 0)
            if began > self._tick - NOTICED:
                self._early.append(member)
            elif not began or not crowded or member.raft.limits.patience:
                continue
            elif self._is_own(member):
                _campaign(member)
            elif self._asked or self._own:
                del self._standing[member]
                self._others[member] = began

    def stands(self, member: Member) -> bool:
        """Return whether a member that knows no leader is to be ticked on; if not, it waits for its turn from now
        on."""
        raft = member.raft
        if raft.mend is not None or not raft.voter or not raft.may_lead:
            # It asks for what it lost, or for whoever leads.
            return True
        began = self._standing.get(member)
        if began is None:
            if len(self._standing) < self._most and not self.is_waiting:
                self._standing[member] = self._tick
                self._early.append(member)
                return True
            self._queue(member)
            return False
        if self._tick - began < _turn(member) or not self.is_waiting:
            return True
        del self._standing[member]
        (self._others if self._has_quorum(member) else self._hopeless)[member] = 0
        return False

    def _queue(self, member: Member) -> None:
        if member in self._asked or self._others.get(member) == 0:
            return
        if member in self._hopeless:
            if not self._has_quorum(member):
                return
            del self._hopeless[member]
        # Whose it is may have changed with the nodes that live.
        queue, other = (self._own, self._others) if self._is_own(member) else (self._others, self._own)
        queue.setdefault(member, other.pop(member, self._tick + 1))

    def ask(self, member: Member) -> None:
        """Let a member come first, if it had no turn yet: somebody is going to use it."""
        for queue in (self._own, self._others):
            since = queue.get(member)
            if since:
                del queue[member]
                self._asked[member] = since

    def _is_own(self, member: Member) -> bool:
        """Return whether this node is to lead, of those that live and may do so as well as others."""
        voters = [node for node in member.raft.configuration.voters if node in self._live]
        return first_leader(member.uid, voters) == self._node and not member.raft.limits.patience

    def _has_quorum(self, member: Member) -> bool:
        return has_quorum(member.raft.configuration, self._live)


def _turn(member: Member) -> int:
    """Return the ticks of one member's turn."""
    return TURN * member.raft.limits.election_ticks


def _campaign(member: Member) -> None:
    """Let a member campaign now, if it does not yet, and is not to lead only where nobody else does."""
    raft = member.raft
    if raft.role == FOLLOWER and not raft.limits.patience:
        raft.campaign()


def _has_settled(member: Member) -> bool:
    """Return whether a member needs no election, or may begin none."""
    raft = member.raft
    return raft.stopped or raft.leader != 0 or raft.is_quiet
