"""What a leader does with frames of sessions before it proposes them: only what is new becomes part of the log.

Invariant: a frame is judged by a state that holds everything earlier leaders committed, so it waits until this leader
has applied its own no-op. An answer given here is final: replies of applied frames never change. The rule at apply
(`sessions`) would come to the same; this only keeps duplicates and their payloads out of the log. Called by
`scheduler` in the turn.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from ..entry import FRAME_SESSION, FRAME_SESSION_AT
from ..errors import LogyardError
from ..machine import Reject
from .member import OK, Member, Queued, Shared

if TYPE_CHECKING:
    from .system import System


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
            fresh.append(queued._replace(sink=shared))
            continue
        member.queue_bytes -= len(queued.frame)
        member.budget.settle(len(queued.frame))
        if reply is not None:
            answer(queued, reply)
        elif shared is not None:
            shared.targets.append((queued.sink, queued.request))
    member.queue = fresh or None
    return bool(fresh)
