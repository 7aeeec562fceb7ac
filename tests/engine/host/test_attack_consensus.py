"""Attacks on the consensus side of the host: lost wake-ups, replicas that stay behind, writes of who is gone.

Each test was a way to break the first version of these parts, or a doubt that turned out fine and is cheap to keep.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from logyard.engine.entry import COMMANDS, build_plain
from logyard.engine.log import group_commit as durability_module
from logyard.engine.log.wal import WalItem
from logyard.engine.raft.core import LEADER
from logyard.engine.raft.messages import TRANSFER, VOTE, Message
from logyard.engine.replica import leadership
from logyard.engine.transport.blobs import DELETE_GROUPS, UNKNOWN_GROUPS
from logyard.protocol.errors import GroupExists, LogyardError, NotLeader, Refused

from .cluster import KIB, cluster, until


async def test_who_gives_up_waiting_for_the_wal_does_not_take_the_next_batch_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verb that has the WAL to itself is cancelled while a batch is under way: what queued behind that batch is
    written at its end all the same."""
    monkeypatch.setattr(durability_module, "INLINE_BYTES", -1)
    async with cluster(tmp_path, 1) as c:
        await c.leader()
        group_commit = c.system(1).group_commit
        await until(lambda: not group_commit.busy)
        group_commit._alone = True
        with trio.move_on_after(0):
            await group_commit.exclusive(lambda: None)
        done = trio.Event()

        async def append() -> None:
            await c.append(1, [(b"", b"x")])
            done.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(append)
            await until(lambda: group_commit.items)
            group_commit._alone = False
            group_commit._freed()
            with trio.move_on_after(2):
                await done.wait()
            assert done.is_set(), "the append waits for a batch that nobody starts"


async def test_a_group_with_a_promotable_learner_that_is_away_is_quiet(tmp_path: Path) -> None:
    async with cluster(tmp_path, 4, group="") as c:
        await until(lambda: all(len(one.system.live) == 4 for one in c.nodes.values()))
        await c.create("log", [1, 2, 3])
        await c.lead(1)
        await c.crash(4)
        await until(lambda: 4 not in c.system(1).live)
        await c.nodes[1].change_members("log", "add_promotable", 4)
        await c.applied(among=[1, 2, 3])
        await until(lambda: not any(c.system(number).active for number in (1, 2, 3)), "nobody needs a tick")
        await c.start(4)
        await until(lambda: c.member(1).raft.configuration.voters == (1, 2, 3, 4), "it is promoted when it is back")


@pytest.mark.parametrize("kind", ["learner", "voter"])
async def test_who_was_removed_while_it_was_away_hands_in_its_replica(tmp_path: Path, kind: str) -> None:
    """A learner never asks for votes, so nobody would tell it."""
    async with cluster(tmp_path, 4, group="") as c:
        await until(lambda: all(len(one.system.live) == 4 for one in c.nodes.values()))
        await c.create("log", [1, 2, 3])
        await c.lead(1)
        await c.nodes[1].change_members("log", "add_learner" if kind == "learner" else "add", 4)
        await c.fill(1, 3, KIB)
        await c.applied()
        await c.crash(4)
        await until(lambda: 4 not in c.system(1).live)
        await c.nodes[1].change_members("log", "remove", 4)
        await c.start(4)
        await until(lambda: not c.system(4).members, "its replica goes")


async def test_a_replica_made_anew_is_not_stopped_by_what_the_old_one_had_queued(tmp_path: Path) -> None:
    """The disk is slow: writes of the replica that went still wait when the new one is made."""
    async with cluster(tmp_path) as c:
        await c.lead(1)
        await c.fill(1, 5, KIB)
        await c.applied()
        system, member = c.system(3), c.member(3)
        await until(lambda: not system.group_commit.busy)
        await c.nodes[1].change_members("log", "remove", 3)
        await until(lambda: not system.group_commit.busy)
        group_commit = system.group_commit
        group_commit._alone = True
        last = member.raft.log.last_index
        late = WalItem(member.uid)
        late.entries = [build_plain(last + 1, member.raft.term, COMMANDS, 0, b"late")]
        late.truncate = last + 1
        late.token = (member, (), None)
        member.unpersisted += 1
        group_commit.add(late)
        assert member.raft.role != LEADER
        await until(lambda: not system.members, "the replica goes")
        await c.nodes[1].change_members("log", "add", 3)
        await until(lambda: group_commit._idle, "the new replica waits for the WAL")
        c.partition(3)
        group_commit._alone = False
        group_commit._freed()
        await until(lambda: system.members and not group_commit.items and not group_commit.busy)
        assert c.member(3).raft.log.last_index == 0
        await c.restart(3)
        assert c.member(3).state == "running", c.member(3).reason
        c.network.heal()
        await c.applied()
        assert c.member(3).state == "running", c.member(3).reason


