"""The trio client against the real client door and an in-memory engine."""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing

from logyard.client import errors
from logyard.client.admin import ask, plain
from logyard.client.aio import connect
from logyard.client.kv_watch import Flow, Stream, Watch
from logyard.client.messages import open_session
from logyard.client.network import Network, Wanted
from logyard.client.queue import Consumer, Message
from logyard.client.runtime_trio import TrioRuntime
from logyard.client.session import Routes
from logyard.engine.config import SystemConfig
from logyard.protocol.frame import encode_frame

from .fake_system import FakeCluster, fake_cluster, start_node


def seeds(cluster: FakeCluster) -> list[str]:
    return list(cluster.addresses.values())


async def test_the_verbs_of_a_log() -> None:
    async with fake_cluster() as cluster, connect(seeds(cluster)[:1]) as yard:
        await yard.create("orders", members=[2, 1, 3])
        log = yard.log("orders")
        assert await log.append(b"first", payload=b"one") == 0
        assert await log.append_many([(b"a", None), (b"b", b"two"), (b"c", b"3" * 5000)]) == range(1, 4)
        assert await log.latest() == (0, 4)
        page = await log.poll(0)
        assert [(record.offset, record.metadata, record.payload) for record in page] == [
            (0, b"first", b"one"), (1, b"a", None), (2, b"b", b"two"), (3, b"c", b"3" * 5000)
        ]  # fmt: skip
        assert (page.start, page.end, page.node, page.next) == (0, 4, 2, 4)
        heads = await log.poll(1, bodies=False, max_records=2)
        assert [(record.offset, record.size, record.payload) for record in heads] == [(1, 0, None), (2, 3, None)]
        assert (await log.read(3)).payload == b"3" * 5000
        assert await log.read_body(3, 10, 20) == b"3" * 10
        assert await log.read_body(3) == b"3" * 5000
        assert await log.read_body(1) == b""
        for node in (1, 2, 3):
            assert (await log.poll(0, node=node)).node == node
        assert [record.offset async for record in log.records(1, 3)] == [1, 2]
        assert await log.truncate(2) == 2
        with pytest.raises(errors.Gone):
            await log.poll(0)
        with pytest.raises(errors.OutOfRange) as caught:
            await log.poll(99)
        assert caught.value.details == {"start": 2, "end": 4}
        with pytest.raises(errors.OutOfRange):
            await log.read(4)


async def test_the_admin_verbs() -> None:
    async with fake_cluster() as cluster, connect(seeds(cluster)) as yard:
        await yard.create_many([f"log-{number}" for number in range(600)], members=[1, 2])
        await yard.create("log-0", members=[1, 2])
        with pytest.raises(errors.GroupExists):
            await yard.create("log-0", members=[1])
        assert await yard.nodes() == [1, 2, 3]
        assert (await yard.cluster())["nodes"] == cluster.addresses
        groups = await yard.list()
        assert len(groups) == 600
        assert {row["role"] for row in groups} == {"leader"}
        assert await yard.list(node=3) == []
        assert (await yard.describe("log-7"))["role"] == "leader"
        assert (await yard.describe("log-7", node=2))["node"] == 2
        assert (await yard.members("log-7"))["members"] == [1, 2]
        await yard.transfer("log-7", 2)
        assert (await yard.locate("log-7"))["leader"] == 2
        await yard.add_member("log-7", 3)
        assert (await yard.describe("log-7", node=3))["node"] == 3
        await yard.remove_member("log-7", 3)
        with pytest.raises(errors.UnknownGroup):
            await yard.describe("log-7", node=3)
        assert await yard.snapshot(["log-7"]) == {node: {"groups": 1} for node in (1, 2)}
        assert await yard.compact(node=2) == {2: {"moved": 0}}
        assert (await yard.status(node=3))["node"] == 3
        assert sorted(await yard.statuses()) == [1, 2, 3]
        await yard.delete("log-7")
        with pytest.raises(errors.UnknownGroup):
            await yard.log("log-7").append(b"x")


