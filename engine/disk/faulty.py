"""The door's twin: real files behind it, and calls that fail when they are told to.

Fault model: the n-th call of a kind fails with an error of the caller's choice, after so many bytes of a write reached
the file (a torn write); writes are cut short. Every call is recorded. Used by tests alone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from ..types import Buffer
from .door import Disk


class Call(NamedTuple):
    """One recorded call of a `FaultyDisk`: `target` is a path or a descriptor, `data` what a write carried."""

    name: str
    target: str | int
    offset: int
    data: bytes


class FaultyDisk(Disk):
    """A `Disk` that fails on demand and remembers what was asked of it. The files are real.

    `fail("datasync", 3, errno.EIO)` fails the third `datasync` from now; `written` bytes of a failed write reach the
    file first. `short` caps the bytes one `pwritev` writes.
    """

    __slots__ = ("calls", "short", "direct", "_plans")

    def __init__(self) -> None:
        super().__init__()
        # Writes around the page cache have no short ones to continue byte by byte, nor records of single buffers.
        self.direct = False
        self.calls: list[Call] = []
        self.short = 0
        self._plans: dict[str, tuple[int, int, int]] = {}

    def fail(self, name: str, nth: int, error: int, *, written: int = 0) -> None:
        """Let the `nth` call fail of write, datasync, sync_file, sync_directory, rename, create or preallocate."""
        self._plans[name] = (nth, error, written)

    def _enter(self, name: str, target: str | int, offset: int = 0, data: bytes = b"") -> None:
        self.calls.append(Call(name, target, offset, data))
        plan = self._plans.get(name)
        if plan is None:
            return
        nth, error, written = plan
        if nth > 1:
            self._plans[name] = (nth - 1, error, written)
            return
        del self._plans[name]
        if written and isinstance(target, int):
            os.pwrite(target, data[:written], offset)
        raise OSError(error, f"{os.strerror(error)} (injected at {name})")

    def create(self, path: str) -> int:
        """Create as `Disk` does, unless its turn to fail has come."""
        self._enter("create", path)
        return super().create(path)

    def open_direct(self, path: str) -> int:
        """Open as `Disk` does when `direct` is set."""
        return super().open_direct(path) if self.direct else -1

    def open_direct_reads(self, path: str) -> int:
        """Open as `Disk` does when `direct` is set."""
        return super().open_direct_reads(path) if self.direct else -1

    def preallocate(self, fd: int, size: int, fill: bool = True) -> None:
        """Preallocate as `Disk` does, unless its turn to fail has come."""
        self._enter("preallocate", fd)
        super().preallocate(fd, size, fill)

    def _pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        data = b"".join(buffers)
        if self.short:
            data = data[: self.short]
        self._enter("write", fd, offset, data)
        if self.direct and len(buffers) == 1:
            # A copy's memory is not aligned.
            return os.pwritev(fd, [memoryview(buffers[0])[: len(data)]], offset)
        return os.pwrite(fd, data, offset)

    def datasync(self, fd: int) -> None:
        """Sync as `Disk` does, unless its turn to fail has come."""
        self._enter("datasync", fd)
        super().datasync(fd)

    def sync_file(self, fd: int) -> None:
        """Sync as `Disk` does, unless its turn to fail has come."""
        self._enter("sync_file", fd)
        super().sync_file(fd)

    def sync_directory(self, path: str) -> None:
        """Sync as `Disk` does, unless its turn to fail has come."""
        self._enter("sync_directory", path)
        super().sync_directory(path)

    def revalidate(self, path: str) -> None:
        """Revalidate as `Disk` does, unless its turn to fail has come."""
        self._enter("revalidate", path)
        super().revalidate(path)

    def rename(self, old: str, new: str) -> None:
        """Rename as `Disk` does, unless its turn to fail has come."""
        self._enter("rename", old)
        super().rename(old, new)

    def unlink(self, path: str) -> None:
        """Unlink as `Disk` does, unless its turn to fail has come."""
        self._enter("unlink", path)
        super().unlink(path)
