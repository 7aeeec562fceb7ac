"""Snapshots and their transfers: what is installed is whole, and a crash at any point leaves one truth (invariants 3,
5, 7)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from logyard.engine.entry import Entry
from logyard.engine.host.outbound import Outbound
from logyard.engine.raft.core import LEADER
from logyard.engine.replica.member import Member
from logyard.engine.snapshot import format as snapshot_format
from logyard.engine.transfer.pull import _rows
from logyard.engine.transport.blobs import SNAPSHOT_PIECE
from logyard.protocol.errors import Corrupt, Gone, LogyardError

from .cluster import KIB, Cluster, Replies, cluster, frame, payload_books, raft_of, until
from .test_histories import counted
from .test_mending import SIZE, stable


async def compacted(c: Cluster, number: int, truncate: int = 0) -> None:
    """The log of a node below its snapshot is gone, its payloads are in generations."""
    if truncate:
        await c.nodes[number].truncate("log", truncate)
    await c.nodes[number].snapshot()
    await c.nodes[number].compact()
    member = c.member(number)
    await until(lambda: member.raft.log.snapshot_index == member.snapshot_index > 0)


def count_pieces(c: Cluster, number: int) -> list[int]:
    """The indexes of every entry that a node sends with snapshots from now on."""
    sent: list[int] = []
    peers = c.network.nodes[number]
    send_blob = peers.send_blob

    def counting(node: int, kind: int, request: int, header: Any, body: Any = (), **options: Any) -> bool:
        if kind == SNAPSHOT_PIECE:
            sent.extend(row[0] for row in header["entries"])
        return send_blob(node, kind, request, header, body, **options)

    peers.send_blob = counting  # type: ignore[method-assign]
    return sent


async def test_a_laggard_gets_a_snapshot_with_what_it_lacks_only_and_serves_it(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        await c.lead(1)
        early = await c.fill(1, 30, 40 * KIB)
        await c.applied()
        have = c.member(3).raft.applied
        for number in c.ids:
            await c.roll(number)
        await c.crash(3)
        late = await c.fill(1, 30, 40 * KIB)
        await compacted(c, 1, truncate=5)
        sent = count_pieces(c, 1)
        await c.start(3)
        await c.applied()
        assert c.member(3).snapshot_index == c.member(1).snapshot_index
        assert sent and min(sent) > have and len(sent) == len(set(sent))
        assert [body for _, body in await c.read(3, 5)] == [*early, *late][5:]
        await c.restart(3)
        await until(lambda: c.member(3).raft.applied == c.member(1).raft.applied)
        assert [body for _, body in await c.read(3, 5)] == [*early, *late][5:]
        books = payload_books(c.system(3))
        await c.restart(3)
        await until(lambda: c.member(3).raft.applied == c.member(1).raft.applied)
        assert payload_books(c.system(3)) == books


@pytest.mark.parametrize("stored", [True, False])
async def test_what_died_by_an_installed_snapshot_is_dead_after_a_restart(tmp_path: Path, stored: bool) -> None:
    """A start begins at the snapshot: nothing that is applied again says so. `stored`: the crash comes after the rows
    of the payload store, or before them."""
    async with cluster(tmp_path, payload_cache_bytes=0, rewrite_live_ratio=0.0) as c:
        await c.lead(1)
        bodies = await c.fill(1, 12, 40 * KIB)
        await c.applied()
        await c.nodes[3].compact()
        assert sum(payload_books(c.system(3))["generations"].values()) > 12 * 40 * KIB
        await c.crash(3)
        bodies += await c.fill(1, 10, 40 * KIB)
        await compacted(c, 1, truncate=8)
        await c.start(3)
        done = trio.Event()
        checkpoints = c.system(3).storage.checkpoints
        settle = checkpoints.settle_installed

        async def at_end() -> None:
            if stored:
                await settle()
            done.set()
            await trio.sleep_forever()

        checkpoints.settle_installed = at_end  # type: ignore[method-assign]
        with trio.fail_after(10):
            await done.wait()
        books = payload_books(c.system(3))["generations"]
        assert sum(books.values()) < 16 * 40 * KIB
        await c.crash(3)
        await c.start(3)
        await c.applied()
        assert payload_books(c.system(3))["generations"] == books
        assert [body for _, body in await c.read(3, 8)] == bodies[8:]
        await c.restart(3)
        await c.applied()
        assert payload_books(c.system(3))["generations"] == books


async def test_a_member_whose_payloads_are_only_in_open_files_serves_them_after_an_install(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        await c.lead(1)
        early = await c.fill(1, 8, 40 * KIB)
        await c.applied()
        await c.crash(3)
        late = await c.fill(1, 8, 40 * KIB)
        await compacted(c, 1)
        await c.start(3)
        await c.applied()
        assert c.member(3).snapshot_index
        assert [body for _, body in await c.read(3)] == [*early, *late]
        await c.roll(3)
        assert [body for _, body in await c.read(3)] == [*early, *late]
        await c.restart(3)
        await until(lambda: c.member(3).raft.applied == c.member(1).raft.applied)
        assert [body for _, body in await c.read(3)] == [*early, *late]


@pytest.mark.parametrize("again", [False, True])
async def test_a_crash_between_the_stored_snapshot_and_the_switch(tmp_path: Path, again: bool) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        await c.lead(1)
        early = await c.fill(1, 10, 40 * KIB)
        await c.applied()
        for number in c.ids:
            await c.roll(number)
        early += await c.fill(1, 3, 40 * KIB)
        await c.applied()
        await c.crash(3)
        late = await c.fill(1, 10, 40 * KIB)
        await compacted(c, 1)
        system = (await c.start(3)).system
        stored = trio.Event()
        store_installed = system.storage.checkpoints.store_installed

        async def stop_after(*arguments: Any) -> None:
            await store_installed(*arguments)
            stored.set()
            await trio.sleep_forever()

        system.storage.checkpoints.store_installed = stop_after  # type: ignore[assignment, method-assign]
        with trio.fail_after(10):
            await stored.wait()
        await c.crash(3)
        if again:
            # Crash in the recovery as well, right when everything is open.
            opened = c.build(3)
            await opened.open()
            opened.close()
        await c.start(3)
        snapshot = c.member(1).snapshot_index
        assert c.member(3).raft.applied >= snapshot == c.member(3).snapshot_index
        await c.append(1, [(b"", b"after")])
        await c.applied()
        wanted = [*early, *late, b"after"]
        for _ in range(2):
            assert c.member(3).state == "running", c.member(3).reason
            assert [body for _, body in await c.read(3)] == wanted
            await c.restart(3)
            await until(lambda: c.member(3).raft.applied == c.member(1).raft.applied)
        # The file that says where the log starts over goes, what it said stays.
        await c.fill(1, 1, 100)
        await c.applied()
        await c.nodes[3].compact()
        await c.restart(3)
        await until(lambda: c.member(3).raft.applied == c.member(1).raft.applied)
        assert [body for _, body in await c.read(3)][:-1] == wanted


async def test_an_install_without_later_entries_survives_the_recycling_of_its_mark(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await c.lead(1)
        await c.crash(3)
        bodies = await c.fill(1, 10, 40 * KIB)
        await compacted(c, 1)
        await c.start(3)
        await c.applied()
        assert c.member(3).snapshot_index
        await c.nodes[3].compact()
        more = await c.fill(1, 2, 100)
        await c.applied()
        await c.restart(3)
        assert c.member(3).raft.log.last_index == c.member(1).raft.log.last_index
        await c.applied()
        assert [body for _, body in await c.read(3)] == [*bodies, *more]


async def test_an_install_is_checkpointed_when_the_file_with_its_marks_is_sealed(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await c.lead(1)
        await c.crash(3)
        bodies = await c.fill(1, 10, 40 * KIB)
        await compacted(c, 1)
        checkpoints = (await c.start(3)).system.storage.checkpoints
        store_installed = checkpoints.store_installed

        async def after_a_roll(*arguments: Any) -> None:
            # The marks are then all that the next file has of this group.
            await c.roll(3)
            await store_installed(*arguments)

        checkpoints.store_installed = after_a_roll  # type: ignore[assignment, method-assign]
        await c.applied()
        member = c.member(3)
        await until(lambda: not member.unpersisted and not c.system(3).storage.group_commit.busy)
        c.partition(3)
        await c.nodes[3].compact()
        c.network.heal()
        more = await c.fill(1, 2, 100)
        await c.applied()
        last = c.member(3).raft.log.last_index
        await c.crash(3)
        system = c.build(3)
        await system.open()
        assert system.member("log").state == "running", system.member("log").reason
        assert system.member("log").raft.log.last_index == last, "acknowledged entries"
        system.close()
        await c.start(3)
        await c.applied()
        assert [body for _, body in await c.read(3)] == [*bodies, *more]


async def test_what_follows_an_install_over_a_longer_log_is_kept(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await c.lead(1)
        before = await c.fill(1, 3, 100)
        await c.applied()
        c.partition(1)
        member = c.member(1)
        async with trio.open_nursery() as nursery:

            async def doomed() -> None:
                with pytest.raises(LogyardError):
                    await c.append(1, [(b"doomed", b"d" * 100)])

            for _ in range(8):
                last = member.raft.log.last_index
                nursery.start_soon(doomed)
                await until(lambda last=last: member.raft.log.last_index > last or member.raft.role != LEADER)
            await until(lambda: member.raft.log.stable == member.raft.log.last_index)
            new = await c.leader(among=[2, 3])
            after = await c.fill(new, 2, 100)
            for number in (2, 3):
                await compacted(c, number)
            assert c.member(new).snapshot_index < member.raft.log.last_index, "the snapshot lies inside of the old log"
            c.network.heal()
            await c.applied()
        after += await c.fill(await c.leader(), 3, 100)
        await c.applied()
        last = member.raft.log.last_index
        await c.crash(1)
        system = c.build(1)
        await system.open()
        raft = system.member("log").raft
        assert (raft.log.snapshot_index, raft.log.last_index) == (c.member(new).snapshot_index, last)
        system.close()
        await c.start(1)
        await c.applied()
        assert [body for _, body in await c.read(1)] == [*before, *after]


async def test_an_older_snapshot_never_overwrites_a_newer_one(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1) as c:
        await c.fill(1, 5, 100)
        system, member = c.system(1), c.member(1)
        old = system.transfers.snapshots._capture(member)
        await c.fill(1, 5, 100)
        new = system.transfers.snapshots._capture(member)
        # Both want the meta store while it is taken; the newer one gets it first.
        async with trio.open_nursery() as nursery, system.storage.meta_batch._lock:
            nursery.start_soon(system.storage.checkpoints.store_snapshots, [new])
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(system.storage.checkpoints.store_snapshots, [old])
            await trio.testing.wait_all_tasks_blocked()
        found = snapshot_format.decode(system.storage.meta_batch.snapshot(member.uid).data, member.uid)
        assert found.index == new[1].index == member.snapshot_index
        await c.restart(1)
        await c.leader()
        assert c.member(1).snapshot_index == new[1].index and c.log(1).end == 10


async def test_a_new_member_catches_up_by_snapshot_and_counts(tmp_path: Path) -> None:
    async with cluster(tmp_path, 4, group="") as c:
        await until(lambda: all(len(c.system(number).live) == 4 for number in c.ids))
        await c.create("log", [1, 2, 3])
        leader = await c.leader()
        bodies = await c.fill(leader, 20, 40 * KIB)
        await compacted(c, leader, truncate=3)
        found = await c.nodes[leader].change_members("log", "add", 4)
        assert found["voters"] == [1, 2, 3, 4]
        await until(lambda: c.system(4).names.get("log") in c.system(4).members)
        await c.applied()
        assert [body for _, body in await c.read(4, 3)] == bodies[3:]
        assert c.member(4).raft.configuration.voters == (1, 2, 3, 4) and c.member(4).raft.voter
        await c.restart(4)
        await until(lambda: c.member(4).raft.applied == c.member(leader).raft.applied)
        assert c.member(4).raft.configuration.voters == (1, 2, 3, 4)
        await c.lead(4)
        await c.append(4, [(b"", b"new leader")])


@pytest.mark.long
async def test_appends_go_on_while_a_snapshot_is_received(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0, snapshot_piece_bytes=64 * KIB) as c:
        await c.lead(1)
        await c.crash(3)
        await c.fill(1, 40, 40 * KIB)
        await compacted(c, 1)
        await c.start(3)
        while c.member(3).raft.applied < c.member(1).snapshot_index:
            await c.fill(1, 1, 40 * KIB)
            if c.log(1).end % 10 == 0:
                await compacted(c, 1)
        await c.applied()
        assert await c.read(3) == await c.read(1)


async def test_the_books_are_exact_after_an_install_over_half_dead_files(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        await c.lead(1)
        bodies = await c.fill(1, 12, 10 * KIB)
        await c.nodes[1].truncate("log", 4)
        await c.applied()
        await c.roll(3)
        await c.restart(3)
        await c.applied()
        # Cut off, not restarted: half of the file is dead already when the snapshot says that more of it is.
        c.partition(3)
        await until(lambda: c.system(1).live == {1, 2})
        leader = await c.leader(among=[1, 2])
        await c.nodes[leader].truncate("log", 8)
        bodies += await c.fill(leader, 3, 10 * KIB)
        await compacted(c, leader)
        before = c.member(3).liveness.released_before
        assert before.index
        c.network.heal()
        await c.applied()
        assert c.member(3).snapshot_index and c.member(3).liveness.released_before > before
        assert payload_books(c.system(3))["wal"] == counted(c, 3)
        assert [body for _, body in await c.read(3, 8)] == bodies[8:]


async def test_the_books_are_exact_after_an_install_that_was_not_needed(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        await c.lead(1)
        await c.fill(1, 12, 10 * KIB)
        await c.nodes[1].truncate("log", 4)
        await c.applied()
        await c.roll(3)
        # Stored but not applied: what the snapshot brings anew has its home in a sealed file until then.
        member, applier = c.member(3), c.system(3).replicas.applier
        apply = applier.apply
        applier.apply = lambda member: None  # type: ignore[method-assign]
        await c.fill(1, 6, 10 * KIB)
        await c.nodes[1].truncate("log", 8)
        await until(lambda: member.raft.log.stable == c.member(1).raft.log.last_index)
        await c.roll(3)
        index = member.raft.applied
        captured = c.system(1).transfers.snapshots._capture(c.member(1))
        await c.system(1).storage.checkpoints.store_snapshots([captured])
        # The transfer itself, as the leader starts it for a member that is behind.
        await c.system(1).transfers.snapshot_sender._send(c.member(1), 3)
        applier.apply = apply  # type: ignore[method-assign]
        c.system(3).ready_loop.mark(member)
        await c.applied()
        assert index < captured[1].index
        assert payload_books(c.system(3))["wal"] == counted(c, 3)
        await c.nodes[1].truncate("log", 10)
        await c.applied()
        assert payload_books(c.system(3))["wal"] == counted(c, 3)
        assert len(await c.read(3, 10)) == 8


async def test_a_half_released_entry_reaches_a_laggard(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        await c.lead(1)
        await c.crash(3)
        records = [(b"%d" % at, bytes([65 + at]) * 20 * KIB) for at in range(6)]
        await c.append(1, records)
        await c.append(1, [(b"", b"end")])
        # The released bodies of the entry do not move along; they are gone for good.
        await c.nodes[1].truncate("log", 3)
        await c.nodes[1].compact()
        await c.start(3)
        await c.applied()
        assert await c.read(3, 3) == [*records[3:], (b"", b"end")]
        await c.nodes[3].compact()
        assert await c.read(3, 3) == [*records[3:], (b"", b"end")]


async def test_a_machine_that_cannot_take_or_install_a_snapshot_stops_alone(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await c.create("other")
        await c.lead(1)
        await c.crash(3)
        await c.fill(1, 10, 100)
        await compacted(c, 1)
        await c.start(3)

        def broken(_: object) -> None:
            raise KeyError("no such section")

        class Poisoned:
            def __init__(self, machine: Any) -> None:
                self.machine = machine

            def __getattr__(self, name: str) -> Any:
                return broken if name == "restore" else getattr(self.machine, name)

        c.member(3).machine = Poisoned(c.member(3).machine)
        await until(lambda: c.member(3).state == "stopped")
        assert "KeyError" in c.nodes[3].describe("log")["reason"]
        leader = await c.leader("other")
        await c.append(leader, [(b"", b"goes on")], "other")
        await c.applied("other")


async def test_bytes_of_a_piece_that_do_not_add_up_are_refused(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1) as c:
        await c.append(1, [(b"", b"L" * 5000), (b"", b"s")])
        entry = c.member(1).raft.log.entry(c.member(1).raft.applied)
        assert entry is not None and entry.bodies is not None
        body = b"".join(entry.bodies)
        uid, index, term = c.member(1).uid, entry.index, entry.term
        (row,) = _rows(uid, [[index, term, entry.data, [0, 1]]], memoryview(body))
        assert row.read(0, 4) == body[:4] and row.read(len(body) - 4, 4) == body[-4:]
        for bad in (
            ([[index, term, entry.data, [0, 1]]], body[:-1]),
            ([[index + 1, term, entry.data, [0, 1]]], body),
            ([[index, term, entry.data[:20], [0]]], body),
            ([[index, term, entry.data, [0, 7]]], body),
        ):
            with pytest.raises(Corrupt):
                _rows(uid, bad[0], memoryview(bad[1]))


async def test_a_snapshot_that_has_to_take_the_logs_place_does_so_before_the_wal_file_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        await c.lead(1)
        bodies = await c.fill(1, 3, SIZE)
        await stable(c, 3)
        await c.crash(3)
        bodies += await c.fill(1, 4, SIZE)
        await c.applied()
        missing = c.member(1).raft.log.last_index - 2
        whole = Outbound._with_bodies

        async def gone(self: Outbound, member: Member, entry: Entry) -> Entry:
            # As where a released part of an entry is not stored any more.
            if entry.index == missing:
                raise Gone("a part of it was released")
            return await whole(self, member, entry)

        monkeypatch.setattr(Outbound, "_with_bodies", gone)
        assert not c.member(1).flushed
        await c.start(3)
        await c.applied()
        assert [body for _, body in await c.read(3)] == bodies


async def test_law_3_entries_behind_marks_that_a_restart_wrote_survive_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path) as c:
        # Another group's payloads keep the files, and with them the old segments and rows, as they are.
        await c.create("other", [3], by=3)
        await _old_tail(c, 30)
        snapshots, raft = c.system(3).transfers.snapshot_receiver, raft_of(c.member(3))
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
        monkeypatch.setattr(c.system(3).host.inbound, "on_messages", lambda *_: None)
        monkeypatch.setattr(c.system(3).transfers.snapshot_receiver, "_install", lambda *_: stored.set())
        term = c.member(3).raft.term
        c.network.heal()
        await stored.wait()
        c.partition(3)
        assert c.member(3).raft.term == term < c.member(1).raft.term
        await c.restart(3)
        member = c.member(3)
        assert member.state == "running", member.reason
        await until(lambda: raft_of(member).safe)
        assert member.raft.log.last_term <= member.raft.term and member.raft.vote == 0
        c.network.heal()
        await c.append(await c.leader(among=[1, 2]), [(b"", b"goes on")])
        await c.applied()
        await c.restart(3)
        await c.applied()
        assert (await c.read(3))[-1] == (b"", b"goes on")


async def _tail(c: Cluster, count: int) -> bool:
    """Cut node 3 off, and have it write `count` entries, which never commit; False if it leads no more before that."""
    c.partition(3)
    member, nobody = c.member(3), Replies()
    raft = raft_of(member)
    end = raft.log.last_index + count
    while raft.role == LEADER and raft.log.last_index < end:
        index = raft.log.last_index
        c.system(3).replicas.commands.submit(member.uid, frame(), nobody, 1)
        await until(lambda: raft.role != LEADER or raft.log.last_index > index)  # noqa: B023
    await until(lambda: raft.log.stable == raft.log.last_index)
    return raft.log.stable >= end


async def _old_tail(c: Cluster, count: int) -> None:
    """Node 3 led, was cut off, and has `count` entries in a segment that never commit; the others have a snapshot."""
    await c.fill(3, 2, 10 * KIB, "other")
    await c.lead(3)
    await c.applied()
    while not await _tail(c, count):
        c.network.heal()
        await c.lead(3)
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
        assert 0 < raft.log.snapshot_index < c.member(3).flushed
