"""Bugs in how log time passes: terms that are early, or late. Planted by `planted`."""

from __future__ import annotations

from typing import Any

from logyard.engine.replica import log_clock
from logyard.engine.replica.log_clock import LogClock

from .bugs import Bug

SLEWED = 2


def _slews(old: Any) -> Any:
    def now(self: Any, member: Any) -> int:
        clock = member.clock = member.clock or self.fresh(member)
        wall, monotonic = self._clocks.wall_ns(), self._clocks.monotonic_ns()
        passed = monotonic - clock._read
        if passed > 0:
            slowest, fastest = clock._stamp + passed // SLEWED, clock._stamp + passed * SLEWED
            clock._read, clock._stamp = monotonic, min(max(wall, slowest), fastest)
        stamp: int = max(member.log_time, clock._stamp // 1_000_000)
        return stamp

    return now


def _none_is_looked_for(old: Any) -> Any:
    return lambda member: True


FEATURES = frozenset({"terms"})
BUGS = (
    Bug("log_time_slewed", "no term is early", [(LogClock, "now", _slews)], FEATURES),
    Bug(
        "jumps_over_terms",
        "log time jumps when no term runs",
        [(log_clock, "none_runs", _none_is_looked_for)],
        FEATURES,
    ),
)
