"""A reply that somebody waits for: one type for an embedded caller, a client on the network and a frame of its lane.

Invariant: the first outcome counts, a value or an error, and never changes; what comes later is dropped: who waited may
have given up. Neutral to threads and loops: who waits
gives a callback, or what makes an event of the library it runs under; whoever settles it must run in the same thread.
A command's reply comes by `Sink.reply`, the same at both ends of a connection: what a node's connection is told there
comes to the sink in the client. What is one thing here and what is not: docs/decisions/0032.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from .errors import LogyardError, error_of
from .frame import Buffer
from .wire import unpack

T = TypeVar("T")
OK = 0
FAILED = 1
"""The status of a command's reply: the machine's, or an encoded error."""


class Sink(Protocol):
    """Where replies to commands go: a connection, or who waits in this process. Called where they come about, a node's
    in a turn of its loop; never blocks."""

    def reply(self, request: int, status: int, data: bytes) -> None:
        """Take the reply to one frame: status OK and the machine's, or FAILED and an encoded error."""
        ...


class Dropped:
    """A sink for what nobody waits for."""

    def reply(self, request: int, status: int, data: bytes) -> None:
        """Do nothing: nobody waits."""


DROP = Dropped()


class Event(Protocol):
    """What a task waits for: trio's, or asyncio's."""

    def set(self) -> None:
        """Wake who waits."""

    async def wait(self) -> object:
        """Wait until it is set."""


class PendingReply(Generic[T]):
    """See the module. Once `done`, without an `error` there is a `value`; `was_cut`: the connection ended first, so
    what was asked for may have happened."""

    __slots__ = ("done", "value", "error", "was_cut", "_event", "_callbacks")

    def __init__(self) -> None:
        self.done = False
        self.value: T = None  # type: ignore[assignment]  # nobody looks before it is settled
        self.error: LogyardError | None = None
        self.was_cut = False
        self._event: Event | None = None
        self._callbacks: list[Callable[[], None]] | None = None

    def reply(self, request: int, status: int, data: Buffer) -> None:
        """Settle it with a command's reply: see `Sink`. Raises `ProtocolError` for an error that can't be read."""
        if status:
            self.fail(error_of(unpack(data)))
        else:
            self.set(bytes(data))  # type: ignore[arg-type]  # a command's is of bytes

    def set(self, value: T) -> None:
        """Settle it with a value."""
        if not self.done:
            self.value = value
            self._tell()

    def fail(self, error: LogyardError) -> None:
        """Settle it with an error."""
        if not self.done:
            self.error = error
            self._tell()

    def cut(self, error: LogyardError) -> None:
        """Settle it with the end of the connection."""
        if not self.done:
            self.was_cut = True
            self.fail(error)

    def _tell(self) -> None:
        self.done = True
        if self._event is not None:
            self._event.set()
        if self._callbacks is not None:
            callbacks, self._callbacks = self._callbacks, None
            for callback in callbacks:
                callback()

    def on_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` when it is settled, at once if it is; it must not block."""
        if self.done:
            callback()
        elif self._callbacks is None:
            self._callbacks = [callback]
        else:
            self._callbacks.append(callback)

    def result(self) -> T:
        """Return the value, or raise the error. Only once `done`."""
        assert self.done
        if self.error is not None:
            raise self.error.again()
        return self.value

    async def wait(self, event: Callable[[], Any]) -> T:
        """Wait for the result; all who wait share one event, which the first of them makes."""
        if not self.done:
            if self._event is None:
                self._event = event()
            await self._event.wait()
        return self.result()
