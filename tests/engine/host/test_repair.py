"""Read repair (faults L4): what is damaged or lost here comes from a peer, is verified, served and written back."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import trio

from logyard.engine.entry import units_of
from logyard.engine.replica.member import RUNNING
from logyard.engine.replica.reader import Wanted
from logyard.engine.transport.blobs import SNAPSHOT_PIECE
from logyard.protocol.errors import Corrupt, Gone, LogyardError

from .cluster import KIB, Cluster, cluster, payload_books, until
from .test_histories import check_books, counted

SIZE = 20 * KIB


async def filled(c: Cluster, count: int = 12) -> list[bytes]:
    await c.lead(1)
    bodies = await c.fill(1, count, SIZE)
    await c.applied()
    await in_files(c)
    return bodies


async def in_files(c: Cluster) -> None:
    """Until everything is written everywhere: what is applied need not be, here."""
    logs = [c.member(number).raft.log for number in c.nodes]
    await until(lambda: all(log.stable == log.last_index for log in logs))


def hurt_file(c: Cluster, number: int, bodies: list[bytes]) -> int:
    """Flip a bit of each of these payloads in a node's WAL files; how many were there."""
    found = 0
    # Spare files have nothing, and get their names at any moment.
    for path in sorted((c.path / f"node-{number}" / "wal").glob("*.wal")):
        data = bytearray(path.read_bytes())
        for body in bodies:
            at = data.find(body)
            if at >= 0:
                found += 1
                data[at + 50] ^= 4
                with path.open("r+b") as file:
                    file.seek(at + 50)
                    file.write(data[at + 50 : at + 51])
    return found


def hurt_generations(c: Cluster, number: int, bodies: list[bytes]) -> int:
    found = 0
    payloads = c.path / f"node-{number}" / "payloads"
    for path in sorted([*payloads.glob("gen-*/data.mdb"), *payloads.glob("gen-*/bodies")]):
        data = path.read_bytes()
        with path.open("r+b") as file:
            for body in bodies:
                at = data.find(body[:2000])
                if at >= 0:
                    found += 1
                    file.seek(at + 50)
                    file.write(bytes([data[at + 50] ^ 4]))
    return found


async def all_read(c: Cluster, number: int, bodies: list[bytes]) -> None:
    assert [body for _, body in await c.read(number)] == bodies


@pytest.mark.parametrize("place", ["open file", "sealed file", "generation", "file beside"])
async def test_a_damaged_payload_comes_from_a_peer_and_is_written_back(tmp_path: Path, place: str) -> None:
    beside = place == "file beside"
    migrated = beside or place == "generation"
    async with cluster(tmp_path, payload_cache_bytes=0, generation_files=int(beside)) as c:
        bodies = await filled(c)
        if place == "sealed file":
            await c.roll(3)
        elif migrated:
            await c.nodes[3].compact()
            found = list((tmp_path / "node-3" / "payloads").glob("gen-*/bodies"))
            assert bool(found) == beside and all(one.stat().st_size for one in found)
        hurt = hurt_generations if migrated else hurt_file
        if migrated:
            await c.crash(3)
        assert hurt(c, 3, bodies[2:5]) == 3
        if migrated:
            await c.start(3)
            await c.applied()
        await all_read(c, 3, bodies)
        repair = c.system(3).repair.payload_repair
        assert repair.fetched >= 3 and not repair.failed
        # Its own again: without peers, and after a restart.
        c.partition(3)
        before = repair.fetched
        await all_read(c, 3, bodies)
        assert repair.fetched == before
        c.network.heal()
        await c.restart(3)
        await c.applied()
        await all_read(c, 3, bodies)
        assert not c.system(3).repair.payload_repair.fetched
        if not migrated:
            # Rows that do not verify can't be counted anew.
            await check_books(c, 3, list(bodies))


