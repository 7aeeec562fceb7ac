"""A segment is switched to in steps (docs/decisions/0049): whatever happens to its groups in between, and to the node,
logs, books and directory are as after a switch in one step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from logyard.engine.log import checkpoints, segment_writer
from logyard.protocol.errors import Busy, Corrupt, LogyardError
from logyard.service.check.run import check_directory
from tests.notes import NAME

from .cluster import KIB, Cluster, cluster, payload_books, until
from .rings import note, noted, notes, said
from .test_rings import filled


class Gate:
    """Holds a segment writer up, once, at the nth of its steps and commits."""

    def __init__(self, c: Cluster, monkeypatch: pytest.MonkeyPatch, at: int = 1, then: Exception | None = None) -> None:
        self.reached, self.go = trio.Event(), trio.Event()
        self._at, self._then, self._count = at, then, 0
        storage = c.system(1).storage
        storage.segment_writer.groups_per_step = 1
        commit = storage.meta_batch.commit_members

        async def commits(members: Any, sealed_files: Any = (), gone_files: Any = ()) -> None:
            if not gone_files:
                await self._wait()
            await commit(members, sealed_files, gone_files)

        fake = SimpleNamespace(lowlevel=SimpleNamespace(checkpoint=self._wait))
        monkeypatch.setattr(segment_writer, "trio", fake)
        monkeypatch.setattr(storage.meta_batch, "commit_members", commits)

    async def _wait(self) -> None:
        self._count += 1
        if self._count == self._at:
            self.reached.set()
            await self.go.wait()
            if self._then is not None:
                raise self._then


async def rolled(c: Cluster) -> None:
    """Roll, whatever comes of it."""
    try:
        await c.roll(1)
    except LogyardError as error:
        assert isinstance(error, Busy), error


def sorted_by_uid(c: Cluster, *names: str) -> list[str]:
    """In the order in which they go by a segment."""
    return sorted(names, key=lambda name: c.member(1, name).uid)


def is_flushed(c: Cluster, name: str) -> bool:
    """Whether nothing of a log is in memory that a segment has."""
    member = c.member(1, name)
    return member.flushed == member.raft.log.last_index == member.raft.log.memory_first - 1


@pytest.mark.parametrize("how", ["goes on", "crash", "busy"])
@pytest.mark.parametrize("at", range(1, 7))
async def test_releases_snapshots_and_a_deletion_between_two_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, how: str
) -> None:
    names = ("a", "b", "c", "d")
    async with cluster(tmp_path, 1, group="", payload_cache_bytes=0) as c:
        bodies = {}
        for name in names:
            await c.create(name)
            bodies[name] = await c.fill(1, 6, KIB, name)
        gone = sorted_by_uid(c, *names)[at % 4]
        left = [name for name in names if name != gone]
        gate = Gate(c, monkeypatch, at, Busy("files", 0.01) if how == "busy" else None)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rolled, c)
            await gate.reached.wait()
            for name in left:
                await c.nodes[1].truncate(name, 3)
            await c.nodes[1].snapshot()
            await c.nodes[1].delete_group(gone)
            if how == "crash":
                await c.crash(1)
                nursery.cancel_scope.cancel()
            gate.go.set()
        monkeypatch.undo()
        if how == "crash":
            assert check_directory(tmp_path / "node-1")["ok"]
            await c.start(1)
        async with c.system(1).storage.janitor.lock:
            await c.system(1).storage.segment_writer.run()
        for name in left:
            await c.leader(name)
            assert [body for _, body in await c.read(1, 3, name=name)] == bodies[name][3:]
        books = payload_books(c.system(1))
        await c.restart(1)
        for name in left:
            await c.leader(name)
            await c.applied(name)
        assert payload_books(c.system(1)) == books, "exact"
        await c.nodes[1].compact()
        assert not c.system(1).storage.location.files
        for name in left:
            assert [body for _, body in await c.read(1, 3, name=name)] == bodies[name][3:]
        await c.nodes[1].snapshot()
        await c.nodes[1].compact()
        await c.nodes[1].compact()
        assert all(c.system(1).storage.segments.users.values()), "no segment is kept for nobody"
        await c.crash(1)
        assert check_directory(tmp_path / "node-1")["ok"]


async def test_what_a_ring_took_and_is_overwritten_between_two_steps_is_in_no_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with noted(tmp_path) as c:
        for name in ("a", "b"):
            await c.create(name, members=[1], by=1)
            await c.append(1, [(b"", b"x" * 100)], name)
        await filled(c, last=4)
        for name in ("a", "b"):
            await c.append(1, [(b"", b"y" * 100)], name)
        member = c.member(1, NAME)
        log = member.raft.log
        first = log.last_index + 1
        c.partition(1)
        for number in range(4):
            c.system(1).replicas.commands.queue_own(member, f"never {number}")
            await until(lambda number=number: log.stable == first + number)
        leader = await c.leader(NAME, [2, 3])
        gate = Gate(c, monkeypatch)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(c.roll, 1)
            await gate.reached.wait()
            await note(c, leader, b"other")
            c.network.heal()
            await c.applied(NAME)
            await until(lambda: log.stable == log.last_index)
            gate.go.set()
        monkeypatch.undo()
        assert member.flushed <= log.last_index
        assert all(log.term(at) == run.term for run in member.ring_runs for at in range(run.first, run.last + 1))
        # The row that the next flush stores is all that a start has.
        await c.roll(1)
        await c.crash(1)
        assert check_directory(tmp_path / "node-1")["ok"]
        await c.start(1)
        await c.applied(NAME)
        assert c.member(1, NAME).raft.log.last_index == c.member(leader, NAME).raft.log.last_index
        assert notes(c, 1) == [*said(1, 4), b"other"] and not c.system(1).repair.log_repair.mended


async def test_a_log_that_is_made_anew_between_two_steps_goes_by_what_it_got_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the WAL had of it was given up, and the new log has the same entries elsewhere."""
    async with cluster(tmp_path, 3, group="", payload_cache_bytes=0) as c:
        await until(lambda: all(len(one.system.live) == 3 for one in c.nodes.values()))
        for name in ("a", "b"):
            await c.create(name)
            await c.lead(2, name)
        low, high = sorted_by_uid(c, "a", "b")
        bodies = await c.fill(2, 5, KIB, high)
        await c.applied(high)
        await c.roll(1)
        old, storage = c.member(1, high), c.system(1).storage
        earlier = old.segments[-1].segment
        rows = storage.segments.reader(earlier).entries(old.uid, 1, old.raft.log.last_index)
        bodies += await c.fill(2, 5, KIB, high)
        await c.fill(2, 5, KIB, low)
        await c.applied(high)
        await c.applied(low)
        present, storage.segment_writer.groups_per_step = storage.accounting.present, 1

        def busy(number: int, found: Any) -> Any:
            if old.uid in found:
                raise Busy("the node's file descriptors", 0.05)
            return present(number, found)

        monkeypatch.setattr(storage.accounting, "present", busy)
        with pytest.raises(Busy):
            await c.roll(1)
        assert c.member(1, low).segments[-1].segment > earlier == old.segments[-1].segment, "half of it"
        path = storage.segments.path(earlier)
        with path.open("r+b") as file:
            file.seek(path.read_bytes().index(rows[3].data))
            file.write(b"\xff" * 16)
        with pytest.raises(Corrupt) as met:
            storage.segments.reader(earlier).entries(old.uid, rows[3].index, rows[3].index)
        c.system(1).repair.log_repair.found(old, met.value)
        await until(lambda: c.system(1).members[old.uid] is not old)
        await until(lambda: c.member(1, high).raft.mend is None)
        await c.applied(high)
        member = c.member(1, high)
        log = member.raft.log
        await until(lambda: log.stable == log.last_index)
        monkeypatch.undo()
        async with storage.janitor.lock:
            await storage.segment_writer.run()
        at, reader = 1, c.system(1).replicas.reader
        while at <= log.last_index:
            at = reader.log_entries(member, at, log.last_index, 1 << 20)[-1].index + 1
        assert [body for _, body in await c.read(1, 0, name=high)] == bodies
        await c.roll(1)
        books = payload_books(c.system(1))
        await c.restart(1)
        assert payload_books(c.system(1)) == books, "exact"


