"""What strangers do to the JSON gateway: web pages, clients that send half of something, bodies that are none.

Requests are those that browsers send (`Origin`, `Sec-Fetch-Site`, simple and preflighted ones), byte by byte.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import wrap_app

from logyard.service.etcd.connections import HEAD_S, Connection, serve_http
from logyard.service.etcd.serving import hypercorn_config

from .server import EtcdServer, etcd_server

PUT = b'{"key": "d2Vi", "value": "cGFnZQ=="}'
WAIT_S = 30.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    flags = ("--cors=http://good.example,https://also.good", "--host-whitelist=etcd.internal")
    with etcd_server(tmp_path_factory.mktemp("etcd"), *flags) as found:
        yield found
        assert "Traceback" not in found.lines and "a bug of ours" not in found.lines


def ask(
    server: EtcdServer, method: str, path: str, body: bytes = b"", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """A request with these headers, `_` for `-`."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=WAIT_S)
    try:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, named)
        response = connection.getresponse()
        return response.status, {key.lower(): value for key, value in response.getheaders()}, response.read()
    finally:
        connection.close()


def written(server: EtcdServer) -> bool:
    return "kvs" in server.call("/v3/kv/range", key=b"web")


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example", "Content_Type": "text/plain"},
        {"Origin": "http://evil.example", "Sec_Fetch_Site": "cross-site", "Content_Type": "text/plain;charset=UTF-8"},
        {"Origin": "null", "Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "no-cors"},
        {"Origin": "http://localhost:3000", "Sec_Fetch_Site": "same-site"},
        {"Origin": "http://good.example.evil.example"},
        {"Host": "evil.example"},
        {"Host": "evil.example:2379", "Origin": "http://evil.example:2379", "Sec_Fetch_Site": "same-origin"},
        {"Host": "[", "Origin": "http://[" },
    ],
    ids=str,
)  # fmt: skip
def test_a_page_of_another_site_changes_and_reads_nothing(server: EtcdServer, headers: dict[str, str]) -> None:
    status, told, body = ask(server, "POST", "/v3/kv/put", PUT, **headers)
    assert (status, json.loads(body)["code"]) == (403, 7) and "access-control-allow-origin" not in told
    assert not written(server)
    assert ask(server, "OPTIONS", "/v3/kv/put", b"", **headers, Access_Control_Request_Method="POST")[0] == 403
    assert ask(server, "GET", "/version", b"", **headers)[0] == 403
    assert ask(server, "POST", "/v3/watch", b'{"create_request": {"key": "AA=="}}', **headers)[0] == 403


@pytest.mark.parametrize("origin", ["http://good.example", "https://also.good"])
def test_a_page_that_is_listed_may(server: EtcdServer, origin: str) -> None:
    status, told, _ = ask(server, "OPTIONS", "/v3/kv/put", Origin=origin, Access_Control_Request_Method="POST")
    assert status == 200 and told["access-control-allow-origin"] == origin
    assert "POST" in told["access-control-allow-methods"] and "content-type" in told["access-control-allow-headers"]
    status, told, _ = ask(server, "POST", "/v3/kv/put", PUT, Origin=origin, Sec_Fetch_Site="cross-site")
    assert status == 200 and told["access-control-allow-origin"] == origin and written(server)
    server.call("/v3/kv/deleterange", key=b"web")


def test_clients_that_are_no_browsers_need_nothing(server: EtcdServer) -> None:
    for host in ("localhost", "LOCALHOST:2379", "127.0.0.1:1", "[::1]:2379", "etcd.internal:2379", "10.1.2.3"):
        # The form that curl sends by itself.
        kind = "application/x-www-form-urlencoded"
        assert ask(server, "POST", "/v3/kv/put", PUT, Host=host, Content_Type=kind)[0] == 200, host
    same = f"http://127.0.0.1:{server.port}"
    assert ask(server, "POST", "/v3/kv/range", b'{"key": "d2Vi"}', Origin=same, Sec_Fetch_Site="same-origin")[0] == 200
    server.call("/v3/kv/deleterange", key=b"web")


def test_its_files_are_its_users_alone(server: EtcdServer) -> None:
    data = server.errors.parent / "data"
    found = [path for path in (data, *data.rglob("*")) if not path.is_symlink()]
    assert len(found) > 5
    looked_at = [path for path in found if mode_of(path)]
    assert len(looked_at) > 5 and [path for path in looked_at if mode_of(path) & 0o077] == []


