"""The client door itself: raw sockets that misbehave, budgets, coalescing. Its good side is tested with the clients."""

from __future__ import annotations

import gc
import logging
import random
from contextlib import suppress
from typing import Any, cast

import pytest
import trio
import trio.testing

from logyard.client.aio import connect
from logyard.engine.config import SystemConfig
from logyard.engine.machine import Reject
from logyard.engine.replica.proposals import CommandRejected
from logyard.protocol import wire
from logyard.protocol.errors import BadRequest, LogyardError, Refused
from logyard.protocol.frame import Buffer, encode_frame
from logyard.service.addresses import listen_address
from logyard.service.door import server as rpc
from logyard.service.door.server import RpcServer
from tests.client.fake_system import FakeCluster, FakeSystem, fake_cluster, start_node


class Raw:
    """A client that sends what it is told."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.receiver = wire.Receiver(wire.CLIENT_LIMITS)

    @classmethod
    async def open(cls, cluster: FakeCluster, node: int = 1, hello: bool = True) -> Raw:
        host, _, port = cluster.addresses[node].rpartition(":")
        raw = cls(await trio.open_tcp_stream(host, int(port)))
        if hello:
            await raw.send(wire.encode_hello())
            (frame,) = await raw.frames()
            assert frame.type == wire.HELLO
            assert wire.decode_hello(frame.body).node == node
        return raw

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def frames(self) -> list[wire.Received]:
        """The next frames; none at the end."""
        found: list[wire.Received] = []
        while not found:
            data = await self.stream.receive_some(65536)
            if not data:
                return []
            at = 0
            while at < len(data):
                buffer = self.receiver.buffer()
                count = min(len(buffer), len(data) - at)
                buffer[:count] = data[at : at + count]
                at += count
                found += self.receiver.received(count)
        return found

    async def ended(self) -> bool:
        """The server closes, perhaps after telling why."""
        with trio.fail_after(5):
            try:
                while await self.stream.receive_some(65536):
                    pass
            except trio.BrokenResourceError:
                return True
        return True

    async def reply(self) -> list[tuple[int, int, Buffer]]:
        with trio.fail_after(5):
            return [item for frame in await self.frames() for item in wire.decode_replies(frame.body)]


def append(uid: int, request: int, size: int = 20, records: int = 1) -> bytes:
    """An APPEND of records with a body of `size` bytes."""
    frame = encode_frame([(b"head", bytes(size))] * records, command=b"\x01")
    return b"".join(wire.encode(wire.APPEND, request, wire.UID.pack(uid), *frame))


async def test_the_replies_of_a_turn_are_one_frame() -> None:
    async with fake_cluster(1) as cluster:
        uid = cluster.create("a", [1], 1).uid
        raw = await Raw.open(cluster)
        await raw.send(b"".join(append(uid, number, records=3) for number in range(100)))
        first = await raw.frames()
        assert len(first) == 1
        items = wire.decode_replies(first[0].body)
        assert [(request, status) for request, status, _ in items] == [(number, 0) for number in range(100)]
        assert [wire.REPLY.unpack(data) for _, _, data in items] == [(3 * number, 3) for number in range(100)]


async def test_errors_are_items_of_the_same_frame() -> None:
    async with fake_cluster(2) as cluster:
        here, there = cluster.create("a", [1], 1).uid, cluster.create("b", [2], 2).uid
        raw = await Raw.open(cluster)
        bad = b"".join(wire.encode(wire.APPEND, 4, wire.UID.pack(here), b"no frame"))
        await raw.send(append(here, 1) + append(there, 2) + append(77, 3) + bad)
        items: dict[int, tuple[int, Buffer]] = {}
        while len(items) < 4:
            items |= {request: (status, data) for request, status, data in await raw.reply()}
        assert items[1] == (0, wire.REPLY.pack(0, 1))
        codes = {request: wire.unpack(data) for request, (status, data) in items.items() if status}
        assert {request: (value["code"], value["retry"]) for request, value in codes.items()} == {
            2: ("not_leader", "elsewhere"), 3: ("unknown_group", "elsewhere"), 4: ("bad_request", "never")
        }  # fmt: skip
        assert codes[2]["details"] == {"leader": 2}


def mutations(seed: int) -> bytes:
    """Bytes that are nearly a good stream."""
    chance = random.Random(seed)
    call = wire.encode_call(chance.randrange(9), "poll", {"name": "a", "offset": 0, "max_records": 9, "max_bytes": 99})
    good = bytearray(append(1000, chance.randrange(9)) + call + append(1000, 50, 5000, 2))
    for _ in range(chance.randrange(1, 6)):
        good[chance.randrange(len(good))] = chance.randrange(256)
    return bytes(good[: chance.randrange(len(good))]) if chance.random() < 0.3 else bytes(good)


async def test_malformed_input_closes_only_its_own_connection() -> None:
    async with fake_cluster(1) as cluster, connect([cluster.addresses[1]]) as yard:
        cluster.create("a", [1], 1)
        log = yard.log("a")
        for seed in range(150):
            raw = await Raw.open(cluster, hello=seed % 5 != 0)
            with trio.move_on_after(1):
                try:
                    await raw.send(mutations(seed))
                    await raw.stream.send_eof()
                    await raw.ended()
                except trio.BrokenResourceError:
                    pass
            await raw.stream.aclose()
            if seed % 30 == 0:
                await log.append(b"still fine")
        offset = await log.append(b"and still")
        assert (await log.read(offset)).metadata == b"and still"


@pytest.mark.parametrize(
    "head",
    [
        wire.HEADER.pack(0xFFFFFFFF, wire.APPEND, 0, 0, 1),
        wire.HEADER.pack(wire.CALL_BYTES_MAX + 1, wire.CALL, 0, 0, 1),
        wire.HEADER.pack(10, wire.REPLIES, 0, 0, 1),
        wire.HEADER.pack(10, 0, 0, 0, 1),
    ],
)
async def test_a_frame_above_its_limit_is_refused_by_its_header(head: bytes) -> None:
    async with fake_cluster(1) as cluster:
        raw = await Raw.open(cluster)
        await raw.send(head)
        assert await raw.ended()


async def test_before_hello_only_a_small_hello_may_come() -> None:
    async with fake_cluster(1) as cluster:
        strangers = [
            append(1, 1),
            wire.HEADER.pack(5000, wire.HELLO, 0, 0, 0),
            wire.encode_hello() + append(1, 1),
            wire.encode_hello("another cluster"),
            b"GET / HTTP/1.1\r\n\r\n",
        ]
        for data in strangers:
            raw = await Raw.open(cluster, hello=False)
            await raw.send(data)
            frames = await raw.frames()
            assert [frame.type for frame in frames] in ([wire.ERROR], [])
            assert await raw.ended()


async def test_a_refused_handshake_leaves_nothing_to_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error, kept by name, held the frame that its traceback holds, and that the connection: a node under load
    freezes such knots, and strangers that were refused stayed for good."""

    async def refuse(connection: rpc.Connection) -> None:
        await trio.lowlevel.checkpoint()
        raise Refused("no certificate")

    monkeypatch.setattr(rpc.Connection, "_secure", refuse)
    async with fake_cluster(1) as cluster:
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                raw = await Raw.open(cluster, hello=False)
                await raw.send(b"GET / HTTP/1.0\r\n\r\n")
                assert await raw.ended()
            await trio.testing.wait_all_tasks_blocked()
            # Who accepts them has the last one by name.
            assert len([one for one in gc.get_objects() if isinstance(one, rpc.Connection)]) <= 1
        finally:
            gc.enable()


