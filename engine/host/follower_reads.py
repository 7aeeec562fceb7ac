"""Reads of any member with a bound on their age: what was committed so long ago is applied here (Raft thesis 6.4).

A member asks its leader for a read index, which the leader confirms with a quorum, and remembers when it asked. Until
that is older than a reader allows, and once it is applied here, reads are answered without asking anybody. Only this
node's own clock is read, and only for lengths of time, those in which its machine was suspended among them. Invariant:
a read within `s` seconds holds everything that was acknowledged `s` seconds before it came; within 0 it is
linearizable. One round a group is under way, for all readers.
Called by `service.log.verbs`; `inbound` brings what nodes say.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import trio

from logyard.protocol.errors import Busy, LogyardError, NotLeader
from logyard.protocol.pending import PendingReply

from ..raft.state import LEADER
from ..replica.leadership import wait
from ..replica.log_clock import Clocks
from ..replica.member import Member
from ..transport.blobs import READ_ASK, READ_INDEX, SendBlob

log = logging.getLogger(__name__)

PATIENCE_S = 2.0
RETRY_S = 0.05
ANSWERS_MAX = 1024
"""Groups that other nodes wait for at once: a task each, while it lasts."""
KNOWN_MAX = 10_000
"""Groups whose last round is remembered."""


class FollowerReads:
    """One node's. `find` gives a group's member, woken if need be; `read_index` a linearizable read's index on the
    leader."""

    def __init__(
        self,
        find: Callable[[int], Member | None],
        read_index: Callable[[Member], Awaitable[int]],
        send_blob: SendBlob,
        spawn: Callable[..., None],
        clocks: Clocks,
    ) -> None:
        self._find = find
        self._read_index = read_index
        self._send_blob = send_blob
        self._spawn = spawn
        self._clocks = clocks
        # By group: when its last round began (s), and the index it brought.
        self._known: dict[int, tuple[float, int]] = {}
        self._rounds: dict[int, trio.Event] = {}
        self._asked: dict[int, PendingReply[Mapping[str, Any]]] = {}
        self._next = 0
        self._answering = 0

    async def within(self, member: Member, staleness_s: float) -> None:
        """Wait until this member has applied everything that was committed `staleness_s` before this call. Raises
        `Busy` while there is nobody to say what that is, `GroupStopped`."""
        uid = member.uid
        came = self._clocks.boot_ns() / 1e9
        while True:
            member.check_running()
            began, index = self._known.get(uid, (-1.0, 0))
            if began >= came - staleness_s and began >= 0 and member.raft.applied >= index:
                return
            under_way = self._rounds.get(uid)
            if under_way is None:
                await self._round(member)
            else:
                await under_way.wait()

    async def _round(self, member: Member) -> None:
        uid = member.uid
        over = self._rounds[uid] = trio.Event()
        try:
            began = self._clocks.boot_ns() / 1e9
            with trio.move_on_after(PATIENCE_S):
                index = await self._index(member)
                await wait(member, lambda: member.raft.applied >= index)
                self._known.pop(uid, None)
                self._known[uid] = (began, index)
                if len(self._known) > KNOWN_MAX:
                    del self._known[next(iter(self._known))]
                return
            raise Busy("a leader's word on what is committed", RETRY_S)
        finally:
            del self._rounds[uid]
            over.set()

    async def _index(self, member: Member) -> int:
        leader = member.raft.leader
        if member.raft.role == LEADER:
            try:
                return await self._read_index(member)
            except NotLeader:
                raise Busy("a leader of the group", RETRY_S) from None
        self._next += 1
        request = self._next
        pending: PendingReply[Mapping[str, Any]] = PendingReply()
        self._asked[request] = pending
        try:
            if not leader or not self._send_blob(leader, READ_ASK, request, {"uid": member.uid}):
                raise Busy("a leader of the group", RETRY_S)
            answer = await pending.wait(trio.Event)
        finally:
            del self._asked[request]
        if answer["error"] is not None:
            raise Busy(f"a leader's word on what is committed ({answer['error']})", RETRY_S)
        index: int = answer["index"]
        return index

    def on_blob(self, node: int, kind: int, request: int, header: Mapping[str, Any]) -> None:
        """Answer another node that asks, or take its answer."""
        if kind == READ_ASK:
            if self._answering < ANSWERS_MAX:
                self._answering += 1
                self._spawn(self._answer, node, request, header["uid"])
            else:
                self._say(node, request, header["uid"], 0, "too many ask")
        elif request in self._asked:
            self._asked[request].set(header)

    async def _answer(self, node: int, request: int, uid: int) -> None:
        index, error = 0, None
        try:
            with trio.move_on_after(PATIENCE_S):
                try:
                    member = self._find(uid)
                    if member is None:
                        error = "the group is not here"
                    else:
                        index = await self._read_index(member)
                except LogyardError as refusal:
                    error = str(refusal)
                self._say(node, request, uid, index, error)
        finally:
            self._answering -= 1

    def _say(self, node: int, request: int, uid: int, index: int, error: str | None) -> None:
        self._send_blob(node, READ_INDEX, request, {"uid": uid, "index": index, "error": error})
