"""Clients that mean harm or know no better: they announce and do not send, ask and do not read, come and say nothing.
The others, and who administers, go on."""

from __future__ import annotations

import json
import socket
import stat
from contextlib import ExitStack
from pathlib import Path

import msgpack
import pytest
import trio
import trio.testing
from click.testing import CliRunner

from logyard import connect_sync
from logyard.engine.config import SystemConfig
from logyard.protocol import wire
from logyard.protocol.frame import Buffer
from logyard.protocol.verbs import CONTAINERS
from logyard.service.cli.root import cli
from logyard.service.door import server as rpc
from logyard.service.door.answers import AnswerBytes
from logyard.service.door.arguments import DEPTH_MAX, ELEMENTS_MAX, SMALL_BYTES, decode_call, skim
from logyard.service.door.flow_control import Room
from logyard.service.local_cluster import LocalCluster
from tests.service.door.test_server import Raw, append, start
from tests.service.test_descriptors import crowd, pid_of
from tests.service.test_pressure import resident

MIB = 1 << 20


# Frames that are announced


async def test_announced_frames_that_do_not_come_take_no_room_from_others() -> None:
    """Four connections that announced 64 MiB and sent a byte now and then stopped every large append of a node."""
    async with trio.open_nursery() as nursery:
        cluster, _, server = await start(SystemConfig(node_inflight_bytes=64 * MIB), nursery)
        uid = cluster.create("a", [1], 1).uid
        held = [await Raw.open(cluster) for _ in range(4)]
        for slow in held:
            await slow.send(wire.HEADER.pack(60 * MIB, wire.APPEND, 0, 0, 1) + b"x")
        with trio.fail_after(5):
            while sum(connection.reserved > 0 for connection in server.connections) < 4:
                await trio.testing.wait_all_tasks_blocked(0.001)
            honest = await Raw.open(cluster)
            await honest.send(append(uid, 1, 10 * MIB))
            assert [item[0] for item in await honest.reply()] == [1]
        nursery.cancel_scope.cancel()


async def test_a_frame_that_comes_too_slowly_is_given_up_however_steadily_it_comes() -> None:
    async with trio.open_nursery() as nursery:
        cluster, _, server = await start(SystemConfig(), nursery)
        raw = await Raw.open(cluster)
        (connection,) = server.connections
        await trio.testing.wait_all_tasks_blocked(0.01)
        now = trio.current_time()
        assert not connection.overdue(now + 1000, 5), "between frames it may be quiet"
        for size in (1000, 60 * MIB):
            await raw.send(wire.HEADER.pack(size, wire.APPEND, 0, 0, 1) + b"x")
            await trio.testing.wait_all_tasks_blocked(0.01)
            begun = trio.current_time()
            assert not connection.overdue(begun + rpc.STALL_S - 1, 5)
            await raw.send(b"y")
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert connection.progress >= begun, "a byte now and then is progress"
            assert connection.overdue(begun + rpc.STALL_S + 1, 5)
            if size == 1000:
                await raw.send(bytes(size - 2))
                await trio.testing.wait_all_tasks_blocked(0.01)
                break
        nursery.cancel_scope.cancel()


async def test_frames_that_have_begun_all_end_although_there_is_no_room() -> None:
    room = Room(10, 0.0)
    order: list[str] = []
    await room.take(5)
    await room.take(5)

    async def go_on(name: str) -> None:
        await room.go_on(4, name)
        order.append(name)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(go_on, "a")
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(go_on, "b")
        nursery.start_soon(room.take, 3)
        await trio.testing.wait_all_tasks_blocked()
        assert order == ["a"] and room.used == 14 and room.waiting == 2, "one goes on above the limit"
        await room.go_on(1, "a")
        room.ended("a")
        await trio.testing.wait_all_tasks_blocked()
        assert order == ["a", "b"] and room.used == 19 and room.waiting == 1, "who has begun comes first"
        room.give(10)
        room.ended("b")
        await trio.testing.wait_all_tasks_blocked()
        assert room.waiting == 1
        room.give(5)
        await trio.testing.wait_all_tasks_blocked()
        assert room.waiting == 0 and room.used == 7


# Answers that nobody reads


