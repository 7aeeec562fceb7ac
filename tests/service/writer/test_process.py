"""The writer process: killed at every step, orphaned, started twice, poisoned; nothing is lost or counted twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from logyard.client.sync import Yard, connect_sync
from logyard.engine.disk.door import Disk
from logyard.engine.disk.lock import lock_directory, lock_holders
from logyard.engine.host import admission as budget
from logyard.payloads.generation import Generation
from logyard.payloads.store import PayloadStore
from logyard.protocol.errors import Busy, DirectoryInUse, JobPoisoned, NoSpace, StoreShort
from logyard.service.check.run import check_directory
from logyard.service.local_cluster import LocalCluster
from logyard.service.payload_port import StoreAdapter
from logyard.service.writer.process import COMMAND, WriterProcess
from tests.engine.host.cluster import KIB, MIB, Cluster, cluster, payload_books, until
from tests.service.writer import failing as failing_writer


def writer_of(c: Cluster) -> WriterProcess:
    writer = c.system(1).writer
    assert isinstance(writer, WriterProcess)
    return writer


async def check_books(c: Cluster, path: Path) -> None:
    """Counters equal a full scan, `logyard check` finds nothing, and a restart counts the same."""
    books = payload_books(c.system(1))
    recounted = {number: found.live for number, found in c.system(1).store._store.recount().items()}  # type: ignore[attr-defined]
    assert recounted == books["generations"]
    await c.crash(1)
    report = await trio.to_thread.run_sync(check_directory, path / "node-1")
    found = [finding for finding in report["findings"] if finding["kind"] != "set_aside"]
    assert report["ok"] and not found, report
    await c.start(1)
    await c.leader()
    member = c.member(1)
    await until(lambda: member.raft.applied == member.raft.log.last_index)
    assert payload_books(c.system(1)) == books


async def test_garbage_is_collected_between_jobs_and_not_within_them(tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    async with cluster(tmp_path, 1, writer=failing_writer.command(plan), payload_cache_bytes=0) as c:
        for _ in range(3):
            await c.fill(1, 2000, 64)
            await c.nodes[1].compact()
        assert c.nodes[1].status()["writer"]["jobs"] >= 6
    collected = (plan / "collected").read_text().splitlines()
    assert set(collected) - {""} == {"after reply"}
    assert collected.count("after reply") >= 6


async def test_a_job_that_is_done_while_an_error_is_handled_ends_no_process(tmp_path: Path) -> None:
    """What whoever waits for it handles is no failure of the job: a compaction that met a full disk, say."""
    async with cluster(tmp_path, 1, writer=COMMAND, payload_cache_bytes=0) as c:
        await c.fill(1, 20, 40 * KIB)
        try:
            raise NoSpace("full")
        except NoSpace:
            await c.nodes[1].compact()
        status = c.nodes[1].status()["writer"]
        assert status["jobs"] == 2 and status["starts"] == 1 and status["pid"] == writer_of(c).pid != 0


async def test_jobs_run_in_the_process_and_it_ends_with_the_system(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, writer=COMMAND, payload_cache_bytes=0) as c:
        writer = writer_of(c)
        bodies = await c.fill(1, 20, 40 * KIB)
        await c.nodes[1].compact()
        status = c.nodes[1].status()["writer"]
        assert status["pid"] == writer.pid and status["jobs"] == 2 and status["starts"] == 1 and not status["job"]
        store = c.system(1).store
        assert [one.live > 20 * 40 * KIB for one in store.generations()] == [True]
        assert not store._store.generation(1).writable  # type: ignore[attr-defined]
        assert [body for _, body in await c.read(1)] == bodies
        # It yields to the loop, and ends when its input does.
        assert os.getpriority(os.PRIO_PROCESS, writer.pid) > os.getpriority(os.PRIO_PROCESS, os.getpid())
        pid = writer.pid
        await c.crash(1)
        assert not Path(f"/proc/{pid}").exists()
        await c.start(1)


async def test_disk_space_comes_back_although_another_process_writes(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, writer=COMMAND, payload_cache_bytes=0) as c:
        await c.fill(1, 30, 40 * KIB)
        await c.nodes[1].compact()
        full = c.system(1).store.disk_bytes()
        await c.nodes[1].truncate("log", 30)
        await c.nodes[1].compact()
        assert full > 1200 * KIB and c.system(1).store.disk_bytes() < 200 * KIB
        bodies = await c.fill(1, 5, 40 * KIB)
        await c.nodes[1].compact()
        assert [body for _, body in await c.read(1, 30)] == bodies


SHARES = 4
"""Each takes every fourth step, so that none of them takes long."""


async def one_round(c: Cluster, bodies: list[bytes]) -> None:
    """Segments, a migration over two generations with an entry above the transaction size, and a rewriting."""
    start = len(bodies)
    bodies += await c.fill(1, 3, 40 * KIB)
    bodies += await c.fill(1, 1, 2500 * KIB)
    await c.nodes[1].compact()
    store = c.system(1).store
    store._store.seal_current()  # type: ignore[attr-defined]
    await c.nodes[1].truncate("log", start + 2)
    await c.nodes[1].compact()


@pytest.mark.long
@pytest.mark.parametrize("share", range(SHARES))
async def test_killed_at_every_step_of_every_job(tmp_path: Path, share: int) -> None:
    plan = tmp_path / "plan"
    async with cluster(tmp_path, 1, writer=failing_writer.command(plan), payload_cache_bytes=0) as c:
        bodies: list[bytes] = []
        await one_round(c, bodies)
        names = (plan / "steps").read_text().splitlines()
        wanted = {"before segment", "before write", "before sync", "after sync", "before rename", "after segment"}
        wanted |= {"open", "before part", "after part", "before commit", "after commit", "written"}
        wanted |= {"before reply", "after reply"}
        assert wanted <= set(names)
        first = set()
        for at in range(share, len(names), SHARES):
            name, nth = names[at], names[: at + 1].count(names[at])
            first |= {name} if nth == 1 else set()
            (plan / "die").write_text(f"{name} {nth}")
            await one_round(c, bodies)
            start = c.log(1).start
            assert [body for _, body in await c.read(1, start)] == bodies[start:]
            # The nth time of a step may not come: what a round has to write is in more or fewer jobs, as they find it.
            (plan / "die").unlink(missing_ok=True)
        died = (plan / "died").read_text().splitlines()
        # Each step was the last of a process, and no job was given up.
        assert first <= set(died) and len(died) <= len(names) / SHARES + 1
        await until(lambda: writer_of(c).starts > len(died), "the last one is replaced as well")
        assert not writer_of(c).set_aside
        await check_books(c, tmp_path)
        start = c.log(1).start
        assert [body for _, body in await c.read(1, start)] == bodies[start:]


async def test_the_same_job_goes_on_behind_its_last_transaction(tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    async with cluster(tmp_path, 1, writer=failing_writer.command(plan), payload_cache_bytes=0) as c:
        bodies = await c.fill(1, 9, 100 * KIB)
        (plan / "once").write_text("after commit")
        await c.fill(1, 9, 100 * KIB)
        await c.nodes[1].compact()
        assert writer_of(c).starts == 2
        # Everything is there once: a job from its beginning, or a new one, would have copied some of it twice.
        (one,) = c.system(1).store._store.generations()  # type: ignore[attr-defined]
        assert one.live == one.total and one.live >= sum(map(len, bodies)) * 2
        await check_books(c, tmp_path)


@pytest.mark.parametrize("done", [False, True])
async def test_the_node_dies_between_the_reply_and_the_meta_commit(tmp_path: Path, done: bool) -> None:
    async with cluster(tmp_path, 1, writer=COMMAND, payload_cache_bytes=0) as c:
        bodies = await c.fill(1, 10, 40 * KIB)
        await c.roll(1)
        system = c.system(1)
        lock = system.storage.meta_batch._lock
        await lock.acquire()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(c.nodes[1].compact)
            jobs = writer_of(c).jobs
            await until(lambda: writer_of(c).jobs > jobs and (not done or system.store.homes(c.member(1).uid)))
            nursery.cancel_scope.cancel()
        await c.restart(1)
        await c.leader()
        assert c.system(1).storage.location.files, "the file is the home until a commit says otherwise"
        assert [body for _, body in await c.read(1)] == bodies
        await c.nodes[1].compact()
        assert [body for _, body in await c.read(1)] == bodies
        await check_books(c, tmp_path)


async def test_a_stalled_writer_stalls_no_group(tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    async with cluster(tmp_path, 1, writer=failing_writer.command(plan), payload_cache_bytes=0) as c:
        bodies = await c.fill(1, 5, 40 * KIB)
        (plan / "stall").write_text("before commit")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(c.nodes[1].compact)
            await until(lambda: (plan / "stalled").exists())
            assert c.nodes[1].status()["writer"]["job"] == "migration of WAL file 1"
            bodies += await c.fill(1, 40, 4 * KIB)
            assert [body for _, body in await c.read(1)] == bodies
            # What dies meanwhile is dead in the copy.
            await c.nodes[1].truncate("log", 3)
            assert c.nodes[1].status()["writer"]["job"] == "migration of WAL file 1"
            (plan / "stall").unlink()
        assert sum(one.live for one in c.system(1).store.generations()) < 3 * 41 * KIB
        await check_books(c, tmp_path)


async def test_a_deadly_migration_is_set_aside_and_all_else_goes_on(tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    async with cluster(
        tmp_path, 1, writer=failing_writer.command(plan), payload_cache_bytes=0, migrate_budget_bytes=0
    ) as c:
        (plan / "always").write_text("before commit")
        bodies = await c.fill(1, 5, 40 * KIB)
        await c.roll(1)
        c.system(1).storage.janitor.look()
        await until(lambda: writer_of(c).set_aside, "the job is set aside")
        ((what, reason),) = c.nodes[1].status()["writer"]["set_aside"]
        assert what == "migration of WAL file 1" and "3 times" in reason and "SIGKILL" in reason
        await until(lambda: c.system(1).storage.location.files[1].failed)
        # Segments go on in the process, reads and writes as ever; no debt is made of what cannot move.
        bodies += await c.fill(1, 5, 40 * KIB)
        await c.roll(1)
        assert [body for _, body in await c.read(1)] == bodies
        failed = c.system(1).storage.location.files[1]
        assert c.system(1).storage.compactor.debt < failed.length + c.system(1).wal._tail
        (plan / "always").unlink()
        await c.nodes[1].compact()
        assert not c.system(1).storage.location.files
        assert [body for _, body in await c.read(1)] == bodies
        await check_books(c, tmp_path)


async def test_a_deadly_rewriting_is_not_tried_again(tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    async with cluster(tmp_path, 1, writer=failing_writer.command(plan), payload_cache_bytes=0) as c:
        bodies = await c.fill(1, 10, 40 * KIB)
        await c.nodes[1].compact()
        system = c.system(1)
        system.store.seal_current()
        # The janitor would come upon it by itself, before the plan stands.
        async with system.storage.janitor.lock:
            await c.nodes[1].truncate("log", 8)
            (plan / "always").write_text("before commit")
            with pytest.raises(JobPoisoned):
                await system.storage.compactor.collect(0.5)
        starts = writer_of(c).starts
        await system.storage.compactor.collect(0.5)
        assert writer_of(c).set_aside[0][0] == "rewriting of generation 1"
        await until(lambda: writer_of(c).pid)
        assert writer_of(c).starts <= starts + 1
        assert [body for _, body in await c.read(1, 8)] == bodies[8:]
        await check_books(c, tmp_path)


@pytest.mark.parametrize("apart", [True, False])
async def test_a_rewriting_that_finds_no_descriptor_is_done_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    """It is not the generation's fault: set aside until a restart, its dead bytes would never come back."""
    plan = tmp_path / "plan"
    writer = failing_writer.command(plan)
    async with cluster(tmp_path, 1, writer=writer if apart else (), payload_cache_bytes=0) as c:
        bodies = await c.fill(1, 10, 40 * KIB)
        await c.nodes[1].compact()
        system = c.system(1)
        system.store.seal_current()
        async with system.storage.janitor.lock:
            await c.nodes[1].truncate("log", 8)
            (plan / "short").write_text("before commit")
            with monkeypatch.context() as patch:

                def short(*arguments: object, **options: object) -> None:
                    raise StoreShort("no descriptors")

                patch.setattr(PayloadStore, "run", short)
                with pytest.raises(Busy, match="descriptors or memory"):
                    await system.storage.compactor.collect(0.5)
            (plan / "short").unlink()
            assert 1 in [one.id for one in system.store.generations()]
            await system.storage.compactor.collect(0.5)
            assert 1 not in [one.id for one in system.store.generations()]
        assert [body for _, body in await c.read(1, 8)] == bodies[8:]
        await check_books(c, tmp_path)


