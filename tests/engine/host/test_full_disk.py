"""A full disk (fault D6): reads, truncations, deletions, votes and liveness go on, writes wait, and come back."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from logyard.engine.log.space import MARGIN_BYTES
from logyard.engine.raft.core import LEADER
from logyard.protocol.errors import NoSpace
from logyard.service.check.run import check_directory

from .cluster import KIB, MIB, Cluster, cluster, until
from .full_disk import QuotaDisk

BODY = 40 * KIB


async def filled(c: Cluster, number: int) -> list[bytes]:
    """Write until the node refuses; what it took."""
    bodies: list[bytes] = []
    while True:
        body = (b"f%08d" % len(bodies)).ljust(BODY, b".")
        try:
            await c.append(number, [(b"", body)])
        except NoSpace as error:
            assert error.retry == "same_session" and error.details["cause"] == "the node's disk"
            return bodies
        bodies.append(body)


def looked(c: Cluster, number: int) -> None:
    """The janitor looks now, not when its second is over."""
    c.system(number).storage.janitor.look()


async def full(c: Cluster, number: int) -> None:
    """Until a node knows that its disk is full."""
    looked(c, number)
    await until(lambda: c.system(number).storage.space.full, "the disk is full")


async def room(c: Cluster, number: int) -> None:
    """Until a node knows that there is room."""
    looked(c, number)
    await until(lambda: not c.system(number).storage.space.full, "there is room")


async def ready(c: Cluster, number: int) -> None:
    """Until a node has claimed what it holds back."""
    looked(c, number)
    system = c.system(number)
    await until(lambda: system.storage.space.status()["reserve_bytes"] and not system.wal.stock.missing)


async def bodies_of(c: Cluster, number: int) -> list[bytes]:
    return [body or b"" for _, body in await c.read(number)]


async def test_a_full_wal_refuses_writes_and_goes_on_when_there_is_room(tmp_path: Path) -> None:
    disk = QuotaDisk(tmp_path / "node-1")
    async with cluster(tmp_path, 1, disks={1: disk}) as c:
        before = await c.fill(1, 3, BODY)
        await ready(c, 1)
        disk.fill()
        bodies = before + await filled(c, 1)
        space = c.system(1).storage.space
        assert space.full and c.nodes[1].status()["space"]["full"] and c.nodes[1].status()["busy"]
        assert await bodies_of(c, 1) == bodies, "reads go on"
        assert await c.system(1).replicas.leadership.read_index(c.member(1)) >= 0
        with pytest.raises(NoSpace):
            await c.append(1, [(b"", b"x" * BODY)])
        await c.nodes[1].truncate("log", 2)
        await c.create("more", [1])
        await c.nodes[1].delete_group("more")
        assert 1 not in c.failures
        disk.quota = -1
        await room(c, 1)
        bodies += await c.fill(1, 2, BODY)
        await c.restart(1)
        await c.leader()
        start = c.log(1).start
        assert [body for _, body in await c.read(1, start)] == bodies[start:]


async def test_a_truncation_and_a_compaction_make_room_for_writes(tmp_path: Path) -> None:
    disk = QuotaDisk(tmp_path / "node-1")
    async with cluster(tmp_path, 1, disks={1: disk}) as c:
        await ready(c, 1)
        await c.fill(1, 60, BODY)
        await ready(c, 1)
        disk.fill()
        await filled(c, 1)
        end = c.log(1).end
        await c.nodes[1].truncate("log", end - 1)
        await c.nodes[1].compact()
        await room(c, 1)
        assert (await c.append(1, [(b"", b"again" * 1000)])).start == end
        await c.restart(1)
        await c.leader()
        assert (await c.read(1, end - 1))[1][1] == b"again" * 1000
        await c.crash(1)
        assert check_directory(tmp_path / "node-1")["ok"]


async def test_what_the_reserve_can_not_hold_waits_and_is_not_lost(tmp_path: Path) -> None:
    """Commands that were taken before the disk turned out to be full are written when there is room."""
    disk = QuotaDisk(tmp_path / "node-1")
    async with cluster(tmp_path, 1, disks={1: disk}) as c:
        await ready(c, 1)
        disk.fill()
        acknowledged: dict[int, bytes] = {}

        async def append(number: int) -> None:
            body = (b"%06d" % number).ljust(BODY, b"-")
            while True:
                try:
                    acknowledged[(await c.append(1, [(b"", body)])).start] = body
                    return
                except NoSpace:
                    await until(lambda: not c.system(1).storage.space.full)

        async with trio.open_nursery() as nursery:
            for number in range(150):
                nursery.start_soon(append, number)
            await until(lambda: c.system(1).storage.group_commit.held, "the disk refused a batch")
            assert len(acknowledged) < 150 and 1 not in c.failures
            assert c.system(1).host.disk_health.healthy()
            disk.quota = -1
            await room(c, 1)
        assert await bodies_of(c, 1) == [acknowledged[offset] for offset in sorted(acknowledged)]
        await c.restart(1)
        await c.leader()
        assert await bodies_of(c, 1) == [acknowledged[offset] for offset in range(150)]
        await c.crash(1)
        assert check_directory(tmp_path / "node-1")["ok"]


async def test_a_segment_without_room_is_made_of_the_reserve(tmp_path: Path) -> None:
    disk = QuotaDisk(tmp_path / "node-1")
    async with cluster(tmp_path, 1, disks={1: disk}) as c:
        bodies = await c.fill(1, 5, BODY)
        await ready(c, 1)
        storage = c.system(1).storage
        async with storage.janitor.lock:
            sealed = await c.system(1).storage.group_commit.exclusive(c.system(1).wal.roll)
            assert sealed is not None
            storage.segment_writer.unflushed.add([sealed])
            disk.fill()
        await full(c, 1)

        def made() -> bool:
            storage.janitor.look()
            return sealed.file in storage.location.files

        await until(made, "the segment is made")
        assert disk.refused and not c.system(1).storage.space.status()["reserve_bytes"]
        assert await bodies_of(c, 1) == bodies
        disk.quota = -1
        await room(c, 1)
        await c.fill(1, 1, BODY)


async def test_what_is_given_up_for_segments_is_not_taken_by_the_wal(tmp_path: Path) -> None:
    disk = QuotaDisk(tmp_path / "node-1")
    async with cluster(tmp_path, 1, disks={1: disk}) as c:
        await c.fill(1, 5, BODY)
        await ready(c, 1)
        system = c.system(1)
        async with system.storage.janitor.lock:
            disk.fill()
            first = system.wal.current
            while system.wal.current == first:
                await c.fill(1, 1, BODY)
            await system.storage.space.look(False)
            assert system.storage.space.full and not system.storage.space.is_short
            assert disk.free_bytes("") == system.config.disk_reserve_bytes, "given up, and nobody took it yet"
            await system.storage.janitor.roll()
            assert {first, first + 1} <= system.storage.location.files.keys(), "both have segments"
        assert system.storage.space.is_short
        disk.quota = -1
        await room(c, 1)
        await c.fill(1, 1, BODY)


async def test_a_full_follower_stops_nobody_and_catches_up_when_its_data_is_truncated(tmp_path: Path) -> None:
    disk = QuotaDisk(tmp_path / "node-3")
    async with cluster(tmp_path, 3, disks={3: disk}, payload_cache_bytes=0) as c:
        await c.lead(1)
        before = await c.fill(1, 60, BODY)
        await c.applied()
        await ready(c, 3)
        disk.fill()
        term = c.member(1).raft.term
        bodies = before + await c.fill(1, 120, BODY)
        await full(c, 3)
        await until(lambda: c.system(3).storage.space.refused, "entries are refused")
        last = c.member(3).raft.log.stable
        assert last < c.member(1).raft.commit and 3 not in c.failures
        assert [body for _, body in await c.read(3)] == bodies[: c.log(3).end], "reads go on"
        assert c.member(1).raft.term == term and 3 in c.system(1).live, "liveness goes on"
        end = c.log(1).end
        await c.nodes[1].truncate("log", end)
        # What the leader still has it sends; of what it has not it sends tombstones.
        await c.nodes[1].compact()
        await room(c, 3)
        await c.applied()
        assert c.log(3).start == end
        await c.restart(3)
        await c.fill(1, 2, BODY)
        await c.applied()
        assert await c.read(3, end) == await c.read(1, end)
        await c.crash(3)
        assert check_directory(tmp_path / "node-3")["ok"]


async def test_a_full_node_votes_out_of_the_reserve(tmp_path: Path) -> None:
    disk = QuotaDisk(tmp_path / "node-3")
    async with cluster(tmp_path, 3, disks={3: disk}) as c:
        await c.lead(1)
        await ready(c, 3)
        disk.fill()
        await c.fill(1, 120, BODY)
        await full(c, 3)
        await c.crash(1)
        await until(lambda: c.member(2).raft.role == LEADER, "node 2 is elected")
        assert c.member(3).raft.vote == 2 and c.system(3).storage.space.full
        await c.start(1)
        await until(lambda: c.member(1).raft.commit == c.member(2).raft.log.last_index, "with a third node it commits")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 16 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    if os.geteuid():
        pytest.skip("not run: a small file system needs root")
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(path)], capture_output=True)
    if made.returncode:
        pytest.skip(f"not run: no file system can be mounted here: {made.stderr.decode().strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


async def test_a_real_small_file_system(small_disk: Path) -> None:
    """Full by ordinary writes, then really full by somebody else's file: every writer meets it, LMDB too."""
    async with cluster(small_disk, 1, payload_cache_bytes=0) as c:
        await ready(c, 1)
        bodies = await filled(c, 1)
        assert len(bodies) > 100
        stranger = small_disk / "stranger"
        with pytest.raises(OSError), stranger.open("wb", 0) as file:
            while True:
                file.write(bytes(4096))
        assert await bodies_of(c, 1) == bodies
        with pytest.raises(NoSpace):
            await c.nodes[1].compact()
        assert await bodies_of(c, 1) == bodies and 1 not in c.failures
        if not c.system(1).wal.stock.spare_bytes:
            # The reserve is in use: a start has nothing to give up, and needs some room of its own.
            os.truncate(stranger, max(0, stranger.stat().st_size - MIB))
        await c.restart(1)
        await c.leader()
        assert await bodies_of(c, 1) == bodies
        end = c.log(1).end
        await c.nodes[1].truncate("log", end - 3)
        stranger.unlink()
        await c.nodes[1].compact()
        await room(c, 1)
        bodies += await c.fill(1, 5, BODY)
        await c.restart(1)
        await c.leader()
        assert [body for _, body in await c.read(1, end - 3)] == bodies[end - 3 :]
        await c.crash(1)
        assert check_directory(small_disk / "node-1")["ok"]


@pytest.mark.parametrize("looked", [True, False], ids=["the janitor looked", "the janitor was late"])
async def test_a_write_that_has_no_room_is_refused_and_not_held(tmp_path: Path, looked: bool) -> None:
    disk = QuotaDisk(tmp_path / "node-1")
    async with cluster(tmp_path, 1, disks={1: disk}) as c:
        await c.fill(1, 3, 40 * KIB)
        await ready(c, 1)
        system, left = c.system(1), c.config.wal_file_bytes // 2
        # Room for a segment, and for no WAL file behind the one that is ready.
        disk.fill(left)
        if looked:
            await c.roll(1)
            await full(c, 1)
            await filled(c, 1)
            assert not system.wal.stock.short and system.wal.room < 40 * KIB + 2 * MARGIN_BYTES
        else:
            # The file that is ready fills up before anybody finds that there is none behind it: one write is in the
            # reserve, and no other follows it there.
            async with system.storage.janitor.lock:
                await filled(c, 1)
            assert system.wal.stock.short and system.wal.room > left
        assert system.storage.space.full and not system.storage.space.takes(40 * KIB)
        await until(lambda: not system.storage.group_commit.held, "what was taken was written")
