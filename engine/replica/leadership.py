"""Who leads a group, and what only that decides: when a read is linearizable, and to whom leadership goes.

Invariant: a read's index is one that a quorum confirmed after the read was asked for (ReadIndex, Raft thesis 6.4).
Called by the doors of the node.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio

from logyard.protocol.errors import NotLeader, Refused
from logyard.protocol.pending import PendingReply

from ..raft.state import LEADER
from .member import Member
from .submit import check_leader

log = logging.getLogger(__name__)

TRANSFER_SECONDS = 10.0
"""A leader gives a transfer up after an election timeout; so long its caller waits to hear who leads then."""


async def wait(member: Member, condition: Callable[[], bool]) -> None:
    """Wait until `condition` holds after some apply of `member`. Raises `GroupStopped`."""
    if condition():
        return
    # Nothing is applied any more that could wake it.
    member.check_running()
    event = trio.Event()
    pair = (condition, event.set)
    member.add_waiter(pair)
    try:
        await event.wait()
    finally:
        member.drop_waiter(pair)
    member.check_running()


class Leadership:
    """Asks groups' cores who leads. `find` gives a group's member by its name, or raises `UnknownGroup`; `mark` says
    that a member has something to do."""

    def __init__(
        self,
        node_id: int,
        election_seconds: float,
        find: Callable[[str], Member],
        mark: Callable[[Member], None],
    ) -> None:
        self._node_id = node_id
        self._election_seconds = election_seconds
        self._find = find
        self._mark = mark
        self._contexts = 0

    async def read_index(self, member: Member) -> int:
        """Return a linearizable read's index: applied when this returns (ReadIndex). Raises `NotLeader`."""
        member.check_running()
        self._contexts += 1
        context = self._contexts
        pending: PendingReply[int] = PendingReply()
        member.raft.read(context)
        member.add_read(context, pending)
        self._mark(member)
        try:
            index = await pending.wait(trio.Event)
        finally:
            member.drop_read(context)
        await wait(member, lambda: member.raft.applied >= index)
        return index

    async def led(self, member: Member) -> None:
        """Wait until this node, which leads the group, has applied what was committed before its term: what it says
        then is never behind what earlier leaders acknowledged. Raises `NotLeader`, also when that takes longer than an
        election."""
        check_leader(member)
        raft = member.raft
        if raft.applied >= raft.lead_index:
            return
        term = raft.term
        with trio.move_on_after(self._election_seconds):
            await wait(member, lambda: raft.applied >= raft.lead_index or raft.term != term)
        check_leader(member)
        if raft.applied < raft.lead_index or raft.term != term:
            raise NotLeader(0)

    async def transfer(self, name: str, node: int) -> None:
        """Move a group's leadership to `node`; return when this member follows it. Raises `Refused`, `NotLeader`."""
        member = self._find(name)
        if member.raft.role != LEADER:
            raise NotLeader(member.raft.leader)
        member.raft.transfer(node)
        self._mark(member)
        raft = member.raft
        # Between stepping down and hearing of the new leader nobody is known to lead: that is not yet an outcome.
        # There may never be one: the others may have died meanwhile.
        with trio.move_on_after(TRANSFER_SECONDS):
            await wait(
                member, lambda: raft.leader not in (0, self._node_id) or (raft.role == LEADER and not raft.transferring)
            )
        if raft.leader != node:
            raise Refused(f"group {name!r}: node {node} did not take over in time; node {raft.leader} leads")

    def campaign(self, name: str) -> None:
        """Let this node's member ask to lead, now. Who knows a live leader denies it (see `transfer`). Raises
        `UnknownGroup`, `GroupStopped`."""
        member = self._find(name)
        member.check_running()
        member.raft.campaign()
        self._mark(member)

    async def force_shrink(self, name: str) -> int:
        """Make this node's member the only voter of a group whose quorum is gone for good; return the index of the
        configuration when it is committed. What is lost: see `engine.raft.election.force`. Raises `Refused`."""
        member = self._find(name)
        member.check_running()
        if not member.resolves:
            raise Refused(f"group {name!r}: this member lacks payloads that the others were to bring")
        index = member.raft.force_shrink()
        log.warning("group %s: node %d made itself the only voter, entry %d", name, self._node_id, index)
        self._mark(member)
        await wait(member, lambda: member.raft.applied >= index)
        return index
