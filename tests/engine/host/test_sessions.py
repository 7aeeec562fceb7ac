"""Sessions: a frame is applied once, however often it is sent, to whomever, and its reply is the same each time."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from logyard.machines.log import AppendLog
from logyard.machines.log.command import APPEND, APPEND_REPLY
from logyard.protocol.errors import BadRequest, Busy, LogyardError, NotLeader, SessionExpired, Unknown
from logyard.protocol.frame import encode_frame
from logyard.protocol.pending import PendingReply
from logyard.service.check.run import check_directory

from .cluster import Cluster, cluster, payload_books, until

CLIENT = 77
SESSION = 4242
TTL = 60_000


def frame(body: bytes, session: int = SESSION, sequence: int = 1, records: int = 1) -> memoryview:
    many = [(b"m", body)] * records
    return memoryview(b"".join(encode_frame(many, command=APPEND, session=session, sequence=sequence)))


async def send(run: Cluster, number: int, sent: memoryview, name: str = "log") -> range:
    """A frame to a leader; the offsets of its records."""
    reply = await send_raw(run, number, sent, name)
    first, count = APPEND_REPLY.unpack(reply)
    return range(first, first + count)


async def resend(run: Cluster, sent: memoryview, number: int) -> range:
    return await send(run, number, sent)


async def send_raw(run: Cluster, number: int, sent: memoryview, name: str = "log") -> bytes:
    answer: PendingReply[bytes] = PendingReply()
    system = run.system(number)
    system.replicas.commands.submit(run.member(number, name).uid, sent, answer, 1)
    with trio.fail_after(20):
        return await answer.wait(trio.Event)


async def insist(run: Cluster, work: Callable[[int], Awaitable[Any]]) -> Any:
    """As a client does: again, elsewhere, until there is an answer."""
    while True:
        leader = await run.leader()
        try:
            return await work(leader)
        except (NotLeader, Unknown, Busy):
            await trio.sleep(0.002)


# The rule itself


async def test_the_same_frame_twice_to_one_leader(tmp_path: Path) -> None:
    async with cluster(tmp_path) as run:
        leader = await run.leader()
        await run.nodes[leader].open_session("log", SESSION, CLIENT, TTL)
        assert await send(run, leader, frame(b"a" * 9000)) == range(1)
        last = run.member(leader).raft.log.last_index
        for _ in range(3):
            assert await send(run, leader, frame(b"a" * 9000)) == range(1)
        assert run.member(leader).raft.log.last_index == last, "a duplicate of what is applied is not proposed"
        assert await send(run, leader, frame(b"b", sequence=2, records=3)) == range(1, 4)
        await run.applied()
        for number in run.ids:
            assert run.log(number).end == 4
            sessions = run.member(number).sessions
            assert sessions is not None and sessions.by_id[SESSION].highest == 2


async def test_a_duplicate_to_the_next_leader(tmp_path: Path) -> None:
    async with cluster(tmp_path) as run:
        leader = await run.leader()
        await run.nodes[leader].open_session("log", SESSION, CLIENT, TTL)
        assert await send(run, leader, frame(b"once")) == range(1)
        await run.crash(leader)
        assert await insist(run, lambda number: send(run, number, frame(b"once"))) == range(1)
        assert await insist(run, lambda number: send(run, number, frame(b"two", sequence=2))) == range(1, 2)
        await run.start(leader)
        await run.applied()
        assert await run.read(leader) == [(b"m", b"once"), (b"m", b"two")]


async def test_a_new_leader_holds_frames_back_until_it_knows_what_was_applied(tmp_path: Path) -> None:
    """The entry that holds the first copy is in the new leader's log, not committed: a second one must wait for it."""
    async with cluster(tmp_path) as run:
        leader = await run.leader()
        await run.nodes[leader].open_session("log", SESSION, CLIENT, TTL)
        await run.applied()
        others = [number for number in run.ids if number != leader]
        last = run.member(leader).raft.log.last_index
        # The old leader's entry reaches another one, and nobody hears that it is committed.
        answer: PendingReply[bytes] = PendingReply()
        run.system(leader).replicas.commands.submit(run.member(leader).uid, frame(b"first"), answer, 1)
        await until(lambda: any(run.member(number).raft.log.last_index > last for number in others), "it arrives")
        await run.crash(leader)
        assert await insist(run, lambda number: send(run, number, frame(b"first"))) == range(1)
        assert [run.log(number).end for number in others if run.leads(number)] == [1]


