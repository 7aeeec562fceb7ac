"""Reads that ask the kernel once: a short read says that nothing is left, so the next one waits before it asks.

trio's own receive tries first and waits after a refusal, which costs a lone message a system call and an exception
each time it is read. Invariant: the descriptor is looked up at each read, so that a closed socket's number is never
read from again. Called by `link.receive` and the client door.
"""

from __future__ import annotations

import os

import trio


class EagerReads:
    """Receives from a plain trio socket."""

    __slots__ = ("_sock", "_empty")

    def __init__(self, sock: trio.socket.SocketType) -> None:
        self._sock = sock
        self._empty = True

    async def recv_into(self, buffer: memoryview) -> int:
        """Return bytes received, 0 at the end. Raises OSError, `trio.ClosedResourceError`."""
        while True:
            if self._empty:
                await trio.lowlevel.wait_readable(self._sock)
            else:
                # Data is probably there already; others must have their turn all the same.
                await trio.lowlevel.checkpoint()
            try:
                count = os.readv(self._sock.fileno(), (buffer,))
            except BlockingIOError:
                self._empty = True
                continue
            self._empty = count < len(buffer)
            return count
