"""The group registry without a system: who stores a definition, who says no, and what becomes of a creation that
fails."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from logyard.engine.host import groups
from logyard.engine.host.groups import FOUNDED
from logyard.engine.log import meta_rows
from logyard.engine.log.meta_rows import Departed
from logyard.engine.replica.member import DELETED
from logyard.engine.transport.blobs import (
    DEFINE_GROUPS,
    DEFINED,
    DELETE_GROUPS,
    REFUSED_GROUPS,
    TAKE_BACK,
    UNKNOWN_GROUPS,
)
from logyard.engine.types import BATCH_BITS, FORCED_TERMS, Spec
from logyard.protocol.errors import BadRequest, Busy, GroupExists, NoSpace, Refused

from .rig_groups import Network, Node, a_member, spec_of


@asynccontextmanager
async def network(count: int = 3) -> AsyncIterator[Network]:
    async with trio.open_nursery() as nursery:
        yield Network(count, nursery)
        nursery.cancel_scope.cancel()


async def create(node: Node, name: str = "log", members: tuple[int, ...] = (1, 2, 3), **more: Any) -> int:
    (spec,) = await node.registry.create([{"name": name, "members": members, **more}])
    return spec.uid


async def settled() -> None:
    await trio.testing.wait_all_tasks_blocked()


async def test_every_member_stores_a_definition_before_the_group_lives() -> None:
    async with network(4) as net:
        uid = await create(net.nodes[1])
        assert net.having(uid) == {1, 2, 3}
        assert all(net.nodes[number].names == {"log": uid} for number in (1, 2, 3)) and not net.nodes[4].names
        # Who creates need not be a member.
        assert net.having(await create(net.nodes[4], "far", (2, 3))) == {2, 3}


async def test_an_equal_definition_is_the_same_group_and_another_one_a_conflict() -> None:
    async with network() as net:
        uid = await create(net.nodes[1])
        assert await create(net.nodes[1], members=(3, 2, 1)) == uid
        for more in ({"members": (1, 2)}, {"arguments": {"size": 1}}):
            with pytest.raises(GroupExists):
                await create(net.nodes[1], **more)
        net.nodes[1].names["early"] = 77
        with pytest.raises(Busy):
            await create(net.nodes[1], "early")


async def test_of_groups_that_are_refused_together_no_name_stays_taken() -> None:
    async with network() as net:
        net.nodes[2].names["b"] = 77
        for names in (("a", "b"), ("a", "a")):
            with pytest.raises(GroupExists):
                await net.nodes[1].registry.create([{"name": name, "members": (1, 2, 3)} for name in names])
            await settled()
            assert not net.nodes[1].names and net.nodes[2].names == {"b": 77} and not net.nodes[3].names


async def test_names_nodes_machines_and_their_number_are_checked() -> None:
    async with network() as net:
        one = net.nodes[1]
        for name in ("", ".", "..", "a/b", "x" * 129, "ä"):
            with pytest.raises(BadRequest):
                await create(one, name)
        for more in ({"members": (1, 9)}, {"machine": "no such"}):
            with pytest.raises(BadRequest):
                await create(one, **more)
        with pytest.raises(Busy, match="groups_max"):
            await one.registry.create([{"name": f"g{number}"} for number in range(1001)])
        assert not net.sent and not one.rows and not one.names
        (spec,) = await one.registry.create([{"name": "small"}])
        assert spec.voters == (1,), "without members it is this node's alone"


async def batch(node: Node, *names: str, members: tuple[int, ...] = (1, 2, 3), **arguments: Any) -> int:
    return await node.registry.create_batch(names, members, "log", arguments)


async def test_a_batch_is_one_commit_on_each_member_and_sleeps() -> None:
    async with network() as net:
        names = [f"g{number}" for number in range(250)]
        assert await batch(net.nodes[1], *names, "g0") == 250
        for node in net.nodes.values():
            laid = [event for event in node.events if event[0] == "lay"]
            assert [event for event in node.events if event[0] == "rows"] == [("rows", [b"g"] * 250)]
            assert sum(count for _, count in laid) == 250 and list(node.names) == names
        uids = sorted(net.nodes[2].names.values())
        assert uids == list(range(uids[0], uids[0] + 250)) and not uids[0] % (1 << BATCH_BITS)
        # Again it is the same groups; with others beside them, only those are new.
        assert await batch(net.nodes[2], *names) == 0 and await batch(net.nodes[3], *names[:3], "more") == 1
        assert len(net.nodes[1].names) == 251 and {*uids} < {*net.nodes[1].names.values()}


async def test_of_a_batch_that_is_refused_nothing_is_there() -> None:
    async with network() as net:
        one, two = net.nodes[1], net.nodes[2]
        two.names["b"] = 77
        with pytest.raises(GroupExists, match="taken"):
            await batch(one, "a", "b", "c")
        await settled()
        assert not one.names and two.names == {"b": 77} and not one.members and not net.nodes[3].names
        assert await batch(one, "a", "c") == 2
        with pytest.raises(GroupExists, match="another definition"):
            await batch(one, "new", "a", size=1)
        for names in (("x", "a/b"), tuple(map(str, range(4097)))):
            with pytest.raises(BadRequest):
                await batch(one, *names)
        with pytest.raises(BadRequest, match="no address"):
            await batch(one, "x", members=(1, 9))
        with pytest.raises(Busy, match="groups_max"):
            await batch(one, *map(str, range(999)))
        # Those that are there take no room again.
        assert await batch(one, *map(str, range(998))) == 998 and await batch(one, *map(str, range(998))) == 0


async def test_of_a_batch_whoever_was_here_before_is_made_with_its_promises() -> None:
    async with network() as net:
        one = net.nodes[1]
        specs = [spec_of(uid, f"g{uid}") for uid in (5, 6, 7, 8)]
        one.gc.departed[5] = Departed(3, 2, 3, 9, 9)
        one.barred.add(6)
        one.registry.deleted.add(7)
        await one.registry._store(specs, {5: 10}, asleep=True)
        assert ("lay", 1) in one.events and one.members.keys() == {5, 6, 8} and set(one.names) == {"g5", "g6", "g8"}


async def test_definitions_with_much_to_say_travel_in_several_blobs() -> None:
    async with network() as net:
        await batch(net.nodes[1], *(f"g{number}" for number in range(900)), text="x" * 1000)
        blobs = [header for _, to, kind, header in net.sent if to == 2 and kind == DEFINE_GROUPS]
        assert [blob["last"] for blob in blobs] == [False, True] and all(blob["asleep"] for blob in blobs)
        assert sum(len(blob["specs"]) for blob in blobs) == 900 == blobs[0]["of"]
        assert all(node.events[0] == ("rows", [b"g"] * 900) for node in net.nodes.values()), "one commit"


async def test_a_node_that_misses_a_part_of_the_definitions_says_nothing() -> None:
    async with network() as net:
        two = net.nodes[2]
        specs = [list(spec_of(uid, f"g{uid}")) for uid in (5, 6, 7)]
        two.registry.on_blob(1, DEFINE_GROUPS, 4, {"specs": specs[2:], "last": True, "of": 3})
        await settled()
        assert not net.sent and not two.rows
        for part in (specs[:2], specs[2:]):
            two.registry.on_blob(1, DEFINE_GROUPS, 4, {"specs": part, "last": part == specs[2:], "of": 3})
        await settled()
        answers = [header for _, to, kind, header in net.sent if (to, kind) == (1, DEFINED)]
        assert answers[0] == {"error": None} and two.members.keys() == {5, 6, 7}
        # What never becomes whole takes a bounded place.
        for number in range(100):
            two.registry.on_blob(1, DEFINE_GROUPS, 100 + number, {"specs": specs[:1], "last": False, "of": 1 << 40})
        assert len(two.registry._parts._found) <= 8


async def test_a_majority_is_enough_and_who_was_away_asks() -> None:
    async with network() as net:
        net.fall(3)
        uid = await create(net.nodes[1])
        assert net.having(uid) == {1, 2}
        net.rise()
        net.send(3, 1, UNKNOWN_GROUPS, 0, {"uids": [uid]})
        await settled()
        assert net.having(uid) == {1, 2, 3}


async def test_a_link_that_is_not_up_yet_is_asked_again(autojump_clock: trio.testing.MockClock) -> None:
    async with network() as net:
        net.down |= {2, 3}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(create, net.nodes[1])
            await trio.sleep(1)
            net.down.clear()
        assert all(node.names for node in net.nodes.values())


async def test_without_a_majority_a_creation_is_taken_back(autojump_clock: trio.testing.MockClock) -> None:
    async with network() as net:
        net.fall(2, 3)
        with pytest.raises(Busy, match="only nodes"):
            await create(net.nodes[1])
        one = net.nodes[1]
        assert not one.names and not one.members and len(one.gc.departed) == 1
        # Whoever may have stored it hears of it when its link is up.
        net.rise()
        await settled()
        assert [row[1:3] for row in net.sent] == [(2, TAKE_BACK), (3, TAKE_BACK)]
        (uid,) = one.gc.departed
        assert all(node.gc.refuses(uid, {}) for node in net.nodes.values())
        assert net.having(await create(one)) == {1, 2, 3}, "the name is free"


async def test_answers_that_are_lost_take_back_nothing_that_was_born(autojump_clock: trio.testing.MockClock) -> None:
    async with network(4) as net:
        net.lost = {DEFINED}

        async def born() -> None:
            await trio.sleep(1)
            for number in (1, 2, 3):
                (spec,) = [member.spec for member in net.nodes[number].members.values()]
                net.nodes[number].members[spec.uid] = a_member(number, spec, last=1, term=1)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(born)
            with pytest.raises(Busy):
                await create(net.nodes[4])
        await settled()
        assert all(len(net.nodes[number].members) == 1 for number in (1, 2, 3))


async def test_a_name_taken_elsewhere_leaves_nothing_behind() -> None:
    async with network(4) as net:
        taken = await create(net.nodes[2], members=(2,))
        net.fall(4)
        with pytest.raises(GroupExists, match="node 2"):
            await create(net.nodes[1], members=(1, 2, 3, 4))
        await settled()
        assert [sorted(node.names.values()) for node in net.nodes.values()] == [[], [taken], [], []]
        (gone,) = net.nodes[1].registry.deleted
        assert net.nodes[3].registry.deleted == {gone}
        net.rise()
        await settled()
        assert gone in net.nodes[4].registry.deleted


async def test_a_definition_that_is_unsound_or_whose_machine_can_not_be_made_is_never_stored() -> None:
    async with network() as net:
        unsound = [
            spec_of(5, voters=()), spec_of(5, voters=(1, 1)), spec_of(5, voters=(0, 1)),
            spec_of(5)._replace(machine="new"), spec_of(5)._replace(arguments={"size": "none"}),
        ]  # fmt: skip
        for spec in unsound:
            net.send(1, 2, 2, 0, {"specs": [list(spec)]})
            net.send(1, 2, 2, 88, {"specs": [list(spec)]})
        await settled()
        two = net.nodes[2]
        assert not two.rows and not two.members and not two.names
        answers = [header["error"] for _, to, kind, header in net.sent if kind == DEFINED and to == 1]
        assert len(answers) == len(unsound) and all(answers)


async def test_a_name_is_free_again_where_the_disk_refuses_its_definition() -> None:
    async with network(1) as net:
        net.nodes[1].full = True
        with pytest.raises(NoSpace):
            await create(net.nodes[1], members=(1,))
        assert not net.nodes[1].names and not net.nodes[1].members
        net.nodes[1].full = False
        await create(net.nodes[1], members=(1,))


async def test_a_group_deleted_while_its_definition_is_stored_does_not_live() -> None:
    """Another node refused the name, and its creator took the group back."""
    async with network(1) as net:
        one = net.nodes[1]
        one.meanwhile = lambda: one.registry.delete([77], tell=False)
        await one.registry._store([spec_of(77, voters=(1,))])
        one.meanwhile = None
        assert not one.members and not one.names and one.rows[meta_rows.group_key(77)] is None
        assert await create(one, members=(1,)) != 77


async def test_a_deletion_reaches_who_is_there_and_who_speaks_for_the_group_later() -> None:
    async with network() as net:
        uid = await create(net.nodes[1])
        net.fall(3)
        member = net.nodes[1].members[uid]
        assert net.nodes[1].registry.on_delete(member, 5) == b"" and member.state == DELETED
        await settled()
        assert net.having(uid) == {3} and not net.nodes[2].names
        assert all(net.nodes[number].rows[meta_rows.DELETED + meta_rows.KEY.pack(uid)] == b"" for number in (1, 2))
        net.rise()
        net.send(3, 1, UNKNOWN_GROUPS, 0, {"uids": [uid]})
        await settled()
        assert net.having(uid) == set() and net.sent[-1][1:3] == (3, DELETE_GROUPS)
        # And nobody brings it back.
        await net.nodes[2].registry._store([member.spec])
        assert net.having(uid) == set()


async def test_on_a_full_node_what_is_there_is_created_again_and_nothing_new_moves_there() -> None:
    async with network() as net:
        one, two = net.nodes[1], net.nodes[2]
        uid = await create(one)
        there = spec_of(uid, "log")
        await batch(two, *map(str, range(999)), members=(2,))
        assert len(two.members) == 1000
        # What others create with it among the members is here, too.
        await create(one, "more")
        assert await create(two) == uid and await batch(two, "0", "1", members=(2,)) == 0
        with pytest.raises(Busy, match="groups_max"):
            await two.registry.create([{"name": name, "members": (1, 2, 3)} for name in ("log", "new")])
        assert two.registry._why_not([there]) is None
        why = two.registry._why_not([there, spec_of(77, "new")])
        assert why is not None and "groups_max" in why
        # The cluster's own group may go anywhere.
        two.machines.add(FOUNDED[0])
        assert two.registry._why_not([spec_of(77, "new")._replace(machine=FOUNDED[0])]) is None


async def test_nodes_that_are_to_become_members_are_asked_for_room(autojump_clock: trio.testing.MockClock) -> None:
    async with network(4) as net:
        uid = await create(net.nodes[1])
        member, ask = net.nodes[1].members[uid], net.nodes[1].registry.check_room
        await ask(member, {4})
        assert not net.nodes[4].members and not net.nodes[4].names
        await create(net.nodes[4], members=(4,))
        with pytest.raises(Refused, match="node 4"):
            await ask(member, {4})
        net.lost = {DEFINED}
        began = trio.current_time()
        await ask(member, {4})
        assert trio.current_time() - began == pytest.approx(groups.ASK_AGAIN_SECONDS)
        net.fall(4)
        await ask(member, {4})
        assert trio.current_time() - began == pytest.approx(groups.ASK_AGAIN_SECONDS)


async def test_of_a_forced_lineage_each_new_member_answers_and_has_no_replica_from_before(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with network(4) as net:
        uid = await create(net.nodes[1])
        member, ask = net.nodes[1].members[uid], net.nodes[1].registry.check_room
        await ask(member, {3})
        member.raft.term = FORCED_TERMS
        await ask(member, {4})
        with pytest.raises(Refused, match="node 3 can't be a member: it has a replica from before"):
            await ask(member, {3})
        net.lost = {DEFINED}
        with pytest.raises(Refused, match="node 4 can't be a member: it does not answer"):
            await ask(member, {4})
        net.fall(4)
        with pytest.raises(Refused, match="node 4 can't be a member: it does not answer"):
            await ask(member, {4})


async def test_of_a_forced_lineage_a_replica_that_is_stopped_is_not_said_to_go_by_itself(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with network(4) as net:
        uid = await create(net.nodes[1])
        member = net.nodes[1].members[uid]
        member.raft.term = FORCED_TERMS
        net.nodes[3].members[uid].stop("entry 7 is committed here in term 3")
        with pytest.raises(Refused, match=r"stopped \(entry 7 is .*\): start that node again"):
            await net.nodes[1].registry.check_room(member, {3})


async def test_who_has_the_name_refuses_an_unborn_group_and_says_so() -> None:
    async with network() as net:
        await create(net.nodes[1], members=(1, 2))
        orphan = spec_of(99)
        await net.nodes[3].registry._store([orphan])
        for number in (1, 2):
            # They hear of it as it speaks, and ask.
            net.send(number, 3, UNKNOWN_GROUPS, 0, {"uids": [99]})
        await settled()
        assert net.having(99) == set() and not net.nodes[3].names, "two of three voters said no"
        assert {row[:3] for row in net.sent if row[2] == REFUSED_GROUPS} == {
            (1, 3, REFUSED_GROUPS),
            (2, 3, REFUSED_GROUPS),
        }
        for node in net.nodes.values():
            assert not node.gc.departed[99].removed_at and 99 not in node.registry.deleted
        with pytest.raises(GroupExists):
            await net.nodes[3].registry._store([orphan])


async def test_only_a_group_that_may_be_unborn_is_refused() -> None:
    """Not one that this node left, has, is rid of, or has lost the definition of."""
    async with network(1) as net:
        one = net.nodes[1]
        left = one.gc.departed[99] = Departed(3, 1, 2, 9, 12)
        one.members[66] = a_member(1, spec_of(66))
        one.registry.deleted.add(77)
        one.barred.add(55)
        assert await one.registry._refuse([99, 66, 77, 55]) == [] and not one.rows
        assert await one.registry._refuse([44, 99]) == [44] and one.gc.departed[99] == left


async def test_many_groups_come_alive_in_steps() -> None:
    async with network(1) as net:
        found = await net.nodes[1].registry.create([{"name": f"g{number}"} for number in range(250)])
        assert len(found) == len(net.nodes[1].members) == 250 and net.nodes[1].grown == 2
        assert len([event for event in net.nodes[1].events if event[0] == "rows"]) == 1


def commits(node: Node) -> int:
    return len([event for event in node.events if event[0] == "rows"])


async def test_what_comes_during_a_commit_is_in_the_next_one_together() -> None:
    """A node that takes many groups over from a dead one: a commit each took as many syncs from everybody's appends."""
    async with network(1) as net, trio.open_nursery() as nursery:
        one, refused = net.nodes[1], []

        async def store(spec: Spec) -> None:
            try:
                await one.registry._store([spec])
            except GroupExists as error:
                refused.append(error)

        for uid in range(1, 41):
            nursery.start_soon(store, spec_of(uid, f"g{uid}", (1,)))
        for uid in (41, 42):
            nursery.start_soon(store, spec_of(uid, "g7", (1,)))
        nursery.start_soon(store, spec_of(3, "g3", (1,)))
        await settled()
        assert set(one.names) == {f"g{number}" for number in range(1, 41)} and len(refused) == 2
        assert len(one.members) == 40 and commits(one) == 1


