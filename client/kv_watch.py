"""Watches of the asynchronous client: every change of the keys that are watched, in order, without a gap, none twice.

All watches of one KV (and node) share one stream from whoever leads; it is opened again, wherever the leader is by
then, and each watch goes on with the revision after the last one it has seen. A reader that is slow costs a bounded
number of bytes: its watch is given up at the server and taken up again when there is room. Made by `kv.KV.watch`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

from logyard.protocol.errors import LogyardError, Unknown
from logyard.protocol.kv import (
    KEYS_ONLY,
    NO_DELETE,
    NO_PUT,
    PARTS,
    PREVIOUS,
    Bodies,
    Changes,
    Compacted,
    Decoder,
    Event,
    Parts,
    answer_of,
    bodies_of,
    value_questions,
)

from .admin import Call, ask, plain
from .kv_requests import anew, events_call, near
from .runtime import Handover
from .sequences import new_number
from .session import Retry
from .yards import Yard

BUFFER_BYTES = 4 << 20
"""What is kept for the reader of one watch; one revision alone may be more."""
OVERHEAD = 64
ADD_MAX = 2000
ADD_BYTES = 128 << 10
"""Watches of one call."""
CLOSE_S = 5.0


class Asked(Protocol):
    """A KV group, as its watches need it."""

    @property
    def yard(self) -> Yard:
        """Its client."""

    @property
    def name(self) -> str:
        """Its name."""

    async def ask(
        self, data: bytes, timeout: float, consistency: str = "linearizable", node: int | None = None
    ) -> tuple[bytes, Bodies]:
        """Ask one question."""


class Flow(NamedTuple):
    """What is watched; see `kv.KV.watch`."""

    key: bytes
    end: bytes
    start: int
    previous: bool
    values: bool
    puts: bool
    deletes: bool
    progress: bool

    @property
    def flags(self) -> int:
        """As they travel."""
        return (
            (PREVIOUS if self.previous else 0)
            | (0 if self.values else KEYS_ONLY)
            | (0 if self.puts else NO_PUT)
            | (0 if self.deletes else NO_DELETE)
            | PARTS
        )


class Watch:
    """An iterator of `Changes`, one a revision. `next`: the revision that comes next, 0 while the server has not said.
    Raises `Compacted` when what comes next is gone, and what else ends it."""

    __slots__ = (
        "number", "flow", "next", "failure", "paused", "asks", "_uid", "_kept", "_bytes", "_stream", "_reader",
        "_others",
    )  # fmt: skip

    def __init__(self, stream: Stream, number: int, flow: Flow) -> None:
        self.number = number
        self.flow = flow
        self.next = flow.start
        self.failure: LogyardError | None = None
        # The server does not send to it: it has no room. `asks`: what comes next is too long to be sent unasked.
        self.paused = False
        self.asks = False
        # The group whose revisions it counts; 0: nobody has said.
        self._uid = 0
        self._kept: deque[tuple[int, Changes]] = deque()
        self._bytes = 0
        self._stream = stream
        # The task that waits for the next changes gets them handed over. Whoever else waits for something to happen
        # looks again.
        runtime = stream.kv.yard.runtime
        self._reader: Handover[Changes | None] = runtime.handover(self._unclaimed)
        self._others = runtime.lot()

    def __aiter__(self) -> Watch:
        return self

    async def __anext__(self) -> Changes:
        while not self._kept:
            if self.failure is not None:
                raise self.failure.again()
            if self.asks:
                await self._stream.ask(self)
                self.asks = False
            elif self.paused:
                self.paused = False
                self._stream.want(self)
            elif not self._reader.waited:
                found = await self._reader.take()
                if found is not None:
                    return found
            else:
                await self._others.park()
        size, changes = self._kept.popleft()
        self._bytes -= size
        return changes

    def _unclaimed(self, changes: Changes | None) -> None:
        if changes is not None:
            self._kept.appendleft((0, changes))

    async def created(self) -> int:
        """Wait until it is known which revision is the first one to be seen; return that revision."""
        while not self.next:
            if self.failure is not None:
                raise self.failure.again()
            await self._others.park()
        return self.next

    def _wake(self, changes: Changes | None) -> bool:
        """Let the reader go on, with what it waits for or to look again; return whether there is one."""
        woken = self._reader.give(changes)
        if self._others:
            self._others.unpark_all()
        return woken

    def fail(self, error: LogyardError) -> None:
        """End it with an error, after what came before."""
        self.failure = error
        self._wake(None)

    def put(self, changes: Changes, size: int) -> None:
        """Give changes to the reader, or keep them for it."""
        self.next = changes.revision + 1
        # Who waits has seen all that is kept.
        if not self._wake(changes):
            self._kept.append((size, changes))
            self._bytes += size

    def take(self, changes: Changes, size: int, whole: bool) -> bool:
        """Take changes from the server; return False when the watch is paused from now on: there is no room, or they
        did not come `whole`. What was seen already is dropped."""
        if self.paused or changes.revision < self.next or self.failure is not None:
            return True
        if not whole or (self._kept and self._bytes + size > BUFFER_BYTES):
            self.paused, self.asks = True, not whole
            self.next = max(self.next, changes.revision)
            self._wake(None)
            return False
        self.put(changes, size)
        return True

    def counts(self, uid: int) -> bool:
        """Return whether it counts the revisions of this group, and not of one before it that had its name."""
        known, self._uid = self._uid, self._uid or uid
        return not uid or not known or uid == known

    def reached(self, following: int) -> None:
        """Count everything below a revision as seen."""
        if self.paused or following <= self.next:
            return
        self.next = following
        if self.flow.progress and self.failure is None:
            progress = Changes(following - 1, ())
            if self._wake(progress):
                return
            if self._kept and not self._kept[-1][1].events:
                self._bytes -= self._kept.pop()[0]
            self._kept.append((OVERHEAD, progress))
            self._bytes += OVERHEAD
        elif self._others:
            self._others.unpark_all()


class Stream:
    """One stream of watches and the task that keeps it open; ends with its last watch."""

    __slots__ = (
        "kv",
        "node",
        "watches",
        "_id",
        "_open",
        "_sent",
        "_live",
        "_low",
        "_add",
        "_remove",
        "_scope",
        "_busy",
        "_parts",
    )

    def __init__(self, kv: Asked, node: int | None) -> None:
        self.kv = kv
        self.node = node
        self.watches: dict[int, Watch] = {}
        self._id = 0
        # The server knows the stream.
        self._open = False
        # Watches that the server was told of; those that it has said it has, which are all at `_low` or above.
        self._sent: set[int] = set()
        self._live: set[int] = set()
        self._low = 0
        self._add: dict[int, Watch] = {}
        self._remove: list[int] = []
        self._scope = kv.yard.runtime.scope()
        self._busy = False
        self._parts = Parts()

    def want(self, watch: Watch) -> None:
        """Let the server send to a watch."""
        self._add[watch.number] = watch
        self._change()

    def unwant(self, watch: Watch) -> None:
        """Drop a watch that nobody reads any more."""
        self.watches.pop(watch.number, None)
        self._stop(watch.number)
        if not self.watches:
            self._scope.cancel()

    def _stop(self, number: int) -> None:
        self._add.pop(number, None)
        self._live.discard(number)
        if number in self._sent:
            self._sent.discard(number)
            self._remove.append(number)
            self._change()

    def _change(self) -> None:
        if self._open and not self._busy:
            self._busy = True
            self.kv.yard.spawn(self._changes)

    async def _changes(self) -> None:
        """Tell the server which watches came and went, as long as there are any."""
        try:
            while self._open and (self._add or self._remove):
                # First all that went: one that came back has the same number.
                remove, self._remove = self._remove[:ADD_MAX], self._remove[ADD_MAX:]
                add = [] if self._remove else self._rows()
                await self.kv.yard.run(self._change_call(self._id, add=add, remove=remove))
        except LogyardError:
            # The stream is opened again, with all of them.
            self._scope.cancel()
        finally:
            self._busy = False

    def _rows(self) -> list[list[Any]]:
        """Return some of the watches that are to be added, as they travel; the server has them then."""
        rows: list[list[Any]] = []
        size = 0
        for number in list(self._add)[:ADD_MAX]:
            flow = self._add[number].flow
            size += len(flow.key) + len(flow.end) + OVERHEAD
            if size > ADD_BYTES and rows:
                break
            watch = self._add.pop(number)
            self._sent.add(number)
            rows.append([number, flow.key, flow.end, watch.next, flow.flags])
        return rows

    def _change_call(self, stream: int, **said: Any) -> Call[Any]:
        return ask("kv_change", plain, at=self.node, leader_of=self.kv.name, kind="kv", stream=stream, **said)

    async def run(self) -> None:
        """Keep the stream open until nobody watches: a task."""
        try:
            await self._keep_open()
        finally:
            for watch in self.watches.values():
                watch.fail(Unknown("the client was closed"))

    async def _keep_open(self) -> None:
        yard = self.kv.yard
        retry = Retry(math.inf, yard.chance, self.node is not None)
        while self.watches:
            self._count_seen()
            self._live, self._sent, self._low, self._remove = set(), set(), 0, []
            self._add = {number: watch for number, watch in self.watches.items() if not watch.paused}
            self._id, self._open, self._parts = new_number(), False, Parts()
            call = ask(
                "kv_watch", plain, at=self.node, kind="kv", name=self.kv.name, stream=self._id, add=self._rows(),
                local=self.node is not None,
            )  # fmt: skip
            error = None
            with yard.runtime.scope() as self._scope:
                try:
                    await yard.listen(call, retry, partial(self._pushed, self._id))
                except LogyardError as found:
                    error = found
            if self._scope.cancelled_caught:
                yard.spawn(partial(self._close, self._id))
            was_open, self._open, self._id = self._open, False, 0
            if error is not None:
                if was_open:
                    retry = Retry(math.inf, yard.chance, self.node is not None)
                try:
                    delay = retry.after(error, error.retry != "never", yard.clock())
                except LogyardError:
                    for watch in self.watches.values():
                        watch.fail(error)
                    self.watches = {}
                    return
                await yard.runtime.sleep(delay)

    def _count_seen(self) -> None:
        """Have every watch that the server has count what lies below `_low` as seen."""
        for number in self._live:
            if number in self.watches:
                self.watches[number].reached(self._low)

    async def _close(self, stream: int) -> None:
        """Tell the server, if it still listens; it will notice by itself otherwise."""
        yard = self.kv.yard
        with suppress(LogyardError), yard.runtime.scope(yard.clock() + CLOSE_S):
            await yard.run(self._change_call(stream, close=True), CLOSE_S)

    def _pushed(self, stream: int, header: Any, data: memoryview) -> None:
        if stream != self._id:
            return
        if not self._open:
            self._open = True
            self._change()
        kind = header["kind"]
        if kind == "created":
            for number, following in header["watches"]:
                watch = self.watches.get(number)
                if watch is None or number not in self._sent:
                    continue
                if watch.counts(header.get("uid", 0)):
                    if following < self._low:
                        # From now on not all of them are at `_low`.
                        self._count_seen()
                        self._low = following
                    self._live.add(number)
                    watch.reached(following)
                else:
                    watch.fail(anew(self.kv.name))
                    self.unwant(watch)
        elif kind == "compacted":
            for number in header["watches"]:
                self._live.discard(number)
                watch = self.watches.pop(number, None)
                if watch is not None:
                    watch.fail(Compacted("what comes next is compacted", compacted=header["compacted"]))
        elif kind == "alive":
            for number in self._live:
                self.watches[number].reached(header["next"])
        elif kind == "events":
            self._events(header, data)

    def _events(self, header: Any, data: memoryview) -> None:
        revisions, bodies = self._parts.add(header, bodies_of(header["places"], data))
        for one in revisions:
            decoder = Decoder(bodies)
            found = decoder.changes(one)
            last, size, more = None, 0, False
            less: dict[tuple[bool, bool], Changes] = {}
            for number, changes in found.items():
                watch = self.watches.get(number)
                if watch is None or number not in self._live:
                    continue
                if changes is not last:
                    last, size, less = changes, OVERHEAD + sum([_size(event) for event in changes.events]), {}
                    more = any([event.previous is not None for event in changes.events])
                flow = watch.flow
                if not flow.values or (more and not flow.previous):
                    # Watches share what is sent; some of them asked for less than others.
                    key = (flow.previous, flow.values)
                    changes = less[key] = less.get(key) or _less(changes, *key)
                if not watch.take(changes, size, whole=not decoder.missing):
                    self._stop(number)
        self._low = max(self._low, header["low"])

    async def ask(self, watch: Watch) -> None:
        """Get a watch what comes next, when it was too long to be sent; again after what passes, as long as nothing
        else ended it."""
        yard = self.kv.yard
        retry = Retry(math.inf, yard.chance, self.node is not None)
        while watch.failure is None:
            try:
                await self._ask(watch)
                return
            except LogyardError as error:
                delay = retry.after(error, error.retry != "never", yard.clock())
            await yard.runtime.sleep(delay)

    async def _ask(self, watch: Watch) -> None:
        flow, parts = watch.flow, Parts()
        while True:
            call = events_call(
                self.kv.name, flow.key, flow.end, flow.flags, watch.next, self.node, skip=parts.rest
            )  # fmt: skip
            header, data = await self.kv.yard.run(call)
            if header["kind"] == "compacted":
                raise Compacted("what comes next is compacted", compacted=header["compacted"])
            if not watch.counts(header.get("uid", 0)):
                raise anew(self.kv.name)
            revisions, bodies = parts.add(header, bodies_of(header["places"], data))
            if not parts.rest:
                break
        for one in revisions[:1]:
            decoder = Decoder(bodies)
            found = decoder.changes(one)
            if decoder.missing:
                for question in value_questions(decoder.missing):
                    packed, more = await self.kv.ask(question, self.kv.yard.timeout, near(self.node), self.node)
                    answer_of(packed)
                    bodies |= more
                found = Decoder(bodies).changes(one)
            for changes in found.values():
                watch.put(changes, OVERHEAD + sum([_size(event) for event in changes.events]))


def _less(changes: Changes, previous: bool, values: bool) -> Changes:
    events = []
    for key, kv, was in changes.events:
        shown, before = kv, was if previous else None
        if not values:
            shown = kv and kv._replace(value=b"")
            before = before and before._replace(value=b"")
        events.append(Event(key, shown, before))
    return Changes(changes.revision, tuple(events))


def _size(event: Event) -> int:
    size = OVERHEAD + len(event.key)
    for one in (event.kv, event.previous):
        if one is not None:
            size += OVERHEAD + len(one.value)
    return size


class Watcher:
    """The streams of one KV: one for its leader, one for each node that was asked for."""

    __slots__ = ("kv", "_streams", "_number")

    def __init__(self, kv: Asked) -> None:
        self.kv = kv
        self._streams: dict[int | None, Stream] = {}
        self._number = 0

    @asynccontextmanager
    async def open(self, flow: Flow, node: int | None) -> AsyncIterator[Watch]:
        """Open a watch, while the block lasts. Raises `LogyardError` when the client is closed."""
        if self.kv.yard.closed:
            # Nobody would ask for what it is to see.
            raise LogyardError("the client is closed")
        stream = self._streams.get(node)
        if stream is None or not stream.watches:
            stream = self._streams[node] = Stream(self.kv, node)
        self._number += 1
        watch = Watch(stream, self._number, flow)
        first = not stream.watches
        stream.watches[watch.number] = watch
        if first:
            self.kv.yard.spawn(stream.run)
        else:
            stream.want(watch)
        try:
            yield watch
        finally:
            stream.unwant(watch)
