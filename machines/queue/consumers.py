"""A queue's consumers: what each one holds, and which of them gets the next messages.

Invariant: a message is on a shelf or held by one consumer, never both and never two; a consumer holds at most what its
credit allows, in messages and in bytes (one message alone may be larger). Used by `machines.queue`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import msgpack

from logyard.engine.machine import Deliver, PayloadRange, Position

from .runs import Run, Views

DELIVER_BYTES = 1 << 20
"""One delivery: what is read in one go, and waits as one."""


class Held(NamedTuple):
    """A run under delivery tags from `tag` on, to be settled before `deadline` (ms of log time)."""

    tag: int
    run: Run
    deadline: int


class Consumer:
    """See the module. `key` is (session, the client's number for it), `serial` says who came first. `auto`: what is
    settled gives its credit back; else `credit` is what is left of it."""

    __slots__ = (
        "key", "serial", "auto", "dead", "priority", "credit", "credit_bytes", "lease_ms", "next_tag", "held",
        "messages", "bytes",
    )  # fmt: skip

    def __init__(
        self,
        key: tuple[int, int],
        serial: int,
        auto: bool = True,
        dead: bool = False,
        priority: int = 0,
        credit: int = 0,
        credit_bytes: int = 0,
        lease_ms: int = 0,
        next_tag: int = 1,
    ) -> None:
        self.key = key
        self.serial = serial
        self.auto = auto
        self.dead = dead
        self.priority = priority
        self.credit = credit
        self.credit_bytes = credit_bytes
        self.lease_ms = lease_ms
        self.next_tag = next_tag
        self.held: list[Held] = []
        self.messages = 0
        self.bytes = 0

    def room(self, version: int) -> int:
        """Return how many messages it may get now, under this version of the machine."""
        # A message may have no bytes.
        full = self.bytes > self.credit_bytes if version > 2 else self.bytes >= self.credit_bytes
        if full and self.messages:
            return 0
        return max(0, self.credit - self.messages) if self.auto else self.credit

    def hold(self, run: Run, deadline: int) -> Held:
        """Give the consumer a run to hold."""
        held = Held(self.next_tag, run, deadline)
        self.held.append(held)
        self.next_tag += run.count
        self.messages += run.count
        self.bytes += run.bytes
        if not self.auto:
            self.credit -= run.count
        return held

    def drop(self, ranges: Iterable[tuple[int, int]]) -> list[Held]:
        """Take the messages with these tags (rising ranges) from it, in their order; tags that it does not hold are
        left out."""
        found: list[Held] = []
        for first, last in ranges:
            at = max(0, bisect_right(self.held, first, key=_tag) - 1)
            stop = at
            rest: list[Held] = []
            while stop < len(self.held) and self.held[stop].tag <= last:
                tag, run, deadline = self.held[stop]
                stop += 1
                if tag + run.count <= first:
                    at = stop
                    continue
                if tag < first:
                    rest.append(Held(tag, run.cut(first - tag), deadline))
                    tag = first
                if tag + run.count - 1 > last:
                    found.append(Held(tag, run.cut(last + 1 - tag), deadline))
                    rest.append(Held(last + 1, run, deadline))
                else:
                    found.append(Held(tag, run, deadline))
            self.held[at:stop] = rest
        self._gone(found)
        return found

    def prolong(self, ms: int) -> None:
        """Prolong the lease of all that it holds, and when that expires."""
        for held in self.held:
            held.run.prolong(ms)
        self.held = [held._replace(deadline=held.deadline + ms) for held in self.held]

    def drop_late(self, now: int) -> list[Held]:
        """Take what it should have settled by now from it."""
        late = [held for held in self.held if held.deadline <= now]
        if late:
            self.held = [held for held in self.held if held.deadline > now]
            self._gone(late)
        return late

    def drop_all(self) -> list[Held]:
        """Take everything from it."""
        found, self.held = self.held, []
        self._gone(found)
        return found

    def extend(self, ranges: Iterable[tuple[int, int]], deadline: int) -> int:
        """Give the messages with these tags a new deadline; return how many it holds."""
        count = 0
        for held in self.drop(ranges):
            at = bisect_right(self.held, held.tag, key=_tag)
            self.held.insert(at, Held(held.tag, held.run, deadline))
            count += held.run.count
            self.messages += held.run.count
            self.bytes += held.run.bytes
        return count

    def _gone(self, gone: list[Held]) -> None:
        for held in gone:
            self.messages -= held.run.count
            self.bytes -= held.run.bytes

    def own(self) -> tuple[Any, ...]:
        """Return, for a snapshot, all but what it holds."""
        return (
            self.key, self.serial, self.auto, self.dead, self.priority, self.credit, self.credit_bytes, self.lease_ms,
            self.next_tag,
        )  # fmt: skip

    @classmethod
    def decode(cls, value: list[Any], views: Views) -> Consumer:
        """Return the consumer of a snapshot's row."""
        (key, *own), rows = value
        consumer = cls((key[0], key[1]), *own)
        for tag, fields, deadline in rows:
            run = Run(*fields, views=views)
            consumer.held.append(Held(tag, run, deadline))
            consumer.messages += run.count
            consumer.bytes += run.bytes
        return consumer


def _tag(held: Held) -> int:
    return held.tag


def deliveries(consumer: Consumer, held: Iterable[Held], start: int) -> Iterator[Deliver]:
    """Yield what brings these messages to their consumer: all that it holds from tag `start` on, so that a gap between
    two deliveries is a lost one.

    The tag of a delivery is msgpack ``[consumer, first, end, rows]``: what is held of the tags from `first` up to, but
    without, `end`, a row being ``[tag, messages, id, index, ordinal, failed deliveries, published (ms), reason]``.
    """
    session, number = consumer.key
    rows: list[tuple[int, ...]] = []
    refs: list[PayloadRange] = []
    room = DELIVER_BYTES
    for tag, run, _ in held:
        at = 0
        while at < run.count:
            count = _fitting(run, at, room)
            if not count and rows:
                yield Deliver(session, refs, msgpack.packb((number, start, tag + at, rows)))
                rows, refs, room, start = [], [], DELIVER_BYTES, tag + at
                continue
            count = max(1, count)
            ordinal = run.ordinal + at
            rows.append((tag + at, count, run.id + at, run.index, ordinal, run.deliveries, run.stamp, run.reason))
            refs.append(PayloadRange(Position(run.index, ordinal), Position(run.index, ordinal + count)))
            room -= _bytes(run, at, count)
            at += count
    yield Deliver(session, refs, msgpack.packb((number, start, consumer.next_tag, rows)))


def _fitting(run: Run, at: int, room: int) -> int:
    """Return how many messages behind the first `at` of a run are within `room` bytes."""
    if not run.sizes:
        return min(run.count - at, max(0, room) // run.size) if run.size else run.count - at
    count = 0
    for offset in range(4 * at, 4 * run.count, 4):
        room -= int.from_bytes(run.sizes[offset : offset + 4], "little")
        if room < 0:
            break
        count += 1
    return count


def _bytes(run: Run, at: int, count: int) -> int:
    if not run.sizes:
        return count * run.size
    return sum(int.from_bytes(run.sizes[place : place + 4], "little") for place in range(4 * at, 4 * (at + count), 4))