async def test_pitfall_37_cached_replies_survive_snapshot_restore_and_a_new_leader(tmp_path: Path) -> None:
    async with cluster(tmp_path) as run:
        leader = await run.leader()
        await run.nodes[leader].open_session("log", SESSION, CLIENT, TTL)
        offsets = [await send(run, leader, frame(b"%d" % n, sequence=n)) for n in range(1, 11)]
        await run.applied()
        for number in run.ids:
            await run.nodes[number].snapshot()
        for number in run.ids:
            await run.restart(number)
        for _ in range(3):
            leader = await run.leader()
            for n, offset in enumerate(offsets, 1):
                again = frame(b"%d" % n, sequence=n)
                assert await insist(run, partial(resend, run, again)) == offset
            await run.lead(leader % 3 + 1)
        assert run.log(await run.leader()).end == 10


async def test_a_laggard_gets_the_sessions_with_the_snapshot(tmp_path: Path) -> None:
    async with cluster(tmp_path, snapshot_entries=16) as run:
        leader = await run.leader()
        await run.nodes[leader].open_session("log", SESSION, CLIENT, TTL)
        away = next(number for number in run.ids if number != leader)
        await run.crash(away)
        for n in range(1, 41):
            await send(run, leader, frame(b"%d" % n, sequence=n))
        for number in run.nodes:
            await run.nodes[number].snapshot()
            await run.roll(number)
        await run.start(away)
        await run.applied()
        there, here = run.member(away).sessions, run.member(leader).sessions
        assert there is not None and here is not None and there.encode() == here.encode()


async def test_an_unknown_session_is_a_committed_refusal_that_leaves_nothing(tmp_path: Path) -> None:
    async with cluster(tmp_path) as run:
        leader = await run.leader()
        with pytest.raises(SessionExpired):
            await send(run, leader, frame(b"x" * 5000))
        await run.append(leader, [(b"", b"kept")])
        with pytest.raises(SessionExpired):
            await send(run, leader, frame(b"y" * 5000, session=9))
        await run.applied()
        for number in run.ids:
            assert run.log(number).end == 1 and not run.system(number).transfers.snapshots.mismatches
            await run.nodes[number].snapshot()
            assert not run.system(number).transfers.snapshots.mismatches
            assert await run.read(number) == [(b"", b"kept")]


async def test_copies_that_reach_the_log_leak_nothing_and_keep_offsets_right(tmp_path: Path) -> None:
    """The leader's memory is bypassed: what the rule at apply alone makes of duplicates."""
    async with cluster(tmp_path, machines=_machines) as run:
        leader = await run.leader()
        await run.nodes[leader].open_session("log", SESSION, CLIENT, TTL)
        await run.nodes[leader].open_session("log", SESSION + 1, CLIENT, TTL)
        member = run.member(leader)
        answers: list[PendingReply[bytes]] = [PendingReply() for _ in range(7)]
        sent = [
            frame(b"a" * 5000), frame(b"a" * 5000), frame(b"b" * 6000, sequence=2, records=2), frame(b"a" * 5000),
            frame(b"c" * 7000, session=SESSION + 1), frame(b"b" * 6000, sequence=2, records=2), frame(b"d", sequence=3),
        ]  # fmt: skip
        for one, answer in zip(sent, answers, strict=True):
            run.system(leader).replicas.commands.submit(member.uid, one, answer, 1)
        member.proposals.guarded = False
        replies = [APPEND_REPLY.unpack(await answer.wait(trio.Event)) for answer in answers]
        assert replies == [(0, 1), (0, 1), (1, 2), (0, 1), (3, 1), (1, 2), (4, 1)]
        await run.append(leader, [(b"m", b"e" * 4500)])
        await run.applied()
        want = [b"a" * 5000, b"b" * 6000, b"b" * 6000, b"c" * 7000, b"d", b"e" * 4500]
        for number in run.ids:
            assert [body for _, body in await run.read(number)] == want
            for offset, body in enumerate(want):
                assert [found for _, found in await run.read(number, offset, 1)] == [body]
            await run.nodes[number].snapshot()
            assert not run.system(number).transfers.snapshots.mismatches
        for number in run.ids:
            await run.restart(number)
        leader = await run.leader()
        await run.applied()
        for number in run.ids:
            assert [body for _, body in await run.read(number)] == want
        leader = await run.leader()
        assert await run.nodes[leader].truncate("log", 5) == 5
        assert run.log(leader).holes == [], "what was truncated is forgotten"
        await run.close()
        for number in run.ids:
            report = await trio.to_thread.run_sync(check_directory, tmp_path / f"node-{number}")
            assert not report["findings"], report