@pytest.mark.parametrize("count", [0, 1, 9, 10, 11, 20, 35])
@pytest.mark.parametrize("pages", [True, False])
async def test_groups_are_listed_page_by_page(count: int, pages: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All in one answer, no client took what a node with hundreds of thousands said; older nodes know no pages."""
    monkeypatch.setattr("logyard.client.admin.LIST_ROWS", 10)
    async with fake_cluster() as cluster, connect(seeds(cluster)) as yard:
        cluster.pages = pages
        names = sorted(f"log-{number}" for number in range(count))
        if names:
            await yard.create_many(reversed(names), members=[1, 2])
        assert [row["name"] for row in await yard.list(1)] == names == [row["name"] for row in await yard.list()]
        assert await yard.list(3) == []


async def test_who_looks_for_a_log_waits_for_no_dead_node_when_its_leader_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with fake_cluster() as cluster:
        # Nobody listens there, and the client finds both before the leader.
        cluster.addresses |= {0: "127.0.0.1:1", 9: "127.0.0.1:1"}
        async with connect(seeds(cluster)) as yard:
            await yard.create("a", members=[1, 2, 3])
            await yard.transfer("a", 2)
            asked: list[Sequence[int]] = []
            run = Network.run

            async def counted(self: Network, call: Any, timeout: float | None = None) -> Any:
                asked.append(call.nodes)
                return await run(self, call, timeout)

            monkeypatch.setattr(Network, "run", counted)
            assert (await yard.locate("a"))["leader"] == 2
            assert (await yard.members("a"))["members"] == [1, 2, 3]
            assert asked == [(), (2,)] * 2


async def test_every_node_is_asked_before_a_dead_one_fails_the_verb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logyard.client._async.admin.STATUS_PATIENCE_S", 0.3)
    async with fake_cluster() as cluster:
        # Nobody listens there, and it is asked first.
        cluster.addresses[0] = "127.0.0.1:1"
        async with connect(seeds(cluster)[:1]) as yard:
            with trio.fail_after(10), pytest.raises(errors.LogyardError, match="node 0 did not do it") as told:
                await yard.compact()
    assert told.value.details["missing"] == [0]
    assert told.value.details["answers"] == {node: {"moved": 0} for node in (1, 2, 3)}


async def test_pipelined_appends_keep_their_order_and_share_frames() -> None:
    async with fake_cluster(1) as cluster, connect(seeds(cluster)) as yard:
        await yard.create("a")
        log = yard.log("a")
        pending = [log.append_nowait(b"%d" % number, payload=b"x" * 10) for number in range(10_000)]
        called: list[int] = []
        pending[-1].on_done(lambda: called.append(1))
        assert [await one.wait() for one in pending] == list(range(10_000))
        assert called == [1]
        assert [head for head, _ in cluster.logs["a"].records] == [b"%d" % number for number in range(10_000)]
        # All of one turn leaves as one frame, up to the limit of a frame.
        assert cluster.nodes[1].frames == [4096, 4096, 1808]
        assert len({id(one.batch) for one in pending}) == 3


async def test_appends_follow_the_leader() -> None:
    async with fake_cluster() as cluster, connect(seeds(cluster)) as yard:
        log_state = cluster.create("a", [1, 2, 3], 1)
        log = yard.log("a")
        pending = []
        for number in range(300):
            pending.append(log.append_nowait(b"%d" % number))
            if number % 20 == 0:
                log_state.leader = 1 + number // 20 % 3
                await trio.lowlevel.checkpoint()
        offsets = [await one.wait() for one in pending]
        assert sorted(offsets) == list(range(300))
        assert [log_state.records[offset][0] for offset in offsets] == [b"%d" % number for number in range(300)]


async def test_busy_is_waited_out() -> None:
    async with fake_cluster(1) as cluster, connect(seeds(cluster)) as yard:
        cluster.create("a", [1], 1)
        cluster.nodes[1].busy = 5
        log = yard.log("a")
        pending = []
        for number in range(50):
            pending.append(log.append_nowait(b"%d" % number))
            await trio.lowlevel.checkpoint()
        offsets = [await one.wait() for one in pending]
        assert sorted(offsets) == list(range(50))
        assert cluster.nodes[1].busy == 0
        records = cluster.logs["a"].records
        assert [records[offset][0] for offset in offsets] == [b"%d" % number for number in range(50)]


async def test_what_stays_busy_fails_as_busy_in_time() -> None:
    async with fake_cluster(1) as cluster, connect(seeds(cluster)) as yard:
        cluster.create("a", [1], 1)
        log = yard.log("a")
        await log.append(b"x")
        cluster.nodes[1].busy = 1 << 30
        with trio.fail_after(5), pytest.raises(errors.Busy):
            await log.append(b"x", timeout=0.5)


@asynccontextmanager
async def held_up() -> AsyncIterator[tuple[FakeCluster, Any, Any]]:
    """A cluster that is busy, its client, whose calls have 3 s, and an append that waits in a back-off."""
    async with fake_cluster(1) as cluster, connect(seeds(cluster)) as yard:
        cluster.create("a", [1], 1)
        log = yard.log("a")
        await log.append(b"x")
        cluster.nodes[1].busy = 1 << 30
        yard.timeout = 3.0
        pending = log.append_nowait(b"y")
        (lane,) = yard.lanes
        with trio.fail_after(20):
            while not lane.held_until:
                await trio.lowlevel.checkpoint()
            yield cluster, yard, pending


async def test_what_a_late_turn_finds_past_its_time_is_not_sent() -> None:
    """The machine stood still over the end of a back-off: it was sent, and given up in the same turn as unknown."""
    async with held_up() as (_, _, pending):
        threading.Event().wait(4.0)
        with pytest.raises(errors.Busy):
            await pending.wait()


async def test_what_is_given_up_in_a_late_turn_may_send_anew_at_once() -> None:
    """It took what waited beside it along, past its time as well, and the client ended over what was gone."""
    async with held_up() as (cluster, yard, pending):
        log, anew = yard.log("a"), []

        def again() -> None:
            yard.timeout = 30.0
            anew.append(log.append_nowait(b"z"))

        pending.on_done(again)
        beside = log.append_nowait(b"w")
        threading.Event().wait(4.0)
        for one in (pending, beside):
            with pytest.raises(errors.Busy):
                await one.wait()
        cluster.nodes[1].busy = 0
        assert await anew[0].wait() == 1 and await log.append(b"v") == 2


async def test_what_comes_late_out_of_a_back_off_is_refused_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine stood still: it was sent once more, with no time for an answer, and nobody knew what became of it."""

    async def late(seconds: float) -> None:
        cluster.nodes[1].silent = True
        await trio.sleep(seconds)
        threading.Event().wait(3.5)

    async with fake_cluster(1) as cluster, connect(seeds(cluster)) as yard:
        cluster.create("a", [1], 1)
        await yard.log("a").append(b"x")
        cluster.nodes[1].busy = 1 << 30
        monkeypatch.setattr(TrioRuntime, "sleep", staticmethod(late))
        with trio.fail_after(20), pytest.raises(errors.Busy):
            await yard.command("a", encode_frame([(b"", b"x")], command=b"\x01"), timeout=3.0)


async def test_a_dead_leader_is_replaced_and_what_was_cut_is_sent_again() -> None:
    async with trio.open_nursery() as nursery:
        cluster = FakeCluster()
        scopes = {}
        for node in (1, 2, 3):
            _, scopes[node] = await start_node(cluster, node, nursery)
        states = [cluster.create(f"log-{number}", [1, 2, 3], 1) for number in range(40)]
        cluster.nodes[1].silent = True
        async with connect(seeds(cluster)) as yard:
            pending = [yard.log(f"log-{number}").append_nowait(b"x") for number in range(40)]
            while cluster.nodes[1].forgotten < 40:
                await trio.lowlevel.checkpoint()
            scopes[1].cancel()
            for _ in range(3):
                await trio.testing.wait_all_tasks_blocked(0.01)
            for state in states:
                state.leader = 2
            with trio.fail_after(5):
                assert [await one.wait() for one in pending] == [0] * 40
            # The node comes back at its old address and is used again.
            port = int(cluster.addresses[2].rpartition(":")[2])
            scopes[2].cancel()
            await trio.testing.wait_all_tasks_blocked(0.01)
            await start_node(cluster, 2, nursery, port=port)
            with trio.fail_after(5):
                assert await yard.log("log-3").append(b"y") == 1
        nursery.cancel_scope.cancel()


async def test_without_retry_a_cut_connection_is_an_unknown_outcome() -> None:
    async with trio.open_nursery() as nursery:
        cluster = FakeCluster()
        _, scope = await start_node(cluster, 1, nursery)
        cluster.create("a", [1], 1)
        cluster.nodes[1].silent = True
        async with connect(seeds(cluster), retry=False) as yard:
            pending = yard.log("a").append_nowait(b"x")
            while not cluster.nodes[1].forgotten:
                await trio.lowlevel.checkpoint()
            scope.cancel()
            with trio.fail_after(3), pytest.raises(errors.Unknown):
                await pending.wait()
        nursery.cancel_scope.cancel()


async def test_no_answer_in_time_is_an_unknown_outcome() -> None:
    async with fake_cluster(1) as cluster, connect(seeds(cluster)) as yard:
        cluster.create("a", [1], 1)
        log = yard.log("a")
        await log.append(b"x")
        cluster.nodes[1].silent = True
        with trio.fail_after(5), pytest.raises(errors.Unknown):
            await log.append(b"x", timeout=0.5)
        assert yard.window.used == 0


async def test_a_link_is_given_up_over_silence_but_not_while_a_node_works_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("logyard.client.network.STALL_S", 0.3)
    begun: list[str] = []

    async def work(what: str, *_said: object, **_more: object) -> dict[str, int]:
        begun.append(what)
        await trio.sleep(1.0)
        return {"moved": 0}

    async with fake_cluster(1) as cluster:
        monkeypatch.setattr(cluster.nodes[1], "compact", partial(work, "compact"))
        monkeypatch.setattr(cluster.nodes[1], "query", partial(work, "query"))
        async with connect([cluster.addresses[1]], timeout=5) as yard:
            await yard.create("orders", members=[1])
            with trio.fail_after(20):
                assert await yard.compact(1) == {1: {"moved": 0}}
                assert begun == ["compact"]
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(yard.run, ask("query", plain, at=1, name="orders", request=b"?"), 15.0)
                    while begun.count("query") < 2:
                        await trio.sleep(0.01)
                    nursery.cancel_scope.cancel()


async def test_leaving_fails_what_is_unfinished() -> None:
    async with fake_cluster(1) as cluster:
        cluster.create("a", [1], 1)
        cluster.nodes[1].silent = True
        async with connect(seeds(cluster)) as yard:
            pending = yard.log("a").append_nowait(b"x")
            while not cluster.nodes[1].forgotten:
                await trio.lowlevel.checkpoint()
        with pytest.raises(errors.Unknown):
            _ = pending.offset
        with pytest.raises(errors.LogyardError, match="closed"):
            await yard.log("a").append(b"x")


async def test_the_window_bounds_what_is_under_way() -> None:
    async with fake_cluster(1) as cluster, connect(seeds(cluster), window_bytes=10_000) as yard:
        cluster.create("a", [1], 1)
        log = yard.log("a")
        with pytest.raises(errors.Busy):
            for _ in range(100):
                log.append_nowait(b"", payload=bytes(1000))
        async with trio.open_nursery() as nursery:
            for _ in range(100):
                nursery.start_soon(log.append, b"", bytes(1000))
        await yard.drain()
        assert yard.window.used == 0
        assert cluster.logs["a"].end == 100 + 10


async def test_a_poll_waits_for_a_record() -> None:
    async with fake_cluster(2) as cluster, connect(seeds(cluster)) as yard:
        cluster.create("a", [1, 2], 1)
        log = yard.log("a")
        seen: list[bytes] = []

        async def follow() -> None:
            async for record in log.records(follow=True, node=2):
                seen.append(record.metadata)
                if len(seen) == 3:
                    return

        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow)
            page: list[int] = []

            async def latest() -> None:
                found = await log.poll(-1, wait=20)
                page.extend(record.offset for record in found)

            nursery.start_soon(latest)
            await trio.testing.wait_all_tasks_blocked(0.02)
            for number in range(3):
                await log.append(b"%d" % number)
        assert seen == [b"0", b"1", b"2"]
        assert page[0] == 0
        assert len(await log.poll(3)) == 0


