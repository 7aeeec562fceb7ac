"""A wiped or restored data directory is recognised by the others, and takes no part under its old name (fault D12)."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
import trio

from logyard.engine.disk.door import Disk
from logyard.engine.identity import Acquaintances, Origin
from logyard.engine.log import checkpoint_rows as rows
from logyard.engine.log import meta_rows
from logyard.engine.recovery.incarnation import readmit
from logyard.protocol.errors import LogyardError, Outdated, Refused

from .cluster import Cluster, cluster, until


def directory(c: Cluster, number: int) -> Path:
    return c.path / f"node-{number}"


def copy(c: Cluster, number: int, to: Path) -> None:
    shutil.copytree(directory(c, number), to)


async def restore(c: Cluster, number: int, source: Path) -> None:
    shutil.rmtree(directory(c, number))
    shutil.copytree(source, directory(c, number))


async def refused(c: Cluster, number: int, by: Iterable[int]) -> str:
    """Wait until a node was told that it is outdated; what it was told. It ends, and it never voted or wrote."""
    await until(lambda: number in c.failures, f"node {number} ends")
    error = c.failures.pop(number)
    assert isinstance(error, Outdated), error
    shown = [row.outdated for other in by for row in c.system(other).peers.status() if row.node == number]
    assert all(shown), "the others' status says it"
    return str(error)


def known(c: Cluster, number: int) -> Origin:
    """What a node knows of node 3."""
    return c.system(number).incarnation.acquaintances.known[3]


def stored(c: Cluster, number: int) -> dict[int, Origin]:
    """What a node has of the others in its meta store."""
    return meta_rows.peers(c.system(number).storage.meta_batch.meta.scan(meta_rows.PEER))


async def test_a_wiped_directory_is_refused_and_comes_back_after_it_was_removed_and_forgotten(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await c.fill(await c.leader(), 3, 100)
        await c.crash(3)
        shutil.rmtree(directory(c, 3))
        await c.start(3)
        assert "is not the one it had" in await refused(c, 3, (1, 2))
        assert not c.system(3).members, "it took part in nothing"
        await c.crash(3)
        # It is marked: also alone, with nobody to tell it, it does not start.
        with pytest.raises(Outdated, match="A node that lost its data"):
            await c.build(3).open()
        with pytest.raises(Refused, match="still a member of 1 logs"):
            await c.nodes[1].forget_node(3)
        leader = await c.leader(among=(1, 2))
        await c.nodes[leader].change_members("log", "remove", 3)
        await c.applied(among=(1, 2))
        for number in (1, 2):
            assert await c.nodes[number].forget_node(3)
        shutil.rmtree(directory(c, 3))
        await c.start(3)
        await until(lambda: len(c.system(3).live) == 3, "node 3 is met as a new one")
        leader = await c.leader(among=(1, 2))
        await c.nodes[leader].change_members("log", "add", 3)
        await c.applied()
        assert len(await c.read(3)) == 3 and not c.failures


async def test_a_copy_of_before_the_last_start_is_refused(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await c.fill(await c.leader(), 3, 100)
        await c.crash(3)
        copy(c, 3, tmp_path / "copy")
        await c.start(3)
        await until(lambda: all(3 in c.system(number).live for number in (1, 2)))
        await c.crash(3)
        # Its start makes the epoch that the lost one had as well: two lives with one number.
        await restore(c, 3, tmp_path / "copy")
        await c.start(3)
        assert "in another life" in await refused(c, 3, (1, 2))
        await c.crash(3)


async def test_a_copy_of_two_starts_ago_is_refused(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await c.crash(3)
        copy(c, 3, tmp_path / "copy")
        for _ in range(2):
            await c.start(3)
            await until(lambda: all(3 in c.system(number).live for number in (1, 2)))
            await c.crash(3)
        await restore(c, 3, tmp_path / "copy")
        await c.start(3)
        assert "is before" in await refused(c, 3, (1, 2))
        await c.crash(3)


async def test_a_copy_taken_in_the_same_life_is_refused_by_what_was_durable_later(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await c.lead(1)
        await c.fill(1, 3, 100)
        await c.applied()
        group_commit = c.system(3).storage.group_commit
        await until(lambda: group_commit.sealed and not group_commit.busy)
        copy(c, 3, tmp_path / "copy")
        await c.fill(1, 3, 100)
        await c.applied()
        written = c.system(3).vitals().written
        others = [c.system(number).incarnation.acquaintances for number in (1, 2)]
        await until(lambda: all(one.known[3].written >= written for one in others))
        await c.crash(3)
        await restore(c, 3, tmp_path / "copy")
        await c.start(3)
        assert "batches and had" in await refused(c, 3, (1, 2))
        await c.crash(3)


async def test_what_a_copy_wrote_while_nobody_heard_it_does_not_count(tmp_path: Path) -> None:
    """Seed 100185 of the simulator: a copy that ended before anybody refused it had as many batches at its next start
    as the lost life, and was believed."""
    async with cluster(tmp_path) as c:
        await c.lead(1)
        await c.create("alone", [3], by=3)
        group_commit = c.system(3).storage.group_commit
        await until(lambda: group_commit.sealed and not group_commit.busy)
        copy(c, 3, tmp_path / "copy")
        await c.fill(1, 3, 100)
        await c.applied()
        written = c.system(3).vitals().written
        for number in (1, 2):
            await until(lambda number=number: known(c, number).written >= written)
            await c.system(number).storage.meta_batch.commit(tuple)
        for number in (1, 2, 3):
            await c.crash(number)
        await restore(c, 3, tmp_path / "copy")
        for _ in range(2):
            await c.start(3)
            await c.leader("alone")
            while c.system(3).wal.next_batch <= written + 10:
                await c.append(3, [(b"", b"more")], "alone")
            await c.crash(3)
        await c.start(1)
        await c.start(2)
        await c.start(3)
        assert "batches and had" in await refused(c, 3, (1, 2))
        await c.crash(3)


async def test_an_honest_node_that_was_alone_for_some_lives_is_believed(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await c.create("alone", [3], by=3)
        await c.fill(await c.leader(), 3, 100)
        await c.applied()
        for others in ((), (1, 2), (), (1, 2), (2,), (1,), (1, 2)):
            for number in sorted(c.nodes):
                await c.crash(number)
            await c.start(3)
            await c.leader("alone")
            await c.append(3, [(b"", b"more")], "alone")
            for number in others:
                await c.start(number)
                await until(lambda number=number: number in c.system(3).live and 3 in c.system(number).live)
            await c.append(3, [(b"", b"more")], "alone")
            told = c.system(3).vitals().written
            if others:
                # All that is durable counts again, and is known.
                await until(lambda: c.system(3).vitals().written >= c.system(3).wal.next_batch)
                await until(lambda number=others[-1]: known(c, number).written >= c.system(3).wal.next_batch)
            else:
                assert told < c.system(3).wal.next_batch
        assert not c.failures


async def test_what_is_known_of_the_others_outlives_a_restart_of_all(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await c.fill(await c.leader(), 3, 100)
        for number in (1, 2):
            await until(lambda number=number: 3 in stored(c, number))
        await c.close()
        shutil.rmtree(directory(c, 3))
        for number in c.ids:
            await c.start(number)
        assert "is not the one it had" in await refused(c, 3, (1, 2))
        await c.crash(3)
        await c.leader(among=(1, 2))


async def test_a_cluster_that_forged_hellos_ended_comes_back(tmp_path: Path) -> None:
    """What a release without proofs stored: two nodes the word of a stranger about node 3, node 3 their refusal. The
    two forget it at their next start, node 3 after `logyard readmit`; a directory that did forget is refused again."""
    async with cluster(tmp_path) as c:
        await c.fill(await c.leader(), 3, 100)
        await c.applied()
        await until(lambda: all(3 in stored(c, number) for number in (1, 2)))
        await c.crash(3)
        copy(c, 3, tmp_path / "copy")
        await c.start(3)
        await until(lambda: all(3 in c.system(number).live for number in (1, 2)))
        forged = rows.peer(3, Origin(0, 2**62, 0, 0))
        for number in (1, 2):
            await c.system(number).storage.meta_batch.commit(lambda: [forged])
        refusal = (meta_rows.OUTDATED, b"its epoch 2 is before 4611686018427387904")
        await c.system(3).storage.meta_batch.commit(lambda: [refusal])
        await c.close()
        for number in (1, 2):
            await c.start(number)
        with pytest.raises(Outdated, match="is before 4611686018427387904"):
            await c.build(3).open()
        assert "is before 4611686018427387904" in readmit(Disk(), directory(c, 3))
        assert not readmit(Disk(), directory(c, 3)), "once is enough"
        await c.start(3)
        await until(lambda: all(len(c.system(number).live) == 3 for number in c.ids), "all are back")
        await c.applied()
        assert len(await c.read(3)) == 3 and not c.failures
        # What is refused with reason is so again, whoever readmits it.
        await c.crash(3)
        await restore(c, 3, tmp_path / "copy")
        await c.start(3)
        await refused(c, 3, (1, 2))
        await c.crash(3)
        assert readmit(Disk(), directory(c, 3))
        await c.start(3)
        await refused(c, 3, (1, 2))
        await c.crash(3)


async def test_an_outdated_node_votes_for_nobody_although_a_stranger_asks_it(tmp_path: Path) -> None:
    """Node 1 met the lost life, node 2 did not: one word of node 1's ends the copy's part, with node 2 as well."""
    async with cluster(tmp_path) as c:
        await c.lead(1)
        await c.fill(1, 3, 100)
        await c.applied()
        await c.crash(3)
        copy(c, 3, tmp_path / "copy")
        await c.start(3)
        await until(lambda: 3 in c.system(1).live)
        await c.crash(3)
        await c.crash(2)
        await restore(c, 3, tmp_path / "copy")
        await c.start(3)
        await refused(c, 3, (1,))
        system = c.system(3)
        votes, written = system.member("log").raft.vote, (system.wal.next_batch, system.wal._tail)
        c.system(1).incarnation.acquaintances.forget(3)
        await c.start(2)
        c.member(2).raft.campaign(True)
        c.system(2).ready_loop.mark(c.member(2))
        await c.leader(among=(1, 2))
        assert (system.member("log").raft.vote, (system.wal.next_batch, system.wal._tail)) == (votes, written)
        await c.crash(3)


@pytest.mark.parametrize("seed", range(3))
async def test_honest_crashes_are_never_taken_for_a_lost_directory(tmp_path: Path, seed: int) -> None:
    """Writes are under way at each crash, so that torn and unsealed batches are among what a restart finds."""
    async with cluster(tmp_path, hibernate_after_ms=0) as c:
        for turn in range(8):
            number = 1 + (turn * 7 + seed) % 3
            async with trio.open_nursery() as nursery:
                leader = await c.leader()

                async def write(leader: int = leader, number: int = number) -> None:
                    with contextlib.suppress(LogyardError):
                        # Not for longer: a crash ends when nothing moves any more.
                        while leader in c.nodes and number in c.nodes:
                            await c.append(leader, [(b"", bytes(3000))])

                nursery.start_soon(write)
                raft = c.member(leader).raft
                await until(lambda raft=raft: raft.commit < raft.log.last_index)
                await c.crash(number)
                nursery.cancel_scope.cancel()
            await c.start(number)
            await until(lambda: all(len(c.system(one).live) == 3 for one in c.ids), "all know each other")
            assert not c.failures
        assert not any(c.system(number).incarnation.acquaintances.outdated for number in c.ids)


def test_the_table_by_itself() -> None:
    known = Acquaintances()
    first = Origin(7, 3, 11, 100)
    known.meet(2, first)
    known.meet(2, first)
    known.heard(2, 150)
    known.meet(2, first)
    assert known.known[2].written == 150 and known.take() == [(2, Origin(7, 3, 11, 150))] and not known.take()
    for wrong in (Origin(8, 4, 12, 200), Origin(7, 2, 9, 200), Origin(7, 3, 12, 200), Origin(7, 4, 12, 149)):
        with pytest.raises(Outdated):
            known.meet(2, wrong)
        assert known.outdated[2]
    known.meet(2, Origin(7, 4, 12, 150))
    assert not known.outdated and known.fresh == {2}
    # Who knows that it lost batches of its log claims none, and is not held to what it had.
    known.meet(2, Origin(7, 5, 13, 0))
    known.heard(2, 20)
    known.meet(2, Origin(7, 6, 14, 20))
    known.forget(2)
    known.meet(2, Origin(9, 1, 1, 1))
