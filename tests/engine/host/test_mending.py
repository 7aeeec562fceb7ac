"""Damage of every kind on one node, on the leader and on a follower (faults D7, D8): the others mend that group, and no
other; until then it neither votes nor acknowledges (docs/internals/repair.md)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import lmdb
import pytest
import trio

from logyard.engine.disk.door import Disk
from logyard.engine.log import checkpoint_rows as rows
from logyard.engine.log import meta_rows
from logyard.engine.log.meta_rows import KEY, GroupRow, SnapshotRow, StateRow
from logyard.engine.log.record import BLOCK
from logyard.engine.log.segment import SegmentReader
from logyard.engine.raft.core import LEADER
from logyard.machines.log.command import APPEND
from logyard.protocol.errors import Corrupt, GenerationFailed, Gone, GroupStopped
from logyard.protocol.frame import encode_frame
from logyard.protocol.pending import DROP

from .cluster import KIB, Cluster, cluster, until
from .test_admission import push
from .test_histories import check_books
from .test_repair import hurt_file

SIZE = 3 * KIB


def flip(path: Path, data: bytes) -> int:
    """Flip a bit in every copy of `data` in a file."""
    image = bytearray(path.read_bytes())
    found, at = 0, image.find(data)
    while at >= 0:
        image[at + len(data) // 2] ^= 4
        found, at = found + 1, image.find(data, at + 1)
    if found:
        with path.open("r+b") as file:
            file.write(image)
    return found


def metadata(c: Cluster, number: int, index: int, name: str = "log") -> bytes:
    entry = c.member(number, name).raft.log.entry(index)
    assert entry is not None
    return bytes(entry.data)


def hurt_wal(c: Cluster, number: int, data: bytes) -> None:
    assert sum(flip(path, data) for path in (c.path / f"node-{number}" / "wal").glob("*.wal")) == 1


def hurt_segments(c: Cluster, number: int, data: bytes) -> None:
    assert sum(flip(path, data) for path in (c.path / f"node-{number}" / "segments").glob("*.seg")) == 1


def hurt_rows(c: Cluster, number: int, uid: int, prefix: bytes, copies: Sequence[str] = ("a", "b")) -> int:
    """Spoil rows about a group in the meta store's environments, with all their content."""
    hurt = 0
    for name in copies:
        path = c.path / f"node-{number}" / "meta" / name
        environment = lmdb.open(str(path), map_size=16 << 30)
        with environment.begin(write=True) as transaction:
            keys = [bytes(key) for key, _ in transaction.cursor() if key[:1] == prefix and key.endswith(KEY.pack(uid))]
            for key in keys:
                raw = bytearray(transaction.get(key) or b"")
                raw[-1] ^= 1
                transaction.put(key, bytes(raw))
                hurt += 1
        environment.close()
    return hurt


async def mended(c: Cluster, number: int, name: str = "log") -> None:
    """Until the member takes part again, and that is stored."""

    def sound() -> bool:
        member = c.replica(number, name)
        known = c.system(number).repair.log_repair.known.get(member.uid) if member is not None else None
        return member is not None and member.raft.mend is None and known is not None and known.sound

    await until(
        sound, lambda: f"{name} on {number} is mended: {c.replica(number, name) and c.member(number, name).raft}"
    )
    await c.applied(name)


async def proves(c: Cluster, number: int, bodies: list[bytes], name: str = "log") -> None:
    """The member serves all that was written, votes, and its copy counts; also after another restart."""
    await c.applied(name)
    assert [body for _, body in await c.read(number, 0, name=name)] == bodies
    others = [one for one in c.ids if one != number]
    for away in others:
        await c.crash(away)
        leader = await c.leader(name)
        bodies += await c.fill(leader, 1, SIZE, name, tag=b"p")
        await c.start(away)
        await c.applied(name)
    await c.restart(number)
    await c.applied(name)
    assert c.member(number, name).raft.mend is None
    assert [body for _, body in await c.read(number, 0, name=name)] == bodies


async def stable(c: Cluster, number: int, name: str = "log") -> None:
    """All that a member has applied is on its own disk, too."""
    await c.applied(name)
    await until(lambda: c.member(number, name).raft.log.stable == c.member(number, name).raft.log.last_index)


async def history(c: Cluster, on_leader: bool, snapshot: bool = True) -> list[bytes]:
    """Node 3 is to be damaged: entries in a segment, in a snapshot, and in the WAL."""
    await c.lead(3 if on_leader else 1)
    leader = 3 if on_leader else 1
    bodies = await c.fill(leader, 6, SIZE)
    await stable(c, 3)
    if snapshot:
        await c.nodes[3].snapshot()
    await c.roll(3)
    for _ in range(6):
        bodies += await c.fill(leader, 1, SIZE)
        # A batch each: one that is damaged and has none behind it passes for torn.
        await stable(c, 3)
    return bodies