async def test_a_bug_within_a_handshake_ends_its_connection_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(connection: rpc.Connection) -> None:
        await trio.lowlevel.checkpoint()
        raise ValueError("of what a stranger sent")

    async with fake_cluster(1) as cluster:
        with monkeypatch.context() as patch:
            patch.setattr(rpc.Connection, "_secure", fail)
            raw = await Raw.open(cluster, hello=False)
            await raw.send(b"GET / HTTP/1.0\r\n\r\n")
            assert await raw.ended()
        assert "connection closed by an unexpected error" in caplog.text
        await Raw.open(cluster)


async def test_a_silent_stranger_is_closed() -> None:
    config = SystemConfig(handshake_timeout_ms=100)
    async with fake_cluster(1, config) as cluster:
        raw = await Raw.open(cluster, hello=False)
        with trio.fail_after(20):
            while True:
                # On a busy machine a greeting may be too late as well.
                with suppress(trio.BrokenResourceError, ValueError):
                    greeted = await Raw.open(cluster)
                    break
        assert await raw.ended()
        await greeted.send(wire.encode_call(1, "status", {}))
        assert [frame.type for frame in await greeted.frames()] == [wire.RESULT]


async def test_connections_above_the_limit_are_closed() -> None:
    async with trio.open_nursery() as nursery:
        cluster, _, server = await start(SystemConfig(connections_max=2), nursery)
        first, second = await Raw.open(cluster), await Raw.open(cluster)
        for raw in (first, second):
            await raw.send(wire.encode_call(1, "heartbeat", {"client": 7}))
            assert await raw.frames()
        third = await Raw.open(cluster, hello=False)
        assert await third.ended()
        assert len(server.connections) == 2
        await first.stream.aclose()
        with trio.fail_after(5):
            while len(server.connections) > 1:
                await trio.lowlevel.checkpoint()
        fourth = await Raw.open(cluster)
        for raw in (second, fourth):
            await raw.send(wire.encode_call(1, "status", {}))
            assert [frame.type for frame in await raw.frames()] == [wire.RESULT]
        nursery.cancel_scope.cancel()