async def test_a_migration_whose_copy_can_not_be_opened_for_want_of_descriptors_is_done_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was switched yet: after a switch that failed half way nothing is reclaimed until a restart."""
    async with cluster(tmp_path, 1, writer=COMMAND, payload_cache_bytes=0) as c:
        bodies = await c.fill(1, 10, 40 * KIB)
        store = c.system(1).store
        with monkeypatch.context() as patch:

            def short(self: Generation) -> None:
                raise StoreShort("no descriptors")

            patch.setattr(Generation, "open_reader", short)
            with pytest.raises(Busy, match="descriptors or memory"):
                await c.nodes[1].compact()
        assert isinstance(store, StoreAdapter) and not store.jobs.frozen
        await c.nodes[1].compact()
        assert [body for _, body in await c.read(1)] == bodies
        await check_books(c, tmp_path)


async def test_a_deadly_segment_is_written_by_the_node(tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    async with cluster(tmp_path, 1, writer=failing_writer.command(plan), payload_cache_bytes=0) as c:
        (plan / "always").write_text("before write")
        bodies = await c.fill(1, 5, 40 * KIB)
        await c.roll(1)
        assert c.member(1).segments and writer_of(c).set_aside[0][0] == "segment of WAL file 1"
        await c.nodes[1].compact()
        assert [body for _, body in await c.read(1)] == bodies
        await check_books(c, tmp_path)


async def test_a_generation_that_kills_the_writer_is_set_aside_and_the_job_finds_another(tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    async with cluster(tmp_path, 1, writer=failing_writer.command(plan), payload_cache_bytes=0) as c:
        (plan / "damage").write_text(str(tmp_path / "node-1" / "payloads"))
        (plan / "always").write_text("after commit")
        bodies = await c.fill(1, 5, 40 * KIB)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(c.nodes[1].compact)
            await until(lambda: "SIGBUS" in writer_of(c).last_end)
            (plan / "always").unlink()
        names = os.listdir(tmp_path / "node-1" / "payloads")
        assert "gen-0000000001.suspect" in names and "gen-0000000002" in names
        assert not writer_of(c).set_aside
        assert [body for _, body in await c.read(1)] == bodies
        await check_books(c, tmp_path)


async def test_a_full_disk_is_no_death_and_the_job_is_done_when_there_is_room(tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    async with cluster(tmp_path, 1, writer=failing_writer.command(plan), payload_cache_bytes=0) as c:
        storage = c.system(1).storage

        async def migrate() -> None:
            (file,) = storage.location.files.values()
            await storage.compactor.migrate(file)

        bodies = await c.fill(1, 5, 40 * KIB)
        await c.roll(1)
        await migrate()
        bodies += await c.fill(1, 5, 40 * KIB)
        await c.roll(1)
        # The generation is larger already, so every further write to it fails whole, as on a full disk.
        (plan / "full").write_text("40000")
        for _ in range(2):
            with pytest.raises(NoSpace):
                await migrate()
        assert [body for _, body in await c.read(1)] == bodies
        (plan / "full").unlink()
        await migrate()
        assert writer_of(c).starts == 1 and not storage.location.files
        assert [body for _, body in await c.read(1)] == bodies
        await check_books(c, tmp_path)


async def test_no_writer_can_be_started(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, writer=("/nowhere/python",), payload_cache_bytes=0) as c:
        bodies = await c.fill(1, 5, 40 * KIB)
        await c.roll(1)
        assert c.member(1).segments
        c.system(1).storage.location.files[1].sealed_at -= 1e9
        c.system(1).storage.janitor.look()
        await until(lambda: not c.system(1).storage.janitor._wake.is_set())
        assert [body for _, body in await c.read(1)] == bodies
        status = c.nodes[1].status()["writer"]
        assert status["pid"] == 0 and "could not be started" in status["last_end"]
        assert 1 in c.system(1).storage.location.files and not c.system(1).storage.location.files[1].failed


async def test_a_cancelled_job_leaves_no_reply_for_the_next(tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    async with cluster(tmp_path, 1, writer=failing_writer.command(plan), payload_cache_bytes=0) as c:
        bodies = await c.fill(1, 5, 40 * KIB)
        (plan / "stall").write_text("before commit")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(c.nodes[1].compact)
            await until(lambda: (plan / "stalled").exists())
            writer, had = writer_of(c), writer_of(c).pid
            nursery.cancel_scope.cancel()
            (plan / "stall").unlink()
        # Whoever had the job has ended: what it would have said is nobody's answer.
        assert not Path(f"/proc/{had}").exists() and writer.pid != had
        assert c.system(1).store.homes(c.member(1).uid) == []
        await c.nodes[1].compact()
        assert [body for _, body in await c.read(1)] == bodies
        await check_books(c, tmp_path)


async def test_payloads_that_come_with_a_snapshot_go_through_the_writer(tmp_path: Path) -> None:
    async with cluster(tmp_path, writer=COMMAND, payload_cache_bytes=0) as c:
        await c.lead(1)
        bodies = await c.fill(1, 3, 100)
        await c.applied()
        await c.crash(3)
        bodies += await c.fill(1, 40, 40 * KIB)
        await c.nodes[1].compact()
        await c.nodes[1].snapshot(["log"])
        await c.nodes[1].compact()
        await until(lambda: c.member(1).raft.log.snapshot_index > 40)
        await c.start(3)
        await c.applied()
        assert c.member(3).snapshot_index > 40 and writer_of_node(c, 3).jobs
        assert [body for _, body in await c.read(3)] == bodies


def writer_of_node(c: Cluster, number: int) -> Any:
    return c.system(number).writer


async def test_what_waits_to_be_migrated_makes_clients_wait(tmp_path: Path) -> None:
    async with cluster(
        tmp_path, 1, writer=COMMAND, migrate_budget_bytes=0, migrate_debt_bytes_max=4 * MIB, payload_cache_bytes=0
    ) as c:
        storage = c.system(1).storage
        # The janitor waits, as for a migration that takes long; files are sealed and booked as they come.
        async with storage.janitor.lock:
            with pytest.raises(Busy) as busy:
                for _ in range(100):
                    await c.append(1, [(b"", bytes(100 * KIB))])
                    await storage.segment_writer.run()
            assert busy.value.cause == budget.MIGRATION
            # What frees space is let in.
            assert await c.nodes[1].truncate("log", 1) == 1
        await until(lambda: not storage.compactor.debt)
        await c.append(1, [(b"", bytes(100 * KIB))])


# The lock, and who has it


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[tuple[str, int]]:
    """A data directory and its lock."""
    (tmp_path / "payloads").mkdir()
    fd = Disk().lock_directory(str(tmp_path))
    yield str(tmp_path), fd
    os.close(fd)


def start(directory: str, fd: int, *, inherit: bool = True) -> subprocess.Popen[bytes]:
    arguments = [*COMMAND, directory, str(fd), str(16 * MIB), str(MIB), "0"]
    pipe = subprocess.PIPE
    return subprocess.Popen(arguments, stdin=pipe, stdout=pipe, stderr=pipe, pass_fds=[fd] if inherit else [])


def test_only_a_node_starts_a_writer_and_only_one(directory: tuple[str, int], tmp_path: Path) -> None:
    path, fd = directory
    stranger = start(path, fd, inherit=False)
    assert b"only its node starts a writer" in stranger.communicate(timeout=30)[1] and stranger.returncode == 1
    with (tmp_path / "lock").open() as other:
        thief = start(path, other.fileno())
        assert b"only its node starts a writer" in thief.communicate(timeout=30)[1] and thief.returncode == 1
    bare = subprocess.run(COMMAND, capture_output=True, check=False)
    assert bare.returncode == 2 and b"nobody else" in bare.stderr
    first = start(path, fd)
    assert first.stdout is not None and first.stdout.read(4) == b"LYw1"
    second = start(path, fd)
    errors = second.communicate(timeout=30)[1]
    assert second.returncode == 1 and f"has a writer already, process {first.pid}".encode() in errors
    # Ctrl-C in the node's terminal is not for it; the end of its input is.
    first.send_signal(signal.SIGINT)
    first.send_signal(signal.SIGTERM)
    assert first.poll() is None
    first.communicate(timeout=30)
    assert first.returncode == 0
    third = start(path, fd)
    assert third.communicate(b"x" * 100, timeout=30)[1] and third.returncode, "what is no message ends it"


ORPHANING = """
import sys, trio
from pathlib import Path
from tests.engine.host.cluster import cluster, KIB
from tests.service.writer import failing as failing_writer

