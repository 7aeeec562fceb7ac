"""The offline check of a cluster finds a wiped directory and older copies, and nothing in honest ones."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import trio

from logyard.service.check import check_directory
from logyard.service.check_peers import compare
from tests.engine.host.cluster import Cluster, cluster, until


async def met(c: Cluster, number: int) -> None:
    """The others have heard what is durable on a node by now, and stored it."""
    durability = c.system(number).durability
    await until(lambda: durability.sealed and not durability.busy)
    written = c.system(number).vitals().written
    for other in c.ids:
        if other != number:
            known = c.system(other).acquaintances
            await until(lambda known=known: number in known.known and known.known[number].written >= written)
            await c.system(other).storage.books.commit(tuple)


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
