"""HTTP connections of the gateway: hypercorn's protocol over trio, bounded for strangers.

HTTP/1.1 only: cleartext HTTP/2 is neither assumed nor upgraded to. A request's head has to be there in `HEAD_S`; when
`most` connections are open the one that has been idle longest goes, and if none is idle, the new one. What one
connection does wrong is its own; one whose client has left ends, whatever it was sent before. Used by `serving`.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import h11
import trio
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.h11 import H11Protocol, H11WSConnection
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import MAX_RECV, TCPServer
from hypercorn.trio.worker_context import EventWrapper, WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import parse_socket_addr, repr_socket_addr, wrap_app

from logyard.service.daemon import leaves

HEAD_S = 10.0
"""From a request's first byte to the end of its head: who sends half of one does not keep its place."""
CONNECTIONS_MAX = 4096
DESCRIPTORS_KEPT = 64
"""For what else the process opens."""

AHEAD_BYTES = 64 << 10
"""Behind a request that is not answered yet a client may have sent so much of the next ones."""

log = logging.getLogger("logyard.etcd")


def connections_max() -> int:
    """Return as many as there may be, after the soft limit of descriptors was raised as far as it goes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CONNECTIONS_MAX + DESCRIPTORS_KEPT
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(CONNECTIONS_MAX, soft - DESCRIPTORS_KEPT))


class ClientLeft(Exception):
    """A connection ended, or has to, while a request was under way and more of them had come behind it."""


class Answered(EventWrapper):
    """Whether the request under way is answered, so that what came behind it can be read; hypercorn's `can_read`.

    A watch is never answered. So what waits for it goes on reading, or nobody would see that the client has left.
    """

    def __init__(self, stream: trio.abc.Stream, connection: h11.Connection | H11WSConnection) -> None:
        super().__init__()
        self._stream = stream
        self._connection = connection

    async def wait(self) -> None:
        """Return when it is answered. Raises `ClientLeft`."""
        left = False

        async def read_ahead() -> None:
            nonlocal left
            with suppress(trio.ClosedResourceError, trio.BrokenResourceError):
                while len(self._connection.trailing_data[0]) <= AHEAD_BYTES:
                    data = await self._stream.receive_some(MAX_RECV)
                    if not data:
                        break
                    self._connection.receive_data(bytes(data))
            left = True
            waiting.cancel_scope.cancel()

        async with trio.open_nursery() as waiting:
            waiting.start_soon(read_ahead)
            await super().wait()
            waiting.cancel_scope.cancel()
        if left:
            raise ClientLeft


class Http1(H11Protocol):
    """HTTP/1.1, whatever its client would rather speak."""

    async def _check_protocol(self, event: h11.Request) -> None:
        """Take the request as it is; who speaks gRPC is told by nothing else what is wrong."""
        if event.method == b"PRI":
            log.warning(
                "a client speaks HTTP/2, as etcdctl and other gRPC clients do: only etcd's JSON gateway is served "
                "here, see docs/guides/etcd.md"
            )

    def read_ahead_of(self, stream: trio.abc.Stream) -> None:
        """Go on reading a stream while a request of it is under way."""
        self.can_read = Answered(stream, self.connection)


class Connection(TCPServer):
    """One connection. `idle_since`: when it began to wait for a request; None: it has one."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.idle_since: float | None = trio.current_time()
        self._http: Http1
        self._left = False

    async def run(self) -> None:
        """Serve it until it ends."""
        socket = self.stream.socket
        try:
            client = parse_socket_addr(socket.family, socket.getpeername())
            server = parse_socket_addr(socket.family, socket.getsockname())
            async with TaskGroup() as task_group:
                self._task_group = task_group
                self.protocol = self._http = Http1(  # type: ignore[assignment]  # its wrapper only looks for HTTP/2
                    self.app, self.config, self.context, task_group, ConnectionState(self.state), False, client,
                    server, self.protocol_send,
                )  # fmt: skip
                self._http.read_ahead_of(self.stream)
                await self.idle_task.restart(task_group, self._idle_timeout)
                await self._read_data()
                # Or it would last until a connection is idle too long. An answer may still come: it begins no more.
                self._left = True
                await self.idle_task.stop()
        except OSError:
            pass
        finally:
            await self._close()

    async def protocol_send(self, event: Event) -> None:
        """Send what the protocol has to say; it also says when a request begins and ends."""
        if isinstance(event, Updated):
            self.idle_since = trio.current_time() if event.idle else None
            if self._left:
                return
        try:
            await super().protocol_send(event)
        except trio.BusyResourceError:
            # The other task of this connection is closing it.
            await self.protocol.handle(Closed())

    async def _read_data(self) -> None:
        deadline = float("inf")
        while True:
            try:
                with trio.fail_at(deadline):
                    data = await self.stream.receive_some(MAX_RECV)
            except (trio.ClosedResourceError, trio.BrokenResourceError, trio.TooSlowError):
                break
            try:
                await self._http.handle(RawData(bytes(data)))
            except ClientLeft:
                break
            if data == b"":
                break
            begun = self.idle_since is not None and bool(self._http.connection.trailing_data[0])
            deadline = min(deadline, trio.current_time() + HEAD_S) if begun else float("inf")
        await self._http.handle(Closed())


async def serve_http(
    app: Any,
    config: Config,
    stop: Callable[[], Awaitable[None]],
    most: int,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until `stop` returns, then give connections their grace; `started` with the URLs."""
    context = WorkerContext(None)
    wrapped = wrap_app(app, config.wsgi_max_body_size, "asgi")
    open_: dict[Connection, None] = {}

    async def serve_one(stream: trio.SocketStream) -> None:
        if len(open_) >= most and not await _make_room(open_):
            await stream.aclose()
            return
        connection = Connection(wrapped, config, context, ConnectionState({}), stream)
        open_[connection] = None
        try:
            await connection.run()
        except Exception as error:
            # Of hypercorn and h11: their client broke the protocol in a way that they do not answer.
            log.info("a connection ended: %r", leaves(error)[0])
        finally:
            open_.pop(connection, None)

    async with trio.open_nursery() as connections:
        sockets = config.create_sockets().insecure_sockets
        for one in sockets:
            one.listen(config.backlog)
        listeners = [trio.SocketListener(trio.socket.from_stdlib_socket(one)) for one in sockets]
        async with trio.open_nursery() as accepting:
            accepting.start_soon(_accept, serve_one, listeners, connections)
            task_status.started(["http://" + repr_socket_addr(one.family, one.getsockname()) for one in sockets])
            await stop()
            accepting.cancel_scope.cancel()
        await context.terminated.set()
        connections.cancel_scope.deadline = trio.current_time() + config.graceful_timeout


async def _accept(
    serve_one: Callable[[trio.SocketStream], Awaitable[None]], listeners: list[trio.SocketListener], into: trio.Nursery
) -> None:
    await trio.serve_listeners(serve_one, listeners, handler_nursery=into)


async def _make_room(open_: dict[Connection, None]) -> bool:
    """End the connection that has been idle longest; return False when all have a request."""
    idle = [one for one in open_ if one.idle_since is not None]
    if not idle:
        return False
    longest = min(idle, key=lambda one: one.idle_since or 0.0)
    del open_[longest]
    await longest.stream.aclose()
    return True
