"""The trio client: `async with connect([...]) as yard`, and logs whose appends are gathered into one frame a turn.

Appends are at-least-once: a command whose outcome a cut connection left unknown is sent again, so a record may be there
twice, until sessions give exactly-once (`retry=False` raises `Unknown` instead). Pipelined appends keep their order
unless one is refused (busy, another leader) while a later one is already under way. A yard belongs to one trio run.
Connections are in `link`, routing in `network`; what is sent when is decided in `lane`.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from ssl import SSLContext
from typing import BinaryIO

import trio

from .admin import Call, T
from .errors import BadRequest, Busy, LogyardError, OutOfRange
from .lane import Batch, Lane
from .link import Stream
from .log import POLL_BYTES, POLL_RECORDS, POLL_WAIT_S, Bounds, body_call, latest_call, poll_call, ranges, truncate_call
from .network import TIMEOUT_S, WINDOW_BYTES, Network
from .records import Buffer, Page, Record
from .tls import TlsConfig, client_context, require_safe
from .tls_stream import TlsStream
from .upload import WHOLE_BYTES, check_size
from .upload_aio import read_file, upload, views
from .wire import FRAME_BYTES_MAX

__all__ = ["Log", "PendingAppend", "Yard", "connect"]


async def open_socket(host: str, port: int, context: SSLContext | None = None) -> Stream:
    """A connected TCP socket, with `context` a TLS connection over one; raises OSError. The client's only door to the
    network under trio."""
    family, kind, protocol, _, target = (await trio.socket.getaddrinfo(host, port, type=trio.socket.SOCK_STREAM))[0]
    require_safe(str(target[0]), context is not None)
    sock = trio.socket.socket(family, kind, protocol)
    try:
        await sock.connect(target)
        sock.setsockopt(trio.socket.IPPROTO_TCP, trio.socket.TCP_NODELAY, 1)
        if context is None:
            return sock
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
    task_name: str = "logyard client",
) -> AsyncIterator[Yard]:
    """A client of the cluster that `servers` ("host:port") belong to; one that answers is enough.

    `timeout` (seconds) bounds every verb that is not given its own. `retry=False`: a cut connection raises `Unknown`
    for commands whose outcome it hid. `window_bytes` bounds the payload of unfinished appends. On leaving, what is not
    acknowledged yet fails with `Unknown`: call `drain` first where that matters. `tls`: the files of a client's
    certificate; without it only loopback addresses are dialled.
    """
    yard = Yard(servers, timeout=timeout, retry=retry, window_bytes=window_bytes, tls=tls)
    failure: BaseException | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(yard.serve, name=task_name)
        try:
            await yard.first_contact()
            yield yard
        except BaseException as error:  # carried around the nursery, which would wrap it in a group
            failure = error
        yard.close()
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


class PendingAppend:
    """An append under way. Thousands share one `batch`: callbacks that need no single offset belong there."""

    __slots__ = ("batch", "position")

    def __init__(self, batch: Batch, position: int) -> None:
        self.batch = batch
        self.position = position

    @property
    def done(self) -> bool:
        """Acknowledged or failed."""
        return self.batch.done

    @property
    def offset(self) -> int:
        """The record's offset; raises what the append failed with. Only once `done`."""
        assert self.batch.done, "an append has its offset when it is done"
        if self.batch.error is not None:
            raise self.batch.error.again()
        return self.batch.first + self.position

    def on_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` when done, from within the receiving task: it must not block."""
        if self.batch.done:
            callback()
        else:
            self.batch.callbacks.append(callback)

    async def wait(self) -> int:
        """Wait for the offset."""
        await wait_batch(self.batch)
        return self.offset


async def wait_batch(batch: Batch) -> None:
    """Until a batch is done; all who wait for it share one event."""
    if not batch.done:
        if batch.signal is None:
            batch.signal = trio.Event()
            batch.callbacks.append(batch.signal.set)
        await batch.signal.wait()


class Yard(Network):
    """The cluster as a client sees it. Made by `connect`; admin verbs are in `admin.AsyncVerbs`."""

    __slots__ = ("_logs",)

    def __init__(
        self, servers: Sequence[str], *, timeout: float, retry: bool, window_bytes: int, tls: TlsConfig | None = None
    ) -> None:
        dial = partial(open_socket, context=client_context(tls))
        super().__init__(servers, dial, timeout=timeout, retry=retry, window_bytes=window_bytes)
        self._logs: dict[str, Log] = {}

    def log(self, name: str) -> Log:
        """The append log `name`; nothing is asked until it is used."""
        log = self._logs.get(name)
        if log is None:
            if not name:
                raise BadRequest("a log has a name")
            log = self._logs[name] = Log(self, name)
        return log

    async def drain(self) -> None:
        """Wait until every append is acknowledged or failed."""
        while self.window.used:
            await self.freed()


class Log:
    """One append log."""

    __slots__ = ("yard", "name", "lane")

    def __init__(self, yard: Yard, name: str) -> None:
        self.yard = yard
        self.name = name
        self.lane: Lane = yard.lane(name)

    async def append(self, metadata: Buffer, payload: Buffer | None = None, *, timeout: float | None = None) -> int:
        """Append one record; returns its offset once a quorum has it. At-least-once (see the module).

        A payload above 1 MiB travels in pieces, each stored once, and takes its place among the log's records when all
        of them are there; `timeout` is then that of each piece, and cancelling gives it up. Otherwise cancelling the
        wait does not take the record back. Raises `BadRequest`, `NoSpace`, `UnknownGroup`, `Unknown` ...
        """
        if payload is not None and len(payload) > WHOLE_BYTES:
            payload = memoryview(payload).cast("B")
            size = check_size(len(payload))
            return await upload(self.yard, self.name, metadata, views(payload), size, timeout)
        await self._room()
        lane = self.lane
        batch, position = lane.add(metadata, payload, self.yard.timeout if timeout is None else timeout)
        if not lane.dirty:
            self.yard.kick(lane)
        await wait_batch(batch)
        if batch.error is not None:
            raise batch.error.again()
        return batch.first + position

    async def append_stream(
        self,
        metadata: Buffer,
        source: AsyncIterable[Buffer] | BinaryIO,
        size: int | None = None,
        *,
        timeout: float | None = None,
    ) -> int:
        """Append one record whose payload comes from an async iterable of buffers or from a binary file, up to 4 GiB
        of which a few MiB are in memory at a time; returns its offset.

        `size`: the bytes that must come; otherwise whatever comes. `timeout` (seconds) bounds each piece, not the
        whole. If anything fails, or the wait is cancelled, nothing of it stays.
        """
        if not isinstance(source, AsyncIterable):
            source = read_file(source)
        return await upload(self.yard, self.name, metadata, source, size, timeout)

    async def append_many(
        self, records: Iterable[tuple[Buffer, Buffer | None]], *, timeout: float | None = None
    ) -> range:
        """Append (metadata, payload) records together or not at all; returns their offsets, without a gap."""
        await self._room()
        batch = self.lane.add_many(records, self.yard.timeout if timeout is None else timeout)
        self.yard.kick(self.lane)
        await wait_batch(batch)
        if batch.error is not None:
            raise batch.error.again()
        return range(batch.first, batch.first + batch.count)

    def append_nowait(self, metadata: Buffer, payload: Buffer | None = None) -> PendingAppend:
        """Append without waiting: all that is given in one turn of the loop leaves as one frame.

        Raises `Busy` when the client's window is full: wait for some of what is under way.
        """
        yard, lane = self.yard, self.lane
        if yard.window.used >= yard.window.limit:
            raise Busy("the client's window is full", {"cause": "client window", "retry_after": 0.001})
        batch, position = lane.add(metadata, payload, yard.timeout)
        if not lane.dirty:
            yard.kick(lane)
        return PendingAppend(batch, position)

    async def truncate(self, before: int, *, timeout: float | None = None) -> int:
        """Remove all records below offset `before`; returns the log's first offset afterwards."""
        return await self.yard.run(truncate_call(self.name, before), timeout)

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
        timeout: float | None = None,
    ) -> Page:
        """Records from `offset` on (-1: those still to come), at least one if there is one.

        `wait` (seconds): how long to wait for a first record. `node`: that member answers itself, whatever its role;
        `page.node` names who answered. `consistency`: ``local``, ``leader`` (default without `node`) or
        ``linearizable``. Raises `OutOfRange` or `Gone` for an offset that is not there, `GroupStopped`, `Corrupt`.
        """
        deadline = trio.current_time() + wait
        while True:
            left = deadline - trio.current_time()
            call = poll_call(self.name, offset, max_records, max_bytes, max(0.0, left), node, bodies, consistency)
            page = await self.yard.run(call, timeout)
            if len(page) or left <= POLL_WAIT_S:
                return page
            offset = page.next

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
        for first, end in ranges(start, max(start, stop)):
            yield await self.yard.run(body_call(self.name, offset, first, end, node))

    async def latest(self, *, node: int | None = None, consistency: str | None = None) -> Bounds:
        """The log's bounds: (start, end), the first offset and the next free one."""
        return await self.yard.run(latest_call(self.name, node, consistency))

    async def describe(self, node: int | None = None) -> dict[str, object]:
        """Everything about the group, as its leader (or member `node`) sees it."""
        return await self.yard.describe(self.name, node)

    async def snapshot(self, node: int | None = None) -> dict[int, object]:
        """Snapshot this log on one member or on every node."""
        return await self.yard.snapshot([self.name], node)

    async def run(self, call: Call[T], timeout: float | None = None) -> T:
        """Any call about this log."""
        return await self.yard.run(call, timeout)

    async def _room(self) -> None:
        yard = self.yard
        if yard.closed:
            raise LogyardError("the client is closed")
        while yard.window.used >= yard.window.limit:
            await yard.freed()
