"""A queue, under trio or asyncio: publish, consume on credit, settle. `queue_sync` has the same for threads.

Publications are gathered into one frame a turn and applied exactly once, like a log's appends (`lane`). A consumer is a
session of its own: what it holds goes back to the queue when it leaves, or when its client is silent for its
time-to-live.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from logyard.protocol import queue as qw
from logyard.protocol.errors import Busy, LogyardError, Unknown
from logyard.protocol.frame import Buffer
from logyard.protocol.queue import Message

from ._async.queue import QueueVerbs
from .lane import Lane
from .log import Appended
from .messages import Session, open_session
from .network import Network
from .pending import PendingAppend
from .yards import Yard

__all__ = ["Consumer", "Message", "Queue"]


class Consumes(QueueVerbs):
    """A queue whose consumers are sessions of its yard."""

    __slots__ = ()

    yard: Yard

    @asynccontextmanager
    async def consume(
        self,
        *,
        prefetch: int = qw.PREFETCH,
        prefetch_bytes: int = qw.PREFETCH_BYTES,
        priority: int = 0,
        lease: float | None = None,
        dead: bool = False,
        auto: bool = True,
    ) -> AsyncIterator[Consumer]:
        """Consume: ``async with queue.consume() as messages: async for message in messages: ...``

        `prefetch`, `prefetch_bytes`: what is held at most; one message alone may be larger. `auto` False: `prefetch`
        messages come in all, and more only after `credit`. `priority`: higher ones are served first. `lease` (seconds):
        what is not settled in this time goes to somebody else. `dead`: the queue's dead letters. Leaving settles what
        was gathered; raises `NotHeld` like `Consumer.flush`, or why the consumer ended before all of it was settled.
        """
        command = qw.attach_command(prefetch, prefetch_bytes, priority, lease, dead, auto)
        consumer = await open_session(self.yard, self.name, partial(Consumer, credit_bytes=prefetch_bytes), "queue")
        try:
            await consumer.command(command)
            self.yard.spawn(consumer.settling)
            yield consumer
            if consumer.failure is None and not consumer.closed:
                await consumer.sent()
                await consumer.command(qw.detach_command())
                consumer.told()
            elif consumer.failure is not None and consumer._known < consumer._given:
                raise consumer.failure.again()
        finally:
            with self.yard.runtime.scope(shield=True), suppress(LogyardError):
                await consumer.close()


class QueueLane(Lane):
    """The pipeline of one queue."""

    __slots__ = ()
    kind = "queue"


class Queue(Consumes):
    """The queue `name`; nothing is asked until it is used. Make one with `yard.create(name, machine="queue", ...)`. Its
    verbs are in `_async.queue`; here is how publications leave, in the frames of its lane, and what consumes them."""

    __slots__ = ("lane",)

    yard: Network

    def __init__(self, yard: Network, name: str) -> None:
        self.yard = yard
        self.name = name
        self.lane: Lane = yard.lane(name, QueueLane)

    def publish_nowait(
        self,
        body: Buffer | None,
        *,
        metadata: Buffer = b"",
        command: bytes = qw.PLAIN,
    ) -> PendingAppend:
        """Publish without waiting: what is given in one turn of the loop leaves as one frame; its `offset` is the id.
        `command`: of `queue_wire.publish_command`, for options. Raises `Busy` when the client's window is full.

        A frame for which the queue has no room is refused as a whole (``queue_full``), also where a part of it had
        room; what is given to `publish` is then published by itself.
        """
        yard, lane = self.yard, self.lane
        if yard.window.used >= yard.window.limit:
            raise Busy.told("the client's window is full", {"cause": "client window", "retry_after": 0.001})
        batch, position = lane.add(metadata, body, yard.timeout, 0, command)
        if not lane.dirty:
            yard.kick(lane)
        return PendingAppend(batch, position)

    async def _send(
        self, metadata: Buffer, body: Buffer | None, command: bytes, timeout: float | None
    ) -> int:  # fmt: skip
        yard, lane = self.yard, self.lane
        if yard.closed or yard.window.used >= yard.window.limit:
            await yard.room()
        batch, position = lane.add(metadata, body, yard.timeout if timeout is None else timeout, 0, command)
        if not lane.dirty:
            yard.kick(lane)
        try:
            appended: Appended = await batch.pending.wait(yard.runtime.event)
        except LogyardError as error:
            left = batch.deadline - yard.clock()
            if error.code != "queue_full" or batch.count == 1 or left <= 0:
                raise
            # Nothing of its frame was taken, as there was no room for what others published beside it.
            return (await self._send_many([(metadata, body)], command, left))[0]
        return appended.first + position

    async def _send_many(
        self, messages: Iterable[tuple[Buffer, Buffer | None]], command: bytes, timeout: float | None
    ) -> tuple[int, int]:
        yard, lane = self.yard, self.lane
        if yard.closed or yard.window.used >= yard.window.limit:
            await yard.room()
        batch = lane.add_many(messages, yard.timeout if timeout is None else timeout, 0, command)
        yard.kick(lane)
        appended: Appended = await batch.pending.wait(yard.runtime.event)
        return appended.first, appended.given


class Consumer(Session):
    """What `Queue.consume` gives: iterate over it for messages, settle each of them. A message that is settled late,
    after its lease or by a consumer that was cut off for too long, is not this consumer's any more and comes again, to
    it or to somebody else (at least once): settling it raises `NotHeld`."""

    __slots__ = ("credit_bytes", "_inbox", "_messages", "_settles", "_wake", "_settled", "_given", "_known")

    def __init__(self, network: Yard, name: str, number: int, credit_bytes: int) -> None:
        super().__init__(network, name, number)
        self.credit_bytes = credit_bytes
        self._inbox = qw.Inbox()
        self._messages: deque[Message] = deque()
        # What is not sent yet; who waits for it shares an event.
        self._settles = qw.Settles()
        self._wake = network.runtime.lot()
        self._settled = network.runtime.event()
        # How often something was settled here, and up to where a quorum knows of it.
        self._given = self._known = 0

    def __aiter__(self) -> AsyncIterator[Message]:
        """Yield messages, as long as the consumer lasts. Raises `SessionExpired` ... when it ended by itself."""
        return self

    async def __anext__(self) -> Message:
        """Return the next message; waits for one."""
        while not self._messages:
            if self.failure is not None:
                raise self.failure.again()
            if self.closed:
                raise StopAsyncIteration
            await self._lot.park()
        return self._messages.popleft()

    async def get(self, wait: float) -> Message | None:
        """Return the next message, or None when none comes within `wait` seconds."""
        with self._network.runtime.scope(self._network.clock() + wait):
            return await self.__anext__()
        return None

    def ack_nowait(self, message: Message, *, multiple: bool = False) -> None:
        """Settle a message, which is done with, or everything up to it: sent with others at the end of this turn;
        `flush` says what came of it."""
        if not self._settles:
            self._wake.unpark_all()
        self._given += 1
        self._settles.add(qw.ACK, message.tag, multiple)

    async def ack(self, message: Message, *, multiple: bool = False) -> int:
        """Settle a message, which is done with, or everything up to it; return, when a quorum knows, how many messages
        that were. Raises `NotHeld` when there were none: it is not this consumer's any more, and comes again or was
        settled before."""
        return await self._settle(qw.ACK, message, multiple)

    async def nack(self, message: Message, *, multiple: bool = False, requeue: bool = True) -> int:
        """Put a message back to its place in the queue, as a delivery that failed; without `requeue` it becomes a dead
        letter. Returns and raises as `ack`."""
        return await self._settle(qw.REQUEUE if requeue else qw.REJECT, message, multiple)

    async def reject(self, message: Message) -> int:
        """Make a message a dead letter. Returns and raises as `ack`."""
        return await self.nack(message, requeue=False)

    async def extend(self, *messages: Message) -> int:
        """Begin their leases anew; return how many of them are still this consumer's."""
        commands = qw.extend_commands((one.tag, one.tag) for one in messages)
        return sum([qw.count_of(await self.command(command)) for command in commands])

    async def credit(self, messages: int) -> None:
        """Let so many more messages (with `auto`: so many at most at a time) come."""
        await self.command(qw.credit_command(messages, self.credit_bytes))

    async def flush(self) -> int:
        """Wait until everything that `ack_nowait` settled so far is known to a quorum; return how many messages that
        were since the last `flush`. Raises `NotHeld` when some were not this consumer's any more, and what stands in
        the way."""
        await self.sent()
        return self.told()

    def told(self) -> int:
        """Return how many messages `ack_nowait` settled since this was asked last, as far as is known. Raises
        `NotHeld`."""
        return self._settles.told(self.name)

    async def sent(self) -> None:
        """Wait until everything that was gathered so far is known to a quorum. Raises what stands in the way."""
        given = self._given
        while self._known < given:
            if self.failure is not None:
                raise self.failure.again()
            if self.closed:
                raise Unknown(f"{self.name}: the consumer was closed before what it settled was known")
            await self._settled.wait()
        if self.failure is not None:
            raise self.failure.again()

    async def _settle(self, what: int, message: Message, multiple: bool) -> int:
        """Settle a message by a command of its own, so that its answer is about it."""
        if multiple and self._known < self._given:
            # What was gathered counts for itself.
            await self.sent()
        if self.failure is not None:
            raise self.failure.again()
        count = qw.count_of(
            await self.command(qw.settle_command(what, [(1 if multiple else message.tag, message.tag)]))
        )
        return qw.check_held(self.name, count, int(not count))

    async def settling(self) -> None:
        """Settle what was gathered meanwhile, and ask for what was lost on the way: a task."""
        try:
            while not self.closed and self.failure is None:
                if self._inbox.lost:
                    await self.command(self._inbox.resend())
                elif self._settles:
                    given = self._given
                    for command, wanted in self._settles.take():
                        self._settles.answered(await self.command(command), wanted)
                    self._known = given
                    self._finished()
                else:
                    await self._wake.park()
        except LogyardError as error:
            if self.failure is None:
                self.failure = error
            self._lot.unpark_all()
        finally:
            self._finished()

    def _fail(self, error: LogyardError) -> None:
        super()._fail(error)
        self._finished()

    def _finished(self) -> None:
        settled, self._settled = self._settled, self._network.runtime.event()
        settled.set()

    def _end(self) -> None:
        super()._end()
        self._wake.unpark_all()

    def _pushed(self, header: Mapping[str, Any], data: memoryview) -> None:
        if self.closed:
            return
        messages = self._inbox.pushed(header, data)
        if messages:
            self._messages += messages
            self._lot.unpark_all()
        if self._inbox.lost:
            self._wake.unpark_all()
