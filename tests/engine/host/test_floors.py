"""Law 4, the cases where a race is held still: a leader below its floor, readers of bytes that are destroyed.

docs/opaque-payloads.md lists all cases with their tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from logyard.engine.log.meta import MetaStore
from logyard.engine.replica.reader import Wanted
from logyard.machines.log.command import truncate_command
from logyard.payloads.reference import Position
from logyard.protocol.errors import BadRequest, Gone, LogyardError, NoSpace, OutOfRange

from .cluster import KIB, Cluster, Replies, cluster, frame, plain, until
from .test_tombstones import released


def located(c: Cluster, count: int) -> list[Wanted]:
    """The large bodies of the first entries that have one."""
    from logyard.engine.entry import units_of

    system, member = c.system(1), c.member(1)
    entries = [
        one for one in system.replicas.reader.payload_entries(member, 2, member.raft.applied) if units_of(one.data)
    ]
    return [
        Wanted(one, unit, 0, unit.length) for one in entries[:count] for unit in units_of(one.data) if not unit.records
    ]


async def test_a_member_that_leads_below_its_floor_serves_nothing_until_it_passed_it(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        left = await released(c)
        node = await c.start(3)
        member, system = c.member(3), c.system(3)
        # It stores entries, tombstones and floor, and applies nothing: the transfer finds it caught up all the same.
        apply = system.replicas.applier.apply
        system.replicas.applier.apply = lambda member: None  # type: ignore[method-assign]
        await until(lambda: member.raft.log.stable == c.member(1).raft.log.last_index and member.floor)
        await c.lead(3)
        assert member.raft.applied < member.floor < member.raft.lead_index and not member.resolves
        with pytest.raises(Gone):
            await system.replicas.reader.read(member, [])
        assert await node.snapshot() == {"taken": 0, "skipped": 1, "bytes": 0}
        answered: list[int] = []

        async def ask() -> None:
            answered.append(await system.replicas.leadership.read_index(member))

        async with trio.open_nursery() as nursery:
            # A linearizable read waits for an index above the floor: it can never see released records as present.
            nursery.start_soon(ask)
            await until(lambda: member.raft.commit == c.member(1).raft.commit == c.member(2).raft.commit)
            assert not answered
            system.replicas.applier.apply = apply  # type: ignore[method-assign]
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
        assert [plain(one) for one in system.replicas.reader._load_all(member.uid, wanted, [None] * 10)] == bodies
        system.storage.location.unpin(("wal", file))
        assert all(isinstance(one, Gone) for one in system.replicas.reader._load_all(member.uid, wanted, [None] * 10))


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
            await system.replicas.reader.read(member, wanted)
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
            found.extend(bytes(one) for one in await system.replicas.reader.read(c.member(1), wanted))

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


async def test_law_4_what_dies_after_the_floors_were_stored_is_not_unlinked_with_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path, 1, payload_cache_bytes=0) as c:
        for _ in range(3):
            await c.fill(1, 5, 40 * KIB)
            await c.nodes[1].compact()
        await c.nodes[1].truncate("log", 5)
        storage = c.system(1).storage
        assert [(one.id, one.live > 0) for one in c.system(1).store.generations()] == [(1, False), (2, True), (3, True)]
        commit = storage.meta_batch.commit_members

        async def slow(*arguments: Any, **named: Any) -> None:
            await commit(*arguments, **named)
            await c.nodes[1].truncate("log", 10)

        monkeypatch.setattr(storage.meta_batch, "commit_members", slow)
        async with storage.janitor.lock:
            await storage.compactor.collect(0.0)
        monkeypatch.undo()
        release = c.member(1).last_release
        await c.crash(1)
        system = c.build(1)
        await system.open()
        try:
            left = [one.id for one in system.store.generations()]
            assert 1 not in left
            assert 2 in left or system.member("log").floor >= release, "bytes went without a floor"
        finally:
            system.close()


async def test_law_4_a_client_can_not_release_what_is_not_written_yet(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1) as c:
        bodies = await c.fill(1, 5, 100)
        node, member = c.nodes[1], c.member(1)
        position = c.log(1).start_position
        for command in (truncate_command(1, Position(1 << 40, 0)), truncate_command(3, Position(position.index, 1))):
            with pytest.raises(BadRequest):
                node.submit(member.uid, frame(b"", command), Replies(), 1)
        # Nor can a server that looks a position up wrongly.
        with pytest.raises(LogyardError) as caught:
            await node.command(member, truncate_command(1, Position(1 << 40, 0)))
        assert caught.value.code == "bad_request"
        bodies += await c.fill(1, 2, 100)
        assert not member.is_dead(member.raft.log.entry(member.raft.log.last_index))  # type: ignore[arg-type]
        assert [body for _, body in await c.read(1)] == bodies


async def test_law_4_a_floor_that_could_not_be_stored_is_stored_before_bytes_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path, 1, payload_cache_bytes=0) as c:
        await c.fill(1, 5, 40 * KIB)
        await c.roll(1)
        await c.nodes[1].truncate("log", 3)
        release = c.member(1).last_release
        storage = c.system(1).storage
        (file,) = storage.location.files.values()

        def full(self: object, puts: object, thrice: object = ()) -> None:
            raise NoSpace("the disk of the meta store is full")

        monkeypatch.setattr(MetaStore, "commit", full)
        async with storage.janitor.lock:
            with pytest.raises(NoSpace):
                await storage.compactor.migrate(file)
        monkeypatch.undo()
        async with storage.janitor.lock:
            await storage.compactor.migrate(file)
        await c.crash(1)
        system = c.build(1)
        await system.open()
        try:
            assert file.file not in [number for number, _ in system.wal.files]
            assert system.member("log").floor >= release, "bytes went without a floor"
        finally:
            system.close()


async def test_law_4_a_home_is_not_forgotten_for_good_without_a_floor(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, payload_cache_bytes=0) as c:
        await c.fill(1, 5, 40 * KIB)
        index = c.member(1).raft.applied
        await c.nodes[1].compact()
        assert c.system(1).store.home(c.member(1).uid, index) is not None
        await c.create("other", [1])
        await c.roll(1)
        await c.nodes[1].truncate("log", 5)
        release = c.member(1).last_release
        # A snapshot of another group, say, brings the store's rows along.
        await c.nodes[1].snapshot(["other"])
        await c.crash(1)
        system = c.build(1)
        await system.open()
        try:
            member = system.member("log")
            assert member.raft.applied < release
            assert system.store.home(member.uid, index) is not None or not member.resolves
        finally:
            system.close()


async def test_law_4_a_snapshot_below_a_release_is_not_sent_without_its_payloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        await c.lead(1)
        await c.applied()
        await c.crash(3)
        first = c.member(1).raft.applied + 1
        await c.fill(1, 5, 40 * KIB)
        await c.applied()
        for number in (1, 2):
            await c.nodes[number].compact()
            await c.nodes[number].snapshot()
            await c.nodes[number].compact()
        assert c.member(1).raft.log.snapshot_index == c.member(1).snapshot_index
        await c.nodes[1].truncate("log", 5)
        release = c.member(1).last_release
        assert c.member(1).snapshot_index < release
        system = await c.start(3)
        installed: list[tuple[int, bool, int]] = []
        snapshots = system.system.transfers.snapshot_receiver
        install = snapshots._install

        def look(member: Any, snapshot: Any, size: int, have: int) -> None:
            home = system.system.store.home
            whole = all(home(member.uid, index) is not None for index in range(first, first + 5))
            installed.append((snapshot.index, whole, member.floor))
            install(member, snapshot, size, have)

        monkeypatch.setattr(snapshots, "_install", look)
        await c.applied()
        assert installed and all(index >= release or whole or floor >= release for index, whole, floor in installed)


SIZE = 20 * KIB


async def test_the_floor_is_stored_before_a_dead_file_goes(tmp_path: Path) -> None:
    """Law 4: a start begins at a snapshot by which all of it lived."""
    async with cluster(tmp_path, 1, payload_cache_bytes=0) as c:
        await c.fill(1, 5, SIZE)
        await c.nodes[1].snapshot()
        await c.roll(1)
        storage = c.system(1).storage
        (file,) = storage.location.files
        await c.nodes[1].truncate("log", 5)
        storage.janitor.look()
        await until(lambda: file not in dict(c.system(1).wal.files), "a file with nothing live goes")
        released = c.member(1).last_release
        await c.crash(1)
        system = c.build(1)
        await system.open()
        (member,) = system.members.values()
        assert member.snapshot_index < released <= member.floor and not member.resolves
        system.close()
