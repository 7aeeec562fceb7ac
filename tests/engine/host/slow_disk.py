"""A real disk that a test slows down or holds: every sync takes `seconds`, or waits until the gate opens.

Imported by the back-pressure tests here and by the node process of tests/service/test_pressure.py.
"""

from __future__ import annotations

import threading

from logyard.engine.disk import Disk


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
