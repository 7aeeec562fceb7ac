"""TLS at the client door: what is let in, what is refused and in which words, back-pressure, new certificates."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import random
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from click.testing import CliRunner

from logyard.client.aio import connect
from logyard.client.sync import connect_sync
from logyard.client.sync_link import Connection
from logyard.client.tls_stream import TlsStream
from logyard.engine.config import SystemConfig
from logyard.protocol import wire
from logyard.protocol.errors import BadRequest, LogyardError
from logyard.protocol.tls import Identity, TlsConfig, TlsError, identities, make_context, require
from logyard.service.certificates import Authority
from logyard.service.cli.root import cli
from logyard.service.config import NodeConfig
from logyard.service.door.dispatch import HANDLERS
from logyard.service.door.pushes import LISTENING
from logyard.service.door.server import RpcServer
from logyard.service.tls import Door, open_doors, reload_doors
from tests.client.fake_system import FakeCluster, start_node

from .certificates import Yard


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Yard:
    return Yard(tmp_path_factory.mktemp("certificates"))


@asynccontextmanager
async def secured(yard: Yard, count: int = 1, config: SystemConfig | None = None) -> AsyncIterator[FakeCluster]:
    """Fake nodes behind TLS doors."""
    found = FakeCluster()
    async with trio.open_nursery() as nursery:
        for node in range(1, count + 1):
            await start_node(found, node, nursery, config, door=yard.door(node))
        yield found
        nursery.cancel_scope.cancel()


async def test_a_client_with_a_certificate_is_served(yard: Yard) -> None:
    async with secured(yard, 3) as cluster:
        cluster.create("a", [1, 2, 3], 2)
        bodies = [random.Random(n).randbytes(size) for n, size in enumerate((0, 1, 16_384, 5 << 20, 70_000))]
        async with connect([cluster.addresses[1]], tls=yard.client(), timeout=20) as client:
            log = client.log("a")
            assert [await log.append(b"m", body) for body in bodies] == [0, 1, 2, 3, 4]
            assert [bytes((await log.read(n)).payload or b"") for n in range(5)] == bodies
            many = [log.append_nowait(b"x", bytes([n % 256]) * 50) for n in range(3000)]
            assert [await one.wait() for one in many] == list(range(5, 3005))

        def blocking() -> None:
            with connect_sync([cluster.addresses[3]], tls=yard.client(), timeout=20) as client:
                log = client.log("a")
                assert log.append(b"m", bodies[3]) == 3005
                assert [bytes(log.read(n).payload or b"") for n in range(5)] == bodies
                assert client.nodes() == [1, 2, 3]

        async def under_asyncio() -> None:
            async with connect([cluster.addresses[2]], tls=yard.client(), timeout=20) as client:
                log = client.log("a")
                assert await log.append(b"m", bodies[3]) == 3006
                assert [bytes((await log.read(n)).payload or b"") for n in range(5)] == bodies

        await trio.to_thread.run_sync(blocking)
        await trio.to_thread.run_sync(asyncio.run, under_asyncio())


BAD: list[tuple[Callable[[Yard], TlsConfig | None], str]] = [
    (lambda yard: yard.unknown_ca(), "signed by a CA unknown there"),
    (lambda yard: yard.distrusting(), "certificate is not accepted: self-signed"),
    (lambda yard: yard.expired(), "refused our certificate: it has expired"),
    (lambda yard: yard.other_cluster(), "for client other of cluster 'other', not for client of cluster 'fake'"),
    (lambda yard: yard.node(2), "for node 2 of cluster 'fake', not for client of cluster 'fake'"),
    (lambda yard: None, "this port speaks TLS only"),
]


@pytest.mark.parametrize(("files", "words"), BAD)
async def test_who_is_refused_and_told_why(yard: Yard, files: Callable[[Yard], TlsConfig | None], words: str) -> None:
    async with secured(yard) as cluster, connect([cluster.addresses[1]], tls=yard.client()) as good:
        cluster.create("a", [1], 1)
        address = cluster.addresses[1]
        with trio.fail_after(20), pytest.raises(LogyardError, match=words) as caught:
            async with connect([address], tls=files(yard)):
                pass
        assert "\n" not in str(caught.value)

        def blocking() -> None:
            with pytest.raises(LogyardError, match=words):
                connect_sync([address], tls=files(yard))

        async def under_asyncio() -> None:
            with pytest.raises(LogyardError, match=words):
                async with connect([address], tls=files(yard)):
                    pass

        with trio.fail_after(20):
            await trio.to_thread.run_sync(blocking)
            await trio.to_thread.run_sync(asyncio.run, under_asyncio())
        assert await good.log("a").append(b"m", b"still here") == 0


async def test_a_certificate_that_can_not_be_read_ends_its_connection_alone(
    yard: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python takes names in UTF-8 alone; a CA signs others as well."""
    read = ssl.SSLObject.getpeercert

    def unread(link: ssl.SSLObject, binary_form: bool = False) -> Any:
        return b"m\xfcller".decode() if link.server_side else read(link, binary_form)

    async with secured(yard) as cluster:
        with monkeypatch.context() as patch:
            patch.setattr(ssl.SSLObject, "getpeercert", unread)
            with trio.fail_after(20), pytest.raises(LogyardError):
                async with connect([cluster.addresses[1]], tls=yard.client(), timeout=3.0):
                    pass
        async with connect([cluster.addresses[1]], tls=yard.client()) as good:
            assert await good.nodes() == [1]


