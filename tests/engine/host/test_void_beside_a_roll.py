"""What a group's repair gave up of the WAL and takes back is in the segments, whatever the WAL does meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from logyard.engine.disk.door import Disk
from logyard.engine.repair import log_repair
from logyard.protocol.errors import Corrupt, NoSpace

from .cluster import KIB, PATIENCE, cluster, until


class Held(Disk):
    """A disk whose syncs in other threads wait for `go` while `holds()` says so."""

    __slots__ = ("holds", "go")

    def __init__(self) -> None:
        super().__init__()
        self.holds: Callable[[], bool] = lambda: False
        self.go = threading.Event()

    def datasync(self, fd: int) -> None:
        """Sync, in time."""
        if threading.current_thread() is not threading.main_thread() and self.holds():
            assert self.go.wait(PATIENCE)
        super().datasync(fd)


@pytest.mark.parametrize("rolls", [False, True])
async def test_a_repair_without_room_keeps_what_it_gave_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rolls: bool
) -> None:
    """It looked the file up that was current, which nobody knows of from its roll by the thread to the end of that
    batch: what was left out of it was in no segment, and acknowledged records were gone after a restart."""
    monkeypatch.setattr(log_repair, "AGAIN_S", 600.0)
    disk = Held()
    async with cluster(tmp_path, group="", payload_cache_bytes=0, disks={1: disk}) as c:
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
                disk.holds = lambda: wal.current != here
                nursery.start_soon(c.fill, 2, 24, 64 * KIB, "b")
                await until(disk.holds)
                assert here not in {one.file for one in unflushed.files()}, "its roll is not known yet"
            raise NoSpace("no room for the meta store")

        async def voided(uid: int) -> tuple[int, Callable[[], None]]:
            through, take_back = await void(uid)
            return through, lambda: (take_back(), taken_back.set())[0]

        async with trio.open_nursery() as nursery:
            monkeypatch.setattr(storage.meta_batch, "commit", full)
            monkeypatch.setattr(logs, "void", voided)
            system.repair.log_repair.found(member, Corrupt("segment", 0, "64 readable bytes", "Input/output error"))
            await until(refused.is_set)
            with trio.move_on_after(PATIENCE):
                await taken_back.wait()
            disk.go.set()
            assert taken_back.is_set(), member.reason
        await until(lambda: not unflushed.backlog_files)
        await c.roll(1)
        await c.crash(1)
        await c.start(1)
        raft = c.member(1, "a").raft
        assert raft.log.last_index >= acknowledged and raft.mend is None, raft
