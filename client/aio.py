"""The asynchronous client: `async with connect([...]) as yard`, under trio and under asyncio, and logs whose appends
are gathered into one frame a turn.

Appends are exactly-once: a command whose outcome a cut connection left unknown is sent again under the number that it
has in the log's session, and is applied once (`exactly_once=False`: at-least-once, without sessions). Pipelined appends
keep their order unless one is refused (busy, another leader) while a later one is under way. A yard belongs to one run.
Connections are in `link`, routing in `network`; what is sent when is decided in `lane`.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from ssl import SSLContext
from typing import BinaryIO, Literal, overload

from logyard.protocol.errors import BadRequest, Busy, Gone, LogyardError, OutOfRange

from .admin import Call
from .background import background
from .compression import SMALLEST, encode, wants
from .kv import KvYard
from .lane import Batch, Lane
from .link import Stream
from .log import (
    POLL_BYTES,
    POLL_RECORDS,
    POLL_WAIT_S,
    SESSION_TTL_S,
    Place,
    body_steps,
    flags_of,
    offsets_of,
    poll_call,
    reply_call,
)
from .log_verbs import LogVerbs
from .messages import Session, open_session
from .network import TIMEOUT_S, WINDOW_BYTES, Network
from .pending import PendingAppend, wait_batch
from .queue import QueueYard
from .records import Buffer, Page, Record
from .runtime import running
from .sequences import STALE
from .session import UNIX, unix_target
from .tls import TlsConfig, client_context, require_safe
from .tls_stream import TlsStream
from .upload import WHOLE_BYTES, check_size
from .upload_aio import read_file, upload, views
from .wire import FRAME_BYTES_MAX, REPLY

__all__ = ["Log", "PendingAppend", "Yard", "connect"]


async def open_socket(host: str, port: int, context: SSLContext | None = None) -> Stream:
    """A connected TCP socket, with `context` a TLS connection over one; raises OSError. The asynchronous client's only
    door to the network. "unix:PATH" is a socket on this machine, without TLS."""
    runtime = running()
    if host.startswith(UNIX):
        with unix_target(host) as path:
            return await runtime.connect(socket.AF_UNIX, socket.SOCK_STREAM, 0, path)
    family, kind, protocol, target = await runtime.resolve(host, port)
    require_safe(str(target[0]), context is not None)
    sock = await runtime.connect(family, kind, protocol, target)
    if context is None:
        return sock
    try:
        stream = TlsStream(sock, context, server=False)
        await stream.handshake()
        return stream
    except BaseException:
        sock.close()
        raise


@asynccontextmanager
async def connect(
    servers: Sequence[str],
    *,
    timeout: float = TIMEOUT_S,
    retry: bool = True,
    window_bytes: int = WINDOW_BYTES,
    tls: TlsConfig | None = None,
    exactly_once: bool = True,
    session_ttl: float = SESSION_TTL_S,
    task_name: str = "logyard client",
) -> AsyncIterator[Yard]:
    """A client of the cluster that `servers` ("host:port") belong to; one that answers is enough.

    `timeout` (seconds) bounds every verb that is not given its own. `retry=False`: a cut connection raises `Unknown`
    for commands whose outcome it hid. `window_bytes` bounds the payload of unfinished appends. On leaving, what is not
    acknowledged yet fails with `Unknown`: call `drain` first where that matters. `tls`: the files of a client's
    certificate; without it only loopback addresses are dialled.

    `exactly_once`: appends belong to a session of their log, which ends when this client is silent for `session_ttl`
    seconds. A command that was perhaps applied before its session ended fails with `SessionExpired`.
    """
    yard = Yard(
        servers, timeout=timeout, retry=retry, window_bytes=window_bytes, tls=tls, exactly_once=exactly_once,
        session_ttl=session_ttl,
    )  # fmt: skip
    async with background(yard.runtime.nursery(), yard.runtime.Cancelled) as nursery:
        nursery.start_soon(yard.serve, name=task_name)
        try:
            await yard.first_contact()
            yield yard
            await yard.sessions.close()
        finally:
            yard.close()


class Yard(QueueYard, KvYard, Network):
    """The cluster as a client sees it. Made by `connect`; admin verbs are in `admin.AsyncVerbs`."""

    __slots__ = ("_logs",)

    def __init__(
        self,
        servers: Sequence[str],
        *,
        timeout: float,
        retry: bool,
        window_bytes: int,
        tls: TlsConfig | None = None,
        exactly_once: bool = False,
        session_ttl: float = SESSION_TTL_S,
    ) -> None:
        super().__init__(
            servers,
            partial(open_socket, context=client_context(tls)),
            timeout=timeout,
            retry=retry,
            window_bytes=window_bytes,
            exactly_once=exactly_once,
            session_ttl=session_ttl,
        )
        self._logs: dict[str, Log] = {}

    def log(self, name: str) -> Log:
        """The append log `name`; nothing is asked until it is used."""
        log = self._logs.get(name)
        if log is None:
            if not name:
                raise BadRequest("a log has a name")
            log = self._logs[name] = Log(self, name)
        return log

    async def open_session(self, name: str, *, kind: str = "") -> Session:
        """A session of the group `name`, for any machine: exactly-once commands, and what the machine sends to it. It
        ends with `close`, with this client, or when the client is silent for its `session_ttl`. `kind`: the machine
        that it must be (``log``, ``kv``, ``queue``, or your own's name), else `WrongKind` is raised."""
        return await open_session(self, name, Session, kind)

    async def drain(self) -> None:
        """Wait until every append is acknowledged or failed."""
        while self.window.used:
            await self.freed()


class Log(LogVerbs):
    """One append log; more of its verbs are in `log_verbs`."""

    __slots__ = ("lane",)

    def __init__(self, yard: Yard, name: str) -> None:
        self.yard = yard
        self.name = name
        self.lane: Lane = yard.lane(name)

    @overload
    async def append(
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
    async def append(
        self,
        metadata: Buffer,
        payload: Buffer | None = None,
        *,
        timeout: float | None = None,
        reply: Literal["append"],
        priority: str = "normal",
        compress: str | None = None,
    ) -> Place: ...

    async def append(
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
        """Append one record; returns its offset once a quorum has it.

        `reply`: with ``append`` it returns where the command lies as soon as the leader has it on disk (see
        `wait_applied`), with ``none`` it returns -1 as soon as it is sent; neither is sent again after a cut, and
        neither is exactly-once. `reply_from`: that member answers, when it has applied it. `priority` ``low``: it waits
        until nothing else of its log does. `compress`: ``zstd`` or ``none``, by default as the log's option says.

        A payload above 1 MiB travels in pieces, each stored once, and takes its place among the log's records when all
        of them are there; `timeout` is then that of each piece, cancelling gives it up, and it has no other options.
        Otherwise cancelling the wait does not take the record back. Raises a `LogyardError`.
        """
        flags = flags_of(reply, priority, self.lane.exactly_once, reply_from)
        if payload is not None and len(payload) > WHOLE_BYTES and not flags and reply_from is None:
            payload = memoryview(payload).cast("B")
            size = check_size(len(payload))
            zstd = await self._zstd(compress)
            return await upload(self.yard, self.name, metadata, views(payload), size, timeout, zstd)
        if payload is not None and len(payload) >= SMALLEST and await self._zstd(compress):
            metadata, payload = encode(metadata, payload)
        await self._room()
        lane = self.lane
        batch, position = lane.add(metadata, payload, self.yard.timeout if timeout is None else timeout, flags)
        if not lane.dirty:
            self.yard.kick(lane)
        first = await self._first(batch, reply_from, timeout)
        return Place(*batch.place) if reply == "append" else first + position if first >= 0 else -1

    async def append_stream(
        self,
        metadata: Buffer,
        source: AsyncIterable[Buffer] | BinaryIO,
        size: int | None = None,
        *,
        timeout: float | None = None,
        compress: str | None = None,
    ) -> int:
        """Append one record whose payload comes from an async iterable of buffers or from a binary file, up to 4 GiB
        of which a few MiB are in memory at a time; returns its offset.

        `size`: the bytes that must come; otherwise whatever comes. `timeout` (seconds) bounds each piece, not the
        whole. If anything fails, or the wait is cancelled, nothing of it stays.
        """
        if not isinstance(source, AsyncIterable):
            source = read_file(self.yard, source)
        return await upload(self.yard, self.name, metadata, source, size, timeout, await self._zstd(compress))

    async def append_many(
        self,
        records: Iterable[tuple[Buffer, Buffer | None]],
        *,
        timeout: float | None = None,
        reply_from: int | None = None,
        priority: str = "normal",
        compress: str | None = None,
        keys: Iterable[bytes] | None = None,
        command: bytes = b"",
    ) -> range:
        """Append (metadata, payload) records together or not at all; returns their offsets, without a gap. `keys`: one
        for each record of a keyed log; a record without payload takes its key away. `command`: of a producer's append,
        see `producer`."""
        flags = flags_of("consensus", priority, self.lane.exactly_once, reply_from)
        if await self._zstd(compress):
            records = [pair if (body := pair[1]) is None else encode(pair[0], body) for pair in records]
        await self._room()
        batch = self.lane.add_many(records, self.yard.timeout if timeout is None else timeout, flags, command, keys)
        self.yard.kick(self.lane)
        return offsets_of(await self._first(batch, reply_from, timeout), batch.given)

    async def _first(self, batch: Batch, reply_from: int | None, timeout: float | None) -> int:
        await wait_batch(batch)
        if batch.error is not None:
            raise batch.error.again()
        if reply_from is not None and batch.numbers is not None:
            wait = self.yard.timeout if timeout is None else timeout
            call = reply_call(self.name, batch.numbers.session, batch.sequence, reply_from, wait)
            try:
                answer: bytes = await self.yard.run(call, wait)
                return int(REPLY.unpack_from(answer)[0])
            except LogyardError as error:
                if error.code != STALE:
                    raise
                # It has applied so much more that it does not remember: the leader's answer is its own.
        return batch.first

    def append_nowait(
        self,
        metadata: Buffer,
        payload: Buffer | None = None,
        *,
        reply: str = "consensus",
        priority: str = "normal",
        compress: str | None = None,
    ) -> PendingAppend:
        """Append without waiting: all that is given in one turn of the loop leaves as one frame. Options as
        `append`; the log's own option to compress counts once the log was found.

        Raises `Busy` when the client's window is full: wait for some of what is under way.
        """
        yard, lane = self.yard, self.lane
        if yard.window.used >= yard.window.limit:
            raise Busy.told("the client's window is full", {"cause": "client window", "retry_after": 0.001})
        if payload is not None and len(payload) >= SMALLEST and wants(compress, self.name in yard.routes.compressed):
            metadata, payload = encode(metadata, payload)
        flags = flags_of(reply, priority) if reply != "consensus" or priority != "normal" else 0
        batch, position = lane.add(metadata, payload, yard.timeout, flags)
        if not lane.dirty:
            yard.kick(lane)
        return PendingAppend(batch, position)

    async def poll(
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
        """Records from `offset` on (-1: those still to come), at least one if there is one.

        `wait` (seconds): how long to wait for a first record. `node`: that member answers itself, whatever its role;
        `page.node` names who answered. `consistency`: ``local``, ``leader`` (default without `node`) or
        ``linearizable``. `staleness` (seconds): any member, or `node`, once it has applied everything that was
        committed so long ago. `since` (ms since 1970): not from `offset` but from the first record stamped then or
        later. Raises `OutOfRange` or `Gone` for an offset that is not there, `GroupStopped`, `Corrupt`.
        """
        deadline = self.yard.clock() + wait
        while True:
            left = deadline - self.yard.clock()
            call = poll_call(
                self.name, offset, max_records, max_bytes, max(0.0, left), node, bodies, consistency, staleness, since
            )
            page = await self.yard.run(call, timeout)
            if len(page) or left <= POLL_WAIT_S:
                return page
            offset, since = page.next, None

    async def records(
        self,
        start: int = 0,
        stop: int | None = None,
        *,
        follow: bool = False,
        bodies: bool = True,
        node: int | None = None,
    ) -> AsyncIterator[Record]:
        """The records from `start` up to `stop`, or to the log's end; with `follow` it waits there for more."""
        offset = start
        while stop is None or offset < stop:
            wanted = POLL_RECORDS if stop is None else min(POLL_RECORDS, stop - offset)
            wait = POLL_WAIT_S if follow else 0.0
            page = await self.poll(offset, max_records=wanted, wait=wait, node=node, bodies=bodies)
            for record in page:
                if record.left_out and record.size <= FRAME_BYTES_MAX:
                    record.fill(await self.read_body(record.offset, 0, record.size, node=page.node))
                yield record
            if not len(page) and not follow:
                return
            offset = page.next

    async def read(self, offset: int, *, node: int | None = None, bodies: bool = True) -> Record:
        """One record; raises `OutOfRange` when it is not there yet."""
        page = await self.poll(offset, max_records=1, node=node, bodies=bodies)
        for record in page:
            if record.offset != offset:
                raise Gone(f"{self.name}: the record at {offset} gave way to a newer one with its key")
            if record.left_out and record.size <= FRAME_BYTES_MAX:
                record.fill(await self.read_body(offset, 0, record.size, node=page.node))
            return record
        raise OutOfRange(f"{self.name}: offset {offset} is not in {page.start}..{page.end}")

    async def read_body(
        self, offset: int, start: int = 0, stop: int | None = None, *, node: int | None = None
    ) -> bytes:
        """Bytes `start` up to `stop` (its end) of a record's body; a long range is read in pieces."""
        pieces = [piece async for piece in self.body_pieces(offset, start, stop, node=node)]
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def body_pieces(
        self, offset: int, start: int = 0, stop: int | None = None, *, node: int | None = None
    ) -> AsyncIterator[bytes]:
        """The same as a stream of pieces, so that a large body never has to fit into memory."""
        if stop is None:
            stop = (await self.read(offset, node=node, bodies=False)).size
        steps = body_steps(self.name, offset, start, stop, node)
        step = next(steps, None)
        while step is not None:
            if isinstance(step, Call):
                step = steps.send(await self.yard.run(step))
            else:
                yield bytes(step)
                step = next(steps, None)

    async def _zstd(self, compress: str | None) -> bool:
        """Whether payloads are to be compressed; asks for the log's option if need be."""
        if compress is None and self.name not in self.yard.routes.groups:
            await self.latest()  # whatever it answers, finding the log tells
        return wants(compress, self.name in self.yard.routes.compressed)

    async def _room(self) -> None:
        yard = self.yard
        if yard.closed:
            raise LogyardError("the client is closed")
        while yard.window.used >= yard.window.limit:
            await yard.freed()
