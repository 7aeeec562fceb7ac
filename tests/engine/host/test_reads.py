"""Reads: linearizable ones, long polls, bounds, positions; leadership and membership as clients see them."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
import trio.testing

from logyard.payloads.reference import Position
from logyard.protocol.errors import BadRequest, Gone, LogyardError, NotLeader, OutOfRange, Refused

from .cluster import KIB, cluster, plain, until


async def test_a_deposed_leader_never_answers_a_linearizable_read(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await c.lead(1)
        await c.append(1, [(b"", b"old")])
        assert (await c.nodes[1].bounds("log", "linearizable"))["end"] == 1
        c.partition(1)
        answers: list[object] = []

        async def ask() -> None:
            try:
                answers.append(await c.nodes[1].bounds("log", "linearizable"))
            except LogyardError as error:
                answers.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            new = await c.leader(among=[2, 3])
            await c.append(new, [(b"", b"new")])
        assert isinstance(answers[0], NotLeader)
        c.network.heal()
        await c.applied()
        assert (await c.nodes[await c.leader()].bounds("log", "linearizable"))["end"] == 2
        follower = next(number for number in c.ids if not c.leads(number))
        with pytest.raises(NotLeader) as caught:
            await c.nodes[follower].bounds("log", "linearizable")
        assert caught.value.leader == await c.leader()
        with pytest.raises(BadRequest):
            await c.nodes[1].bounds("log", "somehow")


async def test_a_read_sees_every_write_acknowledged_before_it(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        leader = await c.leader()
        for count in range(1, 30):
            await c.append(leader, [(b"", b"x")])
            bounds = await c.nodes[leader].bounds("log", "linearizable")
            assert bounds["end"] >= count


async def test_leadership_moves_where_it_is_told(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        for target in (2, 3, 1, 2):
            await c.lead(target)
            await c.append(target, [(b"", b"x")])
        with pytest.raises(Refused):
            await c.nodes[2].transfer("log", 9)
        with pytest.raises(NotLeader):
            await c.nodes[1].transfer("log", 3)
        assert c.log(2).end == 4


async def test_members_come_and_go(tmp_path: Path) -> None:
    async with cluster(tmp_path, 4, group="") as c:
        await until(lambda: all(len(c.system(number).live) == 4 for number in c.ids))
        await c.create("log", [1, 2, 3])
        await c.lead(1)
        await c.fill(1, 3, 100)
        node = c.nodes[1]
        with pytest.raises(BadRequest):
            await node.change_members("log", "add", 9)
        assert (await node.change_members("log", "add_learner", 4))["learners"] == [4]
        await c.applied()
        assert len(await c.read(4)) == 3
        await until(lambda: c.member(1).raft.progress[4].match == c.member(1).raft.log.last_index)
        assert (await node.change_members("log", "promote", 4))["voters"] == [1, 2, 3, 4]
        assert (await node.change_members("log", "remove", 3))["voters"] == [1, 2, 4]
        with pytest.raises(Refused):
            await node.change_members("log", "remove", 3)
        with pytest.raises(BadRequest):
            await node.change_members("log", "evict", 3)
        for number in (1, 2, 4):
            await c.restart(number)
        leader = await c.leader(among=[1, 2, 4])
        await c.append(leader, [(b"", b"after")])
        await c.applied(among=[1, 2, 4])
        assert all(c.member(number).raft.configuration.voters == (1, 2, 4) for number in (1, 2, 4))


async def test_a_long_poll_ends_with_a_record_or_in_time(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        leader = await c.leader()
        await c.append(leader, [(b"", b"first")])
        await c.applied()
        follower = next(number for number in c.ids if number != leader)
        got: list[tuple[int, int]] = []

        async def poll(number: int) -> None:
            header, blocks = await c.nodes[number].poll("log", 1, 10, 1000, 10.0, True, "local")
            got.append((number, header["end"]))
            assert blocks

        async with trio.open_nursery() as nursery:
            for number in (leader, follower):
                nursery.start_soon(poll, number)
            await trio.testing.wait_all_tasks_blocked(0.002)
            assert not got
            with trio.fail_after(5):
                await c.append(leader, [(b"", b"second")])
        assert sorted(got) == sorted([(leader, 2), (follower, 2)])
        header, blocks = await c.nodes[leader].poll("log", 2, 10, 1000, 0.01, True, "local")
        assert header["end"] == 2 and not blocks
        assert c.member(leader).waiters is None, "nobody is left waiting"


async def test_a_long_poll_ends_when_its_group_does(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1) as c, trio.open_nursery() as nursery:

        async def poll() -> None:
            with pytest.raises(LogyardError) as caught:
                await c.nodes[1].poll("log", 0, 10, 1000, 10.0, True, "local")
            assert caught.value.code == "group_stopped"

        nursery.start_soon(poll)
        await trio.testing.wait_all_tasks_blocked(0.002)
        with trio.fail_after(5):
            await c.nodes[1].delete_group("log")


async def test_polls_keep_their_bounds(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1) as c:
        node = c.nodes[1]
        with pytest.raises(OutOfRange):
            await node.poll("log", 1, 10, 1000, 0.0, True, "local")
        await c.append(1, [(b"h%d" % at, b"b" * at) for at in range(10)])
        await c.append(1, [(b"", b"L" * 30 * KIB), (b"", b"M" * 30 * KIB), (b"", None)])
        for offset in range(14):
            for limit in (1, 3, 100):
                page = await c.page(1, offset, limit) if offset < 13 else None
                if page is not None:
                    assert [record.offset for record in page] == list(range(offset, min(13, offset + limit, page.next)))
                    assert len(page) >= 1
        _, blocks = await node.poll("log", 10, 100, 1, 0.0, True, "local")
        assert sum(map(len, blocks)) < 31 * KIB, "a record above the limit comes alone"
        _, blocks = await node.poll("log", 0, 100, 1 << 20, 0.0, False, "local")
        assert sum(map(len, blocks)) < 1 * KIB, "no bodies were asked for"
        await node.truncate("log", 4)
        with pytest.raises(OutOfRange) as caught:
            await node.poll("log", 3, 1, 1, 0.0, True, "local")
        assert caught.value.details == {"start": 4, "end": 13}
        with pytest.raises(OutOfRange):
            await node.poll("log", 14, 1, 1, 0.0, True, "local")
        assert (await node.poll("log", 13, 1, 1, 0.0, True, "local"))[1] == []
        for bad in ((5, 0, 6), (5, 3, 2), (10, -1, 2), (12, 0, 1)):
            with pytest.raises(OutOfRange):
                await node.read_body("log", bad[0], bad[1], bad[2])
        assert plain((await node.read_body("log", 10, 30 * KIB - 2, None))[1]) == b"LL"
        assert plain((await node.read_body("log", 12, 0, None))[1]) == b""


async def test_truncations_in_the_middle_of_an_entry_at_the_end_and_beyond(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1) as c:
        await c.append(1, [(b"", b"a")] * 3)
        first = c.member(1).raft.applied
        await c.append(1, [(b"", b"b")] * 2)
        assert await c.nodes[1].truncate("log", 2) == 2
        assert c.log(1).start_position == Position(first, 2)
        assert await c.read(1, 2) == [(b"", b"a"), (b"", b"b"), (b"", b"b")]
        assert await c.nodes[1].truncate("log", 5) == 5
        assert await c.nodes[1].truncate("log", 5) == 5
        await c.append(1, [(b"", b"c")])
        assert await c.read(1, 5) == [(b"", b"c")]
        with pytest.raises(LogyardError) as caught:
            await c.nodes[1].truncate("log", 99)
        assert caught.value.code == "out_of_range"
        assert await c.nodes[1].truncate("log", 1) == 5, "what is gone stays gone"
        assert not isinstance(caught.value, Gone)


async def test_truncations_and_appends_at_once_never_lose_a_kept_record(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        leader = await c.leader()
        node = c.nodes[leader]

        async def writer() -> None:
            for number in range(60):
                await c.append(leader, [(b"", b"%d" % number)] * 3)

        async def truncator() -> None:
            for before in range(0, 90, 7):
                await until(lambda before=before: c.log(leader).end > before)
                assert await node.truncate("log", before) == before

        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer)
            nursery.start_soon(truncator)
        await c.applied()
        for number in c.ids:
            start = c.log(number).start
            found = await c.read(number, start)
            assert [body for _, body in found] == [b"%d" % (at // 3) for at in range(start, 180)]


async def test_a_read_that_is_refused_leaves_nothing_behind(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await c.lead(1)
        for _ in range(3):
            with pytest.raises(NotLeader):
                await c.system(2).replicas.leadership.read_index(c.member(2))
        assert not c.member(2).reads