async def test_a_body_of_20_mib_goes_through_and_comes_back() -> None:
    body = os.urandom(20 << 20)
    async with fake_cluster(1) as cluster, connect(seeds(cluster)) as yard:
        cluster.create("a", [1], 1)
        log = yard.log("a")
        before = log.append_nowait(b"small")
        assert await log.append(b"large", payload=memoryview(body)) == 1
        assert before.offset == 0
        assert (await log.read(1)).payload == body
        assert await log.read_body(1) == body
        assert await log.read_body(1, 9 << 20, (9 << 20) + 5) == body[9 << 20 : (9 << 20) + 5]


async def test_what_is_above_the_servers_limit_is_refused_before_it_is_sent() -> None:
    config = SystemConfig(record_bytes_max=64 << 10)
    async with fake_cluster(1, config) as cluster, connect(seeds(cluster)) as yard:
        cluster.create("a", [1], 1)
        with pytest.raises(errors.BadRequest, match="limit"):
            await yard.log("a").append(b"x", payload=bytes(70_000))
        assert await yard.log("a").append(b"x", payload=bytes(60_000)) == 0


async def test_bad_arguments_are_refused_where_they_are_given() -> None:
    async with fake_cluster(1) as cluster, connect(seeds(cluster)) as yard:
        cluster.create("a", [1], 1)
        log = yard.log("a")
        for bad in ("text", 5, None):
            with pytest.raises(errors.BadRequest, match=f"metadata is bytes, not {type(bad).__name__}"):
                log.append_nowait(bad)  # type: ignore[arg-type]
        for long in (1, 2000, 2 << 20):
            for compress in ("none", "zstd"):
                with pytest.raises(errors.BadRequest, match="a payload is bytes, not str"):
                    await log.append(b"x", "x" * long, compress=compress)  # type: ignore[call-overload]
        with pytest.raises(errors.BadRequest, match="a key is bytes, not str"):
            await log.append_many([(b"x", b"y")], keys=["k"])  # type: ignore[list-item]
        with pytest.raises(errors.BadRequest, match="a payload is bytes, not str"):
            await yard.queue("q").publish("x")  # type: ignore[arg-type]
        with pytest.raises(errors.BadRequest):
            log.append_nowait(bytes(70_000))
        with pytest.raises(errors.BadRequest):
            await log.append_many([])
        with pytest.raises(errors.BadRequest):
            await log.poll(-2)
        with pytest.raises(errors.BadRequest):
            await log.poll(0, consistency="perfect")
        with pytest.raises(errors.BadRequest):
            connect_bad = connect(["nonsense"])
            async with connect_bad:
                pass
        assert await log.append(b"fine") == 0


