"""A node whose disk hangs is dead to the others, and comes back as a follower; an idle disk proves itself."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from logyard.engine.config import SystemConfig
from logyard.engine.disk.door import Disk
from logyard.engine.disk.faulty import FaultyDisk
from logyard.engine.disk.health import DiskHealth

from .cluster import cluster, until
from .slow_disk import SlowDisk


async def test_a_hung_disk_makes_a_node_dead_and_its_leaderships_move(tmp_path: Path) -> None:
    disks = {number: SlowDisk() for number in (1, 2, 3)}
    async with cluster(tmp_path, disks=disks, disk_stall_ms=500) as c:
        await c.lead(1)
        await c.fill(1, 3, 10)
        disks[1].hang(c.system(1).storage.group_commit)
        try:
            written: list[int] = []

            async def write() -> None:
                written.extend(await c.append(1, [(b"", b"hung")]))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(write)
                await until(lambda: all(1 not in c.system(number).live for number in (2, 3)), "node 1 is dead")
                leader = await c.leader(among=(2, 3))
                await c.append(leader, [(b"", b"meanwhile")])
                assert not c.system(1).host.disk_health.healthy() and not c.leads(1)
                nursery.cancel_scope.cancel()
        finally:
            disks[1].gate.set()
        await until(lambda: all(len(c.system(number).live) == 3 for number in c.ids), "node 1 is back")
        await c.applied()
        assert c.leads(leader) and not c.leads(1), "it follows"
        bodies = [body for _, body in await c.read(1)]
        assert bodies[-1] == b"meanwhile" and len(bodies) in (4, 5)


async def test_an_idle_node_whose_disk_hangs_is_dead_as_well(tmp_path: Path) -> None:
    disks = {1: SlowDisk()}
    async with cluster(tmp_path, disks=disks, disk_stall_ms=500, disk_probe_ms=20) as c:
        await until(lambda: c.system(1).host.disk_health.probes > 1, "an idle disk is probed")
        assert len(c.system(2).live) == 3
        disks[1].hang(c.system(1).storage.group_commit)
        try:
            await until(lambda: all(1 not in c.system(number).live for number in (2, 3)), "node 1 is dead")
        finally:
            disks[1].gate.set()
        await until(lambda: all(len(c.system(number).live) == 3 for number in c.ids), "node 1 is back")


async def test_a_probe_that_fails_proves_nothing_and_is_made_again(tmp_path: Path) -> None:
    disk = FaultyDisk()
    # Alone: nobody takes its place, and nothing else is written.
    async with cluster(tmp_path, 1, disks={1: disk}, disk_stall_ms=20, disk_probe_ms=100) as c:
        group_commit = c.system(1).storage.group_commit
        await until(lambda: group_commit.sealed and not group_commit.busy, "the WAL has nothing to write any more")
        disk.fail("datasync", 1, errno.EIO)
        await until(lambda: not c.system(1).host.disk_health.healthy(), "its word does not count")
        probes = c.system(1).host.disk_health.probes
        await until(c.system(1).host.disk_health.healthy, "the next one is good")
        assert c.system(1).host.disk_health.probes > probes and c.system(1).host.fail_stop.failure is None


async def test_a_probe_without_a_thread_for_it_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(tmp_path, 1, disk_probe_ms=20) as c:
        health, run_sync = c.system(1).host.disk_health, trio.to_thread.run_sync
        refused: list[int] = []

        async def none(call: Any, *arguments: Any, **options: Any) -> Any:
            if call == health._sync and not refused:
                refused.append(1)
                raise RuntimeError("can't start new thread")
            return await run_sync(call, *arguments, **options)

        monkeypatch.setattr(trio.to_thread, "run_sync", none)
        await until(lambda: bool(refused), "no thread for it")
        probed = health._probed
        await until(lambda: health._probed > probed, "the next one is good")
        assert not c.failures


async def test_a_write_of_many_batches_is_alive_while_its_batches_get_done(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, disk_stall_ms=50) as c:
        system = c.system(1)
        stop = threading.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(system.storage.group_commit.exclusive, stop.wait)
            try:
                await until(
                    lambda: system.storage.group_commit.stalled_s() > 0.15 and not system.host.disk_health.healthy(),
                    "it takes long",
                )
                # Another of its batches got done.
                system.wal.next_batch += 1
                assert (
                    system.host.disk_health.healthy()
                    and system.host.disk_health.stalled_s() < 0.05 < system.storage.group_commit.stalled_s()
                )
                await until(lambda: not system.host.disk_health.healthy(), "none got done since")
            finally:
                stop.set()


async def test_probes_are_counted_from_none(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, disk_probe_ms=60_000) as c:
        health = c.system(1).host.disk_health
        for count in range(3):
            assert health.probes == count
            await trio.to_thread.run_sync(health._sync)


@pytest.mark.parametrize("batch", range(4))
def test_a_batch_that_is_seen_for_the_first_time_has_its_own_time(tmp_path: Path, batch: int) -> None:
    """Whatever its number is: the thread may be long at a write of many batches when the first look comes."""
    writes: Any = SimpleNamespace(stalled_s=lambda: 60.0, batch=batch, error=None)
    health = DiskHealth(Disk(), tmp_path, SystemConfig(), writes, lambda work: None)
    assert health.stalled_s() < 1.0 and health.healthy()
