"""Homes of payloads: WAL file, generation, rewritten; segments; and that the books are exact (architecture section
6)."""

from __future__ import annotations

from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest
import trio

from logyard.engine.entry import units_of
from logyard.engine.log.segment_files import Flushed
from logyard.engine.log.wal import Sealed
from logyard.machines.log.command import APPEND
from logyard.protocol.errors import Busy, Corrupt, Gone, LogyardError, SessionExpired
from logyard.protocol.frame import encode_frame
from logyard.protocol.pending import PendingReply
from logyard.service.check.run import check_directory

from .cluster import KIB, WRITER_VARIABLE, Cluster, cluster, payload_books, plain, until


@pytest.fixture(params=["thread", "process"], autouse=True)
def writer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test twice: jobs in threads, and in the writer process."""
    monkeypatch.setenv(WRITER_VARIABLE, request.param)


async def restarted_books(c: Cluster, number: int) -> dict[str, object]:
    """The counters after a restart, which counts anew."""
    await c.restart(number)
    await c.leader()
    member = c.member(number)
    await until(lambda: member.raft.applied == member.raft.log.last_index)
    return payload_books(c.system(number))


async def test_a_full_file_becomes_a_segment_and_its_entries_leave_memory(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        leader = await c.leader()
        bodies = await c.fill(leader, 60, 40 * KIB)
        await c.applied()
        for number in c.ids:
            member = c.member(number)
            # Memory follows a segment only when its commit is durable.
            await until(lambda member=member: 20 <= member.flushed == member.raft.log.memory_first - 1)
            assert member.flushed == member.segments[-1].last
            assert member.raft.log.snapshot_index == 0
            assert [body for _, body in await c.read(number)] == bodies


@pytest.mark.parametrize("crash", [False, True], ids=["again", "after a crash"])
async def test_a_segment_that_no_commit_stored_is_written_again_before_the_log_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash: bool
) -> None:
    """What lives in its file counts by the log as it is then: below a log that had gone with the snapshot it was
    taken for dead, and the file went with it."""
    async with cluster(tmp_path, 1, payload_cache_bytes=0) as c:
        await c.leader()
        bodies = await c.fill(1, 5, 40 * KIB)
        system, member = c.system(1), c.member(1)
        meta, janitor = system.storage.meta_batch, system.storage.janitor
        commit = meta.commit_members

        async def short(members: Any, sealed_files: Any = (), gone_files: Any = ()) -> None:
            if sealed_files:
                raise Busy("the node's file descriptors or memory", 0.05)
            await commit(members, sealed_files, gone_files)

        monkeypatch.setattr(meta, "commit_members", short)
        async with system.storage.group_logs.janitor_lock:
            with pytest.raises(Busy):
                await janitor.roll()
        assert member.segments and member.flushed == member.raft.log.last_index
        await c.nodes[1].snapshot()
        assert member.snapshot_index == member.raft.log.last_index
        # Its rows are stored, those of the segment too, and not that the file is in a segment.
        await commit([member])
        if not crash:
            monkeypatch.undo()
            await c.nodes[1].compact()
        await c.crash(1)
        report = check_directory(tmp_path / "node-1")
        assert report["ok"], report["findings"]
        await c.start(1)
        await c.leader()
        await c.nodes[1].compact()
        assert [body for _, body in await c.read(1)] == bodies


async def test_a_laggard_gets_entries_that_left_memory_from_segments(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        await c.lead(1)
        await c.fill(1, 3, 100)
        await c.crash(3)
        bodies = await c.fill(1, 60, 40 * KIB)
        member = c.member(1)
        await until(lambda: member.raft.log.memory_first > 20)
        await c.start(3)
        await c.applied()
        assert [body for _, body in await c.read(3, 3)] == bodies
        assert c.member(3).snapshot_index == 0


async def test_reads_are_right_in_every_phase_of_a_payloads_life(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, payload_cache_bytes=0) as c:
        system, node = c.system(1), c.nodes[1]
        bodies = await c.fill(1, 40, 40 * KIB)
        small = await c.append(1, [(b"", b"s%d" % at) for at in range(50)])
        wanted = [*bodies, *(b"s%d" % at for at in range(50))]

        async def check(start: int) -> None:
            assert [body for _, body in await c.read(1, start)] == wanted[start:]
            assert plain((await node.read_body("log", start, 3, 9))[1]) == wanted[start][3:9]
            assert plain((await node.read_body("log", small[1], 1, None))[1]) == b"1"

        await check(0)
        await c.roll(1)
        assert system.storage.location.files and not system.store.generations()
        await check(0)
        await node.compact()
        assert not system.storage.location.files and system.store.homes(c.member(1).uid)
        await check(0)
        await node.truncate("log", 20)
        await node.compact()
        assert sum(one.live for one in system.store.generations()) < 25 * 41 * KIB
        await check(20)
        await c.restart(1)
        await c.leader()
        system, node = c.system(1), c.nodes[1]
        await until(lambda: c.log(1).end == len(wanted))
        await check(20)


async def test_readers_never_notice_that_payloads_move(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, payload_cache_bytes=0) as c:
        node = c.nodes[1]
        bodies = await c.fill(1, 60, 40 * KIB)
        done = False
        reads = 0

        async def reader() -> None:
            nonlocal reads
            while not done:
                start = c.log(1).start
                try:
                    found = await c.read(1, start, 12)
                except LogyardError as error:
                    assert error.code in ("out_of_range", "gone") and c.log(1).start > start, error
                    continue
                assert [body for _, body in found] == bodies[start : start + len(found)]
                reads += 1

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(reader)
            for before in (10, 20, 30):
                await node.compact()
                await node.truncate("log", before)
                await until(lambda at=reads: reads > at + 3)
            done = True
        assert reads


async def test_a_pinned_wal_file_outlives_its_migration(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, payload_cache_bytes=0) as c:
        system = c.system(1)
        bodies = await c.fill(1, 10, 40 * KIB)
        await c.roll(1)
        (file,) = system.storage.location.files
        entry = next(iter(system.replicas.reader.payload_entries(c.member(1), 2, 5))).entry
        assert entry is not None and entry.file == file
        system.storage.location.pin(("wal", file))
        await c.nodes[1].compact()
        assert file not in system.storage.location.files
        unit = units_of(entry.data)[-1]
        assert system.wal.read_payload(file, entry.offset + unit.offset, unit.length) in bodies
        system.storage.location.unpin(("wal", file))
        with pytest.raises(Gone):
            system.wal.read_payload(file, entry.offset, 1)


@pytest.mark.parametrize("before", [0, 1, 5, 13, 14, 26, 40])
async def test_released_bytes_are_counted_exactly(tmp_path: Path, before: int) -> None:
    async with cluster(tmp_path, 1, payload_cache_bytes=0) as c:
        # Entries of several records, so that a truncation may end inside one; over two files, one of them open.
        for at in range(4):
            await c.append(1, [(b"", bytes([65 + at]) * (100 if n % 2 else 50 * KIB)) for n in range(10)])
            if at == 1:
                await c.roll(1)
        await c.nodes[1].truncate("log", before)
        await c.roll(1)
        books = payload_books(c.system(1))
        assert await restarted_books(c, 1) == books
        await c.nodes[1].compact()
        books = payload_books(c.system(1))
        recounted = {number: found.live for number, found in c.system(1).store._store.recount().items()}  # type: ignore[attr-defined]
        assert recounted == books["generations"]
        assert await restarted_books(c, 1) == books
        assert len(await c.read(1, before)) == 40 - before


async def test_a_release_while_its_payloads_move_is_counted_in_the_copy(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, payload_cache_bytes=0) as c:
        bodies = await c.fill(1, 20, 40 * KIB)
        await c.roll(1)
        system = c.system(1)
        inside, go_on = trio.Event(), trio.Event()
        finish = system.store._finish  # type: ignore[attr-defined]

        async def late(run: Awaitable[object]) -> None:
            # Built and run before the release, adopted after it.
            async def held() -> object:
                report = await run
                inside.set()
                await go_on.wait()
                return report

            await finish(held())

        system.store._finish = late  # type: ignore[attr-defined]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(c.nodes[1].compact)
            await inside.wait()
            await c.nodes[1].truncate("log", 15)
            go_on.set()
        live = sum(one.live for one in system.store.generations())
        assert 5 * 40 * KIB <= live < 6 * 40 * KIB + 4096
        assert [body for _, body in await c.read(1, 15)] == bodies[15:]


async def test_damaged_payload_bytes_are_never_served(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, payload_cache_bytes=0) as c:
        bodies = await c.fill(1, 6, 40 * KIB)
        await c.append(1, [(b"", b"small" * 20)])
        await c.roll(1)
        path = min((tmp_path / "node-1" / "wal").glob("*.wal"))
        damage(path, bodies[2][:30])
        damage(path, b"small" * 20)
        assert [body for _, body in await c.read(1, 0, 2)] == bodies[:2]
        for offset in (2, 6):
            with pytest.raises(Corrupt):
                await c.read(1, offset, 1)
        assert [body for _, body in await c.read(1, 3, 3)] == bodies[3:6]


async def test_damaged_payloads_in_a_file_do_not_stop_the_storage_of_others(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, payload_cache_bytes=0, migrate_budget_bytes=0) as c:
        bodies = await c.fill(1, 3, 40 * KIB)
        first = c.system(1).wal.current
        damage(min((tmp_path / "node-1" / "wal").glob("*.wal")), bodies[1][:30])
        await c.create("other", [1])
        more = await c.fill(1, 80, 40 * KIB, "other")
        # Sealing and migration of later files go on; the damaged one stays what it is.
        await until(lambda: c.system(1).store.homes(c.member(1, "other").uid))
        await until(lambda: len(c.system(1).storage.location.files) == 1)
        assert set(c.system(1).storage.location.files) == {first}
        assert [body for _, body in await c.read(1, 0, 80, "other")] == more
        with pytest.raises(Corrupt):
            await c.read(1, 1, 1)


@pytest.mark.parametrize("beside", [False, True], ids=["in LMDB", "beside it"])
async def test_damaged_bytes_in_a_generation_are_never_served(tmp_path: Path, beside: bool) -> None:
    async with cluster(tmp_path, 1, payload_cache_bytes=0, generation_files=int(beside)) as c:
        bodies = await c.fill(1, 6, 40 * KIB)
        await c.nodes[1].compact()
        for path in (tmp_path / "node-1" / "payloads").rglob("bodies" if beside else "data.mdb"):
            damage(path, bodies[2][:30], optional=True)
        assert [body for _, body in await c.read(1, 0, 2)] == bodies[:2]
        with pytest.raises(LogyardError):
            await c.read(1, 2, 1)


def damage(path: Path, needle: bytes, optional: bool = False) -> None:
    """Flip bits of every place that holds `needle`."""
    with path.open("r+b") as file:
        data = file.read()
        at = data.find(needle)
        assert at >= 0 or optional, "nothing to damage"
        while at >= 0:
            file.seek(at + 5)
            file.write(bytes([data[at + 5] ^ 0x40]))
            at = data.find(needle, at + 1)


@pytest.mark.parametrize("late", [False, True], ids=["before it is written", "behind it"])
@pytest.mark.parametrize("how", ["stopped", "deleted"])
async def test_pitfall_53_a_group_goes_while_its_segment_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, late: bool
) -> None:
    async with cluster(tmp_path, 1, payload_cache_bytes=0) as c:
        await c.create("other", [1])
        await c.leader("other")
        await c.fill(1, 5, 40 * KIB)
        others = await c.fill(1, 5, 40 * KIB, "other")
        system, gone = c.system(1), c.member(1)
        write = system.storage.segments.write

        async def go() -> None:
            if how == "deleted":
                await c.nodes[1].delete_group("log")
            else:
                system.replicas.retire.stop(gone, "a test stops it")

        async def written(sealed: Sealed) -> Flushed:
            if not late:
                await go()
            found = await write(sealed)
            if late:
                await go()
            return found

        monkeypatch.setattr(system.storage.segments, "write", written)
        await c.roll(1)
        monkeypatch.undo()
        others += await c.fill(1, 5, 40 * KIB, "other", tag=b"s")
        await c.nodes[1].compact()
        assert [body for _, body in await c.read(1, name="other")] == others
        before = payload_books(c.system(1))
        await c.restart(1)
        await c.leader("other")
        member = c.member(1, "other")
        await until(lambda: member.raft.applied == member.raft.log.last_index)
        assert [body for _, body in await c.read(1, name="other")] == others
        if how == "deleted":
            assert payload_books(c.system(1)) == before
            # With their heads, and without a single payload of the other group.
            assert c.replica(1) is None
            assert 0 <= sum(before["generations"].values()) - sum(map(len, others)) < 40 * KIB


async def test_a_file_stays_until_all_is_dead_whatever_died_inside_its_entries_before(tmp_path: Path) -> None:
    """A truncation past entries of which a refused frame in the middle was dead already took each of them twice out of
    its file: it counted as empty, and went with the records that were left."""
    async with cluster(tmp_path, 1, payload_cache_bytes=0, migrate_dead_ratio=0.5) as c:
        system, member = c.system(1), c.member(1)
        for _ in range(10):
            frames = [
                b"".join(encode_frame([(b"", bytes(2000))], command=APPEND, session=session, sequence=session))
                for session in (0, 1234, 0)
            ]
            answers: list[PendingReply[bytes]] = [PendingReply() for _ in frames]
            system.ready_loop.hold()
            for frame, answer in zip(frames, answers, strict=True):
                system.replicas.commands.submit(member.uid, memoryview(frame), answer, 1)
            system.ready_loop.release()
            with pytest.raises(SessionExpired):
                await answers[1].wait(trio.Event)
        assert c.log(1).end == 20
        await c.roll(1)
        await c.nodes[1].truncate("log", 16)
        (file,) = system.storage.location.files.values()
        assert 5 * file.live == file.total, "of ten entries two live"
        await c.nodes[1].compact()
        assert len(await c.read(1, 16)) == 4
