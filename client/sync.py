"""The blocking client: `with connect_sync([...]) as yard`, usable from any thread, without trio.

Each call takes a connection of its own from a pool and gives it back, so threads never wait for one another's answers.
The frames, the answers and the rules of retrying are those of `session`; appends are at-least-once, as `aio` explains.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, BinaryIO, Self, cast

from . import wire
from .admin import Call, SyncVerbs, T
from .errors import BadRequest, LogyardError, NotLeader, OutOfRange, Unknown, UnknownGroup
from .lane import Frame
from .log import POLL_BYTES, POLL_RECORDS, POLL_WAIT_S, Bounds, body_call, latest_call, poll_call, ranges, truncate_call
from .records import Buffer, Page, Record
from .session import Retry, Routes
from .sync_link import Connection
from .tls import TlsConfig, client_context
from .upload import WHOLE_BYTES, check_size
from .upload_sync import read_file, upload

__all__ = ["Log", "Yard", "connect_sync"]

TIMEOUT_S = 30.0
IDLE_CONNECTIONS = 8
"""Connections kept for each node when nobody uses them."""


def connect_sync(
    servers: Sequence[str], *, timeout: float = TIMEOUT_S, retry: bool = True, tls: TlsConfig | None = None
) -> Yard:
    """A client of the cluster that `servers` ("host:port") belong to; one that answers is enough.

    Use it in a ``with`` block or `close` it. `timeout` (seconds) bounds every verb that is not given its own.
    `retry=False`: a cut connection raises `Unknown` for commands whose outcome it hid. `tls`: the files of a client's
    certificate; without it only loopback addresses are dialled.
    """
    yard = Yard(servers, timeout=timeout, retry=retry, tls=tls)
    try:
        yard.cluster()
    except BaseException:
        yard.close()
        raise
    return yard


class Yard(SyncVerbs):
    """The cluster as a blocking client sees it; admin verbs are in `admin.SyncVerbs`. Safe to share among threads."""

    __slots__ = ("timeout", "retry", "_context", "_routes", "_idle", "_lock", "_chance", "_closed")

    def __init__(
        self,
        servers: Sequence[str],
        *,
        timeout: float = TIMEOUT_S,
        retry: bool = True,
        tls: TlsConfig | None = None,
    ) -> None:
        self._context = client_context(tls)
        self.timeout = timeout
        self.retry = retry
        self._routes = Routes(servers)
        self._idle: dict[tuple[str, int], list[Connection]] = {}
        self._lock = threading.Lock()
        self._chance = random.Random()
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections that are not in use; those in use close when they are given back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, {}
        for connections in idle.values():
            for connection in connections:
                connection.close()

    def log(self, name: str) -> Log:
        """The append log `name`; nothing is asked until it is used."""
        if not name:
            raise BadRequest("a log has a name")
        return Log(self, name)

    def nodes(self) -> list[int]:
        """The nodes whose addresses are known."""
        with self._lock:
            return sorted(self._routes.addresses)

    def run(self, call: Call[T], timeout: float | None = None) -> T:
        """Ask, again where that is allowed, until answered or out of time. Raises a `LogyardError`."""
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        retry = Retry(deadline, self._chance, call.pinned)
        while True:
            connection: Connection | None = None
            cut = False
            try:
                connection = self._take(self._address(call, retry), deadline)
                answer = connection.call(call.method, call.arguments, deadline)
                cut = answer.was_cut
                if answer.error is None:
                    value = answer.value
                    break
                error = answer.error
                if cut and not call.idempotent and not self.retry:
                    raise Unknown(f"{call.method}: the connection ended before the answer: {error}")
            except LogyardError as refusal:
                if isinstance(refusal, Unknown):
                    raise
                error, cut = refusal, connection is None
            finally:
                if connection is not None:
                    self._give(connection, cut)
            self._stumbled(call.group, error, retry, cut)
        return call.decode(value)

    def command(self, name: str, frame: list[Buffer], timeout: float | None = None) -> bytes:
        """A command frame for a group's leader; returns the machine's reply. At-least-once unless `retry` is off."""
        deadline = time.monotonic() + (self.timeout if timeout is None else timeout)
        retry = Retry(deadline, self._chance, False)
        ambiguous = False
        while True:
            connection = None
            cut = False
            try:
                uid, address = self._leader(name, retry)
                connection = self._take(address, deadline)
                answer = connection.command(uid, frame, deadline)
                cut = answer.was_cut
                if answer.error is None:
                    reply: bytes = answer.value
                    return reply
                error = answer.error
                ambiguous |= cut or isinstance(error, Unknown)
                if ambiguous and not self.retry:
                    raise Unknown(f"{name}: not known whether it happened: {error}")
            except LogyardError as refusal:
                if isinstance(refusal, Unknown):
                    raise
                error = refusal
            finally:
                if connection is not None:
                    self._give(connection, cut)
            try:
                self._stumbled(name, error, retry, cut)
            except LogyardError as last:
                if ambiguous and last.retry != "never":
                    raise Unknown(f"{name}: not acknowledged in time, and not known whether it happened") from last
                raise

    def _stumbled(self, group: str, error: LogyardError, retry: Retry, cut: bool) -> None:
        """Wait before the next try, or raise when there is none."""
        if group:
            with self._lock:
                self._routes.stumbled(group, error)
        delay = retry.after(error, cut, time.monotonic())
        if delay:
            # A blocking client has nothing else to do in a back-off.
            threading.Event().wait(delay)

    def _take(self, address: tuple[str, int], deadline: float) -> Connection:
        with self._lock:
            if self._closed:
                raise LogyardError("the client is closed")
            idle = self._idle.get(address, [])
            while idle:
                connection = idle.pop()
                if connection.alive():
                    return connection
                connection.close()
        connection = Connection(address, deadline, self._context)
        try:
            with self._lock:
                self._routes.greeted(connection.channel.hello, address)
        except BaseException:
            connection.close()
            raise
        return connection

    def _give(self, connection: Connection, broken: bool) -> None:
        if not broken and not connection.channel.pending:
            with self._lock:
                idle = self._idle.setdefault(connection.address, [])
                if not self._closed and len(idle) < IDLE_CONNECTIONS:
                    idle.append(connection)
                    return
        elif broken:
            # Its siblings were opened to the same process: a restart has cut them all.
            with self._lock:
                stale = self._idle.pop(connection.address, [])
            for other in stale:
                other.close()
        connection.close()

    def _address(self, call: Call[Any], retry: Retry) -> tuple[str, int]:
        if call.group and not call.pinned:
            return self._leader(call.group, retry)[1]
        with self._lock:
            known = [self._routes.addresses[node] for node in call.nodes if node in self._routes.addresses]
        if call.pinned:
            if not known:
                raise LogyardError(f"the address of node {call.nodes[0]} is not known")
            return known[0]
        order = [*known, *(address for address in self._everyone() if address not in known)]
        return order[retry.failures % len(order)]

    def _everyone(self) -> list[tuple[str, int]]:
        with self._lock:
            return list(dict.fromkeys([*self._idle, *self._routes.addresses.values(), *self._routes.seeds]))

    def _leader(self, name: str, retry: Retry) -> tuple[int, tuple[str, int]]:
        """(uid, address) of a group's leader: from the cache, else asked of node after node."""
        with self._lock:
            uid, leader, _ = self._routes.groups.get(name, (0, 0, ()))
            if leader in self._routes.addresses:
                return uid, self._routes.addresses[leader]
        unknown = 0
        everyone = self._everyone()
        self._chance.shuffle(everyone)
        for address in everyone:
            try:
                connection = self._take(address, retry.deadline)
            except LogyardError:
                continue
            answer = connection.call("locate", {"names": [name]}, min(retry.deadline, time.monotonic() + 2.0))
            self._give(connection, answer.was_cut)
            if answer.error is not None or not isinstance(answer.value, list):
                unknown += isinstance(answer.error, UnknownGroup)
                continue
            with self._lock:
                self._routes.located(answer.value)
                uid, leader, _ = self._routes.groups.get(name, (0, 0, ())) if answer.value else (0, 0, ())
                if leader in self._routes.addresses:
                    return uid, self._routes.addresses[leader]
            unknown += not answer.value
        if unknown == len(everyone):
            error = UnknownGroup(f"no group {name!r} on any node")
            error.retry = "never"
            raise error
        raise NotLeader(f"{name}: no leader known")


