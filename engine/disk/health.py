"""Whether this node's disk still completes syncs: what its renewals to the other nodes depend on
(docs/internals/hosting.md).

Invariant: a node whose disk hangs says nothing more than `disk_stall_ms` later, so within that and the liveness timeout
the others take it for dead and its leaderships move; what it says when the disk comes back is said as a follower. While
nothing is written, a small file of its own is written and synced instead. Asked by the transport, driven by `ticker`.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

import trio

from ..config import SystemConfig
from .door import Disk, is_full, is_short

REST_PROBES = 2
"""So many times the usual pause between probes while no group here needs a tick."""
PROBE = b"logyard".ljust(512, b"\0")


class Writes(Protocol):
    """What is under way to the disk, by group commit."""

    @property
    def error(self) -> Exception | None:
        """Why nothing is written any more."""
        ...

    @property
    def busy(self) -> bool:
        """Whether something is being written."""
        ...

    @property
    def batch(self) -> int:
        """The number of the newest batch."""
        ...

    @property
    def last_write(self) -> float:
        """When a write ended last (s, monotonic)."""
        ...

    def stalled_s(self) -> float:
        """Return the age of the oldest write that is not done."""
        ...


class DiskHealth:
    """One node's. A WAL write of many batches counts as alive while its batches get done. `spawn` starts a task of the
    node."""

    __slots__ = (
        "probes", "probe_seconds", "_disk", "_directory", "_config", "_writes", "_spawn",
        "_batch", "_batch_at", "_probed", "_probing", "_synced", "_fd",
    )  # fmt: skip

    def __init__(
        self,
        disk: Disk,
        directory: Path,
        config: SystemConfig,
        writes: Writes,
        spawn: Callable[[Callable[[], Awaitable[None]]], None],
    ) -> None:
        self._disk = disk
        self._directory = directory
        self._config = config
        self._writes = writes
        self._spawn = spawn
        self.probes = 0
        self.probe_seconds = 0.0
        self._batch = -1
        self._batch_at = 0.0
        self._probed = 0.0
        # When the probe under way was started; 0.0 when there is none.
        self._probing = 0.0
        self._synced = 0.0
        self._fd = -1

    def stalled_s(self) -> float:
        """Return the seconds that the disk has owed the oldest sync; 0.0 while it owes none."""
        now = time.monotonic()
        stalled = self._writes.stalled_s()
        if stalled:
            batch = self._writes.batch
            if batch != self._batch:
                # One write may be many batches, each with a sync of its own.
                self._batch, self._batch_at = batch, now
            stalled = min(stalled, now - self._batch_at)
        # A probe that the thread has done and the loop has not heard of is the loop's delay, not the disk's.
        return max(stalled, now - self._probing) if self._probing > self._synced else stalled

    def healthy(self) -> bool:
        """Return whether renewals may be sent."""
        return self._writes.error is None and self.stalled_s() * 1000 < self._config.disk_stall_ms

    def look(self, is_resting: bool) -> None:
        """Probe the disk, once a tick, when nothing was synced for a while. `is_resting`: no group here needs a
        tick."""
        if self._probing or self._writes.busy:
            return
        proved = max(self._probed, self._writes.last_write)
        now = time.monotonic()
        # A node at rest has nothing to write, so nobody waits for what its disk would not do.
        pause_ms = self._config.disk_probe_ms * (REST_PROBES if is_resting else 1)
        if (now - proved) * 1000 >= pause_ms:
            self._probing = now
            self._spawn(self._probe)

    async def _probe(self) -> None:
        """Probe the disk: a probe that fails proves nothing, and is made again; the WAL's own next write decides about
        this node."""
        while True:
            try:
                # A thread that hangs in a sync can't be ended, and must not keep the node from ending.
                await trio.to_thread.run_sync(self._sync, abandon_on_cancel=True)
                break
            except RuntimeError:
                # No thread can be begun: that says nothing of the disk.
                await trio.sleep(self._config.disk_probe_ms / 1000)
            except OSError as error:
                if is_full(error) or is_short(error):
                    # Neither a full disk nor a process without descriptors hangs, and votes have a reserve.
                    break
                await trio.sleep(self._config.disk_probe_ms / 1000)
        self._probed = time.monotonic()
        self._probing = 0.0

    def _sync(self) -> None:
        """Sync a file that has no name: nothing of it is left behind. BLOCKING."""
        disk = self._disk
        if self._fd < 0:
            path = str(self._directory / "wal" / "probe.tmp")
            self._fd = disk.create(path)
            disk.unlink(path)
        begun = time.monotonic()
        disk.gather_write(self._fd, [PROBE], 0)
        disk.datasync(self._fd)
        self._synced = time.monotonic()
        self.probe_seconds += self._synced - begun
        self.probes += 1

    def close(self) -> None:
        """Give the file back."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._disk.close(fd)