async def test_a_servers_certificate_that_can_not_be_read_is_told(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    read = ssl.SSLObject.getpeercert

    def unread(link: Any, binary_form: bool = False) -> Any:
        return read(link, binary_form) if link.server_side else b"m\xfcller".decode()

    monkeypatch.setattr(ssl.SSLObject, "getpeercert", unread)
    monkeypatch.setattr(ssl.SSLSocket, "getpeercert", unread)
    words = "the other side's certificate can't be read: .*0xfc"
    async with secured(yard) as cluster:
        with trio.fail_after(20), pytest.raises(LogyardError, match=words):
            async with connect([cluster.addresses[1]], tls=yard.client(), timeout=3.0):
                pass

        def blocking() -> None:
            with pytest.raises(LogyardError, match=words):
                connect_sync([cluster.addresses[1]], tls=yard.client(), timeout=3.0)

        await trio.to_thread.run_sync(blocking)


async def test_who_joins_shows_a_nodes_certificate_and_asks_for_nothing_else(yard: Yard) -> None:
    async with secured(yard) as cluster, connect([cluster.addresses[1]], tls=yard.client()) as good:
        cluster.create("a", [1], 1)
        host, port = cluster.addresses[1].rsplit(":", 1)

        def joining(files: TlsConfig) -> Connection:
            context = make_context(files, server=False)
            return Connection((host, int(port)), time.monotonic() + 5, context, wire.JOINS)

        def blocking() -> None:
            with pytest.raises(LogyardError, match="for client other of cluster 'other', not for client of cluster"):
                joining(yard.other_cluster())
            link = joining(yard.node(2))
            for verb in sorted({*HANDLERS, *LISTENING, "cluster"} - {"join"}):
                answer = link.call(verb, {}, time.monotonic() + 5)
                assert "joins, and asks for nothing else" in str(answer.error), verb
            # A command, of whoever knows the log's number already.
            assert link.command(cluster.logs["a"].uid, [b"x" * 100_000], time.monotonic() + 5).was_cut

        await trio.to_thread.run_sync(blocking)
        assert await good.log("a").append(b"m", b"still here") == 0


async def test_tls_at_a_plaintext_port(yard: Yard) -> None:
    cluster = FakeCluster()
    async with trio.open_nursery() as nursery:
        await start_node(cluster, 1, nursery)
        address = cluster.addresses[1]
        with trio.fail_after(20), pytest.raises(LogyardError, match="does not speak TLS on this port"):
            async with connect([address], tls=yard.client()):
                pass

        def blocking() -> None:
            with pytest.raises(LogyardError, match="does not speak TLS on this port"):
                connect_sync([address], tls=yard.client())

        await trio.to_thread.run_sync(blocking)
        nursery.cancel_scope.cancel()


async def test_a_server_must_be_who_its_hello_says(yard: Yard) -> None:
    """Node 1 shows node 2's certificate: whoever holds one node's key must not pass for another node."""
    cluster = FakeCluster()
    async with trio.open_nursery() as nursery:
        await start_node(cluster, 1, nursery, door=yard.door(2))
        words = "for node 2 of cluster 'fake', not for node 1"
        with trio.fail_after(20), pytest.raises(LogyardError, match=words):
            async with connect([cluster.addresses[1]], tls=yard.client()):
                pass

        def blocking() -> None:
            with pytest.raises(LogyardError, match=words):
                connect_sync([cluster.addresses[1]], tls=yard.client())

        await trio.to_thread.run_sync(blocking)
        nursery.cancel_scope.cancel()


async def test_without_tls_a_client_dials_loopback_only() -> None:
    with trio.fail_after(10), pytest.raises(LogyardError, match="not a loopback address and needs TLS"):
        async with connect(["192.0.2.1:7001"]):
            pass
    with trio.fail_after(10), pytest.raises(LogyardError, match="not a loopback address and needs TLS"):
        await trio.to_thread.run_sync(lambda: connect_sync(["192.0.2.1:7001"]))


async def test_a_stranger_who_shakes_hands_slowly_is_closed(yard: Yard) -> None:
    config = SystemConfig(handshake_timeout_ms=200)
    async with secured(yard, config=config) as cluster:
        host, _, port = cluster.addresses[1].rpartition(":")
        for data in (b"", b"\x16\x03\x01", b"\x16\x03\x01\x02\x00\x01" + bytes(60)):
            stream = await trio.open_tcp_stream(host, int(port))
            with trio.fail_after(20):
                if data:
                    await stream.send_all(data)
                try:
                    while await stream.receive_some(100):
                        pass
                except trio.BrokenResourceError:
                    pass
        async with connect([cluster.addresses[1]], tls=yard.client()) as good:
            assert await good.nodes() == [1]


async def test_garbage_inside_tls_closes_its_connection_and_nothing_else(yard: Yard) -> None:
    async with secured(yard) as cluster, connect([cluster.addresses[1]], tls=yard.client()) as good:
        cluster.create("a", [1], 1)
        host, _, port = cluster.addresses[1].rpartition(":")
        context = make_context(yard.client(), server=False)
        for seed in range(20):
            sock = trio.socket.socket()
            await sock.connect((host, int(port)))
            with TlsStream(sock, context, server=False) as stream, trio.fail_after(20):
                await stream.handshake()
                await stream.send(random.Random(seed).randbytes(2000))
                try:
                    while await stream.recv(4096):
                        pass
                except OSError:
                    pass
        # The same below TLS: a record that was tampered with.
        for _ in range(5):
            sock = trio.socket.socket()
            await sock.connect((host, int(port)))
            with TlsStream(sock, context, server=False) as stream, trio.fail_after(20):
                await stream.handshake()
                await sock.send(b"\x17\x03\x03\x00\x30" + bytes(48))
                with pytest.raises(OSError):
                    while await stream.recv(4096):
                        pass
                    raise ConnectionResetError
        assert await good.log("a").append(b"m", b"still here") == 0


async def test_new_certificates_are_read_on_demand_and_bad_ones_are_not(yard: Yard, tmp_path: Path) -> None:
    files = {}
    for key in ("ca", "certificate", "key"):
        files[key] = tmp_path / f"{key}.pem"
        files[key].write_bytes(Path(getattr(yard.node(2), key)).read_bytes())
    door = Door("client_tls", TlsConfig(**files))
    cluster = FakeCluster()
    async with trio.open_nursery() as nursery:
        await start_node(cluster, 1, nursery, door=door)
        with pytest.raises(LogyardError, match="not for node 1"):
            async with connect([cluster.addresses[1]], tls=yard.client()):
                pass
        files["certificate"].write_bytes(Path(yard.node(1).certificate).read_bytes())
        with pytest.raises(BadRequest, match=r"\[client_tls\].*do not belong together"):
            door.reload()
        with pytest.raises(LogyardError, match="not for node 1"):
            async with connect([cluster.addresses[1]], tls=yard.client()):
                pass
        files["key"].write_bytes(Path(yard.node(1).key).read_bytes())
        door.reload()
        async with connect([cluster.addresses[1]], tls=yard.client()) as good:
            assert await good.nodes() == [1]
        nursery.cancel_scope.cancel()


def copied(files: TlsConfig, directory: Path) -> TlsConfig:
    """The same files in a place of their own, where a test may change them."""
    directory.mkdir()
    found = {key: directory / f"{key}.pem" for key in ("ca", "certificate", "key")}
    for key, path in found.items():
        path.write_bytes(Path(getattr(files, key)).read_bytes())
    return TlsConfig(**found)


@pytest.mark.parametrize("wrong", ["another node's", "expired", "another cluster's", "cut"])
def test_new_certificates_are_taken_for_both_doors_or_for_none(yard: Yard, tmp_path: Path, wrong: str) -> None:
    """A node that took half of them, or another's, would lose its peers at their next connection."""
    config = NodeConfig(
        id=1, directory=tmp_path / "data", cluster="fake", tls=copied(yard.node(1), tmp_path / "peers"),
        client_tls=copied(yard.node(1), tmp_path / "clients"),
    )  # fmt: skip
    doors = [door for door in open_doors(config) if door is not None]
    before = [(door.server, door.client) for door in doors]
    given = {"another node's": yard.node(2), "expired": yard.expired_node(8), "another cluster's": yard.other_cluster()}
    for key in ("certificate", "key"):
        text = Path(getattr(given.get(wrong, yard.node(1)), key)).read_bytes()
        Path(getattr(config.client_tls, key)).write_bytes(text[:100] if wrong == "cut" else text)
    with pytest.raises(BadRequest, match=r"\[client_tls\]"):
        reload_doors(doors, "fake", 1)
    assert [(door.server, door.client) for door in doors] == before
    for key in ("certificate", "key"):
        Path(getattr(config.client_tls, key)).write_bytes(Path(getattr(yard.node(1), key)).read_bytes())
    reload_doors(doors, "fake", 1)
    assert not {*before} & {(door.server, door.client) for door in doors}


def test_a_door_checks_its_own_certificate(yard: Yard, tmp_path: Path) -> None:
    yard.door(1).check_own("fake", 1)
    with pytest.raises(BadRequest, match="for node 1 of cluster 'fake', not for node 2"):
        yard.door(1).check_own("fake", 2)
    with pytest.raises(BadRequest, match=r"\[tls\] certificate: certificate has expired"):
        Door("tls", yard.expired_node(8)).check_own("fake", 8)
    good = yard.node(1)
    nothing = tmp_path / "nothing.pem"
    nothing.write_text("nothing")
    for wrong, words in (
        (TlsConfig(ca=tmp_path / "none", certificate=good.certificate, key=good.key), "ca: can't use .*No such file"),
        (TlsConfig(ca=nothing, certificate=good.certificate, key=good.key), "ca: can't use .*not in PEM form"),
        (TlsConfig(ca=good.ca, certificate=tmp_path / "none", key=good.key), "certificate: can't read"),
        (TlsConfig(ca=good.ca, certificate=good.certificate, key=tmp_path / "none"), "key: can't read"),
        (TlsConfig(ca=good.ca, certificate=good.certificate, key=nothing), "not in PEM form"),
    ):
        with pytest.raises(BadRequest, match=words):
            Door("tls", wrong)


def test_what_a_certificate_may_say() -> None:
    found = identities(
        {
            "subjectAltName": (
                ("URI", "logyard://c.d/node/7"),
                ("DNS", "node-8.c.d"),
                ("DNS", "www.c.d"),
                ("URI", "http://x"),
            )
        }
    )
    assert found == (Identity("c.d", "node", "7"), Identity("c.d", "node", "8"))
    require(found, "c.d", "node", "8")
    for cluster, role, name in (("c", "node", "7"), ("c.d", "client", ""), ("c.d", "node", "78")):
        with pytest.raises(TlsError):
            require(found, cluster, role, name)
    for value in ("logyard://c/admin/7", "logyard://c/node/", "logyard://c/node/7/8", "logyard:///node/7"):
        assert identities({"subjectAltName": (("URI", value),)}) == ()
    assert identities(None) == identities({}) == ()


async def test_short_writes_lose_and_repeat_nothing(yard: Yard) -> None:
    """The kernel takes little at a time; the writer alternates between writing at once and waiting."""
    chance = random.Random(5)
    near, far = socket.socketpair()
    for end in (near, far):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    one = TlsStream(
        trio.socket.from_stdlib_socket(near), make_context(yard.client(), server=False), server=False, raw=near
    )
    two = TlsStream(trio.socket.from_stdlib_socket(far), make_context(yard.node(1), server=True), server=True)
    sent = bytearray()
    got = bytearray()
    blocked = 0

    async def write() -> None:
        nonlocal blocked
        for _ in range(60):
            buffers = [chance.randbytes(chance.choice((1, 40, 5000, 300_000))) for _ in range(chance.randrange(1, 6))]
            sent.extend(b"".join(buffers))
            data = memoryview(b"".join(buffers))
            cuts = sorted(chance.sample(range(len(data) + 1), 2))
            parts = [data[: cuts[0]], data[cuts[0] : cuts[1]], data[cuts[1] :]]
            while any(parts):
                try:
                    count = one.sendmsg_now(parts) if chance.random() < 0.6 else await one.sendmsg(parts)
                except BlockingIOError:
                    blocked += 1
                    count = await one.sendmsg(parts)
                left = []
                for part in parts:
                    left.append(part[count:])
                    count -= min(count, len(part))
                parts = left
        one.close()

    with one, two, trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.handshake)
            await two.handshake()
        assert [str(who) for who in two.identities] == ["client alice of cluster 'fake'"]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            view = memoryview(bytearray(100_000))
            while count := await two.recv_into(view):
                got += view[:count]
    assert bytes(got) == bytes(sent) and blocked > 10