async def test_nobody_there_is_told_in_time() -> None:
    with trio.fail_after(5), pytest.raises(errors.LogyardError, match="cannot reach"):
        async with connect(["127.0.0.1:1", "\u2603.example:1"], timeout=0.2):
            pass


async def test_another_cluster_is_refused() -> None:
    async with fake_cluster(2) as cluster:
        cluster.nodes[2].cluster_id = "other"
        async with connect(seeds(cluster)[:1], timeout=1) as yard:
            with pytest.raises(errors.WrongIdentity):
                await yard.status(node=2)


async def test_a_closed_client_says_so_whatever_it_is_asked() -> None:
    async with fake_cluster(1) as found:
        found.create("log", [1], 1)
        async with connect(list(found.addresses.values())) as yard:
            asked = (yard.kv("kv"), yard.queue("queue"), yard.log("log"))
        kv, queue, log = asked
        questions = (
            kv.get(b"a"), kv.put(b"a", b""), queue.publish(b""), log.append(b""), log.append_many([]),
            kv.watch(b"a").__aenter__(), queue.consume().__aenter__(),
        )  # fmt: skip
        with trio.fail_after(10):
            for question in questions:
                with pytest.raises(errors.LogyardError, match="closed"):
                    await question


class Asked(Network):
    """A client that asks no servers: `rows` are their answers."""

    __slots__ = ("rows",)
    rows: dict[tuple[str, int], list[Any]]

    def _candidates(self) -> list[tuple[str, int]]:
        return list(self.rows)

    async def _hears_of_more(self, unheard: Any = ()) -> bool:
        return False

    async def _locate(self, address: tuple[str, int], names: list[str]) -> list[Any] | None:
        return self.rows[address]