async def start(config: SystemConfig, nursery: trio.Nursery) -> tuple[FakeCluster, FakeSystem, RpcServer]:
    cluster = FakeCluster()
    server, _ = await start_node(cluster, 1, nursery, config)
    return cluster, cluster.nodes[1], server


async def test_above_the_byte_budget_the_socket_is_not_read() -> None:
    config = SystemConfig(client_inflight_bytes=256 << 10)
    async with trio.open_nursery() as nursery:
        cluster, system, server = await start(config, nursery)
        uid = cluster.create("a", [1], 1).uid
        system.silent = True
        sinks: list[tuple[rpc.Connection, int]] = []
        submit = system.submit

        def remember(uid: int, frame: memoryview, sink: rpc.Connection, request: int) -> None:
            sinks.append((sink, request))
            submit(uid, frame, sink, request)

        system.submit = remember  # type: ignore[method-assign, assignment]
        raw = await Raw.open(cluster)
        nursery.start_soon(raw.send, b"".join(append(uid, number, 100_000) for number in range(60)))
        with trio.fail_after(5):
            while len(sinks) < 2:
                await trio.lowlevel.checkpoint()
        await trio.testing.wait_all_tasks_blocked(0.05)
        # What one receive brings is above the budget at most.
        assert 2 <= len(sinks) <= 4
        assert server.inflight <= (256 << 10) + wire.RECEIVE_BYTES
        # Each answer makes room for one more; all get through in order.
        answered = 0
        with trio.fail_after(5):
            while answered < 60:
                for sink, request in sinks[answered:]:
                    sink.reply(request, 0, b"ok")
                    answered += 1
                    assert server.inflight <= (256 << 10) + wire.RECEIVE_BYTES
                await trio.lowlevel.checkpoint()
        assert [request for _, request in sinks] == list(range(60))
        assert server.inflight == 0
        nursery.cancel_scope.cancel()


