"""A disk that is slow, but alive: its node hands leaderships to nodes with faster ones, and is the last to campaign.

`DiskPace` is the measure: the mean time of a sync over a window, from counters that others keep, with the time
injected. Slow is a mean at or above `disk_slow_ms` for the whole of `disk_slow_for_ms`; fast again below half of it,
for three times as long: nothing flaps. `SlowDisk` has leaderships handed over (`host.hand_over`), once a second and
only to nodes that take half as long at most: with equally slow disks everything stays where it is. What a *hung* disk
does is in `health`. Called by `ticker`.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Set
from typing import Any, Protocol

from ..config import SystemConfig
from ..identity import Vitals

log = logging.getLogger(__name__)

STEPS = 8
"""Samples of the counters in one window."""
SYNCS_MIN = 3
"""A mean of fewer says nothing."""
CALM_WINDOWS = 3
BYTES_PER_SECOND = 100 << 20
"""Large batches are given the time that a slow disk needs for their bytes: what counts is the sync."""
PATIENCE = 3
"""A slow node's election timeouts are doubled so often: others stand first, and if nobody can win, it does."""


class DiskPace:
    """`look(now, count, seconds, bytes, owed)`: what has been written so far, and for how long the oldest sync has
    been under way. `slow_s` 0: never slow."""

    __slots__ = ("slow_s", "window_s", "slow", "mean_s", "_samples", "_since", "_crossed")

    def __init__(self, slow_s: float, window_s: float) -> None:
        self.slow_s = slow_s
        self.window_s = window_s
        self.slow = False
        self.mean_s = 0.0
        # (time, syncs, seconds) as of then, the oldest first.
        self._samples: deque[tuple[float, int, float]] = deque()
        # Since when the mean has been at or above the bound (while fast), below half of it (while slow).
        self._crossed: float | None = None

    def look(self, now: float, count: int, seconds: float, size: int, owed: float) -> bool:
        """Take a sample; return True when `slow` changed."""
        samples = self._samples
        net = seconds - size / BYTES_PER_SECOND
        if not samples or now - samples[-1][0] >= self.window_s / STEPS:
            samples.append((now, count, net))
        while len(samples) > 1 and samples[1][0] <= now - self.window_s:
            samples.popleft()
        syncs, spent = count - samples[0][1], net - samples[0][2]
        if owed > self.slow_s:
            syncs, spent = max(syncs + 1, SYNCS_MIN), spent + owed
        if syncs >= SYNCS_MIN:
            self.mean_s = max(spent, 0.0) / syncs
        if not self.slow_s:
            return False
        beyond = self.mean_s < self.slow_s / 2 if self.slow else self.mean_s >= self.slow_s
        if not beyond:
            self._crossed = None
            return False
        if self._crossed is None:
            self._crossed = now
        if now - self._crossed < self.window_s * (CALM_WINDOWS if self.slow else 1):
            return False
        self.slow, self._crossed = not self.slow, None
        return True


class Writes(Protocol):
    """What was written to the disk so far, by group commit."""

    @property
    def syncs(self) -> int:
        """Syncs that are done."""
        ...

    @property
    def write_seconds(self) -> float:
        """How long they took, with what was written before each."""
        ...

    @property
    def batch_bytes(self) -> int:
        """Bytes that were written."""
        ...


class Probes(Protocol):
    """What probes of an idle disk say."""

    @property
    def probes(self) -> int:
        """Probes that are done."""
        ...

    @property
    def probe_seconds(self) -> float:
        """How long they took."""
        ...

    def stalled_s(self) -> float:
        """Return for how long the disk has owed the oldest sync."""
        ...


class Leaderships(Protocol):
    """What a slow disk's node leads."""

    def hand_over(self, faster: Set[int], now: float) -> int:
        """Ask some of these nodes to take over; return how many were asked to. At `now` (s)."""
        ...

    def be_patient(self, doublings: int) -> None:
        """Double this node's election timeouts so often."""
        ...

    def forget_tried(self) -> None:
        """Forget to whom leaderships were offered: the disk is fast."""
        ...


class SlowDisk:
    """One node's. `handed_over` counts leaderships that others were asked to take. `others()` gives live nodes with
    what they say of themselves."""

    __slots__ = ("pace", "handed_over", "changes", "clock", "_writes", "_probes", "_others", "_leaderships", "_looked")

    def __init__(
        self,
        config: SystemConfig,
        writes: Writes,
        probes: Probes,
        others: Callable[[], Iterable[tuple[int, Vitals]]],
        leaderships: Leaderships,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._writes = writes
        self._probes = probes
        self._others = others
        self._leaderships = leaderships
        self.pace = DiskPace(config.disk_slow_ms / 1000, config.disk_slow_for_ms / 1000)
        self.handed_over = 0
        self.changes = 0
        self.clock = clock
        self._looked = 0.0

    @property
    def slow(self) -> bool:
        """Whether this node holds its disk for slow."""
        return self.pace.slow

    @property
    def sync_us(self) -> int:
        """What the others are told: the mean time of a sync."""
        return int(self.pace.mean_s * 1e6)

    def tick(self) -> None:
        """Take a sample; act once a second."""
        now, writes, probes = self.clock(), self._writes, self._probes
        count = writes.syncs + probes.probes
        seconds = writes.write_seconds + probes.probe_seconds
        if self.pace.look(now, count, seconds, writes.batch_bytes, probes.stalled_s()):
            self.changes += 1
            state = "slow: leaderships move to faster nodes" if self.slow else "fast again"
            log.warning("the disk is %s (%.1f ms a sync)", state, self.pace.mean_s * 1000)
        if now - self._looked < 1.0:
            return
        self._looked = now
        faster = self._faster() if self.slow else set()
        self._leaderships.be_patient(PATIENCE if faster else 0)
        if faster:
            self.handed_over += self._leaderships.hand_over(faster, now)
        elif not self.slow:
            self._leaderships.forget_tried()

    def _faster(self) -> set[int]:
        """Return the live nodes whose disks take half as long at most, and which do not hold them for slow."""
        own = self.sync_us
        return {node for node, vitals in self._others() if not vitals.slow and 0 < 2 * vitals.sync_us <= own}

    def status(self) -> dict[str, Any]:
        """Return what `logyard status` shows."""
        return {
            "slow": self.slow,
            "sync_ms": round(self.pace.mean_s * 1000, 3),
            "changes": self.changes,
            "handed_over": self.handed_over,
        }
