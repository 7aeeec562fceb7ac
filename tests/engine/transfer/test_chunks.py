"""Chunks of snapshots, alone: what is written, what is kept for whom, and what a start finds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from logyard.engine.config import SystemConfig
from logyard.engine.log import meta_rows
from logyard.engine.log.meta_rows import SnapshotRow
from logyard.engine.raft.membership import Configuration
from logyard.engine.snapshot.format import Encoded, Snapshot, read_manifest, split
from logyard.engine.transfer.chunks import LOG_ENTRIES_MAX, Chunks, Intent
from logyard.payloads.liveness import Liveness
from logyard.protocol.errors import LogyardError, NoSpace

UID = 7
STALL_S = 10.0


def encoded(index: int, *parts: int) -> Encoded:
    """A snapshot of large sections: a number stands for one's content."""
    state = {f"part {part}": random.Random(part).randbytes(300_000) for part in parts}
    live = Liveness().encode_live_set(index)
    return split(Snapshot(UID, index, 1, Configuration((1, 2, 3)).encode(), 1, 0, 5, state, live))


class Rig:
    """Chunks over a meta store that is a dictionary; `unpinned` are the members whose log nobody waits for."""

    def __init__(self, lease_bytes: int = 1 << 30) -> None:
        self.rows: dict[bytes, bytes] = {}
        self.commits: list[int] = []
        self.full = False
        self.unpinned: list[int] = []
        raft = SimpleNamespace(stopped=False, log=SimpleNamespace(last_index=100), progress={})
        self.member: Any = SimpleNamespace(uid=UID, raft=raft, chunks=(), damaged=False, compactable=50)
        self.members = {UID: self.member}
        config = SystemConfig(snapshot_lease_bytes=lease_bytes, snapshot_stall_ms=int(STALL_S * 500))
        meta = SimpleNamespace(
            get=self.rows.get, commit=self.put,
            scan=lambda prefix: [pair for pair in sorted(self.rows.items()) if pair[0].startswith(prefix)],
            keys=lambda prefix: [key for key in sorted(self.rows) if key.startswith(prefix)],
        )  # fmt: skip
        self.books: Any = SimpleNamespace(
            meta=meta, commit=self.commit, has_snapshot=lambda uid: meta_rows.snapshot_key(uid) in self.rows,
            snapshot=self.snapshot,
        )  # fmt: skip
        self.chunks = self.again(config)

    def again(self, config: SystemConfig | None = None) -> Chunks:
        """What the next life of the node has."""
        self.chunks = Chunks(
            config or SystemConfig(),
            cast(Any, self.members),
            self.books,
            lambda member: self.unpinned.append(member.uid),
        )
        return self.chunks

    def snapshot(self, uid: int) -> SnapshotRow:
        key = meta_rows.snapshot_key(uid)
        return SnapshotRow.unpack(key, self.rows[key])

    def put(self, puts: Iterable[tuple[bytes, bytes | None]]) -> None:
        for key, value in puts:
            if value is None:
                self.rows.pop(key, None)
            else:
                self.rows[key] = value

    async def commit(self, build: Callable[[], Iterable[Any]], store: bool = False) -> None:
        puts = list(build())
        if self.full:
            raise NoSpace("the disk is full")
        self.commits.append(len(puts))
        self.put(puts)

    def stored(self) -> set[bytes]:
        """Names of the chunks that are stored."""
        return {key[1:-8] for key in self.rows if key.startswith(meta_rows.CHUNK)}

    def go(self) -> None:
        """The replica goes: the rows say so, and what only they named is left."""
        del self.members[UID]
        self.put([(meta_rows.snapshot_key(UID), None), (meta_rows.intent_key(UID), None)])
        self.chunks.forget(UID)
        self.chunks.drop(UID, self.member.chunks)

    def store(self, index: int, found: Encoded, anew: bool = False) -> None:
        """A snapshot takes the stored one's place, as the books do it."""
        self.put(self.chunks.changed(self.member, index, found, anew))
        self.put([SnapshotRow(UID, index, 1, found.manifest).put()])
        self.member.chunks = found.names


