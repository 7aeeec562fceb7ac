"""Leases and delays of a live cluster, measured by the client's monotonic clock: none may be over before its time.

A term counts from when the last request about it that was answered was sent, so what the network takes only makes the
check weaker. Used by `logyard bench kv | queue` beside their load, and by the storms of `tests/chaos`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
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
ROUNDED_S = 0.002
"""Log time is in milliseconds, rounded down."""


class Terms:
    """What was found. `early`: what was over before its time, in words; `late_s`: by how much the latest one was."""

    def __init__(self) -> None:
        self.checked = 0
        self.early: list[str] = []
        self.late_s = 0.0
        self.number = 0

    def over(self, what: str, passed_s: float, length_s: float) -> None:
        """Count a term of `length_s` that was over when so much had passed."""
        self.checked += 1
        if passed_s < length_s - ROUNDED_S:
            self.early.append(f"{what} of {length_s:g} s was over {passed_s:.3f} s after it was last asked for")

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
        sent: dict[bytes, tuple[float, float]] = {}
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(self._consume, yard, name, sent, failed)
            while True:
                self.number += 1
                body, delay_s = b"%d" % self.number, DELAY_S * (self.number % 3 == 0)
                sent[body] = time.monotonic(), delay_s
                try:
                    await yard.queue(name).publish(body, delay=delay_s or None)
                except LogyardError as error:
                    failed(error)
                await trio.sleep(PUBLISH_S)

    async def _consume(
        self,
        yard: Yard,
        name: str,
        sent: dict[bytes, tuple[float, float]],
        failed: Callable[[LogyardError], None],
    ) -> None:
        while True:
            try:
                async with yard.queue(name).consume(prefetch=64, lease=QUEUE_LEASE_S) as consumer:
                    async for message in consumer:
                        await self._took(consumer, message, name, sent)
            except LogyardError as error:
                failed(error)
                # What it held comes back with it.
                sent.clear()
                await trio.sleep(LOOK_S)

    async def _took(
        self, consumer: Consumer, message: Message, name: str, sent: dict[bytes, tuple[float, float]]
    ) -> None:
        found, now = sent.get(bytes(message.body or b"")), time.monotonic()
        if found is not None:
            made, delay_s = found
            if message.deliveries or delay_s:
                length_s = delay_s + message.deliveries * QUEUE_LEASE_S
                what = f"{name}: message {message.id}, delayed by {delay_s:g} s, with {message.deliveries} leases"
                self.over(what, now - made, length_s)
                self.late_s = max(self.late_s, now - made - length_s if message.deliveries + bool(delay_s) == 1 else 0)
        if found is None or message.deliveries >= FAILED_MAX:
            sent.pop(bytes(message.body or b""), None)
            consumer.ack_nowait(message)


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