async def main(path, plan):
    async with cluster(path, 1, writer=failing_writer.command(plan), payload_cache_bytes=0) as c:
        await c.fill(1, 20, 100 * KIB)
        (plan / "stall").write_text("before commit")
        await c.nodes[1].compact()

trio.run(main, Path(sys.argv[1]), Path(sys.argv[2]))
"""


async def test_an_orphan_keeps_the_directory_until_it_has_ended(tmp_path: Path) -> None:
    plan, path = tmp_path / "plan", tmp_path / "node-1"
    node = subprocess.Popen([sys.executable, "-c", ORPHANING, str(tmp_path), str(plan)])
    await until(lambda: (plan / "stalled").exists())
    node.kill()
    await trio.to_thread.run_sync(node.wait)
    orphan = int((plan / "stalled").read_text())
    with (path / "lock").open("rb") as lock:
        assert lock_holders(lock.fileno()) == (node.pid, orphan)
    with pytest.raises(DirectoryInUse, match=f"process {orphan}, the writer of a node that died"):
        lock_directory(str(path), 0.0)
    with pytest.raises(DirectoryInUse, match=f"process {orphan}, the writer of a node that died"):
        check_directory(path)
    # A start waits for it; it aborts its transaction and ends.
    locked: list[int] = []

    async def take() -> None:
        locked.append(await trio.to_thread.run_sync(lock_directory, str(path)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take)
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert not locked
        (plan / "stall").unlink()
    os.close(locked[0])
    async with cluster(tmp_path, 1, group="", writer=COMMAND, payload_cache_bytes=0) as c:
        await c.leader()
        await until(lambda: c.log(1).end == 20)
        assert [len(body or b"") for _, body in await c.read(1)] == [100 * KIB] * 20
        await c.nodes[1].compact()
        assert [len(body or b"") for _, body in await c.read(1)] == [100 * KIB] * 20
        await check_books(c, tmp_path)


STARTING = """
import signal, subprocess, sys
from logyard.engine.disk.lock import lock_directory

