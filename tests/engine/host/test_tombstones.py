"""Law 4: whoever lacks released bytes knows so durably, and says nothing below that floor."""

from __future__ import annotations

from pathlib import Path

import pytest

from logyard.protocol.errors import Gone

from .cluster import KIB, Cluster, cluster, payload_books, until


async def released(c: Cluster) -> list[bytes]:
    """Node 3 is down while entries are appended, released and destroyed on the others; the records that are left."""
    await c.lead(1)
    await c.fill(1, 2, 100)
    await c.applied()
    await c.crash(3)
    bodies = await c.fill(1, 10, 40 * KIB)
    await c.nodes[1].truncate("log", 9)
    await c.applied()
    for number in (1, 2):
        await c.nodes[number].compact()
    assert not c.system(1).storage.location.files and c.member(1).raft.log.snapshot_index == 0
    return bodies[7:]


async def test_a_laggard_gets_tombstones_and_a_durable_floor(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        left = await released(c)
        await c.start(3)
        await c.applied()
        member = c.member(3)
        assert member.floor == c.member(1).last_release > 0
        assert member.resolves and [body for _, body in await c.read(3, 9)] == left
        floor = member.floor
        await c.restart(3)
        assert c.member(3).floor == floor
        await c.roll(3)
        await c.nodes[3].compact()
        await c.restart(3)
        assert c.member(3).floor >= floor
        await c.applied()
        assert [body for _, body in await c.read(3, 9)] == left


async def test_below_its_floor_a_member_votes_but_reads_nothing_and_takes_no_snapshot(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        left = await released(c)
        node = await c.start(3)
        member = c.member(3)
        # Stop applying half way: entries and floor are there, the release is not.
        applier = c.system(3).replicas.applier
        apply = applier.apply
        applier.apply = lambda member: None  # type: ignore[method-assign]
        await until(
            lambda: member.raft.log.stable == c.member(1).raft.log.last_index and member.raft.commit >= member.floor
        )
        assert 0 < member.raft.applied < member.floor or member.raft.applied == 0
        assert not member.resolves
        with pytest.raises(Gone):
            await c.system(3).replicas.reader.read(member, [])
        assert await node.snapshot() == {"taken": 0, "skipped": 1, "bytes": 0}
        await c.append(1, [(b"", b"a vote counts")])
        applier.apply = apply  # type: ignore[method-assign]
        c.system(3).ready_loop.mark(member)
        await c.applied()
        assert [body for _, body in await c.read(3, 9)] == [*left, b"a vote counts"]


async def test_a_leader_that_got_tombstones_serves_above_its_floor_and_sends_them_on(tmp_path: Path) -> None:
    async with cluster(tmp_path, 4, group="", payload_cache_bytes=0) as c:
        await until(lambda: all(len(c.system(number).live) == 4 for number in c.ids))
        await c.create("log", [1, 2, 3])
        left = await released(c)
        await c.start(3)
        await c.applied(among=[1, 2, 3])
        await c.lead(3)
        raft = c.member(3).raft
        assert raft.lead_index > c.member(3).floor and raft.applied >= c.member(3).floor
        assert await c.system(3).replicas.leadership.read_index(c.member(3)) >= c.member(3).floor
        # A new member of which nobody has the released bytes: tombstones again.
        await c.nodes[3].change_members("log", "add_learner", 4)
        await c.applied()
        assert c.member(4).floor and c.member(4).snapshot_index == 0
        for number in (3, 4):
            assert [body for _, body in await c.read(number, 9)] == left


async def test_a_leader_below_its_floor_sends_what_it_has_and_the_tombstones_it_got(tmp_path: Path) -> None:
    """It can't commit before others have its log, and so not get above its floor."""
    async with cluster(tmp_path, 5, payload_cache_bytes=0) as c:
        await c.applied()
        await c.crash(5)
        left = await released(c)
        await c.start(3)
        await c.applied(among=[1, 2, 3, 4])
        await c.crash(4)
        await c.append(1, [(b"", b"more" * 100)])
        await c.applied(among=[1, 2, 3])
        for number in (1, 2, 3):
            await c.crash(number)
        await c.start(3)
        assert c.member(3).raft.commit < c.member(3).floor
        # One lacks the newest payload, the other all of them and what is released: both are needed for a quorum.
        await c.start(4)
        await c.start(5)
        assert await c.leader() == 3
        await c.applied()
        floor = c.member(3).floor
        for number in (3, 5):
            member = c.member(number)
            assert member.floor == floor and member.resolves
            assert [body for _, body in await c.read(number, 9)] == [*left, b"more" * 100]


async def test_the_floor_is_durable_before_bytes_are_destroyed(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, payload_cache_bytes=0) as c:
        await c.fill(1, 10, 40 * KIB)
        await c.nodes[1].snapshot()
        await c.nodes[1].truncate("log", 8)
        release = c.member(1).last_release
        await c.nodes[1].compact()
        assert c.member(1).floor == release
        await c.crash(1)
        # The old snapshot names what is gone; the floor forbids to serve it.
        system = c.build(1)
        await system.open()
        member = system.member("log")
        assert member.snapshot_index < release == member.floor and not member.resolves
        system.close()
        await c.start(1)
        await c.leader()
        await until(lambda: c.member(1).resolves)
        assert len(await c.read(1, 8)) == 2


async def test_the_floor_is_durable_before_a_generation_is_dropped(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, payload_cache_bytes=0) as c:
        await c.fill(1, 10, 40 * KIB)
        await c.nodes[1].snapshot()
        await c.nodes[1].compact()
        await c.nodes[1].truncate("log", 8)
        release = c.member(1).last_release
        # Nothing of the group is in a WAL file that goes: the floor is for the generation's sake.
        await c.system(1).storage.compactor.collect(1.0)
        assert c.member(1).floor == release
        await c.crash(1)
        system = c.build(1)
        await system.open()
        assert system.member("log").snapshot_index < release == system.member("log").floor
        system.close()


async def test_deadness_is_equal_on_all_members(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        await c.lead(1)
        await c.fill(1, 20, 10 * KIB)
        await c.nodes[1].truncate("log", 7)
        await c.applied()
        index = c.member(1).raft.applied
        sets = [c.member(number).liveness.encode_live_set(index) for number in c.ids]
        assert sets[0] == sets[1] == sets[2]
        for number in c.ids:
            await c.roll(number)
        books = [sum(payload_books(c.system(number))["wal"].values()) for number in c.ids]
        assert books[0] == books[1] == books[2] > 13 * 10 * KIB
