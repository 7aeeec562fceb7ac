"""Timers of quiesced groups: when to wake each, and the clock that its log time goes on by.

Invariant: a group that sleeps keeps its `LogTime`, on its leader's node and on the others. Begun anew at every waking,
log time would stand still over the sleep, and a timer further away than a group stays awake would never ring. Called
by `transitions`, as groups go to sleep and wake, and by `unquiesce` once a tick.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator

from ..replica.log_clock import Clocks, none_runs
from ..replica.log_time import MS, LogTime
from ..replica.machine_state import STALE_MAX
from ..replica.member import Member

STEP_NS = 1_000_000_000
"""So much at once is no drift of the wall clock."""
AGAIN_NS = 10_000_000_000
"""A follower's timer, which is its leader's to fire, is looked at again after this time."""


class Timers:
    """By group: the monotonic time (ns) to wake it at, and its clock, where that is known. Groups without timers have
    none. `leader_of(uid)`: whom a group sleeps under, 0 for nobody; `fresh(member)`: a clock that goes on where its log
    ends; `stir()`: the next tick must not come later than the next timer."""

    def __init__(
        self,
        node: int,
        clocks: Clocks,
        leader_of: Callable[[int], int],
        fresh: Callable[[Member], LogTime | None],
        stir: Callable[[], None],
    ) -> None:
        self._node = node
        self._clocks = clocks
        self._leader_of = leader_of
        self._fresh = fresh
        self._stir = stir
        self._timers: dict[int, tuple[int, LogTime | None]] = {}
        # What is not the newest of its group counts for nothing.
        self._due: list[tuple[int, int]] = []
        # By how much the wall clock was ahead of the monotonic one at the last look, while there is any timer.
        self._ahead: int | None = None

    def set(self, uid: int, due_ms: int, member: Member) -> None:
        """Begin to watch a group that goes to sleep, whose next timer is due at `due_ms` of log time."""
        clocks, clock = self._clocks, member.clock
        if clock is None:
            clock = self._fresh(member)
            assert clock is not None, "all of its log is applied"
        clock.now(clocks.monotonic_ns())
        free = member.wall_time or none_runs(member)
        wait = clock.until_by(due_ms, clocks.wall_ns()) if free else clock.until(due_ms)
        self._push(uid, clocks.monotonic_ns() + wait, clock)

    def adopt(self, uid: int, due_ms: int, slept_ms: int) -> None:
        """Watch a group that sleeps on after a restart, since `slept_ms` of log time: what passed meanwhile is not
        known, so it is looked at when either clock would say that the timer is due."""
        wait = min(due_ms * MS - self._clocks.wall_ns(), (due_ms - slept_ms) * MS)
        self._push(uid, self._clocks.monotonic_ns() + max(0, wait), None)

    def _push(self, uid: int, at: int, clock: LogTime | None) -> None:
        self._timers[uid] = (at, clock)
        heapq.heappush(self._due, (at, uid))
        if len(self._due) > 2 * len(self._timers) + STALE_MAX:
            # Of groups that were used long before their time, again and again.
            self._due = [(timer[0], other) for other, timer in self._timers.items()]
            heapq.heapify(self._due)
        if self._due[0] == (at, uid):
            self._stir()

    def next_s(self) -> float:
        """Return the seconds until the next one rings; infinity without any."""
        return max(0, self._due[0][0] - self._clocks.monotonic_ns()) / 1e9 if self._due else math.inf

    def pop(self, uid: int) -> LogTime | None:
        """Forget a group, which wakes or goes; return its clock."""
        return self._timers.pop(uid, (0, None))[1]

    def due(self) -> Iterator[int]:
        """Yield the groups to wake as their timers are due. Asked once a tick, after `stepped`."""
        now = self._clocks.monotonic_ns() if self._due else 0
        while self._due and self._due[0][0] <= now:
            at, uid = heapq.heappop(self._due)
            timer = self._timers.get(uid)
            if timer is None or timer[0] != at:
                continue
            if self._leader_of(uid) in (0, self._node):
                yield uid
            else:
                # Its leader's to do, who may be gone before it does.
                self._push(uid, now + AGAIN_NS, timer[1])

    def stepped(self) -> list[int]:
        """Return the groups to wake, those led here, as the wall clock was set forward: what waits for its time may be
        due. Those without a leader are due at once."""
        now = self._clocks.monotonic_ns() if self._due else 0
        ahead = self._clocks.wall_ns() - now if now else None
        before, self._ahead = self._ahead, ahead
        if ahead is None or before is None or ahead - before < STEP_NS:
            return []
        found: list[int] = []
        for uid, (at, clock) in list(self._timers.items()):
            leader = self._leader_of(uid)
            if leader == self._node:
                found.append(uid)
            elif not leader and at > now:
                self._push(uid, now, clock)
        return found
