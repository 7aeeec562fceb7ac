"""Sections of snapshots: large ones lie beside the manifest, once, as long as anything names them; and checkpoints."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgpack
import pytest
import trio

from logyard.engine.log import meta_rows
from logyard.engine.machine import Applied, Checkpoint, Context, PayloadRange, PayloadRef, Position, Release, Sections
from logyard.engine.snapshot.format import CHUNK_BYTES, INLINE_BYTES, split
from logyard.protocol.errors import Corrupt, LogyardError
from logyard.protocol.frame import encode_frame
from logyard.service.check.run import check_directory

from .cluster import KIB, MIB, Cluster, cluster, until
from .test_transfers import LIMITS, Wire, quiet


class Shelves:
    """Named sections of any size: a command is [name, seed, size], "checkpoint", or nothing."""

    version = 1

    def __init__(self) -> None:
        self.books: dict[str, bytes] = {}
        self.section_versions = {"old": 7}

    def apply(self, context: Context, command: bytes, refs: tuple[PayloadRef, ...]) -> Applied:
        effects: list[Any] = [Release(Position(context.index, 0), Position(context.index + 1, 0))]
        if command in (b"checkpoint", b"snapshot"):
            effects.append(Checkpoint(keep_log=command == b"checkpoint"))
        elif command:
            name, seed, size = msgpack.unpackb(command)
            self.books[name] = random.Random(seed).randbytes(size)
        return Applied(b"", effects)

    def snapshot(self) -> Sections:
        return dict(self.books)

    def restore(self, sections: Sections) -> None:
        self.books = dict(sections)

    def live_refs(self) -> Iterable[PayloadRange]:
        return ()


def shelves(path: Path, count: int, **limits: Any) -> Any:
    return cluster(path, count, machines=lambda name, arguments: Shelves(), **{**LIMITS, **limits})


async def put(c: Cluster, number: int, name: str, seed: int, size: int) -> None:
    await command(c, number, msgpack.packb([name, seed, size]))


async def command(c: Cluster, number: int, what: bytes) -> None:
    with trio.fail_after(20):
        await c.nodes[number].commit(c.member(number), encode_frame([(b"", None)], command=what))


def stored(c: Cluster, number: int) -> set[bytes]:
    """Names of the chunks that a node stores."""
    return {key[1:-8] for key in c.system(number).storage.meta_batch.meta.keys(meta_rows.CHUNK)}


async def test_a_section_that_did_not_change_is_not_stored_again(tmp_path: Path) -> None:
    async with shelves(tmp_path, 1) as c:
        await put(c, 1, "big", 1, 2 * MIB + 5)
        await put(c, 1, "small", 2, INLINE_BYTES)
        await c.nodes[1].snapshot()
        chunks, first = c.system(1).transfers.chunks, stored(c, 1)
        assert len(first) == 3 == chunks.written and set(c.member(1).chunks) == first
        assert c.member(1).snapshot_bytes > 2 * MIB + INLINE_BYTES
        written = c.system(1).disk.bytes_written
        await put(c, 1, "small", 3, INLINE_BYTES)
        await c.nodes[1].snapshot()
        assert stored(c, 1) == first and (chunks.written, chunks.reused) == (3, 3)
        assert c.system(1).disk.bytes_written - written < MIB
        # What changed within a section is all that is new.
        tail = c.log(1).books["big"]
        c.log(1).books["big"] = tail[: 2 * MIB] + b"other"
        await put(c, 1, "small", 4, 10)
        await c.nodes[1].snapshot()
        assert len(stored(c, 1) & first) == 2 and len(stored(c, 1)) == 3
        for _ in range(2):
            await c.restart(1)
            await c.leader()
            assert c.log(1).books["big"] == tail[: 2 * MIB] + b"other"
            assert len(c.log(1).books["small"]) == 10 and len(c.member(1).chunks) == 3


async def test_sections_have_versions_of_their_own(tmp_path: Path) -> None:
    async with shelves(tmp_path, 1) as c:
        await put(c, 1, "old", 1, 10)
        await put(c, 1, "new", 1, 100 * KIB)
        found = c.system(1).transfers.snapshots._capture(c.member(1))
        await c.system(1).storage.checkpoints.store_snapshots([found])
        books = c.system(1).storage.meta_batch
        assert books.load_snapshot(books.snapshot(c.member(1).uid)).versions == {"old": 7}


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_crash_at_the_commit_of_a_snapshot_leaves_chunks_to_somebody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    async with shelves(tmp_path, 1) as c:
        await put(c, 1, "big", 1, 2 * MIB)
        await c.nodes[1].snapshot()
        await put(c, 1, "big", 2, 3 * MIB)
        meta = c.system(1).storage.meta_batch.meta
        commit, reached = meta.commit, trio.Event()

        async def crash_in(*arguments: Any) -> None:
            if when == "after":
                commit(arguments[0])
            reached.set()
            await trio.sleep_forever()

        async def in_commit(build: Any, store: bool = False, then: Any = None, thrice: Any = ()) -> None:
            await crash_in(list(build()))

        with monkeypatch.context() as patch:
            patch.setattr(c.system(1).storage.meta_batch, "commit", in_commit)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(c.nodes[1].snapshot)
                await reached.wait()
                nursery.cancel_scope.cancel()
            await c.crash(1)
        await c.start(1)
        await c.leader()
        await until(lambda: "big" in c.log(1).books and len(c.log(1).books["big"]) == 3 * MIB)
        assert stored(c, 1) == set(c.member(1).chunks)
        await c.nodes[1].snapshot()
        assert len(stored(c, 1)) == 3 and stored(c, 1) == set(c.member(1).chunks)


@pytest.mark.long
async def test_a_receiver_asks_for_the_chunks_it_lacks_only(tmp_path: Path) -> None:
    async with shelves(tmp_path, 3) as c:
        await c.lead(1)
        await put(c, 1, "same", 1, 3 * MIB)
        await put(c, 1, "changes", 2, 2 * MIB)
        await c.applied()
        for number in c.ids:
            await c.nodes[number].snapshot()
            await c.nodes[number].compact()
        await c.crash(3)
        await put(c, 1, "changes", 3, 2 * MIB)
        await c.nodes[1].snapshot()
        await c.nodes[1].compact()
        await c.start(3)
        wire = Wire(c, 3)
        await c.applied()
        assert c.member(3).snapshot_index == c.member(1).snapshot_index
        # Node 2 has no snapshot with the new chunks and says so; the leader has.
        assert len(wire.chunks) == len(set(wire.chunks)) == 2
        assert c.log(3).books == c.log(1).books
        await until(lambda: quiet(c, 3) and quiet(c, 1))
        assert stored(c, 3) == stored(c, 1)
        await c.restart(3)
        assert c.log(3).books == c.log(1).books


async def test_chunks_that_arrived_are_not_sent_again_after_a_crash(tmp_path: Path) -> None:
    async with shelves(tmp_path, 3) as c:
        await c.lead(1)
        await c.crash(3)
        await put(c, 1, "big", 1, 6 * MIB)
        await c.nodes[1].snapshot()
        await c.nodes[1].compact()
        await c.start(3)
        wire = Wire(c, 3)
        await wire.held(3)
        await c.restart(3)
        wire.attach()
        wire.let_go()
        await c.applied()
        assert len(wire.chunks) == len(set(wire.chunks)) == 6
        assert c.log(3).books == c.log(1).books


@pytest.mark.long
async def test_an_offer_whose_chunks_went_is_followed_by_a_newer_one(tmp_path: Path) -> None:
    async with shelves(tmp_path, 3, snapshot_stall_ms=500) as c:
        await c.lead(1)
        await c.crash(3)
        await put(c, 1, "big", 1, 3 * MIB)
        await c.nodes[1].snapshot()
        await c.nodes[1].compact()
        await c.start(3)
        wire = Wire(c, 3)
        await wire.held(1)
        kept = stored(c, 1)
        await put(c, 1, "big", 2, 3 * MIB)
        await c.nodes[1].snapshot()
        assert kept < stored(c, 1), "a lease names what no snapshot does"
        c.system(1).transfers.chunks.give_up()
        await c.system(1).transfers.chunks.collect()
        assert not kept & stored(c, 1)
        wire.let_go()
        await c.applied()
        assert c.log(3).books == c.log(1).books
        await until(lambda: quiet(c, 3) and quiet(c, 1))
        assert stored(c, 3) == stored(c, 1) == set(c.member(1).chunks)


async def test_a_damaged_chunk_stops_its_group_only(tmp_path: Path) -> None:
    async with shelves(tmp_path, 1) as c:
        await c.create("other")
        await put(c, 1, "big", 1, 2 * MIB)
        await c.nodes[1].snapshot()
        await c.nodes[1].compact()
        (key, _) = sorted(c.system(1).storage.meta_batch.meta.keys(meta_rows.CHUNK))
        c.system(1).storage.meta_batch.meta.commit([(key, b"not what its name says")])
        await c.restart(1)
        assert c.member(1).state == "stopped" and "chunk" in c.member(1).reason
        await c.leader("other")
        # What is left of it is evidence, and is not collected.
        assert len(stored(c, 1)) == 2
        with pytest.raises((Corrupt, LogyardError)):
            c.system(1).storage.meta_batch.load_snapshot(c.system(1).storage.meta_batch.snapshot(c.member(1).uid))


async def test_a_damaged_chunk_is_mended_by_the_others(tmp_path: Path) -> None:
    async with shelves(tmp_path, 3) as c:
        await c.lead(1)
        await put(c, 1, "big", 1, 2 * MIB)
        await c.applied()
        raft = c.member(3).raft
        await until(lambda: raft.log.stable == raft.log.last_index, "what is applied is durable here, too")
        await c.nodes[3].snapshot()
        await c.nodes[3].compact()
        (key, _) = sorted(c.system(3).storage.meta_batch.meta.keys(meta_rows.CHUNK))
        c.system(3).storage.meta_batch.meta.commit([(key, b"not what its name says")])
        uid = c.member(3).uid
        await c.restart(3)
        await until(lambda: (known := c.system(3).repair.log_repair.known.get(uid)) is not None and known.sound)
        await c.applied()
        assert c.log(3).books == c.log(1).books
        await c.restart(3)
        await c.applied()
        assert c.member(3).raft.mend is None and c.log(3).books == c.log(1).books


async def test_a_damaged_chunk_that_is_met_while_the_node_runs_is_pulled_anew(tmp_path: Path) -> None:
    async with shelves(tmp_path, 3) as c:
        await c.lead(1)
        await put(c, 1, "big", 1, 2 * MIB)
        await c.applied()
        for number in (1, 3):
            raft = c.member(number).raft
            await until(lambda raft=raft: raft.log.stable == raft.log.last_index, "what is applied is durable")
            await c.nodes[number].snapshot()
            await c.nodes[number].compact()
        meta, logs = c.system(3).storage.meta_batch.meta, c.system(3).repair.log_repair
        meta.commit([(sorted(meta.keys(meta_rows.CHUNK))[0], b"not what its name says")])
        member = c.member(3)
        logs.found(member, Corrupt("a scrub", 0, "its chunk", "another"))
        await until(lambda: (known := logs.known.get(member.uid)) is not None and known.sound, "it is mended")
        await c.applied()
        assert c.log(3).books == c.log(1).books
        await c.restart(3)
        await c.applied()
        assert c.log(3).books == c.log(1).books and c.member(3).raft.mend is None


async def test_the_chunks_of_a_deleted_group_go(tmp_path: Path) -> None:
    async with shelves(tmp_path, 1) as c:
        await put(c, 1, "big", 1, CHUNK_BYTES)
        await c.nodes[1].snapshot()
        await c.nodes[1].delete_group("log")
        await c.restart(1)
        assert not stored(c, 1)


@pytest.mark.parametrize("how", ["deleted", "removed"])
async def test_the_chunks_of_a_replica_that_goes_do_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """They stayed, in both copies of the meta store, until the next start; and none of a snapshot that is named."""
    monkeypatch.setattr("logyard.engine.transfer.chunks.DELETED_MAX", 1)
    async with shelves(tmp_path, 3) as c:
        await c.create("other")
        await c.lead(1)
        for name in ("log", "other"):
            number = await c.leader(name)
            with trio.fail_after(20):
                frame = encode_frame([(b"", None)], command=msgpack.packb(["big", 1, 3 * MIB]))
                await c.nodes[number].commit(c.member(number, name), frame)
            await c.applied(name)
        raft = c.member(3).raft
        await until(lambda: raft.log.stable == raft.log.last_index, "what is applied is durable here, too")
        await c.nodes[3].snapshot()
        meta, uid = c.system(3).storage.meta_batch.meta, c.member(3).uid
        assert len(c.member(3).chunks) == 3 and len(meta.keys(meta_rows.CHUNK)) == 6
        if how == "deleted":
            await c.nodes[1].delete_group("log")
        else:
            await c.nodes[1].change_members("log", "remove", 3)
        await until(lambda: len(meta.keys(meta_rows.CHUNK)) == 3)
        assert not [key for key in meta.keys(meta_rows.CHUNK) if key.endswith(meta_rows.KEY.pack(uid))]
        await c.restart(3)
        await c.applied("other")
        assert c.log(3, "other").books == c.log(1, "other").books and stored(c, 3)


async def test_the_chunks_of_a_snapshot_that_a_repair_gives_up_go(tmp_path: Path) -> None:
    async with shelves(tmp_path, 3) as c:
        await c.lead(1)
        await put(c, 1, "big", 1, 2 * MIB)
        await c.applied()
        raft = c.member(3).raft
        await until(lambda: raft.log.stable == raft.log.last_index, "what is applied is durable here, too")
        await c.nodes[3].snapshot()
        await c.nodes[3].compact()
        old, meta, logs = stored(c, 3), c.system(3).storage.meta_batch.meta, c.system(3).repair.log_repair
        await put(c, 1, "big", 2, 2 * MIB)
        await c.applied()
        await c.nodes[1].snapshot()
        await c.nodes[1].compact()
        meta.commit([(sorted(meta.keys(meta_rows.CHUNK))[0], b"not what its name says")])
        member = c.member(3)
        logs.found(member, Corrupt("a scrub", 0, "its chunk", "another"))
        await until(lambda: (known := logs.known.get(member.uid)) is not None and known.sound, "it is mended")
        await c.applied()
        assert c.log(3).books == c.log(1).books
        await until(lambda: not old & stored(c, 3), "they are nobody's")
        assert stored(c, 3) == set(c.member(3).chunks)


# Checkpoints


async def test_a_checkpoint_keeps_the_log_and_a_snapshot_lets_it_go(tmp_path: Path) -> None:
    async with shelves(tmp_path, 3) as c:
        await c.lead(1)
        await c.applied()
        await c.crash(3)
        for at in range(5):
            await put(c, 1, "a", at, 100)
        await command(c, 1, b"checkpoint")
        member = c.member(1)
        await until(lambda: member.snapshot_index > 0)
        index = member.snapshot_index
        await c.roll(1)
        assert member.flushed >= index and member.raft.log.snapshot_index == 0
        # A follower that is behind gets entries.
        await c.start(3)
        await c.applied()
        assert c.member(3).snapshot_index == 0 and c.system(1).transfers.snapshot_sender.sent == 0
        await c.restart(1)
        member = c.member(1)
        assert member.snapshot_index == index and member.compactable == 0 and member.raft.log.snapshot_index == 0
        await c.roll(1)
        assert member.raft.log.snapshot_index == 0, "also by its rows"
        await until(lambda: all(len(c.system(number).live) == 3 for number in c.ids))
        await c.lead(1)
        await c.nodes[1].snapshot()
        await c.roll(1)
        assert member.raft.log.snapshot_index == member.snapshot_index == member.compactable >= index
        assert c.log(1).books == c.log(3).books


async def test_a_snapshot_at_a_checkpoint_is_the_checkpoint(tmp_path: Path) -> None:
    async with shelves(tmp_path, 1) as c:
        await put(c, 1, "a", 1, 100)
        await command(c, 1, b"checkpoint")
        member = c.member(1)
        await until(lambda: member.snapshot_index == member.raft.applied)
        await c.roll(1)
        taken = c.system(1).transfers.snapshots.taken
        assert member.raft.log.snapshot_index == 0
        await c.nodes[1].snapshot()
        assert c.system(1).transfers.snapshots.taken == taken
        assert member.raft.log.snapshot_index == member.snapshot_index


@pytest.mark.long
async def test_checkpoints_do_not_put_off_the_snapshot_that_is_due(tmp_path: Path) -> None:
    async with shelves(tmp_path, 1, snapshot_entries=16) as c:
        member = c.member(1)
        for at in range(20):
            await put(c, 1, "a", at, 100)
            await command(c, 1, b"checkpoint")
        c.system(1).storage.janitor.look()
        await until(lambda: member.compactable > 0)


async def test_the_check_reads_sections_beside_the_manifest(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1) as c:
        await c.fill(1, 3, 100)
        member = c.member(1)
        captured = c.system(1).transfers.snapshots._capture(member)
        await c.system(1).storage.checkpoints.store_snapshots([captured._replace(encoded=split(captured.snapshot, 8))])
        assert len(stored(c, 1)) == len(member.chunks) == 1
        await c.crash(1)
        assert check_directory(tmp_path / "node-1")["ok"]
        await c.start(1)
        await c.leader()
        meta = c.system(1).storage.meta_batch.meta
        meta.commit([(key, None) for key in meta.keys(meta_rows.CHUNK)])
        await c.crash(1)
        report = check_directory(tmp_path / "node-1")
        assert not report["ok"] and any("chunk" in one["message"] for one in report["findings"])
