"""Leaderships of a node whose disk is slow go to nodes with faster ones; until that is done it is the last to campaign.

A bounded number of groups at a time, each only while nothing is under way that a transfer would cut short. Called by
`disk.slow_disk`, which knows when and to whom.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Set

from logyard.protocol.errors import Refused

from ..raft.state import LEADER
from ..replica.member import RUNNING, Member

log = logging.getLogger(__name__)

MOVES_PER_LOOK = 100
"""Leaderships handed over a second: each costs its group two round trips without a leader."""
AGAIN_SECONDS = 10.0
"""A transfer that came to nothing is tried again after this time."""


class HandOver:
    """One node's. `be_patient(n)` doubles this node's election timeouts n times; `mark(member)`: its core has something
    to say."""

    __slots__ = ("be_patient", "_members", "_mark", "_tried")

    def __init__(
        self, members: Mapping[int, Member], be_patient: Callable[[int], None], mark: Callable[[Member], None]
    ) -> None:
        self.be_patient = be_patient
        self._members = members
        self._mark = mark
        # By uid: when its last transfer was begun (s).
        self._tried: dict[int, float] = {}

    def forget_tried(self) -> None:
        """Forget what was tried: there is no reason any more."""
        self._tried.clear()

    def hand_over(self, faster: Set[int], now: float) -> int:
        """Ask heirs among these nodes to lead; return how many were asked to."""
        count = 0
        for member in list(self._members.values()):
            if count == MOVES_PER_LOOK:
                break
            if self._may_go(member, now):
                heir = next((node for node in member.raft.heirs() if node in faster), 0)
                count += bool(heir) and self._transfer(member, heir, now)
        return count

    def _may_go(self, member: Member, now: float) -> bool:
        raft = member.raft
        return (
            raft.role == LEADER
            and member.state == RUNNING
            and not raft.stopped
            and not raft.transferring
            and raft.commit >= raft.lead_index
            and now - self._tried.get(member.uid, -AGAIN_SECONDS) >= AGAIN_SECONDS
        )

    def _transfer(self, member: Member, heir: int, now: float) -> bool:
        self._tried[member.uid] = now
        try:
            member.raft.transfer(heir)
        except Refused as error:
            log.info("group %s is not handed over: %s", member.spec.name, error)
            return False
        self._mark(member)
        return True
