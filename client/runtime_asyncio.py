"""asyncio, or uvloop, as `runtime` asks for it: scopes, nurseries, a socket over the loop's readers and writers.

Invariants: a scope takes back only the cancellation that it caused, as `asyncio.timeout` does; a socket's file
descriptor is not watched by the loop any more when it is closed. What is thrown at a task once is not thrown again, so
a shield has nothing to do. Imported by `runtime.running`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from math import inf
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, cast

from logyard.protocol.frame import Buffer

T = TypeVar("T")


class AsyncioRuntime:
    """See `runtime.Runtime`."""

    __slots__ = ("_loop", "now")

    Cancelled = asyncio.CancelledError
    Closed = ConnectionAbortedError
    event = asyncio.Event
    limiter = asyncio.Semaphore
    sleep = staticmethod(asyncio.sleep)

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.now = self._loop.time

    def lot(self) -> Lot:
        """Make a lot."""
        return Lot(self._loop)

    def scope(self, deadline: float = inf, *, shield: bool = False) -> Scope:
        """Make a scope."""
        return Scope(self._loop, deadline)

    @asynccontextmanager
    async def nursery(self) -> AsyncIterator[Nursery]:
        """Make a nursery."""
        with Scope(self._loop, inf) as scope:
            async with asyncio.TaskGroup() as group:
                yield Nursery(group, scope)

    async def in_thread(self, call: Callable[..., T], *arguments: Any) -> T:
        """Call something that blocks, in a thread."""
        return await asyncio.to_thread(call, *arguments)

    def handover(self, unclaimed: Callable[[T], None]) -> Handover[T]:
        """Make a handover."""
        return Handover(self._loop, unclaimed)

    async def resolve(self, host: str, port: int) -> list[tuple[int, int, int, Any]]:
        """Find a TCP server's addresses. Raises OSError."""
        try:
            # A numeric address needs none of the loop's threads.
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        except socket.gaierror:
            found = await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return [(family, kind, protocol, target) for family, kind, protocol, _, target in found]

    async def connect(self, family: int, kind: int, protocol: int, address: Any) -> Socket:
        """Open a connection. Raises OSError."""
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            await self._loop.sock_connect(sock, address)
            if family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except BaseException:
            sock.close()
            raise
        return Socket(self._loop, sock)


class Lot:
    """Where tasks wait to be woken together."""

    __slots__ = ("_loop", "_parked")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._parked: dict[asyncio.Future[None], None] = {}

    def __bool__(self) -> bool:
        return bool(self._parked)

    def unpark_all(self) -> None:
        """Wake all who wait."""
        parked, self._parked = self._parked, {}
        for one in parked:
            if not one.done():
                one.set_result(None)

    async def park(self) -> None:
        """Wait to be woken."""
        future: asyncio.Future[None] = self._loop.create_future()
        self._parked[future] = None
        try:
            await future
        finally:
            self._parked.pop(future, None)


class Scope:
    """A block that ends at a deadline or when it is cancelled. It strikes at a turn of the loop of its own, while its
    task waits inside: a task that is past its last wait leaves unharmed."""

    __slots__ = ("cancelled_caught", "_loop", "_deadline", "_called", "_task", "_before", "_timer", "_struck")

    def __init__(self, loop: asyncio.AbstractEventLoop, deadline: float) -> None:
        self.cancelled_caught = False
        self._loop = loop
        self._deadline = deadline
        self._called = False
        self._task: asyncio.Task[Any] | None = None
        self._before = 0
        self._timer: asyncio.Handle | None = None
        self._struck = False

    def cancel(self) -> None:
        """End it where it waits next."""
        if not self._called:
            self._called = True
            if self._task is not None and not self._struck:
                if self._timer is not None:
                    self._timer.cancel()
                self._timer = self._loop.call_soon(self._strike)

    def _strike(self) -> None:
        assert self._task is not None
        self._timer = None
        self._struck = True
        self._task.cancel()

    def __enter__(self) -> Self:
        self._task = asyncio.current_task()
        assert self._task is not None, "a scope belongs to a task"
        self._before = self._task.cancelling()
        if self._called:
            self._timer = self._loop.call_soon(self._strike)
        elif self._deadline != inf:
            self._timer = self._loop.call_at(self._deadline, self._strike)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        task, self._task = self._task, None
        assert task is not None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._struck and task.uncancel() <= self._before and isinstance(error, asyncio.CancelledError):
            self.cancelled_caught = True
        return self.cancelled_caught


