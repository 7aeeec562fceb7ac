"""Producers and consumers of queues under chaos. What is confirmed is consumed in the end, once acknowledged it never
comes again, what was refused never comes, and the queue's own counts add up.

An acknowledgement that a quorum knows of settles a message: its consumer held it then. `QueueLoad.work` goes on until
the queues are empty, so that what was not consumed during the storm is consumed behind it.
"""

from __future__ import annotations

import random
import time
from typing import Any

import trio

from logyard.client.queue import Consumer, Message, Queue
from logyard.protocol.errors import LogyardError

from .load import OPEN, QUEUES, Journal, body, number_of
from .redelivery import Held, Holder, Redeliveries
from .trio_load import STEP_S, TrioLoad

PRODUCERS = 2
CONSUMERS = 2
AHEAD = 400
"""Messages that producers may be ahead of consumers."""
BATCH = 5
DELAY_S = 0.5
DEAD_REASONS = ("rejected", "delivery_limit")
OPTIONS = {"delivery_limit": 4}


class Told:
    """What producers and consumers of one queue were told. Messages by id; numbers are those of their bodies."""

    def __init__(self, name: str, journal: Journal) -> None:
        self.name = name
        self.journal = journal
        self.confirmed: dict[int, int] = {}
        self.open: set[int] = set()
        self.refused: set[int] = set()
        self.cancelled: set[int] = set()
        self.settled: set[int] = set()
        self.delivered: dict[int, int] = {}
        self.ids: dict[int, int] = {}
        self.again = 0
        self.redeliveries = Redeliveries()
        self.causes: dict[str, int] = {}
        self.stats: dict[str, Any] = {}

    def violation(self, text: str) -> None:
        """Something that must never be."""
        self.journal.violation(f"{self.name}: {text}")

    @property
    def ahead(self) -> int:
        """Confirmed messages that nobody has settled."""
        return len(self.confirmed) - len(self.settled) - len(self.cancelled)

    def publish(self, first: int, numbers: list[int]) -> None:
        """Messages were confirmed under dense ids."""
        for message, number in enumerate(numbers, first):
            if self.confirmed.setdefault(message, number) != number:
                self.violation(f"id {message} was given to {self.confirmed[message]} and to {number}")
            self.match(message, number)

    def match(self, message: int, number: int) -> None:
        """An id has one body and a body one id, whoever says so."""
        if self.ids.setdefault(number, message) != message:
            self.violation(f"{number} is message {self.ids[number]} and message {message}")
        if self.delivered.get(message, number) != number or self.confirmed.get(message, number) != number:
            self.violation(f"message {message} is not {number} everywhere")

    def deliver(self, message: Message, dead: bool) -> bool:
        """A message came; whether somebody had settled it before."""
        number = number_of(message.body or b"")
        if number is None or message.metadata != number.to_bytes(8, "big"):
            self.violation(f"message {message.id} has wrong bytes")
            return False
        if number in self.refused:
            self.violation(f"{number} was refused and came as message {message.id}")
        if message.id in self.cancelled:
            self.violation(f"message {message.id} was cancelled and came")
        if dead != (message.reason in DEAD_REASONS):
            self.violation(f"message {message.id} came with reason {message.reason!r}")
        self.again += message.id in self.delivered
        self.match(message.id, number)
        self.delivered[message.id] = number
        return message.id in self.settled

    def settle(self, message: Message, before: bool) -> None:
        """A quorum knows that a message was acknowledged; `before`: it had been settled when it came."""
        if before:
            self.violation(f"message {message.id} was acknowledged and came again")
        self.settled.add(message.id)

    def judge(self) -> list[str]:
        """Losses, once the queue is empty; the counts are judged as well."""
        waits = self.confirmed.keys() - self.settled - self.cancelled
        stats = self.stats
        self.causes, unexplained = self.redeliveries.judge()
        for text in unexplained:
            self.violation(text)
        known = len(self.confirmed) + len(self.open)
        if not len(self.confirmed) <= stats["published"] <= known:
            self.violation(f"published {stats['published']}, confirmed {len(self.confirmed)} of {known}")
        gone = stats["acknowledged"] + stats["cancelled"] + stats["dropped"]
        if gone != stats["published"] or stats["dropped"] or stats["expired"] or stats["purged"]:
            self.violation(f"the counts do not add up: {stats}")
        # An acknowledgement that nobody confirmed may have counted all the same.
        if not len(self.settled) <= stats["acknowledged"] <= len(self.delivered):
            self.violation(f"acknowledged {stats['acknowledged']}, settled {len(self.settled)}: {stats}")
        never = sorted(message for message in waits if message not in self.delivered)
        return [f"{self.name}: message {message} was confirmed and never came" for message in never]


