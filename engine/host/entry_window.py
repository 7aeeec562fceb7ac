"""Bounds how many groups of one node have entries under way, so that commands of one group share an entry.

An entry costs as much as a hundred commands (docs/performance.md, cost model). Where clients keep many groups busy, a
loop that takes whatever it finds makes an entry of each command, and the entries wait for each other. So no more groups
are let than keep this node busy, and the commands of the others gather; who waits longest is next. How many that is
follows from how long this node takes to write an entry, as TCP Vegas finds a link's window (Brakmo and Peterson, 1995):
the limit falls while that is `queueing_s` longer than at best, and rises while it isn't and groups wait. How far away
other nodes are does not count. Invariants: nobody waits longer than `WAIT_SECONDS` and a tick, whatever others do, or
while less than half of `groups` have entries under way. Called by `ready_loop`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import trio

from ..raft.state import LEADER

if TYPE_CHECKING:
    from ..replica.member import Member

WAIT_SECONDS = 0.25
"""An entry that takes longer is not counted for more than twice this either: its group may have no quorum."""
TICK_SECONDS = 0.05
BEST_SECONDS = 5.0
"""What an entry took at best is forgotten after twice this, with as few under way as there may be: a disk may change.
With more, they may be what makes it longer."""
TIMED_ONE_IN = 16
"""Of the entries, while nobody waits."""
SLOWER = 0.5
"""Entries may take longer than at best by this share at least."""
FALL = 0.875
RISE = 1.125


def _has_ended(member: Member) -> bool:
    """Return whether a member proposes nothing any more."""
    return member.raft.stopped or member.raft.role != LEADER


class EntryWindow:
    """One node's: at least `groups` may have entries under way; `queueing_s` 0: as many as like. While `closed`, the
    proposals of a member whose turn it is not (`admits`) are to `wait`. While `busy`, passes are to be settled.
    `timed` is whose entry is being timed."""

    __slots__ = (
        "busy", "closed", "limit", "timed", "_admitted", "_began", "_best_s", "_clock", "_forget_at", "_groups",
        "_index", "_lot", "_mark", "_older", "_queueing_s", "_recent_s", "_rotate_at", "_untimed", "_waiting",
        "_younger",
    )  # fmt: skip

    def __init__(
        self,
        queueing_s: float,
        groups: int,
        mark: Callable[[Member], None],
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.busy = self.closed = False
        self.limit = groups
        self.timed: Member | None = None
        self._groups = groups
        self._queueing_s = queueing_s
        self._mark = mark
        self._clock = clock or time.monotonic
        # Members with an entry under way, and its index.
        self._younger: dict[Member, int] = {}
        self._older: dict[Member, int] = {}
        # Since when.
        self._waiting: dict[Member, float] = {}
        self._admitted: set[Member] = set()
        self._untimed = TIMED_ONE_IN
        self._index = 0
        self._began = 0.0
        self._best_s = self._recent_s = float("inf")
        self._forget_at = self._rotate_at = 0.0
        self._lot = trio.lowlevel.ParkingLot()

    def admits(self, member: Member) -> bool:
        """Return whether it is this member's turn although others wait."""
        return member in self._admitted

    def wait(self, member: Member) -> None:
        """Have a member looked at again when it is its turn."""
        if member not in self._waiting:
            if not self._waiting:
                self._lot.unpark_all()
            self._waiting[member] = self._clock()

    def enter(self, member: Member) -> None:
        """Count a member that has just proposed."""
        raft, index = member.raft, member.raft.log.last_index
        if not self._queueing_s or raft.commit >= index or member in self._younger or member in self._older:
            return
        self._younger[member] = index
        self.busy = True
        if self.timed is None:
            self._untimed += 1
            if self._waiting or self._untimed >= TIMED_ONE_IN:
                self.timed, self._index, self._began, self._untimed = member, index, self._clock(), 0
        if len(self._younger) + len(self._older) >= self.limit:
            self.closed = True

    def persisted(self, member: Member) -> None:
        """Learn from how long an entry took, when something of the member that is `timed` is durable."""
        raft = member.raft
        if raft.log.stable >= self._index:
            self.timed = None
            if raft.role == LEADER:
                self._adapt(self._clock())

    def settle(self, members: Iterable[Member]) -> None:
        """Look, at the end of a pass, which of its members have nothing under way any more; let others begin when at
        least half of the window is free: they share a frame."""
        younger, older = self._younger, self._older
        for member in members:
            held = younger if member in younger else older
            if member not in held:
                continue
            raft = member.raft
            if raft.commit < held[member] and not _has_ended(member):
                continue
            del held[member]
            if raft.commit < raft.log.last_index and not _has_ended(member):
                younger[member] = raft.log.last_index
        if self.timed is not None and _has_ended(self.timed):
            self.timed = None
        if self.closed or self._admitted:
            # Whose turn it was has been looked at in this pass.
            self._admitted.clear()
            self._admit()
        self.busy = bool(younger or older or self.timed or self.closed or self._admitted)

    def _admit(self) -> None:
        admitted, waiting, late = self._admitted, self._waiting, self._clock() - WAIT_SECONDS
        free = self.limit - len(self._younger) - len(self._older) - len(admitted)
        room = free if free * 2 >= self.limit else 0
        while waiting:
            member = next(iter(waiting))
            if room <= 0 and waiting[member] > late:
                break
            del waiting[member]
            admitted.add(member)
            self._mark(member)
            room -= 1
            free -= 1
        self.closed = bool(waiting) or free <= 0

    def _adapt(self, now: float) -> None:
        took_s = now - self._began
        if now >= self._forget_at and self.limit == self._groups:
            self._best_s, self._recent_s, self._forget_at = self._recent_s, took_s, now + BEST_SECONDS
        self._recent_s = min(self._recent_s, took_s)
        at_best = min(self._best_s, self._recent_s)
        if took_s > at_best + max(self._queueing_s, SLOWER * at_best):
            self.limit = max(self._groups, int(self.limit * FALL))
        elif self._waiting:
            self.limit = int(self.limit * RISE) + 1

    async def run(self) -> None:
        """Let go of who has waited for long, and stop to count what is under way for long."""
        while True:
            if not self.closed:
                await self._lot.park()
            await trio.sleep(TICK_SECONDS)
            if (now := self._clock()) >= self._rotate_at:
                self._younger, self._older, self._rotate_at = {}, self._younger, now + WAIT_SECONDS
            self._admit()
