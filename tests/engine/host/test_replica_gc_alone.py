"""Replicas that leave, alone: when a node believes that it is out, what stays of its replica, and when it is let in
again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from logyard.engine.log import meta_rows
from logyard.engine.log.meta_rows import Departed
from logyard.engine.raft.core import LEADER
from logyard.engine.raft.membership import Configuration
from logyard.engine.raft.state import TERM_MAX
from logyard.engine.replica.member import STOPPED, Member
from logyard.engine.transport.blobs import REMOVED_GROUPS
from logyard.engine.types import FORCED_TERMS
from logyard.protocol.errors import NoSpace

from .rig_groups import Network, Node, a_member, spec_of

UID = 9


@asynccontextmanager
async def node(member: Member | None = None, count: int = 3) -> AsyncIterator[tuple[Network, Node]]:
    """Node 1 with this member."""
    async with trio.open_nursery() as nursery:
        network = Network(count, nursery)
        one = network.nodes[1]
        if member is not None:
            one.members[member.uid] = member
            one.names[member.spec.name] = member.uid
        yield network, one
        nursery.cancel_scope.cancel()


def follower(last: int = 10, term: int = 3, configuration: int = 1) -> Member:
    return a_member(1, spec_of(UID), last, term, configuration)


async def settled() -> None:
    await trio.testing.wait_all_tasks_blocked()


async def test_who_is_out_goes_and_its_promises_stay() -> None:
    member = follower()
    member.raft.promise = (3, 4)
    async with node(member) as (_, one):
        one.gc.on_told([(UID, 11, 3)])
        await settled()
        assert not one.members and not one.names and member.raft.stopped
        assert one.gc.departed[UID] == Departed(3, 2, 3, 10, 11)
        assert one.events[:2] == [("drop", UID), ("forget", [UID])]
        assert one.rows[meta_rows.DEPARTED + meta_rows.KEY.pack(UID)]


async def test_a_replica_that_goes_a_second_time_keeps_the_promises_of_the_first() -> None:
    member = follower()
    member.raft.promise = (4, 1)
    async with node(member) as (_, one):
        one.gc.on_told([(UID, 11, 3)])
        await settled()
        assert one.gc.departed[UID][2:4] == (4, 1)


async def test_a_term_without_bounds_makes_no_row_that_nothing_can_store() -> None:
    """A decided row that can't be packed would be in every commit of the node from then on."""
    async with node(follower()) as (_, one):
        one.gc.on_told([(UID, (1 << 64) - 1, (1 << 64) - 1)])
        await settled()
        assert not one.members and one.rows[meta_rows.DEPARTED + meta_rows.KEY.pack(UID)]
        assert one.gc.departed[UID].removed_at < 1 << 64


@pytest.mark.parametrize(
    ("index", "term", "out"),
    [(4, 3, False), (5, 2, False), (6, 3, True), (1, 4, True), (5, 3, False)],
    ids=["older", "of an earlier term", "newer", "of a later term", "the one it has"],
)
async def test_a_follower_believes_only_what_is_beyond_the_configuration_it_knows(
    index: int, term: int, out: bool
) -> None:
    async with node(follower(configuration=5)) as (_, one):
        one.gc.on_told([(UID, index, term)])
        await settled()
        assert (UID not in one.members) == out


async def test_the_configuration_it_knows_is_believed_where_it_is_not_in_it() -> None:
    member = follower(configuration=5)
    member.raft.configuration = Configuration((2, 3))
    async with node(member) as (_, one):
        one.gc.on_told([(UID, 5, 3)])
        await settled()
        assert not one.members


async def test_a_leader_believes_only_a_later_term() -> None:
    member = follower()
    member.raft.role = LEADER
    async with node(member) as (_, one):
        one.gc.on_told([(UID, 1 << 40, 3)])
        await settled()
        assert UID in one.members, "a leader knows better"
        one.gc.on_told([(UID, 1, 4)])
        await settled()
        assert UID not in one.members, "it was deposed, and had not heard"