class QueueLoad(TrioLoad):
    """The producers and consumers of all queues."""

    def prepare(self) -> None:
        """Before it starts."""
        self.told = {name: Told(name, self.journal) for name in QUEUES}

    async def work(self) -> None:
        """Producers until the storm is over, consumers until there is nothing left."""
        async with trio.open_nursery() as consuming:
            for told in self.told.values():
                for number in range(CONSUMERS):
                    consuming.start_soon(self.consume, told, number, False)
                consuming.start_soon(self.consume, told, CONSUMERS, True)
            async with trio.open_nursery() as producing:
                for told in self.told.values():
                    for number in range(PRODUCERS):
                        producing.start_soon(self.produce, told, number)
            async with self.client() as yard:
                for name, told in self.told.items():
                    await self.finish(yard.queue(name), told)
            consuming.cancel_scope.cancel()

    async def finish(self, queue: Queue, told: Told) -> None:
        """Until a queue is empty."""

        async def empty() -> bool:
            told.stats = await queue.stats()
            return not any(told.stats[key] for key in ("ready", "unacked", "delayed", "dead"))

        if not await self.until(empty):
            told.violation(f"it does not get empty: {told.stats}")

    async def produce(self, told: Told, number: int) -> None:
        """One producer."""
        draw = self.draw(f"producer {number} {told.name}")
        async with self.client() as yard:
            queue = yard.queue(told.name)
            while not self.stop.is_set():
                if told.ahead > AHEAD:
                    await trio.sleep(STEP_S)
                    continue
                await self.publish(queue, told, draw)

    async def publish(self, queue: Queue, told: Told, draw: random.Random) -> None:
        """Some messages; now and then delayed ones, some of which are cancelled."""
        numbers = [self.fresh() for _ in range(draw.randint(1, BATCH))]
        messages = [(number.to_bytes(8, "big"), body(number)) for number in numbers]
        delay = DELAY_S if draw.random() < 0.1 else None
        try:
            ids = await queue.publish_many(messages, priority=draw.choice(("normal", "high")), delay=delay)
        except LogyardError as error:
            (told.open if error.code in OPEN else told.refused).update(numbers)
            await self.refused(error)
            return
        self.journal.count()
        told.publish(ids.start, numbers)
        if len(ids) != len(numbers):
            told.violation(f"{len(numbers)} messages were published, {len(ids)} confirmed")
        if delay is not None and draw.random() < 0.5:
            await self.cancel(queue, told, ids.start)

    async def cancel(self, queue: Queue, told: Told, message: int) -> None:
        """Take a delayed message back, if it still is one. Without an answer nobody knows, and it may never come."""
        try:
            if await queue.cancel(message):
                told.cancelled.add(message)
                if message in told.delivered:
                    told.violation(f"message {message} came and was cancelled")
        except LogyardError as error:
            if error.code in OPEN:
                # Counted as settled: it may come or not.
                told.open.add(told.confirmed.pop(message))
            await self.refused(error)

    async def consume(self, told: Told, number: int, dead: bool) -> None:
        """One consumer, which leaves and comes back, in the middle of what it holds."""
        draw = self.draw(f"consumer {number} {told.name}")
        async with self.client() as yard:
            queue = yard.queue(told.name)
            while True:
                holder = Holder(f"consumer {number}")
                try:
                    async with queue.consume(prefetch=draw.randint(1, 30), priority=number % 2, dead=dead) as consumer:
                        for _ in range(draw.randint(5, 100)):
                            message = await consumer.get(1.0)
                            if message is not None:
                                held = told.redeliveries.came(message.id, message.deliveries, holder)
                                await self.settle(consumer, message, told, draw, dead, held)
                        holder.left = time.monotonic()
                except LogyardError as error:
                    # Whatever it held comes back: its session is closed, if it had not ended.
                    holder.failed = error.code
                    await self.refused(error)

    async def settle(
        self, consumer: Consumer, message: Message, told: Told, draw: random.Random, dead: bool, held: Held
    ) -> None:
        """Acknowledge most, give back some, reject a few."""
        before = told.deliver(message, dead)
        chance, asked = draw.random(), time.monotonic()
        if dead or chance < 0.9:
            await consumer.ack(message)
            self.journal.count()
            told.settle(message, before)
            held.settled = True
        else:
            held.given_back = True
            await (consumer.nack(message) if chance < 0.97 else consumer.reject(message))
        held.holder.heard = asked
