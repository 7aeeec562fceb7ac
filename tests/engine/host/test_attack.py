"""Attempts to break the laws from outside: each test is named after the law it attacks."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

from logyard.engine.disk.faulty import FaultyDisk
from logyard.engine.log.meta import MetaStore
from logyard.engine.log.wal import Rolled, Sealed, WalItem
from logyard.machines.log.command import APPEND, truncate_command
from logyard.payloads.reference import Position
from logyard.protocol.errors import BadRequest, LogyardError, NoSpace, WalFailed
from logyard.protocol.frame import encode_frame

from .cluster import KIB, MIB, Cluster, cluster, until


class Replies:
    """Counts the answers of frames that nobody waits for."""

    def __init__(self) -> None:
        self.found: list[tuple[int, int]] = []

    def reply(self, request: int, status: int, data: bytes) -> None:
        self.found.append((request, status))


def frame(body: bytes = b"x", command: bytes = APPEND) -> memoryview:
    return memoryview(b"".join(encode_frame([(b"", body)], command=command)))


async def test_law_2_a_wal_that_fails_while_rolling_ends_the_node(tmp_path: Path) -> None:
    disk = FaultyDisk()
    async with cluster(tmp_path, 1, disks={1: disk}) as c:
        await c.append(1, [(b"", b"x")])
        await until(lambda: c.system(1).group_commit.sealed and not c.system(1).group_commit.busy)
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
        system.commands.submit(c.member(1).uid, frame(bytes(100 * KIB)), replies, 1)
        await until(lambda: 1 in c.failures, "the node ends")
        assert replies.found == [(1, 1)]


async def test_law_4_what_dies_after_the_floors_were_stored_is_not_unlinked_with_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path, 1, payload_cache_bytes=0) as c:
        for _ in range(3):
            await c.fill(1, 5, 40 * KIB)
            await c.nodes[1].compact()
        await c.nodes[1].truncate("log", 5)
        storage = c.system(1).storage
        assert [(one.id, one.live > 0) for one in c.system(1).store.generations()] == [(1, False), (2, True), (3, True)]
        commit = storage.meta_batch.commit_members

        async def slow(*arguments: Any, **named: Any) -> None:
            await commit(*arguments, **named)
            await c.nodes[1].truncate("log", 10)

        monkeypatch.setattr(storage.meta_batch, "commit_members", slow)
        async with storage.janitor.lock:
            await storage.compactor.collect(0.0)
        monkeypatch.undo()
        release = c.member(1).last_release
        await c.crash(1)
        system = c.build(1)
        await system.open()
        try:
            left = [one.id for one in system.store.generations()]
            assert 1 not in left
            assert 2 in left or system.member("log").floor >= release, "bytes went without a floor"
        finally:
            system.close()


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
        storage, group_commit = c.system(1).storage, c.system(1).group_commit
        order: list[int] = []
        first, freed = c.system(1).wal.current, group_commit._freed

        def full_at_once() -> None:
            # What queued up behind the roll is written in place, and fills the next file.
            monkeypatch.setattr(group_commit, "_freed", freed)
            c.system(1).rolled(Rolled([Sealed(first + 1, first + 1, 0, [])]))
            freed()

        async def seal(sealed: Sealed) -> None:
            order.append(sealed.file)

        monkeypatch.setattr(group_commit, "_freed", full_at_once)
        monkeypatch.setattr(storage.segment_writer, "_flush", seal)
        await c.roll(1)
        # The later file's row says that all up to it are flushed.
        assert order == [first, first + 1]


async def test_law_3_entries_behind_marks_that_a_restart_wrote_survive_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path) as c:
        # Another group's payloads keep the files, and with them the old segments and rows, as they are.
        await c.create("other", [3], by=3)
        await _old_tail(c, 30)
        snapshots, raft = c.system(3).snapshot_receiver, c.member(3).raft
        take_in, stored = snapshots._take_in, trio.Event()

        async def late(*arguments: Any) -> None:
            # The term of the snapshot comes, and is durable, before it.
            await until(lambda: raft.term >= c.member(1).raft.term and raft.safe)
            await take_in(*arguments)

        # A crash comes after the snapshot is stored, before the log starts over.
        monkeypatch.setattr(snapshots, "_take_in", late)
        monkeypatch.setattr(snapshots, "_install", lambda *_: stored.set())
        c.network.heal()
        await stored.wait()
        c.partition(3)
        await c.restart(3)
        await c.leader("other", among=[3])
        snapshot = c.member(3).raft.log.snapshot_index
        assert snapshot and c.member(3).raft.log.last_index == snapshot
        await c.roll(3)
        c.network.heal()
        leader = await c.leader(among=[1, 2])
        for _ in range(3):
            await c.append(leader, [(b"", b"acknowledged")])
        await c.applied()
        log = c.member(3).raft.log
        await until(lambda: log.stable == log.last_index)
        stable = log.stable
        assert stable >= snapshot + 3
        await c.crash(3)
        system = c.build(3)
        await system.open()
        try:
            assert system.member("log").raft.log.last_index >= stable, "acknowledged entries are gone"
        finally:
            system.close()


async def test_invariant_7_a_snapshot_of_a_later_term_is_durable_before_that_term(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path) as c:
        await c.create("other", [3], by=3)
        await _old_tail(c, 30)
        # Node 3 hears of the new term by the snapshot alone, and dies before its log starts over.
        stored = trio.Event()
        monkeypatch.setattr(c.system(3).inbound, "on_messages", lambda *_: None)
        monkeypatch.setattr(c.system(3).snapshot_receiver, "_install", lambda *_: stored.set())
        term = c.member(3).raft.term
        c.network.heal()
        await stored.wait()
        c.partition(3)
        assert c.member(3).raft.term == term < c.member(1).raft.term
        await c.restart(3)
        member = c.member(3)
        assert member.state == "running", member.reason
        await until(lambda: member.raft.safe)
        assert member.raft.log.last_term <= member.raft.term and member.raft.vote == 0
        c.network.heal()
        await c.append(await c.leader(among=[1, 2]), [(b"", b"goes on")])
        await c.applied()
        await c.restart(3)
        await c.applied()
        assert (await c.read(3))[-1] == (b"", b"goes on")


async def _old_tail(c: Cluster, count: int) -> None:
    """Node 3 led, was cut off, and has `count` entries in a segment that never commit; the others have a snapshot."""
    await c.lead(3)
    await c.applied()
    await c.fill(3, 2, 10 * KIB, "other")
    c.partition(3)
    member, nobody = c.member(3), Replies()
    for _ in range(count):
        before = member.raft.log.last_index
        c.system(3).commands.submit(member.uid, frame(), nobody, 1)
        await until(lambda: member.raft.log.stable > before)  # noqa: B023
    await c.roll(3)
    await until(lambda: c.leads(1) or c.leads(2))
    leader = 1 if c.leads(1) else 2
    for _ in range(5):
        await c.append(leader, [(b"", b"committed")])
    await c.applied(among=[1, 2])
    for number in (1, 2):
        await c.roll(number)
        await c.nodes[number].snapshot()
        raft = c.member(number).raft
        assert 0 < raft.log.snapshot_index < member.flushed


async def test_law_4_a_client_can_not_release_what_is_not_written_yet(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1) as c:
        bodies = await c.fill(1, 5, 100)
        node, member = c.nodes[1], c.member(1)
        position = c.log(1).start_position
        for command in (truncate_command(1, Position(1 << 40, 0)), truncate_command(3, Position(position.index, 1))):
            with pytest.raises(BadRequest):
                node.submit(member.uid, frame(b"", command), Replies(), 1)
        # Nor can a server that looks a position up wrongly.
        with pytest.raises(LogyardError) as caught:
            await node.command(member, truncate_command(1, Position(1 << 40, 0)))
        assert caught.value.code == "bad_request"
        bodies += await c.fill(1, 2, 100)
        assert not member.is_dead(member.raft.log.entry(member.raft.log.last_index))  # type: ignore[arg-type]
        assert [body for _, body in await c.read(1)] == bodies


async def test_law_7_more_frames_than_an_entry_can_count_are_several_entries(tmp_path: Path) -> None:
    limits: dict[str, Any] = {"entry_bytes_max": 16 * MIB, "entry_records_max": 1 << 18, "wal_file_bytes": 64 * MIB}
    async with cluster(tmp_path, 1, **limits) as c:
        replies, one = Replies(), frame()
        for number in range(66_000):
            c.system(1).commands.submit(c.member(1).uid, one, replies, number)
        await until(lambda: len(replies.found) == 66_000 or 1 in c.failures, "replies")
        assert c.log(1).end == 66_000 and not any(status for _, status in replies.found)


async def test_law_4_a_floor_that_could_not_be_stored_is_stored_before_bytes_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path, 1, payload_cache_bytes=0) as c:
        await c.fill(1, 5, 40 * KIB)
        await c.roll(1)
        await c.nodes[1].truncate("log", 3)
        release = c.member(1).last_release
        storage = c.system(1).storage
        (file,) = storage.location.files.values()

        def full(self: object, puts: object) -> None:
            raise NoSpace("the disk of the meta store is full")

        monkeypatch.setattr(MetaStore, "commit", full)
        async with storage.janitor.lock:
            with pytest.raises(NoSpace):
                await storage.compactor.migrate(file)
        monkeypatch.undo()
        async with storage.janitor.lock:
            await storage.compactor.migrate(file)
        await c.crash(1)
        system = c.build(1)
        await system.open()
        try:
            assert file.file not in [number for number, _ in system.wal.files]
            assert system.member("log").floor >= release, "bytes went without a floor"
        finally:
            system.close()


async def test_law_4_a_home_is_not_forgotten_for_good_without_a_floor(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, payload_cache_bytes=0) as c:
        await c.fill(1, 5, 40 * KIB)
        index = c.member(1).raft.applied
        await c.nodes[1].compact()
        assert c.system(1).store.home(c.member(1).uid, index) is not None
        await c.create("other", [1])
        await c.roll(1)
        await c.nodes[1].truncate("log", 5)
        release = c.member(1).last_release
        # A snapshot of another group, say, brings the store's rows along.
        await c.nodes[1].snapshot(["other"])
        await c.crash(1)
        system = c.build(1)
        await system.open()
        try:
            member = system.member("log")
            assert member.raft.applied < release
            assert system.store.home(member.uid, index) is not None or not member.resolves
        finally:
            system.close()


async def test_law_4_a_snapshot_below_a_release_is_not_sent_without_its_payloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        await c.lead(1)
        await c.applied()
        await c.crash(3)
        first = c.member(1).raft.applied + 1
        await c.fill(1, 5, 40 * KIB)
        await c.applied()
        for number in (1, 2):
            await c.nodes[number].compact()
            await c.nodes[number].snapshot()
            await c.nodes[number].compact()
        assert c.member(1).raft.log.snapshot_index == c.member(1).snapshot_index
        await c.nodes[1].truncate("log", 5)
        release = c.member(1).last_release
        assert c.member(1).snapshot_index < release
        system = await c.start(3)
        installed: list[tuple[int, bool, int]] = []
        snapshots = system.system.snapshot_receiver
        install = snapshots._install

        def look(member: Any, snapshot: Any, size: int, have: int) -> None:
            home = system.system.store.home
            whole = all(home(member.uid, index) is not None for index in range(first, first + 5))
            installed.append((snapshot.index, whole, member.floor))
            install(member, snapshot, size, have)

        monkeypatch.setattr(snapshots, "_install", look)
        await c.applied()
        assert installed and all(index >= release or whole or floor >= release for index, whole, floor in installed)
