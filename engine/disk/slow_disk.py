"""A disk that is slow, but alive: its node hands leaderships to nodes with faster ones, and is the last to campaign.

`DiskPace` is the measure: the mean time of a sync over a window, from counters that others keep, with the time
injected. Slow is a mean at or above `disk_slow_ms` for the whole of `disk_slow_for_ms`; fast again below half of it,
for three times as long: nothing flaps. `SlowDisk` acts on it, once a second and a bounded number of groups at a time,
and only towards nodes that take half as long at most: with equally slow disks everything stays where it is. What a
*hung* disk does is in `health`. Called by `ticker`.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from logyard.protocol.errors import Refused

from ..config import SystemConfig
from ..identity import Vitals
from ..log.group_commit import GroupCommit
from ..raft.core import LEADER
from ..raft.election import heirs
from ..replica.member import RUNNING, Member
from .health import DiskHealth

log = logging.getLogger(__name__)

STEPS = 8
"""Samples of the counters in one window."""
SYNCS_MIN = 3
"""A mean of fewer says nothing."""
CALM_WINDOWS = 3
MOVES_PER_LOOK = 100
"""Leaderships handed over a second: each costs its group two round trips without a leader."""
AGAIN_SECONDS = 10.0
"""A transfer that came to nothing is tried again after this time."""
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


class SlowDisk:
    """One node's. `handed_over` counts leaderships that others were asked to take. `others()` gives live nodes with
    what they say of themselves; `patient(n)` doubles this node's election timeouts n times; `mark(member)`: its core
    has something to say."""

    __slots__ = (
        "pace", "handed_over", "changes", "clock", "_group_commit", "_health", "_members", "_others", "_patient",
        "_mark", "_tried", "_looked",
    )  # fmt: skip

    def __init__(
        self,
        config: SystemConfig,
        group_commit: GroupCommit,
        health: DiskHealth,
        members: Mapping[int, Member],
        others: Callable[[], Iterable[tuple[int, Vitals]]],
        patient: Callable[[int], None],
        mark: Callable[[Member], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._group_commit = group_commit
        self._health = health
        self._members = members
        self._others = others
        self._patient = patient
        self._mark = mark
        self.pace = DiskPace(config.disk_slow_ms / 1000, config.disk_slow_for_ms / 1000)
        self.handed_over = 0
        self.changes = 0
        self.clock = clock
        self._tried: dict[int, float] = {}
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
        now, group_commit, health = self.clock(), self._group_commit, self._health
        count = group_commit.syncs + health.probes
        seconds = group_commit.write_seconds + health.probe_seconds
        if self.pace.look(now, count, seconds, group_commit.batch_bytes, health.stalled_s()):
            self.changes += 1
            state = "slow: leaderships move to faster nodes" if self.slow else "fast again"
            log.warning("the disk is %s (%.1f ms a sync)", state, self.pace.mean_s * 1000)
        if now - self._looked < 1.0:
            return
        self._looked = now
        faster = self._faster() if self.slow else set()
        self._patient(PATIENCE if faster else 0)
        if faster:
            self._hand_over(faster, now)
        elif not self.slow:
            self._tried.clear()

    def _faster(self) -> set[int]:
        """Return the live nodes whose disks take half as long at most, and which do not hold them for slow."""
        own = self.sync_us
        return {node for node, vitals in self._others() if not vitals.slow and 0 < 2 * vitals.sync_us <= own}

    def _hand_over(self, faster: set[int], now: float) -> None:
        left = MOVES_PER_LOOK
        for member in list(self._members.values()):
            if not left:
                return
            if self._may_go(member, now):
                heir = next((node for node in heirs(member.raft) if node in faster), 0)
                if heir and self._transfer(member, heir, now):
                    left -= 1

    def _may_go(self, member: Member, now: float) -> bool:
        raft = member.raft
        return (
            raft.role == LEADER
            and member.state == RUNNING
            and not raft.stopped
            and not raft.transferring
            and raft.commit >= raft.lead_index
            and now - self._tried.get(member.uid, -AGAIN_SECONDS) >= AGAIN_SECONDS
        )

    def _transfer(self, member: Member, heir: int, now: float) -> bool:
        self._tried[member.uid] = now
        try:
            member.raft.transfer(heir)
        except Refused as error:
            log.info("group %s is not handed over: %s", member.spec.name, error)
            return False
        self.handed_over += 1
        self._mark(member)
        return True

    def status(self) -> dict[str, Any]:
        """Return what `logyard status` shows."""
        return {
            "slow": self.slow,
            "sync_ms": round(self.pace.mean_s * 1000, 3),
            "changes": self.changes,
            "handed_over": self.handed_over,
        }