class Nursery:
    """Tasks that end before the block that they belong to. One that is begun while they are being cancelled never
    runs."""

    __slots__ = ("cancel_scope", "_group")

    def __init__(self, group: asyncio.TaskGroup, scope: Scope) -> None:
        self.cancel_scope = scope
        self._group = group

    def start_soon(self, call: Callable[..., Awaitable[Any]], /, *arguments: Any, name: object = None) -> None:
        """Begin a task at the next turn."""
        task = cast(Coroutine[Any, Any, Any], call(*arguments))
        try:
            self._group.create_task(task, name=None if name is None else str(name))
        except RuntimeError:
            # The group is being cancelled, or is over.
            task.close()


class Handover(Generic[T]):
    """Hands values to the one task that waits for one."""

    __slots__ = ("_loop", "_reader", "_unclaimed")

    def __init__(self, loop: asyncio.AbstractEventLoop, unclaimed: Callable[[T], None]) -> None:
        self._loop = loop
        self._reader: asyncio.Future[T] | None = None
        self._unclaimed = unclaimed

    @property
    def waited(self) -> bool:
        """Whether a task waits."""
        return self._reader is not None

    def give(self, value: T) -> bool:
        """Wake the waiting task with a value; return False when none waits."""
        reader, self._reader = self._reader, None
        if reader is None or reader.done():
            return False
        reader.set_result(value)
        return True

    async def take(self) -> T:
        """Wait for a value."""
        reader: asyncio.Future[T] = self._loop.create_future()
        self._reader = reader
        try:
            return await reader
        except asyncio.CancelledError:
            if self._reader is reader:
                self._reader = None
            if reader.done() and not reader.cancelled():
                # It was woken and cancelled in one turn.
                self._unclaimed(reader.result())
            raise


class Socket:
    """A connected socket: one task may read while another one writes."""

    __slots__ = ("_loop", "_sock", "_file", "_reader", "_writer", "_watched", "_empty")

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        self._loop = loop
        self._sock = sock
        self._file = sock.fileno()
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        # The loop tells when there is something to read: as long as somebody waits for it each time.
        self._watched = False
        # The last read was short: the kernel is not asked again before it has something.
        self._empty = True

    async def recv(self, limit: int) -> bytes:
        """Receive at most `limit` bytes; none at the end."""
        found = bytearray(limit)
        count = await self.recv_into(memoryview(found))
        return bytes(found[:count])

    async def recv_into(self, buffer: memoryview) -> int:
        """Receive into a buffer; 0 at the end."""
        while True:
            self._open()
            if self._empty:
                await self._wait()
            else:
                # Others have their turn, too, while much comes in.
                await asyncio.sleep(0)
                self._open()
            try:
                count = self._sock.recv_into(buffer)
            except (BlockingIOError, InterruptedError):
                self._empty = True
                continue
            self._empty = count < len(buffer)
            return count

    async def _wait(self) -> None:
        """Wait until there is something to read."""
        self._reader = self._loop.create_future()
        if not self._watched:
            self._watched = True
            self._loop.add_reader(self._file, self._readable)
        try:
            await self._reader
        finally:
            self._reader = None

    def _readable(self) -> None:
        if self._reader is None:
            self._watched = False
            self._loop.remove_reader(self._file)
        elif not self._reader.done():
            self._reader.set_result(None)

    async def send(self, data: Buffer) -> int:
        """Send some of the bytes; return how many."""
        return await self.sendmsg([data])

    async def sendmsg(self, buffers: list[Buffer]) -> int:
        """Send some of the buffers' bytes; return how many."""
        while True:
            try:
                return self._sock.sendmsg(buffers)
            except (BlockingIOError, InterruptedError):
                pass
            self._open()
            self._writer = self._loop.create_future()
            self._loop.add_writer(self._file, self._writable)
            try:
                await self._writer
            finally:
                self._writer = None
                if self._file >= 0:
                    self._loop.remove_writer(self._file)

    def sendmsg_now(self, buffers: list[Buffer]) -> int:
        """Send what the kernel takes at once; return how many bytes. Raises OSError."""
        return self._sock.sendmsg(buffers)

    def _writable(self) -> None:
        if self._writer is not None and not self._writer.done():
            self._writer.set_result(None)

    def _open(self) -> None:
        if self._file < 0:
            raise ConnectionAbortedError("the socket was closed")

    def close(self) -> None:
        """Close it; who waits for it is woken with an error."""
        if self._file < 0:
            return
        self._loop.remove_reader(self._file)
        self._loop.remove_writer(self._file)
        self._file = -1
        self._sock.close()
        for waiter in (self._reader, self._writer):
            if waiter is not None and not waiter.done():
                waiter.set_exception(ConnectionAbortedError("the socket was closed"))
