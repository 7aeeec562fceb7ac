"""One append log of the blocking client.

Each verb is a frame or a call of `log`, sent by the yard that it belongs to; usable from any thread. Made by
`sync.Yard.log`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, cast, overload

from logyard.protocol.errors import Gone, LogyardError, OutOfRange

from . import wire
from .admin import Call
from .compression import SMALLEST, encode, wants
from .frame import Frame
from .log import (
    POLL_BYTES,
    POLL_RECORDS,
    POLL_WAIT_S,
    Bounds,
    Place,
    applied_call,
    body_steps,
    flags_of,
    latest_call,
    offsets_of,
    poll_call,
    producer_call,
    query_call,
    reply_call,
    retain_call,
    seek_call,
    truncate_call,
)
from .producer import SyncProducer, producer_number
from .records import Buffer, Page, Record
from .sequences import STALE
from .sync_session import Ticket
from .tail import TAIL_WAIT_S, Cursor, Tailed
from .upload import WHOLE_BYTES, check_size
from .upload_sync import read_file, upload

if TYPE_CHECKING:
    from .sync import Yard


FOR_LOG = wire.for_kind("log")


class Log:
    """One append log, blocking."""

    __slots__ = ("yard", "name")

    def __init__(self, yard: Yard, name: str) -> None:
        self.yard = yard
        self.name = name

    @overload
    def append(
        self,
        metadata: Buffer,
        payload: Buffer | None = None,
        *,
        timeout: float | None = None,
        reply: Literal["consensus", "none"] = "consensus",
        reply_from: int | None = None,
        priority: str = "normal",
        compress: str | None = None,
    ) -> int: ...

    @overload
    def append(
        self,
        metadata: Buffer,
        payload: Buffer | None = None,
        *,
        timeout: float | None = None,
        reply: Literal["append"],
        priority: str = "normal",
        compress: str | None = None,
    ) -> Place: ...

    def append(
        self,
        metadata: Buffer,
        payload: Buffer | None = None,
        *,
        timeout: float | None = None,
        reply: str = "consensus",
        reply_from: int | None = None,
        priority: str = "normal",
        compress: str | None = None,
    ) -> int | Place:
        """Append one record; returns its offset once a quorum has it. Options as in `aio.Log.append`.

        A payload above 1 MiB travels in pieces, each stored once; `timeout` is then that of each piece.
        """
        flags = flags_of(reply, priority, self.yard.exactly_once, reply_from)
        if payload is not None and len(payload) > WHOLE_BYTES and not flags and reply_from is None:
            payload = memoryview(payload).cast("B")
            zstd = self._zstd(compress)
            return upload(self.yard, self.name, metadata, (payload,), check_size(len(payload)), timeout, zstd)
        if reply == "consensus":
            return self.append_many(
                [(metadata, payload)], timeout=timeout, reply_from=reply_from, priority=priority, compress=compress
            ).start
        frame = Frame()
        if payload is not None and self._zstd(compress, len(payload)):
            metadata, payload = encode(metadata, payload)
        frame.put(metadata, payload)
        answer, _ = self.yard.append(self.name, frame, timeout, flags | FOR_LOG)
        return Place(*wire.PLACE.unpack(answer)) if reply == "append" else -1

    def append_stream(
        self,
        metadata: Buffer,
        source: Iterable[Buffer] | BinaryIO,
        size: int | None = None,
        *,
        timeout: float | None = None,
        compress: str | None = None,
        at: int | None = None,
    ) -> int:
        """Append one record whose payload comes from an iterable of buffers or a binary file; see
        `aio.Log.append_stream`. `at` as in `append_many`."""
        buffers = read_file(cast(BinaryIO, source)) if hasattr(source, "read") else source
        return upload(self.yard, self.name, metadata, buffers, size, timeout, self._zstd(compress), at)

    def append_many(
        self,
        records: Iterable[tuple[Buffer, Buffer | None]],
        *,
        timeout: float | None = None,
        reply_from: int | None = None,
        priority: str = "normal",
        compress: str | None = None,
        at: int | None = None,
        keys: Iterable[bytes] | None = None,
        command: bytes = b"",
    ) -> range:
        """Append (metadata, payload) records together or not at all; returns their offsets, without a gap. `keys` and
        `command` as in `aio.Log.append_many`.

        `at`: only if the first one gets this offset; else nothing is appended, and `OutOfRange` says where the log
        ends. For logs that were created with a `start`; others raise `BadRequest`.
        """
        flags = flags_of("consensus", priority, self.yard.exactly_once, reply_from)
        frame = Frame(at, command)
        frame.put_many(self._encoded(records, compress), keys)
        reply, ticket = self.yard.append(self.name, frame, timeout, flags | FOR_LOG)
        if reply_from is not None and ticket is not None:
            reply = self._reply_of(ticket, reply_from, reply, self.yard.timeout if timeout is None else timeout)
        if len(reply) != wire.REPLY.size:
            raise LogyardError(f"{self.name}: the machine's answer is not an append log's")
        return offsets_of(*wire.REPLY.unpack(reply))

    def _zstd(self, compress: str | None, size: int = SMALLEST) -> bool:
        """Whether a payload of `size` bytes is to be compressed; asks for the log's option if need be."""
        if size < SMALLEST:
            return wants(compress, False)
        return wants(compress, compress is None and self.yard.compressed(self.name))

    def _encoded(
        self, records: Iterable[tuple[Buffer, Buffer | None]], compress: str | None
    ) -> Iterator[tuple[Buffer, Buffer | None]]:
        for head, body in records:
            if body is not None and len(body) >= SMALLEST and self._zstd(compress):
                yield encode(head, body)
            else:
                yield head, body

    def _reply_of(self, ticket: Ticket, node: int, reply: bytes, wait: float) -> bytes:
        try:
            return self.yard.run(reply_call(self.name, ticket[0].session, ticket[1], node, wait), wait)
        except LogyardError as error:
            if error.code != STALE:
                raise
            # It has applied so much more that it does not remember: the leader's answer is its own.
            return reply

    def wait_applied(self, index: int, *, term: int = 0, node: int | None = None, timeout: float | None = None) -> int:
        """See `aio.Log.wait_applied`."""
        wait = self.yard.timeout if timeout is None else timeout
        return self.yard.run(applied_call(self.name, index, term, node, wait), wait)

    def query(
        self,
        request: bytes,
        *,
        node: int | None = None,
        consistency: str | None = None,
        staleness: float | None = None,
        index: int = 0,
        timeout: float | None = None,
    ) -> bytes:
        """See `aio.Log.query`."""
        return self.yard.run(query_call(self.name, request, node, consistency, index, staleness), timeout)

    def truncate(self, before: int, *, timeout: float | None = None) -> int:
        """Remove all records below offset `before`; returns the log's first offset afterwards."""
        return self.yard.run(truncate_call(self.name, before), timeout)

    def retain(self, *, age: float = 0.0, bytes: int = 0, records: int = 0, timeout: float | None = None) -> int:
        """What the log keeps from now on; see `aio.Log.retain`."""
        return self.yard.run(retain_call(self.name, age, bytes, records), timeout)

    def seek(self, since: int, *, node: int | None = None, timeout: float | None = None) -> int:
        """The first offset stamped at `since` (ms since 1970) or later, or the log's end."""
        return self.yard.run(seek_call(self.name, since, node), timeout)

    def producer(self, name: int | str, *, timeout: float | None = None) -> SyncProducer:
        """An idempotent producer of this log; see `aio.Log.producer`."""
        number = producer_number(name)
        return SyncProducer(self, number, self.yard.run(producer_call(self.name, number), timeout))

    def poll(
        self,
        offset: int,
        *,
        max_records: int = POLL_RECORDS,
        max_bytes: int = POLL_BYTES,
        wait: float = 0.0,
        node: int | None = None,
        bodies: bool = True,
        consistency: str | None = None,
        staleness: float | None = None,
        since: int | None = None,
        timeout: float | None = None,
    ) -> Page:
        """Records from `offset` on; see `aio.Log.poll`."""
        deadline = time.monotonic() + wait
        while True:
            left = deadline - time.monotonic()
            call = poll_call(
                self.name, offset, max_records, max_bytes, max(0.0, left), node, bodies, consistency, staleness, since
            )
            page = self.yard.run(call, timeout)
            if len(page) or left <= POLL_WAIT_S:
                return page
            offset, since = page.next, None

    def records(
        self,
        start: int = 0,
        stop: int | None = None,
        *,
        follow: bool = False,
        bodies: bool = True,
        node: int | None = None,
    ) -> Iterator[Record]:
        """The records from `start` up to `stop`, or to the log's end; with `follow` it waits there for more."""
        offset = start
        while stop is None or offset < stop:
            wanted = POLL_RECORDS if stop is None else min(POLL_RECORDS, stop - offset)
            wait = POLL_WAIT_S if follow else 0.0
            page = self.poll(offset, max_records=wanted, wait=wait, node=node, bodies=bodies)
            for record in page:
                yield self._filled(record, page.node)
            if not len(page) and not follow:
                return
            offset = page.next

    def tail(
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
    ) -> Iterator[Tailed]:
        """Committed records from `cursor` on, a batch at a time; see `aio.Log.tail`."""
        if cursor is None:
            uid = int(self.yard.locate(self.name)["uid"])
            cursor = Cursor(uid, self.yard.run(latest_call(self.name, node, None, staleness, uid), timeout).start)
        while True:
            call = poll_call(
                self.name, cursor.offset, max_records, max_bytes, TAIL_WAIT_S if follow else 0.0, node, bodies, None,
                staleness, None, cursor.uid,
            )  # fmt: skip
            page = self.yard.run(call, timeout)
            records = [self._filled(record, page.node) for record in page]
            if records:
                cursor = Cursor(cursor.uid, page.next)
                yield Tailed(records, cursor)
            elif not follow:
                return

    def read(self, offset: int, *, node: int | None = None, bodies: bool = True) -> Record:
        """One record; raises `OutOfRange` when it is not there yet."""
        page = self.poll(offset, max_records=1, node=node, bodies=bodies)
        for record in page:
            if record.offset != offset:
                raise Gone(f"{self.name}: the record at {offset} gave way to a newer one with its key")
            return self._filled(record, page.node)
        raise OutOfRange(f"{self.name}: offset {offset} is not in {page.start}..{page.end}")

    def _filled(self, record: Record, node: int) -> Record:
        """A record whose payload did not fit into its page, with it; without, where it is too long for one buffer."""
        if record.left_out and record.size <= wire.FRAME_BYTES_MAX:
            record.fill(self.read_body(record.offset, 0, record.size, node=node))
        return record

    def read_body(self, offset: int, start: int = 0, stop: int | None = None, *, node: int | None = None) -> bytes:
        """Bytes `start` up to `stop` (its end) of a record's body; a long range is read in pieces."""
        pieces = list(self.body_pieces(offset, start, stop, node=node))
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def body_pieces(
        self, offset: int, start: int = 0, stop: int | None = None, *, node: int | None = None
    ) -> Iterator[bytes]:
        """The same as pieces, so that a large body never has to fit into memory."""
        if stop is None:
            stop = self.read(offset, node=node, bodies=False).size
        steps = body_steps(self.name, offset, start, stop, node)
        step = next(steps, None)
        while step is not None:
            if isinstance(step, Call):
                step = steps.send(self.yard.run(step))
            else:
                yield bytes(step)
                step = next(steps, None)

    def latest(
        self, *, node: int | None = None, consistency: str | None = None, staleness: float | None = None
    ) -> Bounds:
        """The log's bounds: (start, end), the first offset and the next free one. Linearizable, unless a member
        (``local``), a `staleness` or another `consistency` is asked for."""
        return self.yard.run(latest_call(self.name, node, consistency, staleness))

    def describe(self, node: int | None = None) -> dict[str, Any]:
        """Everything about the group, as its leader (or member `node`) sees it."""
        return self.yard.describe(self.name, node)

    def snapshot(self, node: int | None = None) -> dict[int, Any]:
        """Snapshot this log on one member or on every node."""
        return self.yard.snapshot([self.name], node)
