"""The way in: a command of a client, or of the engine's own, comes to the proposal queue of the group's leader.

Invariant: what is refused here was not queued, and may be sent again. Called by the doors of the node, by effects and
by whoever keeps a group going.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import trio

from logyard.protocol.errors import BadRequest, Busy, GroupStopped, NotLeader, UnknownGroup
from logyard.protocol.frame import FRAME_SESSION, FRAME_SESSION_AT, PIECE, check_frame, piece_of
from logyard.protocol.pending import DROP, PendingReply, Sink

from ..config import SystemConfig
from ..entry import encode_system
from ..raft.state import LEADER
from .member import RUNNING, Member
from .uploads import PIECE_COUNTS

UPLOADS_FULL_S = 0.5
"""Until unfinished uploads may have ended: seconds, as they are of many pieces each."""


def check_leader(member: Member) -> None:
    """Raise unless this node leads the group."""
    if member.state != RUNNING:
        raise GroupStopped(f"group {member.spec.name!r} is {member.state}: {member.reason}")
    if member.raft.role != LEADER:
        raise NotLeader(member.raft.leader)


class Submit:
    """Owns the rules by which commands are let in. `members` are those that are awake, `find` wakes another one; `mark`
    says that a member has something to do."""

    def __init__(
        self,
        node_id: int,
        config: SystemConfig,
        members: Mapping[int, Member],
        find: Callable[[int], Member | None],
        mark: Callable[[Member], None],
    ) -> None:
        self._node_id = node_id
        self._records_max = config.entry_records_max
        self._upload_bytes = config.group_upload_bytes
        self._members = members
        self._find = find
        self._mark = mark

    def submit(
        self,
        uid: int,
        frame: memoryview,
        sink: Sink,
        request: int,
        *,
        reserved: bool = False,
        early: bool = False,
        low: bool = False,
    ) -> None:
        """Queue a client frame; its reply goes to `sink` when it is committed and applied. `reserved` ones free space:
        they may use all of every budget. `early`: answered with (index, term) when it is on this node's disk. `low`:
        it waits until no other frame of its group does.

        Raises `BadRequest`, `UnknownGroup`, `NotLeader`, `Busy`, `GroupStopped`; nothing was queued then.
        """
        member = self._members.get(uid)
        if member is None:
            member = self._find(uid)
            if member is None:
                raise UnknownGroup(f"no group {uid:016x} on node {self._node_id}")
        if member.state != RUNNING:
            member.check_running()
        proposals = member.proposals
        if proposals.raft.role != LEADER:
            raise NotLeader(proposals.raft.leader)
        records, _, _, _, session = check_frame(frame)
        if records > self._records_max:
            raise BadRequest(f"{records} records in one frame; send at most {self._records_max}")
        if frame[1] & PIECE:
            self._admit_piece(member, frame)
            # As many as an entry may have: it is alone in its own.
            records = self._records_max
        proposals.add(frame, sink, request, records, session, reserved, early, low)
        if not member.dirty:
            self._mark(member)

    def _admit_piece(self, member: Member, frame: memoryview) -> None:
        """Raise `Busy` for a piece while its group, or its session, has too much of unfinished uploads. What gives one
        up makes room, and what was applied before is only answered again."""
        uploads, (number, size) = member.uploads, piece_of(frame)
        if uploads is None or not size:
            return
        session, sequence = FRAME_SESSION.unpack_from(frame, FRAME_SESSION_AT)
        if uploads.counted + max(len(frame), PIECE_COUNTS) > self._upload_bytes:
            cause = "the group's unfinished uploads"
        elif uploads.is_full((session, number)):
            cause = "the session's unfinished uploads"
        else:
            return
        if member.sessions is None or member.sessions.known(session, sequence) is None:
            raise Busy(cause, UPLOADS_FULL_S)

    def propose(self, member: Member, name: str, *arguments: object, sink: Sink = DROP, request: int = 0) -> None:
        """Queue a command of the engine's own; `sink` gets its reply.

        Arguments are plain values (msgpack). Raises `NotLeader`, `GroupStopped`; nothing was queued then.
        """
        check_leader(member)
        self.queue_own(member, name, *arguments, sink=sink, request=request)

    def queue_own(self, member: Member, name: str, *arguments: object, sink: Sink = DROP, request: int = 0) -> None:
        """Propose without the checks: what a halted leader is allowed."""
        member.proposals.add_own(encode_system(name, *arguments), sink, request)
        self._mark(member)

    async def commit(self, member: Member, name: str, *arguments: object) -> bytes:
        """Return the reply of a command of the engine's own, committed and applied. Raises what refuses it."""
        pending: PendingReply[bytes] = PendingReply()
        self.propose(member, name, *arguments, sink=pending)
        return await pending.wait(trio.Event)