async def test_dead_copies_between_living_records_are_counted_once(tmp_path: Path) -> None:
    """Released before and after their file was sealed, across a restart, and then with everything around them."""
    async with cluster(tmp_path, 1) as run:
        await run.nodes[1].open_session("log", SESSION, CLIENT, TTL)

        async def copy(size: int) -> None:
            answer: PendingReply[bytes] = PendingReply()
            run.system(1).replicas.commands.submit(run.member(1).uid, frame(b"a" * size), answer, 1)
            run.member(1).proposals.guarded = False
            await answer.wait(trio.Event)

        def live() -> int:
            return sum(payload_books(run.system(1))["wal"].values())

        table = 3 * (8 + 2)
        await copy(5000)
        await copy(6000)
        await run.fill(1, 1, 7000)
        await run.roll(1)
        assert 12_000 <= live() <= 12_000 + table
        await copy(8000)
        await run.fill(1, 1, 9000)
        await run.roll(1)
        assert 21_000 <= live() <= 21_000 + 2 * table
        await run.restart(1)
        await run.leader()
        assert 21_000 <= live() <= 21_000 + 2 * table
        assert await run.nodes[1].truncate("log", 1) == 1
        assert 16_000 <= live() <= 16_000 + 2 * table
        assert [len(body or b"") for _, body in await run.read(1, 1)] == [7000, 9000]
        assert await run.nodes[1].truncate("log", 2) == 2
        assert 9000 <= live() <= 9000 + table
        assert await run.nodes[1].truncate("log", 3) == 3
        assert live() <= table
        await run.close()
        report = await trio.to_thread.run_sync(check_directory, tmp_path / "node-1")
        assert not report["findings"], report


def _machines(kind: str, arguments: dict[str, Any]) -> AppendLog:
    return AppendLog()


async def test_clients_make_no_frames_of_the_engine(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1) as run:
        raw = bytearray(frame(b"x"))
        raw[1] |= 2
        with pytest.raises(BadRequest):
            await send_raw(run, 1, memoryview(bytes(raw)))


# Ends


async def test_a_session_ends_only_by_its_clients_silence(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, tick_ms=5) as run:
        system = run.system(1)
        await run.nodes[1].open_session("log", SESSION, CLIENT, 10_000)
        await run.nodes[1].open_session("log", SESSION + 1, CLIENT + 1, 10_000)
        beats = system.replicas.heartbeats

        def sleep(seconds: float) -> None:
            """The clock moves on by itself only in the test's hand."""
            for _ in range(int(seconds)):
                beats.clock += 1.0
                beats.look()

        for _ in range(5):
            sleep(9)
            run.nodes[1].heartbeat(CLIENT)
            assert await send(run, 1, frame(b"z", session=SESSION + 1, sequence=1)) == range(1), "frames are life, too"
        table = run.member(1).sessions
        assert table is not None and len(table.by_id) == 2
        sleep(9)
        run.nodes[1].heartbeat(CLIENT)
        sleep(3)
        await until(lambda: set(table.by_id) == {SESSION}, "the silent one ends")
        with pytest.raises(SessionExpired):
            await send(run, 1, frame(b"q", session=SESSION + 1, sequence=2))
        sleep(12)
        await until(lambda: run.member(1).sessions is None, "then the other one")


