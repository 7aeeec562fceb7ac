"""The blocking client: its own threads beside the trio loop that serves it, and what importing it does not load."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing

from logyard.client import errors
from logyard.client.admin import Call, leaders_view
from logyard.client.sync import connect_sync
from logyard.protocol.frame import Buffer

from .fake_system import FakeCluster, fake_cluster, start_node


async def in_thread(work: Callable[..., object], *arguments: object) -> None:
    """Run a blocking test in a thread beside the servers."""
    with trio.fail_after(20):
        await trio.to_thread.run_sync(partial(work, *arguments), abandon_on_cancel=True)


async def test_the_verbs() -> None:
    async with fake_cluster() as cluster:
        await in_thread(every_verb, list(cluster.addresses.values())[:1])


def every_verb(servers: list[str]) -> None:
    with connect_sync(servers) as yard:
        yard.create("orders", members=[2, 1])
        log = yard.log("orders")
        assert log.append(b"first", payload=b"one") == 0
        assert log.append_many([(b"a", None), (b"b", b"2" * 9000)]) == range(1, 3)
        assert log.latest() == (0, 3)
        assert [(r.metadata, r.payload) for r in log.records()] == [
            (b"first", b"one"),
            (b"a", None),
            (b"b", b"2" * 9000),
        ]
        assert [r.size for r in log.records(1, 3, bodies=False)] == [0, 9000]
        assert log.poll(0, node=1).node == 1
        assert log.read_body(2, 5, 9) == b"2222"
        assert log.read_body(2) == b"2" * 9000
        assert len(log.poll(3, wait=0.05)) == 0
        assert yard.nodes() == [1, 2, 3]
        assert yard.members("orders")["leader"] == 2
        yard.transfer("orders", 1)
        assert log.append(b"after the transfer") == 3
        assert yard.describe("orders")["leader"] == 1
        assert log.truncate(2) == 2
        with pytest.raises(errors.Gone):
            log.poll(0)
        with pytest.raises(errors.OutOfRange):
            log.read(4)
        assert len(yard.list()) == 1
        assert sorted(yard.statuses()) == [1, 2, 3]
        assert yard.status(node=2)["node"] == 2
        assert yard.snapshot() == {node: {"groups": 1} for node in (1, 2, 3)}
        assert yard.compact() == {node: {"moved": 0} for node in (1, 2, 3)}
        yard.add_member("orders", 3)
        yard.remove_member("orders", 3)
        yard.delete("orders")
        with pytest.raises(errors.UnknownGroup):
            log.append(b"x")
        with pytest.raises(errors.UnknownGroup):
            yard.members("orders")


async def test_an_answer_that_names_another_node_is_followed() -> None:
    async with fake_cluster() as cluster:
        cluster.create("a", [1, 2, 3], 2)
        await in_thread(leader_moves, list(cluster.addresses.values()), cluster)


def leader_moves(servers: list[str], cluster: FakeCluster) -> None:
    with connect_sync(servers) as yard:
        view = Call("describe", {"name": "a"}, leaders_view, group="a")
        assert yard.run(view)["node"] == 2
        cluster.logs["a"].leader = 3
        assert yard.run(view)["node"] == 3


async def test_threads_share_one_client() -> None:
    async with fake_cluster() as cluster:
        cluster.create("a", [1, 2, 3], 3)
        await in_thread(from_many_threads, list(cluster.addresses.values()))
        assert cluster.logs["a"].end == 400


def from_many_threads(servers: list[str]) -> None:
    with connect_sync(servers) as yard, ThreadPoolExecutor(8) as pool:
        log = yard.log("a")
        offsets = list(pool.map(lambda number: log.append(b"%d" % number, b"x" * 100), range(400)))
    assert sorted(offsets) == list(range(400))


async def test_busy_is_waited_out_and_bounded() -> None:
    async with fake_cluster(1) as cluster:
        cluster.create("a", [1], 1)
        cluster.nodes[1].busy = 3
        await in_thread(busy_for_good, list(cluster.addresses.values()), cluster)


def busy_for_good(servers: list[str], cluster: FakeCluster) -> None:
    with connect_sync(servers) as yard:
        log = yard.log("a")
        assert log.append(b"x") == 0
        assert cluster.nodes[1].busy == 0
        cluster.nodes[1].busy = 1 << 30
        with pytest.raises(errors.Busy):
            log.append(b"x", timeout=0.5)


async def test_what_comes_late_out_of_a_back_off_is_refused_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine stood still: it was sent once more, with no time for an answer, and nobody knew what became of it."""

    class Late(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            cluster.nodes[1].silent = True
            return super().wait((timeout or 0.0) + 1.0)

    def work(servers: list[str]) -> None:
        with connect_sync(servers) as yard:
            yard.log("a").append(b"x")
            cluster.nodes[1].busy = 1 << 30
            monkeypatch.setattr("logyard.client.sync.threading", SimpleNamespace(Event=Late))
            with pytest.raises(errors.Busy):
                yard.log("a").append(b"x", timeout=0.5)

    async with fake_cluster(1) as cluster:
        cluster.create("a", [1], 1)
        await in_thread(work, list(cluster.addresses.values()))


def append_one(servers: list[str], timeout: float, retry: bool = True) -> None:
    with connect_sync(servers, timeout=timeout, retry=retry) as yard:
        yard.log("a").append(b"x")


async def test_a_cut_connection() -> None:
    async with trio.open_nursery() as nursery:
        cluster = FakeCluster()
        _, first = await start_node(cluster, 1, nursery)
        await start_node(cluster, 2, nursery)
        state = cluster.create("a", [1, 2], 1)
        cluster.nodes[1].silent = True
        servers = list(cluster.addresses.values())

        async def fail_over() -> None:
            while not cluster.nodes[1].forgotten:
                await trio.lowlevel.checkpoint()
            state.leader = 2
            first.cancel()

        nursery.start_soon(fail_over)
        await in_thread(append_one, servers, 10.0)
        assert state.end == 1
        # It comes back, leads again and dies again: nothing may be tried twice now.
        port = int(servers[0].rpartition(":")[2])
        _, again = await start_node(cluster, 1, nursery, port=port)
        cluster.nodes[1].silent = True
        state.leader = 1

        async def cut_first() -> None:
            while not cluster.nodes[1].forgotten:
                await trio.lowlevel.checkpoint()
            again.cancel()

        nursery.start_soon(cut_first)
        with pytest.raises(errors.Unknown):
            await in_thread(append_one, servers, 10.0, False)
        nursery.cancel_scope.cancel()


async def test_a_20_mib_body() -> None:
    async with fake_cluster(1) as cluster:
        cluster.create("a", [1], 1)
        await in_thread(large_body, list(cluster.addresses.values()))


def large_body(servers: list[str]) -> None:
    body = b"0123456789abcdef" * (20 << 16)
    with connect_sync(servers) as yard:
        log = yard.log("a")
        assert log.append(b"large", payload=body) == 0
        assert log.read(0).payload == body
        assert log.read_body(0) == body


async def test_an_idle_connection_that_was_closed_is_not_used() -> None:
    async with trio.open_nursery() as nursery:
        cluster = FakeCluster()
        _, scope = await start_node(cluster, 1, nursery)
        cluster.create("a", [1], 1)
        servers = list(cluster.addresses.values())
        yard = await trio.to_thread.run_sync(partial(connect_sync, servers, retry=False))
        await in_thread(yard.log("a").append, b"before")
        scope.cancel()
        await trio.testing.wait_all_tasks_blocked(0.01)
        await start_node(cluster, 1, nursery, port=int(servers[0].rpartition(":")[2]))
        await in_thread(yard.log("a").append, b"after")
        assert [head for head, _ in cluster.logs["a"].records] == [b"before", b"after"]
        yard.close()
        nursery.cancel_scope.cancel()


async def test_a_connection_that_is_interrupted_within_a_frame_is_not_used_again() -> None:
    """It would go on with the rest of that frame, which nobody waits for."""
    async with fake_cluster(1) as cluster:
        cluster.create("a", [1], 1)
        await in_thread(interrupted, list(cluster.addresses.values()))


class Interrupts:
    """A socket whose user presses Ctrl-C when a part of a frame has left."""

    def __init__(self, sock: Any) -> None:
        self.sock = sock

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sock, name)

    def sendmsg(self, buffers: Sequence[Buffer]) -> int:
        self.sock.send(b"".join(buffers)[:20])
        raise KeyboardInterrupt


