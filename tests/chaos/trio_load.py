"""A thread that runs clients of the trio kind until the storm is over and their work is done."""

from __future__ import annotations

import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import trio

from logyard.client.aio import Yard, connect
from logyard.protocol.errors import LogyardError

from .load import TIMEOUT_S, Journal

SESSION_TTL_S = 15.0
"""A consumer that left while nobody answered holds its messages for so long: less than `FINISH_S`."""
STEP_S = 0.05
"""Between two looks at what another thread says."""
FINISH_S = 60.0
"""From the end of the storm until everything has come that is still to come."""


class TrioLoad(threading.Thread):
    """See the module. `work` is the kind's; a failure that is no refusal is kept for the judge."""

    def __init__(self, number: int, servers: Sequence[str], journal: Journal, stop: threading.Event, seed: int) -> None:
        super().__init__(name=f"{type(self).__name__}-{number}", daemon=True)
        self.number = number
        self.servers = list(servers)
        self.journal = journal
        self.stop = stop
        self.seed = seed
        self.count = 0
        self.failure: BaseException | None = None

    def run(self) -> None:
        """All of it."""
        try:
            trio.run(self.work)
        except BaseException as error:
            self.failure = error
            raise

    async def work(self) -> None:
        """What this kind does."""
        raise NotImplementedError

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Yard]:
        """A client of its own, as soon as some node answers."""
        while True:
            async with AsyncExitStack() as stack:
                try:
                    client = connect(self.servers, timeout=TIMEOUT_S, session_ttl=SESSION_TTL_S)
                    yard = await stack.enter_async_context(client)
                except LogyardError as error:
                    await self.refused(error)
                    continue
                yield yard
                return

    def draw(self, name: object) -> random.Random:
        """Chance, by the seed."""
        return random.Random(f"{self.seed} {self.name} {name}")

    def fresh(self) -> int:
        """A number that nobody else has."""
        self.count += 1
        return self.number * 1_000_000_000 + self.count

    async def refused(self, error: LogyardError) -> None:
        """Not at once again."""
        self.journal.refusal(error)
        await trio.sleep(0.02)

    async def until(self, done: Callable[[], Awaitable[bool]]) -> bool:
        """Whether something came true in the time there is after the storm; refusals are none of its business."""
        with trio.move_on_after(FINISH_S):
            while True:
                try:
                    if await done():
                        return True
                except LogyardError as error:
                    self.journal.refusal(error)
                await trio.sleep(STEP_S)
        return False
