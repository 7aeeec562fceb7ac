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
from logyard.protocol.verbs import VERBS
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


Write: TypeAlias = Callable[[list[Buffer]], int]
"""Sends what is taken at once and returns its bytes; raises BlockingIOError when that is nothing. Never waits."""
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

    def kick(self, lane: Lane) -> None:
        """See that what a lane has to send is sent."""


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

    __slots__ = (
        "network", "node", "address", "channel", "dirty", "bell", "opened", "failure", "socket", "progress", "_write",
        "_reading", "_sending", "_lone", "_asked", "patience",
    )  # fmt: skip

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
        # Callers that wait for a `long` verb: meanwhile silence says nothing.
        self.patience = 0
        # Of a plain socket, once it may be used beside the task that sends.
        self._write: Write | None = None
        # What arrived is being handled; frames are being made, or the task that sends is at it.
        self._reading = self._sending = False
        # What left last was one request with one record; and how many requests there were by then.
        self._lone = True
        self._asked = 0

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
                    if not isinstance(self.socket, TlsStream):
                        self._write = getattr(self.socket, "sendmsg_now", None)
                    nursery.start_soon(self._send, nursery.cancel_scope)
                    await self._receive()
                    nursery.cancel_scope.cancel()
        finally:
            self._write = None
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
        self._reading = True
        try:
            self.channel.received(count)
        finally:
            self._reading = False
        if self.dirty:
            # What the answers' callbacks gave shares a frame, and leaves without a turn of the loop.
            self._send_now()

    async def _flush(self) -> None:
        assert self.socket is not None
        outgoing = self.channel.outgoing
        while outgoing.size:
            offered = outgoing.window()
            count = await self.socket.sendmsg(offered)
            outgoing.sent(count)
            if outgoing.size and count < sum(map(len, offered)):
                # A server that goes on taking what is sent is not one that hangs, however slow the way to it. What
                # fits into the sockets' buffers says nothing, also while others give more: a stopped process takes that
                # as well.
                self.progress = self.network.clock()

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
                self._sending = True
                self._gather()
                await self._flush()
                self._sending = False
        except (OSError, self.network.runtime.Closed) as error:
            self.fail(error)
        scope.cancel()

    def _gather(self) -> None:
        """Make frames of what the lanes have."""
        channel = self.channel
        most = 0
        if self.dirty:
            self._begin()
            now = self.network.clock()
            for lane in self.unqueue():
                for batch in lane.take(now):
                    most = max(most, batch.count)
                    channel.append(lane.uid, batch.encoded(), batch, batch.flags | lane.for_kind)
                    if batch.mode == REPLY_NONE:
                        lane.blind(batch)
                if lane.waiting and (lane.held_until > now or lane.needs_session):
                    # It was refused while it stood here: nobody else looks after its time, or its session.
                    self.network.kick(lane)
        asked, self._asked = self._asked, channel.asked
        if self._asked != asked:
            self._lone = most <= 1 and self._asked == asked + 1

    def _send_now(self) -> None:
        """Send what there is without a turn of the loop; what the socket does not take, and what it does not take now,
        is the sending task's."""
        if self._write is not None and not self._sending:
            outgoing = self.channel.outgoing
            self._sending = True
            try:
                self._gather()
                outgoing.sent(self._write(outgoing.window()))
            except OSError:
                # Full, or broken: that task waits, or meets the same error and ends the connection.
                pass
            finally:
                self._sending = False
            if not (outgoing.size or self.dirty):
                return
        self.bell.ring()

    @property
    def _at_once(self) -> bool:
        """What is given now leaves at once: nothing is under way, and what left before was alone, too. Else what many
        tasks give in one turn would leave as one and all others."""
        return self._lone and not (self._reading or self.channel.pending or self.channel.outgoing.size)

    def queue(self, lane: Lane) -> None:
        """Send what a lane has: at once if it is alone, else in the next turn, with what is given until then."""
        at_once = self._at_once
        lane.mark()
        self.dirty.append(lane)
        if at_once:
            self._send_now()
        elif not self._reading:
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
        at_once = self._at_once
        self._begin()
        self.channel.call(method, arguments, pending, pushed)
        long = VERBS[method].long
        self.patience += long
        try:
            return await self._answer(pending, method, deadline, at_once)
        finally:
            self.patience -= long

    async def command(self, uid: int, frame: list[Buffer], deadline: float) -> tuple[Any, bool]:
        """Return (reply, was cut) of one command frame; raise as `call`."""
        pending: PendingReply[Any] = PendingReply()
        at_once = self._at_once
        self._begin()
        self.channel.append(uid, frame, pending)
        return await self._answer(pending, "a command", deadline, at_once)

    def _begin(self) -> None:
        """Count the time in which nothing comes from now on, unless something was asked before."""
        if not self.channel.pending:
            self.progress = self.network.clock()

    async def _answer(self, pending: PendingReply[Any], what: str, deadline: float, at_once: bool) -> tuple[Any, bool]:
        if at_once:
            self._send_now()
        else:
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
