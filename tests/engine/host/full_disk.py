"""A real disk with a quota in bytes: what lies under its root, LMDB's files too, counts as allocated.

Imported by the tests of a full disk. LMDB writes past this door, so its own refusals need a real small file system.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from logyard.engine.disk.door import Disk
from logyard.engine.types import Buffer


def used_bytes(root: Path) -> int:
    """Allocated bytes of all files below `root`."""
    total = 0
    for path, _, names in os.walk(root):
        for name in names:
            try:
                total += os.lstat(os.path.join(path, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


class QuotaDisk(Disk):
    """`quota` bytes for all of `root`; set it lower to fill the disk, higher to make room. -1: no limit."""

    __slots__ = ("root", "quota", "refused")

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root
        self.quota = -1
        self.refused = 0

    def fill(self, left: int = 0) -> None:
        """Leave `left` bytes."""
        self.quota = used_bytes(self.root) + left

    def free_bytes(self, path: str) -> int:
        """What is left of the quota."""
        return 1 << 40 if self.quota < 0 else max(0, self.quota - used_bytes(self.root))

    def _claim(self, size: int) -> None:
        if self.quota >= 0 and size > self.free_bytes(""):
            self.refused += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def preallocate(self, fd: int, size: int, fill: bool = True) -> None:
        """As `Disk` does it, while there is room."""
        self._claim(size - os.fstat(fd).st_blocks * 512)
        super().preallocate(fd, size, fill)

    def _pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        end = offset + sum(map(len, buffers))
        grown = end - os.fstat(fd).st_size
        if grown > 0:
            self._claim(grown)
        return super()._pwritev(fd, buffers, offset)