async def test_who_was_let_in_again_by_a_later_configuration_stays() -> None:
    async with node(follower()) as (_, one):
        one.gc.departed[UID] = Departed(3, 0, 3, 1, 5, admitted=20)
        one.gc.on_told([(UID, 20, 3)])
        await settled()
        assert UID in one.members
        one.gc.on_told([(UID, 21, 3)])
        await settled()
        assert UID not in one.members


async def test_who_became_a_member_since_it_was_told_that_it_is_none_stays() -> None:
    """The word of one who lags, and in the same turn the entry that makes this node a member, which is acknowledged."""
    member = follower(configuration=0)
    async with node(member) as (_, one):
        one.gc.on_told([(UID, 2, 3)])
        member.raft.configuration_index = 8
        await settled()
        assert one.members == {UID: member} and not member.raft.stopped


@pytest.mark.parametrize("how", ["asleep", "deleted"])
async def test_who_is_another_object_when_its_turn_comes_is_looked_for_again(how: str) -> None:
    """It fell asleep between the word and its task: as a row it is nobody's member, and the word is of what wakes."""
    member, woken = follower(), follower()
    async with node(member) as (_, one):
        one.gc.on_told([(UID, 11, 3)])
        one.members.pop(UID)
        if how == "asleep":
            one.members[UID] = woken
        await settled()
        assert not member.raft.stopped and woken.raft.stopped == (how == "asleep")
        assert not one.members and (UID in one.gc.departed) == (how == "asleep")


async def test_what_only_this_replica_has_is_kept_before_it_goes() -> None:
    member = follower()
    lineage = [(1, 3), (7, 3 + FORCED_TERMS), (30, 3 + FORCED_TERMS)]
    async with node(member) as (_, one):
        one.gc.on_told([(UID, 30, 3 + FORCED_TERMS)], [lineage])
        await settled()
        assert one.gc.forked == 1 and not one.members
        assert [event[0] for event in one.events] == ["drop", "fork", "drop", "forget", "rows"]
        assert one.events[1] == ("fork", UID, 7)


async def test_what_can_not_be_kept_stays_where_it_is_stopped() -> None:
    member = follower()
    lineage = [(1, 3), (7, 3 + FORCED_TERMS), (30, 3 + FORCED_TERMS)]
    async with node(member) as (_, one):
        one.fork = NoSpace("the disk is full")
        one.gc.on_told([(UID, 30, 3 + FORCED_TERMS)], [lineage])
        await settled()
        assert one.members == {UID: member} and member.state == STOPPED and not one.gc.departed and not one.gc.forked
        assert "the disk is full" in member.reason and not one.rows


def applied(member: Member, through: int) -> Member:
    member.raft.log.stable = member.raft.log.last_index
    member.raft.commit = member.raft.applied = through
    return member


async def test_a_member_that_is_out_is_told_once_until_somebody_asks_again() -> None:
    member = applied(a_member(1, spec_of(UID, voters=(1, 2)), 10, 3, 5), 10)
    async with node(member) as (net, one):
        one.gc.tell(2, member)
        assert not net.sent, "a member"
        net.down.add(3)
        one.gc.tell(3, member)
        net.down.clear()
        one.gc.tell(3, member)
        one.gc.tell(3, member)
        assert [row[1:3] for row in net.sent] == [(3, REMOVED_GROUPS)]
        assert net.sent[0][3] == {"groups": [[UID, 10, 3]], "lineages": [[(1, 3), (10, 3)]]}
        one.gc.forget_told(2)
        one.gc.tell(3, member)
        assert len(net.sent) == 1
        one.gc.forget_told(3)
        one.gc.tell(3, member)
        one.gc.forget_told()
        one.gc.tell(3, member)
        assert len(net.sent) == 3


async def test_nobody_is_told_before_anything_is_applied_or_while_the_removal_may_be_overruled() -> None:
    member = a_member(1, spec_of(UID, voters=(1, 2)), 10, 3, 5)
    async with node(member) as (net, one):
        one.gc.tell(3, member)
        applied(member, 10)
        member.raft.base = (0, Configuration((1, 2, 3)))
        one.gc.tell(3, member)
        assert not net.sent


