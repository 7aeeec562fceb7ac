"""A real node whose system group lost both rows of its snapshot: what the check says, and what a start does."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import lmdb

from logyard.engine.log.meta_rows import snapshot_key
from logyard.service.check.process import inspect
from tests.engine.host.cluster import Cluster, cluster

NAME = "_system"
OTHER = "other"


def inspected(path: Path) -> list[tuple[str, str, str]]:
    report = inspect(path / "node-1", frozenset(), lambda line: None)
    return [(one["severity"], one["kind"], one["path"]) for one in report["findings"] if one["kind"] != "orphan"]


def spoil_rows(path: Path, uid: int) -> None:
    """Damage both copies of a group's snapshot row."""
    for name in ("a", "b"):
        environment = lmdb.open(str(path / "node-1" / "meta" / name), map_size=64 << 20)
        with environment, environment.begin(write=True) as transaction:
            raw = bytes(transaction.get(snapshot_key(uid)) or b"")
            transaction.put(snapshot_key(uid), raw[:-1] + bytes([raw[-1] ^ 1]))


async def written(c: Cluster) -> dict[str, list[Any]]:
    """Two groups of one member whose logs begin at their snapshots, and what is in them."""
    for name in (NAME, OTHER):
        await c.create(name)
        await c.fill(1, 5, 100, name)
    await c.system(1).transfers.snapshots.take([c.member(1, NAME), c.member(1, OTHER)])
    for name in (NAME, OTHER):
        await c.fill(1, 2, 100, name)
    await c.roll(1)
    assert c.member(1, NAME).raft.log.snapshot_index > 0
    return {name: await c.read(1, name=name) for name in (NAME, OTHER)}


async def content(c: Cluster) -> list[Any]:
    """What the system group has, all of it applied."""
    await c.leader(NAME)
    await c.applied(NAME)
    return await c.read(1, name=NAME)


async def test_the_third_copy_brings_back_what_two_have_lost(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, group="") as c:
        before = await written(c)
        uids = {name: c.system(1).names[name] for name in (NAME, OTHER)}
        file = Path(c.system(1).meta.manifests.path(uids[NAME]))
        assert [one.name for one in file.parent.iterdir()] == [file.name], "other groups have two copies"
        relative = str(file.relative_to(tmp_path / "node-1"))
        await c.crash(1)
        assert inspected(tmp_path) == []

        # The file alone: the rows are good.
        kept = file.read_bytes()
        file.write_bytes(kept[:-1])
        assert inspected(tmp_path) == [("healed", "manifest", relative)]
        file.unlink()
        assert inspected(tmp_path) == [("healed", "manifest", relative)]
        await c.start(1)
        assert file.read_bytes() == kept and await content(c) == before[NAME]
        await c.crash(1)

        for uid in uids.values():
            spoil_rows(tmp_path, uid)
        found = [one for one in inspected(tmp_path) if one[1] in ("manifest", "meta_row")]
        assert ("healed", "manifest", relative) in found
        assert [one for one in found if one[0] == "damage"] == [("damage", "meta_row", "meta")], "the other group"
        shutil.copytree(tmp_path / "node-1", tmp_path / "copy")
        await c.start(1)
        assert c.member(1, NAME).state == "running" and await content(c) == before[NAME]
        assert c.member(1, OTHER).state == "stopped", "nobody can tell what it had"
        assert len(await c.fill(1, 1, 100, NAME)) == 1
        await c.crash(1)

        # Without it this one would have been lost as well.
        shutil.rmtree(tmp_path / "node-1")
        shutil.copytree(tmp_path / "copy", tmp_path / "node-1")
        file.write_bytes(kept[:-1])
        assert ("warning", "manifest", relative) in inspected(tmp_path)
        await c.start(1)
        assert c.member(1, NAME).state == "stopped"


async def test_the_file_goes_with_the_group(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, group="") as c:
        await written(c)
        folder = tmp_path / "node-1" / "meta" / "manifests"
        assert len(list(folder.iterdir())) == 1
        await c.nodes[1].delete_group(NAME)
        assert not list(folder.iterdir())
        await c.restart(1)
        assert not list(folder.iterdir()) and NAME not in c.system(1).names