class Log:
    """One append log, blocking."""

    __slots__ = ("yard", "name")

    def __init__(self, yard: Yard, name: str) -> None:
        self.yard = yard
        self.name = name

    def append(self, metadata: Buffer, payload: Buffer | None = None, *, timeout: float | None = None) -> int:
        """Append one record; returns its offset once a quorum has it. At-least-once (see the module).

        A payload above 1 MiB travels in pieces, each stored once; `timeout` is then that of each piece.
        """
        if payload is not None and len(payload) > WHOLE_BYTES:
            payload = memoryview(payload).cast("B")
            return upload(self.yard, self.name, metadata, (payload,), check_size(len(payload)), timeout)
        return self.append_many([(metadata, payload)], timeout=timeout).start

    def append_stream(
        self,
        metadata: Buffer,
        source: Iterable[Buffer] | BinaryIO,
        size: int | None = None,
        *,
        timeout: float | None = None,
    ) -> int:
        """Append one record whose payload comes from an iterable of buffers or a binary file; see
        `aio.Log.append_stream`."""
        buffers = read_file(cast(BinaryIO, source)) if hasattr(source, "read") else source
        return upload(self.yard, self.name, metadata, buffers, size, timeout)

    def append_many(self, records: Iterable[tuple[Buffer, Buffer | None]], *, timeout: float | None = None) -> range:
        """Append (metadata, payload) records together or not at all; returns their offsets, without a gap."""
        frame = Frame()
        frame.put_many(records)
        reply = self.yard.command(self.name, frame.encode(), timeout)
        if len(reply) < wire.REPLY.size:
            raise LogyardError(f"{self.name}: the machine's answer is not an append log's")
        first: int = wire.REPLY.unpack_from(reply)[0]
        return range(first, first + frame.count)

    def truncate(self, before: int, *, timeout: float | None = None) -> int:
        """Remove all records below offset `before`; returns the log's first offset afterwards."""
        return self.yard.run(truncate_call(self.name, before), timeout)

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
        timeout: float | None = None,
    ) -> Page:
        """Records from `offset` on; see `aio.Log.poll`."""
        deadline = time.monotonic() + wait
        while True:
            left = deadline - time.monotonic()
            call = poll_call(self.name, offset, max_records, max_bytes, max(0.0, left), node, bodies, consistency)
            page = self.yard.run(call, timeout)
            if len(page) or left <= POLL_WAIT_S:
                return page
            offset = page.next

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

    def read(self, offset: int, *, node: int | None = None, bodies: bool = True) -> Record:
        """One record; raises `OutOfRange` when it is not there yet."""
        page = self.poll(offset, max_records=1, node=node, bodies=bodies)
        for record in page:
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
        for first, end in ranges(start, max(start, stop)):
            yield self.yard.run(body_call(self.name, offset, first, end, node))

    def latest(self, *, node: int | None = None, consistency: str | None = None) -> Bounds:
        """The log's bounds: (start, end), the first offset and the next free one."""
        return self.yard.run(latest_call(self.name, node, consistency))

    def describe(self, node: int | None = None) -> dict[str, Any]:
        """Everything about the group, as its leader (or member `node`) sees it."""
        return self.yard.describe(self.name, node)

    def snapshot(self, node: int | None = None) -> dict[int, Any]:
        """Snapshot this log on one member or on every node."""
        return self.yard.snapshot([self.name], node)