async def test_who_is_out_by_a_configuration_is_told_when_it_is_applied() -> None:
    member = applied(a_member(1, spec_of(UID, voters=(1, 2)), 10, 3, 5), 10)
    async with node(member) as (net, one):
        one.gc.applied(member, (1, 2, 3))
        assert [row[1:3] for row in net.sent] == [(3, REMOVED_GROUPS)]
        one.gc.applied(member, (1, 2, 3))
        assert len(net.sent) == 2, "every time"
        member.raft.configuration = Configuration((2,))
        one.gc.applied(member, (1, 2, 3))
        assert len(net.sent) == 2, "who is out itself says nothing"


async def test_a_replica_is_made_anew_by_a_configuration_above_its_removal_alone() -> None:
    async with node() as (_, one):
        one.gc.departed[UID] = Departed(3, 2, 3, 10, 11)
        assert not one.gc.admits(UID, {}) and not one.gc.admits(UID, {UID: 11}) and one.gc.admits(UID, {UID: 12})
        assert not one.gc.refuses(UID, {}), "it was born"
        assert one.gc.admits(8, {}) and not one.gc.refuses(8, {})
        assert await one.gc.readmit([8], {}) == [] and not one.events
        ((key, value),) = await one.gc.readmit([8, UID], {UID: 12})
        # Its promises may not be stored yet, whose commit failed: then the records are all that keeps them.
        assert one.events[0] == ("settle",), "first"
        assert one.events[-1] == ("wal", [(UID, 1)]), "nothing the WAL has of the old one counts"
        assert key == meta_rows.DEPARTED + meta_rows.KEY.pack(UID) and value
        assert one.gc.departed[UID] == Departed(3, 2, 3, 10, 11, 12)
        one.full, one.events = True, []
        with pytest.raises(NoSpace):
            await one.gc.readmit([UID], {UID: 13})
        assert one.events == [("settle",)] and one.gc.departed[UID].admitted == 12
        one.gc.forget(UID)
        assert one.gc.admits(UID, {})


async def test_an_unborn_group_is_refused_until_somebody_led_it() -> None:
    async with node() as (_, one):
        await one.gc.refuse([UID])
        assert one.gc.refuses(UID, {}) and one.gc.refuses(UID, {UID: 0}) and not one.gc.refuses(UID, {UID: 1})
        assert one.rows and len(one.events) == 1
        await one.gc.refuse([UID])
        assert len(one.events) == 1


def test_a_definition_is_offered_with_what_says_that_it_was_born() -> None:
    offered: list[Any] = [
        a_member(1, spec_of(UID)),
        a_member(1, spec_of(UID), 4, 1),
        a_member(1, spec_of(UID), 9, 1, 7),
    ]
    assert [offer_of(one) for one in offered] == [0, 1, 7]
    highest = a_member(1, spec_of(UID), 9, TERM_MAX, 7)
    assert offer_of(highest) < 1 << 64, "it is sent"


def offer_of(member: Member) -> int:
    from logyard.engine.host.replica_gc import ReplicaGC

    return ReplicaGC.admission(member)


async def test_an_unborn_group_goes_when_the_rest_is_no_majority() -> None:
    async with node(a_member(1, spec_of(UID))) as (_, one):
        one.gc.on_refused(2, [UID])
        one.gc.on_refused(2, [UID])
        one.gc.on_refused(7, [UID])
        await settled()
        assert UID in one.members, "one voter, and one that is none"
        one.gc.on_refused(3, [UID])
        await settled()
        assert UID not in one.members and one.gc.refuses(UID, {})


async def test_nobody_talks_a_born_group_or_a_member_that_was_let_in_out_of_anything() -> None:
    async with node(follower()) as (_, one):
        again = one.members[66] = a_member(1, spec_of(66, "again"))
        one.gc.departed[66] = Departed(3, 1, 2, 9, 12, admitted=20)
        for number in (2, 3):
            one.gc.on_refused(number, [UID, 66])
        await one.gc.drop_unborn(again.uid)
        await settled()
        assert one.members.keys() == {UID, 66} and not again.raft.stopped