def test_a_chunk_that_the_stored_snapshot_has_is_not_written_again() -> None:
    rig = Rig()
    first, second = encoded(10, 1, 2), encoded(20, 2, 3)
    rig.store(10, first)
    assert rig.stored() == set(first.names) and rig.chunks.written == len(first.names)
    rig.store(20, second)
    assert rig.stored() == set(second.names) and rig.chunks.reused
    assert all(rig.chunks.read(UID, name) == bytes(second.chunks[name]) for name in second.names)
    # One that may be damaged counts for nothing.
    before = rig.chunks.written
    rig.store(20, second, anew=True)
    assert rig.chunks.written == before + len(second.names)


async def test_what_a_laggard_was_offered_stays_until_it_has_it() -> None:
    rig = Rig()
    first, second = encoded(10, 1), encoded(20, 2)
    rig.store(10, first)
    rig.chunks.lease(UID, 3, read_manifest(first.manifest, UID), 0.0)
    rig.store(20, second)
    await rig.chunks.collect()
    assert rig.stored() == {*first.names, *second.names}
    assert rig.chunks.log_kept_above(rig.member) == 100, "who is no follower, or has caught up, is not waited for"
    rig.member.raft.progress[3] = SimpleNamespace(match=5)
    assert rig.chunks.log_kept_above(rig.member) == 10
    rig.chunks.sent(UID, 3)
    await rig.chunks.collect()
    assert rig.stored() == set(second.names) and rig.chunks.log_kept_above(rig.member) == 10
    rig.chunks.expire(1.0)
    assert rig.chunks.leases and not rig.unpinned
    rig.member.raft.progress[3].match = 50
    rig.chunks.expire(1.0)
    assert not rig.chunks.leases and rig.unpinned == [UID]


def test_a_log_is_not_kept_without_end() -> None:
    rig = Rig()
    rig.member.raft.progress[3] = SimpleNamespace(match=5)
    rig.chunks.lease(UID, 3, read_manifest(encoded(10, 1).manifest, UID), 0.0)
    rig.member.raft.log.last_index = 100 + LOG_ENTRIES_MAX
    assert rig.chunks.log_kept_above(rig.member) == 100


async def test_a_lease_lasts_while_there_is_progress() -> None:
    rig = Rig()
    found = encoded(10, 1)
    rig.member.raft.progress[3] = SimpleNamespace(match=5)
    rig.chunks.lease(UID, 3, read_manifest(found.manifest, UID), 0.0)
    rig.chunks.touch(UID, 3, 5.0)
    rig.chunks.touch(UID, 2, 5.0)
    rig.chunks.expire(STALL_S + 1)
    assert rig.chunks.leases and rig.chunks.leased_bytes
    rig.chunks.expire(STALL_S + 5)
    assert not rig.chunks.leases


def test_what_is_too_much_ends_the_oldest_leases_and_a_full_disk_all() -> None:
    rig = Rig(lease_bytes=1 << 20)
    manifest = read_manifest(encoded(10, 1, 2).manifest, UID)
    for node in (2, 3, 4):
        rig.chunks.lease(UID, node, manifest, 0.0)
    assert [node for _, node in rig.chunks.leases] == [4], "one is always allowed"
    rig.chunks.give_up()
    assert not rig.chunks.leases and len(rig.unpinned) == 3


async def test_a_collection_that_found_no_room_is_done_again() -> None:
    rig = Rig()
    first = encoded(10, 1)
    rig.store(10, first)
    rig.chunks.lease(UID, 3, read_manifest(first.manifest, UID), 0.0)
    rig.store(20, encoded(20, 2))
    rig.chunks.end(UID, 3)
    rig.full = True
    with pytest.raises(NoSpace):
        await rig.chunks.collect()
    rig.full = False
    await rig.chunks.collect()
    assert not rig.stored() & set(first.names)