async def test_whoever_shares_a_commit_that_fails_hears_of_it_and_nobody_who_shares_one_that_is_given_up() -> None:
    async with network(1) as net, trio.open_nursery() as nursery:
        one, failed = net.nodes[1], []
        gate = trio.Event()

        async def store(uid: int, name: str, scope: trio.CancelScope | None = None) -> None:
            try:
                with scope or trio.CancelScope():
                    await one.registry._store([spec_of(uid, name, (1,))])
            except (NoSpace, GroupExists) as error:
                failed.append((uid, type(error)))

        one.full = True
        one.meanwhile = gate.wait
        nursery.start_soon(store, 1, "a")
        await settled()
        assert failed == [(1, NoSpace)]
        failed.clear()
        # Two of one name in a commit that fails: it is free for both.
        async with trio.open_nursery() as together, one.registry._storing:
            for uid, name in ((2, "b"), (3, "c"), (4, "b")):
                together.start_soon(store, uid, name)
            await settled()
        assert sorted(failed) == [(2, NoSpace), (3, NoSpace), (4, NoSpace)] and not one.names
        one.full = False
        scope = trio.CancelScope()
        async with one.registry._storing:
            nursery.start_soon(store, 2, "b", scope)
            await settled()
            nursery.start_soon(store, 3, "c")
            await settled()
        await settled()
        scope.cancel()
        await settled()
        assert not one.members
        gate.set()
        await settled()
        assert set(one.members) == {3} and one.names == {"c": 3}
