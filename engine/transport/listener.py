"""The peer listener: accepts connections, learns within a bounded time who is there, and hands them to their peer.

Nothing but a hello of at most a kilobyte is read from a connection before its identity is checked (faults section 4),
and connections that have not said hello are counted. A bad one is told why, closed, and harms nothing else.
Called by `peers`; with `link` the only door to sockets (law 12).
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable

import trio

from ..errors import LogyardError
from .config import TransportConfig
from .frame import CONTROL, Hello, encode_hello, encode_refused
from .link import Address, family, prepare, read_hello, require_loopback, send_exactly

Admit = Callable[[Hello], Hello]
Serve = Callable[[Hello, trio.socket.SocketType], Awaitable[None]]


class Listener:
    """Accepts peers on one address.

    `admit(theirs)` returns our hello in answer, or raises a `LogyardError` whose message the peer is told.
    `serve(theirs, sock)` then reads the connection until it ends.
    """

    __slots__ = ("address", "waiting", "refused", "_config", "_admit", "_serve")

    def __init__(self, address: Address, config: TransportConfig, admit: Admit, serve: Serve) -> None:
        require_loopback(address[0])
        self.address = address
        self.waiting = 0
        self.refused = 0
        self._config = config
        self._admit = admit
        self._serve = serve

    async def run(self, task_status: trio.TaskStatus[Address] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen until cancelled; `started` with the bound address (port 0 asks the kernel for one)."""
        host, port = self.address
        with trio.socket.socket(family(host), socket.SOCK_STREAM) as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            await listening.bind((host, port))
            listening.listen(128)
            name = listening.getsockname()
            self.address = (name[0], name[1])
            async with trio.open_nursery() as nursery:
                task_status.started(self.address)
                while True:
                    try:
                        sock, _ = await listening.accept()
                    except OSError:
                        # Out of descriptors, or the peer is gone again. Both pass; without a pause the first spins.
                        await trio.sleep(0.05)
                        continue
                    if self.waiting >= self._config.handshakes:
                        self.refused += 1
                        sock.close()
                        continue
                    self.waiting += 1
                    nursery.start_soon(self._welcome, sock)

    async def _welcome(self, sock: trio.socket.SocketType) -> None:
        with sock:
            theirs: Hello | None = None
            try:
                with trio.fail_after(self._config.handshake_timeout_ms / 1000):
                    theirs = await self._shake_hands(sock)
            except (OSError, trio.TooSlowError, LogyardError):
                self.refused += 1
            finally:
                self.waiting -= 1
            if theirs is not None:
                await self._serve(theirs, sock)

    async def _shake_hands(self, sock: trio.socket.SocketType) -> Hello:
        prepare(sock, self._config)
        try:
            theirs = await read_hello(sock, CONTROL, self._config)
            ours = self._admit(theirs)
        except LogyardError as error:
            await send_exactly(sock, encode_refused(str(error)))
            raise
        await send_exactly(sock, encode_hello(ours))
        return theirs