def test_certificates_to_start_with(tmp_path: Path) -> None:
    def run(*words: str, code: int = 0) -> str:
        done = CliRunner().invoke(cli, ["tls", "init", str(tmp_path / "pki"), "--cluster", "orders", *words])
        assert done.exit_code == code, done.output
        return done.output

    run("--nodes", "1,2", "--clients", "alice")
    before = {path: path.read_bytes() for path in (tmp_path / "pki").iterdir()}
    names = {"ca.pem", "ca-key.pem", "node-1.pem", "node-1-key.pem", "node-2.pem", "node-2-key.pem"}
    assert {path.name for path in before} == names | {"client-alice.pem", "client-alice-key.pem"}
    run("--nodes", "1,2,3", "--clients", "alice,bob")
    after = {path: path.read_bytes() for path in (tmp_path / "pki").iterdir()}
    assert len(after) == len(before) + 4 and after.items() >= before.items(), "what is there is kept"
    for path in after:
        assert os.stat(path).st_mode & 0o777 == (0o600 if path.name.endswith("-key.pem") else 0o644)
    assert os.stat(tmp_path / "pki").st_mode & 0o077 == 0
    at = tmp_path / "pki"
    door = Door("tls", TlsConfig(ca=at / "ca.pem", certificate=at / "node-3.pem", key=at / "node-3-key.pem"))
    door.check_own("orders", 3)
    assert "no client's name" in run("--clients", "../x", code=2)