async def test_a_new_leader_and_a_node_that_slept_give_the_whole_time_again(tmp_path: Path) -> None:
    async with cluster(tmp_path) as run:
        await run.lead(1)
        await run.nodes[1].open_session("log", SESSION, CLIENT, 10_000)
        await run.applied()
        for number in run.ids:
            run.system(number).replicas.heartbeats.clock += 1000.0
        await run.lead(2)
        beats = run.system(2).replicas.heartbeats
        assert run.member(2).lead_since >= 1000.0
        last = run.member(2).raft.log.last_index
        beats.look()
        assert run.member(2).proposals.own is None and run.member(2).raft.log.last_index == last
        # The process stood still for an hour: that is no silence of the client's.
        beats._looked -= 3600
        before = beats.clock
        beats.look()
        assert beats.clock - before <= 2.0 and run.member(2).proposals.own is None
        beats.clock += 11.0
        beats.look()
        await until(lambda: all(run.member(number).sessions is None for number in run.ids), "silence ends it")


async def test_a_session_sleeps_with_its_group_and_ends_when_its_client_is_silent(tmp_path: Path) -> None:
    async with cluster(tmp_path, hibernate_after_ms=30) as run:
        await run.lead(1)
        await run.nodes[1].open_session("log", SESSION, CLIENT, 10_000)
        beats = run.system(1).replicas.heartbeats

        def sleeps() -> bool:
            return all(run.system(number).names["log"] in run.system(number).quiescence.table for number in run.ids)

        for _ in range(3):
            before = beats.clock
            run.nodes[1].heartbeat(CLIENT)
            assert beats.last_seen[CLIENT] >= before
            await until(sleeps, "the group sleeps with its session")
            beats.clock += 4.0
        run.nodes[1].heartbeat(CLIENT)
        beats.clock += 4.0
        last = {number: run.system(number).quiescence.transitions.woken for number in run.ids}
        beats.look()
        run.system(1).quiescence.quiesce.look()
        assert {number: run.system(number).quiescence.transitions.woken for number in run.ids} == last, "it has time"
        beats.clock += 7.0
        run.system(1).quiescence.quiesce.look()
        # Nobody else led meanwhile: its time was over.
        await until(lambda: run.replica(1) is not None and not run.member(1).sessions, "it wakes, and the session ends")


async def test_sessions_are_limited_where_they_are_opened(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, sessions_max=2, session_ttl_ms_max=5000) as run:
        node = run.nodes[1]
        with pytest.raises(BadRequest) as refused:
            await node.open_session("log", 1, CLIENT, 6000)
        assert refused.value.details == {"ttl_ms_max": 5000}
        for session in (1, 2, 2):
            await node.open_session("log", session, CLIENT, 5000)
        with pytest.raises(Busy):
            await node.open_session("log", 3, CLIENT, 5000)
        with pytest.raises(LogyardError):
            await node.open_session("log", 2, CLIENT + 1, 5000)
        await node.close_session("log", 2)
        await node.close_session("log", 2)
        await node.open_session("log", 3, CLIENT, 5000)


async def test_a_random_history_with_crashed_leaders_appends_each_exactly_once(tmp_path: Path) -> None:
    draw = random.Random(20)
    async with cluster(tmp_path) as run:
        want: dict[int, list[bytes]] = {}

        async def client(number: int) -> None:
            session = 1000 + number
            await insist(run, lambda leader: run.nodes[leader].open_session("log", session, number, TTL))
            for sequence in range(1, 26):
                body = b"%d:%d" % (number, sequence)
                sent = frame(body, session, sequence)
                while True:
                    leader = await run.leader()
                    try:
                        # Impatience makes copies: the first one may still be under way.
                        with trio.move_on_after(draw.choice((0.001, 0.01, 1.0))):
                            await send(run, leader, sent)
                            want.setdefault(number, []).append(body)
                            break
                    except (NotLeader, Unknown, Busy, KeyError):
                        await trio.sleep(0.002)

        async with trio.open_nursery() as nursery:
            for number in range(1, 7):
                nursery.start_soon(client, number)
            for _ in range(4):
                await trio.sleep(draw.random() / 10)
                leader = await run.leader()
                await run.crash(leader)
                await run.leader()
                await run.start(leader)
        await run.applied()
        for node in run.ids:
            bodies = [body or b"" for _, body in await run.read(node)]
            assert len(bodies) == len(set(bodies)) == 6 * 25, "each of them, once"
            for number, sent_bodies in want.items():
                mine = [body for body in bodies if body.startswith(b"%d:" % number)]
                assert mine == sent_bodies, "in the order in which they were acknowledged"
