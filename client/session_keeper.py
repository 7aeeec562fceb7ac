"""The sessions of an asynchronous client: one for each log that is appended to, kept alive by one heartbeat a node.

Invariants: a session that is of no more use is closed for good before its frames move to another one; heartbeats cover
the sessions of all logs at once, so they cost the same for one log and for thousands. A session of a caller (a
consumer) has a client number of its own: one that is forgotten, because nobody answered, ends by itself although this
client lives. Called by `network`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from typing import Protocol

from logyard.protocol.errors import BadRequest, LogyardError, SessionExpired, UnknownGroup
from logyard.protocol.queue import time_to_live

from .admin import Call, T
from .lane import Lane
from .log import close_call, open_call
from .runtime import Nursery, Runtime
from .sequences import Sequences, new_number
from .session import Routes

OPEN_S = 5.0
"""One try to open a session, or to close one; what waits for it has deadlines of its own."""
CLOSE_S = 1.0
"""Leaving waits no longer than this for sessions to be closed: what is left open ends by itself."""
CLOSE_AT_ONCE = 64
OVER = (BadRequest, SessionExpired, UnknownGroup)
"""Refusals of a close after which there is nothing to close."""


class Client(Protocol):
    """What the keeper needs of its network."""

    runtime: Runtime
    routes: Routes

    @property
    def lanes(self) -> Iterable[Lane]:
        """All lanes."""

    async def run(self, call: Call[T], timeout: float | None = None) -> T:
        """Ask, with retries."""

    async def ask(self, address: tuple[str, int], method: str, arguments: dict[str, object], deadline: float) -> None:
        """Ask one server once."""

    def spawn(self, task: Callable[[], Awaitable[None]]) -> None:
        """Run a task until the client ends."""

    def kick(self, lane: Lane) -> None:
        """Send what a lane has."""

    def clock(self) -> float:
        """Return now, in seconds."""


class SessionKeeper:
    """Opens, keeps and closes the sessions of one client; `client` is its number."""

    __slots__ = ("client", "ttl", "held", "_network")

    def __init__(self, network: Client, ttl: float) -> None:
        # Sessions that a caller opened and closes, by number: the name of each one's group.
        self.held: dict[int, str] = {}
        self.client = new_number()
        self.ttl = time_to_live(ttl)
        self._network = network

    def want(self, lane: Lane, nursery: Nursery) -> None:
        """See that a lane gets a session."""
        if not lane.opening:
            lane.open_session(new_number())
            nursery.start_soon(self._open, lane)

    async def _open(self, lane: Lane) -> None:
        session = lane.opening
        network = self._network
        numbers = None
        try:
            if lane.stale:
                await network.run(close_call(lane.name, lane.stale), OPEN_S)
                lane.closed_stale()
            await network.run(open_call(lane.name, session, self.client, int(self.ttl * 1000), lane.kind), OPEN_S)
            numbers = Sequences(session)
        except LogyardError as error:
            if error.retry == "never":
                lane.fail(error)
            else:
                lane.troubled(error)
        finally:
            lane.opened_session(numbers)
        network.kick(lane)

    async def end(self, name: str, session: int) -> None:
        """Close a session of a caller. What nobody takes within a moment is told as soon as somebody does, so that what
        the session holds need not wait for its time to live. Raises what stands in the way now."""
        self.held.pop(session, None)
        try:
            await self._network.run(close_call(name, session), OPEN_S)
        except LogyardError as error:
            if not isinstance(error, OVER):
                self._network.spawn(partial(self._end, name, session))
            raise

    async def _end(self, name: str, session: int) -> None:
        while True:
            try:
                await self._network.run(close_call(name, session), OPEN_S)
                return
            except OVER:
                return
            except LogyardError:
                # A node that is going down stops its groups: another one leads them soon.
                await self._network.runtime.sleep(CLOSE_S)

    async def beat(self) -> None:
        """Tell every node that this client lives, three times within a time-to-live."""
        while True:
            await self._network.runtime.sleep(self.ttl / 3)
            clients = [*self.held]
            if any(lane.numbers is not None for lane in self._network.lanes):
                clients.append(self.client)
            async with self._network.runtime.nursery() as nursery:
                for address in set(self._network.routes.addresses.values()):
                    for client in clients:
                        nursery.start_soon(self._beat, address, client)

    async def _beat(self, address: tuple[str, int], client: int) -> None:
        with suppress(LogyardError):
            deadline = self._network.clock() + self.ttl / 3
            await self._network.ask(address, "heartbeat", {"client": client}, deadline)

    async def close(self) -> None:
        """End the sessions of logs with nothing under way."""
        network = self._network
        limit = network.runtime.limiter(CLOSE_AT_ONCE)
        with network.runtime.scope(network.clock() + CLOSE_S):
            async with self._network.runtime.nursery() as nursery:
                for session, name in self.held.items():
                    nursery.start_soon(self._close, name, session, limit)
                for lane in self._network.lanes:
                    if lane.numbers is not None and not lane.sent and not lane.waiting:
                        nursery.start_soon(self._close, lane.name, lane.numbers.session, limit)

    async def _close(self, name: str, session: int, limit: AbstractAsyncContextManager[object]) -> None:
        async with limit:
            with suppress(LogyardError):
                await self._network.run(close_call(name, session), CLOSE_S)