async def test_a_frame_above_the_byte_budget_alone_gets_through() -> None:
    config = SystemConfig(client_inflight_bytes=64 << 10)
    async with fake_cluster(1, config) as cluster:
        uid = cluster.create("a", [1], 1).uid
        raw = await Raw.open(cluster)
        await raw.send(append(uid, 1) + append(uid, 2, 5 << 20) + append(uid, 3))
        found: list[int] = []
        while len(found) < 3:
            found += [request for request, status, _ in await raw.reply() if status == 0]
        assert found == [1, 2, 3]


async def test_a_client_that_leaves_gives_its_budget_back() -> None:
    async with trio.open_nursery() as nursery:
        cluster, system, server = await start(SystemConfig(), nursery)
        uid = cluster.create("a", [1], 1).uid
        system.silent = True
        raw = await Raw.open(cluster)
        await raw.send(append(uid, 1, 5000) + append(uid, 2, 1 << 20)[:500_000])
        while not system.forgotten or server.inflight < 1 << 20:
            await trio.lowlevel.checkpoint()
        await raw.stream.aclose()
        with trio.fail_after(5):
            while server.connections:
                await trio.lowlevel.checkpoint()
        assert server.inflight == 0
        nursery.cancel_scope.cancel()


async def test_a_request_number_that_is_open_is_not_taken_twice() -> None:
    async with fake_cluster(1) as cluster:
        uid = cluster.create("a", [1], 1).uid
        cluster.nodes[1].silent = True
        raw = await Raw.open(cluster)
        await raw.send(append(uid, 1) + append(uid, 1))
        assert await raw.ended()


async def test_a_slow_reader_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "CONNECTION_BYTES", 1 << 20)
    async with trio.open_nursery() as nursery:
        cluster, _, server = await start(SystemConfig(), nursery)
        log = cluster.create("a", [1], 1)
        log.records = [(b"", bytes(1 << 20))]
        raw = await Raw.open(cluster)
        arguments: dict[str, object] = {"name": "a", "offset": 0, "max_records": 1, "max_bytes": 1, "wait_s": 0}
        for number in range(40):
            await raw.send(wire.encode_call(number, "poll", arguments))
        (connection,) = server.connections
        with trio.fail_after(5):
            while connection._calls < 5 or not connection._outgoing.size:
                await trio.lowlevel.checkpoint()
        await trio.testing.wait_all_tasks_blocked(0.05)
        queued = connection._outgoing.size
        assert 0 < queued < 4 << 20
        found: list[int] = []
        with trio.fail_after(10):
            while len(found) < 40:
                found += [frame.request for frame in await raw.frames()]
        assert sorted(found) == list(range(40))
        nursery.cancel_scope.cancel()


BAD_CALLS: list[tuple[str, dict[str, object]]] = [
    ("nonsense", {}),
    ("poll", {}),
    ("poll", {"name": 5, "offset": 0}),
    ("poll", {"name": "a", "offset": -2, "max_records": 1, "max_bytes": 1}),
    ("poll", {"name": "a", "offset": True, "max_records": 1, "max_bytes": 1}),
    ("poll", {"name": "a", "offset": 0, "max_records": 1, "max_bytes": 1, "wait_s": "x"}),
    ("read_body", {"name": "a", "offset": 1 << 64}),
    ("create", {"specs": []}),
    ("create", {"specs": [5]}),
    ("create", {"specs": [{"name": "b", "members": [0]}]}),
    ("create", {"specs": [{"name": "x" * 300, "members": [1]}]}),
    ("locate", {"names": [1]}),
    ("members", {"name": "a", "change": "shuffle", "node": 1}),
    ("transfer", {"name": "a", "to": 0}),
]


