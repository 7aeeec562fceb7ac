"""Payloads that were lost: what a node remembers of them over restarts, and what is gone rather than lost."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from logyard.protocol.errors import Gone, LogyardError
from logyard.service.check.run import check_directory

from .cluster import KIB, Cluster, cluster, until
from .test_transfers import LIMITS, Wire, laggard, served

SIZE = 20 * KIB


def lose_generations(path: Path) -> None:
    for generation in (path / "payloads").glob("gen-*"):
        shutil.rmtree(generation)


async def reopened(c: Cluster, number: int) -> None:
    """A start that gets as far as its books, and a crash."""
    system = c.build(number)
    await system.open()
    await system.storage.meta_batch.commit(tuple, store=True)
    system.close()


async def test_what_came_and_was_lost_again_is_not_believed_to_be_there(tmp_path: Path) -> None:
    async with cluster(tmp_path, **LIMITS) as c:
        bodies = await laggard(c)
        await c.start(3)
        wire = Wire(c, 3)
        await wire.held(5)
        await c.crash(3)
        lose_generations(tmp_path / "node-3")
        await reopened(c, 3)
        await c.start(3)
        await c.applied()
        await served(c, 3, bodies)
        assert not c.system(3).repair.payload_repair.fetched, "it came with the snapshot (invariant 5)"


@pytest.mark.parametrize("restarts", [0, 1, 2])
async def test_a_lost_stretch_is_remembered_over_restarts_and_not_served(tmp_path: Path, restarts: int) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0, snapshot_stall_ms=500) as c:
        await c.lead(1)
        bodies = await c.fill(1, 10, SIZE)
        await c.applied()
        for number in (1, 2):
            await c.nodes[number].snapshot()
            await c.nodes[number].compact()
        await c.crash(2)
        lose_generations(tmp_path / "node-2")
        for _ in range(restarts):
            await reopened(c, 2)
        await c.start_unfilled(2)
        await c.lead(1)
        await c.applied()
        system, member = c.system(2), c.member(2)
        with pytest.raises(LogyardError) as caught:
            system.transfers.pull_answers._collect(member, [(1, 100)], 1 << 20)
        assert "lost" in str(caught.value)
        # What was fetched again, or released, is lost no more.
        assert [body for _, body in await c.read(2)] == bodies
        assert not system.store.lost(member.uid, 2, member.raft.applied)
        system.transfers.pull_answers._collect(member, [(3, 100)], 1 << 20)
        await c.restart(2)
        await c.applied()
        c.system(2).transfers.pull_answers._collect(c.member(2), [(3, 100)], 1 << 20)
        await c.nodes[1].truncate("log", 10)
        await c.applied()
        await c.restart(2)
        await c.applied()
        assert not c.system(2).store.lost(c.member(2).uid, 1, 100)


async def test_what_died_in_parts_is_lost_no_more(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        await c.lead(1)
        for _ in range(3):
            await c.append(1, [(b"", b"x" * SIZE)] * 4)
        await c.nodes[1].truncate("log", 2)
        await c.applied()
        await c.nodes[3].snapshot()
        await c.nodes[3].compact()
        await c.crash(3)
        lose_generations(tmp_path / "node-3")
        await c.start_unfilled(3)
        await c.lead(1)
        await c.applied()
        lost, uid = c.system(3).store.lost, c.member(3).uid
        first = c.log(1).anchor(2)[1].index
        assert lost(uid, first, first) and lost(uid, first + 2, first + 2)
        await c.nodes[1].truncate("log", 7)
        await c.applied()
        assert not lost(uid, first, first) and lost(uid, first + 1, first + 1)
        await c.nodes[1].truncate("log", 9)
        await c.applied()
        assert not lost(uid, first, first + 1) and lost(uid, first + 2, first + 2)
        await c.nodes[3].snapshot()
        await c.crash(3)
        report = check_directory(tmp_path / "node-3")
        assert {one["kind"] for one in report["findings"] if one["severity"] == "damage"} == {"payload"}


async def test_what_is_missing_below_a_floor_is_gone_and_not_damaged(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        await c.lead(1)
        bodies = await c.fill(1, 5, SIZE)
        await c.applied()
        await c.nodes[3].snapshot()
        await c.nodes[3].compact()
        await c.crash(3)
        lose_generations(tmp_path / "node-3")
        await c.start(3)
        await c.applied()
        member = c.member(3)
        member.floor = member.raft.applied + 1
        for _ in range(2):
            with pytest.raises(Gone):
                await c.read(3)
        member.floor = 0
        await served(c, 3, bodies)


async def test_a_deleted_group_has_lost_nothing(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, payload_cache_bytes=0) as c:
        await c.fill(1, 10, SIZE)
        await c.nodes[1].snapshot()
        await c.nodes[1].compact()
        await c.crash(1)
        lose_generations(tmp_path / "node-1")
        await c.start(1)
        await c.leader()
        uid = c.member(1).uid
        assert c.system(1).store.lost(uid, 1, 100)
        await c.nodes[1].delete_group("log")
        await until(lambda: not c.system(1).store.lost(uid, 1, 100))
        await c.restart(1)
        assert not c.system(1).store.lost(uid, 1, 100)
