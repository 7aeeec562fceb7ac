"""Changes of who is a member of a group, on its leader, and whether they are committed. Made by `node`.

What a change means for the log and for quorums is `engine.raft.membership`'s; here only what a caller may ask, and when
it is done.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

from logyard.engine.raft.configuration import KINDS, Change
from logyard.engine.raft.state import LEADER
from logyard.engine.replica.leadership import wait
from logyard.engine.replica.member import Member
from logyard.engine.replica.submit import check_leader
from logyard.protocol.errors import BadRequest, GroupStopped, NotLeader, Refused, Unknown


class Membership:
    """Proposes changes. `find` gives a group's member, or raises `UnknownGroup`; `nodes` are the others that are
    configured; `check_room(member, nodes)` raises `Refused` where one of them can't have the group; `mark` says that a
    member has something to do."""

    def __init__(
        self,
        node_id: int,
        find: Callable[[str], Member],
        nodes: Callable[[], Collection[int]],
        check_room: Callable[[Member, set[int]], Awaitable[None]],
        mark: Callable[[Member], None],
    ) -> None:
        self._node_id = node_id
        self._find = find
        self._nodes = nodes
        self._check_room = check_room
        self._mark = mark

    async def change_members(self, name: str, change: str, node: int, target: int = 0) -> dict[str, Any]:
        """Make one change; see `change_membership`."""
        return await self.change_membership(name, [(change, node, target)])

    async def change_membership(
        self, name: str, changes: Sequence[Sequence[Any]], auto_leave: bool = True
    ) -> dict[str, Any]:
        """Make changes (kind, node, target or nothing) that take effect as one; on the leader. Kinds: see
        `engine.raft.configuration.Change`. Return the configuration when it is committed, and, unless `auto_leave` is
        False, a joint one is left. Raises `NotLeader`, `BadRequest`, `Refused` with the reason; `Unknown` where another
        leader's snapshot took its place meanwhile."""
        steps = [Change(str(kind), int(node), *map(int, rest)) for kind, node, *rest in changes]
        for kind, node, _ in steps:
            if kind not in KINDS:
                raise BadRequest(f"{kind!r} is no membership change; use one of {', '.join(KINDS)}")
            if kind != "remove" and node != self._node_id and node not in self._nodes():
                raise BadRequest(f"node {node} is not one of this cluster's: its address is not configured here")
        member = self._find(name)
        check_leader(member)
        fresh = {step.node for step in steps if step.kind != "remove"} - member.raft.configuration.nodes()
        await self._check_room(member, fresh)
        # The group may have slept, gone, or got another leader meanwhile: what is proposed is so to the member of now.
        uid, member = member.uid, self._find(name)
        if member.uid != uid:
            raise Refused(f"{name!r} was deleted and made anew meanwhile")
        check_leader(member)
        index = member.raft.propose_membership(steps, auto_leave=auto_leave)
        return await self._configured(member, index, auto_leave)

    async def leave_joint(self, name: str) -> dict[str, Any]:
        """End a joint configuration that was entered without `auto_leave`; on the leader."""
        member = self._find(name)
        check_leader(member)
        return await self._configured(member, member.raft.leave_joint(), True)

    async def _configured(self, member: Member, index: int, left: bool) -> dict[str, Any]:
        """Return the configuration when the entry at `index` is committed, and, if `left`, it is joint no more."""
        raft = member.raft
        term = raft.term
        self._mark(member)
        try:
            await wait(member, lambda: raft.applied >= index or raft.log.term(index) != term)
            if raft.log.term(index) not in (term, None) or raft.applied < index:
                # Another leader's entries took its place: it is not committed and never will be.
                raise NotLeader(raft.leader)
            if raft.log.term(index) is None and raft.term != term:
                raise Unknown("a snapshot replaced this member's log: whether the change is committed is not known")
            if left:
                await wait(member, lambda: not raft.applied_configuration.joint or raft.role != LEADER)
        except GroupStopped:
            # A leader that removed itself may be told, and gone, before this task goes on.
            if raft.applied < index:
                raise
        found = raft.configuration
        return {
            "voters": list(found.voters), "learners": list(found.learners), "outgoing": list(found.outgoing),
            "promotable": [list(pair) for pair in found.promotable], "index": index,
        }  # fmt: skip
