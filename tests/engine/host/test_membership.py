"""Who is in a group, on real engines: joint changes under load, members that leave and come back, groups that lost
their quorum, and deletion as a command."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import trio

from logyard.engine.entry import CONFIGURATION
from logyard.engine.raft.configuration import Change, Configuration
from logyard.engine.raft.core import LEADER
from logyard.engine.raft.messages import TRANSFER, VOTE, Message
from logyard.engine.replica import leadership
from logyard.engine.transport.blobs import DELETE_GROUPS
from logyard.protocol.errors import BadRequest, LogyardError, NotLeader, Refused

from .cluster import KIB, Cluster, cluster, payload_books, raft_of, until


async def all_live(c: Cluster) -> None:
    await until(lambda: all(len(one.system.live) == len(c.nodes) for one in c.nodes.values()), "all are live")


async def test_two_of_three_members_are_replaced_under_load(tmp_path: Path) -> None:
    """One joint change; every acknowledged record is on the new members, and the old ones' replicas go."""
    async with cluster(tmp_path, 5, group="") as c:
        await all_live(c)
        await c.create("log", [1, 2, 3])
        await c.lead(1)
        written: list[bytes] = []
        replaced = trio.Event()

        async def load() -> None:
            while not replaced.is_set() or len(written) < 50:
                body = (b"%06d" % len(written)).ljust(2 * KIB, b".")
                await c.append(1, [(b"", body)])
                written.append(body)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(load)
            await until(lambda: len(written) > 10)
            changes = [("add", 4), ("add", 5), ("remove", 2), ("remove", 3)]
            found = await c.nodes[1].change_membership("log", changes)
            assert found["voters"] == [1, 4, 5] and not found["outgoing"]
            replaced.set()
        await c.applied(among=[1, 4, 5])
        for number in (4, 5):
            assert [body for _, body in await c.read(number)] == written
        await c.bare(2, 3)
        await c.crash(2)
        await c.crash(3)
        await c.append(1, [(b"", b"goes on")])
        await c.lead(4)


async def test_an_explicit_joint_change_waits_to_be_left(tmp_path: Path) -> None:
    async with cluster(tmp_path, 4, group="") as c:
        await all_live(c)
        await c.create("log", [1, 2, 3])
        await c.lead(1)
        node = c.nodes[1]
        found = await node.change_membership("log", [("add", 4), ("demote", 3)], auto_leave=False)
        assert found["outgoing"] == [1, 2, 3] and found["voters"] == [1, 2, 4]
        with pytest.raises(Refused, match="joint"):
            await node.change_members("log", "add", 3)
        for number in c.ids:
            await c.restart(number)
        leader = await c.leader()
        assert c.member(leader).raft.configuration.joint
        with pytest.raises(NotLeader):
            await c.nodes[next(one for one in c.ids if one != leader)].leave_joint("log")
        found = await c.nodes[leader].leave_joint("log")
        assert found["voters"] == [1, 2, 4] and found["learners"] == [3] and not found["outgoing"]
        with pytest.raises(BadRequest):
            await c.nodes[leader].change_membership("log", [("swap", 3)])


async def test_a_promotable_learner_becomes_a_voter_when_it_has_caught_up(tmp_path: Path) -> None:
    async with cluster(tmp_path, 4, group="") as c:
        await all_live(c)
        await c.create("log", [1, 2, 3])
        await c.lead(1)
        await c.fill(1, 20, KIB)
        await c.crash(4)
        await until(lambda: 4 not in c.system(1).live)
        found = await c.nodes[1].change_members("log", "add_promotable", 4)
        assert found["learners"] == [4] and found["promotable"][0][0] == 4
        with pytest.raises(Refused, match="stored 0 of"):
            await c.nodes[1].change_members("log", "promote", 4)
        await c.crash(1)
        leader = await c.leader()
        await c.start(4)
        await until(lambda: c.member(leader).raft.configuration.voters == (1, 2, 3, 4), "another leader promotes it")
        await c.applied(among=[2, 3, 4])
        assert len(await c.read(4)) == 20


