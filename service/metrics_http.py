"""The metrics door: a small HTTP/1.1 server for `GET /metrics` and `GET /health`, on h11 and trio.

One request a connection. What a stranger sends is bounded in bytes, in time and in connections, and closes its own
connection only. Started by `service.node` when `metrics_listen` is set; the address is a loopback one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import h11
import trio

from logyard.protocol.errors import Refused

HEAD_BYTES_MAX = 8192
"""A scraper's request is a few hundred bytes."""
REQUEST_S = 5.0
"""For the whole exchange: a client that stalls gives its place away."""
CONNECTIONS_MAX = 16
RECEIVE_BYTES = 4096
TEXT = "text/plain; charset=utf-8"

log = logging.getLogger("logyard.metrics")


class MetricsServer:
    """Listens on (host, port); `render` gives (content type, body) of a scrape and must not wait."""

    def __init__(self, address: tuple[str, int], render: Callable[[], tuple[str, bytes]]) -> None:
        self.host, self.port = address
        self.render = render
        self._open = 0

    async def serve(self, task_status: trio.TaskStatus[int] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled; `started` with the port. Raises `Refused` when the address can't be had."""
        try:
            listeners = await trio.open_tcp_listeners(self.port, host=self.host)
        except OSError as error:
            where, why = f"{self.host}:{self.port}", error.strerror or str(error)
            raise Refused(f"can't serve metrics on {where} (node.metrics_listen): {why}") from None
        self.port = listeners[0].socket.getsockname()[1]
        task_status.started(self.port)
        await trio.serve_listeners(self._serve, listeners)

    async def _serve(self, stream: trio.SocketStream) -> None:
        if self._open >= CONNECTIONS_MAX:
            await trio.aclose_forcefully(stream)
            return
        self._open += 1
        try:
            with trio.move_on_after(REQUEST_S):
                await self._exchange(stream)
        except (h11.ProtocolError, trio.BrokenResourceError, trio.ClosedResourceError, OSError) as error:
            log.debug("metrics connection closed: %s", error)
        except Exception:
            log.exception("a scrape failed by a bug of ours")
        finally:
            self._open -= 1
            await trio.aclose_forcefully(stream)

    async def _exchange(self, stream: trio.SocketStream) -> None:
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES_MAX)
        try:
            request = await self._request(connection, stream)
        except h11.RemoteProtocolError as error:
            await self._answer(connection, stream, error.error_status_hint, TEXT, b"not a request\n", False)
            return
        if request is None:
            return
        path = request.target.partition(b"?")[0]
        if request.method not in (b"GET", b"HEAD"):
            status, kind, body = 405, TEXT, b"GET only\n"
        elif path == b"/metrics":
            status, (kind, body) = 200, self.render()
        elif path == b"/health":
            status, kind, body = 200, TEXT, b"ok\n"
        else:
            status, kind, body = 404, TEXT, b"/metrics and /health\n"
        await self._answer(connection, stream, status, kind, body, request.method == b"HEAD")

    async def _request(self, connection: h11.Connection, stream: trio.SocketStream) -> h11.Request | None:
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await stream.receive_some(RECEIVE_BYTES))
            elif isinstance(event, h11.Request):
                return event
            else:
                return None

    async def _answer(
        self, connection: h11.Connection, stream: trio.SocketStream, status: int, kind: str, body: bytes, head: bool
    ) -> None:
        headers = [("Content-Type", kind), ("Content-Length", str(len(body))), ("Connection", "close")]
        data = connection.send(h11.Response(status_code=status, headers=headers)) or b""
        if not head:
            data += connection.send(h11.Data(data=body)) or b""
        await stream.send_all(data + (connection.send(h11.EndOfMessage()) or b""))
        await stream.send_eof()
        # A close with unread bytes would reset the connection under the answer.
        while await stream.receive_some(RECEIVE_BYTES):
            pass