@pytest.mark.parametrize("step", range(7))
def test_certificates_that_were_cut_off_are_made_when_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """A full disk, say, at each write: the next try goes on, instead of meeting a key without a certificate."""
    words = ["tls", "init", str(tmp_path / "tls"), "--cluster", "fake", "--nodes", "1", "--clients", "alice"]
    real, calls = os.fdopen, itertools.count()

    def full(descriptor: int, mode: str) -> object:
        if next(calls) == step:
            os.close(descriptor)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, mode)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdopen", full)
        assert CliRunner().invoke(cli, words).exit_code == (1 if step < 6 else 0)
    kept = {path: path.read_bytes() for path in (tmp_path / "tls").iterdir()}
    assert CliRunner().invoke(cli, words).exit_code == 0
    assert {path: path.read_bytes() for path in kept} == kept
    found = sorted(path.name for path in (tmp_path / "tls").iterdir())
    assert found == ["ca-key.pem", "ca.pem", "client-alice-key.pem", "client-alice.pem", "node-1-key.pem", "node-1.pem"]
    Door("tls", TlsConfig(**{key: tmp_path / "tls" / f"{name}.pem" for key, name in (
        ("ca", "ca"), ("certificate", "node-1"), ("key", "node-1-key")
    )})).check_own("fake", 1)  # fmt: skip


