"""Back-pressure at the client door (law 9): memory stays under its bound whatever clients send, every command is
answered, and nobody starves."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from logyard.client.aio import Yard, connect
from logyard.engine.config import SystemConfig
from logyard.protocol import wire
from logyard.protocol.errors import NotLeader, Refused
from logyard.service import node as node_module
from logyard.service.config import load_config
from logyard.service.door.flow_control import Room
from logyard.service.door.server import RpcServer
from logyard.service.local_cluster import LocalCluster, LocalNode, format_config, free_ports
from tests.service.door.test_server import Raw, append, start

KIB = 1024
MIB = 1024 * KIB


async def test_large_frames_line_up_and_are_never_above_the_limit() -> None:
    room = Room(10, 0.2)
    order: list[int] = []

    async def take(number: int, size: int) -> None:
        await room.take(size)
        order.append(number)

    async with trio.open_nursery() as nursery:
        await room.take(6)
        for number, size in enumerate((8, 2, 1, 20, 3)):
            nursery.start_soon(take, number, size)
            await trio.testing.wait_all_tasks_blocked()
        # The third would fit, but the first has waited longer; a share is kept for small frames.
        assert order == [] and room.waiting == 5 and room.used == 6 and not room.full
        room.give(6)
        await trio.testing.wait_all_tasks_blocked()
        assert order == [0] and room.used == 8
        room.give(8)
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(order) == [0, 1, 2] and room.used == 3
        room.give(3)
        await trio.testing.wait_all_tasks_blocked()
        assert order[3:] == [3] and room.used == 20, "larger than the room: alone"
        room.give(20)
        await trio.testing.wait_all_tasks_blocked()
        assert order[4:] == [4] and room.used == 3
    room.give(3)
    assert room.used == 0


async def test_who_leaves_the_line_holds_up_nobody() -> None:
    room = Room(10, 0.2)
    await room.take(5)
    async with trio.open_nursery() as nursery:
        scope = trio.CancelScope()

        async def give_up() -> None:
            with scope:
                await room.take(8)

        async def follow() -> None:
            await room.take(3)

        nursery.start_soon(give_up)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(follow)
        await trio.testing.wait_all_tasks_blocked()
        assert room.waiting == 2 and room.used == 5
        scope.cancel()
    assert room.waiting == 0 and room.used == 8


async def test_two_hundred_large_frames_take_the_budget_in_turns_and_calls_are_answered() -> None:
    config = SystemConfig(node_inflight_bytes=4 * MIB, group_inflight_bytes=4 * MIB)
    async with trio.open_nursery() as nursery:
        cluster, system, server = await start(config, nursery)
        uid = cluster.create("a", [1], 1).uid
        system.silent = True
        sinks: list[tuple[Any, int]] = []
        most = 0

        def remember(uid: int, frame: memoryview, sink: Any, request: int, **_: bool) -> None:
            nonlocal most
            most = max(most, server.inflight)
            sinks.append((sink, request))

        system.submit = remember  # type: ignore[method-assign]
        large = append(uid, 1, 1 * MIB)
        clients = [await Raw.open(cluster) for _ in range(200)]
        caller = await Raw.open(cluster)
        for raw in clients:
            nursery.start_soon(raw.send, large)
        answered = 0
        with trio.fail_after(20):
            while answered < len(clients):
                while not sinks:
                    await trio.lowlevel.checkpoint()
                # The node is as full as it gets, and others are served all the same.
                if answered % 10 == 0:
                    await trio.testing.wait_all_tasks_blocked(0.001)
                    assert server.inflight > 3 * MIB or answered > 190
                    await caller.send(wire.encode_call(1, "status", {}))
                    assert [frame.type for frame in await caller.frames()] == [wire.RESULT]
                    # Also small commands of a connection that waits for nothing.
                    before = len(sinks)
                    await caller.send(append(uid, 2))
                    while len(sinks) == before:
                        await trio.lowlevel.checkpoint()
                    sink, request = sinks.pop()
                    assert request == 2
                    sink.reply(2, 0, b"")
                    assert [item[0] for item in await caller.reply()] == [2]
                sink, request = sinks.pop(0)
                sink.reply(request, 0, b"")
                answered += 1
        # The share of small frames is all that may come on top.
        assert most <= 4 * MIB
        assert server.inflight == 0
        nursery.cancel_scope.cancel()


async def test_large_frames_wait_as_long_as_the_node_says_and_small_ones_do_not(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with trio.open_nursery() as nursery:
        cluster, system, server = await start(SystemConfig(), nursery)
        uid = cluster.create("a", [1], 1).uid
        came: list[tuple[int, float]] = []

        def remember(uid: int, frame: memoryview, sink: Any, request: int, **_: bool) -> None:
            came.append((request, trio.current_time() - begun))
            sink.reply(request, 0, b"")

        system.submit = remember  # type: ignore[method-assign]
        asked: list[int] = []

        def delay(size: int) -> float:
            asked.append(size)
            return 2.0

        server.delay = delay
        raw = await Raw.open(cluster)
        begun = trio.current_time()
        await raw.send(append(uid, 1))
        assert [item[0] for item in await raw.reply()] == [1]
        assert came == [(1, 0.0)] and not asked
        nursery.start_soon(raw.send, append(uid, 2, MIB))
        assert [item[0] for item in await raw.reply()] == [2]
        assert came[1][0] == 2 and 2.0 <= came[1][1] < 2.5
        assert len(asked) == 1 and MIB <= asked[0] < MIB + 4096, "once, with what it has"
        assert server.inflight == 0
        nursery.cancel_scope.cancel()


async def test_a_node_slows_its_clients_down_by_what_waits_to_be_migrated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    doors: list[Any] = []

    class Seen(RpcServer):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            doors.append(self)

    monkeypatch.setattr(node_module, "RpcServer", Seen)
    client, peer = free_ports(2)
    local = LocalNode(1, tmp_path / "n", f"127.0.0.1:{client}", f"127.0.0.1:{peer}")
    local.directory.mkdir(exist_ok=True)
    local.config_path.write_text(format_config(local, [local], "pressure", {"migrate_debt_bytes_max": 100 * MIB}))
    async with trio.open_nursery() as nursery:
        node = await nursery.start(node_module.serve, load_config(local.config_path, {}))
        clients, administrators = doors
        assert clients.delay(MIB) == administrators.delay(MIB) == 0.0
        node.system.storage.compactor.debt = int(85 * MIB)
        assert clients.delay(MIB) > 0.0
        assert administrators.delay(MIB) == 0.0, "who is to help is not kept waiting"
        nursery.cancel_scope.cancel()


@contextmanager
def slow_node(path: Path, limits: dict[str, Any], seconds: float) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """One node process on a slow disk: its client address and the process."""
    client, peer = free_ports(2)
    node = LocalNode(1, path, f"127.0.0.1:{client}", f"127.0.0.1:{peer}")
    node.config_path.write_text(format_config(node, [node], "pressure", limits))
    command = [sys.executable, "-m", "tests.service.slow_node", str(node.config_path), str(seconds)]
    with (
        node.log_path.open("wb") as log,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log) as process,
    ):
        try:
            assert process.stdout is not None and process.stdin is not None
            line = process.stdout.readline()
            assert line.startswith(b"ready"), node.log_tail()
            yield node.client_address, process
            assert process.poll() is None, node.log_tail()
            process.stdin.close()
            assert process.wait(20) == 0, node.log_tail()
        finally:
            process.kill()


def resident(pid: int, key: str) -> int:
    """Bytes of a process: VmRSS now, or VmHWM at its highest."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * KIB
    raise AssertionError(f"no {key} in the status of process {pid}")


