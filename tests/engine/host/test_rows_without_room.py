"""Commits of the meta store that find no room, and rows that come too late: what is in memory is then ahead of what is
stored, and no retry, no later commit and no restart may make a loss of that."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import trio

from logyard.engine.log import group_logs, meta_rows
from logyard.engine.log.meta import MetaStore
from logyard.engine.log.meta_rows import GroupRow, StateRow
from logyard.engine.snapshot.format import Encoded
from logyard.engine.transfer.chunks import Lease
from logyard.engine.transport.blobs import TAKE_BACK
from logyard.engine.types import Spec
from logyard.protocol.errors import Corrupt, NoSpace

from ...notes import NAME
from .cluster import Cluster, cluster, until
from .rings import note, noted, ring_path, said
from .test_mending import SIZE, history, hurt_rows, hurt_wal, mended, metadata, stable

DAMAGE = Corrupt("a segment", 0, "this", "that")


class Refusing:
    """Lets commits of one node's meta store, or of any, find no room while `left`, where `which` says so of a row."""

    def __init__(
        self, patch: pytest.MonkeyPatch, which: Callable[[bytes], bool], left: int, meta: MetaStore | None = None
    ) -> None:
        self.left = left
        commit = MetaStore.commit

        def refused(store: MetaStore, puts: Iterable[Any], thrice: Any = ()) -> None:
            puts = list(puts)
            if meta in (None, store) and self.left and any(which(key) for key, _ in puts):
                self.left -= 1
                raise NoSpace("no room for a row")
            commit(store, puts, thrice)

        patch.setattr(MetaStore, "commit", refused)


def meta_of(c: Cluster, number: int) -> MetaStore:
    meta: MetaStore = c.system(number).storage.meta_batch.meta
    return meta


def is_damaged(key: bytes) -> bool:
    return key.startswith(meta_rows.DAMAGED)


async def flushed(c: Cluster) -> None:
    """Node 3 has a log, all of it in a segment, that node 1 leads."""
    await c.lead(1)
    await c.fill(1, 6, SIZE)
    await stable(c, 3)
    await c.roll(3)


async def asleep(c: Cluster) -> int:
    """A group sleeps on node 3, with what there is to be read in it; returns its uid."""
    await c.lead(1)
    await c.fill(1, 3, SIZE)
    await c.applied()
    uid = c.member(3).uid
    await until(lambda: uid in c.system(3).quiescence.table, "it sleeps")
    return uid


async def made_anew(c: Cluster, number: int) -> Any:
    """Damage is met in a member, and another one stands for it when this returns."""
    old = c.member(number)
    c.system(number).repair.log_repair.found(old, DAMAGE)
    await until(lambda: c.replica(number) not in (None, old), "made anew")
    await mended(c, number)
    return old


async def as_it_was(c: Cluster, number: int) -> None:
    """A member has, after a restart without the others, what it had said."""
    member = c.member(number)
    term, last = member.raft.term, member.raft.log.stable
    c.partition(number)
    await c.restart(number)
    again = c.member(number)
    assert again.raft.term >= term and again.raft.log.last_index >= last


async def voted_and_written(c: Cluster, number: int) -> None:
    """Terms and entries that only the newest member of a group knows."""
    for leader in (2, 1, 2):
        await c.lead(leader)
    await c.fill(2, 4, SIZE)
    await stable(c, number)
    await c.roll(number)


async def test_what_the_wal_has_counts_while_no_row_says_that_it_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        await flushed(c)
        await c.fill(1, 6, SIZE)
        await stable(c, 3)
        member = c.member(3)
        last = member.raft.log.stable
        Refusing(monkeypatch, is_damaged, 2, meta_of(c, 3))
        c.system(3).repair.log_repair.found(member, DAMAGE)
        await until(lambda: "can't be mended" in member.reason, "there was no room for it")
        await c.roll(3)
        c.partition(3)
        await c.restart(3)
        again = c.member(3)
        assert again.raft.log.last_index >= last or again.raft.mend is not None


