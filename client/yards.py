"""What the asynchronous handles that have tasks of their own (sessions, watches, uploads) need of their yard.

Filled in by `network.Network`, over connections, and by `service.embedded`, inside the node's own process.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from logyard.protocol.frame import Buffer

from ._async.caller import Caller
from .admin import Call, T
from .lane import Window
from .runtime import Runtime
from .session import Pushed, Retry


class Sessions(Protocol):
    """The sessions that callers opened."""

    held: dict[int, str]
    ttl: float

    async def end(self, name: str, session: int) -> None:
        """Close one; later, if it can not be now. Raises what stands in the way now."""


class Yard(Caller, Protocol):
    """An asynchronous client, as its handles see it."""

    @property
    def runtime(self) -> Runtime:
        """The library that it runs under."""

    @property
    def closed(self) -> bool:
        """Whether its tasks are over, and no others begin."""

    @property
    def chance(self) -> random.Random:
        """Where its random numbers come from."""

    @property
    def window(self) -> Window:
        """The bytes that uploads may hold."""

    @property
    def sessions(self) -> Sessions:
        """The sessions of its callers."""

    def spawn(self, task: Callable[[], Awaitable[None]]) -> None:
        """Run a task until the client ends."""

    async def freed(self) -> None:
        """Wait until some of the window is given back."""

    async def run(self, call: Call[T], timeout: float | None = None, pushed: Pushed | None = None) -> T:
        """Ask, again where that is allowed, until answered or out of time; `pushed` takes what comes meanwhile."""

    async def listen(self, call: Call[Any], retry: Retry, pushed: Pushed) -> None:
        """Ask once, for as long as the answer takes, which only says why it is over: raises that."""

    async def command(self, name: str, frame: list[Buffer], timeout: float | None = None) -> bytes:
        """Send a session's frame for a group's leader; return the machine's reply."""
