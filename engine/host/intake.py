"""What a leader does with frames before it proposes them: sessions' duplicates, low priority, early answers.

Only what is new becomes part of the log. Invariant: a frame of a session is judged by a state that holds everything
earlier leaders committed, so it waits until this leader has applied its own no-op. An answer given here is final:
replies of applied frames never change. The rule at apply (`sessions`) would come to the same; this only keeps
duplicates and their payloads out of the log. Called by `scheduler` in the turn.
"""

from __future__ import annotations

import struct
from collections import deque
from typing import TYPE_CHECKING

from logyard.protocol.errors import LogyardError

from ..entry import FRAME_SESSION, FRAME_SESSION_AT
from ..machine import Reject
from .member import OK, Member, Queued, Shared, Sink

if TYPE_CHECKING:
    from .system import System


PLACE = struct.Struct("<QQ")
"""index, term: the early answer to a command."""
LOW_BATCH = 16
"""Low-priority frames that are let through at a time (Ra's flush of its low-priority queue)."""
LOW_TURNS = 64
"""Turns after which some are let through although others wait: low priority is not never."""


class CommandRejected(LogyardError):
    """A machine's own, committed refusal; `code` is the machine's."""

    def __init__(self, reject: Reject) -> None:
        super().__init__(reject.message)
        self.code = reject.code


def answer(queued: Queued, reply: bytes | Reject) -> None:
    """Tell the sender of a frame what came of it."""
    if isinstance(reply, Reject):
        queued.fail(CommandRejected(reply))
    else:
        queued.sink.reply(queued.request, OK, reply)


class Early:
    """A sink that is answered when the leader itself has the frame's entry on disk, not yet committed: with where it
    lies. What comes of the entry later is told nobody."""

    __slots__ = ("_sink", "done", "place")

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self.done = False
        self.place = b""

    def reply(self, request: int, status: int, data: bytes) -> None:
        """The first answer counts: a place, or why there is none."""
        if not self.done:
            self.done = True
            # A quorum may be quicker than the own disk. Copies of a session's frame have no place of their own: they
            # get what came of the first one.
            self._sink.reply(request, status, data if status or not self.place else self.place)


def proposed(member: Member, index: int, term: int, frames: list[Queued]) -> None:
    """Remember which frames of a new entry are answered early."""
    early = member.early
    assert early is not None
    for queued in frames:
        sink = queued.sink
        if isinstance(sink, Shared):
            sink, _ = sink.targets[0]
        if isinstance(sink, Early):
            sink.place = PLACE.pack(index, term)
            early.append((index, term, queued._replace(sink=sink)))


def durable(member: Member) -> None:
    """Answer the frames whose entry is on this node's disk now."""
    log, waiting = member.raft.log, []
    for index, term, queued in member.early or ():
        if index > log.stable:
            waiting.append((index, term, queued))
        elif log.term(index) == term:
            queued.sink.reply(queued.request, OK, b"")
    member.early = waiting


def let_low(system: System, member: Member) -> None:
    """Frames of low priority join the queue when nothing else waits, a few at a time; and now and then anyway."""
    low = member.low
    assert low is not None
    member.low_waited += 1
    if member.queue and member.low_waited < LOW_TURNS:
        return
    member.low_waited = 0
    queue = member.queue if member.queue is not None else member.new_queue()
    for _ in range(min(LOW_BATCH, len(low))):
        queue.append(low.popleft())
    # Some of them may belong to sessions.
    member.guarded = True
    if low:
        system.scheduler.mark(member)
    else:
        member.low = None


def admit(system: System, member: Member) -> bool:
    """Sort the queued frames: duplicates of applied ones are answered, of those under way attached to them.

    False: nothing of the queue may be proposed yet.
    """
    raft = member.raft
    if raft.applied < raft.lead_index:
        return False
    member.guarded = False
    queue = member.queue
    assert queue is not None
    table, under_way = member.sessions, member.under_way
    if under_way is None:
        under_way = member.under_way = {}
    fresh: deque[Queued] = deque()
    for queued in queue:
        session, sequence = key = FRAME_SESSION.unpack_from(queued.frame, FRAME_SESSION_AT)
        if not session:
            fresh.append(queued)
            continue
        reply = None
        if table is not None and session in table.by_id:
            # Who sends frames is alive, whatever became of its heartbeats.
            system.heartbeats.seen(table.by_id[session].client)
            reply = table.known(session, sequence)
        shared = under_way.get(key)
        if reply is None and shared is None:
            under_way[key] = shared = Shared(member, key, queued)
            fresh.append(Queued(queued.frame, shared, queued.request, queued.records))
            continue
        member.queue_bytes -= len(queued.frame)
        member.budget.queued -= len(queued.frame)
        member.budget.settle(len(queued.frame))
        if reply is not None:
            answer(queued, reply)
        elif shared is not None:
            shared.targets.append((queued.sink, queued.request))
    member.queue = fresh or None
    return bool(fresh)