async def test_chunks_that_come_for_an_intent_stay_across_a_start() -> None:
    rig = Rig()
    found = encoded(10, 1)
    manifest = read_manifest(found.manifest, UID)
    intent, resumed = await rig.chunks.intend(UID, manifest, lambda *one: False)
    assert not resumed
    await rig.chunks.store_chunks(UID, {name: memoryview(found.chunks[name]) for name in found.names})
    intent.cover([(1, 4)], 3)
    await rig.chunks.store(UID, intent)
    rig.put([(meta_rows.chunk_key(UID, b"o" * 16), b"orphan"), (meta_rows.chunk_key(9, b"o" * 16), b"orphan")])
    rig.put([Intent(5, 1).put(9)])
    chunks = rig.again()
    chunks.recover(lambda uid: uid == UID, set())
    assert rig.stored() == set(found.names) and chunks.intents.keys() == {UID}
    assert meta_rows.intent_key(9) not in rig.rows
    # A newer snapshot takes over what is durable; what was lost since is not.
    newer = read_manifest(encoded(20, 2).manifest, UID)
    intent, resumed = await chunks.intend(UID, newer, lambda *one: False)
    assert resumed and intent.covered == [(1, 4)] and intent.index == 20
    intent, resumed = await chunks.intend(UID, newer, lambda *one: True)
    assert intent.covered == []
    await chunks.collect()
    assert not rig.stored()


async def test_a_snapshot_that_got_there_ends_the_intent_and_one_that_did_not_is_abandoned() -> None:
    rig = Rig()
    found = encoded(10, 1)
    manifest = read_manifest(found.manifest, UID)
    await rig.chunks.intend(UID, manifest, lambda *one: False)
    rig.store(9, encoded(9, 2))
    assert meta_rows.intent_key(UID) in rig.rows
    rig.store(10, found)
    rig.chunks.forget(UID)
    assert meta_rows.intent_key(UID) not in rig.rows and not rig.chunks.intents
    await rig.chunks.intend(UID, read_manifest(encoded(30, 3).manifest, UID), lambda *one: False)
    await rig.chunks.abandon(UID)
    await rig.chunks.abandon(UID)
    assert meta_rows.intent_key(UID) not in rig.rows


async def test_what_came_for_a_snapshot_that_a_newer_one_forestalled_goes() -> None:
    """The log got there first, and a snapshot of its own was stored: the one that came was not."""
    rig = Rig()
    found, own = encoded(10, 1), encoded(12, 2)
    await rig.chunks.intend(UID, read_manifest(found.manifest, UID), lambda *one: False)
    await rig.chunks.store_chunks(UID, {name: memoryview(found.chunks[name]) for name in found.names})
    rig.store(12, own)
    rig.chunks.forget(UID)
    await rig.chunks.collect()
    assert rig.stored() == set(own.names)


async def test_an_intent_of_a_replica_that_went_is_not_stored() -> None:
    rig = Rig()
    intent, _ = await rig.chunks.intend(UID, read_manifest(encoded(10, 1).manifest, UID), lambda *one: False)
    assert rig.chunks.forget(UID) and not rig.chunks.forget(UID)
    rig.rows.clear()
    with pytest.raises(LogyardError, match="does not run"):
        await rig.chunks.store(UID, intent)
    assert not rig.rows


def test_a_start_keeps_what_a_damaged_group_may_need_and_nothing_of_deleted_ones() -> None:
    rig = Rig()
    rig.store(10, encoded(10, 1))
    kept = rig.stored()
    rig.put([(meta_rows.chunk_key(UID, b"o" * 16), b"orphan")])
    rig.member.damaged = True
    rig.again().recover(lambda uid: True, set())
    assert rig.stored() == kept | {b"o" * 16}
    rig.member.damaged = False
    rig.again().recover(lambda uid: True, set())
    assert rig.stored() == kept
    rig.again().recover(lambda uid: True, {UID})
    assert not rig.stored()


def test_an_older_snapshot_may_lack_what_died_by_the_newer_one() -> None:
    intent = Intent(20, 2, 5, [(1, 9)], [b"name"])
    assert Intent.unpack(intent.put(UID)[1] or b"").covered == [(1, 9)]
    assert intent.taken_over(30, 2, ()).release == 0 and intent.taken_over(4, 2, ()).release == 20
    assert Intent(20, 2, 25).taken_over(21, 2, ()).release == 25


