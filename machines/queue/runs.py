"""Runs of messages: what a queue's state consists of, and the shelves on which they wait.

A run is messages that came in one entry with the same options: their bodies are payloads of ordinals that follow one
another. So state and apply cost a share of a run, not an object a message. Invariant: a shelf hands out its messages in
the order of their numbers, also those that came back. Used by `machines.queue`.
"""

from __future__ import annotations

import heapq
import struct
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import ref

from logyard.engine.machine import PayloadRange, Position

REJECTED = 1
LIMIT = 2
EXPIRED = 3
DROPPED = 4
REASONS = ("", "rejected", "delivery_limit", "expired", "max_length")
"""Why a message is a dead letter, by number."""
STALE_MAX = 64


class Kept(dict["Run", tuple[Any, ...]]):
    """What runs were that changed since a view of their queue was taken; it ends with the view."""

    __slots__ = ("__weakref__",)

    def fields(self, run: Run) -> tuple[Any, ...]:
        """Return what a run was when the view was taken. From any thread: a run is kept before it changes, so what is
        read of it is whole unless it is kept by then."""
        found = run.fields()
        return self.get(run) or found


class Views:
    """The views of one queue that somebody reads while it goes on."""

    __slots__ = ("open",)

    def __init__(self) -> None:
        self.open: tuple[ref[Kept], ...] = ()

    def begin(self) -> Kept:
        """Begin another one."""
        kept = Kept()
        self.open = (*self._read(), ref(kept))
        return kept

    def keep(self, run: Run) -> None:
        """Keep what a run is for those who read it as it was: it is about to change."""
        for one in self.open:
            kept = one()
            if kept is None:
                self.open = self._read()
            elif run not in kept:
                kept[run] = run.fields()

    def _read(self) -> tuple[ref[Kept], ...]:
        return tuple(one for one in self.open if one() is not None)


UNSEEN = Views()
"""Of runs that are in no queue: nobody takes a view of them."""


