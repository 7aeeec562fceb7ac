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
from typing import BinaryIO

from logyard.protocol.compression import SMALLEST, encode, wants
from logyard.protocol.errors import BadRequest, Busy
from logyard.protocol.frame import Buffer, append_command
from logyard.protocol.tls import TlsConfig, client_context, require_safe

from ._async.consumer import TopicVerbs
from ._async.log import LogVerbs
from .background import background
from .kv import KV
from .lane import Lane
from .link import Stream
from .log import SESSION_TTL_S, Appended, flags_of
from .machine import Machine
from .messages import Session, open_session
from .network import TIMEOUT_S, WINDOW_BYTES, Network
from .pending import PendingAppend
from .queue import Queue
from .runtime import running
from .sequences import Ticket
from .session import UNIX, unix_target
from .tls_stream import TlsStream
from .upload_aio import upload

__all__ = ["Log", "PendingAppend", "Yard", "connect"]


async def open_socket(host: str, port: int, context: SSLContext | None = None) -> Stream:
    """Return a connected TCP socket, with `context` a TLS connection over one; raise OSError. The asynchronous client's
    only door to the network. "unix:PATH" is a socket on this machine, without TLS."""
    runtime = running()
    if host.startswith(UNIX):
        with unix_target(host) as path:
            return await runtime.connect(socket.AF_UNIX, socket.SOCK_STREAM, 0, path)
    failure = OSError(f"{host} has no address")
    for family, kind, protocol, target in await runtime.resolve(host, port):
        require_safe(str(target[0]), context is not None)
        try:
            sock = await runtime.connect(family, kind, protocol, target)
            break
        except OSError as error:
            # A name may have several addresses, and a server listens at one of them: "localhost" is ::1 as well.
            failure = error
    else:
        raise failure
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
    """Connect a client of the cluster that `servers` ("host:port") belong to; one that answers is enough.

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


class Yard(Network, TopicVerbs):
    """The cluster as a client sees it. Made by `connect`; admin verbs are in `_async.admin`."""

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
        """Return the append log `name`; nothing is asked until it is used."""
        log = self._logs.get(name)
        if log is None:
            if not name:
                raise BadRequest("a log has a name")
            log = self._logs[name] = Log(self, name)
        return log

    def kv(self, name: str) -> KV:
        """Return the KV group `name`; nothing is asked until it is used."""
        found: KV | None = self.kvs.get(name)
        if found is None:
            if not name:
                raise BadRequest("a group has a name")
            found = self.kvs[name] = KV(self, name)
        return found

    def queue(self, name: str) -> Queue:
        """Return the queue `name`; nothing is asked until it is used."""
        if not name:
            raise BadRequest("a queue has a name")
        return Queue(self, name)

    def machine(self, name: str) -> Machine:
        """Return the group `name`, whatever its machine, one's own too; nothing is asked until it is used."""
        if not name:
            raise BadRequest("a group has a name")
        return Machine(self, name)

    async def open_session(self, name: str, *, kind: str = "") -> Session:
        """Open a session of the group `name`, for any machine: exactly-once commands, and what the machine sends to it.
        It ends with `close`, with this client, or when the client is silent for its `session_ttl`. `kind`: the machine
        that it must be (``log``, ``kv``, ``queue``, or your own's name), else `WrongKind` is raised."""
        return await open_session(self, name, Session, kind)

    async def drain(self) -> None:
        """Wait until every append is acknowledged or failed."""
        while self.window.used:
            await self.freed()


class Log(LogVerbs):
    """One append log; its verbs are in `_async.log`, here is how appends leave: in the frames of its lane."""

    __slots__ = ("lane",)

    yard: Yard

    def __init__(self, yard: Yard, name: str) -> None:
        self.yard = yard
        self.name = name
        self.lane: Lane = yard.lane(name)

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

    async def _send(
        self, metadata: Buffer, payload: Buffer | None, timeout: float | None, flags: int, command: bytes
    ) -> tuple[Appended, int, Ticket | None]:
        yard, lane = self.yard, self.lane
        if yard.closed or yard.window.used >= yard.window.limit:
            await yard.room()
        batch, position = lane.add(metadata, payload, yard.timeout if timeout is None else timeout, flags, command)
        if not lane.dirty:
            yard.kick(lane)
        return await batch.pending.wait(yard.runtime.event), position, batch.ticket

    async def _send_many(
        self,
        records: Iterable[tuple[Buffer, Buffer | None]],
        timeout: float | None,
        flags: int,
        command: bytes,
        keys: Iterable[bytes] | None,
        at: int | None,
    ) -> tuple[Appended, Ticket | None]:
        yard, lane = self.yard, self.lane
        if yard.closed or yard.window.used >= yard.window.limit:
            await yard.room()
        limit = yard.timeout if timeout is None else timeout
        batch = lane.add_many(records, limit, flags, command or append_command(at), keys)
        yard.kick(lane)
        return await batch.pending.wait(yard.runtime.event), batch.ticket

    async def _upload(
        self,
        metadata: Buffer,
        source: AsyncIterable[Buffer] | BinaryIO | memoryview,
        size: int | None,
        timeout: float | None,
        compress: bool,
        command: bytes,
    ) -> int:
        return await upload(self.yard, self.name, metadata, source, size, timeout, compress, command)
