"""A real disk that a test slows down or hangs: every sync takes `seconds`, or waits until the gate opens.

Imported by the tests of back-pressure and of hanging disks here, and by the node process of
tests/service/test_pressure.py.
"""

from __future__ import annotations

import threading

from logyard.engine.disk.door import Disk
from logyard.engine.log.group_commit import GroupCommit


class SlowDisk(Disk):
    """`seconds` is added to each sync of data; while `gate` is clear no sync ends; setting `brake` makes it fast."""

    __slots__ = ("seconds", "gate", "brake")

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__()
        self.seconds = seconds
        self.gate = threading.Event()
        self.gate.set()
        self.brake = threading.Event()

    def datasync(self, fd: int) -> None:
        """As `Disk` does it, late."""
        if self.seconds:
            self.brake.wait(self.seconds)
        self.gate.wait()
        super().datasync(fd)

    def hang(self, group_commit: GroupCommit) -> None:
        """Close the gate for a node of this process. A node that believes its disk slow leaves every sync to its
        thread: its loop, which is the test's and that of all other nodes, must not hang with the disk."""
        group_commit.pace_seconds = 1.0
        self.gate.clear()
