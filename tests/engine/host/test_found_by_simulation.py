"""Histories that the simulator found (tests/sim), each cut down to what it takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from logyard.engine.entry import Entry
from logyard.engine.host.outbound import Outbound
from logyard.engine.log.record import BLOCK
from logyard.engine.raft.core import LEADER
from logyard.engine.raft.messages import TRANSFER, VOTE, Message
from logyard.engine.replica.member import Member
from logyard.engine.replica.proposals import DROP
from logyard.machines.log.command import APPEND
from logyard.protocol.errors import Corrupt, Gone
from logyard.protocol.frame import encode_frame

from .cluster import Cluster, cluster, until
from .test_mending import SIZE, flip, hurt_segments, hurt_wal, mended, metadata, stable
from .test_repair import hurt_file


async def test_a_vote_without_entries_outlives_the_file_that_holds_it(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await c.append(await c.leader(), [(b"", b"x")])
        await c.applied()
        await c.roll(3)
        c.partition(3)
        member = c.member(3)
        raft = member.raft
        term = raft.term + 5
        last = raft.log.last_index
        vote = Message(VOTE, member.uid, 3, 2, term, last, raft.log.last_term, context=TRANSFER)
        c.system(3).inbound.on_messages(2, [vote])
        assert (raft.term, raft.vote) == (term, 2)
        # Its only record of that is in the file in use; then that file gets its segment in another life.
        await c.restart(3)
        assert (c.member(3).raft.term, c.member(3).raft.vote) == (term, 2)
        await c.roll(3)
        await c.restart(3)
        assert (c.member(3).raft.term, c.member(3).raft.vote) == (term, 2)


async def test_a_log_that_starts_above_a_damaged_wal_takes_new_entries(tmp_path: Path) -> None:
    async with cluster(tmp_path, hibernate_after_ms=30, hibernate_move_bytes=1 << 20) as c:
        await c.lead(1)
        bodies = await c.fill(1, 6, SIZE)
        await stable(c, 3)
        damaged = metadata(c, 3, c.member(3).raft.log.last_index - 2)
        uid = c.member(3).uid
        # As a row, the log starts at its end; what the file in use has of it leads there no more.
        await until(lambda: uid in c.system(3).quiesced, "it sleeps")
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
        assert c.system(1).repair.fetched


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
        c.system(1).commands.submit(member.uid, frame, DROP, 1)
        await until(lambda: member.raft.log.stable == member.raft.log.last_index > member.raft.commit)
        # A batch that nothing follows would count as torn, and be cut.
        await until(lambda: c.system(1).group_commit.sealed and not c.system(1).group_commit.busy)
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


def lose_batch(c: Cluster, number: int, data: bytes) -> None:
    """Zeros where a WAL batch of one block was: neither its header nor its trailer is left."""
    (path,) = [path for path in (c.path / f"node-{number}" / "wal").iterdir() if data in path.read_bytes()]
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


async def test_a_snapshots_payloads_come_from_who_became_a_member_after_it(tmp_path: Path) -> None:
    async with cluster(tmp_path, 4, group="", payload_cache_bytes=0) as c:
        await until(lambda: all(len(one.system.live) == 4 for one in c.nodes.values()), "all are live")
        await c.create(members=[1, 2])
        await c.lead(1)
        bodies = await c.fill(1, 6, SIZE)
        await until(lambda: c.member(1).raft.log.stable == c.member(1).raft.applied == c.member(1).raft.log.last_index)
        damaged = metadata(c, 1, c.member(1).raft.log.last_index - 2)
        await c.roll(1)
        await c.nodes[1].compact()
        await c.crash(1)
        assert sum(flip(path, damaged) for path in (c.path / "node-1" / "payloads").glob("gen-*/data.mdb")) == 1
        await c.start(1)
        await c.lead(1)
        await c.nodes[1].snapshot(["log"])
        assert c.member(1).raft.log.first_index > 6
        assert (await c.nodes[1].change_members("log", "add", 3))["voters"]
        await until(lambda: c.replica(3, "log") is not None and c.log(3).end == len(bodies), "node 3 has it all")
        await c.crash(2)
        # The snapshot's members are node 1, which lost a row, and node 2, which is away.
        await c.nodes[1].change_members("log", "add", 4)
        await until(lambda: c.replica(4, "log") is not None and c.log(4).end == len(bodies), "node 4 has it all")
        assert [body for _, body in await c.read(4)] == bodies


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


async def test_a_group_that_slept_while_a_node_was_asked_for_room_is_changed_as_it_is_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path, 4, group="", hibernate_after_ms=30) as c:
        await until(lambda: all(len(one.system.live) == 4 for one in c.nodes.values()), "all are live")
        await c.create(members=[1, 2, 3])
        await c.lead(1)
        bodies = await c.fill(1, 2, SIZE)
        system, old = c.system(1), c.member(1)

        async def asleep(member: Member, fresh: object) -> None:
            await until(lambda: member.uid in system.quiesced, "it sleeps")

        monkeypatch.setattr(c.nodes[1].membership, "_check_room", asleep)
        with trio.fail_after(15):
            assert 4 in (await c.nodes[1].change_members("log", "add", 4))["voters"]
        assert c.member(1) is not old and old.raft.log.last_index < c.member(1).raft.log.last_index
        await until(lambda: c.replica(4, "log") is not None and c.log(4).end == len(bodies), "node 4 has it all")
