"""What users of a log ask beside appends and reads, over real sockets and engines: limits, producers, time, followers,
and a place of one's own."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from logyard.client import errors
from logyard.client.aio import Yard, connect
from logyard.client.sync import connect_sync
from logyard.client.tail import Cursor, SqliteCursor
from tests.engine.host.cluster import Cluster, until
from tests.engine.host.test_effects import Clocks

from ..test_exactly_once import Doors, served


@asynccontextmanager
async def yard_of(path: Path, count: int = 3) -> AsyncIterator[tuple[Cluster, Doors, Yard]]:
    async with served(path, count) as (run, doors), connect(list(doors.addresses.values())) as yard:
        yield run, doors, yard


def version(run: Cluster, number: int) -> int:
    return run.member(number).version


async def test_a_log_stays_what_it_was_until_somebody_asks_for_more(tmp_path: Path) -> None:
    async with yard_of(tmp_path) as (run, _, yard):
        log = yard.log("log")
        await log.append(b"", b"x")
        for number in run.ids:
            run.system(number).replicas.versions.look()
        await log.append(b"", b"x")
        await run.applied()
        assert [version(run, number) for number in run.ids] == [1, 1, 1]
        last = run.member(1).raft.log.last_index
        assert await log.retain(records=100) == 0
        await run.applied()
        assert [version(run, number) for number in run.ids] == [2, 2, 2]
        assert run.member(1).raft.log.last_index == last + 2, "the new version, and what was asked of it"
        assert await log.retain(records=100) == 0
        assert run.member(1).raft.log.last_index <= last + 3


async def test_a_node_that_knows_no_limits_keeps_the_others_from_using_them(tmp_path: Path) -> None:
    async with yard_of(tmp_path) as (run, _, yard):
        leader = await run.leader()
        versions = run.system(leader).replicas.versions
        await until(lambda: len(versions.nodes) == 2, "all have said what they know")
        for number in versions.nodes:
            versions.nodes[number] = {"log": 1}
        with pytest.raises(errors.Refused, match="version 2"):
            await yard.log("log").retain(records=5)
        with pytest.raises(errors.Refused):
            await yard.log("log").producer("p")
        with pytest.raises(errors.Refused, match="version 3"):
            await yard.log("log").epoch("p", 1, 0)
        assert version(run, leader) == 1


async def test_records_go_with_time_also_from_an_idle_log(tmp_path: Path) -> None:
    async with yard_of(tmp_path) as (run, _, yard):
        clocks = Clocks(run)
        log = yard.log("log")
        await log.retain(age=600)
        for _ in range(30):
            await log.append(b"", b"x" * 1000)
            clocks.move(60)
        start = (await log.latest()).start
        assert 30 - 10 - 4 <= start <= 20
        clocks.move(1200)
        await until(lambda: all(run.log(number).start == 30 for number in run.ids), "all of it went")
        assert (await log.latest()) == (30, 30)
        assert await log.append(b"", b"y") == 30
        await run.applied()
        for number in run.ids:
            assert (
                run.system(number).transfers.snapshots.compare(run.member(number), run.member(number).raft.applied) == 0
            )
            assert (await run.read(number, 30)) == [(b"", b"y")]


async def test_limits_outlive_a_restart_and_a_snapshot(tmp_path: Path) -> None:
    async with yard_of(tmp_path) as (run, doors, yard):
        log = yard.log("log")
        await log.retain(records=10)
        for _ in range(30):
            await log.append(b"", b"x")
        await run.applied()
        await yard.snapshot(["log"])
        before = run.log(1).snapshot()
        for number in run.ids:
            await doors.crash(number)
        for number in run.ids:
            await doors.start(number)
        await run.leader()
        assert run.log(1).snapshot() == before and version(run, 1) == 2
        for _ in range(30):
            await log.append(b"", b"x")
        bounds = await log.latest()
        assert 10 <= bounds.end - bounds.start <= 12


async def test_a_producer_that_starts_anew_appends_nothing_twice(tmp_path: Path) -> None:
    async with served(tmp_path) as (run, doors):
        seeds = list(doors.addresses.values())
        for life in range(3):
            async with connect(seeds) as yard:
                producer = await yard.log("log").producer("importer")
                assert producer.last == (0 if not life else 20 * life)
                # It does not remember how far it was: what it sends again is there.
                for line in range(max(1, 20 * life - 7), 20 * life + 21):
                    offsets = await producer.append_many([(b"%d" % line, b"a"), (b"", b"b" * 5000)], sequence=line)
                    assert offsets == range(2 * line - 2, 2 * line)
            await doors.crash(1 + life)
            await doors.start(1 + life)

        def blocking() -> None:
            with connect_sync(seeds) as yard:
                producer = yard.log("log").producer("importer")
                assert producer.last == 60 and producer.append(b"x", b"", sequence=60) == range(118, 120)

        await trio.to_thread.run_sync(blocking)
        leader = await run.leader()
        records = await run.read(leader)
        assert len(records) == 120 and [head for head, _ in records[::2]] == [b"%d" % line for line in range(1, 61)]
        await run.applied()
        assert run.system(leader).transfers.snapshots.compare(run.member(leader), run.member(leader).raft.applied) == 0


def code_of(found: pytest.ExceptionInfo[errors.LogyardError]) -> str:
    return found.value.code


async def test_a_batch_that_is_written_again_is_there_once_and_its_writers_of_before_are_fenced(tmp_path: Path) -> None:
    """Two tasks a batch, payloads of all ways to travel, the leader killed between the two times."""
    async with served(tmp_path) as (run, doors):
        seeds = list(doors.addresses.values())
        large = bytes(range(256)) * 6000
        first: dict[tuple[int, int], range] = {}
        async with connect(seeds) as old:
            for life in range(2):
                async with connect(seeds) as yard:
                    log = yard.log("log")
                    for lane in range(2):
                        writer = await log.epoch("sink", 1000, 0, lane)
                        for number, payload in enumerate((b"", b"b" * 5000, large, None), 1):
                            offsets = await writer.append_many([(b"%d %d" % (lane, number), payload)])
                            assert offsets == first.setdefault((lane, number), offsets) and len(offsets) == 1
                    with pytest.raises(errors.LogyardError) as refused:
                        await (await log.epoch("sink", 1000, 0)).append(b"something else", b"")
                    assert code_of(refused) == "sequence_differs" and "offset 0" in str(refused.value)
                    with pytest.raises(errors.LogyardError) as refused:
                        await writer.append(b"x", number=6)
                    assert code_of(refused) == "sequence_gap"
                    assert await log.epoch_state("sink") == (1000, 0, True)
                if not life:
                    late = await old.log("log").epoch("sink", 1000, 0, 1)
                    leader = await run.leader()
                    await doors.crash(leader)
                    await doors.start(leader)
            await old.log("log").close_epoch("sink", 1000, 0)
            for _ in range(2):
                with pytest.raises(errors.LogyardError) as refused:
                    await late.append(b"late", number=5)
                assert code_of(refused) == "fenced"
                with pytest.raises(errors.LogyardError) as refused:
                    await old.log("log").epoch("sink", 1000, 0)
                assert code_of(refused) == "fenced"
            assert await old.log("log").epoch_state("sink") == (1000, 0, False)
            assert await (await old.log("log").epoch("sink", 1000, 1)).append(b"next") == range(8, 9)

        def blocking() -> None:
            with connect_sync(seeds) as yard:
                log = yard.log("log")
                writer = log.epoch("sink", 1000, 1)
                assert writer.append(b"next") == range(8, 9) and writer.append(b"more") == range(9, 10)
                log.close_epoch("sink", 1000, 1)
                assert log.epoch_state("sink") == (1000, 1, False) and log.epoch_state("other") is None

        await trio.to_thread.run_sync(blocking)
        async with connect(seeds) as yard:
            records = [record async for record in yard.log("log").records()]
        assert [record.metadata for record in records[:4]] == [b"0 1", b"0 2", b"0 3", b"0 4"] and len(records) == 10
        assert records[2].payload == records[6].payload == large
        await run.applied()
        for number in run.ids:
            assert (
                run.system(number).transfers.snapshots.compare(run.member(number), run.member(number).raft.applied) == 0
            )


@pytest.mark.parametrize(
    "asked",
    [("p", 0, 0, 0), ("p", 1, -1, 0), ("p", 1, 0, -1), ("p", 1, 0, 1 << 32), (0, 1, 0, 0), ("p", 1 << 63, 0, 0)],
)
async def test_an_epoch_is_of_numbers_in_their_bounds(tmp_path: Path, asked: tuple[int | str, int, int, int]) -> None:
    async with yard_of(tmp_path, 1) as (_, _, yard):
        with pytest.raises(errors.BadRequest):
            await yard.log("log").epoch(*asked)


async def test_polls_by_time(tmp_path: Path) -> None:
    async with yard_of(tmp_path, 1) as (run, doors, yard):
        clocks = Clocks(run)
        log = yard.log("log")
        for _ in range(5):
            await log.append_many([(b"", b"1"), (b"", b"2")])
            clocks.move(10)
        stamps = [record.timestamp async for record in log.records()]
        page = await log.poll(0, since=stamps[4], max_records=3)
        assert [record.offset for record in page] == [4, 5, 6] and (page.asked, page.next) == (4, 7)
        assert await log.seek(stamps[4] + 1) == 6 and await log.seek(0) == 0 and await log.seek(stamps[-1] + 1) == 10
        assert len(await log.poll(0, since=stamps[-1] + 1)) == 0
        await log.truncate(5)
        assert (await log.poll(0, since=0)).asked == 5
        seeds = list(doors.addresses.values())

        def blocking() -> None:
            with connect_sync(seeds) as other:
                assert [one.offset for one in other.log("log").poll(0, since=stamps[8])] == [8, 9]
                assert other.log("log").seek(stamps[8], node=1) == 8

        await trio.to_thread.run_sync(blocking)


@pytest.mark.long
async def test_followers_answer_within_a_bound(tmp_path: Path) -> None:
    async with yard_of(tmp_path) as (run, _, yard):
        log = yard.log("log")
        leader = await run.leader()
        follower = next(node for node in run.ids if node != leader)
        for number in range(10):
            await log.append(b"", b"x")
            page = await log.poll(0, node=follower, staleness=0)
            assert len(page) == number + 1 and page.node == follower
            assert (await log.latest(node=follower, staleness=0)).end == number + 1
        assert await log.query(b"\x91\xa6bounds", node=follower, staleness=5) == b"\x92\x00\x0a"
        asked = [(await log.poll(0, staleness=5)).node for _ in range(60)]
        assert set(asked) == {1, 2, 3}, "any member answers where none is named"
        run.partition(follower)
        await log.append(b"", b"x")
        assert len(await log.poll(0, staleness=0)) == 11, "one that can't tell is passed over"
        assert len(await log.poll(0, node=follower, staleness=3600)) == 10
        with pytest.raises(errors.Busy):
            await log.poll(0, node=follower, staleness=0, timeout=2.5)
        run.network.heal()
        assert len(await log.poll(0, node=follower, staleness=0)) == 11
        for bad in ({"staleness": -1.0}, {"consistency": "bounded"}, {"consistency": "leader", "staleness": 1.0}):
            with pytest.raises(errors.BadRequest):
                await log.poll(0, **bad)


async def test_a_tail_goes_on_where_its_cursor_is_through_changes_of_the_leader(tmp_path: Path) -> None:
    async with yard_of(tmp_path) as (run, doors, yard):
        log = yard.log("log")
        found: list[bytes] = []
        cursor: Cursor | None = None

        async def writer() -> None:
            for number in range(200):
                await log.append(b"%d" % number, b"x" * (70_000 if number % 50 == 0 else 5))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer)
            while len(found) < 200:
                async for batch in log.tail(cursor, max_records=30):
                    found += (record.metadata for record in batch.records)
                    cursor = batch.cursor
                    if len(found) > 60 and doors.addresses and 1 in run.nodes and run.leads(1):
                        await doors.crash(1)
                        await doors.start(1)
                    break
        assert found == [b"%d" % number for number in range(200)] and cursor is not None and cursor.offset == 200
        assert [batch async for batch in log.tail(cursor, follow=False)] == []
        rest = [record.offset async for batch in log.tail(follow=False) for record in batch.records]
        assert rest == list(range(200))


async def test_a_cursor_is_of_one_log_and_no_other_of_its_name(tmp_path: Path) -> None:
    async with yard_of(tmp_path, 1) as (_, _, yard):
        log = yard.log("log")
        await log.append(b"old")
        (batch,) = [batch async for batch in log.tail(follow=False)]
        await log.append(b"older")
        await log.truncate(2)
        with pytest.raises(errors.OutOfRange):
            [_ async for _ in log.tail(batch.cursor, follow=False)]
        await yard.delete("log")
        await yard.create("log", members=[1])
        for number in range(3):
            await log.append(b"%d" % number)
        with pytest.raises(errors.UnknownGroup):
            [_ async for _ in log.tail(batch.cursor, follow=False, timeout=1.0)]


def test_a_cursor_in_sqlite_moves_with_its_transaction(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "db") as db, sqlite3.connect(tmp_path / "db") as other:
        cursor = SqliteCursor(db, "orders")
        assert cursor.load() is None
        cursor.move(Cursor((1 << 64) - 1, 5))
        db.rollback()
        assert cursor.load() is None
        cursor.move(Cursor((1 << 64) - 1, 5))
        db.commit()
        rival = SqliteCursor(other, "orders")
        assert rival.load() == Cursor((1 << 64) - 1, 5)
        cursor.move(Cursor((1 << 64) - 1, 7))
        db.commit()
        with pytest.raises(errors.Refused):
            rival.move(Cursor((1 << 64) - 1, 6))
        other.rollback()
        late = SqliteCursor(other, "payments")
        assert late.load() is None and rival.load() == Cursor((1 << 64) - 1, 7)
        with pytest.raises(ValueError, match="name of a table"):
            SqliteCursor(db, "x", table="a; drop")


async def test_large_payloads_go_with_the_limits_and_leave_nothing(tmp_path: Path) -> None:
    async with yard_of(tmp_path) as (run, _, yard):
        log = yard.log("log")
        await log.retain(bytes=6 << 20)
        body = bytes(range(256)) * 8192
        for number in range(9):
            await log.append(b"%d" % number, body)
            await log.append(b"small", b"x")
        await run.applied()
        bounds = await log.latest()
        # Of 2 MiB each: what is kept is three or four of them.
        assert 6 <= bounds.end - bounds.start <= 9
        first = next(number for number in range(9) if 2 * number >= bounds.start)
        assert (await log.read(2 * first)).payload == body
        for number in run.ids:
            member = run.member(number)
            assert run.system(number).transfers.snapshots.compare(member, member.raft.applied) == 0
            freed = await run.nodes[number].compact()
            live = freed["live_bytes_in_wal"] + freed["live_bytes_in_generations"]
            assert 6 << 20 <= live <= (8 << 20) + 200_000, live
            assert next(iter(await log.poll(bounds.start, node=number))).offset == bounds.start
