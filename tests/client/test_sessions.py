"""Exactly once as clients see it: cut connections, sessions that end, windows, reply modes; trio and blocking."""

from __future__ import annotations

import random
import threading
import time
from array import array
from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.testing

from logyard.client import errors, session_keeper, sync_session
from logyard.client.aio import connect
from logyard.client.log import Place
from logyard.client.sequences import WINDOW, Sequences
from logyard.client.session import Retry
from logyard.client.sync import Log as SyncLog
from logyard.client.sync import Yard as SyncYard
from logyard.client.sync import connect_sync
from logyard.protocol.errors import NotLeader
from logyard.protocol.frame import APPEND_COMMAND, Frame, encode_frame, renumbered

from .fake_system import FakeCluster, FakeLog, fake_cluster


def seeds(cluster: FakeCluster) -> list[str]:
    return list(cluster.addresses.values())


def bodies(cluster: FakeCluster, name: str = "log") -> list[bytes]:
    return [body or b"" for _, body in cluster.logs[name].records]


def the_log(cluster: FakeCluster, name: str = "log") -> FakeLog:
    return cluster.logs[name]


def test_numbers_have_a_window() -> None:
    numbers = Sequences(7)
    given = [numbers.next() for _ in range(WINDOW)]
    assert given == list(range(1, WINDOW + 1)) and not numbers.room
    numbers.done(5)
    assert not numbers.room, "the lowest one counts"
    numbers.done(1)
    assert numbers.room and numbers.next() == WINDOW + 1 and not numbers.room


def test_a_frame_is_renumbered_in_place() -> None:
    records = [(b"m", b"x" * 10), (b"", b"y" * 5000)]
    frame = Frame()
    frame.put_many(records)
    want = encode_frame(records, command=b"\x01", session=3, sequence=4)
    found = renumbered(frame.encode(1, 2), 3, 4)
    assert [bytes(part) for part in found] == [bytes(part) for part in want]


async def test_an_answer_that_was_lost_is_asked_for_again() -> None:
    async with fake_cluster() as cluster, connect(seeds(cluster)) as yard:
        cluster.create("log", [1, 2, 3], 1)
        log = yard.log("log")
        assert await log.append(b"", b"first") == 0
        for number in range(1, 6):
            cluster.nodes[1].lose = 2
            assert await log.append(b"", b"%d" % number) == number
        cluster.nodes[1].lose = 3
        pending = [log.append_nowait(b"", b"p%d" % number) for number in range(20)]
        assert [await one.wait() for one in pending] == list(range(6, 26))
        assert bodies(cluster) == [b"first", *(b"%d" % n for n in range(1, 6)), *(b"p%d" % n for n in range(20))]
    assert not the_log(cluster).sessions.by_id, "a client that leaves ends its sessions"


async def test_without_sessions_it_is_at_least_once() -> None:
    async with fake_cluster() as cluster, connect(seeds(cluster), exactly_once=False) as yard:
        cluster.create("log", [1], 1)
        cluster.nodes[1].lose = 1
        assert await yard.log("log").append(b"", b"x") == 1
        assert bodies(cluster) == [b"x", b"x"] and not the_log(cluster).sessions.by_id


async def test_at_most_a_window_of_frames_is_under_way() -> None:
    async with fake_cluster(1) as cluster, connect(seeds(cluster)) as yard:
        cluster.create("log", [1], 1)
        log = yard.log("log")
        await log.append(b"", b"")
        waiting = [log.lane.add_many([(b"", b"%d" % number)], 30.0) for number in range(5 * WINDOW)]
        yard.kick(log.lane)
        async with trio.open_nursery() as nursery:
            for batch in waiting:
                nursery.start_soon(_done, batch.pending.on_done)
        assert [batch.pending.result().first for batch in waiting] == list(range(1, 5 * WINDOW + 1))
        assert cluster.nodes[1].under_way <= WINDOW


async def _done(register: Callable[[Callable[[], None]], None]) -> None:
    event = trio.Event()
    register(event.set)
    await event.wait()


async def test_frames_that_cannot_have_been_applied_move_to_a_fresh_session() -> None:
    async with fake_cluster() as cluster, connect(seeds(cluster)) as yard:
        cluster.create("log", [1], 1)
        log = yard.log("log")
        for number in range(4):
            pending = [log.append_nowait(b"", b"%d:%d" % (number, at)) for at in range(3)]
            assert [await one.wait() for one in pending] == list(range(3 * number, 3 * number + 3))
            (session,) = the_log(cluster).sessions.by_id
            the_log(cluster).sessions.expire(session)
        # A number out of the window: the old session is closed before its frame moves.
        await log.append(b"", b"")
        (session,) = the_log(cluster).sessions.by_id
        assert log.lane.numbers is not None
        log.lane.numbers.last += 10 * WINDOW
        assert await log.append(b"", b"far") == 13
        assert session not in the_log(cluster).sessions.by_id and len(the_log(cluster).sessions.by_id) == 1


