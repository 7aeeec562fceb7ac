"""A node process whose disk fails on demand: ``python -m tests.service.failing_node CONFIG TRIGGER`` serves until its
input ends; while the file TRIGGER is there no sync of the log succeeds."""

from __future__ import annotations

import errno
import os
import sys
from functools import partial
from pathlib import Path

from logyard.engine.disk.door import Disk
from logyard.service import node
from logyard.service.daemon import run_node


class FailingDisk(Disk):
    """Syncs of WAL files fail while `trigger` exists."""

    __slots__ = ("trigger",)

    def __init__(self, trigger: str) -> None:
        super().__init__()
        self.trigger = trigger

    def datasync(self, fd: int) -> None:
        """As `Disk` does it, unless it shall fail."""
        if os.path.exists(self.trigger) and os.readlink(f"/proc/self/fd/{fd}").endswith(".wal"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().datasync(fd)


def main() -> int:
    """Serve."""
    config, trigger = sys.argv[1:]
    setattr(node, "Disk", partial(FailingDisk, trigger))  # noqa: B010  # a class is no place to assign to for mypy
    return run_node(Path(config), until_eof=True)


if __name__ == "__main__":
    raise SystemExit(main())