@pytest.mark.parametrize("on_leader", [False, True], ids=["follower", "leader"])
async def test_a_damaged_wal_record(tmp_path: Path, on_leader: bool) -> None:
    async with cluster(tmp_path) as c:
        await c.create("other")
        bodies = await history(c, on_leader)
        data = metadata(c, 3, c.member(3).raft.log.last_index - 3)
        await c.crash(3)
        hurt_wal(c, 3, data)
        await c.append(await c.leader(), [(b"", b"meanwhile" * 100)])
        bodies.append(b"meanwhile" * 100)
        await c.start(3)
        assert c.member(3).raft.mend is not None and c.member(3, "other").raft.mend is None
        row = c.nodes[3].describe("log")
        assert row["state"] == "mending" and "damaged" in row["reason"]
        assert c.nodes[3].status()["damage"]["mending"] == 1
        # What is left of its log is not what it was: no part of the log in front of the damage is fetched again.
        assert c.member(3).raft.log.last_index >= 6
        await mended(c, 3)
        assert c.nodes[3].describe("log")["reason"] == "" and c.nodes[3].status()["damage"]["mended"] == 1
        await proves(c, 3, bodies)
        await check_books(c, 3, bodies)


@pytest.mark.parametrize("on_leader", [False, True], ids=["follower", "leader"])
async def test_a_damaged_segment_met_at_the_start(tmp_path: Path, on_leader: bool) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        await c.create("other")
        bodies = await history(c, on_leader, snapshot=False)
        data = metadata(c, 1, 5)
        await c.crash(3)
        hurt_segments(c, 3, data)
        await c.start(3)
        await mended(c, 3)
        assert c.member(3, "other").uid not in c.system(3).repair.log_repair.known
        await proves(c, 3, bodies)
        await check_books(c, 3, bodies)


