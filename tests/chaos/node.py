"""A node process whose disk obeys: ``python -m tests.chaos.node CONFIG ORDERS`` serves until its input ends.

The file ORDERS holds ``slow SECONDS`` (every sync of data takes so much longer) or ``fail`` (every sync of a WAL file
fails with EIO); without it the disk is the real one. Started by `tests.chaos.cluster`.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from functools import partial
from pathlib import Path

from logyard.engine.disk.door import Disk
from logyard.service import node
from logyard.service.daemon import run_node


class ObedientDisk(Disk):
    """Reads its orders before every sync of data."""

    __slots__ = ("orders", "never")

    def __init__(self, orders: str) -> None:
        super().__init__()
        self.orders = orders
        self.never = threading.Event()

    def datasync(self, fd: int) -> None:
        """As `Disk` does it, late or not at all."""
        try:
            with open(self.orders, encoding="ascii") as found:
                word, _, rest = found.read().partition(" ")
        except FileNotFoundError:
            word = rest = ""
        if word == "slow":
            # A slow disk is a timer, not a condition that comes true.
            self.never.wait(float(rest))
        elif word == "fail" and os.readlink(f"/proc/self/fd/{fd}").endswith(".wal"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().datasync(fd)


def main() -> int:
    """Serve."""
    config, orders = sys.argv[1:]
    setattr(node, "Disk", partial(ObedientDisk, orders))  # noqa: B010  # a class is no place to assign to for mypy
    return run_node(Path(config), until_eof=True)


if __name__ == "__main__":
    raise SystemExit(main())