def mode_of(path: Path) -> int:
    """A file's mode; 0 of one that is gone: the node that runs removes some."""
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        return 0


def closed(connection: socket.socket, seconds: float) -> bytes:
    """What comes until the other end closes."""
    connection.settimeout(seconds)
    found = b""
    while part := connection.recv(65_536):
        found += part
    return found


@pytest.mark.long
def test_half_of_a_head_is_given_up(server: EtcdServer) -> None:
    with ExitStack() as open_:
        began = time.monotonic()
        half = [open_.enter_context(socket.create_connection((server.host, server.port))) for _ in range(3)]
        half[0].sendall(b"POST /v3/kv/put HTTP/1.1\r\nHost: loc")
        half[1].sendall(b"P")
        half[2].sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200" in half[2].recv(4096)
        half[2].sendall(b"GET /vers")
        for one in half:
            closed(one, HEAD_S + WAIT_S)
        assert time.monotonic() - began >= HEAD_S - 0.1
        # Bytes that come one by one do not begin the time anew; a connection that asks for nothing stays.
        assert server.call("/v3/auth/status")["header"]


@pytest.mark.long
def test_a_connection_that_is_kept_is_not_cut_while_it_is_quiet(server: EtcdServer) -> None:
    with socket.create_connection((server.host, server.port)) as kept:
        for pause in (0.0, HEAD_S + 1.0):
            kept.settimeout(pause or 0.01)
            with pytest.raises(TimeoutError):
                kept.recv(1)
            kept.settimeout(WAIT_S)
            kept.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
            found = b""
            while b"etcdserver" not in found:
                found += kept.recv(4096)


def sockets_of(pid: int) -> int:
    found = 0
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            found += os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:")
    return found


WATCH = b'{"create_request":{"key":"d2Vi"}}'


@pytest.mark.parametrize("behind", [b"", b"POST /v3/kv/put HTTP/1.1\r\n", b"x" * 200_000], ids=["none", "head", "much"])
def test_a_watch_ends_with_its_client_whatever_came_behind_it(server: EtcdServer, behind: bytes) -> None:
    head = f"POST /v3/watch HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(WATCH)}\r\n\r\n".encode()
    before = sockets_of(server.process.pid)
    for _ in range(3):
        stranger = socket.create_connection((server.host, server.port), WAIT_S)
        with stranger, suppress(ConnectionError):
            stranger.sendall(head + WATCH + behind)
            stranger.recv(4096)
    pause, deadline = threading.Event().wait, time.monotonic() + WAIT_S
    while sockets_of(server.process.pid) > before:
        assert time.monotonic() < deadline, "sockets are kept"
        pause(0.05)


class LeavesWhileAnswered:
    """The stream of a client that asks, and closes while the answer is on its way."""

    def __init__(self) -> None:
        self.socket, self.theirs = socket.socketpair()
        self.asked = self.closed = False
        self.answering = trio.Event()
        self.left = trio.Event()

    async def receive_some(self, most: int) -> bytes:
        await trio.lowlevel.checkpoint()
        if not self.asked:
            self.asked = True
            return b"GET / HTTP/1.1\r\nHost: a\r\n\r\nGET"
        await self.answering.wait()
        self.left.set()
        return b""

    async def send_all(self, data: bytes) -> None:
        if not data:
            # The last of an answer, all of which is sent.
            self.answering.set()
            await self.left.wait()
        await trio.testing.wait_all_tasks_blocked()

    async def send_eof(self) -> None:
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        self.closed = True
        self.socket.close()
        self.theirs.close()
        await trio.lowlevel.checkpoint()


async def test_a_connection_ends_whose_client_leaves_while_it_is_answered() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    config, stream = hypercorn_config(["127.0.0.1:0"]), LeavesWhileAnswered()
    wrapped = wrap_app(app, config.wsgi_max_body_size, "asgi")
    with trio.fail_after(WAIT_S):
        await Connection(wrapped, config, WorkerContext(None), ConnectionState({}), stream).run()
    assert stream.closed