async def test_one_of_three_makes_itself_the_group_when_the_others_are_gone(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        leader = await c.leader()
        bodies = await c.fill(leader, 5, 5 * KIB)
        await c.applied()
        await c.crash(2)
        await c.crash(3)
        await until(lambda: c.system(1).live == {1})
        await until(lambda: c.member(1).raft.role != LEADER)
        await c.nodes[1].force_shrink("log")
        assert c.member(1).raft.configuration == Configuration((1,))
        await c.append(await c.leader(), [(b"", b"alone")])
        await c.restart(1)
        await c.leader()
        want = [*bodies, b"alone"]
        assert [body for _, body in await c.read(1)] == want
        # The others come back with the old configuration: they are told, and their replicas go.
        await c.start(2)
        await c.start(3)
        await c.bare(2, 3)
        await all_live(c)
        await c.nodes[1].change_membership("log", [("add_promotable", 2), ("add_promotable", 3)])
        await until(lambda: c.member(1).raft.configuration.voters == (1, 2, 3))
        await c.applied()
        assert [body for _, body in await c.read(3)] == want
        await c.crash(1)
        await c.append(await c.leader(), [(b"", b"without the survivor")])


async def test_who_left_is_let_in_again_by_one_that_was_forced_to_be_the_only_one_and_was_behind(
    tmp_path: Path,
) -> None:
    """The configuration that has it again stands at a lower index than the one without it."""
    async with cluster(tmp_path, 4, group="") as c:
        await all_live(c)
        await c.create("log", [1, 2, 3])
        await c.lead(1)
        bodies = await c.fill(1, 5, KIB)
        await c.applied(among=[1, 2, 3])
        await c.crash(3)
        await c.fill(1, 30, KIB)
        await c.nodes[1].change_membership("log", [("add_promotable", 4)])
        await until(lambda: c.member(1).raft.applied_configuration.voters == (1, 2, 3, 4))
        await c.nodes[1].change_membership("log", [("remove", 2)])
        await c.bare(2)
        removed_at = c.system(2).host.replica_gc.departed[c.member(1).uid].removed_at
        await c.crash(1)
        await c.crash(4)
        await c.start(3)
        await until(lambda: c.system(3).live == {2, 3})
        await c.nodes[3].force_shrink("log")
        await c.nodes[3].change_membership("log", [("add_promotable", 2)])
        await until(lambda: c.member(3).raft.configuration.voters == (2, 3))
        assert c.member(3).raft.configuration_index < removed_at
        await c.applied(among=[2, 3])
        assert [body for _, body in await c.read(2)] == bodies


async def test_a_removed_replica_goes_and_a_new_one_comes(tmp_path: Path) -> None:
    """Also when the node was away while it was removed; and what the old replica promised holds for the new one."""
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        await c.lead(1)
        bodies = await c.fill(1, 10, 6 * KIB)
        await c.applied()
        for away in (False, True):
            before = c.member(3).raft
            if away:
                await c.crash(3)
                await until(lambda: 3 not in c.system(1).live)
            await c.nodes[1].change_members("log", "remove", 3)
            bodies += await c.fill(1, 3, 6 * KIB)
            if away:
                await c.start(3)
            await c.bare(3)
            books = payload_books(c.system(3))
            assert not books["wal"] and not any(books["generations"].values())
            left = c.system(3).host.replica_gc.departed[c.member(1).uid]
            assert left.term >= before.term and (left.last_term, left.last_index) >= (1, 10)
            await c.restart(3)
            assert not c.system(3).members
            assert c.system(3).host.replica_gc.departed[c.member(1).uid] == left
            await all_live(c)
            # The node that was removed has no say, whoever asks.
            await c.nodes[1].change_members("log", "add", 3)
            await until(lambda: c.replica(3) is not None)
            assert c.member(3).raft.promise == (left.last_term, left.last_index)
            await c.applied()
            assert [body for _, body in await c.read(3)] == bodies
            await c.restart(3)
            await all_live(c)
            await c.applied()
            assert [body for _, body in await c.read(3)] == bodies
        await c.roll(3)
        await c.restart(3)
        await all_live(c)
        await c.lead(3)
        assert [body for _, body in await c.read(3)] == bodies
        await c.append(3, [(b"", b"as a leader")])


async def test_a_node_that_was_removed_makes_no_replica_for_those_who_have_not_heard(tmp_path: Path) -> None:
    """2 and 3 leave in one joint change while 1 hears nothing; their logs are gone. 1 asks with the old configuration:
    it must neither win nor make them make replicas."""
    async with cluster(tmp_path, 5, group="") as c:
        await all_live(c)
        await c.create("log", [1, 2, 3])
        await c.lead(2)
        await c.applied()
        c.partition(1)
        await until(lambda: 1 not in c.system(2).live)
        await c.append(2, [(b"", b"committed without one")])
        changes = [("add", 4), ("add", 5), ("remove", 2), ("remove", 3)]
        await c.nodes[2].change_membership("log", changes)
        await c.bare(2, 3)
        for number in (4, 5):
            await c.crash(number)
        c.network.heal()
        await until(lambda: c.system(1).live >= {1, 2, 3})
        asked = c.member(1).raft.term
        for _ in range(5):
            c.nodes[1].campaign("log")
            await trio.testing.wait_all_tasks_blocked()
        await until(lambda: raft_of(c.member(1)).elapsed >= 1 or c.member(1).raft.term > asked)
        assert not c.system(2).members and not c.system(3).members and not c.leads(1)
        await c.start(4)
        await c.start(5)
        leader = await c.leader(among=[4, 5])
        await c.applied(among=[1, 4, 5])
        assert (await c.read(1))[-1] == (b"", b"committed without one") and leader in (4, 5)


async def test_a_removed_leader_hands_in_its_replica(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await c.lead(1)
        await c.fill(1, 3, KIB)
        found = await c.nodes[1].change_members("log", "remove", 1)
        assert found["voters"] == [2, 3]
        leader = await c.leader(among=[2, 3])
        await c.bare(1)
        await c.append(leader, [(b"", b"on")])


async def test_deletion_is_a_command_and_reaches_who_was_away(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await c.lead(1)
        await c.append(1, [(b"", b"x")])
        await c.applied()
        uid = c.member(1).uid
        with pytest.raises(NotLeader):
            await c.nodes[2].delete_group("log")
        await c.crash(3)
        await until(lambda: 3 not in c.system(1).live)
        await c.nodes[1].delete_group("log")
        await c.bare(1, 2)
        with pytest.raises(LogyardError):
            await c.append(1, [(b"", b"late")])
        await c.start(3)
        await c.bare(3)
        for number in c.ids:
            assert uid in c.system(number).host.groups.deleted
            await c.restart(number)
            assert not c.system(number).members


async def test_nothing_is_done_after_a_deletion(tmp_path: Path) -> None:
    """A command of the same turn, behind the deletion: it must not be answered as done."""
    async with cluster(tmp_path) as c:
        await c.lead(1)
        outcomes: list[str] = []

        async def append() -> None:
            try:
                await c.append(1, [(b"", b"late")])
                outcomes.append("done")
            except LogyardError as error:
                outcomes.append(error.code)

        system, member = c.system(1), c.member(1)
        system.ready_loop.hold()
        system.replicas.commands.propose(member, "delete")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(append)
            await trio.testing.wait_all_tasks_blocked()
            system.ready_loop.release()
        assert outcomes in (["unknown"], ["group_stopped"])
        assert member.machine.end == 0  # type: ignore[attr-defined]
        await until(lambda: not any(c.system(number).members for number in c.ids))


async def test_a_deletion_behind_a_removal_reaches_who_is_removed(tmp_path: Path) -> None:
    """Both are applied in one turn: the leader has appended the configuration without node 4, which it sends to nobody
    else, and node 4 is no member by definition."""
    async with cluster(tmp_path, 4, group="") as c:
        await all_live(c)
        await c.create("log", [1, 2, 3])
        await c.lead(1)
        await c.nodes[1].change_membership("log", [("add", 4)])
        await c.applied()
        system, member = c.system(1), c.member(1)
        system.ready_loop.hold()
        member.raft.propose_membership([Change("remove", 4), Change("demote", 3)])
        system.replicas.commands.propose(member, "delete")
        system.ready_loop.release()
        await until(lambda: not any(c.system(number).members for number in c.ids), "it is gone everywhere")


async def test_a_replica_of_a_configuration_that_was_never_committed_goes(tmp_path: Path) -> None:
    """Whoever offered it was overruled, and nobody else knows of it: it has to show itself, while all links stand."""
    async with cluster(tmp_path, 4, group="") as c:
        await all_live(c)
        await c.create("log", [1, 2, 3])
        await c.lead(1)
        uid = c.member(1).uid
        await c.system(4).host.groups._store([c.member(1).spec], {uid: 2})
        assert uid in c.system(4).members
        await until(lambda: uid not in c.system(4).members, "it is told")
        await c.nodes[1].change_membership("log", [("add", 4)])
        await c.applied()
        assert uid in c.system(4).members


async def test_a_node_that_has_another_group_of_the_name_is_not_added(tmp_path: Path) -> None:
    """It would count for the quorum and refuse the group: nothing could be committed any more."""
    async with cluster(tmp_path, 3, group="") as c:
        await all_live(c)
        await c.create("log", [1, 2])
        await c.nodes[3].create_groups([{"name": "log", "members": [3], "machine": "log"}])
        await until(lambda: c.leads(3))
        with pytest.raises(Refused, match="node 1 can't be a member: the name 'log' is taken"):
            await c.nodes[3].change_membership("log", [("add", 1)])
        await c.append(3, [(b"", b"goes on")])
        await c.crash(1)
        await until(lambda: 1 not in c.system(3).live)
        await c.nodes[3].change_membership("log", [("add_learner", 1)])


async def test_a_deletion_that_only_a_follower_applied_is_finished_by_the_next_leader(tmp_path: Path) -> None:
    """The leader dies after its command is committed and before anybody is told."""
    async with cluster(tmp_path) as c:
        await c.lead(1)
        await c.applied()
        told: set[int] = set()

        def silent(node: int, kind: int, *_: object, **__: object) -> bool:
            if kind == DELETE_GROUPS:
                told.add(node)
            return False

        c.system(1).peers.send_blob = silent  # type: ignore[method-assign]
        await c.nodes[1].delete_group("log")
        await until(lambda: told == {2, 3})
        await c.crash(1)
        await c.bare(2, 3)
        await c.start(1)
        await c.bare(1)


async def test_without_a_quorum_a_group_is_deleted_by_force_only(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await c.leader()
        for number in (2, 3):
            await c.crash(number)
        await until(lambda: c.system(1).live == {1} and c.member(1).raft.role != LEADER)
        with pytest.raises(NotLeader):
            await c.nodes[1].delete_group("log")
        await c.nodes[1].delete_group("log", force=True)
        assert not c.system(1).members
        await c.start(2)
        await c.bare(2)


async def test_a_transfer_waits_for_the_target_and_ends_in_time(tmp_path: Path) -> None:
    async with cluster(tmp_path, election_ticks=40) as c:
        await c.lead(1)
        await c.fill(1, 20, 20 * KIB)
        c.network.delay(1, 3, 4)
        await c.fill(1, 20, 20 * KIB)
        with trio.fail_after(10):
            await c.transfer(1, 3)
        assert c.leads(3) or c.member(3).raft.role == LEADER
        await c.append(await c.leader(), [(b"", b"x")])
        # One that may not lead does not take over: the transfer ends with a reason, and the group goes on.
        leader = await c.leader()
        target = next(number for number in c.ids if number != leader)
        c.member(target).raft.may_lead = False
        with trio.fail_after(10), pytest.raises(Refused, match="did not take over"):
            await c.transfer(leader, target)
        await c.append(leader, [(b"", b"y")])


async def test_a_member_asks_to_lead_when_told_to(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await c.lead(1)
        await c.crash(1)
        await until(lambda: 1 not in c.system(2).live)
        c.nodes[2].campaign("log")
        await c.append(await c.leader(), [(b"", b"x")])
        with pytest.raises(LogyardError):
            c.nodes[2].campaign("no such")


async def test_configurations_survive_the_log(tmp_path: Path) -> None:
    """A joint configuration and a promotable learner, in checkpoints and in snapshots."""
    async with cluster(tmp_path, 4, group="") as c:
        await all_live(c)
        await c.create("log", [1, 2, 3])
        await c.lead(1)
        await c.fill(1, 5, KIB)
        await c.crash(4)
        await c.nodes[1].change_membership("log", [("add_promotable", 4, 1 << 40), ("demote", 3)], auto_leave=False)
        want = c.member(1).raft.configuration
        assert want.joint and want.promotable
        await c.applied(among=[1, 2, 3])
        await c.nodes[1].snapshot(["log"])
        await c.roll(1)
        await c.roll(2)
        for number in (1, 2, 3):
            await c.restart(number)
            assert c.member(number).raft.configuration == want
        entry = next((one for one in c.member(3).raft.log.entries if one.kind == CONFIGURATION), None)
        assert entry is not None


async def test_a_crash_while_a_replica_is_made_anew_leaves_it_to_be_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The WAL says that the old replica's entries are void, and the new one's definition was not stored."""
    async with cluster(tmp_path) as c:
        await c.lead(1)
        bodies = await c.fill(1, 10, 3 * KIB)
        await c.applied()
        await c.nodes[1].change_members("log", "remove", 3)
        await c.bare(3)
        asked = trio.Event()

        async def store(*_: object) -> None:
            asked.set()
            await trio.sleep_forever()

        monkeypatch.setattr(c.system(3).storage.meta_batch, "store_specs", store)
        await c.nodes[1].change_members("log", "add", 3)
        with trio.fail_after(10):
            await asked.wait()
        await c.restart(3)
        assert not c.system(3).members
        await c.applied()
        assert [body for _, body in await c.read(3)] == bodies
        await c.restart(3)
        await c.applied()
        assert [body for _, body in await c.read(3)] == bodies


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(4))
async def test_members_change_at_random_while_nodes_crash(tmp_path: Path, seed: int) -> None:
    """Whatever was acknowledged is there, once and in order, on whoever the members are in the end."""
    rng = random.Random(seed)
    async with cluster(tmp_path, 5, group="", payload_cache_bytes=0) as c:
        await all_live(c)
        await c.create("log", [1, 2, 3])
        acknowledged: list[bytes] = []
        changed = 0
        for step in range(12):
            leader = await c.leader()
            body = (b"%04d" % step).ljust(3 * KIB, b".")
            try:
                await c.append(leader, [(b"", body)])
                acknowledged.append(body)
                raft = c.member(leader).raft
                voters = {*raft.configuration.voters}
                wanted = {*rng.sample([node for node in c.ids if node in c.nodes], 3)}
                changes = [("add_promotable" if rng.random() < 0.3 else "add", node) for node in wanted - voters]
                changes = [(kind, node) for kind, node in changes if node not in raft.configuration.learners]
                changes += [("remove", node) for node in voters - wanted]
                with trio.move_on_after(2):
                    await c.nodes[leader].change_membership("log", changes)
                    changed += 1
            except (LogyardError, AssertionError) as error:
                assert isinstance(error, LogyardError), error
            if rng.random() < 0.3:
                await c.restart(rng.choice(c.ids))
            if rng.random() < 0.2:
                await c.roll(rng.choice(c.ids))
        await all_live(c)
        leader = await c.leader()
        members = c.member(leader).raft.configuration.nodes()
        await c.append(leader, [(b"", b"last")])
        await c.applied(among=members)
        for number in members:
            found = [body for _, body in await c.read(number)]
            assert [body for body in found if body in {*acknowledged}] == acknowledged and found[-1] == b"last"
            assert len(found) == len({*found})
        assert changed >= 3 and len(acknowledged) >= 9


async def test_a_change_that_was_overwritten_is_not_reported_as_done(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await c.lead(1)
        await c.applied()
        c.partition(1)
        errors: list[LogyardError] = []

        async def remove() -> None:
            with pytest.raises(NotLeader) as caught:
                await c.nodes[1].change_members("log", "remove", 3)
            errors.append(caught.value)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(remove)
            await until(lambda: c.member(1).raft.configuration.voters == (1, 2))
            # The entries in its place are fewer: nothing is ever applied at the change's index.
            await c.leader(among=[2, 3])
            c.network.heal()
        assert errors and c.member(1).raft.configuration.voters == (1, 2, 3)


async def test_a_transfer_whose_target_dies_as_it_takes_over_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leadership, "TRANSFER_SECONDS", 0.3)
    async with cluster(tmp_path) as c:
        await c.lead(1)
        await c.applied()
        raft = c.member(1).raft
        outcome: list[str] = []

        async def transfer() -> None:
            with pytest.raises(Refused) as caught:
                await c.transfer(1, 2)
            outcome.append(str(caught.value))

        c.partition(1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(transfer)
            await until(lambda: raft.transferring)
            raft.step(
                Message(VOTE, raft.uid, 1, 2, raft.term + 1, raft.log.last_index, raft.log.last_term, 0, TRANSFER)
            )
            c.system(1).ready_loop.mark(c.member(1))
        assert "did not take over" in outcome[0]