async def test_the_row_of_a_member_is_not_that_of_the_one_before_it(tmp_path: Path) -> None:
    """It had left a segment, whose removal stored its row once more."""
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        await c.create("other")
        for name in ("log", "other"):
            await c.lead(1, name)
            await c.fill(1, 6, SIZE, name)
            await stable(c, 3, name)
        await c.roll(3)
        for name in ("log", "other"):
            await c.fill(1, 2, SIZE, name)
            await stable(c, 3, name)
        await c.nodes[3].compact()
        storage = c.system(3).storage

        async def left() -> bool:
            await c.nodes[3].snapshot(["log"])
            return c.member(3) in storage.segments._unreferring

        while not await left():
            await trio.sleep(0.05)
        old = await made_anew(c, 3)
        await c.fill(1, 1, SIZE, "other")
        await voted_and_written(c, 3)
        await c.nodes[3].snapshot(["other"])
        await c.nodes[3].compact()
        assert old not in storage.segments._unreferring
        await storage.meta_batch.commit_members([old])
        key = meta_rows.state_key(old.uid)
        row = StateRow.unpack(key, storage.meta_batch.meta.get(key) or b"")
        assert (row.term, row.vote) == (c.member(3).raft.term, c.member(3).raft.vote)
        await as_it_was(c, 3)


