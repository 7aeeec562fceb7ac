"""Leases and delays of a live cluster, measured by the client's monotonic clock: none may be over before its time.

A term counts from when the last request about it that was answered was sent, so what the network takes only makes the
check weaker. Used by `logyard bench kv | queue` beside their load, and by the storms of `tests/chaos`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import trio

from logyard.client.aio import Yard, connect
from logyard.client.queue import Consumer, Message
from logyard.protocol.errors import LogyardError

KV_LANES = 3
LENGTHS_S = (1.0, 2.0)
QUEUE_LEASE_S = 1.0
DELAY_S = 1.5
LOOK_S = 0.05
PUBLISH_S = 0.25
FAILED_MAX = 3
"""Deliveries of a message that fail before it is acknowledged."""
LEARNS_S = 10.0
"""A consumer whose session ended, or that was cut off, knows it by then."""
ROUNDED_S = 0.002
"""Log time is in milliseconds, rounded down."""


class Holder:
    """A consumer, from when it attached until it failed: what it held comes back with it, and others may have that
    before it learns so itself."""

    def __init__(self) -> None:
        self.failed = math.inf

    def fail(self) -> None:
        """Note that it failed now."""
        self.failed = time.monotonic()

    def explains(self, seen: float) -> bool:
        """Return whether what came back at a time did so because this one's session or connection had ended."""
        return self.failed < seen + LEARNS_S


class Sent:
    """A message that is to come again: when it was published, with what delay, and who may hold it now."""

    def __init__(self, delay_s: float, holders: Iterable[Holder]) -> None:
        self.made = time.monotonic()
        self.delay_s = delay_s
        self.holders = {*holders}

    def came_to(self, holder: Holder) -> None:
        """Note who has it now."""
        self.holders = {holder}


class Terms:
    """What was found. `late_s`: by how much the latest one was over after its time."""

    def __init__(self) -> None:
        self.checked = 0
        self.late_s = 0.0
        self.number = 0
        self._early: list[tuple[str, float, frozenset[Holder]]] = []
        self._holders: set[Holder] = set()

    @property
    def early(self) -> list[str]:
        """What was over before its time, in words: complete when all has ended. What a consumer held that failed has
        come back by that."""
        return [words for words, seen, held in self._early if not any(one.explains(seen) for one in held)]

    def over(self, what: str, passed_s: float, length_s: float, holders: Iterable[Holder] = ()) -> None:
        """Count a term of `length_s` that was over when so much had passed, of what one of these may have held."""
        self.checked += 1
        if passed_s < length_s - ROUNDED_S:
            words = f"{what} of {length_s:g} s was over {passed_s:.3f} s after it was last asked for"
            self._early.append((words, time.monotonic(), frozenset(holders)))

    def row(self) -> dict[str, Any]:
        """Return the row for a report."""
        return {"terms": self.checked, "terms_early": len(self.early), "terms_late_s": round(self.late_s, 3)}

    # KV

    async def leases(self, yard: Yard, name: str, failed: Callable[[LogyardError], None]) -> None:
        """Grant leases of a KV group, one after the other on a few lanes, until cancelled."""
        async with trio.open_nursery() as nursery:
            for lane in range(KV_LANES):
                nursery.start_soon(self._lane, yard, name, lane, failed)

    async def _lane(self, yard: Yard, name: str, lane: int, failed: Callable[[LogyardError], None]) -> None:
        while True:
            self.number += 1
            try:
                await self._lease(yard, name, self.number, LENGTHS_S[self.number % len(LENGTHS_S)])
            except LogyardError as error:
                # What became of it is not known; another one is looked at.
                failed(error)
                await trio.sleep(LOOK_S)

    async def _lease(self, yard: Yard, name: str, number: int, length_s: float) -> None:
        kv, key, what = yard.kv(name), b"term/%d" % number, f"{name}: lease {number}"
        sent = time.monotonic()
        lease = (await kv.grant(length_s)).id
        known = time.monotonic()
        try:
            await kv.put(key, b"", lease=lease)
            if number % 3 == 0:
                await trio.sleep(length_s / 2)
                asked = time.monotonic()
                await kv.keep_alive(lease)
                sent, known = asked, time.monotonic()
        except LogyardError as error:
            if error.code != "lease_not_found":
                raise
            self.over(what, time.monotonic() - sent, length_s)
            return
        while True:
            asked = time.monotonic()
            if await kv.get(key) is None:
                break
            self.late_s = max(self.late_s, asked - known - length_s)
            await trio.sleep(LOOK_S)
        self.over(what, time.monotonic() - sent, length_s)

    # Queues

    async def deliveries(self, yard: Yard, name: str, failed: Callable[[LogyardError], None]) -> None:
        """Publish messages that two consumers get and do not settle in time, and delayed ones, until cancelled."""
        sent: dict[bytes, Sent] = {}
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(self._consume, yard, name, sent, failed)
            while True:
                self.number += 1
                body, delay_s = b"%d" % self.number, DELAY_S * (self.number % 3 == 0)
                sent[body] = Sent(delay_s, self._holders)
                try:
                    await yard.queue(name).publish(body, delay=delay_s or None)
                except LogyardError as error:
                    failed(error)
                await trio.sleep(PUBLISH_S)

    async def _consume(
        self,
        yard: Yard,
        name: str,
        sent: dict[bytes, Sent],
        failed: Callable[[LogyardError], None],
    ) -> None:
        while True:
            holder = Holder()
            # It may get any of them from now on.
            for one in (self._holders, *(one.holders for one in sent.values())):
                one.add(holder)
            try:
                async with yard.queue(name).consume(prefetch=64, lease=QUEUE_LEASE_S) as consumer:
                    async for message in consumer:
                        self._took(consumer, holder, message, name, sent)
            except LogyardError as error:
                failed(error)
                holder.fail()
                self._holders.discard(holder)
                # What it held comes back with it.
                sent.clear()
                await trio.sleep(LOOK_S)

    def _took(self, consumer: Consumer, holder: Holder, message: Message, name: str, sent: dict[bytes, Sent]) -> None:
        found, now = sent.get(bytes(message.body or b"")), time.monotonic()
        if found is not None and (message.deliveries or found.delay_s):
            passed_s, length_s = now - found.made, found.delay_s + message.deliveries * QUEUE_LEASE_S
            what = f"{name}: message {message.id}, delayed by {found.delay_s:g} s, with {message.deliveries} leases"
            self.over(what, passed_s, length_s, found.holders)
            self.late_s = max(self.late_s, passed_s - length_s if message.deliveries + bool(found.delay_s) == 1 else 0)
        if found is None or message.deliveries >= FAILED_MAX:
            sent.pop(bytes(message.body or b""), None)
            consumer.ack_nowait(message)
        else:
            found.came_to(holder)


class Beside:
    """A thread that looks at terms of a KV group or a queue while something else goes on. Leave it as a context."""

    def __init__(self, addresses: Sequence[str], name: str, kind: str) -> None:
        self.addresses = list(addresses)
        self.name = name
        self.kind = kind
        self.terms = Terms()
        self.failure: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="terms", daemon=True)

    def __enter__(self) -> Terms:
        self._thread.start()
        return self.terms

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        try:
            trio.run(self._main)
        except BaseException as error:
            self.failure = error

    async def _main(self) -> None:
        async with connect(self.addresses) as yard, trio.open_nursery() as nursery:
            look = self.terms.leases if self.kind == "kv" else self.terms.deliveries
            nursery.start_soon(look, yard, self.name, lambda error: None)
            while not self._stop.is_set():
                await trio.sleep(LOOK_S)
            nursery.cancel_scope.cancel()