class Run:
    """`count` messages. `number`: the first one's place in its shelf's order; `id`: what its publisher was told.
    `size` in bytes of each, or `sizes` packed. `expires` and `stamp` (published) in ms of log time, 0: never.
    `deliveries` that failed. `waits`: it lies on a shelf. `views`: of its queue."""

    __slots__ = (
        "number", "id", "count", "index", "ordinal", "size", "sizes", "expires", "stamp", "deliveries", "priority",
        "reason", "waits", "views",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        id: int,
        count: int,
        index: int,
        ordinal: int,
        size: int,
        sizes: bytes = b"",
        expires: int = 0,
        stamp: int = 0,
        deliveries: int = 0,
        priority: int = 0,
        reason: int = 0,
        *,
        views: Views = UNSEEN,
    ) -> None:
        self.number = number
        self.id = id
        self.count = count
        self.index = index
        self.ordinal = ordinal
        self.size = size
        self.sizes = sizes
        self.expires = expires
        self.stamp = stamp
        self.deliveries = deliveries
        self.priority = priority
        self.reason = reason
        self.waits = False
        self.views = views

    @property
    def bytes(self) -> int:
        """Of all its messages, heads and bodies."""
        if self.sizes:
            return sum(struct.unpack(f"<{self.count}I", self.sizes))
        return self.size * self.count

    def fit(self, most: int, room: int) -> int:
        """Return how many of its first `most` messages are within `room` bytes."""
        if room < 0:
            return 0
        most = min(most, self.count)
        if not self.sizes:
            return min(most, room // self.size) if self.size else most
        for number, size in enumerate(struct.unpack_from(f"<{most}I", self.sizes)):
            room -= size
            if room < 0:
                return number
        return most

    def cut(self, count: int) -> Run:
        """Cut off its first `count` messages as a run of their own; this one goes on behind them."""
        self._change()
        front = Run(
            self.number, self.id, count, self.index, self.ordinal, self.size, self.sizes[: 4 * count], self.expires,
            self.stamp, self.deliveries, self.priority, self.reason, views=self.views,
        )  # fmt: skip
        self.number += count
        self.id += count
        self.ordinal += count
        self.count -= count
        self.sizes = self.sizes[4 * count :]
        return front

    def _change(self) -> None:
        if self.views.open:
            self.views.keep(self)

    def enter(self, number: int, expires: int, reason: int = 0) -> None:
        """Take a new place in a shelf's order. `reason`: why that is the one of the dead letters."""
        self._change()
        self.number, self.expires, self.reason = number, expires, reason

    def prolong(self, ms: int) -> None:
        """Let its messages expire so much later, if they do."""
        if self.expires:
            self._change()
            self.expires += ms

    def fail(self) -> None:
        """Count a delivery that failed."""
        self._change()
        self.deliveries += 1

    def wait(self, waits: bool) -> None:
        """Note whether it lies on a shelf."""
        self.waits = waits

    def extend(self, count: int) -> None:
        """Count messages that continue it as its own."""
        self._change()
        self.count += count

    def continues(self, other: Run) -> bool:
        """Return whether its messages come right behind `other`'s, and are like them."""
        return (
            other.index == self.index
            and other.ordinal + other.count == self.ordinal
            and other.number + other.count == self.number
            and other.id + other.count == self.id
            and other.expires == self.expires
            and other.stamp == self.stamp
            and other.deliveries == self.deliveries
            and other.reason == self.reason
            and other.size == self.size
            and not self.sizes
            and not other.sizes
        )

    @property
    def payloads(self) -> PayloadRange:
        """Its messages' bodies."""
        return PayloadRange(Position(self.index, self.ordinal), Position(self.index, self.ordinal + self.count))

    def fields(self) -> tuple[Any, ...]:
        """Return, for a snapshot, what `Run` is made of."""
        return (
            self.number, self.id, self.count, self.index, self.ordinal, self.size, self.sizes, self.expires, self.stamp,
            self.deliveries, self.priority, self.reason,
        )  # fmt: skip


class Shelf:
    """Messages that wait. `fresh` came in the order of their numbers; `returned` (a heap) were handed out before, so
    all of them have lower numbers. Runs that were emptied where they lay are skipped when they are met."""

    __slots__ = ("fresh", "returned", "messages", "bytes", "_stale")

    def __init__(self) -> None:
        self.fresh: deque[Run] = deque()
        self.returned: list[tuple[int, Run]] = []
        self.messages = 0
        self.bytes = 0
        self._stale = 0

    def put(self, run: Run) -> bool:
        """Put a run at the end; return False when its messages joined the last run."""
        self.messages += run.count
        self.bytes += run.bytes
        last = self.fresh[-1] if self.fresh else None
        if last is not None and last.count and run.continues(last):
            last.extend(run.count)
            return False
        run.wait(True)
        self.fresh.append(run)
        return True

    def put_back(self, run: Run) -> None:
        """Put a run back where it was."""
        self.messages += run.count
        self.bytes += run.bytes
        run.wait(True)
        heapq.heappush(self.returned, (run.number, run))

    def take(self, most: int, room: int, at_least_one: bool) -> list[Run]:
        """Take up to `most` messages from the front within `room` bytes, or one that is larger than that."""
        found: list[Run] = []
        while most and (head := self._head()) is not None:
            count = head.fit(most, room)
            if not count:
                if found or not at_least_one:
                    break
                count = 1
            run = self._cut(head, count)
            room -= run.bytes
            most -= count
            found.append(run)
        return found

    def empty(self, run: Run) -> Run:
        """Take all messages of a run out of the middle; return them."""
        self.messages -= run.count
        self.bytes -= run.bytes
        gone = run.cut(run.count)
        run.wait(False)
        self._stale += 1
        if self._stale > STALE_MAX and 2 * self._stale > len(self.fresh) + len(self.returned):
            self.fresh = deque(run for run in self.fresh if run.count)
            self.returned = [pair for pair in self.returned if pair[1].count]
            heapq.heapify(self.returned)
            self._stale = 0
        return gone

    def _head(self) -> Run | None:
        while self.returned:
            if self.returned[0][1].count:
                return self.returned[0][1]
            heapq.heappop(self.returned)
            self._stale -= 1
        while self.fresh:
            if self.fresh[0].count:
                return self.fresh[0]
            self.fresh.popleft()
            self._stale -= 1
        return None

    def _cut(self, head: Run, count: int) -> Run:
        from_returned = bool(self.returned)
        if count == head.count:
            run = head
            if from_returned:
                heapq.heappop(self.returned)
            else:
                self.fresh.popleft()
            run.wait(False)
        else:
            run = head.cut(count)
            if from_returned:
                heapq.heapreplace(self.returned, (head.number, head))
        self.messages -= count
        self.bytes -= run.bytes
        return run

    def __iter__(self) -> Iterator[Run]:
        """Yield the runs in order."""
        yield from (run for run in in_order(self.returned) if run.count)
        yield from (run for run in self.fresh if run.count)

    @property
    def runs(self) -> int:
        """How many there are at most."""
        return len(self.fresh) + len(self.returned)

    def lying(self) -> tuple[list[tuple[int, Run]], list[Run]]:
        """Return what came back, in no order, and the fresh runs, those that were emptied among them."""
        return list(self.returned), list(self.fresh)

    @classmethod
    def decode(cls, rows: tuple[list[list[Any]], list[list[Any]]], views: Views) -> Shelf:
        """Return the shelf of a snapshot's rows."""
        shelf = cls()
        for row in rows[0]:
            shelf.put_back(Run(*row, views=views))
        for row in rows[1]:
            shelf.put(Run(*row, views=views))
        return shelf


def in_order(returned: Iterable[tuple[int, Run]]) -> list[Run]:
    """Return runs that came back, in order of their numbers."""
    return [run for _, run in sorted(returned, key=_number)]


def _number(pair: tuple[int, Run]) -> int:
    return pair[0]
