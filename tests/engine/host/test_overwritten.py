"""Entries of a deposed leader that were never committed are gone everywhere: log, replies, segments, homes, after
restarts."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from logyard.protocol.errors import LogyardError, Unknown

from .cluster import KIB, cluster, payload_books, payload_flush, until


@pytest.mark.parametrize(
    "sealed",
    ["in the open file", "in a segment", "offered to a generation", "moved as soon as may be", "moved out for sleep"],
)
async def test_uncommitted_entries_of_a_deposed_leader_disappear(tmp_path: Path, sealed: str) -> None:
    budget = 0 if sealed == "moved as soon as may be" else 1 << 30
    async with cluster(tmp_path, payload_cache_bytes=0, migrate_budget_bytes=budget) as c:
        await c.lead(1)
        before = await c.fill(1, 10, 20 * KIB, tag=b"old")
        await c.applied()
        c.partition(1)
        member = c.member(1)
        async with trio.open_nursery() as nursery:
            outcomes: list[str] = []

            async def append(number: int) -> None:
                try:
                    await c.append(1, [(b"doomed", b"%d" % number * 10 * KIB)])
                except LogyardError as error:
                    outcomes.append(error.code)

            for number in range(8):
                last = member.raft.log.last_index
                nursery.start_soon(append, number)
                await until(lambda last=last: member.raft.log.last_index > last or member.raft.role != 3)
            await until(lambda: member.raft.log.stable == member.raft.log.last_index)
            doomed_last = member.raft.log.last_index
            assert doomed_last > member.raft.commit
            if sealed != "in the open file":
                await c.roll(1)
                assert member.flushed == doomed_last
            if sealed == "offered to a generation":
                await c.nodes[1].compact()
                assert not c.system(1).store.homes(member.uid), "what is not committed does not move"
            if sealed == "moved as soon as may be":
                assert not c.system(1).storage.compactor.victims()
                assert not c.system(1).store.homes(member.uid)
            if sealed == "moved out for sleep":
                await payload_flush(c.system(1), 1 << 20).run([member])
                assert not c.system(1).store.homes(member.uid)
            new = await c.leader(among=[2, 3])
            after = await c.fill(new, 12, 20 * KIB, tag=b"new")
            c.network.heal()
            await c.applied()
        assert outcomes and set(outcomes) <= {"not_leader", "unknown"}
        for _ in range(2):
            for number in c.ids:
                assert [body for _, body in await c.read(number)] == [*before, *after], number
            assert all(run.last <= member.raft.log.last_index for run in member.segments)
            books = payload_books(c.system(1))
            await c.restart(1)
            await c.applied()
            member = c.member(1)
            assert payload_books(c.system(1)) == books
        await c.nodes[1].compact()
        assert [body for _, body in await c.read(1)] == [*before, *after]


async def test_a_deposed_leader_with_a_longer_log_is_brought_up_by_a_snapshot(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        await c.lead(1)
        before = await c.fill(1, 4, 20 * KIB, tag=b"old")
        await c.applied()
        c.partition(1)
        member = c.member(1)
        async with trio.open_nursery() as nursery:

            async def append() -> None:
                with pytest.raises(LogyardError):
                    await c.append(1, [(b"doomed", b"d" * 10 * KIB)])

            for _ in range(6):
                last = member.raft.log.last_index
                nursery.start_soon(append)
                await until(lambda last=last: member.raft.log.last_index > last or member.raft.role != 3)
            await until(lambda: member.raft.log.stable == member.raft.log.last_index)
            new = await c.leader(among=[2, 3])
            after = await c.fill(new, 3, 20 * KIB, tag=b"new")
            for number in (2, 3):
                await c.nodes[number].snapshot()
                await c.nodes[number].compact()
            await until(lambda: c.member(new).raft.log.snapshot_index)
            c.network.heal()
            await c.applied()
        assert member.snapshot_index
        for _ in range(3):
            for number in c.ids:
                assert [body for _, body in await c.read(number)] == [*before, *after], number
            await c.restart(1)
            await c.applied()
            after += await c.fill(await c.leader(), 1, 100, tag=b"more")
            await c.applied()
        await c.nodes[1].compact()
        await c.restart(1)
        await c.applied()
        assert [body for _, body in await c.read(1)] == [*before, *after]


@pytest.mark.parametrize("count", [3, 5])
async def test_of_what_another_leader_replaced_nobody_is_told_that_nothing_comes_of_it(
    tmp_path: Path, count: int
) -> None:
    """What replaced it is not committed yet, and not on this node's disk: it may be there again after a power cut, or
    a third node may have it still, and be elected."""
    async with cluster(tmp_path, count) as run:
        await run.lead(1)
        run.partition(1)
        last = run.member(1).raft.log.last_index
        async with trio.open_nursery() as nursery:
            answers: list[LogyardError] = []

            async def append() -> None:
                with pytest.raises(LogyardError) as refused:
                    await run.append(1, [(b"", b"replaced")])
                answers.append(refused.value)

            nursery.start_soon(append)
            await until(lambda: run.member(1).raft.log.last_index > last, "it is proposed")
            await run.append(await run.leader(among=range(2, count + 1)), [(b"", b"committed")])
            run.network.heal()
        assert type(answers[0]) is Unknown
        await run.applied()
        assert [body for _, body in await run.read(1)] == [b"committed"]