@pytest.mark.parametrize("order", list(itertools.permutations((1, 2, 3))))
async def test_a_group_without_a_leader_is_not_unknown_whoever_is_asked_last(order: tuple[int, ...]) -> None:
    network = object.__new__(Asked)
    network.routes = Routes(["a:1"])
    row = ["log", 7, 0, [1, 2], False, "log"]
    network.rows = {("a", node): [] if node == 3 else [row] for node in order}
    wanted = Wanted()
    network._wanted = {"log": wanted}
    await network._locate_round()
    assert not wanted.done and network._wanted, "it is asked for again"
    network.rows = {address: [] for address in network.rows}
    await network._locate_round()
    assert type(wanted.error) is errors.UnknownGroup


async def test_what_is_told_of_an_append_that_is_late_may_use_another_log() -> None:
    async with fake_cluster() as cluster, connect(seeds(cluster), exactly_once=False) as yard:
        await yard.create("orders", members=[1, 2, 3])
        yard.timeout = 0.2
        cluster.nodes[1].silent = True
        given, told = yard.log("orders").append_nowait(b"lost"), trio.Event()

        def instead() -> None:
            yard.log("others")
            told.set()

        given.on_done(instead)
        await told.wait()
        cluster.nodes[1].silent = False
        assert await yard.log("orders").append(b"kept", timeout=30.0) == 0