async def test_a_file_that_could_not_be_emptied_can_be_after_the_repair(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        bodies = await filled(c)
        await c.roll(3)
        assert hurt_file(c, 3, bodies[4:5]) == 1
        with pytest.raises(Corrupt):
            await c.nodes[3].compact()
        assert any(file.failed for file in c.system(3).storage.location.files.values())
        await all_read(c, 3, bodies)
        assert not any(file.failed for file in c.system(3).storage.location.files.values())
        await c.nodes[3].compact()
        assert not c.system(3).storage.location.files
        await all_read(c, 3, bodies)
        await check_books(c, 3, list(bodies))


async def test_a_payload_whose_segment_is_damaged_too_is_written_back_and_the_member_mended(tmp_path: Path) -> None:
    """Its old home's counters could not be read, and all storage jobs stood still until a restart (seed 3002268)."""
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        bodies = await filled(c)
        await c.roll(3)
        system, member = c.system(3), c.member(3)
        assert hurt_file(c, 3, bodies[2:5]) == 3
        (path,) = (c.path / "node-3" / "segments").iterdir()
        entries = system.storage.segments.reader(member.segments[0].segment).entries(member.uid, 1, 100)
        at = path.read_bytes().index(entries[3].data)
        with path.open("r+b") as file:
            file.seek(at)
            file.write(bytes([entries[3].data[0] ^ 4]))
        assert [body for _, body in await c.read(3, 3, 1)] == bodies[3:4]

        def is_whole() -> bool:
            found = system.members.get(member.uid)
            return found is not None and found is not member and found.state == RUNNING and found.raft.mend is None

        await until(is_whole)
        assert not system.storage.jobs.frozen
        await c.applied()
        await all_read(c, 3, bodies)
        await c.nodes[3].compact()
        await check_books(c, 3, list(bodies))


async def test_a_lost_generation_is_refilled_by_reading(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        bodies = await filled(c, 30)
        await c.nodes[3].snapshot()
        await c.nodes[3].compact()
        await c.crash(3)
        (generation, *_) = sorted((c.path / "node-3" / "payloads").glob("gen-*"))
        shutil.rmtree(generation)
        await c.start_unfilled(3)
        await c.applied()
        system, member = c.system(3), c.member(3)
        assert system.store.lost(member.uid, 1, member.raft.applied)
        await all_read(c, 3, bodies)
        assert 30 <= system.repair.payload_repair.fetched <= 33, "but for the ends of stretches, each once"
        await c.restart(3)
        await c.applied()
        await all_read(c, 3, bodies)
        assert not c.system(3).repair.payload_repair.fetched


async def test_a_stretch_that_was_lost_is_not_served_to_others(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0, snapshot_stall_ms=500) as c:
        bodies = await filled(c, 10)
        for number in (1, 2):
            await c.nodes[number].snapshot()
            await c.nodes[number].compact()
        await c.crash(3)
        shutil.rmtree(tmp_path / "node-3")
        await c.crash(2)
        for generation in (tmp_path / "node-2" / "payloads").glob("gen-*"):
            shutil.rmtree(generation)
        await c.start_unfilled(2)
        await c.lead(1)
        await c.start(3)
        # As a member that was added: it has nothing at all. (Its votes are not the point here.)
        system = c.system(2)
        assert system.store.lost(c.member(2).uid, 1, c.member(2).raft.applied)
        with pytest.raises(LogyardError) as caught:
            system.transfers.pull_answers._collect(c.member(2), [(1, 100)], 1 << 20)
        assert "lost" in str(caught.value)
        await all_read(c, 1, bodies)


async def test_without_a_peer_that_has_it_the_error_is_typed_and_no_wrong_byte_is_served(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0, snapshot_stall_ms=200) as c:
        bodies = await filled(c)
        assert hurt_file(c, 3, bodies[2:3]) == 1
        c.partition(3)
        with pytest.raises(Corrupt):
            await c.read(3)
        assert c.system(3).repair.payload_repair.failed
        # A peer whose copy is damaged as well says so, and sends nothing.
        c.network.heal()
        for number in (1, 2):
            assert hurt_file(c, number, bodies[2:3]) == 1
        await until(lambda: len(c.system(3).live) == 3)
        with pytest.raises(Corrupt):
            await c.read(3)
        assert [body for _, body in await c.read(3, 3)] == bodies[3:]


async def test_a_peer_that_sends_other_bytes_is_not_believed(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        bodies = await filled(c)
        assert hurt_file(c, 3, bodies[2:3]) == 1
        peers = c.network.nodes[1]
        send_blob, lies = peers.send_blob, []

        def lying(node: int, kind: int, request: int, header: Any, body: Any = (), **options: Any) -> bool:
            if kind == SNAPSHOT_PIECE and header["entries"]:
                lies.append(node)
                data = bytearray(b"".join(bytes(part) for part in body))
                data[100] ^= 1
                body = [bytes(data)]
            return send_blob(node, kind, request, header, body, **options)

        peers.send_blob = lying  # type: ignore[method-assign]
        await all_read(c, 3, bodies)
        assert lies == [3] and c.system(3).transfers.pulls.failed == 1


async def test_what_was_released_is_gone_and_nobody_is_asked(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        await filled(c)
        member = c.member(3)
        located = next(one for one in c.system(3).replicas.reader.payload_entries(member, 3, 3) if one.index == 3)
        await c.nodes[1].truncate("log", 8)
        await c.applied()
        assert hurt_file(c, 3, [bytes(b"r%08d" % at) for at in range(8)]) >= 1
        unit = units_of(located.data)[0]
        assert unit.records == 1 or unit.length
        with pytest.raises((Gone, Corrupt)):
            await c.system(3).replicas.reader.read(
                member, [Wanted(located, one, 0, one.length) for one in units_of(located.data)]
            )
        assert not c.system(3).transfers.pulls.pieces


async def test_many_readers_of_one_damaged_payload_fetch_it_about_once(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        bodies = await filled(c)
        assert hurt_file(c, 3, bodies[2:3]) == 1
        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(all_read, c, 3, bodies)
        assert c.system(3).repair.payload_repair.fetched <= 2, "at most as many as may work at a time"


async def test_a_leader_with_a_damaged_payload_brings_a_follower_up(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        await c.lead(1)
        await c.crash(3)
        bodies = await c.fill(1, 6, SIZE)
        await c.applied(among=[1, 2])
        assert hurt_file(c, 1, bodies[1:2]) == 1
        await c.start(3)
        await c.applied()
        await all_read(c, 3, bodies)
        assert c.system(1).repair.payload_repair.fetched == 1
        assert os.path.isdir(tmp_path / "node-1")


def body_of(name: bytes) -> bytes:
    return name.ljust(SIZE, b".")


async def one_entry(c: Cluster, names: list[bytes]) -> list[bytes]:
    """One entry with a large body a name."""
    await c.lead(1)
    bodies = [body_of(name) for name in names]
    await c.append(1, [(b"", body) for body in bodies])
    await c.applied()
    await in_files(c)
    return bodies


def hold_applying(c: Cluster, number: int) -> Any:
    """A node applies nothing until the returned function is called."""
    applier = c.system(number).replicas.applier
    plain, held = applier.apply, []

    def hold(member: Any) -> None:
        held.append(member)

    applier.apply = hold  # type: ignore[method-assign]

    def go_on() -> None:
        applier.apply = plain  # type: ignore[method-assign]
        for member in dict.fromkeys(held):
            plain(member)

    return go_on


async def test_a_peer_that_released_the_unit_does_not_make_zeros_of_it(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        bodies = await one_entry(c, [b"first", b"second"])
        assert hurt_file(c, 3, bodies[:1]) == 1
        go_on = hold_applying(c, 3)
        await c.nodes[1].truncate("log", 1)
        await c.applied(among=[1, 2])
        with pytest.raises(LogyardError):
            found = await c.read(3)
            assert found[0][1] == bodies[0], "never other bytes"
        go_on()
        await c.applied()
        assert [body for _, body in await c.read(3, 1)] == bodies[1:]
        await check_books(c, 3, bodies[1:])


async def test_a_repair_takes_nothing_away_that_lives_here(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        bodies = await one_entry(c, [b"first", b"second"])
        assert hurt_file(c, 3, bodies[1:]) == 1
        go_on = hold_applying(c, 3)
        await c.nodes[1].truncate("log", 1)
        await c.applied(among=[1, 2])
        assert [body for _, body in await c.read(3)] == bodies
        assert [body for _, body in await c.read(3)] == bodies, "also after what came was written back"
        go_on()
        await c.applied()
        assert [body for _, body in await c.read(3, 1)] == bodies[1:]


@pytest.mark.parametrize("how", ["asked", "waiting"])
async def test_what_dies_while_it_is_repaired_stays_dead(tmp_path: Path, how: str) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        bodies = await filled(c, 6)
        assert hurt_file(c, 3, bodies[:1]) == 1
        system = c.system(3)
        storage = system.storage
        reached = trio.Event()
        async with trio.open_nursery() as nursery:
            if how == "waiting":
                # A job of the janitor keeps what came waiting for its home.
                await storage.janitor.lock.acquire()
                plain = storage.rehoming.store_payloads

                async def store(*arguments: Any, **options: Any) -> None:
                    reached.set()
                    await plain(*arguments, **options)

                storage.rehoming.store_payloads = store  # type: ignore[method-assign]
            else:
                ask = system.transfers.pulls.ask
                go_on = trio.Event()

                async def late(*arguments: Any) -> Any:
                    piece = await ask(*arguments)
                    reached.set()
                    await go_on.wait()
                    return piece

                system.transfers.pulls.ask = late  # type: ignore[method-assign, assignment]
            nursery.start_soon(c.page, 3, 0)
            await reached.wait()
            await c.nodes[1].truncate("log", 3)
            await c.applied()
            if how == "waiting":
                storage.janitor.lock.release()
            else:
                go_on.set()
        await check_books(c, 3, bodies[3:])


async def test_a_file_that_failed_goes_when_nothing_in_it_lives(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, payload_cache_bytes=0) as c:
        bodies = await filled(c, 6)
        await c.roll(1)
        assert hurt_file(c, 1, bodies[2:3]) == 1
        with pytest.raises(Corrupt):
            await c.nodes[1].compact()
        storage = c.system(1).storage
        (file,) = [file for file in storage.location.files.values() if file.failed]
        await c.nodes[1].truncate("log", 6)
        storage.janitor.look()
        await until(lambda: file.file not in storage.location.files, "a file with nothing live is dropped")


async def test_a_file_whose_last_damage_was_mended_can_be_emptied(tmp_path: Path) -> None:
    """The damaged entry was all that its group had there, beside what others have."""
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        await c.create("other")
        await c.lead(1, "other")
        bodies = await filled(c, 1)
        others = await c.fill(1, 4, SIZE, "other", b"o")
        await c.applied("other")
        await c.roll(3)
        assert hurt_file(c, 3, bodies) == 1
        with pytest.raises(Corrupt):
            await c.nodes[3].compact()
        storage = c.system(3).storage
        assert [body for _, body in await c.read(3)] == bodies
        assert not [file for file in storage.location.files.values() if file.failed]
        await c.nodes[3].compact()
        assert not storage.location.files
        assert [body for _, body in await c.read(3, name="other")] == others


async def test_a_release_that_meets_a_damaged_row_halts_no_group(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        await c.lead(1)
        bodies = [b"small %d" % at for at in range(8)]
        await c.append(1, [(b"", body) for body in bodies])
        await c.applied()
        await c.nodes[3].compact()
        await c.crash(3)
        found = 0
        for path in sorted((c.path / "node-3" / "payloads").glob("gen-*/data.mdb")):
            data = path.read_bytes()
            at = data.find(bodies[5])
            if at >= 0:
                found += 1
                with path.open("r+b") as file:
                    file.seek(at)
                    file.write(b"S")
        assert found == 1
        await c.start(3)
        await c.applied()
        # Ends inside the entry, whose row does not verify.
        await c.nodes[1].truncate("log", 3)
        await c.applied()
        assert c.member(3).state == "running", c.member(3).reason
        assert [body for _, body in await c.read(3, 3)] == bodies[3:]


async def test_a_repair_is_booked_at_once(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        bodies = await filled(c)
        await c.roll(3)
        before = payload_books(c.system(3))["wal"]
        assert before == counted(c, 3)
        assert hurt_file(c, 3, bodies[2:5]) == 3
        assert [body for _, body in await c.read(3)] == bodies
        books = payload_books(c.system(3))
        assert books["wal"] == counted(c, 3) != before and books["generations"]
