"""Machine versions and rolling upgrade (`versions`): node by node, at one index, nothing skipped, no old leader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgpack
import pytest

from logyard.engine.machine import Applied, Context, PayloadRef, Sections

from .cluster import Cluster, cluster, until
from .scribe import Scribe
from .test_effects import tell


class Old(Scribe):
    """Notes under which version each command was applied."""

    def __init__(self) -> None:
        super().__init__()
        self.under: list[list[int]] = []

    def apply(self, context: Context, command: bytes, refs: tuple[PayloadRef, ...]) -> Applied:
        self.under.append([context.index, context.version])
        return super().apply(context, command, refs)

    def snapshot(self) -> Sections:
        return {**super().snapshot(), "under": msgpack.packb(self.under)}

    def restore(self, sections: Sections) -> None:
        super().restore(sections)
        self.under = msgpack.unpackb(sections["under"])


class New(Old):
    """Version 2 of it."""

    version = 2

    def upgrade(self, from_version: int, to_version: int) -> None:
        self.under.append([0, 10 * from_version + to_version])


class Installed:
    """What the next process to start has, of all nodes."""

    def __init__(self) -> None:
        self.kind: type[Old] = Old

    def machine(self, name: str, arguments: dict[str, Any]) -> Any:
        return self.kind()


async def begun(c: Cluster) -> None:
    await until(lambda: all(len(one.system.live) == len(c.ids) for one in c.nodes.values()), "all are live")
    await c.create("s", machine="scribe")
    await tell(c, "s", "note", "under 1")


async def renew(c: Cluster, installed: Installed, number: int) -> None:
    """Restart a node with the new machine."""
    installed.kind = New
    await c.restart(number)
    await until(lambda: all(len(one.system.live) == len(c.ids) for one in c.nodes.values()), "all are live")
    await c.leader("s")


def version(c: Cluster, number: int) -> int:
    return c.member(number, "s").version


@pytest.mark.long
async def test_a_version_comes_into_force_when_a_quorum_knows_it(tmp_path: Path) -> None:
    installed = Installed()
    async with cluster(tmp_path, group="", machines=installed.machine) as c:
        await begun(c)
        old = await c.leader("s")
        first, second = (number for number in c.ids if number != old)
        await renew(c, installed, first)
        leader = await c.leader("s")
        versions = c.system(leader).replicas.versions
        if leader != first:
            await until(lambda: versions.knows(first, "scribe") == 2, "the new node said so")
        for number in c.ids:
            c.system(number).replicas.versions.look()
        await tell(c, "s", "note", "one of three knows")
        await c.applied("s")
        assert [version(c, number) for number in c.ids] == [1, 1, 1], "one is no quorum"
        await renew(c, installed, second)
        # A leader that does not know it hands over to one that does; that one proposes.
        await until(lambda: version(c, first) == version(c, second) == 2, "in force where it is known")
        await until(lambda: c.member(old, "s").state == "halted", "the old one waits")
        shown = c.nodes[old].describe("s")
        assert "needs machine version 2, this node has 1" in shown["reason"]
        assert not c.leads(old, "s") and not c.member(old, "s").raft.may_lead
        await tell(c, "s", "note", "under 2")
        last = max(c.member(number, "s").raft.commit for number in (first, second))
        await until(lambda: c.member(old, "s").raft.log.last_index >= last, "it keeps acknowledging")
        assert c.member(old, "s").raft.applied < last and version(c, old) == 1
        # With only its acknowledgement there is a quorum.
        follower = first if await c.leader("s", [first, second]) == second else second
        await c.crash(follower)
        await tell(c, "s", "note", "with the old one's vote")
        installed.kind = New
        await c.start(follower)
        await renew(c, installed, old)
        await until(lambda: version(c, old) == 2, "it goes on with the new machine")
        await c.applied("s")
        seen = [c.log(number, "s").under for number in c.ids]
        assert seen[0] == seen[1] == seen[2], "at the same index on all"
        assert [under for _, under in seen[0]] == [1, 1, 12, 2, 2]
        assert c.log(old, "s").written("note") == [
            "under 1", "one of three knows", "under 2", "with the old one's vote"
        ]  # fmt: skip


async def test_a_snapshot_carries_the_version_in_force(tmp_path: Path) -> None:
    installed = Installed()
    installed.kind = New
    async with cluster(tmp_path, group="", machines=installed.machine) as c:
        await begun(c)
        await until(lambda: all(version(c, number) == 2 for number in c.ids), "in force")
        await tell(c, "s", "note", "under 2")
        await c.applied("s")
        before = [list(row) for row in c.log(1, "s").under]
        for number in c.ids:
            await c.nodes[number].snapshot(["s"])
        await c.restart(1)
        await c.applied("s")
        assert version(c, 1) == 2 and c.log(1, "s").restored == 1
        assert c.log(1, "s").under == before, "the upgrade is not done again"