def interrupted(servers: list[str]) -> None:
    with connect_sync(servers) as yard:
        log = yard.log("a")
        log.append(b"first")
        ((connection,),) = yard._idle.values()
        connection._socket = cast(Any, Interrupts(connection._socket))
        with pytest.raises(KeyboardInterrupt):
            log.append(b"never", b"z" * 5000, reply="none")
        assert not yard._idle.get(connection.address)
        assert log.append(b"second") == 1


@pytest.mark.parametrize("exactly_once", [False, True])
@pytest.mark.parametrize("name", ["half \ud800", b"orders", "x" * 129], ids=["half", "bytes", "long"])
async def test_a_name_that_can_not_be_one_is_its_callers_error_alone(name: Any, exactly_once: bool) -> None:
    async with fake_cluster() as cluster:
        await in_thread(no_name, list(cluster.addresses.values()), name, exactly_once)


def no_name(servers: list[str], name: Any, exactly_once: bool) -> None:
    with connect_sync(servers, exactly_once=exactly_once) as yard:
        yard.create("orders", members=[1, 2, 3])
        with pytest.raises(errors.BadRequest, match="name is a text"):
            yard.log(name).append(b"x", timeout=5)
        with pytest.raises(errors.BadRequest, match="name is a text"):
            yard.log(name).latest()
        with pytest.raises(errors.BadRequest):
            yard.create(name, members=[1])
        assert yard.log("orders").append(b"x") == 0


def test_importing_it_loads_neither_trio_nor_lmdb_nor_the_engine() -> None:
    code = (
        "import sys, logyard.client.sync\n"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('trio', 'lmdb') or m.startswith(('logyard.engine',"
        " 'logyard.payloads', 'logyard.machines', 'logyard.service'))]\n"
        "sys.exit(repr(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_nobody_there_is_told_in_time() -> None:
    with pytest.raises(errors.LogyardError, match="cannot reach"):
        connect_sync(["127.0.0.1:1"], timeout=0.2)


def test_bad_addresses_are_refused() -> None:
    for servers in ([], ["nonsense"], ["host:0"], ["host:99999"], [":7001"]):
        with pytest.raises(errors.BadRequest):
            connect_sync(servers)