async def test_bad_arguments_are_bad_requests() -> None:
    async with fake_cluster(1) as cluster:
        cluster.create("a", [1], 1)
        raw = await Raw.open(cluster)
        for number, (method, arguments) in enumerate(BAD_CALLS):
            await raw.send(wire.encode_call(number, method, arguments))
            (frame,) = await raw.frames()
            assert (frame.type, frame.request) == (wire.ERROR, number)
            assert wire.unpack(frame.body)["code"] == "bad_request", method


async def test_a_bug_behind_a_call_is_told_and_closes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with fake_cluster(1) as cluster:
        cluster.create("a", [1], 1).records = [(b"", b"")]
        raw = await Raw.open(cluster)
        await raw.send(wire.encode_call(1, "read_body", {"name": "a", "offset": 7, "start": 0, "stop": 0}))
        (frame,) = await raw.frames()
        assert frame.type == wire.ERROR
        assert "IndexError" in wire.unpack(frame.body)["message"]
        assert "failed unexpectedly" in caplog.text
        await raw.send(wire.encode_call(2, "cluster", {}))
        (frame,) = await raw.frames()
        assert wire.unpack(frame.body) == {"cluster": "fake", "node": 1, "nodes": cluster.addresses}


class Mute(Exception):
    """One that can't say what it is."""

    def __str__(self) -> str:
        raise ZeroDivisionError("no words")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (CommandRejected(Reject("odd", "no \ud800")), "odd", "no ?"),
        (CommandRejected(Reject("odd", cast(Any, Mute()))), "odd", "Mute"),
        (LogyardError("no \ud800", code="odd \ud800", at="\ud800"), "odd ?", "no ?"),
        (LogyardError("no", code="odd", of=["\ud800"]), "odd", "no"),
        (LogyardError("no", code="odd", of=Mute()), "odd", "no"),
        (ValueError("no \ud800"), "error", "query failed unexpectedly: ValueError: no ?"),
        (Mute(), "error", "query failed unexpectedly: Mute: Mute"),
    ],
)
async def test_an_error_that_no_wire_can_carry_is_told_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception, code: str, message: str
) -> None:
    """Left alone it ended the node, for all the others that it serves."""
    # What it logs is no text for those who run tests, either: they carry it from one process to another.
    caplog.set_level(logging.CRITICAL, "logyard.rpc")

    async def query(self: FakeSystem, name: str, *rest: object, **more: object) -> bytes:
        raise error

    monkeypatch.setattr(FakeSystem, "query", query, raising=False)
    async with fake_cluster(1) as cluster:
        raw = await Raw.open(cluster)
        await raw.send(wire.encode_call(1, "query", {"name": "a", "request": b"", "consistency": "local"}))
        (frame,) = await raw.frames()
        told = wire.unpack(frame.body)
        assert (frame.type, told["code"], told["message"]) == (wire.ERROR, code, message)
        await raw.send(wire.encode_call(2, "cluster", {}))
        (frame,) = await raw.frames()
        assert (frame.type, frame.request) == (wire.RESULT, 2)


def test_only_loopback_is_served_without_tls() -> None:
    assert listen_address("localhost:0") == ("127.0.0.1", 0)
    assert listen_address("[::1]:7001") == ("::1", 7001)
    for address in ("0.0.0.0:7001", "10.0.0.1:7001", "example.org:7001", "127.0.0.1", "127.0.0.1:x"):
        with pytest.raises(BadRequest):
            listen_address(address)


async def test_who_waits_for_room_of_a_connection_that_ended_waits_no_more() -> None:
    async with trio.open_nursery() as nursery:
        cluster, _, server = await start(SystemConfig(), nursery)
        raw = await Raw.open(cluster)
        (connection,) = server.connections
        connection.queue([bytes(64 << 20)])
        over = trio.Event()

        async def wait() -> None:
            await connection.drained(0)
            over.set()

        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        assert not over.is_set() and server.answers.used
        await raw.stream.aclose()
        with trio.fail_after(5):
            await over.wait()
        assert not server.answers.used
        nursery.cancel_scope.cancel()
