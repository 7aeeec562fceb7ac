"""Zeros behind small batches, so that the next ones come into space written before (docs/decisions/0011).

Invariant: zeros lie behind the newest batch only, and are written by the one writer of the WAL: nothing acknowledged
is ever under them, and replay takes them for the reserved space that they take the place of. Called by `wal`.
"""

from __future__ import annotations

from ..disk.door import Disk

AHEAD_BYTES = 512 * 1024
"""So much space behind a small batch is written with zeros when it never was written: a sync of 4 KiB into reserved
space changes the file system's metadata, takes 1.5 times as long and twice the processor time."""
SMALL_BYTES = 64 * 1024
"""A larger batch would pay more for the zeros than it gets back."""


class Ahead:
    """Knows up to where the current file's space was written."""

    __slots__ = ("_direct", "_disk", "_size", "_written", "_zeros")

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._direct = -1
        self._size = 0
        self._written = 0
        self._zeros = disk.direct_memory(AHEAD_BYTES)

    def begin(self, fd: int, direct: int, size: int) -> None:
        """Begin another file of `size` bytes; without a descriptor for direct writes (-1) there are no zeros."""
        self._direct = direct
        self._size = size
        self._written = size if direct < 0 else self._disk.unwritten_from(fd, 0)

    def follow(self, end: int, size: int) -> None:
        """Follow a batch of `size` bytes that was written up to `end`; its sync comes after this. OSErrors pass."""
        if end <= self._written:
            return
        self._written = end
        if size <= SMALL_BYTES:
            # What is written there later changes no file-system metadata.
            ahead = min(AHEAD_BYTES, self._size - end)
            self._disk.direct_write(self._direct, self._zeros[:ahead], end)
            self._written = end + ahead