def test_answers_that_nobody_reads_cost_no_more_than_their_room(tmp_path: Path) -> None:
    """90 polls of 8 MiB held 669 MiB of a node."""
    limits = {"node_memory_bytes": 128 * MIB, "payload_cache_bytes": 8 * MIB, "wal_file_bytes": 32 * MIB}
    with LocalCluster(tmp_path, 1, limits=limits) as cluster:
        cluster.start()
        with connect_sync(cluster.addresses) as yard, ExitStack() as stack:
            yard.create("orders")
            log = yard.log("orders")
            for _ in range(9):
                log.append(b"", bytes(MIB))
            before = resident(pid_of(cluster), "VmRSS")
            asked = {"name": "orders", "offset": 0, "max_records": 100, "max_bytes": 8 * MIB}
            for client in crowd(stack, cluster.addresses[0], 6):
                client.sendall(b"".join(wire.encode_call(number, "poll", asked) for number in range(1, 16)))
            for _ in range(10):
                assert log.latest().end == 9
            # Somebody reads all the same, as soon as the others, who take nothing, are cut.
            assert len(log.poll(0, max_bytes=8 * MIB)) >= 7
            grown = resident(pid_of(cluster), "VmHWM") - before
        assert grown < 160 * MIB, f"{grown / MIB:.0f} MiB"


async def test_room_for_answers_is_taken_in_turns() -> None:
    answers = AnswerBytes(10)
    answers.count(8)
    assert answers.fits(2) and not answers.fits(3)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(answers.wait)
        await trio.testing.wait_all_tasks_blocked()
        assert answers.waiting == 1
        answers.count(-8)
    assert answers.waiting == 0 and answers.fits(100), "what is too large goes alone"


# Arguments


def call(method: str, **arguments: object) -> bytes:
    return wire.pack([method, arguments])


def test_arguments_are_counted_before_they_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    real = wire.unpack

    def unpack(data: Buffer, *, strict: bool = False) -> object:
        built.append(len(data))
        return real(data, strict=strict)

    monkeypatch.setattr(wire, "unpack", unpack)
    names = [f"log-{number}" for number in range(500)]
    assert decode_call(call("locate", names=names, more=names)) == ("locate", {"names": names})
    # Nobody asks a poll for lists: what is waiting must not keep 72 times its bytes.
    huge = {"name": "a", "offset": 3, "names": names, "x" * 40: 1, "deep": {"deep": names}}
    assert decode_call(call("poll", **huge)) == ("poll", {"name": "a", "offset": 3})
    assert decode_call(call("poll", name="a", names=["b"])) == ("poll", {"name": "a"})
    for body, why in (
        (call("locate", names=[0] * ELEMENTS_MAX), "elements"),
        (b"\x92\xa6locate\x81\xa5names" + b"\x91" * 600 + b"\xc0", "deep"),
        (call("locate", names=names)[:-1], "cut"),
        (call("locate", names=names) + b"\xc0", "behind"),
        (call("locate", **{f"key-{number}": 1 for number in range(65)}), "at most 64"),
        (wire.pack(["locate", names]), "map of arguments"),
        (wire.pack([names, {}]), "map of arguments"),
        (msgpack.packb(["locate", {"names": names, "x": msgpack.ExtType(1, b"")}]), "type"),
    ):
        built.clear()
        with pytest.raises(wire.ProtocolError, match=why):
            decode_call(body)
        assert sum(built) < 20_000, "it is refused before it becomes anything"


def test_what_is_skimmed_ends_where_it_ends() -> None:
    value: object = 1
    for _ in range(DEPTH_MAX - 1):
        value = [value]
    for one in (
        None,
        True,
        -1,
        1 << 40,
        1.5,
        "x" * 300,
        b"y" * 70_000,
        [1] * 20,
        {"a": [1, {"b": 2}]},
        [0] * 70_000,
        value,
    ):
        data = msgpack.packb(one)
        end, left = skim(b"\xc0" + data + b"\xc0", 1, ELEMENTS_MAX)
        assert end == len(data) + 1 and left < ELEMENTS_MAX
    with pytest.raises(wire.ProtocolError, match="deep"):
        skim(msgpack.packb([[value]]), 0, 100)


def test_every_list_that_a_verb_takes_is_let_through() -> None:
    """And none that it does not take, in a short call as in a long one."""
    for verb, keys in CONTAINERS.items():
        for filler in (b"", bytes(2 * SMALL_BYTES)):
            given = {**{key: [[1]] for key in keys}, "odd": [1], "plain": filler}
            assert decode_call(wire.pack([verb, given])) == (verb, {**{key: [[1]] for key in keys}, "plain": filler})


# Connections that say nothing


