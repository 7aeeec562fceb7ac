# Made from client/_async/log.py by `python -m logyard.client._async.generate`: change that file.
"""One append log: its verbs. Appends go the way of their face (`_send`, `_send_many`, `_upload`), reads are calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, Literal, overload

from logyard.protocol.compression import SMALLEST, encode, wants
from logyard.protocol.errors import BadRequest, Gone, LogyardError, OutOfRange
from logyard.protocol.frame import APPEND_COMMAND, FRAME_BYTES_MAX, LOG_KNOWS, Buffer, append_command, view_of
from logyard.protocol.records import Page, Record
from logyard.protocol.wire import REPLY

from ..admin import Call, T
from ..log import (
    POLL_BYTES,
    POLL_RECORDS,
    POLL_WAIT_S,
    Appended,
    Bounds,
    Place,
    applied_call,
    body_steps,
    close_epoch_call,
    epoch_call,
    epoch_state_call,
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
    wait_of,
)
from ..numbering import epoch_of, producer_number
from ..sequences import STALE, Ticket
from ..tail import TAIL_WAIT_S, Cursor, Tailed
from ..upload import WHOLE_BYTES, check_size
from .caller import Caller
from .producer import EpochWriter, Producer


class LogVerbs(ABC):
    """An append log of either face."""

    __slots__ = ("yard", "name")

    yard: Caller
    name: str

    # What a face fills in.

    @abstractmethod
    def _send(
        self, metadata: Buffer, payload: Buffer | None, timeout: float | None, flags: int, command: bytes
    ) -> tuple[Appended, int, Ticket | None]:
        """Append one record by that command; return what came of its frame, the record's number in that, and the
        frame's ticket."""

    @abstractmethod
    def _send_many(
        self,
        records: Iterable[tuple[Buffer, Buffer | None]],
        timeout: float | None,
        flags: int,
        command: bytes,
        keys: Iterable[bytes] | None,
        at: int | None,
    ) -> tuple[Appended, Ticket | None]:
        """Append records as one frame; return what came of that, and its ticket."""

    @abstractmethod
    def _upload(
        self,
        metadata: Buffer,
        source: Iterable[Buffer] | BinaryIO | memoryview,
        size: int | None,
        timeout: float | None,
        compress: bool,
        command: bytes,
    ) -> int:
        """Append one record whose payload travels in pieces and that the command binds; return its offset."""

    # Appends.

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
        command: bytes = APPEND_COMMAND,
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
        command: bytes = APPEND_COMMAND,
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
        command: bytes = APPEND_COMMAND,
    ) -> int | Place:
        """Append one record; return its offset once a quorum has it.

        `reply`: with ``append`` it returns where the command lies as soon as the leader has it on disk (see
        `wait_applied`), with ``none`` it returns -1 as soon as it is sent; neither is sent again after a cut, and
        neither is exactly-once. `reply_from`: that member answers, when it has applied it. `priority` ``low``: it waits
        until nothing else of its log does. `compress`: ``zstd`` or ``none``, by default as the log's option says.
        `command`: of a topic's record, see `topics.Topic`.

        A payload above 1 MiB travels in pieces, each stored once, and takes its place among the log's records when all
        of them are there; `timeout` is then that of each piece, and it has no other options. Cancelling gives it up
        while pieces are missing; otherwise cancelling the wait does not take the record back. Raises a `LogyardError`.
        """
        flags = flags_of(reply, priority, self.yard.exactly_once, reply_from)
        if payload is not None and len(payload) > WHOLE_BYTES and not flags and reply_from is None:
            view = view_of("a payload", payload)
            size = check_size(len(view))
            return self._upload(metadata, view, size, timeout, self._zstd(compress), command)
        if payload is not None and len(payload) >= SMALLEST and self._zstd(compress):
            metadata, payload = encode(metadata, payload)
        appended, position, ticket = self._send(metadata, payload, timeout, flags, command)
        if reply == "append":
            return Place(*appended.place)
        first = appended.first
        if reply_from is not None and ticket is not None:
            first = self._reply_of(ticket, reply_from, timeout, first)
        return first + position if first >= 0 else -1

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
        """Append one record whose payload comes from an iterable of buffers (under trio and asyncio an asynchronous
        one) or from a binary file, up to 4 GiB of which a few MiB are in memory at a time; return its offset.

        `size`: the bytes that must come; otherwise whatever comes. `timeout` (seconds) bounds each piece, not the
        whole. `at` as in `append_many`. If anything fails, or the wait is cancelled, while pieces are missing, nothing
        of it stays; after that the record may be there, as with `append`.
        """
        return self._upload(metadata, source, size, timeout, self._zstd(compress), append_command(at))

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
        """Append (metadata, payload) records together or not at all; return their offsets, without a gap. Up to 64 MiB
        of them, and as many as an entry may have (`entry_records_max`: 16,384); of more `BadRequest`. `keys`: one for
        each record of a keyed log; a record without payload takes its key away. `command`: of a producer's append,
        see `producer`; a single record's payload above 1 MiB then travels in pieces, as with `append`.

        `at`: only if the first one gets this offset; else nothing is appended, and `OutOfRange` says where the log
        ends. For logs that were created with a `start`; others raise `BadRequest`.
        """
        flags = flags_of("consensus", priority, self.yard.exactly_once, reply_from)
        if command:
            records = list(records)
            head, body = records[0] if len(records) == 1 else (b"", None)
            if body is not None and len(body) > WHOLE_BYTES:
                view = view_of("a payload", body)
                size = check_size(len(view))
                found = self._upload(head, view, size, timeout, self._zstd(compress), command)
                return offsets_of(found, 1)
        option = self.yard.compresses(self.name)
        if option is None and compress is None:
            records = list(records)
            # Only where a payload could be compressed it is asked whether the log wants that.
            option = _any_large(records) and self._zstd(None)
        if wants(compress, bool(option)):
            records = [pair if (body := pair[1]) is None else encode(pair[0], body) for pair in records]
        try:
            appended, ticket = self._send_many(records, timeout, flags, command, keys, at)
        except BadRequest as refusal:
            if keys is None or str(refusal) != LOG_KNOWS:
                raise
            raise BadRequest(
                f"{self.name}: this log was created without keys, so its records can't have any; one with keys is"
                ' created with compact="key" (`logyard create --compact key`)'
            ) from None
        first = appended.first
        if reply_from is not None and ticket is not None:
            first = self._reply_of(ticket, reply_from, timeout, first)
        return offsets_of(first, appended.given)

    def _zstd(self, compress: str | None) -> bool:
        """Return whether payloads are to be compressed; asks for the log's option if need be."""
        option = self.yard.compresses(self.name)
        if option is None and compress is None:
            # Whatever it answers, finding the log tells.
            self.latest()
            option = self.yard.compresses(self.name)
        return wants(compress, bool(option))

    def _reply_of(self, ticket: Ticket, node: int, timeout: float | None, first: int) -> int:
        """Return the first offset as a member answers it, when it has applied the frame; `first`: as the leader did."""
        wait = self.yard.timeout if timeout is None else timeout
        call = reply_call(self.name, ticket[0].session, ticket[1], node, wait)
        try:
            answer: bytes = self.yard.run(call, wait)
            return int(REPLY.unpack_from(answer)[0])
        except LogyardError as error:
            if error.code != STALE:
                raise
        # It has applied so much more that it does not remember: the leader's answer is its own.
        return first

    # Reads.

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
        uid: int = 0,
        timeout: float | None = None,
    ) -> Page:
        """Read records from `offset` on (-1: those still to come), at least one if there is one.

        `wait` (seconds): how long to wait for a first record. `node`: that member answers itself, whatever its role;
        `page.node` names who answered. `consistency`: ``local``, ``leader`` (default without `node`) or
        ``linearizable``. `staleness` (seconds): any member, or `node`, once it has applied everything that was
        committed so long ago. `since` (ms since 1970): not from `offset` but from the first record stamped then or
        later. `uid` (of a `Page`): of that log only, and of none that was made under its name since. Raises
        `OutOfRange` or `Gone` for an offset that is not there, `UnknownGroup`, `GroupStopped`, `Corrupt`.
        """
        deadline = self.yard.clock() + wait
        # Silence is no failure, so the server's answer has to come before the time for one question is over.
        most = wait_of(self.yard.timeout if timeout is None else timeout)
        while True:
            left = deadline - self.yard.clock()
            asked = max(0.0, min(left, most))
            call = poll_call(
                self.name, offset, max_records, max_bytes, asked, node, bodies, consistency, staleness, since,
                uid,
            )  # fmt: skip
            page = self.yard.run(call, timeout)
            if len(page) or left <= most:
                return page
            offset, since = page.next, None

    def records(
        self,
        start: int | None = None,
        stop: int | None = None,
        *,
        follow: bool = False,
        bodies: bool = True,
        node: int | None = None,
    ) -> Iterator[Record]:
        """Yield the records from `start` (default: the first one that the log has) up to `stop`, or to the log's end;
        with `follow` it waits there for more. Raises `UnknownGroup` when the log was deleted meanwhile, also where
        another one has its name."""
        if start is None:
            start = (self.latest(node=node, consistency="leader" if node is None else "local")).start
        offset, uid = start, 0
        while stop is None or offset < stop:
            wanted = POLL_RECORDS if stop is None else min(POLL_RECORDS, stop - offset)
            wait = POLL_WAIT_S if follow else 0.0
            page = self.poll(offset, max_records=wanted, wait=wait, node=node, bodies=bodies, uid=uid)
            uid = page.uid
            for record in page:
                if stop is not None and record.offset >= stop:
                    # So many records of a keyed log may reach far behind it.
                    return
                if not record.left_out or self._fill(record, page):
                    yield record
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
        """Yield committed records from `cursor` on (None: the first one the log has), a batch at a time, each with the
        place behind it; for ever, or with `follow=False` up to the present end. Goes on through cut connections and
        changes of the leader for `timeout` seconds each.

        Raises `UnknownGroup` when the log is not the cursor's any more, `OutOfRange` or `Gone` when records that the
        cursor has not passed were truncated.
        """
        if cursor is None:
            uid = int((self.yard.locate(self.name))["uid"])
            bounds = self.yard.run(latest_call(self.name, node, None, staleness, uid), timeout)
            cursor = Cursor(uid, bounds.start)
        most = wait_of(self.yard.timeout if timeout is None else timeout)
        wait = min(TAIL_WAIT_S, most) if follow else 0.0
        while True:
            call = poll_call(
                self.name, cursor.offset, max_records, max_bytes, wait, node, bodies, None, staleness, None, cursor.uid
            )  # fmt: skip
            page = self.yard.run(call, timeout)
            records: list[Record] = []
            for record in page:
                if not record.left_out or self._fill(record, page):
                    records.append(record)
            if len(page):
                cursor = Cursor(cursor.uid, page.next)
            elif not follow:
                return
            if records:
                yield Tailed(records, cursor)

    def read(self, offset: int, *, node: int | None = None, bodies: bool = True) -> Record:
        """Read one record; raise `OutOfRange` when it is not there yet."""
        return (self._read(offset, node, bodies))[0]

    def _read(self, offset: int, node: int | None, bodies: bool, uid: int = 0) -> tuple[Record, Page]:
        page = self.poll(offset, max_records=1, node=node, bodies=bodies, uid=uid)
        for record in page:
            if record.offset != offset or (record.left_out and not self._fill(record, page)):
                raise Gone(f"{self.name}: the record at {offset} gave way to a newer one with its key")
            return record, page
        raise OutOfRange(f"{self.name}: offset {offset} is not in {page.start}..{page.end}")

    def _fill(self, record: Record, page: Page) -> bool:
        """Fetch a payload that did not fit into its page, unless it is too long for one buffer. False: its record gave
        way to a newer one with its key meanwhile."""
        if record.size > FRAME_BYTES_MAX:
            return True
        try:
            record.fill(self.read_body(record.offset, 0, record.size, node=page.node, uid=page.uid))
        except Gone:
            # Whether the record went, or its bytes are not to be had there, the same member says.
            found = self.poll(record.offset, max_records=1, node=page.node, bodies=False, uid=page.uid)
            if all(one.offset == record.offset for one in found):
                raise
            return False
        return True

    def read_body(
        self, offset: int, start: int = 0, stop: int | None = None, *, node: int | None = None, uid: int = 0
    ) -> bytes:
        """Read bytes `start` up to `stop` (its end) of a record's body; a long range is read in pieces, all of one log:
        the one with this `uid`, if one is named. Raises `UnknownGroup` where its name is another one's by now."""
        pieces = [piece for piece in self.body_pieces(offset, start, stop, node=node, uid=uid)]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def body_pieces(
        self, offset: int, start: int = 0, stop: int | None = None, *, node: int | None = None, uid: int = 0
    ) -> Iterator[bytes]:
        """Yield the same in pieces, so that a large body never has to fit into memory."""
        if stop is None:
            record, page = self._read(offset, node, False, uid)
            stop, uid = record.size, page.uid
        steps = body_steps(self.name, offset, start, stop, node, uid)
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
        """Read the log's bounds: (start, end), the first offset and the next free one. Linearizable, unless a member
        (``local``), a `staleness` or another `consistency` is asked for."""
        return self.yard.run(latest_call(self.name, node, consistency, staleness))

    def seek(self, since: int, *, node: int | None = None, timeout: float | None = None) -> int:
        """Find the first offset stamped at `since` (ms since 1970) or later, or the log's end."""
        return self.yard.run(seek_call(self.name, since, node), timeout)

    # The rest.

    def wait_applied(
        self, index: int, *, term: int = 0, node: int | None = None, timeout: float | None = None
    ) -> int:
        """Wait until the leader, or member `node`, has applied `index`; return what it has applied. With the `term` of
        a `Place` raises `Refused` when that entry was overwritten, `Gone` when nobody can tell any more."""
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
        """Ask the machine's `query`. `node`, `consistency` and `staleness` as in `poll`; `index`: not before it is
        applied there."""
        return self.yard.run(query_call(self.name, request, node, consistency, index, staleness), timeout)

    def truncate(self, before: int, *, timeout: float | None = None) -> int:
        """Remove all records below offset `before`; return the log's first offset afterwards."""
        return self.yard.run(truncate_call(self.name, before), timeout)

    def retain(
        self, *, age: float = 0.0, bytes: int = 0, records: int = 0, timeout: float | None = None
    ) -> int:  # fmt: skip
        """Say what the log keeps from now on, in place of what was said before: records younger than `age` seconds, the
        newest `bytes` and `records`; 0 is no limit, and what any limit gives up goes. A limit is kept to an eighth of
        it. Returns the log's first offset. Raises `Refused` while some of its nodes run a logyard that knows no limits.
        """
        return self.yard.run(retain_call(self.name, age, bytes, records), timeout)

    def producer(self, name: int | str, *, timeout: float | None = None) -> Producer:
        """Return an idempotent producer of this log, by its number or a name: see `client.producer`. Its `last` is the
        highest sequence that it has written. Raises `Refused` as `retain`."""
        number = producer_number(name)
        return Producer(self, number, self.yard.run(producer_call(self.name, number), timeout))

    def epoch(
        self, producer: int | str, incarnation: int, epoch: int, lane: int = 0, *, timeout: float | None = None
    ) -> EpochWriter:
        """Return a writer of one lane of a fenced producer's epoch: see `client.producer`. Raises `Refused` as
        `retain`, and for a keyed log or a partition that has ended; a `LogyardError` of code `fenced` when a later
        epoch has begun, or this one is done."""
        writer = EpochWriter(self, epoch_of(producer, incarnation, epoch), lane)
        self.yard.run(epoch_call(self.name, writer.epoch), timeout)
        return writer

    def close_epoch(
        self, producer: int | str, incarnation: int, epoch: int, *, timeout: float | None = None
    ) -> None:  # fmt: skip
        """Take no more frames of an epoch of a fenced producer, nor of any before it. Doing it again is no error; one
        that a later epoch has closed is `fenced`."""
        self.yard.run(close_epoch_call(self.name, epoch_of(producer, incarnation, epoch)), timeout)

    def epoch_state(self, producer: int | str, *, timeout: float | None = None) -> tuple[int, int, bool] | None:
        """Return a fenced producer's incarnation, its newest epoch here, and whether that takes frames; None for one
        that has written nothing here."""
        return self.yard.run(epoch_state_call(self.name, producer_number(producer)), timeout)

    def describe(self, node: int | None = None) -> dict[str, Any]:
        """Describe everything about the group, as its leader (or member `node`) sees it."""
        return self.yard.describe(self.name, node)

    def snapshot(self, node: int | None = None) -> dict[int, Any]:
        """Snapshot this log on one member or on every node."""
        return self.yard.snapshot([self.name], node)

    def run(self, call: Call[T], timeout: float | None = None) -> T:
        """Ask any call about this log."""
        return self.yard.run(call, timeout)


def _any_large(records: list[tuple[Buffer, Buffer | None]]) -> bool:
    return any(body is not None and len(body) >= SMALLEST for _, body in records)
