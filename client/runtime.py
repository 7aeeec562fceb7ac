"""What the asynchronous client asks of the library that it runs under, trio or asyncio, and which of them that is.

Invariant: nothing in client/ but the two drivers (`runtime_trio`, `runtime_asyncio`) imports either library, and each
is imported when it is found running. What a driver offers has trio's meaning where the client relies on it: a scope
swallows the cancellation that it caused, a nursery ends with its tasks. Used by `network` and all that it makes.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from math import inf
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from logyard.protocol.frame import Buffer

T = TypeVar("T")


class Event(Protocol):
    """Is set once, and wakes all who wait for that."""

    def set(self) -> None:
        """Wake everybody, now and later."""

    def is_set(self) -> bool:
        """Tell whether it was."""

    async def wait(self) -> object:
        """Wait until it is set."""


class Lot(Protocol):
    """Where tasks wait to be woken together."""

    def __bool__(self) -> bool:
        """Tell whether anybody waits."""

    def unpark_all(self) -> object:
        """Wake all who wait."""

    async def park(self) -> None:
        """Wait to be woken."""


class Scope(Protocol):
    """A ``with`` block that ends early at its deadline, or when it is cancelled; may be cancelled before it begins."""

    @property
    def cancelled_caught(self) -> bool:
        """Tell whether it ended early."""

    def cancel(self) -> None:
        """End it where it waits next."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None: ...


class Nursery(Protocol):
    """Tasks that end before the block that they belong to."""

    @property
    def cancel_scope(self) -> Scope:
        """Give what ends all of them and the block."""

    def start_soon(self, call: Callable[..., Awaitable[Any]], /, *arguments: Any, name: object = None) -> None:
        """Begin a task at the next turn."""


class Handover(Protocol[T]):
    """Hands values straight to the one task that waits for one, without a queue between."""

    @property
    def waited(self) -> bool:
        """Tell whether a task waits."""

    def give(self, value: T) -> bool:
        """Wake the waiting task with a value; return False when none waits."""

    async def take(self) -> T:
        """Wait for a value. One task at a time."""


class Socket(Protocol):
    """A connected socket: one task may read while another one writes."""

    def recv(self, limit: int, /) -> Awaitable[bytes]:
        """Receive at most `limit` bytes; none at the end."""

    def recv_into(self, buffer: memoryview, /) -> Awaitable[int]:
        """Receive into a buffer; 0 at the end."""

    def send(self, data: Buffer, /) -> Awaitable[int]:
        """Send some of the bytes; return how many."""

    def sendmsg(self, buffers: list[Buffer], /) -> Awaitable[int]:
        """Send some of the buffers' bytes; return how many."""

    def close(self) -> None:
        """Close it; who waits for it is woken with an error."""


class Runtime(Protocol):
    """One library. `Cancelled` is what a cancelled task is thrown, `Closed` what one meets whose socket another closed
    (beside OSError)."""

    @property
    def Cancelled(self) -> type[BaseException]:
        """Name it."""

    @property
    def Closed(self) -> type[Exception]:
        """Name it."""

    def now(self) -> float:
        """Read the library's clock, in seconds."""

    def event(self) -> Event:
        """Make an event."""

    def lot(self) -> Lot:
        """Make a lot."""

    def limiter(self, total: int, /) -> AbstractAsyncContextManager[object]:
        """Make a block that so many tasks may be in at once."""

    def scope(self, deadline: float = inf, *, shield: bool = False) -> Scope:
        """Make a scope. `shield`: a cancellation from outside waits until it is over."""

    def nursery(self) -> AbstractAsyncContextManager[Nursery]:
        """Make a nursery."""

    def handover(self, unclaimed: Callable[[T], None]) -> Handover[T]:
        """Make a handover; `unclaimed` gets what was given to a task that was cancelled at the same time."""

    async def sleep(self, seconds: float, /) -> object:
        """Wait for a time."""

    async def in_thread(self, call: Callable[..., T], *arguments: Any) -> T:
        """Call something that blocks, in a thread."""

    async def resolve(self, host: str, port: int) -> list[tuple[int, int, int, Any]]:
        """Find (family, type, protocol, address) of each address of a TCP server. Raises OSError."""

    async def connect(self, family: int, kind: int, protocol: int, address: Any) -> Socket:
        """Open a connection. Raises OSError."""


def running() -> Runtime:
    """Return the driver of the library that runs this task. Raises RuntimeError outside of any."""
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_task():
        from .runtime_trio import TrioRuntime

        return TrioRuntime()
    asyncio = sys.modules.get("asyncio")
    if asyncio is not None and asyncio._get_running_loop() is not None:
        from .runtime_asyncio import AsyncioRuntime

        return AsyncioRuntime()
    raise RuntimeError("the asynchronous client runs in a task of trio or asyncio; elsewhere use connect_sync")
