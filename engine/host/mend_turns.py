"""Whose turn it is to be mended, when a scrub found damage in records of a group that runs.

A member that lost records does not count until it is mended (`damage`, docs/internals/repair.md). Two of three at once
would leave nobody to mend them, although each has what the other lacks. So who finds damage asks its leader, which lets
one go at a time, and only while a quorum goes on without it; until then the member serves on as it did before anybody
looked. A leader that is damaged itself first lets go those who lack nothing that it lacks. This is about availability
alone: damage that a read or a start meets is mended at once, and what one leader allowed the next does not know. Called
by `scrub` and `inbound`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

import trio

from ..raft.core import LEADER
from ..raft.quorum import has_quorum
from ..replica.member import RUNNING, Member
from ..transport.blobs import MEND_ASK, MEND_TURN, SendBlob

ANSWER_S = 2.0
HELD_S = 10.0
"""So long a turn is kept until its holder says that it is damaged; from then on the leader sees for itself."""


class MendTurns:
    """One node's: what it asks, and what it allows for the groups that it leads. `live`: the nodes that are up, this
    one among them; `find` wakes a group's member."""

    def __init__(self, node_id: int, live: Set[int], find: Callable[[int], Member | None], send: SendBlob) -> None:
        self._node_id = node_id
        self._live = live
        self._find = find
        self._send = send
        self._asked: dict[int, tuple[trio.Event, list[bool]]] = {}
        self._next = 0
        # By uid: who may, until when.
        self._turns: dict[int, tuple[int, float]] = {}
        # By uid: the highest damaged entry of a member here that waits for its turn.
        self.waiting: dict[int, int] = {}

    async def may_begin(self, member: Member, first: int) -> bool:
        """Return whether this node's member, which needs all entries from `first` on, may stop counting now. False,
        too, while no leader answers."""
        leader = member.raft.leader
        if member.raft.role == LEADER:
            return self._allow(member, self._node_id, first)
        self._next += 1
        request, answered, answer = self._next, trio.Event(), [False]
        self._asked[request] = answered, answer
        try:
            if leader and self._send(leader, MEND_ASK, request, {"uid": member.uid, "first": first}):
                with trio.move_on_after(ANSWER_S):
                    await answered.wait()
        finally:
            del self._asked[request]
        return answer[0]

    def on_blob(self, node: int, kind: int, request: int, header: Mapping[str, Any]) -> None:
        """Take the question of another node, or its answer."""
        if kind == MEND_ASK:
            member = self._find(header["uid"])
            ok = member is not None and self._allow(member, node, header["first"])
            self._send(node, MEND_TURN, request, {"ok": ok})
        elif request in self._asked:
            answered, answer = self._asked[request]
            answer[0] = header["ok"]
            answered.set()

    def _allow(self, member: Member, node: int, first: int) -> bool:
        raft, now = member.raft, trio.current_time()
        if raft.role != LEADER or member.state != RUNNING:
            return False
        if node != self._node_id and self.waiting.get(member.uid, -1) >= first:
            return False
        if any(progress.round for other, progress in raft.progress.items() if other != node):
            return False
        if not has_quorum(raft.configuration, set(self._live) - {node}):
            return False
        self._turns = {uid: turn for uid, turn in self._turns.items() if turn[1] > now}
        holder, _ = self._turns.setdefault(member.uid, (node, now + HELD_S))
        return holder == node