async def test_a_snapshot_that_was_captured_of_the_member_before_is_not_stored(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        await flushed(c)
        captured = c.system(3).transfers.snapshots._capture(c.member(3))
        await made_anew(c, 3)
        await voted_and_written(c, 3)
        await c.system(3).storage.checkpoints.store_snapshots([captured])
        await as_it_was(c, 3)


async def test_the_ring_of_who_came_back_is_not_the_one_that_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row that a replica went was stored with another commit, before it was tried again."""
    monkeypatch.setattr(group_logs, "RETRY_S", 0.7)
    async with noted(tmp_path, 3) as c:
        await c.lead(1, NAME)
        await note(c, 1, *said(1, 4))
        await c.applied(NAME)
        await c.roll(3)
        uid = c.member(3, NAME).uid
        departed = meta_rows.DEPARTED + meta_rows.KEY.pack(uid)
        refusing = Refusing(monkeypatch, lambda key: key == departed, 2, meta_of(c, 3))
        tried: list[float] = []
        insist = group_logs.GroupLogs._insist

        async def insisted(logs: group_logs.GroupLogs) -> None:
            await insist(logs)
            tried.append(trio.current_time())

        monkeypatch.setattr(group_logs.GroupLogs, "_insist", insisted)
        await c.nodes[1].change_members(NAME, "remove", 3)
        await until(lambda: not c.system(3).members and not refusing.left, "it went, and no row says so")
        await c.nodes[1].change_members(NAME, "add", 3)
        await c.applied(NAME)
        await note(c, 1, *said(5, 8))
        await c.applied(NAME)
        member = c.member(3, NAME)
        await until(lambda: member.raft.log.stable == member.raft.log.last_index, "all of it is durable")
        await c.roll(3)
        await until(lambda: bool(tried), "whoever let it go has done so")
        assert member.ring_runs and ring_path(c, 3, uid).exists()
        c.partition(3)
        await c.restart(3)
        assert c.member(3, NAME).raft.mend is None and not c.member(3, NAME).reason


async def test_a_large_deletion_holds_up_no_other_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law 9: what is large finds no room, what is small does, and gives room."""
    async with cluster(tmp_path, 1, payload_cache_bytes=0) as c:
        names = [f"g{number}" for number in range(150)]
        await c.nodes[1].create_groups([{"name": name, "members": [1], "machine": "log"} for name in names])
        await c.fill(1, 3, SIZE)
        await stable(c, 1)
        uids = [c.member(1, name).uid for name in names]
        sizes: list[int] = []
        commit = MetaStore.commit

        def small(store: MetaStore, puts: Any, thrice: Any = ()) -> None:
            sizes.append(len(puts))
            if len(puts) > 500:
                raise NoSpace("no room for so many rows")
            commit(store, puts, thrice)

        monkeypatch.setattr(MetaStore, "commit", small)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(c.system(1).host.groups.delete, uids)
            await until(lambda: max(sizes, default=0) > 500, "it was tried as a whole")
            await c.roll(1)
        assert all(meta_of(c, 1).get(meta_rows.group_key(uid)) is None for uid in uids)


async def test_payloads_of_who_went_are_dead_with_the_row_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit of somebody else's takes that row along."""
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        await c.lead(1)
        await c.fill(1, 6, SIZE)
        await c.applied()
        await stable(c, 3)
        await c.nodes[3].compact()
        system = c.system(3)
        uid, lock = c.member(3).uid, system.storage.meta_batch._lock
        assert system.store.homes(uid)
        await lock.acquire()
        system.spawn(system.storage.meta_batch.commit, tuple)
        await until(lambda: lock.statistics().tasks_waiting == 1, "one waits behind the one that is under way")
        await c.nodes[1].change_members("log", "remove", 3)
        await until(lambda: not system.members and lock.statistics().tasks_waiting == 2, "it goes")
        commits: list[set[bytes]] = []
        commit = MetaStore.commit

        def noted_commit(store: MetaStore, puts: Any, thrice: Any = ()) -> None:
            commits.append({key for key, _ in puts})
            commit(store, puts, thrice)

        monkeypatch.setattr(MetaStore, "commit", noted_commit)
        lock.release()
        departed = meta_rows.DEPARTED + meta_rows.KEY.pack(uid)
        await until(lambda: meta_of(c, 3).get(departed) is not None, "the row is stored")
        (keys,) = (keys for keys in commits if departed in keys)
        assert any(key.startswith(meta_rows.STORE) for key in keys)
        c.partition(3)
        await c.restart(3)
        assert not c.system(3).members and not c.system(3).store.homes(uid)


async def test_a_deletion_counts_that_came_while_the_definition_was_being_stored(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1) as c:
        system = c.system(1)
        lock = system.storage.meta_batch._lock
        await lock.acquire()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(system.host.groups._store, [Spec(77, "late", "log", {}, (1,), 1)])
            await until(lambda: lock.statistics().tasks_waiting == 1, "it is being stored")
            nursery.start_soon(system.host.groups.delete, [77])
            await until(lambda: lock.statistics().tasks_waiting == 2, "it is being deleted")
            lock.release()
        assert meta_of(c, 1).get(meta_rows.group_key(77)) is None
        assert meta_of(c, 1).get(meta_rows.DELETED + meta_rows.KEY.pack(77)) is not None


async def test_a_full_node_that_is_to_refuse_a_group_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(tmp_path) as c:
        refusing = Refusing(monkeypatch, lambda key: key.startswith(meta_rows.DEPARTED), 2, meta_of(c, 3))
        groups = c.system(3).host.groups
        groups.on_blob(1, TAKE_BACK, 0, {"uids": [12345]})
        await until(lambda: not refusing.left, "no room for it")
        groups.on_blob(1, TAKE_BACK, 0, {"uids": [12345]})
        await until(lambda: 12345 in c.system(3).host.replica_gc.departed, "it is refused when it is said again")
        assert 3 not in c.failures


async def test_a_log_that_a_lease_keeps_is_not_left(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0, hibernate_move_bytes=1 << 20) as c:
        await c.lead(1)
        await c.fill(1, 3, SIZE)
        await c.applied()
        await c.crash(3)
        await c.fill(1, 3, SIZE)
        await c.applied(among=[1, 2])
        await stable(c, 1)
        await c.roll(1)
        member, system = c.member(1), c.system(1)
        system.transfers.chunks.leases[member.uid, 3] = Lease(3, [], 0, math.inf)
        hibernation = system.quiescence.quiesce._hibernation
        await until(lambda: hibernation.may_sleep(member), "it may sleep")
        assert not await hibernation.prepare([member], 1)
        system.transfers.chunks.leases.clear()
        log, reader = member.raft.log, system.replicas.reader
        assert log.first_index <= log.last_index
        log.release_memory(member.flushed)
        assert (
            len(reader.log_entries(member, log.first_index, log.last_index, 1 << 20))
            == log.last_index + 1 - log.first_index
        )
        assert await hibernation.prepare([member], 1)


class Halves:
    """From the second of a commit's environments on, while `armed`, there is no room."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.armed = False
        self.count = 0
        apply = MetaStore._apply

        def short(store: MetaStore, environment: Any, changes: Any) -> None:
            self.count += 1
            if self.armed and self.count > 1:
                raise NoSpace("no room in this environment")
            apply(store, environment, changes)

        patch.setattr(MetaStore, "_apply", short)

    def arm(self) -> None:
        self.armed, self.count = True, 0


async def test_what_one_environment_has_and_can_not_give_back_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path, 1, group="") as c:
        halves = Halves(monkeypatch)
        spec = {"name": "a", "members": [1], "machine": "log"}
        halves.arm()
        await c.nodes[1].create_groups([spec])
        halves.armed = False
        await c.leader("a")
        await c.fill(1, 3, SIZE, "a")
        await stable(c, 1, "a")
        uid = c.member(1, "a").uid
        await c.restart(1)
        await c.leader("a")
        assert c.member(1, "a").uid == uid and len(await c.read(1, name="a")) == 3


async def test_a_snapshot_names_chunks_that_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(tmp_path, 1) as c:
        await c.fill(1, 3, SIZE)
        await stable(c, 1)
        member, batch, halves = c.member(1), c.system(1).storage.meta_batch, Halves(monkeypatch)
        snapshots = c.system(1).transfers.snapshots

        def captured(name: bytes) -> Any:
            one = snapshots._capture(member)
            return one._replace(
                encoded=Encoded(one.encoded.manifest, {name: memoryview(name)}, (name,), one.encoded.size)
            )

        one, two = b"a" * 16, b"b" * 16
        await batch.commit_snapshots([captured(one)])
        await c.append(1, [(b"", b"x")])
        await stable(c, 1)
        halves.arm()
        await batch.commit_snapshots([captured(two)])
        halves.armed = False
        assert member.chunks == (two,), "the other one's row went with this commit"
        assert [batch.meta.get(meta_rows.chunk_key(member.uid, name)) for name in (one, two)] == [None, two]


async def test_a_group_that_wakes_damaged_without_room_for_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path, hibernate_after_ms=60, hibernate_move_bytes=1 << 20) as c:
        uid = await asleep(c)
        meta, get = meta_of(c, 3), MetaStore.get
        state = meta_rows.state_key(uid)
        monkeypatch.setattr(
            MetaStore, "get", lambda store, key: b"nonsense" if (store, key) == (meta, state) else get(store, key)
        )
        Refusing(monkeypatch, is_damaged, 1, meta)
        member = c.system(3).quiescence.unquiesce.find(uid)
        assert member is not None and "no room" in member.reason and member.damaged
        assert c.system(3).quiescence.lookup.has(uid) and uid not in c.system(3).repair.log_repair.known


async def test_a_definition_that_is_told_again_while_there_is_no_room_is_asked_for_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        await history(c, False)
        uid = c.member(3).uid
        await c.crash(3)
        hurt_rows(c, 3, uid, GroupRow.PREFIX)
        c.partition(3)
        await c.start(3)
        assert uid in c.system(3).repair.log_repair.barred
        refusing = Refusing(monkeypatch, is_damaged, 1, meta_of(c, 3))
        c.network.heal()
        await until(lambda: not refusing.left, "it was told, and there was no room")
        await until(lambda: c.replica(3) is not None, "told again")
        await mended(c, 3)


async def test_a_start_without_room_gives_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(tmp_path) as c:
        await history(c, False)
        data = metadata(c, 3, c.member(3).raft.log.last_index - 1)
        await c.crash(3)
        hurt_wal(c, 3, data)
        c.partition(3)
        Refusing(monkeypatch, is_damaged, 1)
        with pytest.raises(NoSpace):
            await c.start(3)
        await c.start(3)
        assert c.member(3).raft.log.last_index >= 6


async def test_a_node_that_is_forgotten_stays_so(tmp_path: Path) -> None:
    """What is known of others is stored with any commit; so it was with the very one that forgets."""
    async with cluster(tmp_path, group="") as c:
        await until(lambda: all(len(one.system.live) == 3 for one in c.nodes.values()), "all live")
        await c.create("log", [1, 2])
        await c.crash(3)
        system = c.system(1)
        system.incarnation.acquaintances.fresh.add(3)
        assert await system.host.decommission.forget_node(3)
        assert system.storage.meta_batch.meta.get(meta_rows.peer_key(3)) is None


async def test_a_member_that_is_made_anew_keeps_nothing_of_a_segment_that_is_not_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a start the segment is written once more, without the group, whose records in the WAL are void."""
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        await c.lead(1)
        await c.fill(1, 6, SIZE)
        await stable(c, 3)
        seals = meta_rows.file_key("flushed", 0)
        refusing = Refusing(monkeypatch, lambda key: key == seals, 1 << 30, meta_of(c, 3))
        with pytest.raises(NoSpace):
            await c.roll(3)
        await made_anew(c, 3)
        await stable(c, 3)
        last = c.member(3).raft.log.stable
        c.partition(3)
        refusing.left = 0
        await c.restart(3)
        again, reader = c.member(3), c.system(3).replicas.reader
        entries = reader.log_entries(again, again.raft.log.first_index, last, 1 << 30)
        assert entries[-1].index == last
