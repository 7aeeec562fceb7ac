"""trio as `runtime` asks for it: nearly all of it is trio's own. Imported by `runtime.running`."""

from __future__ import annotations

import socket
from collections.abc import Callable
from math import inf
from typing import Any, Generic, TypeVar

import trio
from outcome import Value

from logyard.protocol.frame import Buffer

T = TypeVar("T")


class TrioRuntime:
    """See `runtime.Runtime`."""

    __slots__ = ()

    Cancelled = trio.Cancelled
    Closed = trio.ClosedResourceError
    now = staticmethod(trio.current_time)
    event = trio.Event
    lot = trio.lowlevel.ParkingLot
    limiter = trio.CapacityLimiter
    nursery = staticmethod(trio.open_nursery)
    sleep = staticmethod(trio.sleep)
    in_thread = staticmethod(trio.to_thread.run_sync)

    def scope(self, deadline: float = inf, *, shield: bool = False) -> trio.CancelScope:
        """Make a scope."""
        return trio.CancelScope(deadline=deadline, shield=shield)

    def handover(self, unclaimed: Callable[[T], None]) -> Handover[T]:
        """Make a handover; trio cancels nobody who was woken, so nothing is unclaimed."""
        return Handover()

    async def resolve(self, host: str, port: int) -> list[tuple[int, int, int, Any]]:
        """Find a TCP server's addresses. Raises OSError."""
        try:
            found = await trio.socket.getaddrinfo(host, port, type=trio.socket.SOCK_STREAM)
        except UnicodeError as error:
            # It takes fewer names than `parse_address` does, which goes by what Python's own takes.
            raise OSError(f"{host!r} is no name of a host: {error}") from None
        return [(family, kind, protocol, target) for family, kind, protocol, _, target in found]

    async def connect(self, family: int, kind: int, protocol: int, address: Any) -> Socket:
        """Open a connection. Raises OSError."""
        raw = socket.socket(family, kind, protocol)
        sock = trio.socket.from_stdlib_socket(raw)
        try:
            await sock.connect(address)
            if family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except BaseException:
            sock.close()
            raise
        return Socket(raw)


class Socket:
    """A connected socket: one task may read while another one writes. It waits before it reads again when a read was
    short: trio's own asks the kernel each time, in vain."""

    __slots__ = ("_empty", "_raw")

    def __init__(self, raw: socket.socket) -> None:
        self._raw = raw
        self._empty = True

    async def recv(self, limit: int) -> bytes:
        """Receive at most `limit` bytes; none at the end."""
        found = bytearray(limit)
        count = await self.recv_into(memoryview(found))
        return bytes(found[:count])

    async def recv_into(self, buffer: memoryview) -> int:
        """Receive into a buffer; 0 at the end."""
        raw = self._raw
        while True:
            self._open()
            if self._empty:
                await trio.lowlevel.wait_readable(raw)
            else:
                # Others have their turn, too, while much comes in.
                await trio.lowlevel.checkpoint()
                self._open()
            try:
                count = raw.recv_into(buffer)
            except (BlockingIOError, InterruptedError):
                self._empty = True
                continue
            self._empty = count < len(buffer)
            return count

    async def send(self, data: Buffer) -> int:
        """Send some of the bytes; return how many."""
        return await self.sendmsg([data])

    async def sendmsg(self, buffers: list[Buffer]) -> int:
        """Send some of the buffers' bytes; return how many."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while True:
            self._open()
            try:
                count = self._raw.sendmsg(buffers)
            except (BlockingIOError, InterruptedError):
                await trio.lowlevel.wait_writable(self._raw)
            else:
                await trio.lowlevel.cancel_shielded_checkpoint()
                return count

    def sendmsg_now(self, buffers: list[Buffer]) -> int:
        """Send what the kernel takes at once; return how many bytes. Raises OSError."""
        return self._raw.sendmsg(buffers)

    def _open(self) -> None:
        if self._raw.fileno() < 0:
            raise trio.ClosedResourceError("the socket was closed")

    def close(self) -> None:
        """Close it; who waits for it is woken with an error."""
        if self._raw.fileno() >= 0:
            trio.lowlevel.notify_closing(self._raw)
            self._raw.close()


class Handover(Generic[T]):
    """Reschedules the waiting task with its value: a thousand are woken by one event, and what a parking lot takes
    counts."""

    __slots__ = ("_reader",)

    def __init__(self) -> None:
        self._reader: trio.lowlevel.Task | None = None

    @property
    def waited(self) -> bool:
        """Whether a task waits."""
        return self._reader is not None

    def give(self, value: T) -> bool:
        """Wake the waiting task with a value; return False when none waits."""
        reader, self._reader = self._reader, None
        if reader is None:
            return False
        trio.lowlevel.reschedule(reader, Value(value))
        return True

    async def take(self) -> T:
        """Wait for a value."""
        self._reader = trio.lowlevel.current_task()
        found: T = await trio.lowlevel.wait_task_rescheduled(self._abort)
        return found

    def _abort(self, _: object) -> trio.lowlevel.Abort:
        self._reader = None
        return trio.lowlevel.Abort.SUCCEEDED
