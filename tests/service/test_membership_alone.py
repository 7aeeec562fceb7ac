"""Changes of members, alone: what is refused before anything is proposed, and when a change is done."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from logyard.engine.raft.configuration import Change
from logyard.engine.raft.state import FOLLOWER
from logyard.engine.replica.member import STOPPED, Member
from logyard.protocol.errors import BadRequest, GroupStopped, NotLeader, Refused, Unknown
from logyard.service.membership import Membership
from tests.engine.replica.doubles import TERM, Core, Recorder, member_of


class Leader(Core):
    """A core that takes every change; `joint` until `left`."""

    def __init__(self) -> None:
        super().__init__()
        self.changes: list[tuple[list[Change], bool]] = []
        self.configuration: Any = SimpleNamespace(
            voters=(1, 2, 3), learners=(), outgoing=(), promotable=(), nodes=lambda: {1, 2, 3}
        )
        self.applied_configuration = SimpleNamespace(joint=False)

    def propose_membership(self, steps: Sequence[Change], *, auto_leave: bool) -> int:
        self.changes.append((list(steps), auto_leave))
        return self._add()

    def leave_joint(self) -> int:
        return self._add()

    def _add(self) -> int:
        self.log.last_index += 1
        self.log.terms[self.log.last_index] = TERM
        return self.log.last_index


class Rig:
    """Node 1 of four; nodes 2, 3 and 4 are configured."""

    def __init__(self) -> None:
        self.member, self.core = self.fresh()
        self.asked: list[set[int]] = []
        self.marked: list[Member] = []
        self.meanwhile: Any = lambda: None
        self.membership = Membership(1, lambda name: self.member, lambda: {2, 3, 4}, self.room, self.marked.append)
        self.done: dict[str, Any] = {}
        self.error: Exception | None = None

    def fresh(self) -> tuple[Member, Leader]:
        member, _ = member_of(Recorder())
        member.raft = core = Leader()  # type: ignore[assignment]
        return member, core

    async def room(self, member: Member, nodes: set[int]) -> None:
        self.asked.append(nodes)
        self.meanwhile()

    async def change(self, *steps: tuple[Any, ...], auto_leave: bool = True) -> None:
        try:
            self.done = await self.membership.change_membership("a", steps, auto_leave)
        except (NotLeader, GroupStopped, Unknown) as error:
            self.error = error

    def apply(self) -> None:
        self.core.on_applied(self.core.log.last_index)
        self.member.wake()


async def settled() -> None:
    await trio.testing.wait_all_tasks_blocked()


@pytest.mark.parametrize("step", [("grow", 4), ("add", 9), ("add_learner", 0)])
async def test_what_makes_no_sense_is_refused_before_anybody_is_asked(step: tuple[str, int]) -> None:
    rig = Rig()
    with pytest.raises(BadRequest):
        await rig.membership.change_members("a", *step)
    rig.core.role, rig.core.leader = FOLLOWER, 2
    with pytest.raises(NotLeader):
        await rig.membership.change_members("a", "add", 4)
    assert not rig.asked and not rig.core.changes


async def test_nodes_that_come_are_asked_for_room_and_those_that_go_need_not_be_known() -> None:
    rig = Rig()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.change, ("add", 4), ("promote", 2), ("remove", 77))
        await settled()
        assert rig.asked == [{4}] and rig.marked == [rig.member] and not rig.done
        assert rig.core.changes == [([Change("add", 4), Change("promote", 2), Change("remove", 77)], True)]
        rig.apply()
    assert rig.done["index"] == 1 and rig.done["voters"] == [1, 2, 3]


async def test_a_change_is_done_when_a_joint_configuration_is_left_unless_it_is_to_stay() -> None:
    rig = Rig()
    rig.core.applied_configuration.joint = True
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.change, ("remove", 3))
        await settled()
        rig.apply()
        await settled()
        assert not rig.done
        rig.core.applied_configuration.joint = False
        rig.member.wake()
    assert rig.done["index"] == 1
    rig.core.applied_configuration.joint, rig.done = True, {}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(rig.change, ("remove", 2), auto_leave=False))
        await settled()
        rig.apply()
    assert rig.done["index"] == 2


async def test_a_change_that_another_leaders_entries_replaced_is_not_done() -> None:
    rig = Rig()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.change, ("remove", 3))
        await settled()
        rig.core.log.terms[1] = TERM + 1
        rig.core.leader = 2
        rig.member.wake()
    assert isinstance(rig.error, NotLeader) and rig.error.leader == 2 and not rig.done


@pytest.mark.parametrize("by_another", [True, False])
async def test_of_a_change_below_another_leaders_snapshot_nobody_knows_whether_it_is_done(by_another: bool) -> None:
    """It was told as committed, though that leader's log may have had another entry there."""
    rig = Rig()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.change, ("remove", 3))
        await settled()
        if by_another:
            rig.core.role, rig.core.leader, rig.core.term = FOLLOWER, 2, TERM + 1
        del rig.core.log.terms[1]
        rig.apply()
    assert isinstance(rig.error, Unknown) == by_another and bool(rig.done) != by_another


@pytest.mark.parametrize("applied", [True, False])
async def test_a_leader_that_goes_with_its_own_removal_has_done_it(applied: bool) -> None:
    rig = Rig()
    rig.core.applied_configuration.joint = True
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.change, ("remove", 1))
        await settled()
        if applied:
            rig.apply()
            await settled()
        rig.member.state = STOPPED
        rig.core.role = FOLLOWER
        # Without it nobody waits any more: as when a member stops, and what waits looks once more.
        rig.core.log.terms[1] = None if applied else TERM + 1  # type: ignore[assignment]
        rig.member.wake()
    assert bool(rig.done) == applied and isinstance(rig.error, GroupStopped) != applied


async def test_what_is_proposed_goes_to_the_member_of_now() -> None:
    """It slept while a node was asked for room, and woke as another object; or the name is another group's."""
    rig = Rig()
    old = rig.core

    def woken() -> None:
        rig.member, rig.core = rig.fresh()

    rig.meanwhile = woken
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.change, ("add", 4))
        await settled()
        assert not old.changes and len(rig.core.changes) == 1
        rig.apply()
    assert rig.done

    def another() -> None:
        rig.member, rig.core = rig.fresh()
        rig.member.spec = rig.member.spec._replace(uid=77)

    rig.meanwhile = another
    with pytest.raises(Refused, match="made anew"):
        await rig.membership.change_members("a", "add", 4)
    assert not rig.core.changes
