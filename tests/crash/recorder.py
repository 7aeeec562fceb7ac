"""A `Disk` that writes down every call. The files are real."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

from logyard.engine.disk.door import Disk
from logyard.engine.types import Buffer

from .events import CREATE, DIRECTORY, MARK, RENAME, SIZE, SYNC, SYNC_DIRECTORY, UNLINK, WRITE, Event


class RecordingDisk(Disk):
    """`events` in the order of the calls; paths relative to `root`. Any number of threads may use it."""

    __slots__ = ("events", "root", "_lock", "_paths")

    def __init__(self, root: str) -> None:
        super().__init__()
        self.root = os.path.realpath(root)
        self.events: list[Event] = []
        self._lock = threading.Lock()
        self._paths: dict[int, str] = {}

    def note(self, kind: str, path: str, offset: int = 0, data: bytes = b"") -> None:
        """Write an event down."""
        with self._lock:
            if kind in (SYNC, SYNC_DIRECTORY):
                offset = len(self.events)
            self.events.append(Event(kind, self.relative(path) if path else "", offset, data))

    def relative(self, path: str) -> str:
        """Within the root."""
        return os.path.relpath(os.path.realpath(path), self.root)

    def mark(self, data: bytes) -> None:
        """What the workload says of itself."""
        self.note(MARK, "", 0, data)

    def path_of(self, fd: int) -> str:
        """A descriptor's file, also after a rename."""
        return os.readlink(f"/proc/self/fd/{fd}")

    def make_directory(self, path: str) -> None:
        """As `Disk` does it."""
        if not os.path.isdir(path):
            self.note(DIRECTORY, path)
        super().make_directory(path)

    def create(self, path: str) -> int:
        """As `Disk` does it."""
        fd = super().create(path)
        self.note(CREATE, path)
        return fd

    def open_direct(self, path: str) -> int:
        """No direct writes: they would be the same calls."""
        return -1

    def preallocate(self, fd: int, size: int, fill: bool = True) -> None:
        """As `Disk` does it; its zeros are writes."""
        self.note(SIZE, self.path_of(fd), size)
        super().preallocate(fd, size, fill)

    def _pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        self.note(WRITE, self.path_of(fd), offset, b"".join(buffers))
        return super()._pwritev(fd, buffers, offset)

    def datasync(self, fd: int) -> None:
        """As `Disk` does it."""
        path = self.path_of(fd)
        super().datasync(fd)
        self.note(SYNC, path)

    def sync_file(self, fd: int) -> None:
        """As `Disk` does it."""
        path = self.path_of(fd)
        super().sync_file(fd)
        self.note(SYNC_DIRECTORY if os.path.isdir(path) else SYNC, path)

    def revalidate(self, path: str) -> None:
        """As `Disk` does it: it syncs."""
        super().revalidate(path)
        self.note(SYNC, path)

    def rename(self, old: str, new: str) -> None:
        """As `Disk` does it."""
        self.note(RENAME, old, 0, self.relative(new).encode())
        super().rename(old, new)

    def unlink(self, path: str) -> None:
        """As `Disk` does it."""
        if os.path.lexists(path):
            self.note(UNLINK, path)
        super().unlink(path)
