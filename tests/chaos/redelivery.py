"""Why messages come again: every redelivery has a cause, or is a violation.

A consumer gave it back (or left), its session ended, or its lease was over by the client's clock. That a session has
ended its consumer may learn later than somebody else gets the message, so causes are judged at the end. Used by
`queue_load`.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

LEASE_S = 1800.0
"""Of a queue by default."""


@dataclass(eq=False)
class Holder:
    """One consumer, from when it attached. `heard`: when it asked for the last thing that it was confirmed."""

    name: str
    heard: float = 0.0
    left: float | None = None
    failed: str = ""


@dataclass(eq=False)
class Held:
    """One delivery. `deliveries` of the message had failed before it."""

    holder: Holder
    came: float
    deliveries: int
    given_back: bool = False
    settled: bool = False


class Redeliveries:
    """Of one queue."""

    def __init__(self, lease_s: float = LEASE_S) -> None:
        self.lease_s = lease_s
        self._last: dict[int, Held] = {}
        self._again: list[tuple[int, Held, Held]] = []

    def came(self, message: int, deliveries: int, holder: Holder) -> Held:
        """A message was delivered."""
        held, before = Held(holder, time.monotonic(), deliveries), self._last.get(message)
        if before is not None and deliveries < before.deliveries:
            # It lay in its client since before the other delivery.
            return held
        if before is not None:
            self._again.append((message, before, held))
        self._last[message] = held
        return held

    def judge(self) -> tuple[dict[str, int], list[str]]:
        """How many came again for each cause, and those without one."""
        causes: Counter[str] = Counter()
        unexplained: list[str] = []
        for message, before, held in self._again:
            cause = self._cause(before, held)
            causes[cause or "unexplained"] += 1
            if not cause:
                unexplained.append(
                    f"message {message} came again to {held.holder.name} {held.came - before.came:.3f} s after it came "
                    f"to {before.holder.name}, which {'had settled it' if before.settled else 'still held it'}"
                )
        return dict(causes), unexplained

    def _cause(self, before: Held, held: Held) -> str:
        holder = before.holder
        if before.settled:
            return ""
        if before.given_back or (holder.left is not None and holder.left <= held.came):
            return "returned"
        # Who lives, and is told that it does not hold a message, has no session that ended.
        if holder.failed not in ("", "not_held") and holder.heard < held.came:
            return "session"
        if held.came - before.came >= self.lease_s - 1.0:
            return "lease"
        return ""
