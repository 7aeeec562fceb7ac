"""Log time: the one clock a machine sees (architecture.md section 8). Pure: readings come in as arguments.

Invariant: it never runs backwards within a group, whoever leads and whatever the wall clock does; it runs at no less
than half and no more than twice the speed of the leader's monotonic clock. Called by `scheduler` for groups led here.
"""

from __future__ import annotations

MS = 1_000_000
SPEED_MAX = 2


class LogTime:
    """The clock of one leadership: the group's last log time plus the monotonic time since the election, slewed
    towards the wall clock.

    A jump of the wall clock is worked off at up to `SPEED_MAX`, so a timer or a time-to-live is never off by more than
    that factor. Time in which nobody led counts only as far as it is made up for in this way.
    """

    __slots__ = ("_stamp", "_read")

    def __init__(self, last_ms: int, wall_ns: int, monotonic_ns: int) -> None:
        """`last_ms`: the newest log time in the group's log; 0 for a log without any, which begins at the wall
        clock."""
        self._stamp = last_ms * MS if last_ms else wall_ns
        self._read = monotonic_ns

    def now(self, wall_ns: int, monotonic_ns: int) -> int:
        """Log time in ms since 1970, at these readings of the two clocks (ns)."""
        passed = monotonic_ns - self._read
        if passed > 0:
            self._read = monotonic_ns
            slowest = self._stamp + passed // SPEED_MAX
            fastest = self._stamp + passed * SPEED_MAX
            self._stamp = slowest if wall_ns < slowest else fastest if wall_ns > fastest else wall_ns
        return self._stamp // MS

    def until(self, due_ms: int, wall_ns: int) -> int:
        """Nanoseconds of monotonic time from the last reading to `due_ms`, if the wall clock stays as it is."""
        left = due_ms * MS - self._stamp
        by_wall = due_ms * MS - wall_ns
        if wall_ns >= self._stamp:
            return max(0, left // SPEED_MAX, by_wall)
        return max(0, min(left * SPEED_MAX, by_wall))
