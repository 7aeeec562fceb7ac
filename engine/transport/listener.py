"""The peer listener: accepts connections, learns within a bounded time who is there, and hands them to their peer.

Nothing but a kilobyte is read from a connection before its identity is checked (docs/wire.md) and, by TLS or by
`proof`, shown; connections that have not got so far are counted, and when there are too many the oldest goes, of those
first that have said nothing. A bad one is told why, closed, and harms nothing else.
Called by `peers`; with `link` the only door to sockets (law 12).
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable

import trio

from logyard.protocol.errors import BadRequest, LogyardError, Outdated, Refused, WrongIdentity

from ..descriptors import PEERS, has_room
from .config import TransportConfig
from .frame import (
    CHALLENGE,
    CONTROL,
    HEADER_BYTES,
    HELLO,
    OUTDATED,
    PROVED,
    REFUSED,
    Hello,
    decode_hello,
    encode_hello,
    encode_refused,
)
from .link import Address, Guard, Stream, family, prepare, read_greeting, require_loopback, send_exactly
from .proof import Exchange, encode_challenge

BACKLOG = 1024
"""Connections that the kernel holds until they are accepted: what it drops comes again only a second later."""
Admit = Callable[[Hello], Hello]
Prove = Callable[[bytes], Exchange]
Serve = Callable[[Hello, Stream], Awaitable[None]]


class Listener:
    """Accepts peers on one address.

    `admit(theirs)` returns our hello in answer, or raises a `LogyardError` whose message the peer is told.
    `serve(theirs, stream)` then reads the connection until it ends. Without a `guard` (TLS) only a loopback address
    is listened on. `prove(section)` answers a challenge with the beginning of an exchange, or raises a `LogyardError`;
    `required`: a hello without one is refused. `refused` counts the connections that never said who they are; `refusal`
    is why the last one was.
    """

    __slots__ = (
        "address", "refused", "refusal", "_config", "_admit", "_serve", "_guard", "_prove", "_required", "_silent",
        "_begun",
    )  # fmt: skip

    def __init__(
        self,
        address: Address,
        config: TransportConfig,
        admit: Admit,
        serve: Serve,
        guard: Guard | None = None,
        prove: Prove | None = None,
        required: bool = False,
    ) -> None:
        if guard is None:
            require_loopback(address[0])
        self.address = address
        # Who has not shown who it is, oldest first: those that said nothing, and those that began to.
        self._silent: dict[trio.CancelScope, None] = {}
        self._begun: dict[trio.CancelScope, None] = {}
        self.refused = 0
        self.refusal = ""
        self._config = config
        self._admit = admit
        self._serve = serve
        self._guard = guard
        self._prove = prove
        self._required = required

    async def run(self, task_status: trio.TaskStatus[Address] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen until cancelled; `started` with the bound address (port 0 asks the kernel for one)."""
        host, port = self.address
        with trio.socket.socket(family(host), socket.SOCK_STREAM) as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                await listening.bind((host, port))
            except OSError as error:
                why = f"{host}:{port} (node.peer_listen): {error.strerror}"
                raise Refused(f"can't listen for the other nodes on {why}") from None
            listening.listen(BACKLOG)
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
                    short = self.waiting >= self._config.handshakes or not has_room(sock.fileno(), PEERS)
                    if short and not self._make_place():
                        self.refused += 1
                        sock.close()
                        continue
                    scope = trio.CancelScope()
                    self._silent[scope] = None
                    nursery.start_soon(self._welcome, sock, scope)

    @property
    def waiting(self) -> int:
        """Connections that have not shown who they are."""
        return len(self._silent) + len(self._begun)

    def _make_place(self) -> bool:
        """End the oldest connection that has said nothing, else the oldest that has not come to its end. False: all
        have."""
        line = self._silent or self._begun
        if not line:
            return False
        scope = next(iter(line))
        del line[scope]
        scope.cancel()
        return True

    async def _welcome(self, sock: trio.socket.SocketType, scope: trio.CancelScope) -> None:
        with sock:
            met: tuple[Hello, Stream] | None = None
            try:
                with scope, trio.fail_after(self._config.handshake_timeout_ms / 1000):
                    await trio.lowlevel.wait_readable(sock)
                    self._silent.pop(scope, None)
                    self._begun[scope] = None
                    met = await self._shake_hands(sock)
            except (OSError, trio.TooSlowError, LogyardError) as error:
                self.refusal = str(error) or "the handshake took too long"
            finally:
                self._silent.pop(scope, None)
                self._begun.pop(scope, None)
            if met is None:
                self.refused += 1
            else:
                await self._serve(*met)

    async def _shake_hands(self, sock: trio.socket.SocketType) -> tuple[Hello, Stream]:
        prepare(sock, self._config)
        stream: Stream = sock
        exchange: Exchange | None = None
        try:
            if self._guard is not None:
                stream, require = await self._guard.accept(sock)
            kind, section = await read_greeting(stream, CONTROL, self._config)
            if kind == CHALLENGE:
                if self._prove is None:
                    raise BadRequest("this node proves itself by TLS: give the other one [tls] ca, certificate and key")
                exchange = self._prove(section)
                await send_exactly(stream, encode_challenge(exchange.second))
                kind, section = await read_greeting(stream, CONTROL, self._config)
                if kind != PROVED:
                    raise BadRequest(f"a frame of type {kind} where a proof was due")
                kind, section = exchange.open(section)
            if kind != HELLO:
                raise BadRequest(f"a frame of type {kind} where a hello was due")
            theirs = decode_hello(section)
            if self._guard is not None:
                require(theirs.cluster, theirs.node)
            elif exchange is not None:
                exchange.require(theirs)
            elif self._required:
                raise WrongIdentity("this node asks for proof: give every node the same peer_secret_file")
            theirs = theirs._replace(proved=self._guard is not None or exchange is not None)
            ours = self._admit(theirs)
        except LogyardError as error:
            said = encode_refused(error.reason, OUTDATED) if isinstance(error, Outdated) else encode_refused(str(error))
            await send_exactly(stream, said if exchange is None else exchange.seal(REFUSED, said[HEADER_BYTES:]))
            raise
        said = encode_hello(ours)
        await send_exactly(stream, said if exchange is None else exchange.seal(HELLO, said[HEADER_BYTES:]))
        return theirs, stream