async def test_a_segment_that_is_gone(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        bodies = await history(c, False, snapshot=False)
        await c.crash(3)
        for path in (c.path / "node-3" / "segments").glob("*.seg"):
            path.unlink()
        await c.start(3)
        await mended(c, 3)
        await proves(c, 3, bodies)


@pytest.mark.parametrize("on_leader", [False, True], ids=["follower", "leader"])
async def test_a_damaged_segment_met_while_running(tmp_path: Path, on_leader: bool) -> None:
    """A slow sender reads it, or the group itself when it applies anew."""
    async with cluster(tmp_path, payload_cache_bytes=0, snapshot_entries=1 << 30) as c:
        await c.create("other")
        await c.lead(3)
        await c.crash(2)
        bodies = await c.fill(3, 6, SIZE)
        await c.applied(among=[1, 3])
        await until(lambda: c.member(3).raft.log.stable >= 7)
        data = metadata(c, 1, 4)
        await c.roll(3)
        raft = c.member(3).raft
        assert raft.log.memory_first > 6
        hurt_segments(c, 3, data)
        for reader in c.system(3).storage.segments._readers.values():
            reader.close()
        c.system(3).storage.segments._readers.clear()
        await c.start(2)
        await until(lambda: c.member(3).raft is not raft, "the leader meets the damage when it reads for node 2")
        await mended(c, 3)
        assert c.member(3, "other").uid not in c.system(3).repair.log_repair.known
        await proves(c, 3, bodies)
        await check_books(c, 3, bodies)


async def test_a_damaged_segment_met_by_a_replay(tmp_path: Path) -> None:
    """Nothing but the machine's replay reads it: the payloads are in a generation."""
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        bodies = await history(c, False, snapshot=False)
        data = metadata(c, 1, 5)
        await c.nodes[3].compact()
        await c.crash(3)
        assert sum(flip(path, data) for path in (c.path / "node-3" / "segments").glob("*.seg")) == 1
        await c.start(3)
        await mended(c, 3)
        await proves(c, 3, bodies)


@pytest.mark.parametrize("copies", [("a",), ("b",), ("a", "b")], ids=["a", "b", "both"])
@pytest.mark.parametrize(
    "kind", [StateRow.PREFIX, SnapshotRow.PREFIX, GroupRow.PREFIX], ids=["state", "snapshot", "group"]
)
async def test_rows_of_the_meta_store(tmp_path: Path, kind: bytes, copies: tuple[str, ...]) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        await c.create("other")
        bodies = await history(c, False)
        uid = c.member(3).uid
        await c.crash(3)
        assert hurt_rows(c, 3, uid, kind, copies) == len(copies)
        await c.start(3)
        if len(copies) == 2:
            await mended(c, 3)
            assert c.member(3, "other").uid not in c.system(3).repair.log_repair.known
        else:
            assert not c.system(3).repair.log_repair.known
        await proves(c, 3, bodies)
        await check_books(c, 3, bodies)


async def test_the_stores_rows_of_a_group(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        bodies = await history(c, False)
        uid = c.member(3).uid
        await c.nodes[3].compact()
        await c.crash(3)
        assert hurt_rows(c, 3, uid, meta_rows.STORE) == 2
        await c.start(3)
        await mended(c, 3)
        await proves(c, 3, bodies)


async def test_a_batch_that_nobody_can_attribute_sends_every_suspect_into_repair(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await c.create("other")
        bodies = await history(c, False)
        more = await c.fill(await c.leader("other"), 2, SIZE, "other")
        await stable(c, 3, "other")
        at = c.system(3).wal._tail
        bodies += await c.fill(1, 1, SIZE)
        await stable(c, 3)
        file = c.path / "node-3" / "wal" / f"{c.system(3).wal.current:016x}.wal"
        # An empty batch behind it, one block, shows that it was whole once.
        await c.system(3).storage.group_commit.exclusive(c.system(3).wal.seal)
        end = c.system(3).wal._tail - 4 * KIB
        await c.crash(3)
        with file.open("r+b") as image:
            image.seek(at)
            image.write(bytes(end - at))
        await c.start(3)
        assert {c.member(3, name).uid for name in ("log", "other")} <= c.system(3).repair.log_repair.known.keys()
        await mended(c, 3)
        await mended(c, 3, "other")
        await proves(c, 3, bodies)
        await c.applied("other")
        assert [body for _, body in await c.read(3, 0, name="other")] == more
        # The file with the hole is still there: its damage is known, and no news.
        mends = c.system(3).repair.log_repair.mended
        await c.restart(3)
        await c.applied()
        assert c.member(3).raft.mend is None and c.system(3).repair.log_repair.mended == 0 and mends == 0


async def test_the_row_goes_with_the_damaged_file(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await history(c, False)
        data = metadata(c, 3, c.member(3).raft.log.last_index - 3)
        await c.crash(3)
        hurt_wal(c, 3, data)
        await c.start(3)
        await mended(c, 3)
        uid = c.member(3).uid
        assert c.system(3).repair.log_repair.known[uid].sound
        await c.nodes[3].compact()
        await c.restart(3)
        await c.applied()
        assert uid not in c.system(3).repair.log_repair.known


@pytest.mark.parametrize("kind", ["wal", "segment", "state row"])
async def test_a_start_is_cut_off_again_and_again_while_a_member_is_mended(tmp_path: Path, kind: str) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        bodies = await history(c, False, snapshot=kind != "segment")
        data = metadata(c, 3, c.member(3).raft.log.last_index - 3)
        early, uid = metadata(c, 1, 5), c.member(3).uid
        await c.crash(3)
        if kind == "wal":
            hurt_wal(c, 3, data)
        elif kind == "segment":
            hurt_segments(c, 3, early)
        else:
            hurt_rows(c, 3, uid, StateRow.PREFIX)
        c.partition(3)
        for _ in range(3):
            await c.start(3)
            await until(lambda: c.member(3).raft.mend is not None)
            assert c.member(3).raft.role != 3
            await c.crash(3)
        # It gets something, but not all: one voter is away, or the link goes.
        c.network.heal()
        await c.start(3)
        await until(lambda: c.member(3).raft.leader != 0)
        await c.restart(3)
        await mended(c, 3)
        await proves(c, 3, bodies)
        await check_books(c, 3, bodies)


async def test_with_a_lost_vote_it_waits_for_every_voter(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        bodies = await history(c, False)
        data = metadata(c, 3, c.member(3).raft.log.last_index - 3)
        await c.crash(3)
        hurt_wal(c, 3, data)
        c.network.partition([3], [2])
        await c.start(3)
        member = c.member(3)
        mend = member.raft.mend
        assert mend is not None and mend.terms
        await until(lambda: mend.fence_term and member.raft.log.stable >= mend.fence, "it has all that was named to it")
        await c.crash(2)
        commit = c.member(1).raft.commit
        with trio.move_on_after(0.4):
            await c.append(1, [(b"", b"not by its copy")])
            raise AssertionError("committed by the copy of a damaged member")
        assert c.member(1).raft.commit == commit and member.raft.mend is mend
        c.network.heal()
        await c.start(2)
        await mended(c, 3)
        assert [body for _, body in await c.read(3)][: len(bodies)] == bodies


async def test_acknowledged_entries_survive_damage_and_elections(tmp_path: Path) -> None:
    async with cluster(tmp_path, 3) as c:
        bodies = await history(c, False)
        # Node 2 is away: what comes now is on nodes 1 and 3 alone, and then node 3 loses it.
        await c.crash(2)
        bodies += await c.fill(1, 3, SIZE, tag=b"k")
        await c.applied(among=[1, 3])
        await until(lambda: c.member(3).raft.log.stable == c.member(3).raft.log.last_index)
        data = metadata(c, 3, c.member(3).raft.log.last_index - 1)
        await c.crash(3)
        hurt_wal(c, 3, data)
        await c.crash(1)
        await c.start(2)
        await c.start(3)
        term = c.member(2).raft.term
        with trio.move_on_after(0.4):
            await c.leader(among=[2, 3])
            raise AssertionError("a leader without the acknowledged entries")
        assert c.member(2).raft.term == term
        await c.start(1)
        await mended(c, 3)
        for number in c.ids:
            assert [body for _, body in await c.read(number)] == bodies


async def test_a_leader_that_stops_right_behind_an_append_is_trusted_by_nobody(tmp_path: Path) -> None:
    """Its farewell overtook the append, which was taken for word of a leader: nobody was elected for good."""
    async with cluster(tmp_path, 3) as c:
        await c.create()
        leader = await c.leader()
        await c.fill(leader, 3, SIZE)
        await c.applied()
        system, member = c.system(leader), c.member(leader)
        last = member.raft.log.last_index
        push(c, SIZE, number=leader)
        system.ready_loop.turn()
        assert member.raft.log.last_index == last + 1 and not member.slow_sends
        system.replicas.retire.stop(member, "a test")
        others = [number for number in c.ids if number != leader]
        await c.fill(await c.leader(among=others), 3, SIZE)
        await c.applied(among=others)


async def test_a_group_of_which_nobody_else_has_a_copy_stays_stopped(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, payload_cache_bytes=0) as c:
        bodies = await c.fill(1, 6, SIZE)
        await c.nodes[1].snapshot()
        await c.roll(1)
        uid = c.member(1).uid
        await c.crash(1)
        before = {name: (c.path / "node-1" / "meta" / name / "data.mdb").read_bytes() for name in ("a", "b")}
        hurt_rows(c, 1, uid, SnapshotRow.PREFIX)
        for _ in range(2):
            await c.start(1)
            assert c.member(1).state == "stopped" and "damaged" in c.member(1).reason
            assert c.nodes[1].status()["damage"]["stopped"] == 1
            with pytest.raises(GroupStopped):
                await c.nodes[1].bounds("log")
            await c.crash(1)
        # Nothing was given up: the row comes back, and so does the group.
        for name, image in before.items():
            (c.path / "node-1" / "meta" / name / "data.mdb").write_bytes(image)
        await c.start(1)
        await c.leader()
        assert [body for _, body in await c.read(1)] == bodies


async def test_a_majority_that_is_damaged_has_no_leader_and_says_why(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await history(c, False)
        for number in (2, 3):
            data = metadata(c, number, c.member(number).raft.log.last_index - 3)
            await c.crash(number)
            hurt_wal(c, number, data)
        await c.restart(1)
        await c.start(2)
        await c.start(3)
        with trio.move_on_after(0.5):
            await c.leader()
            raise AssertionError("a leader by votes of damaged members")
        assert [c.nodes[number].describe("log")["state"] for number in c.ids] == ["running", "mending", "mending"]


async def test_a_lost_generation_is_refilled_without_a_reader(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        await c.lead(1)
        bodies = await c.fill(1, 12, SIZE)
        await stable(c, 3)
        await c.nodes[3].snapshot()
        await c.nodes[3].compact()
        uid = c.member(3).uid
        await c.crash(3)
        for generation in (c.path / "node-3" / "payloads").glob("gen-*"):
            shutil.rmtree(generation)
        c.partition(3)
        # What is lost stays known over a restart, although the store's own rows name it no more.
        for _ in range(2):
            await c.start(3)
            assert c.system(3).store.lost(uid, 1, 12)
            await c.system(3).storage.meta_batch.commit(tuple, store=True)
            await c.crash(3)
        c.network.heal()
        await c.start(3)
        refill = c.system(3).repair.refill
        await until(lambda: not c.system(3).store.lost_ranges() and not refill.at_work, "refilled, and that is stored")
        assert refill.refilled
        await c.applied()
        c.partition(3)
        assert [body for _, body in await c.read(3)] == bodies
        await c.restart(3)
        assert not c.system(3).store.lost_ranges()


async def test_a_generation_that_fails_while_running_is_refilled(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        await c.lead(1)
        bodies = await c.fill(1, 12, SIZE)
        await stable(c, 3)
        await c.nodes[3].compact()
        system = c.system(3)
        (generation,) = system.store.generations()
        store = system.store._store  # type: ignore[attr-defined]
        store.fail(generation.id, GenerationFailed("a generation", "a page can't be read"))
        assert system.store.lost(c.member(3).uid, 1, 12)
        await until(lambda: not system.store.lost_ranges(), "refilled")
        c.partition(3)
        assert [body for _, body in await c.read(3)] == bodies


async def homes_in_wal(c: Cluster, number: int) -> list[Path]:
    """Have all that a node has written so far at home in WAL files, below a snapshot; return those."""
    await stable(c, number)
    await c.roll(number)
    await c.nodes[number].snapshot()
    system = c.system(number)
    assert system.storage.location.files.keys() == {1} and c.member(number).raft.log.snapshot_index >= 8
    await c.crash(number)
    return [path for path in (c.path / f"node-{number}" / "wal").glob("*.wal") if int(path.stem, 16) == 1]


async def test_a_home_that_is_gone_is_refilled(tmp_path: Path) -> None:
    """Who does not say that it lost something answers others as if that had been released."""
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        await c.lead(1)
        bodies = await c.fill(1, 8, SIZE)
        uid = c.member(3).uid
        (file,) = await homes_in_wal(c, 3)
        file.unlink()
        c.partition(3)
        for _ in range(2):
            await c.start(3)
            await c.nodes[3].compact()
            system = c.system(3)
            assert system.store.lost(uid, 1, 8) and not system.repair.log_repair.known
            assert not system.storage.location.files.keys() & {1}, "it is a home no more"
            await c.crash(3)
        c.network.heal()
        await c.start(3)
        refill = c.system(3).repair.refill
        await until(lambda: not c.system(3).store.lost_ranges() and not refill.at_work, "refilled, and that is stored")
        c.partition(3)
        assert [body for _, body in await c.read(3)] == bodies
        c.network.heal()
        await c.restart(3)
        assert not c.system(3).store.lost_ranges()
        await check_books(c, 3, bodies)


async def test_what_lived_in_a_home_that_is_gone_is_lost_and_nothing_else(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        await c.lead(1)
        bodies = await c.fill(1, 8, SIZE)
        uid = c.member(3).uid
        await c.nodes[1].truncate("log", 4)
        (file,) = await homes_in_wal(c, 3)
        file.unlink()
        c.partition(3)
        await c.start(3)
        system = c.system(3)
        (lost,) = system.store.lost_ranges()
        (alive,) = c.member(3).liveness.live_within((1, 0), (9, 0))
        assert lost[:2] == (uid, alive.first.index) and alive.first.index > 1
        c.network.heal()
        await until(lambda: not c.system(3).store.lost_ranges(), "refilled")
        c.partition(3)
        assert [body for _, body in await c.read(3, 4)] == bodies[4:]


async def test_a_home_that_is_gone_and_that_nobody_else_has_is_a_home_again_when_it_is_back(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, payload_cache_bytes=0) as c:
        await c.lead(1)
        bodies = await c.fill(1, 8, SIZE)
        (file,) = await homes_in_wal(c, 1)
        file.rename(tmp_path / "away")
        for _ in range(2):
            await c.start(1)
            await c.leader()
            with pytest.raises(Gone):
                await c.read(1)
            more = await c.fill(1, 8, SIZE, tag=b"m")
            await c.roll(1)
            await c.nodes[1].snapshot()
            await c.nodes[1].compact()
            assert [body for _, body in await c.read(1, c.log(1).end - 8)] == more
            bodies += more
            await c.crash(1)
        (tmp_path / "away").rename(file)
        await c.start(1)
        await c.leader()
        assert [body for _, body in await c.read(1)] == bodies
        assert not c.system(1).store.lost_ranges()
        await c.nodes[1].compact()
        await check_books(c, 1, bodies)


async def test_a_home_that_is_gone_is_not_kept_for_who_has_nothing_in_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A group whose entries there have no payload, and that nobody else has, kept it for good."""
    async with cluster(tmp_path, 1, payload_cache_bytes=0) as c:
        await c.create("other")
        await c.lead(1)
        await c.lead(1, "other")
        await c.fill(1, 8, SIZE)
        (file,) = await homes_in_wal(c, 1)
        file.unlink()
        await c.start(1)
        (home,) = c.system(1).storage.location.files.values()
        assert home.kept and home.shares.keys() == {c.member(1).uid}
        assert "group log: WAL file" in caplog.text and "group other: WAL file" not in caplog.text


async def test_places_of_payloads_that_are_lost_below_the_log(tmp_path: Path) -> None:
    """The segment is needed only to find payloads: the group goes on, and they come from the others."""
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        await c.lead(1)
        bodies = await c.fill(1, 8, SIZE)
        await stable(c, 3)
        data = metadata(c, 1, 5)
        await c.roll(3)
        await c.nodes[3].snapshot()
        assert c.member(3).raft.log.snapshot_index >= 8
        await c.crash(3)
        hurt_segments(c, 3, data)
        await c.start(3)
        await c.applied()
        assert c.member(3).raft.mend is None and not c.system(3).repair.log_repair.known
        await until(lambda: not c.system(3).store.lost_ranges(), "refilled")
        c.partition(3)
        assert [body for _, body in await c.read(3)] == bodies
        await check_books(c, 3, bodies)


async def test_payloads_below_a_snapshot_that_lay_in_a_damaged_wal_come_back(tmp_path: Path) -> None:
    """No segment had them when the WAL lost them, and the snapshot goes on without a word of where they are: nobody
    else may take this member's silence for their death."""
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        await c.lead(1)
        bodies = await c.fill(1, 6, SIZE)
        await stable(c, 3)
        await c.nodes[3].snapshot()
        data = metadata(c, 3, 4)
        uid = c.member(3).uid
        await c.crash(3)
        hurt_wal(c, 3, data)
        c.partition(3)
        for _ in range(2):
            await c.start(3)
            assert c.member(3).raft.mend is not None and c.member(3).raft.log.snapshot_index >= 6
            assert c.system(3).store.lost(uid, 4, 4)
            await c.crash(3)
        c.network.heal()
        await c.start(3)
        bodies += await c.fill(await c.leader(), 2, SIZE, tag=b"m")
        await mended(c, 3)
        refill = c.system(3).repair.refill
        await until(lambda: not c.system(3).store.lost_ranges() and not refill.at_work, "refilled, and that is stored")
        c.partition(3)
        assert [body for _, body in await c.read(3)] == bodies
        c.network.heal()
        await c.restart(3)
        assert not c.system(3).store.lost_ranges()
        await check_books(c, 3, bodies)


async def test_lost_places_are_stored_with_the_row_that_names_their_segment_no_more(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        await c.lead(1)
        await c.fill(1, 8, SIZE)
        await stable(c, 3)
        data = metadata(c, 1, 5)
        await c.roll(3)
        await c.nodes[3].snapshot()
        await c.crash(3)
        hurt_segments(c, 3, data)
        c.partition(3)
        await c.start(3)
        system, member = c.system(3), c.member(3)
        lost = system.store.lost_ranges()
        assert lost and system.store.lost(member.uid, 5, 5)
        await system.storage.meta_batch.commit(lambda: [rows.state(member)])
        await c.crash(3)
        await c.start(3)
        assert c.system(3).store.lost_ranges() == lost


async def test_a_hibernating_group_whose_rows_are_lost(tmp_path: Path) -> None:
    async with cluster(tmp_path, hibernate_after_ms=60) as c:
        bodies = await c.fill(await c.leader(), 4, 100)
        for number in c.ids:
            await c.nodes[number].compact()
        uid = c.system(3).names["log"]
        await until(lambda: all(uid in c.system(number).quiescence.table for number in c.ids))
        await c.crash(3)
        hurt_rows(c, 3, uid, StateRow.PREFIX)
        await c.start(3)
        await until(lambda: (known := c.system(3).repair.log_repair.known.get(uid)) is not None and known.sound)
        assert [body for _, body in await c.read(3)] == bodies
        await until(lambda: all(uid in c.system(number).quiescence.table for number in c.ids), "it rests again")


async def test_the_node_of_a_damaged_group_serves_all_others(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        names = [f"g{number}" for number in range(6)]
        for name in names:
            await c.create(name)
        bodies = await history(c, True)
        data = metadata(c, 3, c.member(3).raft.log.last_index - 3)
        await c.crash(3)
        hurt_wal(c, 3, data)
        await c.start(3)
        for name in names:
            await c.lead(3, name)
            await c.append(3, [(b"", b"on")], name)
        assert c.system(3).repair.log_repair.known.keys() == {c.member(3).uid}
        await mended(c, 3)
        assert [body for _, body in await c.read(3)] == bodies
        assert os.path.isdir(tmp_path / "node-3")


@pytest.mark.parametrize("prefix", [SnapshotRow.PREFIX, StateRow.PREFIX], ids=["snapshot", "checkpoint"])
@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "open"])
async def test_nothing_is_given_up_of_a_group_that_only_this_node_has(
    tmp_path: Path, prefix: bytes, sealed: bool
) -> None:
    """Its rows are lost, and with them what says which files it needs: the only copies stay where they are."""
    async with cluster(tmp_path, 1, payload_cache_bytes=0) as c:
        await c.create("other")
        await c.lead(1)
        bodies = await c.fill(1, 12, SIZE)
        await c.nodes[1].snapshot()
        if sealed:
            await c.roll(1)
        uid = c.member(1).uid
        await c.crash(1)
        assert hurt_rows(c, 1, uid, prefix) == 2
        for _ in range(2):
            await c.start(1)
            assert c.system(1).members[uid].state == "stopped"
            # What comes and goes beside it takes nothing of it along.
            await c.lead(1, "other")
            others = await c.fill(1, 2, SIZE, "other")
            await c.nodes[1].truncate("other", c.log(1, "other").end - 1)
            await c.nodes[1].snapshot()
            await c.nodes[1].compact()
            assert [body for _, body in await c.read(1, c.log(1, "other").start, name="other")] == others[-1:]
            await c.crash(1)
            files = [path.read_bytes() for path in sorted((tmp_path / "node-1" / "wal").glob("*.wal"))]
            assert all(any(body in file for file in files) for body in bodies)
            segments = [SegmentReader(Disk(), str(path)) for path in (tmp_path / "node-1" / "segments").glob("*.seg")]
            assert any(len(one.entries(uid, 1, 100)) >= 12 for one in segments)
            for one in segments:
                one.close()


async def test_a_log_that_starts_above_a_damaged_wal_takes_new_entries(tmp_path: Path) -> None:
    async with cluster(tmp_path, hibernate_after_ms=30, hibernate_move_bytes=1 << 20) as c:
        await c.lead(1)
        bodies = await c.fill(1, 6, SIZE)
        await stable(c, 3)
        damaged = metadata(c, 3, c.member(3).raft.log.last_index - 2)
        uid = c.member(3).uid
        # As a row, the log starts at its end; what the file in use has of it leads there no more.
        await until(lambda: uid in c.system(3).quiescence.table, "it sleeps")
        await c.crash(3)
        hurt_wal(c, 3, damaged)
        # The second start knows the damage, and where the WAL breaks off.
        c.partition(3)
        await c.start(3)
        await c.restart(3)
        c.network.heal()
        bodies += await c.fill(await c.leader(), 3, SIZE, tag=b"n")
        await until(lambda: c.member(3).state != "running" or c.log(3).end == len(bodies), "it caught up")
        assert c.member(3).state == "running", c.member(3).reason
        await c.restart(3)
        await c.applied()
        assert [body for _, body in await c.read(3)] == bodies


async def test_a_leader_repairs_the_row_of_an_entry_that_a_follower_needs(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        await c.lead(1)
        bodies = await c.fill(1, 3, SIZE)
        await stable(c, 3)
        await c.crash(3)
        bodies += await c.fill(1, 6, SIZE)
        await c.applied()
        damaged = metadata(c, 1, c.member(1).raft.log.last_index - 2)
        await c.roll(1)
        await c.nodes[1].compact()
        await c.crash(1)
        assert sum(flip(path, damaged) for path in (c.path / "node-1" / "payloads").glob("gen-*/data.mdb")) == 1
        await c.start(1)
        await c.lead(1)
        # Only node 1 can send what node 3 lacks.
        await c.start(3)
        await c.applied()
        assert [body for _, body in await c.read(3)] == bodies
        assert c.system(1).repair.payload_repair.fetched


async def test_a_leader_that_can_not_read_what_is_not_committed_lets_another_lead(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        await c.lead(1)
        await c.fill(1, 3, SIZE)
        await c.applied()
        for number in (2, 3):
            await c.crash(number)
        # On one disk only, and of that its payload is damaged: whoever has it not may well lead.
        body = b"lost".ljust(SIZE, b".")
        member = c.member(1)
        frame = memoryview(b"".join(encode_frame([(b"", body)], command=APPEND)))
        c.system(1).replicas.commands.submit(member.uid, frame, DROP, 1)
        await until(lambda: member.raft.log.stable == member.raft.log.last_index > member.raft.commit)
        # A batch that nothing follows would count as torn, and be cut.
        await until(lambda: c.system(1).storage.group_commit.sealed and not c.system(1).storage.group_commit.busy)
        await c.crash(1)
        assert hurt_file(c, 1, [body]) == 1
        await c.start(1)
        await c.start(2)
        await until(lambda: c.member(1).raft.role == LEADER, "node 1 leads, as its log is the longest")
        await c.start(3)
        bodies = await c.fill(await c.leader(), 2, SIZE, tag=b"n")
        await c.applied()
        for number in c.ids:
            assert [found for _, found in await c.read(number, 3)] == bodies


async def test_neighbouring_entries_damaged_on_every_node_are_all_there(tmp_path: Path) -> None:
    # The helical case of fault D9: each has one damaged row of its own, and two others have that entry.
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        await c.lead(1)
        bodies = await c.fill(1, 9, SIZE)
        await c.applied()
        for number in c.ids:
            await stable(c, number)
        last = c.member(1).raft.log.last_index
        damaged = {number: metadata(c, number, last - 5 + at) for at, number in enumerate((3, 1, 2))}
        for number in c.ids:
            await c.roll(number)
            await c.nodes[number].compact()
        for number in c.ids:
            await c.crash(number)
            found = (c.path / f"node-{number}" / "payloads").glob("gen-*/data.mdb")
            assert sum(flip(path, damaged[number]) for path in found) == 1
        for number in c.ids:
            await c.start(number)
        await c.leader()
        await c.applied()
        for number in c.ids:
            assert [body for _, body in await c.read(number)] == bodies


async def test_a_read_that_meets_a_damaged_entry_without_payload_has_the_log_mended(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        await c.lead(1)
        bodies = await c.fill(1, 2, SIZE)
        await c.lead(3)
        bodies += await c.fill(3, 2, SIZE)
        await c.lead(1)
        bodies += await c.fill(1, 2, SIZE)
        await stable(c, 3)
        log = c.member(3).raft.log
        noop = next(entry for entry in reversed(log.entries) if not entry.body_bytes and entry.index < log.last_index)
        await c.roll(3)
        hurt_segments(c, 3, bytes(noop.data))
        first = c.member(3)
        with pytest.raises(Corrupt):
            await c.read(3)
        await until(lambda: c.member(3) is not first, "another replica takes its place")
        await c.applied()
        await until(lambda: c.member(3).raft.mend is None, "it is mended")
        assert [body for _, body in await c.read(3)] == bodies


def lose_batch(c: Cluster, number: int, data: bytes) -> None:
    """Zeros where a WAL batch of one block was: neither its header nor its trailer is left."""
    (path,) = [path for path in (c.path / f"node-{number}" / "wal").glob("*.wal") if data in path.read_bytes()]
    at = path.read_bytes().index(data) // BLOCK * BLOCK
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes(BLOCK))


async def test_new_damage_among_records_that_older_damage_spared_is_noticed(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await c.create("other")
        await c.lead(1)
        await c.lead(1, "other")
        bodies = await c.fill(1, 6, SIZE)
        await stable(c, 3)
        spared = metadata(c, 3, c.member(3).raft.log.last_index - 2)
        for _ in range(3):
            await c.fill(1, 1, 20, "other")
            await stable(c, 3, "other")
        nobodys = metadata(c, 3, c.member(3, "other").raft.log.last_index - 1, "other")
        await c.crash(3)
        # Nobody can tell whose records were in it: both groups ask the others, one of them for nothing.
        lose_batch(c, 3, nobodys)
        await c.start(3)
        await mended(c, 3)
        await mended(c, 3, "other")
        await stable(c, 3)
        await c.crash(3)
        hurt_wal(c, 3, spared)
        c.partition(3)
        await c.start(3)
        raft = c.member(3).raft
        assert raft.mend is not None, f"it takes part with {raft.log.last_index} entries"
        c.network.heal()
        await mended(c, 3)
        assert [body for _, body in await c.read(3)] == bodies


async def test_a_leader_whose_released_payloads_are_damaged_brings_a_follower_up(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        await c.lead(1)
        await c.fill(1, 3, SIZE)
        await stable(c, 3)
        await c.crash(3)
        bodies = await c.fill(1, 6, SIZE, tag=b"r")
        await c.nodes[1].truncate("log", 7)
        await c.applied()
        # Nobody else has what was released either: the bytes are of no use to anybody.
        await c.crash(1)
        assert hurt_file(c, 1, bodies[:2]) == 2
        await c.start(1)
        await c.lead(1)
        await c.start(3)
        await c.applied()
        assert [body for _, body in await c.read(3, 7)] == bodies[4:]


async def test_a_read_before_an_anchor_whose_entry_is_damaged_is_repaired(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        await c.lead(1)
        bodies = await c.fill(1, 2, SIZE)
        # An entry without payload: whether all records are there is counted up to the next anchor.
        await c.lead(2)
        bodies += await c.fill(2, 2, SIZE)
        while len(c.log(3).anchors) < 3:
            bodies += await c.fill(2, 1, SIZE)
            await c.applied()
        bodies += await c.fill(2, 2, SIZE)
        await stable(c, 3)
        index = next(index for offset, index in c.log(3).anchors if offset > 2)
        damaged = metadata(c, 3, index)
        await c.roll(3)
        await c.nodes[3].compact()
        await c.crash(3)
        assert sum(flip(path, damaged) for path in (c.path / "node-3" / "payloads").glob("gen-*/data.mdb")) == 1
        await c.start(3)
        await c.applied()
        assert [body for _, body in await c.read(3)] == bodies


@pytest.mark.parametrize("homes", [False, True], ids=["all files", "all but homes"])
async def test_a_node_whose_newest_wal_file_is_gone_starts_and_is_mended(tmp_path: Path, homes: bool) -> None:
    """Whatever it writes from then on is replayed, also where it was mended before."""
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        bodies = await history(c, False)
        data = metadata(c, 3, c.member(3).raft.log.last_index - 3)
        await c.crash(3)
        hurt_wal(c, 3, data)
        await c.start(3)
        await mended(c, 3)
        for round in range(2):
            await c.applied()
            await stable(c, 3)
            await c.nodes[3].compact()
            if homes:
                bodies += await c.fill(await c.leader(), 1, SIZE, tag=b"h")
                await stable(c, 3)
                await c.roll(3)
                # A file without payload is nobody's home.
                await c.lead(2)
                await c.lead(1)
                await stable(c, 3)
                await c.roll(3)
            bodies += await c.fill(await c.leader(), 2, SIZE, tag=b"n")
            await stable(c, 3)
            kept = c.system(3).storage.location.files.keys()
            assert bool(kept) == homes, round
            if homes:
                assert max(kept) + 1 < c.system(3).wal.current, "there are flushed ones between"
            await c.crash(3)
            for path in (c.path / "node-3" / "wal").glob("*.wal"):
                if int(path.stem, 16) not in kept:
                    path.unlink()
            await c.start(3)
            assert c.member(3).raft.mend is not None
            await mended(c, 3)
            bodies += await c.fill(await c.leader(), 1, SIZE, tag=b"a")
            await stable(c, 3)
            await c.restart(3)
            await c.applied()
            assert c.member(3).raft.mend is None
        await proves(c, 3, bodies)
