"""Forgetting a node's directory, alone: only a node that is a member of nothing here, awake or asleep."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from logyard.engine.host.decommission import NAMES_SHOWN, Decommission
from logyard.engine.log import meta_rows
from logyard.engine.raft.membership import Configuration
from logyard.protocol.errors import BadRequest, NoSpace, Refused

from .rig_groups import a_member, spec_of


class Rig:
    """Node 1 of four, which knows the directories of 2 and 3."""

    def __init__(self) -> None:
        self.members: dict[int, Any] = {}
        self.asleep: dict[int, Any] = {}
        self.forgotten: list[int] = []
        self.rows: dict[bytes, bytes | None] = {}
        self.full = False
        table: Any = SimpleNamespace(rows=self.asleep.items)
        peers = SimpleNamespace(nodes={2, 3, 4}, forget=self.forgotten.append)
        self.decommission = Decommission(1, self.members, table, self.commit, {2, 3}.__contains__, peers)

    def group(self, uid: int, name: str, voters: tuple[int, ...]) -> Any:
        self.members[uid] = a_member(1, spec_of(uid, name, voters))
        return self.members[uid]

    async def commit(self, build: Any, *, then: Any) -> None:
        if self.full:
            raise NoSpace("the disk is full")
        self.rows.update(build())
        then()


async def test_a_member_of_nothing_is_forgotten_and_that_is_durable_first() -> None:
    rig = Rig()
    rig.group(7, "log", (1, 2))
    rig.full = True
    with pytest.raises(NoSpace):
        await rig.decommission.forget_node(3)
    assert not rig.forgotten
    rig.full = False
    assert await rig.decommission.forget_node(3)
    assert rig.rows == {meta_rows.peer_key(3): None} and rig.forgotten == [3]
    assert not await rig.decommission.forget_node(4), "nothing was known of it"


@pytest.mark.parametrize("node", [1, 9], ids=["itself", "a stranger"])
async def test_only_a_peer_can_be_forgotten(node: int) -> None:
    with pytest.raises(BadRequest):
        await Rig().decommission.forget_node(node, force=True)


async def test_a_member_of_any_group_is_refused_unless_forced() -> None:
    rig = Rig()
    rig.group(7, "awake", (1, 2))
    with pytest.raises(Refused, match=r"1 logs \(awake\)"):
        await rig.decommission.forget_node(2)
    assert await rig.decommission.forget_node(2, force=True) and rig.forgotten == [2]
    for uid in range(10, 18):
        rig.group(uid, f"g{uid}", (1, 3))
    with pytest.raises(Refused, match="8 logs") as caught:
        await rig.decommission.forget_node(3)
    assert str(caught.value).count("g1") == NAMES_SHOWN and ", ..." in str(caught.value)


async def test_a_removal_that_may_be_overruled_counts_not_yet() -> None:
    rig = Rig()
    raft = rig.group(7, "log", (1, 2)).raft
    raft.history = ((5, Configuration((1,))),)
    assert raft.base[1].nodes() == {1, 2}
    with pytest.raises(Refused):
        await rig.decommission.forget_node(2)


@pytest.mark.parametrize("shape", [((1, 2), ()), ((1,), (2,))], ids=["voter", "learner"])
async def test_a_member_of_a_group_that_sleeps_is_refused(shape: Any) -> None:
    rig = Rig()
    rig.asleep[8] = SimpleNamespace(name="asleep", shape=SimpleNamespace(voters=shape[0], learners=shape[1]))
    with pytest.raises(Refused, match="asleep"):
        await rig.decommission.forget_node(2)
    assert await rig.decommission.forget_node(3)
