"""How a member ends: stopped for a fault of its own, silenced, or gone from its node. How one begins is in `build`.

Invariant: who led says so before it falls silent, as whoever trusts in a leader that is gone would sleep for good; and
of a replica that goes nothing is written any more that still waited to be.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, MutableMapping, Sequence

from ..raft.messages import LEADER_GONE, Message
from .member import DELETED, Member

log = logging.getLogger(__name__)


class Retire:
    """Ends members of one node. `active`: those that get ticks; `drop(uid)` forgets what is queued for the WAL;
    `drop_name(name, uid)` lets a name go that is this group's; `mark(member)` has the next turn see the end of it."""

    def __init__(
        self,
        members: MutableMapping[int, Member],
        active: set[Member],
        send: Callable[[Sequence[Message]], None],
        drop: Callable[[int], None],
        drop_name: Callable[[str, int], None],
        mark: Callable[[Member], None],
    ) -> None:
        self._members = members
        self._active = active
        self._send = send
        self._drop = drop
        self._drop_name = drop_name
        self._mark = mark

    def stop(self, member: Member, reason: str) -> None:
        """Stop one group for a fault of its own, with a reason that `describe` shows; its followers look for another
        leader."""
        log.error("group %s stopped: %s", member.spec.name, reason)
        member.stop(reason)
        ready = member.raft.ready()
        if ready is not None and ready.messages:
            self._send(list(ready.messages))
        self._active.discard(member)
        self._mark(member)

    def silence(self, member: Member, reason: str, state: str) -> None:
        """Let a replica take no part from now on; what it led is told so, what it would write is not written."""
        running = not member.raft.stopped
        member.stop(reason, state)
        ready = member.raft.ready() if running else None
        if ready is not None and ready.messages:
            # Nothing but farewells: whoever trusts in this leader would else sleep for good.
            self._send([message for message in ready.messages if message.kind == LEADER_GONE])
        self._active.discard(member)
        self._mark(member)
        self._drop(member.uid)

    def detach(self, member: Member, reason: str) -> None:
        """Silence a replica that this node has no more. Its rows are the caller's business."""
        self.silence(member, reason, DELETED)
        self._members.pop(member.uid, None)
        self._drop_name(member.spec.name, member.uid)
