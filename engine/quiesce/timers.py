"""Timers of hibernating groups: when to wake each, and the clock that its log time goes on by.

Invariant: a group that sleeps keeps its `LogTime`, on its leader's node and on the others. Begun anew at every waking,
log time would stand still over the sleep, and a timer further away than a group stays awake would never ring. Called
by `quiesce`.
"""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING

from ..replica.log_clock import none_runs
from ..replica.log_time import MS, LogTime
from ..replica.member import Member

if TYPE_CHECKING:
    from .quiesce import Quiesce

STEP_NS = 1_000_000_000
"""So much at once is no drift of the wall clock."""
AGAIN_NS = 10_000_000_000
"""A follower's alarm, whose timer is its leader's to fire, is looked at again after this time."""


class Timers:
    """By group: the monotonic time (ns) to wake it at, and its clock, where that is known. Groups without timers have
    none."""

    def __init__(self, hibernation: Quiesce) -> None:
        self.hibernation = hibernation
        self.system = hibernation.system
        self._alarms: dict[int, tuple[int, LogTime | None]] = {}
        # What is not the newest of its group counts for nothing.
        self._due: list[tuple[int, int]] = []
        # By how much the wall clock was ahead of the monotonic one at the last look, while there is any alarm.
        self._ahead: int | None = None

    def set(self, uid: int, due_ms: int, member: Member) -> None:
        """Set the timer of a group that goes to sleep, whose next is due at `due_ms` of log time."""
        system, clock = self.system, member.clock
        if clock is None:
            clock = system.log_clock.fresh(member)
        clock.now(system.clocks.monotonic_ns())
        free = member.wall_time or none_runs(member)
        wait = clock.until_by(due_ms, system.clocks.wall_ns()) if free else clock.until(due_ms)
        self._push(uid, system.clocks.monotonic_ns() + wait, clock)

    def adopt(self, uid: int, due_ms: int, slept_ms: int) -> None:
        """Adopt the timer of a group that sleeps on after a restart, since `slept_ms` of log time: what passed
        meanwhile is not known, so it is looked at when either clock would say that the timer is due."""
        wait = min(due_ms * MS - self.system.clocks.wall_ns(), (due_ms - slept_ms) * MS)
        self._push(uid, self.system.clocks.monotonic_ns() + max(0, wait), None)

    def _push(self, uid: int, at: int, clock: LogTime | None) -> None:
        self._alarms[uid] = (at, clock)
        heapq.heappush(self._due, (at, uid))
        if self._due[0] == (at, uid):
            self.system.ticker.stir()

    def next_s(self) -> float:
        """Return the seconds until the next one rings; infinity without any."""
        return max(0, self._due[0][0] - self.system.clocks.monotonic_ns()) / 1e9 if self._due else math.inf

    def pop(self, uid: int) -> LogTime | None:
        """Remove a group that wakes, or goes, and return its clock."""
        return self._alarms.pop(uid, (0, None))[1]

    def ring(self) -> None:
        """Wake the groups whose timers are due. Called once a tick."""
        now = self.system.clocks.monotonic_ns() if self._due else 0
        self._notice_step(now)
        while self._due and self._due[0][0] <= now:
            at, uid = heapq.heappop(self._due)
            alarm = self._alarms.get(uid)
            if alarm is None or alarm[0] != at:
                continue
            if self.hibernation.sleepers.row(uid).leader in (0, self.system.node_id):
                self.hibernation.find(uid, use=True)
            else:
                # Its leader's to do, who may be gone before it does.
                self._push(uid, now + AGAIN_NS, alarm[1])

    def _notice_step(self, now: int) -> None:
        """Wake all groups with timers where the wall clock was set forward: what waits for its time may be due."""
        ahead = self.system.clocks.wall_ns() - now if now else None
        before, self._ahead = self._ahead, ahead
        if ahead is None or before is None or ahead - before < STEP_NS:
            return
        sleepers, own = self.hibernation.sleepers, self.system.node_id
        for uid, (at, clock) in list(self._alarms.items()):
            leader = sleepers.row(uid).leader
            if leader == own:
                self.hibernation.wake_soon(uid, own)
            elif not leader and at > now:
                self._push(uid, now, clock)