async def test_a_frame_that_may_have_been_applied_fails_with_its_session() -> None:
    async with fake_cluster() as cluster, connect(seeds(cluster)) as yard:
        cluster.create("log", [1], 1)
        log = yard.log("log")
        await log.append(b"", b"before")
        system, sessions = cluster.nodes[1], the_log(cluster).sessions
        system.lose = 1
        apply, seen = system._apply, list(sessions.by_id)

        def applied_and_ended(log: FakeLog, frame: memoryview) -> bytes:
            reply = apply(log, frame)
            sessions.expire(seen[0])
            return reply

        system._apply = applied_and_ended  # type: ignore[method-assign]
        with pytest.raises(errors.SessionExpired):
            await log.append(b"", b"who knows")
        system._apply = apply  # type: ignore[method-assign]
        assert await log.append(b"", b"after") == 2
        assert bodies(cluster) == [b"before", b"who knows", b"after"]


async def test_heartbeats_go_to_every_node_and_stop_with_the_sessions() -> None:
    async with fake_cluster() as cluster, connect(seeds(cluster), session_ttl=0.03) as yard:
        cluster.create("log", [1], 1)
        await trio.sleep(0.03)
        assert not cluster.heartbeats, "no session, no heartbeat"
        await yard.log("log").append(b"", b"")
        with trio.fail_after(5):
            while {node for node, _ in cluster.heartbeats} != {1, 2, 3}:
                await trio.sleep(0.005)
        assert {client for _, client in cluster.heartbeats} == {yard.sessions.client}


async def test_reply_modes_priorities_and_waits() -> None:
    async with fake_cluster() as cluster, connect(seeds(cluster)) as yard:
        cluster.create("log", [1, 2, 3], 1)
        log = yard.log("log")
        assert await log.append(b"", b"a", reply="append") == Place(1, 1)
        assert not the_log(cluster).sessions.by_id, "what is not sent again needs no session"
        assert await log.append(b"", b"b", reply="none") == -1
        assert await log.append(b"", b"c", priority="low") == 2
        assert await log.append(b"", b"d", reply_from=3) == 3
        assert await log.append_many([(b"", b"e"), (b"", b"f")], reply_from=2, priority="low") == range(4, 6)
        assert bodies(cluster) == [b"a", b"b", b"c", b"d", b"e", b"f"]
        early = log.append_nowait(b"", b"g", reply="append")
        normal = log.append_nowait(b"", b"h")
        assert await normal.wait() == 7 and early.place == Place(7, 1) and early.offset == -1
        assert await log.wait_applied(8, term=1, node=2) == 8
        with pytest.raises(errors.Busy):
            await log.wait_applied(99, timeout=1.0)
        assert await log.query(b"abc", consistency="linearizable") == b"cba"
        for wrong in ({"reply": "maybe"}, {"priority": "high"}, {"reply": "none", "reply_from": 1}):
            with pytest.raises(errors.BadRequest):
                await log.append(b"", b"", **wrong)
        cluster.nodes[1].lose = 1
        with pytest.raises(errors.Unknown):
            await log.append(b"", b"cut", reply="append")
        with pytest.raises(errors.BadRequest):
            async with connect(seeds(cluster), exactly_once=False) as plain:
                await plain.log("log").append(b"", b"", reply_from=1)


async def test_a_log_that_does_not_exist() -> None:
    async with fake_cluster() as cluster, connect(seeds(cluster)) as yard:
        with pytest.raises(errors.UnknownGroup):
            await yard.log("nowhere").append(b"", b"x")


# The blocking face


async def blocking(cluster: FakeCluster, work: Callable[[SyncYard, SyncLog], None], exactly_once: bool = True) -> None:
    def run() -> None:
        with connect_sync(seeds(cluster), exactly_once=exactly_once) as yard:
            work(yard, yard.log("log"))

    await trio.to_thread.run_sync(run)


