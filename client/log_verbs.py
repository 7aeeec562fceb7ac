"""The verbs of an append log of the asynchronous client that are one question each, and what is made of them:
producers and following. Mixed into `aio.Log`, which has appends and reads.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, cast

from .admin import Call, T
from .log import (
    POLL_BYTES,
    POLL_RECORDS,
    Bounds,
    applied_call,
    latest_call,
    poll_call,
    producer_call,
    query_call,
    retain_call,
    seek_call,
    truncate_call,
)
from .producer import Producer, producer_number
from .records import Record
from .tail import TAIL_WAIT_S, Cursor, Tailed
from .wire import FRAME_BYTES_MAX

if TYPE_CHECKING:
    from .aio import Log, Yard


class LogVerbs:
    """What `aio.Log` also has."""

    __slots__ = ("yard", "name")

    yard: Yard
    name: str

    async def wait_applied(
        self, index: int, *, term: int = 0, node: int | None = None, timeout: float | None = None
    ) -> int:
        """Until the leader, or member `node`, has applied `index`; returns what it has applied. With the `term` of a
        `Place` raises `Refused` when that entry was overwritten, `Gone` when nobody can tell any more."""
        wait = self.yard.timeout if timeout is None else timeout
        return await self.yard.run(applied_call(self.name, index, term, node, wait), wait)

    async def query(
        self,
        request: bytes,
        *,
        node: int | None = None,
        consistency: str | None = None,
        staleness: float | None = None,
        index: int = 0,
        timeout: float | None = None,
    ) -> bytes:
        """Ask the machine's `query`. `node`, `consistency` and `staleness` as in `poll`; `index`: not before it is
        applied there."""
        return await self.yard.run(query_call(self.name, request, node, consistency, index, staleness), timeout)

    async def truncate(self, before: int, *, timeout: float | None = None) -> int:
        """Remove all records below offset `before`; returns the log's first offset afterwards."""
        return await self.yard.run(truncate_call(self.name, before), timeout)

    async def retain(
        self, *, age: float = 0.0, bytes: int = 0, records: int = 0, timeout: float | None = None
    ) -> int:  # fmt: skip
        """What the log keeps from now on, in place of what was said before: records younger than `age` seconds, the
        newest `bytes` and `records`; 0 is no limit, and what any limit gives up goes. A limit is kept to an eighth of
        it. Returns the log's first offset. Raises `Refused` while some of its nodes run a logyard that knows no limits.
        """
        return await self.yard.run(retain_call(self.name, age, bytes, records), timeout)

    async def seek(self, since: int, *, node: int | None = None, timeout: float | None = None) -> int:
        """The first offset stamped at `since` (ms since 1970) or later, or the log's end."""
        return await self.yard.run(seek_call(self.name, since, node), timeout)

    async def latest(
        self, *, node: int | None = None, consistency: str | None = None, staleness: float | None = None
    ) -> Bounds:
        """The log's bounds: (start, end), the first offset and the next free one. Linearizable, unless a member
        (``local``), a `staleness` or another `consistency` is asked for."""
        return await self.yard.run(latest_call(self.name, node, consistency, staleness))

    async def describe(self, node: int | None = None) -> dict[str, object]:
        """Everything about the group, as its leader (or member `node`) sees it."""
        return await self.yard.describe(self.name, node)

    async def snapshot(self, node: int | None = None) -> dict[int, object]:
        """Snapshot this log on one member or on every node."""
        return await self.yard.snapshot([self.name], node)

    async def run(self, call: Call[T], timeout: float | None = None) -> T:
        """Any call about this log."""
        return await self.yard.run(call, timeout)

    async def producer(self, name: int | str, *, timeout: float | None = None) -> Producer:
        """An idempotent producer of this log, by its number or a name: see `client.producer`. Its `last` is the highest
        sequence that it has written. Raises `Refused` as `retain`."""
        number = producer_number(name)
        return Producer(cast("Log", self), number, await self.yard.run(producer_call(self.name, number), timeout))

    async def tail(
        self,
        cursor: Cursor | None = None,
        *,
        follow: bool = True,
        max_records: int = POLL_RECORDS,
        max_bytes: int = POLL_BYTES,
        bodies: bool = True,
        node: int | None = None,
        staleness: float | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[Tailed]:
        """Committed records from `cursor` on (None: the first one the log has), a batch at a time, each with the place
        behind it; for ever, or with `follow=False` up to the present end. Goes on through cut connections and changes
        of the leader for `timeout` seconds each.

        Raises `UnknownGroup` when the log is not the cursor's any more, `OutOfRange` or `Gone` when records that the
        cursor has not passed were truncated.
        """
        if cursor is None:
            uid = int((await self.yard.locate(self.name))["uid"])
            cursor = Cursor(
                uid, (await self.yard.run(latest_call(self.name, node, None, staleness, uid), timeout)).start
            )
        while True:
            call = poll_call(
                self.name, cursor.offset, max_records, max_bytes, TAIL_WAIT_S if follow else 0.0, node, bodies, None,
                staleness, None, cursor.uid,
            )  # fmt: skip
            page = await self.yard.run(call, timeout)
            records: list[Record] = []
            for record in page:
                if record.left_out and record.size <= FRAME_BYTES_MAX:
                    record.fill(await cast("Log", self).read_body(record.offset, 0, record.size, node=page.node))
                records.append(record)
            if records:
                cursor = Cursor(cursor.uid, page.next)
                yield Tailed(records, cursor)
            elif not follow:
                return