def test_a_door_without_tls_is_on_loopback_alone(yard: Yard) -> None:
    with pytest.raises(BadRequest, match=r"\[client_tls\] ca, certificate, key"):
        RpcServer(None, "10.0.0.1:1", {}, SystemConfig())  # type: ignore[arg-type]
    assert RpcServer(None, "10.0.0.1:1", {}, SystemConfig(), yard.door(1)).host == "10.0.0.1"  # type: ignore[arg-type]


def test_certificates_that_are_there_are_looked_at(tmp_path: Path) -> None:
    def init(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(cli, ["tls", "init", str(tmp_path), *words])
        return done.exit_code, done.output

    assert init("--cluster", "orders", "--nodes", "1") == (0, f"{tmp_path}/ca.pem\n{tmp_path}/node-1.pem\n")
    for nodes in ("1", "2"):
        code, said = init("--cluster", "other", "--nodes", nodes)
        assert code == 2 and said == f"error: {tmp_path}/ca.pem: is the CA of cluster 'orders', not of 'other'\n"
    assert not (tmp_path / "node-2.pem").exists()
    authority = Authority(tmp_path, "orders")
    authority.node(2, days=-1)
    authority.node(3, days=10)
    (tmp_path / "node-4.pem").write_bytes((tmp_path / "node-1.pem").read_bytes())
    code, said = init("--cluster", "orders", "--nodes", "4")
    assert code == 2 and "node-4.pem: is for logyard://orders/node/1, not for logyard://orders/node/4" in said
    code, said = init("--cluster", "orders", "--nodes", "1,2,3")
    assert code == 0 and "node-2.pem HAS EXPIRED: delete" in said and "node-3.pem expires in 9 days: delete" in said
    assert "node-1.pem HAS" not in said and "node-1.pem exp" not in said
    (tmp_path / "node-2.pem").unlink()
    assert "node-2.pem HAS EXPIRED" not in init("--cluster", "orders", "--nodes", "2")[1]
