"""The watches of one stream of the gateway: created and cancelled by its messages, each told what it sees.

Every change is one JSON message in one HTTP chunk: all events of a revision, in order, none twice, also over a leader
change (`client.kv_watch`). A client that reads slowly costs a bounded number of bytes. Used by `streams`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import trio

from logyard.client import kv_requests
from logyard.protocol.errors import LogyardError
from logyard.protocol.kv import FROM_KEY, KEY_BYTES_MAX, Changes, Compacted

from .gateway import Gateway
from .leases import revision_of
from .words import Message, Schema, choice, data, event, flag, many, number, one, packed

NO_PUT, NO_DELETE = range(2)
WATCHES_MAX = 100_000
"""Of all streams; a node has the same bound for one client."""
DUPLICATE = "mvcc: duplicate watch ID provided on the WatchStream"
EMPTY = "mvcc: watcher range is empty"
NO_WATCH = -1
NEVER_COMPACTED = -1
"""What etcd takes the compacted revision for, before there is one."""

CREATE = Schema(
    key=data, range_end=data, start_revision=number, progress_notify=flag, filters=many(choice("NOPUT", "NODELETE")),
    prev_kv=flag, watch_id=number, fragment=flag,
)  # fmt: skip
CANCEL = Schema(watch_id=number)
REQUESTS = ("create_request", "cancel_request", "progress_request")
REQUEST = Schema(create_request=one(CREATE), cancel_request=one(CANCEL), progress_request=one(Schema()))


class Wanted(NamedTuple):
    """What a create_request asks for."""

    key: bytes
    end: bytes
    start: int
    previous: bool
    puts: bool
    deletes: bool
    notify: bool
    fragment: bool


def wanted_of(asked: Message) -> Wanted:
    """Read a create_request: without a key it is of all keys from the first one on."""
    filters = asked.rows("filters")
    return Wanted(
        asked.data("key") or FROM_KEY, asked.data("range_end"), asked.number("start_revision"), asked.flag("prev_kv"),
        NO_PUT not in filters, NO_DELETE not in filters, asked.flag("progress_notify"), asked.flag("fragment"),
    )  # fmt: skip


class Watching:
    """See the module. `chunk` sends one message; `reached` is how far each watch was told."""

    __slots__ = (
        "gateway",
        "chunk",
        "nursery",
        "scopes",
        "reached",
        "ended",
        "_asked",
        "_next",
        "_notifying",
        "_notified",
        "_silent",
        "_newest",
    )

    def __init__(self, gateway: Gateway, chunk: Callable[[bytes], Awaitable[None]], nursery: trio.Nursery) -> None:
        self.gateway = gateway
        self.chunk = chunk
        self.nursery = nursery
        self.scopes: dict[int, trio.CancelScope] = {}
        self.reached: dict[int, int] = {}
        # As with etcd, a watch that ended by itself has its number until it is cancelled.
        self.ended: set[int] = set()
        # The revision that every watch has to reach before a request for progress is answered.
        self._asked = 0
        self._next = 0
        # Watches that want to be told how far they are; those that saw nothing since it was last done.
        self._notifying = False
        self._notified: set[int] = set()
        self._silent: set[int] = set()
        # The newest revision that there was when this stream was told something.
        self._newest = 0

    async def take(self, asked: Message) -> None:
        """Take one message of the client."""
        name = asked.which(REQUESTS)
        if name == "create_request":
            create: Message = asked.fields[name]
            await self._create(create.number("watch_id"), wanted_of(create))
        elif name == "cancel_request":
            await self._cancel(asked.fields[name].number("watch_id"))
        elif name == "progress_request":
            self._asked = await self._now()
            await self._progress()

    async def _now(self) -> int:
        """Return the revision there is now; without a quorum as some member has it, or as this stream was told. Raises
        what stands in the way before it was told anything."""
        try:
            self._see(await revision_of(self.gateway, *await self.gateway.reach()))
        except LogyardError:
            if not self._newest:
                raise
        return self._newest

    def _see(self, revision: int) -> None:
        self._newest = max(self._newest, revision)

    def close(self) -> None:
        """End the stream."""
        self.gateway.count_watches(-len(self.scopes))
        self.scopes = {}

    async def _create(self, number: int, wanted: Wanted) -> None:
        reason = ""
        if wanted.end and wanted.end != FROM_KEY and wanted.key >= wanted.end:
            reason = EMPTY
        elif max(len(wanted.key), len(wanted.end) - 1) > KEY_BYTES_MAX:
            reason = f"logyard: a key is at most {KEY_BYTES_MAX} bytes"
        elif number and (number in self.scopes or number in self.ended):
            reason = DUPLICATE
        elif self.gateway.watches + len(self.ended) >= WATCHES_MAX:
            reason = f"logyard: {WATCHES_MAX} watches are open"
        if reason:
            await self._say(NO_WATCH, await self._now(), created=True, canceled=True, cancel_reason=reason)
            return
        if not number:
            while self._next in self.scopes or self._next in self.ended:
                self._next += 1
            number = self._next
            self._next += 1
        if wanted.start < 0:
            compacted = await self._compacted()
            if wanted.start < compacted:
                self.ended.add(number)
                await self._say(number, await self._now(), created=True)
                await self._over(number, Compacted("what comes next is compacted", compacted=compacted))
                return
            wanted = wanted._replace(start=1)
        self.gateway.count_watches(1)
        scope = self.scopes[number] = trio.CancelScope()
        self.reached[number] = 0
        known = trio.Event()
        self.nursery.start_soon(self._follow, number, wanted, scope, known)
        await known.wait()

    async def _compacted(self) -> int:
        """Return the revision up to where the history is compacted; where nobody says it, its watch will be told."""
        try:
            consistency, node = await self.gateway.reach()
            found = await self.gateway.run(kv_requests.status(), consistency=consistency, node=node)
        except LogyardError:
            return NEVER_COMPACTED
        return int(found["compacted"]) or NEVER_COMPACTED

    async def _cancel(self, number: int) -> None:
        scope = self._forget(number)
        if scope is not None:
            scope.cancel()
        if scope is not None or number in self.ended:
            self.ended.discard(number)
            await self._say(number, await self._now(), canceled=True)
            await self._progress()

    def _forget(self, number: int) -> trio.CancelScope | None:
        scope = self.scopes.pop(number, None)
        if scope is not None:
            del self.reached[number]
            self._notified.discard(number)
            self.gateway.count_watches(-1)
        return scope

    async def _follow(self, number: int, wanted: Wanted, scope: trio.CancelScope, known: trio.Event) -> None:
        """Follow one watch: a task. `known`: its client was told of it."""
        watch = self.gateway.kv.watch(
            wanted.key, wanted.end, start=wanted.start, previous=wanted.previous, puts=wanted.puts,
            deletes=wanted.deletes, progress=True,
        )  # fmt: skip
        with scope:
            try:
                async with watch as changes:
                    first = await changes.created()
                    if not wanted.start:
                        self._see(first - 1)
                    revision = await self._now() if wanted.start else first - 1
                    await self._say(number, revision, created=True)
                    self.reached[number] = first - 1
                    known.set()
                    if wanted.notify:
                        self._notify(number)
                    async for one in changes:
                        self._see(one.revision)
                        if one.events:
                            self._silent.discard(number)
                            await self._events(number, one, wanted)
                        self.reached[number] = one.revision
                        if self._asked:
                            await self._progress()
            except LogyardError as error:
                self._forget(number)
                self.ended.add(number)
                await self._over(number, error)
                await self._progress()
            finally:
                known.set()

    def _notify(self, number: int) -> None:
        if not self._notifying:
            self._notifying = True
            self.nursery.start_soon(self._keep_notified)
        self._notified.add(number)

    async def _keep_notified(self) -> None:
        """Tell the watches that want it how far they are, when they have been silent for a while."""
        while True:
            self._silent = set(self._notified)
            await trio.sleep(self.gateway.limits.progress_s)
            for quiet in sorted(self._silent):
                if quiet in self.reached:
                    # Who watches from a revision to come has seen all that there is.
                    await self._say(quiet, min(self.reached[quiet], self._newest))

    async def _over(self, number: int, error: LogyardError) -> None:
        if isinstance(error, Compacted):
            # As etcd's: at no revision.
            await self._say(number, 0, canceled=True, compact_revision=str(error.revision))
        else:
            revision = await self._now()
            await self._say(number, revision, canceled=True, cancel_reason=f"etcdserver: {error.message}")

    async def _progress(self) -> None:
        if self._asked and all(one >= self._asked for one in self.reached.values()):
            revision, self._asked = self._asked, 0
            await self._say(NO_WATCH, revision)

    async def _say(self, number: int, revision: int, **fields: Any) -> None:
        await self.chunk(self._head(number, revision, fields) + b"}}\n")

    def _head(self, number: int, revision: int, fields: dict[str, Any]) -> bytes:
        """Return a message, open at its end."""
        said: dict[str, Any] = {"header": self.gateway.header.at(revision)}
        if number:
            said["watch_id"] = str(number)
        return b'{"result":' + packed(said | fields)[:-1]

    async def _events(self, number: int, changes: Changes, wanted: Wanted) -> None:
        gateway = self.gateway
        newest, previous, events = gateway.encoded
        if newest is not changes or previous is not wanted.previous:
            events = b"[" + b",".join(_rows(changes, wanted)) + b"]"
            gateway.share(changes, wanted.previous, events)
        limit = gateway.limits.request_bytes
        if wanted.fragment and len(events) > limit and len(changes.events) > 1:
            *parts, events = _parts(_rows(changes, wanted), limit)
            head = self._head(number, changes.revision, {"fragment": True})
            for part in parts:
                await self.chunk(head + b',"events":' + part + b"}}\n")
        await self.chunk(self._head(number, changes.revision, {}) + b',"events":' + events + b"}}\n")


def _rows(changes: Changes, wanted: Wanted) -> list[bytes]:
    # Watches of one key share what they see, and one of them may have asked for more.
    some = changes.events if wanted.previous else [one._replace(previous=None) for one in changes.events]
    return [packed(event(one, changes.revision)) for one in some]


def _parts(rows: Sequence[bytes], limit: int) -> list[bytes]:
    """Return rows in arrays that are no longer than a limit, where one row alone is not."""
    found: list[bytes] = []
    some: list[bytes] = []
    size = 0
    for row in rows:
        if some and size + len(row) > limit:
            found.append(b"[" + b",".join(some) + b"]")
            some, size = [], 0
        some.append(row)
        size += len(row) + 1
    return [*found, b"[" + b",".join(some) + b"]"]
