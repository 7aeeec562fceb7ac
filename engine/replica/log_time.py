"""Log time: the one clock a machine sees (docs/decisions/0025-terms-are-never-early.md). Pure: readings come in as
arguments.

Invariant: it never runs backwards within a group, whoever leads and whatever the wall clock does, and never faster
than the leader's monotonic clock, but for jumps to the wall clock at moments in which no term that the machine granted
is running. Called by `ready_loop` for groups led here.
"""

from __future__ import annotations

MS = 1_000_000
BEHIND = 2
"""Where no term is running, log time that is ahead of the wall clock goes on at this part of the pace."""


class LogTime:
    """The clock of one leadership: a log time that was known at some moment of the monotonic clock, and what has passed
    since then by that clock."""

    __slots__ = ("_stamp", "_read")

    def __init__(self, last_ms: int, wall_ns: int, monotonic_ns: int) -> None:
        """Begin at `last_ms`, the newest log time in the group's log, known at `monotonic_ns`; 0 for a log without any,
        which begins at the wall clock."""
        self._stamp = last_ms * MS if last_ms else wall_ns
        self._read = monotonic_ns

    def now(self, monotonic_ns: int) -> int:
        """Return log time in ms since 1970, while a term is running or may be: the pace is that of the monotonic
        clock."""
        passed = monotonic_ns - self._read
        if passed > 0:
            self._read = monotonic_ns
            self._stamp += passed
        return self._stamp // MS

    def follow(self, wall_ns: int, monotonic_ns: int) -> int:
        """Return log time while no term is running: the wall clock's. Where it is ahead of that it waits for it, at a
        slower pace."""
        passed = monotonic_ns - self._read
        if passed > 0:
            self._read = monotonic_ns
            self._stamp += min(passed, max(passed // BEHIND, wall_ns - self._stamp))
        self.jump(wall_ns)
        return self._stamp // MS

    def jump(self, wall_ns: int) -> None:
        """Catch up with the wall clock at once: no term is running, or all begin anew."""
        self._stamp = max(self._stamp, wall_ns)

    def until(self, due_ms: int) -> int:
        """Return the nanoseconds of monotonic time from the last reading to `due_ms`, while a term is running."""
        return max(0, due_ms * MS - self._stamp)

    def until_by(self, due_ms: int, wall_ns: int) -> int:
        """Return the same while none is running, if the wall clock stays as it is."""
        by_wall = max(0, due_ms * MS - wall_ns)
        return by_wall if wall_ns >= self._stamp else min(BEHIND * self.until(due_ms), by_wall)

    def read_at(self, stamp_ms: int) -> int:
        """Return when it showed `stamp_ms`, or a bit later, by the monotonic clock."""
        return self._read - max(0, self._stamp - stamp_ms * MS)
