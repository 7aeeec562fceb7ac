"""How fast payloads may be copied beside the clients' writes.

Invariant: a copy is slowed down only while its debt is small, so that pacing never makes clients wait for space.
Called by `compactor` before every job; the job itself keeps to the number.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ..config import SystemConfig

FORGET_S = 5.0
"""The foreground's rate is an average over about this long: longer than a burst, shorter than a job queue."""
SAMPLE_S = 0.2
"""Between two looks at the rate."""


class RateLimiter:
    """The foreground's write rate, and the limit derived from it."""

    __slots__ = ("rate", "_config", "_clock", "_total", "_at")

    def __init__(self, config: SystemConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate = 0.0
        self._config = config
        self._clock = clock
        self._total = 0
        self._at = clock()

    def sample(self, total: int) -> None:
        """Take a sample: the WAL took `total` bytes since the start."""
        now = self._clock()
        passed = now - self._at
        if passed < SAMPLE_S:
            return
        rate = (total - self._total) / passed
        self.rate += (rate - self.rate) * min(1.0, passed / FORGET_S)
        self._total, self._at = total, now

    def limit(self, debt: int, backlog_files: int) -> int:
        """Return the bytes a second that a job may copy; 0: no limit, as half of what may be owed is, or sealing waits
        for it."""
        config = self._config
        if debt * 2 > config.migrate_debt_bytes_max or backlog_files > 1:
            return 0
        return max(config.migrate_bytes_s_min, int(self.rate * config.migrate_rate_ratio))
