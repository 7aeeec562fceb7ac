"""The process that a client belongs to. Behind a fork both sides would have the same sessions, give the same numbers to
different frames, of which the nodes take the second for a copy, and read from the same sockets.

Invariant: `HERE.pid` is the number of this process, in a forked one as well, and reading it costs no system call. Used
by whatever numbers or sends: `sync`, `queue_sync`, `network`, `lane`.
"""

from __future__ import annotations

import os

from logyard.protocol.errors import BadRequest


class Here:
    """This process: `pid` is its number."""

    __slots__ = ("pid",)

    def __init__(self) -> None:
        self.pid = os.getpid()

    def forked(self) -> None:
        """Take note that this is the child of a fork."""
        self.pid = os.getpid()


HERE = Here()
os.register_at_fork(after_in_child=HERE.forked)


def elsewhere(pid: int) -> BadRequest:
    """Return what is raised where `pid`, the process that opened a yard, is another one than this."""
    return BadRequest(f"this yard was opened in process {pid}; open one in each process (after the fork)")
