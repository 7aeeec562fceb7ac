"""Storage jobs that fail by a defect, and truncations that come between what a job chose and its turn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from logyard.engine.log.location import SealedFile
from logyard.engine.log.wal import Wal
from logyard.payloads.store import PayloadStore
from logyard.protocol.errors import JobFailed
from logyard.service.payload_port import StoreAdapter
from logyard.service.status_watch import troubles

from .cluster import KIB, WRITER_VARIABLE, Cluster, cluster, until


@pytest.fixture(params=["thread", "process"])
def writer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs in threads, and in the writer process."""
    monkeypatch.setenv(WRITER_VARIABLE, request.param)


async def sealed(c: Cluster) -> SealedFile:
    """A sealed file with two groups' payloads."""
    await c.create("other")
    for name in ("log", "other"):
        await c.fill(1, 6, 40 * KIB, name=name)
    await c.roll(1)
    (file,) = c.system(1).storage.location.files.values()
    assert len(file.shares) == 2
    return file


@pytest.mark.usefixtures("writer")
@pytest.mark.parametrize("names", [("log",), ("log", "other")])
async def test_a_group_that_dies_before_its_migration_begins(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Its share goes while the job waits for its turn; also when all of them do, and nothing is left to copy."""
    async with cluster(tmp_path, 1, payload_cache_bytes=0) as c:
        file = await sealed(c)
        system, node = c.system(1), c.nodes[1]
        store = system.store
        assert isinstance(store, StoreAdapter)
        async with trio.open_nursery() as nursery, store._job:
            nursery.start_soon(node.compact)
            await until(lambda: store._job.statistics().tasks_waiting, "the migration waits for its turn")
            for name in names:
                await node.truncate(name, 6)
            assert len(file.shares) == 2 - len(names)
        assert not system.storage.location.files and not store.jobs.failed
        for name in ("log", "other"):
            found = [body for _, body in await c.read(1, c.log(1, name).start, name=name)]
            assert len(found) == (0 if name in names else 6)
        assert bool(store.homes(c.member(1, "other").uid)) == ("other" not in names)


async def test_truncations_beside_compactions(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, group="", payload_cache_bytes=0) as c:
        names = [f"log-{number}" for number in range(8)]
        for name in names:
            await c.create(name)
        left = 6

        async def churn(name: str) -> None:
            for _ in range(6):
                await c.fill(1, 4, 20 * KIB, name=name)
                await c.nodes[1].truncate(name, c.log(1, name).end)
            nonlocal left
            left -= 1

        async with trio.open_nursery() as nursery:
            for name in names:
                nursery.start_soon(churn, name)
            while left > 0:
                await c.nodes[1].compact()
        assert not c.system(1).store.jobs.failed


def breaks(times: int, inner: Callable[..., Any]) -> Callable[..., Any]:
    """Raise what nobody foresaw so many times, then do it."""
    left = [times]

    def call(*arguments: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise KeyError("a defect")
        return inner(*arguments)

    return call


@pytest.mark.long
async def test_a_defect_in_what_a_migration_builds_is_counted_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("logyard.engine.jobs.PAUSE_S", 0.01)
    async with cluster(tmp_path, 1, migrate_age_s=1, migrate_budget_bytes=0) as c:
        system = c.system(1)
        storage = system.storage
        monkeypatch.setattr(storage.compactor, "_source", breaks(2, storage.compactor._source))
        await c.fill(1, 6, 40 * KIB)
        await c.roll(1)
        await until(lambda: system.storage.compactor.files, "the janitor migrates it at the third try")
        jobs = c.nodes[1].status()["jobs"]
        assert jobs["failed"] == 2 and not jobs["waiting"] and not jobs["frozen"]
        assert "migration of WAL file" in jobs["last"] and "KeyError: 'a defect'" in jobs["last"]
        assert len(await c.read(1)) == 6


async def test_a_file_that_fails_three_times_is_set_aside_and_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("logyard.engine.jobs.PAUSE_S", 0.01)
    async with cluster(tmp_path, 1, migrate_budget_bytes=1 << 30) as c:
        file = await sealed(c)
        storage = c.system(1).storage
        source = storage.compactor._source
        bad = file.file

        def build(one: SealedFile, uids: list[int]) -> Any:
            if one.file == bad:
                raise KeyError("a defect")
            return source(one, uids)

        with monkeypatch.context() as broken:
            broken.setattr(storage.compactor, "_source", build)
            for number in range(3):
                assert file.failed == (number == 3)
                with pytest.raises(JobFailed, match=f"try {number + 1}"):
                    await c.nodes[1].compact()
            assert file.failed and storage.location.files[bad] is file
            await c.fill(1, 6, 40 * KIB)
            with pytest.raises(JobFailed):
                await c.nodes[1].compact()
            assert list(storage.location.files) == [bad], "the other one went"
            assert not storage.compactor.victims()
        assert len(await c.read(1)) == 12
        await c.nodes[1].compact()
        assert not storage.location.files and not storage.jobs.status()["waiting"], "by hand it is tried again"


@pytest.mark.parametrize("where", ["store", "homes", "recycling", "segment"])
async def test_a_defect_in_a_switch_destroys_nothing_until_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    async with cluster(tmp_path, 1, payload_cache_bytes=0) as c:
        await c.fill(1, 6, 40 * KIB)
        system = c.system(1)
        storage, store = system.storage, system.store
        assert isinstance(store, StoreAdapter)

        def defect(*_: object) -> Any:
            raise KeyError("a defect")

        with monkeypatch.context() as broken:
            if where == "store":
                broken.setattr(PayloadStore, "adopt", defect)
            elif where == "homes":
                broken.setattr(SealedFile, "remove", defect)
            elif where == "recycling":
                broken.setattr(Wal, "recycle", defect)
            else:
                broken.setattr(storage.segment_writer, "_adopt", defect)
            with pytest.raises(JobFailed, match="until this node is restarted"):
                await c.nodes[1].compact()
        frozen = c.nodes[1].status()["jobs"]["frozen"]
        assert "a defect" in frozen
        assert any("restart it" in line for line in troubles({1: c.nodes[1].status()}))
        files = set(c.system(1).wal.files)
        await c.fill(1, 6, 40 * KIB)
        with pytest.raises(JobFailed, match="a defect"):
            await c.nodes[1].compact()
        storage.janitor.look()
        await c.nodes[1].truncate("log", 9)
        assert files <= set(c.system(1).wal.files), "nothing is given back"
        assert [len(body or b"") for _, body in await c.read(1, 9)] == [40 * KIB] * 3, "and it serves"
        await c.restart(1)
        await c.leader()
        assert not c.nodes[1].status()["jobs"]["frozen"]
        await until(lambda: c.log(1).end == 12)
        assert [len(body or b"") for _, body in await c.read(1, 9)] == [40 * KIB] * 3
        await c.nodes[1].compact()
        assert not c.system(1).storage.location.files
        assert len(await c.read(1, 9)) == 3