async def test_blocking_answers_that_were_lost() -> None:
    async with fake_cluster() as cluster:
        cluster.create("log", [1, 2, 3], 1)

        def work(yard: SyncYard, log: SyncLog) -> None:
            for number in range(5):
                cluster.nodes[1].lose = 1
                assert log.append(b"", b"%d" % number) == number

        await blocking(cluster, work)
        assert bodies(cluster) == [b"%d" % number for number in range(5)]
        assert not the_log(cluster).sessions.by_id, "closing ends the session"

        def twice(yard: SyncYard, log: SyncLog) -> None:
            cluster.nodes[1].lose = 1
            assert log.append(b"", b"x") == 6

        await blocking(cluster, twice, exactly_once=False)
        assert bodies(cluster)[5:] == [b"x", b"x"], "at-least-once"


async def test_blocking_threads_share_a_session_and_its_window() -> None:
    async with fake_cluster() as cluster:
        cluster.create("log", [1], 1)

        def work(yard: SyncYard, log: SyncLog) -> None:
            found: list[int] = []

            def one(number: int) -> None:
                found.extend(log.append(b"", b"%d.%d" % (number, at)) for at in range(10))

            threads = [threading.Thread(target=one, args=(number,)) for number in range(12)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert sorted(found) == list(range(120))

        await blocking(cluster, work)
        assert len(set(bodies(cluster))) == 120


async def test_blocking_sessions_that_end() -> None:
    async with fake_cluster() as cluster:
        cluster.create("log", [1], 1)
        sessions = the_log(cluster).sessions

        def end() -> None:
            for session in list(sessions.by_id):
                sessions.expire(session)

        def work(yard: SyncYard, log: SyncLog) -> None:
            for number in range(3):
                assert log.append(b"", b"%d" % number) == number
                end()
            assert log.append(b"", b"3") == 3
            session = yard._sessions["log", "log"]
            assert session._numbers is not None
            session._numbers.last += 10 * WINDOW
            assert log.append(b"", b"4") == 4 and len(sessions.by_id) == 1
            system = cluster.nodes[1]
            apply = system._apply

            def applied_and_ended(log: FakeLog, frame: memoryview) -> bytes:
                reply = apply(log, frame)
                end()
                return reply

            system.lose = 1
            system._apply = applied_and_ended  # type: ignore[method-assign]
            with pytest.raises(errors.SessionExpired):
                log.append(b"", b"who knows")
            system._apply = apply  # type: ignore[method-assign]
            assert log.append(b"", b"6") == 6

        await blocking(cluster, work)


async def test_blocking_reply_modes() -> None:
    async with fake_cluster() as cluster:
        cluster.create("log", [1, 2, 3], 1)

        def work(yard: SyncYard, log: SyncLog) -> None:
            assert log.append(b"", b"a", reply="append") == Place(1, 1)
            assert log.append(b"", b"b", reply="none") == -1
            assert log.append(b"", b"c", priority="low", reply_from=2) in (1, 2)
            assert log.wait_applied(3, node=3) == 3
            assert log.query(b"xyz") == b"zyx"
            with pytest.raises(errors.BadRequest):
                log.append(b"", b"", reply="sometimes")  # type: ignore[call-overload]

        await blocking(cluster, work)
        assert sorted(bodies(cluster)) == [b"a", b"b", b"c"]


async def test_a_blocking_client_that_was_idle_takes_another_session_before_it_sends_anything() -> None:
    """Nothing is under way in the old one, so nothing can be applied twice; in it a lost answer could not be told from
    a session that had ended by itself."""
    ahead = 0.0
    real = time.monotonic

    async with fake_cluster(1) as cluster:
        log, system = cluster.create("log", [1], 1), cluster.nodes[1]

        def blocking() -> None:
            nonlocal ahead
            with connect_sync(seeds(cluster), session_ttl=20, timeout=500) as yard:
                assert yard.log("log").append(b"a") == 0
                (first,) = log.sessions.by_id
                assert yard.log("log").append(b"b") == 1 and list(log.sessions.by_id) == [first]
                ahead += 30
                for session in list(log.sessions.by_id):
                    log.sessions.expire(session)
                system.lose = 1
                assert yard.log("log").append(b"c") == 2, "an answer that is lost is given again"
                (second,) = log.sessions.by_id
                assert second != first
                ahead += 10
                assert yard.log("log").append(b"d") == 3 and list(log.sessions.by_id) == [second]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sync_session, "monotonic", lambda: real() + ahead)
            await trio.to_thread.run_sync(blocking)
    assert [head for head, _ in log.records] == [b"a", b"b", b"c", b"d"]


async def seen(condition: Callable[[], bool]) -> None:
    with trio.fail_after(20):
        while not condition():
            await trio.sleep(0.01)


