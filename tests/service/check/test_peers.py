"""The offline check of a cluster finds a wiped directory and older copies, and nothing in honest ones."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import trio

from logyard.engine.disk.door import Disk
from logyard.engine.log import meta_rows
from logyard.engine.log.meta import MetaStore
from logyard.engine.log.meta_rows import KEY, state_key
from logyard.service.check.peers import compare
from logyard.service.check.run import check_directory
from tests.engine.host.cluster import Cluster, cluster, until


async def met(c: Cluster, number: int) -> None:
    """The others have heard what is durable on a node by now, and stored it."""
    group_commit = c.system(number).storage.group_commit
    await until(lambda: group_commit.sealed and not group_commit.busy)
    system = c.system(number)
    await until(lambda: system.vitals().written == system.wal.next_batch)
    written = system.wal.next_batch
    for other in c.ids:
        if other != number:
            known = c.system(other).incarnation.acquaintances
            await until(lambda known=known: number in known.known and known.known[number].written >= written)
            await c.system(other).storage.meta_batch.commit(tuple)


async def reasons(path: Path) -> dict[int, list[str]]:
    reports: list[dict[str, Any]] = []
    for number in (1, 2, 3):
        reports.append(await trio.to_thread.run_sync(check_directory, path / f"node-{number}"))
    compare(reports)
    return {
        report["node"]: [one["message"] for one in report["findings"] if one["kind"] == "outdated"]
        for report in reports
        if not report["ok"]
    }


@pytest.mark.long
async def test_copies_of_every_age_are_found(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        ages = {}
        for age, turn in (("two starts old", 1), ("one start old", 2), ("of the same life", 3)):
            await c.fill(await c.leader(), 2, 100) if turn == 1 else await c.append(await c.leader(), [(b"", b"x")])
            await c.applied()
            await met(c, 3)
            ages[age] = tmp_path / f"copy-{turn}"
            shutil.copytree(tmp_path / "node-3", ages[age])
            if turn < 3:
                await c.restart(3)
                await met(c, 3)
        await c.append(await c.leader(), [(b"", b"x")])
        await c.applied()
        await met(c, 3)
        await c.close()
        assert await reasons(tmp_path) == {}, "honest crashes"
        for age, copy in ages.items():
            shutil.rmtree(tmp_path / "node-3")
            shutil.copytree(copy, tmp_path / "node-3")
            found = await reasons(tmp_path)
            assert found.keys() == {3} and len(found[3]) == 2 and "older copy" in found[3][0], (age, found)
        shutil.rmtree(tmp_path / "node-3")
        system = c.build(3)
        await system.open()
        system.close()
        assert "is not the one it had" in (await reasons(tmp_path))[3][0]


async def test_the_term_of_a_replica_that_went_is_that_of_the_one_made_anew(tmp_path: Path) -> None:
    """What the first one promised is stored with its departure, and the second one does not write it again."""
    async with cluster(tmp_path) as c:
        await c.lead(1)
        await c.fill(1, 5, 100)
        await c.applied()
        await c.nodes[1].change_members("log", "remove", 3)
        await c.bare(3)
        await c.roll(3)
        await c.restart(3)
        uid = c.member(1).uid
        assert c.system(3).host.replica_gc.departed[uid].term == c.member(1).raft.term
        await until(lambda: 3 in c.system(1).live)
        await c.nodes[1].change_members("log", "add", 3)
        await until(lambda: c.replica(3) is not None)
        await c.fill(1, 5, 100)
        await c.applied()
    store = MetaStore(Disk(), str(tmp_path / "node-3" / "meta"))
    store.open()
    try:
        row = store.get(meta_rows.DEPARTED + KEY.pack(uid))
        assert row is not None and store.get(state_key(uid)) is None
        report = await trio.to_thread.run_sync(check_directory, tmp_path / "node-3")
        assert report["ok"], report["findings"]
        store.commit([(meta_rows.DEPARTED + KEY.pack(uid), None)])
    finally:
        store.close()
    report = await trio.to_thread.run_sync(check_directory, tmp_path / "node-3")
    assert not report["ok"] and any("stored term is 0" in one["message"] for one in report["findings"])