async def test_whoever_outlives_the_client_is_told_at_once() -> None:
    """What is under way when its block ends: a search for a leader, a poll, what a session and a watch wait for."""
    told: dict[str, errors.LogyardError] = {}

    async def outlives(what: str, call: Any) -> None:
        began = trio.current_time()
        try:
            await call()
        except errors.LogyardError as error:
            told[what] = error
        assert trio.current_time() - began < 20.0, what

    async def first(messages: Any) -> None:
        async for _ in messages:
            raise AssertionError("nobody sends anything")

    async with (
        fake_cluster() as cluster, trio.open_nursery() as outer, connect(seeds(cluster), timeout=30.0) as yard
    ):  # fmt: skip
        await yard.create_many(["orders", "leaderless"], members=[1, 2, 3])
        cluster.logs["leaderless"].leader = 0
        session = await yard.open_session("orders")
        consumer = await open_session(yard, "orders", partial(Consumer, credit_bytes=1))
        cluster.nodes[1].silent = True
        yard.spawn(consumer.settling)
        consumer.ack_nowait(Message(1, 1, b"", b"", 1, 0, ""))
        # Its block is not left before the client's.
        stream = Stream(yard.kv("leaderless"), None)
        watch = stream.watches[1] = Watch(stream, 1, Flow(b"", b"", 0, False, True, True, True, False))
        yard.spawn(stream.run)
        outer.start_soon(outlives, "search", yard.log("leaderless").latest)
        outer.start_soon(outlives, "poll", partial(yard.log("orders").poll, 0, wait=4.0))
        outer.start_soon(outlives, "session", partial(first, session.messages()))
        outer.start_soon(outlives, "consumer", consumer.__anext__)
        outer.start_soon(outlives, "settled", consumer.flush)
        outer.start_soon(outlives, "watch", watch.__anext__)
        while not cluster.nodes[1].forgotten or not cluster.grown:
            await trio.sleep(0.001)
    assert told.keys() == {"search", "poll", "session", "consumer", "settled", "watch"}
    assert all("closed" in str(error) for error in told.values()), told


async def test_silence_is_no_failure_however_little_time_an_answer_has() -> None:
    async with fake_cluster() as cluster, connect(seeds(cluster), timeout=0.4) as yard:
        await yard.create("orders", members=[1, 2, 3])
        log = yard.log("orders")
        polls: list[float] = []
        asked = cluster.nodes[1].poll

        async def counted(name: str, offset: int, records: int, size: int, wait_s: float, *more: Any) -> Any:
            """Nothing, at once: what it was asked to wait is looked at."""
            polls.append(wait_s)
            return await asked(name, offset, records, size, 0.0, *more)

        cluster.nodes[1].poll = counted  # type: ignore[method-assign,assignment]
        assert not len(await log.poll(0, wait=0.6))
        records = log.records(0, follow=True)
        async with trio.open_nursery() as nursery:

            @nursery.start_soon
            async def appends() -> None:
                while len(polls) < 3:
                    await trio.sleep(0.01)
                await log.append(b"at last", timeout=30.0)

            with trio.fail_after(30.0):
                assert (await records.__anext__()).metadata == b"at last"
        assert max(polls) == 0.2, "half of it is left for the answer"
        await records.aclose()  # type: ignore[attr-defined]