@pytest.mark.timeout(120)
@pytest.mark.long
def test_two_hundred_clients_with_4_mib_commands_on_a_slow_disk(tmp_path: Path) -> None:
    clients, size = 200, 4 * MIB
    limits = {
        "node_memory_bytes": 96 * MIB, "node_inflight_bytes": 32 * MIB, "group_inflight_bytes": 16 * MIB,
        "client_inflight_bytes": 8 * MIB, "payload_cache_bytes": 8 * MIB, "wal_queue_bytes_max": 16 * MIB,
        "wal_file_bytes": 32 * MIB, "wal_unflushed_bytes_max": 64 * MIB, "migrate_dead_ratio": 1.0,
    }  # fmt: skip
    with slow_node(tmp_path, limits, 0.01) as (address, process):
        base = resident(process.pid, "VmRSS")
        calls: list[float] = []

        async def load() -> dict[str, Any]:
            body = bytes(range(256)) * (size // 256)
            done = trio.Event()

            async def write(number: int) -> None:
                async with connect([address], timeout=100) as yard:
                    await yard.log("log").append(b"%d" % number, body)

            async def ask() -> None:
                async with connect([address], timeout=30) as yard:
                    while not done.is_set():
                        begun = trio.current_time()
                        await yard.log("log").latest()
                        calls.append(trio.current_time() - begun)
                        await trio.sleep(0.05)

            async with connect([address], timeout=30) as yard:
                await yard.create("log", members=[1])
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(ask)
                    async with trio.open_nursery() as writers:
                        for number in range(clients):
                            writers.start_soon(write, number)
                    done.set()
                log = yard.log("log")
                # Every command was stored, once.
                found: list[int] = []
                while len(found) < clients:
                    page = await log.poll(len(found), max_records=1000, bodies=False)
                    found += [int(record.metadata) for record in page]
                assert sorted(found) == list(range(clients))
                for offset in (0, clients - 1):
                    assert await log.read_body(offset) == body
                return await yard.status()

        status = trio.run(load)
        peak = resident(process.pid, "VmHWM")
        assert peak - base < limits["node_memory_bytes"], f"{(peak - base) / MIB:.0f} MiB above the start"
        assert status["budget"]["bytes"]["node"] == 0
        # The budgets were used up, and small questions were answered all the while.
        assert sum(status["busy"].values()) > 0
        assert len(calls) > 10 and max(calls) < 10


async def lead(yard: Yard, name: str) -> None:
    """Make node 1 the leader of a log."""
    with trio.fail_after(20):
        while (await yard.locate(name))["leader"] != 1:
            try:
                await yard.transfer(name, 1)
            except (NotLeader, Refused):
                await trio.sleep(0.02)


@pytest.mark.timeout(120)
@pytest.mark.long
def test_a_stopped_process_costs_its_leader_no_memory_and_catches_up(tmp_path: Path) -> None:
    size, per_log, names = 64 * KIB, 200, [f"log-{number}" for number in range(16)]
    limits = {
        "follower_inflight_bytes": 4 * MIB, "peer_queue_bytes": 16 * MIB, "payload_cache_bytes": 8 * MIB,
        "wal_file_bytes": 16 * MIB, "wal_unflushed_bytes_max": 128 * MIB, "node_inflight_bytes": 16 * MIB,
        "group_inflight_bytes": 4 * MIB, "append_bytes_max": 256 * KIB, "append_inflight_bytes": MIB,
        "node_memory_bytes": 96 * MIB, "migrate_dead_ratio": 1.0,
    }  # fmt: skip
    # The cache, the window, what is proposed, metadata; and as much again for what an allocator keeps.
    total, bound = size * per_log * len(names), 48 * MIB
    with LocalCluster(tmp_path, limits=limits) as nodes:
        nodes.start()
        processes = {number: node.process for number, node in nodes.nodes.items()}
        stopped = processes[3]
        assert stopped is not None

        async def load() -> int:
            body = bytes(range(256)) * (size // 256)
            pulled: list[dict[str, Any]] = []
            async with connect(nodes.addresses, timeout=60) as yard:
                await yard.create_many(names)
                for name in names:
                    await lead(yard, name)
                leader = processes[1]
                assert leader is not None
                base = resident(leader.pid, "VmRSS")

                async def look() -> None:
                    # A slow machine gives node 3 up before its window is full: then it pulls when it is back.
                    while not pulled:
                        rows = (await yard.status(1))["followers"]
                        pulled.extend(row for row in rows if row["node"] == 3 and row["pulling"])
                        await trio.sleep(0.02)

                async def write(name: str) -> None:
                    log = yard.log(name)
                    for number in range(per_log):
                        await log.append(b"%d" % number, body)

                async with trio.open_nursery() as looking:
                    stopped.send_signal(signal.SIGSTOP)
                    try:
                        looking.start_soon(look)
                        async with trio.open_nursery() as writers:
                            for name in names:
                                writers.start_soon(write, name)
                        peak = resident(leader.pid, "VmHWM")
                    finally:
                        stopped.send_signal(signal.SIGCONT)
                    with trio.fail_after(60):
                        for name in names:
                            while (await yard.describe(name, node=3)).get("end") != per_log:
                                await trio.sleep(0.05)
                    looking.cancel_scope.cancel()
                assert await yard.log(names[0]).read_body(per_log - 1, node=3) == body
                assert resident(leader.pid, "VmHWM") - base < bound, "catching up costs nothing"
                assert pulled, "node 3 was seen pulling"
                return peak - base

        grown = trio.run(load)
    assert total > 3 * bound, "enough was written to tell"
    assert grown < bound, f"{grown / MIB:.0f} MiB above the start"
