"""Law 4, the cases where a race is held still: a leader below its floor, readers of bytes that are destroyed.

docs/opaque-payloads.md lists all cases with their tests.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from logyard.engine.raft.core import LEADER
from logyard.engine.replica.reader import Wanted
from logyard.protocol.errors import Gone, OutOfRange

from .cluster import KIB, Cluster, cluster, plain, until
from .test_tombstones import released


def located(c: Cluster, count: int) -> list[Wanted]:
    """The large bodies of the first entries that have one."""
    from logyard.engine.entry import units_of

    system, member = c.system(1), c.member(1)
    entries = [one for one in system.reader.payload_entries(member, 2, member.raft.applied) if units_of(one.data)]
    return [
        Wanted(one, unit, 0, unit.length) for one in entries[:count] for unit in units_of(one.data) if not unit.records
    ]


async def test_a_member_that_leads_below_its_floor_serves_nothing_until_it_passed_it(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        left = await released(c)
        node = await c.start(3)
        member, system = c.member(3), c.system(3)
        # It stores entries, tombstones and floor, and applies nothing: the transfer finds it caught up all the same.
        apply = system.applier.apply
        system.applier.apply = lambda member: None  # type: ignore[method-assign]
        await until(lambda: member.raft.log.stable == c.member(1).raft.log.last_index and member.floor)
        await c.nodes[1].transfer("log", 3)
        await until(lambda: member.raft.role == LEADER and member.raft.commit >= member.raft.lead_index)
        assert member.raft.applied < member.floor < member.raft.lead_index and not member.resolves
        with pytest.raises(Gone):
            await system.reader.read(member, [])
        assert await node.snapshot() == {"taken": 0, "skipped": 1, "bytes": 0}
        answered: list[int] = []

        async def ask() -> None:
            answered.append(await system.leadership.read_index(member))

        async with trio.open_nursery() as nursery:
            # A linearizable read waits for an index above the floor: it can never see released records as present.
            nursery.start_soon(ask)
            await until(lambda: member.raft.commit == c.member(1).raft.commit == c.member(2).raft.commit)
            assert not answered
            system.applier.apply = apply  # type: ignore[method-assign]
            system.ready_loop.mark(member)
        assert answered[0] >= member.raft.lead_index > member.floor
        await c.applied()
        assert member.resolves and [body for _, body in await c.read(3, 9)] == left
        assert (await c.append(3, [(b"", b"by the new leader")])).start == 12


async def test_bytes_of_a_wal_file_under_a_pin_outlive_their_release(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, payload_cache_bytes=0) as c:
        system, node, member = c.system(1), c.nodes[1], c.member(1)
        bodies = await c.fill(1, 10, 40 * KIB)
        await c.roll(1)
        wanted = located(c, 10)
        (file,) = system.storage.location.files
        system.storage.location.pin(("wal", file))
        await node.truncate("log", 10)
        await node.compact()
        # Released, its file given up, the floor durable: whoever located it before still reads it.
        assert member.floor == member.last_release > 0 and not system.storage.location.files
        assert [plain(one) for one in system.reader._load_all(member.uid, wanted, [None] * 10)] == bodies
        system.storage.location.unpin(("wal", file))
        assert all(isinstance(one, Gone) for one in system.reader._load_all(member.uid, wanted, [None] * 10))


async def test_a_generation_under_a_pin_stays_and_what_is_released_in_it_is_gone(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, payload_cache_bytes=0) as c:
        system, node, member = c.system(1), c.nodes[1], c.member(1)
        await c.fill(1, 10, 40 * KIB)
        await node.compact()
        wanted = located(c, 10)
        (generation,) = system.store.generations()
        path = tmp_path / "node-1" / "payloads" / f"gen-{generation.id:010d}"
        system.storage.location.pin(("generation", generation.id))
        await node.truncate("log", 10)
        await node.compact()
        assert member.floor == member.last_release > 0
        assert path.exists(), "its map is not torn from under a reader"
        with pytest.raises(Gone):
            await system.reader.read(member, wanted)
        system.storage.location.unpin(("generation", generation.id))
        await node.compact()
        assert not path.exists()


async def test_a_read_under_way_ends_well_although_its_payloads_are_destroyed(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, payload_cache_bytes=0) as c:
        system, node = c.system(1), c.nodes[1]
        bodies = await c.fill(1, 10, 40 * KIB)
        await c.roll(1)
        wanted = located(c, 10)
        found: list[bytes] = []

        async def read() -> None:
            found.extend(bytes(one) for one in await system.reader.read(c.member(1), wanted))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await until(lambda: system.storage.location._pins or found)
            await node.truncate("log", 10)
            await node.compact()
        assert found == bodies and not system.storage.location._pins
        assert not system.storage.location.files


async def test_a_replay_from_an_older_snapshot_needs_none_of_the_bytes_that_are_gone(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, payload_cache_bytes=0) as c:
        bodies = await c.fill(1, 5, 40 * KIB)
        await c.nodes[1].snapshot()
        old = c.member(1).snapshot_index
        bodies += await c.fill(1, 5, 40 * KIB)
        await c.nodes[1].truncate("log", 8)
        await c.nodes[1].compact()
        # Entries between the snapshot and the release have no bytes any more, on either side of the restart.
        await c.restart(1)
        await c.leader()
        assert c.member(1).snapshot_index == old < c.member(1).floor
        await until(lambda: c.member(1).resolves)
        assert (c.log(1).start, c.log(1).end) == (8, 10)
        assert [body for _, body in await c.read(1, 8)] == bodies[8:]
        with pytest.raises(OutOfRange):
            await c.nodes[1].read_body("log", 3, 0, None)
