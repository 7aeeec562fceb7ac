"""Bounds how many groups of one node have entries under way, so that commands of one group share an entry.

An entry costs as much as a hundred commands (docs/performance.md, cost model). Where clients keep many groups busy, a
loop that takes whatever it finds makes an entry of each command, and the entries wait for each other. So no more groups
are let than can have one under way without waiting, and the commands of the others gather; who waits longest is next.
How many that is follows from how long an entry takes, as TCP Vegas finds a link's window (Brakmo and Peterson, 1995):
the limit falls while entries take `queueing_s` longer than they do at best, and rises while they don't and groups wait.
Invariants: a group waits only while at least half of `groups` have entries under way, and none that is not committed
after twice `STUCK_SECONDS` counts any more, so that groups without a quorum hold nobody up. Called by `ready_loop`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import trio

from ..raft.state import LEADER

if TYPE_CHECKING:
    from ..replica.member import Member

STUCK_SECONDS = 0.25
FORGET = 1.01
"""With as few under way as there may be, the shortest time of an entry is taken for so much longer with each one that
is timed: what a link or a disk takes may change. With more, they may be what makes it longer."""
SLOWER = 0.5
"""Entries may take longer by this share of that time at least: on a long way times differ more."""
FALL = 0.875
RISE = 1.125


class EntryWindow:
    """One node's: at least `groups` may have entries under way; `queueing_s` 0: as many as like. While `closed`, the
    proposals of a member whose turn it is not (`admits`) are to `wait`."""

    __slots__ = (
        "closed", "limit", "_admitted", "_at_best_s", "_began", "_clock", "_groups", "_lot", "_mark", "_older",
        "_queueing_s", "_timed", "_waiting", "_younger",
    )  # fmt: skip

    def __init__(
        self,
        queueing_s: float,
        groups: int,
        mark: Callable[[Member], None],
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.closed = False
        self.limit = groups
        self._groups = groups
        self._queueing_s = queueing_s
        self._mark = mark
        self._clock = clock or time.monotonic
        # Members with an entry under way, and its index.
        self._younger: dict[Member, int] = {}
        self._older: dict[Member, int] = {}
        self._waiting: dict[Member, None] = {}
        self._admitted: set[Member] = set()
        self._timed: Member | None = None
        self._began = 0.0
        self._at_best_s = float("inf")
        self._lot = trio.lowlevel.ParkingLot()

    def admits(self, member: Member) -> bool:
        """Return whether it is this member's turn although others wait."""
        return member in self._admitted

    def wait(self, member: Member) -> None:
        """Have a member looked at again when it is its turn."""
        if not self._waiting:
            self._lot.unpark_all()
        self._waiting[member] = None

    def enter(self, member: Member) -> None:
        """Count a member that has just begun its only entries under way."""
        self._younger[member] = member.raft.log.last_index
        if self._timed is None:
            self._timed, self._began = member, self._clock()
        if self._queueing_s and len(self._younger) + len(self._older) >= self.limit:
            self.closed = True

    def settle(self, members: Iterable[Member]) -> None:
        """Look, at the end of a pass, which of its members have committed what they had under way; let others begin
        when at least half of the window is free: they share a frame."""
        younger, older = self._younger, self._older
        for member in members:
            held = younger if member in younger else older
            if member not in held:
                continue
            raft = member.raft
            if raft.commit < held[member] and raft.role == LEADER and not raft.stopped:
                continue
            del held[member]
            if member is self._timed:
                self._timed = None
                self._adapt(self._clock() - self._began)
            if raft.commit < raft.log.last_index and raft.role == LEADER and not raft.stopped:
                younger[member] = raft.log.last_index
        if self.closed:
            self._admit()

    def _admit(self) -> None:
        free, waiting = self.limit - len(self._younger) - len(self._older), self._waiting
        self._admitted.clear()
        if free * 2 >= self.limit:
            while waiting and len(self._admitted) < free:
                member = next(iter(waiting))
                del waiting[member]
                self._admitted.add(member)
                self._mark(member)
        self.closed = bool(waiting) or free <= 0

    def _adapt(self, took_s: float) -> None:
        """Learn from how long an entry took."""
        at_best = self._at_best_s * (FORGET if self.limit == self._groups else 1.0)
        self._at_best_s = at_best = min(at_best, took_s)
        if took_s > at_best + max(self._queueing_s, SLOWER * at_best):
            self.limit = max(self._groups, int(self.limit * FALL))
        elif self._waiting:
            self.limit = int(self.limit * RISE) + 1

    async def run(self) -> None:
        """Stop to count what is under way for long, while others wait."""
        while True:
            if not self._waiting:
                await self._lot.park()
            await trio.sleep(STUCK_SECONDS)
            if self._timed in self._older:
                self._timed = None
            self._younger, self._older = {}, self._younger
            self._admit()
