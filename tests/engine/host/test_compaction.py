"""Compaction on a running node: what happens between a job's parts, and to the next job when one failed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio

from logyard.engine.log.location import SealedFile
from logyard.engine.log.meta_rows import file_key
from logyard.engine.log.space import Space
from logyard.engine.log.wal import Rolled, Sealed
from logyard.engine.replica.member import Member
from logyard.payloads.compaction import RewriteJob
from logyard.payloads.store import PayloadStore
from logyard.protocol.errors import Corrupt, LogyardError, NoSpace

from .cluster import KIB, Cluster, cluster, payload_flush, until
from .test_histories import check_books
from .test_repair import hurt_file, hurt_generations

SIZE = 20 * KIB


async def test_what_dies_while_a_migration_waits_for_its_turn_is_dead_in_the_copy(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, payload_cache_bytes=0) as c:
        bodies = await c.fill(1, 8, SIZE)
        await c.roll(1)
        system = c.system(1)
        turn: trio.Lock = system.store._job  # type: ignore[attr-defined]
        await turn.acquire()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(c.nodes[1].compact)
            await until(lambda: turn.statistics().tasks_waiting)
            await c.nodes[1].truncate("log", 3)
            turn.release()
        await check_books(c, 1, bodies[3:])


async def test_what_dies_while_leftovers_wait_for_their_turn_is_dead_in_the_copy(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, payload_cache_bytes=0, hibernate_move_bytes=1 << 20) as c:
        bodies = await c.fill(1, 8, SIZE)
        system, member = c.system(1), c.member(1)
        await system.storage.janitor.lock.acquire()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(payload_flush(system, 1 << 20).run, [member])
            await until(lambda: system.storage.janitor.lock.statistics().tasks_waiting)
            await c.nodes[1].truncate("log", 3)
            system.storage.janitor.lock.release()
        await check_books(c, 1, bodies[3:])


def refuse_flushed(c: Cluster, number: int) -> dict[str, Any]:
    """The commits that say a WAL file has a segment find no room, until told otherwise."""
    meta = c.system(number).storage.meta_batch.meta
    plain = meta.commit
    state = {"failing": True, "refused": 0, "passed": 0}

    def commit(puts: Any, thrice: Any = ()) -> None:
        if state["failing"] and any(key == file_key("flushed", 0) for key, _ in puts):
            state["refused"] += 1
            raise NoSpace("no room for this row")
        state["passed"] += 1
        plain(puts, thrice)

    # Its instances have slots; the books hold the only reference that commits go through.
    c.system(number).storage.meta_batch.meta = _Instead(meta, commit)  # type: ignore[assignment]
    return state


class _Instead:
    def __init__(self, meta: Any, commit: Any) -> None:
        self._meta = meta
        self.commit = commit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._meta, name)


@pytest.mark.parametrize("dead", [True, False])
async def test_a_file_without_a_segment_in_the_books_is_never_given_away(tmp_path: Path, dead: bool) -> None:
    limits = {"migrate_dead_ratio": 0.5} if dead else {"migrate_budget_bytes": 0}
    async with cluster(tmp_path, 1, payload_cache_bytes=0, **limits) as c:
        bodies = await c.fill(1, 6, SIZE)
        await c.nodes[1].truncate("log", 6 if dead else 3)
        await c.append(1, [(b"only metadata", None)])
        system = c.system(1)
        storage = system.storage
        state = refuse_flushed(c, 1)
        file = system.wal.current
        sealed = await system.storage.group_commit.exclusive(system.wal.roll)
        assert sealed is not None
        storage.segment_writer.unflushed.add([sealed])
        for _ in range(2):
            before = state["refused"]
            storage.janitor.look()
            await until(lambda before=before: state["refused"] >= before + 1)
            async with storage.janitor.lock:
                pass
        assert file in dict(system.wal.files), "its metadata is nowhere else"
        await c.restart(1)
        await c.leader()
        await c.applied()
        assert c.log(1).end == 7
        found = await c.read(1, c.log(1).start)
        assert [body for _, body in found] == ([None] if dead else [*bodies[3:], None])
        await until(lambda: storage is not c.system(1).storage)
        c.system(1).storage.janitor.look()
        await c.nodes[1].compact()
        assert [body for _, body in await c.read(1, c.log(1).start)] == ([None] if dead else [*bodies[3:], None])


async def test_a_damaged_row_holds_up_no_other_generation(tmp_path: Path) -> None:
    """Rewriting what can't be read whole is not tried again and again, and dead generations go all the same."""
    async with cluster(tmp_path, 1, payload_cache_bytes=0, rewrite_live_ratio=0.0) as c:
        bodies = []
        for _ in range(3):
            bodies += await c.fill(1, 10, SIZE)
            await c.nodes[1].compact()
        await c.nodes[1].snapshot()
        await c.crash(1)
        # Of the first generation nothing will live, of the second a part.
        assert hurt_generations(c, 1, bodies[15:16]) == 1
        await c.start(1)
        await c.leader()
        await c.nodes[1].truncate("log", 13)
        system = c.system(1)

        async def collected() -> dict[int, int]:
            async with system.storage.janitor.lock:
                with suppress(LogyardError):
                    await system.storage.compactor.collect(1.0, paced=False)
            return {one.id: one.total for one in system.store.generations()}

        dead = [one.id for one in system.store.generations() if not one.live and one.sealed]
        assert dead
        written = await collected()
        assert not written.keys() & set(dead), "what is dead goes"
        assert await collected() == written, "and nothing is copied again each time"
        assert [body for _, body in await c.read(1, 16)] == bodies[16:]


