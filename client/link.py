"""One connection of the asynchronous client: connects, greets, then one task gather-sends and one receives.

It opens once and dies once; whatever it held is picked up by `network.Network.lost`. The socket itself comes from the
door in `aio`, so that a twin in memory can stand in for it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeAlias

from logyard.protocol.errors import LogyardError, Unknown
from logyard.protocol.frame import Buffer
from logyard.protocol.pending import PendingReply
from logyard.protocol.tls import TlsError, require_server
from logyard.protocol.wire import REPLY_NONE, ProtocolError

from .lane import Lane
from .runtime import Runtime, Scope
from .session import Channel, Pushed, Routes, not_secured, unreachable
from .tls_stream import TlsStream

CONNECT_S = 5.0


class Stream(Protocol):
    """What a link needs of a connected socket."""

    def recv_into(self, buffer: memoryview) -> Awaitable[int]:
        """Return the bytes received; 0 at the end."""

    def sendmsg(self, buffers: list[Buffer]) -> Awaitable[int]:
        """Return the bytes sent."""

    def close(self) -> None:
        """Wake both with an error."""


Dial: TypeAlias = Callable[[str, int], Awaitable[Stream]]


class Owner(Protocol):
    """What a link tells, and asks of, its network."""

    runtime: Runtime
    routes: Routes
    dial: Dial

    def clock(self) -> float:
        """Return now, in seconds."""

    def opened(self, link: Link) -> None:
        """Take note that a link greeted its server."""

    def lost(self, link: Link) -> None:
        """Take note that a link died."""


class Bell:
    """Wakes one task; ringing before it waits is remembered."""

    __slots__ = ("_rung", "_lot")

    def __init__(self, runtime: Runtime) -> None:
        self._rung = False
        self._lot = runtime.lot()

    def ring(self) -> None:
        """Let the task run in the next turn."""
        if not self._rung:
            self._rung = True
            self._lot.unpark_all()

    async def wait(self) -> None:
        """Wait until rung."""
        if not self._rung:
            await self._lot.park()
        self._rung = False


class Link:
    """One connection to one node. It opens once and dies once; `network.lost` picks up what it held."""

    __slots__ = ("network", "node", "address", "channel", "dirty", "bell", "opened", "failure", "socket", "progress")

    def __init__(self, network: Owner, node: int, address: tuple[str, int]) -> None:
        self.network = network
        self.node = node
        self.address = address
        self.channel = Channel()
        self.dirty: list[Lane] = []
        self.bell = Bell(network.runtime)
        self.opened = network.runtime.event()
        self.failure: LogyardError | None = None
        self.socket: Stream | None = None
        self.progress = network.clock()

    @property
    def open(self) -> bool:
        """It can carry requests."""
        return self.failure is None and self.channel.greeted

    async def run(self) -> None:
        """Connect, then send and receive until it fails."""
        try:
            await self._open()
            if self.failure is None:
                self.network.opened(self)
                self.opened.set()
                async with self.network.runtime.nursery() as nursery:
                    nursery.start_soon(self._send, nursery.cancel_scope)
                    await self._receive()
                    nursery.cancel_scope.cancel()
        finally:
            if self.failure is None:
                self.failure = unreachable(self.address, "the client is closing")
            if self.socket is not None:
                self.socket.close()
            self.opened.set()
            self.network.lost(self)

    def fail(self, why: object) -> None:
        """Cut it: both tasks end."""
        if self.failure is None:
            self.failure = why if isinstance(why, LogyardError) else unreachable(self.address, why)
            if self.socket is not None:
                self.socket.close()

    async def _open(self) -> None:
        try:
            with self.network.runtime.scope(self.network.clock() + CONNECT_S) as scope:
                self.socket = await self.network.dial(*self.address)
                await self._flush()
                channel = self.channel
                while not channel.greeted:
                    await self._fill()
                if isinstance(self.socket, TlsStream):
                    require_server(self.socket.identities, channel.hello)
                if self.node and channel.hello.node != self.node:
                    raise ProtocolError(f"it is node {channel.hello.node}, not node {self.node}")
                self.network.routes.greeted(channel.hello, self.address)
                self.node = channel.hello.node
            if scope.cancelled_caught:
                self.fail("no answer in time")
        except TlsError as error:
            self.fail(not_secured(self.address, error))
        except (OSError, self.network.runtime.Closed, ProtocolError, LogyardError) as error:
            self.fail(error)

    async def _fill(self) -> None:
        assert self.socket is not None
        count = await self.socket.recv_into(self.channel.receiver.buffer())
        if not count:
            raise ProtocolError("the server closed the connection")
        self.progress = self.network.clock()
        self.channel.received(count)

    async def _flush(self) -> None:
        assert self.socket is not None
        outgoing = self.channel.outgoing
        while outgoing.size:
            outgoing.sent(await self.socket.sendmsg(outgoing.window()))

    async def _receive(self) -> None:
        try:
            while self.failure is None:
                await self._fill()
        except (OSError, self.network.runtime.Closed, ProtocolError, LogyardError) as error:
            self.fail(error)

    async def _send(self, scope: Scope) -> None:
        channel = self.channel
        try:
            while self.failure is None:
                if not self.dirty and not channel.outgoing.size:
                    await self.bell.wait()
                if self.dirty:
                    self._begin()
                    now = self.network.clock()
                    for lane in self.unqueue():
                        for batch in lane.take(now):
                            channel.append(lane.uid, batch.encoded(), batch, batch.flags | lane.for_kind)
                            if batch.mode == REPLY_NONE:
                                lane.blind(batch)
                await self._flush()
        except (OSError, self.network.runtime.Closed) as error:
            self.fail(error)
        scope.cancel()

    def queue(self, lane: Lane) -> None:
        """Send what a lane has, in the next turn."""
        lane.mark()
        self.dirty.append(lane)
        self.bell.ring()

    def unqueue(self) -> list[Lane]:
        """Return the lanes that have something to send; they are not queued any more."""
        lanes, self.dirty = self.dirty, []
        for lane in lanes:
            lane.unmark()
        return lanes

    async def call(
        self, method: str, arguments: dict[str, object], deadline: float, pushed: Pushed | None = None
    ) -> tuple[Any, bool]:
        """Return (value, was cut); raise what the server answered, or `Unknown` when it did not answer in time.
        `pushed` gets what the server sends meanwhile."""
        pending: PendingReply[Any] = PendingReply()
        self._begin()
        self.channel.call(method, arguments, pending, pushed)
        return await self._answer(pending, method, deadline)

    async def command(self, uid: int, frame: list[Buffer], deadline: float) -> tuple[Any, bool]:
        """Return (reply, was cut) of one command frame; raise as `call`."""
        pending: PendingReply[Any] = PendingReply()
        self._begin()
        self.channel.append(uid, frame, pending)
        return await self._answer(pending, "a command", deadline)

    def _begin(self) -> None:
        """Count the time in which nothing comes from now on, unless something was asked before."""
        if not self.channel.pending:
            self.progress = self.network.clock()

    async def _answer(self, pending: PendingReply[Any], what: str, deadline: float) -> tuple[Any, bool]:
        self.bell.ring()
        runtime = self.network.runtime
        try:
            with runtime.scope(deadline):
                return await pending.wait(runtime.event), False
        except LogyardError:
            if not pending.was_cut:
                raise
            return None, True
        raise Unknown(f"{what}: node {self.node} did not answer in time")