async def test_a_session_that_nobody_could_close_is_closed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    # The client's heartbeats cover all of its sessions: one that it forgot would hold what it holds for ever.
    monkeypatch.setattr(session_keeper, "OPEN_S", 0.2)
    async with fake_cluster() as cluster, connect(seeds(cluster)) as yard:
        cluster.create("log", [1, 2, 3], 1)
        session = await yard.open_session("log")
        assert cluster.sessions == {session.id}
        the_log(cluster).leader = 0
        with pytest.raises(errors.NotLeader):
            await session.close()
        the_log(cluster).leader = 2
        await seen(lambda: not cluster.sessions)


async def test_a_session_whose_beginning_nobody_waited_for_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fake_cluster() as cluster, connect(seeds(cluster)) as yard:
        cluster.create("log", [1, 2, 3], 1)
        begun, run = trio.Event(), yard.run

        async def slow(call: Any, timeout: float | None = None, pushed: Any = None) -> Any:
            found = await run(call, timeout, pushed)
            if cluster.sessions and not begun.is_set():
                begun.set()
                await trio.sleep_forever()
            return found

        monkeypatch.setattr(type(yard), "run", lambda self, *arguments: slow(*arguments))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(yard.open_session, "log")
            await begun.wait()
            nursery.cancel_scope.cancel()
        assert not cluster.sessions and not yard.sessions.held


async def test_a_session_that_begins_as_its_client_is_closed_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would listen for it, and who waits for what it is sent would wait for ever."""
    async with fake_cluster(1) as cluster, connect(seeds(cluster)) as yard:
        cluster.create("log", [1], 1)
        run = yard.run

        async def last(*arguments: Any) -> Any:
            found = await run(*arguments)
            yard.close()
            return found

        monkeypatch.setattr(type(yard), "run", lambda self, *arguments: last(*arguments))
        with pytest.raises(errors.LogyardError, match="closed"):
            await yard.open_session("log")
        assert not yard.sessions.held


async def test_heartbeats_name_only_the_sessions_of_callers_that_are_open() -> None:
    # One that its client forgot, because nobody could close it, must end by itself although the client lives.
    async with fake_cluster(1) as cluster, connect(seeds(cluster), session_ttl=0.6) as yard:
        cluster.create("log", [1], 1)
        kept, left = await yard.open_session("log"), await yard.open_session("log")
        await seen(lambda: {(1, kept.id), (1, left.id)} <= {*cluster.heartbeats})
        await left.close()
        cluster.heartbeats.clear()
        await seen(lambda: len(cluster.heartbeats) > 3)
        assert {*cluster.heartbeats} == {(1, kept.id)}


async def test_what_is_no_bytes_takes_no_number_and_ends_nobody() -> None:
    async with fake_cluster(1) as cluster, connect(seeds(cluster)) as yard:
        cluster.create("log", [1], 1)
        session: Any = await yard.open_session("log")
        for text in ("short", "x" * 5000):
            for what, arguments in (
                ("a command", {"command": text}),
                ("metadata", {"command": b"", "metadata": text}),
                ("a payload", {"command": b"", "payload": text}),
            ):
                with pytest.raises(errors.BadRequest, match=f"{what} is bytes, not str"):
                    await session.command(**arguments)
        numbers = memoryview(array("I", range(2000)))
        assert await session.command(APPEND_COMMAND, numbers, metadata=numbers[:2])
        assert the_log(cluster).records == [(bytes(numbers[:2]), bytes(numbers))]
        with trio.fail_after(10):
            for _ in range(2 * WINDOW):
                await session.command(APPEND_COMMAND)


async def test_a_cancelled_client_asks_nobody_to_close_its_sessions() -> None:
    async with fake_cluster() as cluster:
        cluster.create("log", [1, 2, 3], 1)
        opened = trio.Event()

        async def work() -> None:
            async with connect(seeds(cluster)) as yard:
                session = await yard.open_session("log")
                the_log(cluster).leader = 0
                opened.set()
                try:
                    await trio.sleep_forever()
                finally:
                    with trio.CancelScope(shield=True), pytest.raises(errors.LogyardError, match="closed"):
                        await trio.testing.wait_all_tasks_blocked()
                        await session.close()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(work)
            await opened.wait()
            nursery.cancel_scope.cancel()


def test_who_is_told_the_leader_asks_it_at_once_and_waits_when_told_again() -> None:
    retry = Retry(100.0, random.Random(1), False)
    assert retry.after(NotLeader(2), False, 0.0) == 0.0
    assert retry.after(NotLeader(2), False, 0.0) > 0.0
    assert Retry(100.0, random.Random(1), False).after(NotLeader(0), False, 0.0) > 0.0
