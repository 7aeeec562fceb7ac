"""What each level of a read promises, from histories: docs/machines/log.md has the table."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest
import trio

from logyard.engine.raft.core import LEADER, Raft
from logyard.engine.raft.messages import APPEND_REPLY
from logyard.protocol.errors import LogyardError, NotLeader

from .cluster import Cluster, cluster, raft_of, until

STRONG = ("linearizable", "bounded")


async def end_of(c: Cluster, number: int, level: str) -> int:
    """The log's end as a node says it."""
    return (await c.nodes[number].bounds("log", level, staleness_s=0.0))["end"]


async def test_a_fresh_leader_answers_when_it_has_applied_what_was_acknowledged(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        leader = await c.leader()
        for number in range(3):
            await c.append(leader, [(b"", b"%d" % number)])
        for number in c.ids:
            await c.crash(number)
        for number in c.ids:
            await c.start(number)
        asked = 0
        with trio.fail_after(20):
            while not any(c.leads(number) and c.log(number).end == 3 for number in c.ids):
                for number in c.ids:
                    raft = c.member(number).raft
                    if raft.role == LEADER and raft.applied < raft.lead_index:
                        # One that is not through within an election says so.
                        with suppress(NotLeader):
                            assert await end_of(c, number, "leader") == 3
                            asked += 1
                await trio.lowlevel.checkpoint()
        assert asked, "it was asked before it had applied anything"
        page = await c.page(await c.leader(), 0)
        assert len(page) == 3


async def test_a_leader_that_can_not_commit_says_so_within_an_election(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, deaf = Raft.step, set[int]()
    monkeypatch.setattr(
        Raft, "step", lambda raft, m: None if m.kind == APPEND_REPLY and raft.node in deaf else step(raft, m)
    )
    async with cluster(tmp_path) as c:
        leader = await c.leader()
        await c.append(leader, [(b"", b"x")])
        other = next(number for number in c.ids if number != leader)
        deaf.add(other)
        await c.transfer(leader, other)
        assert c.member(other).raft.role == LEADER
        with trio.fail_after(20), pytest.raises(NotLeader):
            await c.nodes[other].bounds("log", "leader")


async def test_histories_of_strong_reads_hold_what_was_acknowledged(tmp_path: Path) -> None:
    """Appends and reads of every member through partitions and crashes: a read at a strong level that begins after an
    acknowledgement, or after the end of another strong read, is not behind it."""
    draw = random.Random(7)
    async with cluster(tmp_path) as c:
        acknowledged = seen = 0
        reads = dict.fromkeys(STRONG, 0)
        done = False
        going = trio.Event()
        going.set()

        async def quietly(call: Callable[[], Awaitable[None]]) -> None:
            while not done:
                # A crash waits until nothing runs.
                await going.wait()
                with trio.move_on_after(2):
                    try:
                        await call()
                    except (LogyardError, KeyError):
                        pass
                await trio.sleep(0.001)

        async def write() -> None:
            nonlocal acknowledged
            number = draw.choice(list(c.nodes))
            offsets = await c.append(number, [(b"", b"x")])
            acknowledged = max(acknowledged, offsets.stop)

        async def read() -> None:
            nonlocal seen
            level, number = draw.choice(STRONG), draw.choice(list(c.nodes))
            least = max(acknowledged, seen)
            found = await end_of(c, number, level)
            assert found >= least, f"{level} on node {number}: {found}, after {least} was known"
            seen = max(seen, found)
            reads[level] += 1

        async with trio.open_nursery() as nursery:
            for call in (write, write, read, read, read):
                nursery.start_soon(quietly, call)
            rounds = 0
            while rounds < 8 or min(reads.values()) < 20:
                rounds += 1
                before = acknowledged
                await until(lambda before=before: acknowledged > before + 10, "appends go on")
                victim = draw.choice(c.ids)
                if draw.random() < 0.5:
                    c.partition(victim)
                    await c.leader(among=[number for number in c.ids if number != victim])
                    c.network.heal()
                else:
                    going = trio.Event()
                    await c.restart(victim)
                    going.set()
            done = True


async def test_linearizable_reads_of_one_turn_share_a_round(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        leader = await c.leader()
        await c.append(leader, [(b"", b"x")])
        found: list[int] = []

        async def ask() -> None:
            found.append(await end_of(c, leader, "linearizable"))

        assert await end_of(c, leader, "linearizable") == 1
        reads = raft_of(c.member(leader)).reads
        assert reads is not None
        before = reads.last_number
        async with trio.open_nursery() as nursery:
            for _ in range(50):
                nursery.start_soon(ask)
        assert found == [1] * 50 and reads.last_number <= before + 2
