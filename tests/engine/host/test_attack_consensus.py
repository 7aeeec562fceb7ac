"""Attacks on the consensus side of the host: lost wake-ups, replicas that stay behind, writes of who is gone.

Each test was a way to break the first version of these parts, or a doubt that turned out fine and is cheap to keep.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
import trio.testing

from logyard.engine.entry import COMMANDS, build_plain
from logyard.engine.host import durability as durability_module
from logyard.engine.log.wal import WalItem
from logyard.engine.raft.core import LEADER

from .cluster import KIB, cluster, until


async def test_who_gives_up_waiting_for_the_wal_does_not_take_the_next_batch_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verb that has the WAL to itself is cancelled while a batch is under way: what queued behind that batch is
    written at its end all the same."""
    monkeypatch.setattr(durability_module, "INLINE_BYTES", -1)
    async with cluster(tmp_path, 1) as c:
        await c.leader()
        durability = c.system(1).durability
        await until(lambda: not durability.busy)
        durability.busy = True
        with trio.move_on_after(0):
            await durability.exclusive(lambda: None)
        done = trio.Event()

        async def append() -> None:
            await c.append(1, [(b"", b"x")])
            done.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(append)
            await until(lambda: durability.items)
            durability._freed()
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
        await until(lambda: not system.durability.busy)
        await c.nodes[1].change_members("log", "remove", 3)
        durability = system.durability
        durability.busy = True
        last = member.raft.log.last_index
        late = WalItem(member.uid)
        late.entries = [build_plain(last + 1, member.raft.term, COMMANDS, 0, b"late")]
        late.truncate = last + 1
        late.token = (member, (), None)
        member.unpersisted += 1
        durability.add(late)
        assert member.raft.role != LEADER
        await until(lambda: not system.members, "the replica goes")
        await c.nodes[1].change_members("log", "add", 3)
        await until(lambda: durability._idle, "the new replica waits for the WAL")
        c.partition(3)
        durability._freed()
        await until(lambda: system.members and not durability.items and not durability.busy)
        assert c.member(3).raft.log.last_index == 0
        await c.restart(3)
        assert c.member(3).state == "running", c.member(3).reason
        c.network.heal()
        await c.applied()
        assert c.member(3).state == "running", c.member(3).reason
