"""trio as `runtime` asks for it: nearly all of it is trio's own. Imported by `runtime.running`."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any, Generic, TypeVar

import trio
from outcome import Value

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

    async def resolve(self, host: str, port: int) -> tuple[int, int, int, Any]:
        """Find a TCP server's address. Raises OSError."""
        found = await trio.socket.getaddrinfo(host, port, type=trio.socket.SOCK_STREAM)
        family, kind, protocol, _, target = found[0]
        return family, kind, protocol, target

    async def connect(self, family: int, kind: int, protocol: int, address: Any) -> trio.socket.SocketType:
        """Open a connection. Raises OSError."""
        sock = trio.socket.socket(family, kind, protocol)
        try:
            await sock.connect(address)
            if family != trio.socket.AF_UNIX:
                sock.setsockopt(trio.socket.IPPROTO_TCP, trio.socket.TCP_NODELAY, 1)
        except BaseException:
            sock.close()
            raise
        return sock


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