async def test_a_name_with_several_addresses_is_asked_at_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name "localhost" is ::1 first on many machines, where nobody listens."""
    async with fake_cluster() as cluster:
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))

            async def found(host: str, port: int, **_: Any) -> list[Any]:
                return [
                    (socket.AF_INET, socket.SOCK_STREAM, 0, "", address)
                    for address in (nobody.getsockname(), ("127.0.0.1", port))
                ]

            monkeypatch.setattr(trio.socket, "getaddrinfo", found)
            async with connect(seeds(cluster), timeout=5.0) as yard:
                await yard.create("orders", members=[1, 2, 3])
                assert await yard.log("orders").append(b"first") == 0


async def test_a_command_that_is_no_bytes_is_its_callers_error_alone() -> None:
    async with fake_cluster() as cluster, connect(seeds(cluster)) as yard:
        await yard.create("orders", members=[1, 2, 3])
        log = yard.log("orders")
        await log.append(b"first")
        # What is under way lets the next frame be made by the connection's own task.
        given = [log.append_nowait(b"more") for _ in range(3)]
        for long in (1, 5000):
            with pytest.raises(errors.BadRequest, match="a command is bytes, not str"):
                await yard.machine("orders").command("x" * long)  # type: ignore[arg-type]
            with pytest.raises(errors.BadRequest, match="a command is bytes, not str"):
                await log.append(b"", command="x" * long)  # type: ignore[call-overload]
        assert [await one.wait() for one in given] == [1, 2, 3]


async def test_who_waits_behind_a_held_lane_outlives_the_client_and_is_told() -> None:
    told: list[errors.LogyardError] = []

    async def append(log: Any) -> None:
        with pytest.raises(errors.LogyardError) as caught:
            await log.append(b"b")
        told.append(caught.value)

    with trio.fail_after(10):
        async with fake_cluster(1) as cluster, trio.open_nursery() as outer:
            cluster.create("a", [1], 1)
            async with connect(seeds(cluster), window_bytes=100) as yard:
                log = yard.log("a")
                await log.append(b"x")
                cluster.nodes[1].busy = 1 << 30
                log.append_nowait(b"y" * 200)
                while log.lane not in yard._held:
                    await trio.sleep(0.001)
                log.lane.held_until += 60
                outer.start_soon(append, log)
                while not yard._freed:
                    await trio.sleep(0.001)
            assert log.append_nowait(b"z").done
    assert len(told) == 1


@pytest.mark.parametrize("exactly_once", [False, True])
@pytest.mark.parametrize("name", ["half \ud800", b"orders", "x" * 129], ids=["half", "bytes", "long"])
async def test_a_name_that_can_not_be_one_is_its_callers_error_alone(name: Any, exactly_once: bool) -> None:
    async with fake_cluster() as cluster, connect(seeds(cluster), exactly_once=exactly_once) as yard:
        await yard.create("orders", members=[1, 2, 3])
        with pytest.raises(errors.BadRequest, match="name is a text"):
            await yard.log(name).append(b"x", timeout=5)
        with pytest.raises(errors.BadRequest, match="name is a text"):
            await yard.log(name).latest()
        with pytest.raises(errors.BadRequest):
            await yard.create(name, members=[1])
        assert await yard.log("orders").append(b"x", timeout=5) == 0


async def test_a_call_with_texts_that_can_not_be_sent_is_refused() -> None:
    async with fake_cluster() as cluster, connect(seeds(cluster)) as yard:
        with pytest.raises(errors.BadRequest, match="create_batch has a text that is not UTF-8"):
            await yard.create_batch(["fine", "half \ud800"], members=[1])
        assert await yard.nodes() == [1, 2, 3]