async def test_one_generation_is_rewritten_at_a_time_and_only_with_room_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path, 1, payload_cache_bytes=0, rewrite_live_ratio=0.0) as c:
        await c.create("other")
        bodies = []
        for _ in range(3):
            bodies += await c.fill(1, 5, SIZE)
            await c.fill(1, 5, SIZE, name="other")
            await c.nodes[1].compact()
        await c.nodes[1].truncate("other", 15)
        system = c.system(1)

        def ids() -> list[int]:
            return [one.id for one in system.store.generations()]

        sparse = [one.id for one in system.store.generations() if 0 < one.live < one.total and one.sealed]
        assert len(sparse) == 3
        with monkeypatch.context() as tight:
            asked: list[int] = []

            def full(_: Space, size: int) -> bool:
                asked.append(size)
                return False

            tight.setattr(Space, "may_copy", full)
            with pytest.raises(NoSpace, match="no room for copies"):
                await c.nodes[1].compact()
            assert sum(size > 5 * SIZE for size in asked) >= 3 and set(sparse) <= set(ids())
        begun: list[tuple[int, list[int]]] = []
        rewrite_job = PayloadStore.rewrite_job

        def begin(store: PayloadStore, generation: int, number: int = 0) -> RewriteJob:
            begun.append((generation, ids()))
            return rewrite_job(store, generation, number)

        monkeypatch.setattr(PayloadStore, "rewrite_job", begin)
        await c.nodes[1].compact()
        assert [generation for generation, _ in begun] == sparse
        for number, (_, there) in enumerate(begun):
            assert not set(sparse[:number]) & set(there), "what was rewritten goes before the next is"
        assert [body for _, body in await c.read(1)] == bodies
        await c.restart(1)
        await c.leader()
        assert [body for _, body in await c.read(1)] == bodies


async def test_a_damaged_file_holds_up_no_other_file(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, payload_cache_bytes=0) as c:
        bodies = []
        for _ in range(3):
            bodies += await c.fill(1, 5, SIZE)
            await c.roll(1)
        storage = c.system(1).storage
        first, *others = sorted(storage.location.files)
        assert hurt_file(c, 1, bodies[2:3]) == 1
        with pytest.raises(Corrupt):
            await c.nodes[1].compact()
        assert first in storage.location.files and not storage.location.files.keys() & set(others)
        assert [body for _, body in await c.read(1, 3)] == bodies[3:]


async def test_law_4_a_file_whose_removal_could_not_be_stored_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path, 1, payload_cache_bytes=0) as c:
        bodies = await c.fill(1, 5, 40 * KIB)
        await c.roll(1)
        storage = c.system(1).storage
        (file,) = storage.location.files.values()
        commit = storage.meta_batch.commit_members

        async def full(*arguments: Any, gone_files: Sequence[int] = (), **named: Any) -> None:
            if gone_files:
                raise NoSpace("the disk of the meta store is full")
            await commit(*arguments, **named)

        monkeypatch.setattr(storage.meta_batch, "commit_members", full)
        async with storage.janitor.lock:
            with pytest.raises(NoSpace):
                await storage.compactor.migrate(file)
        monkeypatch.undo()
        assert [body for _, body in await c.read(1)] == bodies
        await c.nodes[1].compact()
        assert file.file not in [number for number, _ in c.system(1).wal.files]
        assert [body for _, body in await c.read(1)] == bodies
        await c.restart(1)
        await c.leader()
        assert [body for _, body in await c.read(1)] == bodies


async def test_law_3_files_are_sealed_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(tmp_path, 1) as c:
        await c.append(1, [(b"", b"x")])
        storage, group_commit = c.system(1).storage, c.system(1).storage.group_commit
        order: list[int] = []
        first, freed = c.system(1).wal.current, group_commit._freed

        def full_at_once() -> None:
            # What queued up behind the roll is written in place, and fills the next file.
            monkeypatch.setattr(group_commit, "_freed", freed)
            c.system(1).storage.group_commit.rolled(Rolled([Sealed(first + 1, first + 1, 0, [])]))
            freed()

        async def seal(sealed: Sealed) -> tuple[SealedFile, set[Member]]:
            order.append(sealed.file)
            file = SealedFile(sealed.file, sealed.length)
            file.keep()
            return file, set()

        monkeypatch.setattr(group_commit, "_freed", full_at_once)
        monkeypatch.setattr(storage.segment_writer, "_flush", seal)
        await c.roll(1)
        # The later file's row says that all up to it are flushed.
        assert order == [first, first + 1]
