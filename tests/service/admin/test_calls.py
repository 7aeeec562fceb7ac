"""The calls behind the verbs for one log in trouble: a command left out, several members changed as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from logyard.protocol.errors import BadRequest, LogyardError, NotLeader, Refused
from logyard.service.door.dispatch import serve_call
from tests.engine.host.cluster import Cluster, cluster, until
from tests.engine.host.test_faults import Fuse, machines


async def call(c: Cluster, number: int, method: str, **arguments: Any) -> Any:
    return await serve_call(c.nodes[number], method, arguments)


async def test_a_halted_log_goes_on_without_the_command_it_failed_at(tmp_path: Path) -> None:
    async with cluster(tmp_path, group="", machines=machines) as c:
        await c.create("fuse", machine="fuse")
        leader = await c.leader("fuse")
        node = c.nodes[leader]
        await node.command(c.member(leader, "fuse"), b"one")
        with pytest.raises(Refused, match="nothing to skip"):
            await call(c, leader, "skip", name="fuse", index=1, ordinal=0)
        with pytest.raises(LogyardError):
            await node.command(c.member(leader, "fuse"), b"boom")
        await until(lambda: all(c.member(number, "fuse").state == "halted" for number in c.ids))
        at = c.member(leader, "fuse").raft.applied + 1
        (row,) = node.key_metrics(["fuse"])
        assert row["state"] == "halted" and f"({at}, 0)" in row["reason"]
        assert node.status()["halted"] == 1
        with pytest.raises(NotLeader):
            await call(c, leader % 3 + 1, "skip", name="fuse", index=at, ordinal=0)
        with pytest.raises(Refused, match="not at"):
            await call(c, leader, "skip", name="fuse", index=at + 1, ordinal=0)
        await call(c, leader, "skip", name="fuse", index=at, ordinal=0)
        await until(lambda: all(c.member(number, "fuse").state == "running" for number in c.ids))
        assert await node.command(c.member(leader, "fuse"), b"two") == b"2"
        await c.applied("fuse")
        assert [fuse.count for fuse in (c.log(number, "fuse") for number in c.ids) if isinstance(fuse, Fuse)] == [2] * 3


async def test_several_members_change_as_one(tmp_path: Path) -> None:
    async with cluster(tmp_path, 5, group="") as c:
        await c.create("log", (1, 2, 3))
        await c.lead(1)
        await c.fill(1, 5, 1000)
        for node in (4, 5):
            await call(c, 1, "members", name="log", change="add_learner", node=node)

        def caught_up() -> bool:
            raft = c.member(1).raft
            return all(raft.progress[node].match == raft.log.last_index for node in (4, 5))

        await until(caught_up)
        swap = [["promote", 4], ["promote", 5], ["remove", 2], ["remove", 3]]
        found = await call(c, 1, "members", name="log", changes=swap)
        assert (found["voters"], found["outgoing"]) == ([1, 4, 5], [])
        assert c.nodes[1].board("", 5)[0][7] == [1, 4, 5]
        for changes in ([["promote"]], [[1, 2]], [["add", "x"]], [["add", 0]], "add", [["add", True]]):
            with pytest.raises(BadRequest):
                await call(c, 1, "members", name="log", changes=changes)
