"""Bugs in how log time passes: terms that are early, or late. Planted by `planted`."""

from __future__ import annotations

from typing import Any

from logyard.engine.host import terms
from logyard.engine.host.scheduler import Scheduler

from .bugs import Bug

SLEWED = 2


def _slews(old: Any) -> Any:
    def log_time(self: Any, member: Any) -> int:
        clock = member.clock = member.clock or self.new_clock(member)
        wall, monotonic = self.system.wall_ns(), self.system.monotonic_ns()
        passed = monotonic - clock._read
        if passed > 0:
            slowest, fastest = clock._stamp + passed // SLEWED, clock._stamp + passed * SLEWED
            clock._read, clock._stamp = monotonic, min(max(wall, slowest), fastest)
        stamp: int = max(member.log_time, clock._stamp // 1_000_000)
        return stamp

    return log_time


def _none_is_looked_for(old: Any) -> Any:
    return lambda member: True


FEATURES = frozenset({"terms"})
BUGS = (
    Bug("log_time_slewed", "no term is early", [(Scheduler, "log_time", _slews)], FEATURES),
    Bug("jumps_over_terms", "log time jumps when no term runs", [(terms, "none_runs", _none_is_looked_for)], FEATURES),
)