async def test_a_creation_that_failed_is_taken_back_by_a_creator_that_is_no_member(tmp_path: Path) -> None:
    """Nobody speaks to it about the group, so nobody would hear of it: also who stored the definition and was cut off
    before it was taken back."""
    async with cluster(tmp_path, 4, group="") as c:
        await until(lambda: all(len(one.system.live) == 4 for one in c.nodes.values()))
        await c.create("taken", [3])
        spec = {"name": "taken", "members": [1, 2, 3], "machine": "log"}
        told = c.system(4).peers.send_blob
        cut: list[int] = []

        def lossy(node: int, kind: int, *rest: Any, **more: Any) -> bool:
            if kind == DELETE_GROUPS and node == 1 and not cut:
                cut.append(kind)
                return False
            return told(node, kind, *rest, **more)

        c.system(4).peers.send_blob = lossy  # type: ignore[method-assign]
        with pytest.raises(GroupExists):
            await c.nodes[4].create_groups([spec])
        await until(lambda: not c.system(2).members)
        assert cut
        c.partition(1)
        await until(lambda: 1 not in c.system(4).live)
        c.network.heal()
        await until(lambda: not c.system(1).members and not c.system(1).names, "node 1 drops it, too")


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
                await c.nodes[1].transfer("log", 2)
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


async def test_a_read_that_is_refused_leaves_nothing_behind(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await c.lead(1)
        for _ in range(3):
            with pytest.raises(NotLeader):
                await c.system(2).leadership.read_index(c.member(2))
        assert not c.member(2).reads


async def test_a_fault_of_the_turn_ends_the_node_and_not_the_connection_that_started_it(tmp_path: Path) -> None:
    """Bytes of a client or a peer start a turn in place; the bug is the engine's, and is not lost."""
    async with cluster(tmp_path) as c:
        await c.lead(1)
        await c.applied()
        system = c.system(1)
        await until(lambda: not system.group_commit.busy)

        def broken(_: object) -> None:
            raise ZeroDivisionError("a bug")

        system.peers.send = broken  # type: ignore[assignment]
        ready_loop = system.ready_loop
        ready_loop._ended = 0.0
        ready_loop.hold()
        c.member(1).raft.on_link_reset(2)
        ready_loop.mark(c.member(1))
        ready_loop.release()
        error = ready_loop._error
        ready_loop._error = None
        assert isinstance(error, ZeroDivisionError)
        del system.peers.send
        assert not ready_loop.running


async def test_a_new_member_that_hears_of_nothing_but_a_snapshot_asks_what_it_is_of(tmp_path: Path) -> None:
    """Its question was lost with the link, and the leader has no log left to probe with."""
    async with cluster(tmp_path, 4, group="") as c:
        await until(lambda: all(len(one.system.live) == 4 for one in c.nodes.values()))
        await c.create("log", [1, 2, 3])
        await c.lead(1)
        bodies = await c.fill(1, 20, KIB)
        await c.applied()
        await c.nodes[1].snapshot()
        await c.roll(1)
        await until(lambda: c.member(1).raft.log.snapshot_index > 10)
        send = c.system(4).peers.send_blob
        lost: list[int] = []

        def lossy(node: int, kind: int, *rest: Any, **more: Any) -> bool:
            if kind == UNKNOWN_GROUPS and not lost:
                lost.append(node)
                c.partition(4)
                return False
            return send(node, kind, *rest, **more)

        c.system(4).peers.send_blob = lossy  # type: ignore[method-assign]
        with trio.move_on_after(0.2):
            await c.nodes[1].change_members("log", "add", 4)
        await until(lambda: lost and 4 not in c.system(1).live)
        c.network.heal()
        await c.applied(among=[1, 2, 3, 4])
        assert [body for _, body in await c.read(4)] == bodies


async def test_a_replica_that_goes_a_second_time_keeps_the_promises_of_the_first(tmp_path: Path) -> None:
    """Removed again before it had caught up: what the first one held was acknowledged all the same."""
    async with cluster(tmp_path) as c:
        await c.lead(1)
        await c.fill(1, 10, KIB)
        await c.applied()
        replica_gc, uid = c.system(3).replica_gc, c.member(1).uid
        for _ in range(2):
            await c.nodes[1].change_members("log", "remove", 3)
            await until(lambda: not c.system(3).members)
            first = replica_gc.departed[uid]
            assert (first.last_term, first.last_index) >= (1, 10)
            await c.nodes[1].change_members("log", "add", 3)
            await c.applied()
        member = c.member(3)
        member.raft.promise = (first.last_term + 1, 1)
        await replica_gc._drop(member, member.raft.applied + 1, member.raft.term)
        assert replica_gc.departed[uid][2:4] == (first.last_term + 1, 1)


async def test_a_group_that_waits_for_room_is_asked_when_another_ones_answer_made_it(tmp_path: Path) -> None:
    """Nothing else would make its core look again: its own followers have answered everything."""
    async with cluster(tmp_path) as c:
        await c.lead(1)
        await c.applied()
        system, member = c.system(1), c.member(1)
        await until(lambda: member not in system.active and not member.dirty)
        for at_an_answer in (True, False):
            system.windows[2].waiting[member.uid] = None
            if at_an_answer:
                system.outbound.resume(2)
            else:
                system.outbound.resume_all()
            assert not system.windows[2].waiting and member.raft.has_ready
            await until(lambda: not member.dirty)