async def test_who_says_nothing_goes_first_then_who_is_idle_and_never_who_has_a_session() -> None:
    async with trio.open_nursery() as nursery:
        cluster, system, server = await start(SystemConfig(connections_max=4), nursery)
        uid = cluster.create("a", [1], 1).uid
        session, idle = await Raw.open(cluster), await Raw.open(cluster)
        await session.send(wire.encode_call(1, "heartbeat", {"client": 7}))
        assert await session.frames()
        silent = await Raw.open(cluster, hello=False)
        busy = await Raw.open(cluster)
        system.silent = True
        await busy.send(append(uid, 1))
        with trio.fail_after(5):
            while not system.forgotten:
                await trio.lowlevel.checkpoint()
        kept = [session]
        for gone in (silent, idle):
            newer = await Raw.open(cluster)
            kept.append(newer)
            assert await gone.ended()
            await newer.send(wire.encode_call(1, "heartbeat", {"client": 8}))
            assert await newer.frames()
        shut_out = await Raw.open(cluster, hello=False)
        assert await shut_out.ended() and len(server.connections) == 4
        for raw in kept:
            await raw.send(wire.encode_call(2, "status", {}))
            assert [frame.type for frame in await raw.frames()] == [wire.RESULT]
        nursery.cancel_scope.cancel()


async def test_a_client_whose_machine_vanished_leaves_its_place() -> None:
    """Nothing comes of it any more, not even an end: the kernel has to ask."""
    async with trio.open_nursery() as nursery:
        cluster, _, server = await start(SystemConfig(), nursery)
        raw = await Raw.open(cluster)
        await raw.send(wire.encode_call(1, "heartbeat", {"client": 7}))
        assert await raw.frames()
        (connection,) = server.connections
        asked = connection._raw.getsockopt
        assert asked(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle, interval, count = (
            asked(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle + interval * count <= 180
        # It asks nothing of who is sent something and does not acknowledge it: who listens, each second.
        assert asked(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 120_000
        nursery.cancel_scope.cancel()


async def test_who_kept_a_session_once_is_idle_when_that_must_have_ended() -> None:
    async with trio.open_nursery() as nursery:
        cluster, _, server = await start(SystemConfig(connections_max=1, session_ttl_ms_max=60_000), nursery)
        raw = await Raw.open(cluster)
        await raw.send(wire.encode_call(1, "heartbeat", {"client": 7}))
        assert await raw.frames()
        (connection,) = server.connections
        connection.kept -= 59
        assert not connection.idle
        connection.kept -= 2
        newer = await Raw.open(cluster)
        assert await raw.ended()
        await newer.send(wire.encode_call(2, "status", {}))
        assert [frame.type for frame in await newer.frames()] == [wire.RESULT]
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("tls", [False, True])
def test_an_operator_gets_in_whoever_fills_the_places(tmp_path: Path, tls: bool) -> None:
    """1,024 idle connections shut everybody out, the operator as well."""
    with LocalCluster(tmp_path, 1, limits={"connections_max": 32}, tls=tls) as cluster:
        cluster.start()
        place = cluster.nodes[1].data / "admin.sock"
        assert stat.S_ISSOCK(place.stat().st_mode) and stat.S_IMODE(place.stat().st_mode) == 0o600
        with ExitStack() as stack:
            crowd(stack, cluster.addresses[0], 64)
            for directory in (cluster.nodes[1].directory, cluster.nodes[1].data):
                done = CliRunner().invoke(cli, ["status", "--servers", str(directory), "--json"])
                assert done.exit_code == 0, done.output
                assert json.loads(done.stdout)["ok"]
            with connect_sync([f"unix:{place}"]) as yard:
                yard.create("orders")
                assert yard.log("orders").append(b"x") == 0
            # An honest client that speaks at once takes the place of one that does not.
            with connect_sync(cluster.addresses, tls=cluster.client_tls) as yard:
                assert yard.log("orders").append(b"y") == 1
        cluster.kill9(1)
        assert place.exists()
        cluster.restart(1)
        assert CliRunner().invoke(cli, ["list", "--servers", str(place.parent)]).exit_code == 0
        cluster.stop()
        assert not place.exists()
    done = CliRunner().invoke(cli, ["list", "--servers", str(place.parent)])
    assert done.exit_code == 2 and "no data directory of a node that runs" in done.output


def test_the_socket_of_a_directory_with_a_long_name(tmp_path: Path) -> None:
    """An address of a socket has 108 bytes."""
    directory = tmp_path / ("x" * 120)
    with LocalCluster(directory, 1) as cluster:
        cluster.start()
        with connect_sync([f"unix:{cluster.nodes[1].data}/admin.sock"]) as yard:
            assert yard.status()["node"] == 1
    with socket.socket(socket.AF_UNIX) as sock, pytest.raises(OSError, match="too long"):
        sock.connect(str(directory / "node-1" / "data" / "admin.sock"))
