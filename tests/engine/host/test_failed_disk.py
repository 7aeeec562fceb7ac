"""A disk that fails: leaderships are handed over at once, and what a failed sync left in memory is never believed."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lmdb
import pytest
import trio

from logyard.engine.disk.faulty import FaultyDisk
from logyard.engine.log.wal import Rolled, WalItem
from logyard.engine.recovery.incarnation import MARK
from logyard.protocol.errors import LogyardError, WalFailed

from .cluster import KIB, Replies, cluster, frame, until

PATIENT: dict[str, Any] = {"liveness_timeout_ms": 60_000}
"""A leader that says nothing is trusted for as long as a test lasts."""


class ForgetfulDisk(FaultyDisk):
    """As Linux does it: pages whose sync failed are called clean. They are read back as long as they are cached, and
    `revalidate` (or memory pressure) brings back what the disk has."""

    __slots__ = ("lost", "_unsynced")

    def __init__(self) -> None:
        super().__init__()
        self._unsynced: dict[str, list[tuple[int, bytes]]] = {}
        self.lost: dict[str, list[tuple[int, bytes]]] = {}

    def _path(self, fd: int) -> str:
        return os.readlink(f"/proc/self/fd/{fd}")

    def _enter(self, name: str, target: str | int, offset: int = 0, data: bytes = b"") -> None:
        if name == "write" and isinstance(target, int):
            before = os.pread(target, len(data), offset)
            self._unsynced.setdefault(self._path(target), []).append((offset, before))
        super()._enter(name, target, offset, data)

    def datasync(self, fd: int) -> None:
        path = self._path(fd)
        try:
            super().datasync(fd)
        except OSError:
            self.lost.setdefault(path, []).extend(self._unsynced.pop(path, []))
            raise
        self._unsynced.pop(path, None)

    def revalidate(self, path: str) -> None:
        for offset, before in reversed(self.lost.pop(path, [])):
            fd = os.open(path, os.O_WRONLY)
            os.pwrite(fd, before, offset)
            os.close(fd)
        super().revalidate(path)


@pytest.mark.parametrize("call", ["datasync", "write"])
async def test_leaderships_are_handed_over_before_the_node_ends(tmp_path: Path, call: str) -> None:
    disk = FaultyDisk()
    async with cluster(tmp_path, disks={1: disk}, **PATIENT) as c:
        names = ["log", "a", "b", "c"]
        for name in names[1:]:
            await c.create(name)
        for name in names:
            await c.lead(1, name)
            await c.append(1, [(b"", b"kept")], name)
            await c.applied(name)
        disk.fail(call, 1, errno.EIO)
        with pytest.raises(LogyardError) as caught, trio.fail_after(5):
            await c.append(1, [(b"", b"not durable here")])
        assert caught.value.code == "wal_failed"
        # The process still stands, its links are up, nobody's timeout is near: this is its own word.
        for name in names:
            assert await c.leader(name, among=(2, 3)) in (2, 3)
        await until(lambda: 1 in c.failures)
        assert isinstance(c.failures.pop(1), WalFailed)
        assert (c.path / "node-1" / MARK).read_text().startswith("WAL file")
        for name in names:
            leader = await c.leader(name, among=(2, 3))
            assert (await c.append(leader, [(b"", b"after")], name)).start >= 1
        await c.restart(1)
        for name in names:
            await c.applied(name)
            assert [body for _, body in await c.read(1, name=name)][-1] == b"after"
        assert not (c.path / "node-1" / MARK).exists(), "a start that has read everything forgets it"


async def test_a_batch_whose_sync_failed_is_not_believed_because_memory_still_has_it(tmp_path: Path) -> None:
    disk = ForgetfulDisk()
    async with cluster(tmp_path, 1, disks={1: disk}) as c:
        await c.fill(1, 3, 100)
        group_commit = c.system(1).storage.group_commit
        await until(lambda: group_commit.sealed and not group_commit.busy)
        disk.fail("datasync", 1, errno.EIO)
        with pytest.raises(LogyardError), trio.fail_after(5):
            await c.append(1, [(b"", b"never durable")])
        await until(lambda: 1 in c.failures)
        ((path, lost),) = disk.lost.items()
        assert lost and path.endswith(".wal")
        assert b"never durable" in Path(path).read_bytes(), "the page cache has it"
        await c.restart(1)
        await c.leader()
        assert not disk.lost and len(await c.read(1)) == 3, "the disk has not"
        await c.append(1, [(b"", b"next")])
        # What was acknowledged meanwhile is there whatever the page cache says.
        await c.restart(1)
        await c.leader()
        assert [body for _, body in await c.read(1)][3:] == [b"next"]


async def test_a_disk_that_still_fails_is_not_started_on(tmp_path: Path) -> None:
    disk = FaultyDisk()
    async with cluster(tmp_path, 1, disks={1: disk}) as c:
        await c.fill(1, 3, 100)
        await c.crash(1)
        disk.fail("revalidate", 1, errno.EIO)
        with pytest.raises(WalFailed, match="fails"):
            await c.build(1).open()
        await c.start(1)
        await c.leader()
        assert len(await c.read(1)) == 3


@pytest.mark.parametrize("beside", [0, 1])
async def test_after_a_failure_everything_is_read_from_the_disk_again(tmp_path: Path, beside: int) -> None:
    disk = FaultyDisk()
    async with cluster(tmp_path, 1, disks={1: disk}, generation_files=beside) as c:
        await c.fill(1, 3, 20 * KIB)
        await c.nodes[1].compact()
        await c.restart(1)
        seen = {str(call.target).rsplit(".", 1)[-1] for call in disk.calls if call.name == "revalidate"}
        assert seen == {"wal"}, "after a clean end only the log's files, whose last batch counts"
        disk.fail("datasync", 1, errno.EIO)
        with pytest.raises(LogyardError), trio.fail_after(5):
            await c.append(1, [(b"", b"x")])
        await until(lambda: 1 in c.failures)
        await c.restart(1)
        seen = {str(call.target).rsplit(".", 1)[-1] for call in disk.calls if call.name == "revalidate"}
        assert {kind.rsplit("/", 1)[-1] for kind in seen} == {"wal", "mdb", "seg", *["bodies"] * beside}


async def test_a_failing_meta_store_ends_the_node_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(tmp_path, **PATIENT) as c:
        await c.lead(1)
        await c.append(1, [(b"", b"kept")])
        await c.applied()
        environment = c.system(1).storage.meta_batch.meta._environments[0]

        class Failing:
            def begin(self, **options: object) -> object:
                if options.get("write"):
                    raise lmdb.DiskError("mdb_txn_commit: Input/output error")
                return environment.begin()

            def close(self) -> None:
                environment.close()

        c.system(1).storage.meta_batch.meta._environments[0] = Failing()  # type: ignore[call-overload]
        with pytest.raises(WalFailed), trio.fail_after(5):
            await c.nodes[1].create_groups([{"name": "new", "members": [1, 2, 3], "machine": "log"}])
        await until(lambda: 1 in c.failures)
        assert isinstance(c.failures.pop(1), WalFailed) and "meta store" in (c.path / "node-1" / MARK).read_text()
        leader = await c.leader(among=(2, 3))
        await c.append(leader, [(b"", b"after")])
        await c.restart(1)
        await c.applied()
        assert [body for _, body in await c.read(1)] == [b"kept", b"after"]


async def test_law_2_a_wal_that_fails_while_rolling_ends_the_node(tmp_path: Path) -> None:
    disk = FaultyDisk()
    async with cluster(tmp_path, 1, disks={1: disk}) as c:
        await c.append(1, [(b"", b"x")])
        await until(lambda: c.system(1).storage.group_commit.sealed and not c.system(1).storage.group_commit.busy)
        disk.fail("rename", 1, errno.EIO)
        with pytest.raises(WalFailed):
            await c.roll(1)
        # Nobody writes any more: the node has to find out by itself.
        await until(lambda: 1 in c.failures, "the node ends")


async def test_law_2_a_bug_in_the_wal_thread_ends_the_node_and_hangs_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path, 1) as c:
        system = c.system(1)

        def write(items: Sequence[WalItem]) -> Rolled | None:
            raise AssertionError("a batch was measured wrongly")

        monkeypatch.setattr(type(system.wal), "write", lambda self, items: write(items))
        replies = Replies()
        # Too large to be written in place.
        system.replicas.commands.submit(c.member(1).uid, frame(bytes(100 * KIB)), replies, 1)
        await until(lambda: 1 in c.failures, "the node ends")
        assert replies.found == [(1, 1)]
