"""The lock of a stopped node's directory, taken without writing: readers may be beside each other, and beside nothing
else. Called by `reading` and `logyard check`.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from logyard.engine.disk.lock import LOCK, in_use
from logyard.protocol.errors import DirectoryInUse


@contextmanager
def held(directory: Path, exclusive: bool = False) -> Iterator[None]:
    """Hold the lock of `directory`: nobody writes it meanwhile. Raises `DirectoryInUse` while a process has it."""
    try:
        fd = os.open(directory / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        # No process ever had it, or it is a copy; making the file would be a trace.
        yield
        return
    try:
        try:
            fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DirectoryInUse(in_use(str(directory), fd), path=str(directory)) from None
        yield
    finally:
        os.close(fd)