@pytest.mark.parametrize("step", [1000, 1])
async def test_a_segment_that_one_step_can_not_read_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    async with cluster(tmp_path, 1, group="", payload_cache_bytes=0) as c:
        bodies = {}
        for name in ("a", "b"):
            await c.create(name)
            bodies[name] = await c.fill(1, 5, KIB, name)
        high = sorted_by_uid(c, "a", "b")[1]
        # What is released of it has its rows read.
        await c.nodes[1].truncate(high, 2)
        storage, data = c.system(1).storage, c.member(1, high).raft.log.entries[4].data
        storage.segment_writer.groups_per_step = step
        write = storage.segments.write

        async def hurt(sealed: Any) -> Any:
            found = await write(sealed)
            monkeypatch.undo()
            path = storage.segments.path(sealed.file)
            with path.open("r+b") as file:
                file.seek(path.read_bytes().index(data))
                file.write(b"\xff" * 16)
            return found

        monkeypatch.setattr(storage.segments, "write", hurt)
        with pytest.raises(LogyardError):
            await c.roll(1)
        await c.roll(1)
        assert not storage.jobs.frozen and not storage.segment_writer.unflushed.backlog_files
        books = payload_books(c.system(1))
        await c.restart(1)
        for name in ("a", "b"):
            await c.applied(name)
            low = 2 if name == high else 0
            assert [body for _, body in await c.read(1, low, name=name)] == bodies[name][low:]
        assert payload_books(c.system(1)) == books
        await c.crash(1)
        assert check_directory(tmp_path / "node-1")["ok"]


async def test_who_goes_away_while_logs_let_go_leaves_none_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`compact` ends with the connection that asked for it."""
    async with cluster(tmp_path, 1, group="", payload_cache_bytes=0) as c:
        for name in ("a", "b"):
            await c.create(name)
            await c.fill(1, 5, KIB, name)
        c.system(1).storage.segment_writer.groups_per_step = 1
        lowlevel, passed = trio.lowlevel, False
        with trio.CancelScope() as scope:

            async def cancelled() -> None:
                nonlocal passed
                passed = True
                scope.cancel()
                await lowlevel.cancel_shielded_checkpoint()

            fake = SimpleNamespace(checkpoint=lowlevel.checkpoint, cancel_shielded_checkpoint=cancelled)
            monkeypatch.setattr(checkpoints, "trio", SimpleNamespace(lowlevel=fake))
            await c.nodes[1].compact()
        monkeypatch.undo()
        assert passed
        assert is_flushed(c, "a") and is_flushed(c, "b")
