"""Reads of any member with a bound on their age: what was acknowledged so long ago is in them, or they are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from logyard.engine.host import follower_reads
from logyard.engine.raft.core import LEADER
from logyard.protocol.errors import Busy

from .cluster import Cluster, cluster, until

HOUR = 3600.0


async def within(run: Cluster, number: int, staleness_s: float) -> int:
    """A read within a bound: the end of the log that it sees."""
    await run.system(number).host.follower_reads.within(run.member(number), staleness_s)
    end: int = run.log(number).end
    return end


async def test_a_read_of_any_member_sees_what_was_acknowledged_before(tmp_path: Path) -> None:
    async with cluster(tmp_path) as run:
        leader = await run.leader()
        for number in range(1, 30):
            await run.append(leader, [(b"", b"x")])
            for node in run.ids:
                assert await within(run, node, 0.0) >= number, "no bound at all is a linearizable read"


async def test_a_member_that_is_cut_off_says_so_instead_of_answering(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path) as run:
        leader = await run.leader()
        follower = next(node for node in run.ids if node != leader)
        await run.fill(leader, 3, 10)
        assert await within(run, follower, 0.0) == 3
        run.partition(follower)
        await run.fill(leader, 3, 10)
        assert await within(run, follower, HOUR) == 3, "an old answer, as was allowed"
        with monkeypatch.context() as brief:
            brief.setattr(follower_reads, "PATIENCE_S", 0.2)
            for _ in range(2):
                with pytest.raises(Busy):
                    await within(run, follower, 0.0)
        run.network.heal()
        await until(lambda: run.member(follower).raft.leader, "it follows again")
        await run.applied()
        assert await within(run, follower, 0.0) >= 6


async def test_a_leader_without_a_quorum_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_reads, "PATIENCE_S", 0.2)
    async with cluster(tmp_path) as run:
        leader = await run.leader()
        run.partition(leader)
        assert run.member(leader).raft.role == LEADER
        with pytest.raises(Busy):
            await within(run, leader, 0.0)