lock = lock_directory(sys.argv[1])
subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], pass_fds=(lock,))
print("started", flush=True)
signal.pause()
"""


async def test_a_writer_that_was_just_started_may_be_an_orphan_as_well(tmp_path: Path) -> None:
    """It holds the lock from its first moment, and says who it is when it has begun."""
    node = subprocess.Popen(
        [sys.executable, "-c", STARTING, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert node.stdin is not None and node.stdout is not None
    assert await trio.to_thread.run_sync(node.stdout.readline) == b"started\n"
    node.kill()
    await trio.to_thread.run_sync(node.wait)
    with pytest.raises(DirectoryInUse, match="by the writer of a node that died"):
        lock_directory(str(tmp_path), 0.0)
    locked: list[int] = []

    async def take() -> None:
        locked.append(await trio.to_thread.run_sync(lock_directory, str(tmp_path)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take)
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert not locked
        node.stdin.close()
    os.close(locked[0])


@pytest.mark.long
def test_a_daemon_has_a_writer_and_both_may_be_killed_at_any_time(tmp_path: Path) -> None:
    limits = {"migrate_budget_bytes": 0, "wal_file_bytes": MIB, "generation_bytes": 16 * MIB}
    with LocalCluster(tmp_path, 1, limits=limits) as nodes:
        nodes.start()
        servers = nodes.addresses
        bodies: list[bytes] = []

        def fill(yard: Yard) -> None:
            for _ in range(20):
                bodies.append(os.urandom(64) * 1600)
                yard.log("log").append(b"m", bodies[-1])

        with connect_sync(servers) as yard:
            yard.create("log")
            fill(yard)
            pid = writer_pid(yard)
            os.kill(pid, signal.SIGKILL)
            fill(yard)
            assert writer_pid(yard, other_than=pid)
            assert [record.payload for record in yard.log("log").records()] == bodies
        for _ in range(3):
            with connect_sync(servers) as yard:
                fill(yard)
            # Files are full, so jobs run: the writer is an orphan for a moment, and the start waits for it.
            nodes.kill9(1)
            nodes.restart(1)
        with connect_sync(servers) as yard:
            assert [record.payload for record in yard.log("log").records()] == bodies
            pid = writer_pid(yard)
        assert nodes.stop() == {1: 0}
        assert not Path(f"/proc/{pid}").exists()
        report = check_directory(nodes.nodes[1].data)
        assert report["ok"], report


def writer_pid(yard: Any, other_than: int = 0) -> int:
    """The writer of node 1, once it has one."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        found = int(yard.status(1)["writer"]["pid"])
        if found not in (0, other_than):
            return found
    raise AssertionError("the node has no writer")


async def test_a_job_is_poison_only_when_it_kills_again_and_again(tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    async with cluster(tmp_path, 1, writer=failing_writer.command(plan)) as c:
        writer = writer_of(c)
        await until(lambda: writer.pid)
        for _ in range(5):
            # Killed while idle: nobody notices but the next start.
            pid = writer.pid
            os.kill(pid, signal.SIGKILL)
            await until(lambda pid=pid: writer.pid not in (0, pid))
            await c.fill(1, 1, 40 * KIB)
            await c.roll(1)
        assert not writer.set_aside and writer.starts >= 6
        (plan / "always").write_text("before reply")
        with pytest.raises(JobPoisoned):
            await writer.call("a job", lambda: ["segment", []])
