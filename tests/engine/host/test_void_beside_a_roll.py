"""What a group's repair gave up of the WAL and takes back is in the segments, whatever the WAL does meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from logyard.engine.disk.door import Disk
from logyard.engine.repair import log_repair
from logyard.protocol.errors import Corrupt, NoSpace

from .cluster import KIB, cluster, until


class Slow(Disk):
    """A disk whose syncs take so long that a roll of the WAL is under way for a while."""

    __slots__ = ()

    def datasync(self, fd: int) -> None:
        """Sync, late."""
        time.sleep(0.06)
        super().datasync(fd)


@pytest.mark.parametrize("rolls", [False, True])
async def test_a_repair_without_room_keeps_what_it_gave_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rolls: bool
) -> None:
    """It looked the file up that was current, which nobody knows of from its roll by the thread to the end of that
    batch: what was left out of it was in no segment, and acknowledged records were gone after a restart."""
    monkeypatch.setattr(log_repair, "AGAIN_S", 600.0)
    async with cluster(tmp_path, group="", payload_cache_bytes=0, disks={1: Slow()}) as c:
        for name in ("a", "b"):
            await c.create(name)
            await c.lead(2, name)
        await c.fill(2, 5, KIB, "a")
        await c.applied("a")
        await c.roll(1)
        await c.fill(2, 5, KIB, "a")
        await c.applied("a")
        member, system = c.member(1, "a"), c.system(1)
        storage, log, wal = system.storage, member.raft.log, system.wal
        await until(lambda: log.stable == log.last_index)
        acknowledged, unflushed = log.stable, storage.segment_writer.unflushed
        commit, logs = storage.meta_batch.commit, system.repair.log_repair._storage
        void, taken_back, refused = logs.void, trio.Event(), trio.Event()

        async def full(build: Callable[[], Any], *arguments: Any, **more: Any) -> None:
            if refused.is_set():
                await commit(build, *arguments, **more)
                return
            refused.set()
            here = wal.current
            if rolls:
                nursery.start_soon(c.fill, 2, 24, 64 * KIB, "b")
                await until(lambda: wal.current != here and here not in {one.file for one in unflushed.files()})
            raise NoSpace("no room for the meta store")

        async def voided(uid: int) -> tuple[int, Callable[[], None]]:
            through, take_back = await void(uid)
            return through, lambda: (take_back(), taken_back.set())[0]

        async with trio.open_nursery() as nursery:
            monkeypatch.setattr(storage.meta_batch, "commit", full)
            monkeypatch.setattr(logs, "void", voided)
            system.repair.log_repair.found(member, Corrupt("segment", 0, "64 readable bytes", "Input/output error"))
            await until(taken_back.is_set, "what was given up is taken back")
        await until(lambda: not unflushed.backlog_files)
        await c.roll(1)
        await c.crash(1)
        await c.start(1)
        raft = c.member(1, "a").raft
        assert raft.log.last_index >= acknowledged and raft.mend is None, raft