def test_only_who_needs_what_can_not_be_sent_loses_the_log() -> None:
    """One whose transfer is under way keeps its chunks, and one that is past that entry its log."""
    rig = Rig()
    rig.member.compactable, rig.member.is_transferring = 90, lambda node: node == 4
    rig.member.raft.progress = {node: SimpleNamespace(match=match) for node, match in ((2, 60), (3, 40), (4, 40))}
    manifest = read_manifest(encoded(10, 1).manifest, UID)
    for node in (3, 4):
        rig.chunks.lease(UID, node, manifest, 0.0)
    assert rig.chunks.log_kept_above(rig.member) == 10
    rig.chunks.promise_no_log(rig.member, 55)
    assert set(rig.chunks.leases) == {(UID, 4)} and rig.chunks.leases[UID, 4].names == set(manifest.chunks)
    assert rig.chunks.log_kept_above(rig.member) == 100 and rig.unpinned == [UID]
    rig.chunks.lease(UID, 2, manifest, 0.0)
    rig.chunks.promise_no_log(rig.member, 55)
    assert (UID, 2) in rig.chunks.leases and rig.chunks.log_kept_above(rig.member) == 10


async def test_the_chunks_of_a_replica_that_went_go_in_small_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logyard.engine.transfer.chunks.DELETED_MAX", 3)
    monkeypatch.setattr("logyard.engine.transfer.chunks.COMMITS_MAX", 2)
    rig = Rig()
    rig.store(10, encoded(10, *range(10)))
    rig.go()
    assert await rig.chunks.collect() and rig.commits == [3, 3] and len(rig.stored()) == 4, "some now, and more later"
    rig.full = True
    with pytest.raises(NoSpace):
        await rig.chunks.collect()
    rig.full = False
    assert not await rig.chunks.collect() and rig.commits == [3, 3, 3, 1] and not rig.stored()
    assert not await rig.chunks.collect() and len(rig.commits) == 4


async def test_what_a_crash_left_of_them_goes_at_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logyard.engine.transfer.chunks.DELETED_MAX", 3)
    monkeypatch.setattr("logyard.engine.transfer.chunks.COMMITS_MAX", 1)
    rig = Rig()
    rig.store(10, encoded(10, *range(5)))
    rig.go()
    assert await rig.chunks.collect() and len(rig.stored()) == 2
    rig.again().recover(lambda uid: False, set())
    assert not rig.stored()


async def test_a_chunk_that_something_else_names_by_then_stays() -> None:
    rig = Rig()
    found, newer = encoded(10, 1, 2), encoded(20, 2, 3)
    manifest = read_manifest(found.manifest, UID)
    rig.store(10, found)
    rig.chunks.lease(UID, 2, manifest, 0.0)
    rig.go()
    await rig.chunks.collect()
    assert rig.stored() == set(found.names), "a transfer from here"
    # The group is here again: a snapshot is on its way, and then stored; then it sleeps.
    rig.member.chunks = ()
    rig.members[UID] = rig.member
    await rig.chunks.intend(UID, read_manifest(newer.manifest, UID), lambda *one: False)
    rig.chunks.end(UID, 2)
    await rig.chunks.collect()
    both = set(found.names) & set(newer.names)
    assert both and rig.stored() == both, "a transfer to here"
    await rig.chunks.store_chunks(UID, {name: memoryview(newer.chunks[name]) for name in newer.names})
    rig.put([SnapshotRow(UID, 20, 1, newer.manifest).put()])
    rig.member.chunks = newer.names
    rig.chunks.forget(UID)
    rig.chunks.drop(UID, found.names)
    await rig.chunks.collect()
    assert rig.stored() == set(newer.names), "a snapshot"
    del rig.members[UID]
    rig.chunks.drop(UID, found.names)
    await rig.chunks.collect()
    assert rig.stored() == set(newer.names), "one of a group that sleeps"
    rig.member.damaged = True
    rig.members[UID] = rig.member
    rig.go()
    rig.members[UID] = rig.member
    await rig.chunks.collect()
    assert rig.stored() == set(newer.names), "nobody knows what a damaged one needs"


async def test_a_chunk_that_comes_when_its_replica_went_is_not_stored() -> None:
    rig = Rig()
    found = encoded(10, 1)
    await rig.chunks.intend(UID, read_manifest(found.manifest, UID), lambda *one: False)
    rig.go()
    await rig.chunks.store_chunks(UID, {name: memoryview(found.chunks[name]) for name in found.names})
    assert not rig.stored()