@pytest.mark.parametrize(
    "data",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0" * 40,
        b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + b"\0" * 50 + b"\r\n\r\n",
        b"GET\r\n\r\n", b"\0\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /%ff%00 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /v3/kv/put HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /v3/kv/put HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx",
        b"POST /v3/kv/put HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v3/watch HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"5\r\n{\xff\xff\xff}\r\n0\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"a: " + b"b" * 100_000 + b"\r\n\r\n",
        b"GET http://[ HTTP/1.1\r\nHost: localhost\r\n\r\n", b"GET * HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
    ids=lambda data: repr(data[:60]),
)  # fmt: skip
def test_what_is_malformed_is_answered(server: EtcdServer, data: bytes) -> None:
    with socket.create_connection((server.host, server.port)) as connection:
        connection.sendall(data)
        connection.settimeout(WAIT_S)
        assert connection.recv(65_536).startswith(b"HTTP/1.1 "), "an answer of HTTP/1.1, whatever was wrong"
    assert server.call("/v3/auth/status")["header"], "and the next one is served"


def test_who_speaks_grpc_is_told_in_the_log(server: EtcdServer) -> None:
    """`etcdctl` says "context deadline exceeded" alone; whoever did not read the guide looks here."""
    said = "a client speaks HTTP/2, as etcdctl"
    before = server.lines.count(said)
    with socket.create_connection((server.host, server.port), WAIT_S) as link:
        link.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))
        while link.recv(4096):
            pass
    assert server.lines.count(said) == before + 1


def test_an_upgrade_is_not_taken(server: EtcdServer) -> None:
    upgrades = (
        {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2_Settings": "AAMAAABkAAQAAP__"},
        {"Connection": "Upgrade", "Upgrade": "websocket", "Sec_WebSocket_Key": "x" * 22 + "==",
         "Sec_WebSocket_Version": "13"},
    )  # fmt: skip
    assert ask(server, "GET", "/version", b"", **upgrades[0])[0] == 200, "HTTP/1.1, as if nothing was said"
    assert ask(server, "GET", "/version", b"", **upgrades[1])[0] in (403, 400)


@pytest.mark.parametrize(
    "body", [b"[]" * 1_350_000, b"[" * 2_700_000, b"[" + b"[]," * 900_000 + b"[]]"], ids=("pairs", "deep", "list")
)
@pytest.mark.parametrize("path", ["/v3/kv/range", "/v3/watch"])
def test_a_body_of_brackets_costs_little(server: EtcdServer, path: str, body: bytes) -> None:
    def spent() -> float:
        fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / 100

    before = spent()
    assert ask(server, "POST", path, body)[0] in (400, 500)
    # To receive it is a part of that; ticks are hundredths.
    assert spent() - before < 0.1 + 0.02


async def test_connections_are_bounded_and_the_one_idle_longest_goes() -> None:
    busy = trio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/wait":
            busy.set()
            await trio.sleep_forever()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def opened(path: str) -> trio.SocketStream:
        stream = await trio.open_tcp_stream(host, int(port))
        await stream.send_all(b"GET %s HTTP/1.1\r\nHost: a\r\n\r\n" % path.encode())
        return stream

    async with trio.open_nursery() as nursery:
        run = partial(serve_http, app, hypercorn_config(["127.0.0.1:0"]), trio.sleep_forever, 3)
        (url,) = await nursery.start(run)
        host, _, port = url.removeprefix("http://").rpartition(":")
        with trio.fail_after(WAIT_S):
            waiting = await opened("/wait")
            await busy.wait()
            idle = [await opened("/"), await opened("/")]
            for stream in idle:
                assert b"200" in await stream.receive_some()
            fresh = await opened("/")
            assert b"200" in await fresh.receive_some()
            assert await idle[0].receive_some() == b"", "idle for longest"
            await idle[1].send_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            assert b"200" in await idle[1].receive_some()
            for stream in (waiting, idle[1], fresh):
                await stream.aclose()
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("path", ["/v3/kv/put", "/v3/watch", "/v3/lease/keepalive"])
@pytest.mark.parametrize("size", [2_900_000, 9_000_000])
def test_a_body_that_is_too_long_is_answered(server: EtcdServer, path: str, size: int) -> None:
    body = b'{"key": "d2Vi", "value": "' + b"A" * size + b'"}'
    status, _, told = ask(server, "POST", path, body)
    assert status == 429 if path == "/v3/kv/put" else status in (429, 500)
    assert json.loads(told)["code"] in (8, 2) and not written(server)
