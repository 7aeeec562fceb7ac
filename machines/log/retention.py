"""What an append log keeps: limits on age, bytes and records, applied to whole stretches from the front.

Replicated and deterministic: decided at apply, from log time and from sizes in entries. A stretch is what lies between
two anchors of the log, so no record is looked at and no position looked up. Invariants: nothing goes that a limit
covers (younger than its age, within the newest bytes or records); at most one stretch more than that stays, and
stretches are an eighth of the smallest limit at most. Part of `machines.log` from version 2 on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

TIMER = "retention"
PARTS = 8
"""A limit is kept to an eighth of it."""
AGE_MS_MIN = 1000
AGE_MS_MAX = 1 << 50
"""So that a time to come is a number that can be stored."""
WAITS = 64
"""Timers of an idle log are at least a 64th of its age apart."""
UNKNOWN = -1


class Policy(NamedTuple):
    """Limits: milliseconds, bytes, records; 0 is none. What any of them gives up goes."""

    ms: int = 0
    bytes: int = 0
    records: int = 0

    def __bool__(self) -> bool:
        return self != (0, 0, 0)


class Retention:
    """`marks`: for each anchor of the log the log time (ms) of its first record, and the bytes before it. `total`:
    bytes so far; `newest`: log time of the last record; `due`: what the timer is set to, 0 if it is not."""

    __slots__ = ("policy", "marks", "total", "newest", "due")

    def __init__(self, anchors: int = 0) -> None:
        self.policy = Policy()
        # Of anchors that an earlier version made nothing is known: they count as new, and as empty.
        self.marks: list[tuple[int, int]] = [(UNKNOWN, 0)] * anchors
        self.total = 0
        self.newest = 0
        self.due = 0

    def limit(self, policy: Policy) -> None:
        """Keep what this policy says from now on."""
        self.policy = policy

    def mark(self, stamp: int) -> None:
        """Begin a stretch with a record of this time."""
        self.marks.append((stamp, self.total))

    def drop_marks(self, count: int) -> None:
        """Forget the oldest stretches."""
        del self.marks[:count]

    def add(self, stamp: int, size: int) -> None:
        """Count an entry of the last stretch."""
        if self.marks[0][0] == UNKNOWN:
            self.learn(stamp)
        self.total += size
        self.newest = stamp

    def learn(self, stamp: int) -> None:
        """Learn log time from an entry: what is not known of earlier ones is at most this."""
        if self.marks and self.marks[0][0] == UNKNOWN:
            self.marks = [(stamp if at == UNKNOWN else at, size) for at, size in self.marks]
            self.newest = self.newest or stamp

    def is_full(self, stamp: int, records: int, size: int) -> bool:
        """Return whether the last stretch, of so many records and bytes, ends here."""
        policy = self.policy
        return bool(
            (policy.ms and stamp - self.marks[-1][0] >= policy.ms // PARTS)
            or (policy.bytes and size >= policy.bytes // PARTS)
            or (policy.records and records >= policy.records // PARTS)
        )

    def outlived(self, anchors: Sequence[tuple[int, int]], end: int, now: int) -> int:
        """Return how many of the oldest stretches go."""
        policy = self.policy
        number = 0
        while number + 1 < len(self.marks):
            stamp, before = self.marks[number + 1]
            if not (
                (policy.ms and now - stamp > policy.ms)
                or (policy.bytes and self.total - before >= policy.bytes)
                or (policy.records and end - anchors[number + 1][0] >= policy.records)
            ):
                break
            number += 1
        return number

    def all_outlived(self, now: int) -> bool:
        """Return whether the last record, too, is older than the limit."""
        return bool(self.policy.ms) and now - self.newest > self.policy.ms

    def set_timer(self, now: int, empty: bool) -> bool:
        """Set `due` to when something has to go because of its age; return False if it never has to, as things are."""
        age = self.policy.ms
        if not age or empty:
            return False
        oldest = self.marks[1][0] if len(self.marks) > 1 else self.newest
        self.due = max(oldest + age + 1, now + age // WAITS)
        return True

    def stop_timer(self) -> None:
        """Forget when the timer was to ring."""
        self.due = 0

    def pack(self) -> list[Any]:
        """Return the policy and its marks for a snapshot."""
        return [list(self.policy), self.marks, self.total, self.newest, self.due]

    @classmethod
    def unpack(cls, packed: Sequence[Any]) -> Retention:
        """Return what `pack` gave."""
        found = cls()
        policy, marks, found.total, found.newest, found.due = packed
        found.policy = Policy(*policy)
        found.marks = [(stamp, size) for stamp, size in marks]
        return found
