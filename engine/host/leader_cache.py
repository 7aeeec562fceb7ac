"""Who leads what, as this node knows it, and since when; and what happened on this node, as counters.

A table beside the members (Ra's ra_leaderboard): it is read without asking any group, so it answers while a group is
busy, stopped or asleep. Written by the ready loop when a core says that its role or leader changed; rows of deleted
groups are left out by whoever joins them with the names, and go when they are half of the table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from typing import Final, NamedTuple, Protocol

from ..raft.state import LEADER
from ..replica.member import Member

STALE_MIN: Final = 1024


class Standing(NamedTuple):
    """`leader` (0: unknown) leads in `term` since `since_ms`, a wall-clock time of this node in milliseconds."""

    leader: int
    term: int
    since_ms: int


UNKNOWN: Final = Standing(0, 0, 0)


class LeaderCache:
    """Standings by group uid. `elections` counts leaderships won by this node's members, `lost` those that ended."""

    __slots__ = ("elections", "lost", "rows")

    def __init__(self) -> None:
        self.rows: dict[int, Standing] = {}
        self.elections = 0
        self.lost = 0

    def note(self, member: Member) -> None:
        """Note that the role, the term or the leader of a member may have changed."""
        raft = member.raft
        old = self.rows.get(member.uid, UNKNOWN)
        leader, term = raft.leader, raft.term
        if old.leader == leader and old.term == term:
            return
        if raft.role == LEADER:
            self.elections += 1
        elif old.leader == raft.node:
            self.lost += 1
        self.rows[member.uid] = Standing(leader, term, time.time_ns() // 1_000_000)

    def of(self, uid: int) -> Standing:
        """Return the standing of a group; `UNKNOWN` before its first election here."""
        return self.rows.get(uid, UNKNOWN)

    def led(self, uid: int, leader: int, term: int, since_ms: int) -> None:
        """Note who leads a group that wakes, and since when."""
        self.rows[uid] = Standing(leader, term, since_ms)

    def pop(self, uid: int) -> int:
        """Forget a group that goes to sleep; return since when its leader leads."""
        return self.rows.pop(uid, UNKNOWN).since_ms

    def prune(self, members: Container[int], count: int) -> None:
        """Forget groups that are not among the `count` members, once they are half of the table. Called by the ticker's
        housekeeping; what sleeps has its standing in its row."""
        if len(self.rows) > 2 * count + STALE_MIN:
            self.rows = {uid: row for uid, row in self.rows.items() if uid in members}


class Effects(Protocol):
    """What a change of role asks of the effects."""

    def on_following(self, member: Member) -> None:
        """Give up the leader's part."""
        ...


class Heartbeats(Protocol):
    """What a change of role asks of who knows the clients."""

    def leads(self, member: Member) -> None:
        """Count silence from now on."""
        ...

    def began(self, member: Member) -> None:
        """Count silence from now on, of a member whose sessions are known."""
        ...


class RoleChanges:
    """Tells whom it concerns that a member leads, follows another one, or takes part again. `sound` hears of a member
    that is not being mended."""

    def __init__(
        self, leaders: LeaderCache, sound: Callable[[Member], None], effects: Effects, heartbeats: Heartbeats
    ) -> None:
        self._leaders = leaders
        self._sound = sound
        self._effects = effects
        self._heartbeats = heartbeats

    def tell(self, member: Member) -> None:
        """Tell of a member whose core says so."""
        raft = member.raft
        self._leaders.note(member)
        if raft.mend is None:
            self._sound(member)
        if member.leading and (raft.role != LEADER or raft.applied < raft.lead_index):
            self._effects.on_following(member)
        if raft.role == LEADER:
            if raft.applied < raft.lead_index:
                self._heartbeats.leads(member)
            elif member.sessions is not None:
                self._heartbeats.began(member)
        else:
            member.follow()
        member.wake()


class Counters:
    """Events since the process began. Plain numbers: whoever counts adds, whoever reads never waits.

    `busy` counts refusals by cause; causes are texts of ours, so they are few.
    `replay_nanoseconds` is the processor time of the start's replay of the write-ahead log and of building the members.
    """

    __slots__ = ("busy", "replay_nanoseconds")

    def __init__(self) -> None:
        self.busy: dict[str, int] = {}
        self.replay_nanoseconds = 0

    def refused(self, cause: str) -> None:
        """Count one `Busy` that was answered."""
        self.busy[cause] = self.busy.get(cause, 0) + 1

    def replayed(self, nanoseconds: int) -> None:
        """Note what the start's replay took."""
        self.replay_nanoseconds = nanoseconds
