"""Replicas that go, on whole nodes: who was removed while it was away, who comes back, and what is remembered of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from logyard.engine.entry import COMMANDS, build_plain
from logyard.engine.log.wal import WalItem
from logyard.engine.raft.core import LEADER

from .cluster import KIB, cluster, until


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
        await until(lambda: not system.storage.group_commit.busy)
        await c.nodes[1].change_members("log", "remove", 3)
        await until(lambda: not system.storage.group_commit.busy)
        group_commit = system.storage.group_commit
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


async def test_a_replica_that_goes_a_second_time_keeps_the_promises_of_the_first(tmp_path: Path) -> None:
    """Removed again before it had caught up: what the first one held was acknowledged all the same."""
    async with cluster(tmp_path) as c:
        await c.lead(1)
        await c.fill(1, 10, KIB)
        await c.applied()
        replica_gc, uid = c.system(3).host.replica_gc, c.member(1).uid
        for _ in range(2):
            await c.nodes[1].change_members("log", "remove", 3)
            await until(lambda: not c.system(3).members)
            first = replica_gc.departed[uid]
            assert (first.last_term, first.last_index) >= (1, 10)
            await c.nodes[1].change_members("log", "add", 3)
            await c.applied()
        member = c.member(3)
        member.raft.promise = (first.last_term + 1, 1)
        await replica_gc._drop(uid, member.raft.applied + 1, member.raft.term)
        assert replica_gc.departed[uid][2:4] == (first.last_term + 1, 1)
