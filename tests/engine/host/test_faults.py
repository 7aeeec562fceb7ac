"""One fault, one group (law 7): damage, raising machines, failing disks, and what a node does about its directory."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import trio

from logyard.engine.disk.faulty import FaultyDisk
from logyard.engine.machine import Applied, Context, PayloadRange, PayloadRef, Reject, Sections
from logyard.engine.raft.messages import TRANSFER, VOTE, Message
from logyard.machines.log import AppendLog
from logyard.protocol.errors import DirectoryInUse, GroupStopped, LogyardError, WalFailed, WrongIdentity
from logyard.service.node import build_system

from .cluster import KIB, Cluster, cluster, open_descriptors, raft_of, until
from .test_storage import damage


class Fuse:
    """Counts commands one at a time; raises on one of them, refuses another."""

    version = 1

    def __init__(self) -> None:
        self.count = 0

    def apply(self, context: Context, command: bytes, refs: tuple[PayloadRef, ...]) -> Applied:
        if command == b"boom":
            raise ZeroDivisionError("the fuse blew")
        if command == b"no":
            raise Reject("refused", "not this one")
        self.count += 1
        return Applied(b"%d" % self.count)

    def snapshot(self) -> Sections:
        return {"count": b"%d" % self.count}

    def restore(self, sections: Sections) -> None:
        self.count = int(sections["count"])

    def live_refs(self) -> Iterable[PayloadRange]:
        return ()


def machines(name: str, arguments: dict[str, Any]) -> Any:
    return Fuse() if name == "fuse" else AppendLog()


async def goes_on(c: Cluster, name: str = "other") -> None:
    """Another group of the same nodes commits."""
    await c.append(await c.leader(name), [(b"", b"goes on")], name)
    await c.applied(name)


async def test_a_raising_machine_halts_its_group_on_every_start_and_no_other(tmp_path: Path) -> None:
    async with cluster(tmp_path, group="other", machines=machines) as c:
        await c.create("fuse", machine="fuse")
        leader = await c.leader("fuse")
        node = c.nodes[leader]
        assert await node.command(c.member(leader, "fuse"), b"one") == b"1"
        with pytest.raises(LogyardError) as caught:
            await node.command(c.member(leader, "fuse"), b"no")
        assert caught.value.code == "refused"
        with pytest.raises(LogyardError) as caught:
            await node.command(c.member(leader, "fuse"), b"boom")
        assert caught.value.code == "unknown" and caught.value.retry == "same_session"

        def halted() -> bool:
            return all(c.member(number, "fuse").state == "halted" for number in c.ids)

        await until(halted)
        for number in c.ids:
            row = c.nodes[number].describe("fuse")
            assert (
                row["state"] == "halted" and "ZeroDivisionError" in row["reason"] and "the fuse blew" in row["reason"]
            )
            assert c.nodes[number].status()["stopped"] == 1 and len(c.nodes[number].groups()) == 2
        with pytest.raises(GroupStopped):
            await node.command(c.member(leader, "fuse"), b"two")
        with pytest.raises(GroupStopped):
            await c.system(leader).replicas.leadership.read_index(c.member(leader, "fuse"))
        await goes_on(c)
        for number in c.ids:
            await c.crash(number)
        for number in c.ids:
            await c.start(number)
        await goes_on(c)
        await until(halted)


async def test_a_damaged_record_stops_its_group_alone_and_for_good(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1) as c:
        await c.create("other", [1])
        await c.append(1, [(b"", b"x")])
        await c.append(1, [(b"", b"y")])
        await c.append(1, [(b"", b"x")], "other")
        data = c.member(1).raft.log.entry(c.member(1).raft.applied).data  # type: ignore[union-attr]
        term = c.member(1).raft.term
        await c.append(1, [(b"", b"z")], "other")
        await c.crash(1)
        for path in (c.path / "node-1" / "wal").iterdir():
            damage(path, data, optional=True)
        await c.start(1)
        member = c.member(1)
        assert member.state == "stopped" and "damaged" in member.reason
        await c.leader("other")
        await goes_on(c)
        # The file that shows the damage goes; the group must not come back with what is left.
        for _ in range(2):
            await c.fill(1, 40, 40 * KIB, "other")
            await c.nodes[1].compact()
            await c.restart(1)
            assert c.member(1).state == "stopped" and "damaged" in c.member(1).reason
            await c.leader("other")
        with pytest.raises(GroupStopped):
            await c.nodes[1].bounds("log")
        with pytest.raises(GroupStopped):
            await c.nodes[1].delete_group("log")
        await c.nodes[1].delete_group("log", force=True)
        await c.create("log", [1])
        assert c.member(1).raft.term <= term and await c.append(1, [(b"", b"new")]) == range(0, 1)
        await c.restart(1)
        await c.leader()
        assert await c.read(1) == [(b"", b"new")]


async def test_a_damaged_member_does_not_vote_and_the_others_go_on(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await c.lead(1)
        await c.fill(1, 3, 100)
        await c.applied()
        entry = c.member(3).raft.log.entry(c.member(3).raft.applied)
        assert entry is not None
        await c.append(1, [(b"", b"behind it")])
        await c.applied()
        await c.crash(3)
        for path in (c.path / "node-3" / "wal").iterdir():
            damage(path, entry.data, optional=True)
        await c.append(1, [(b"", b"more")])
        await c.crash(1)
        await c.start(3)
        assert c.member(3).raft.mend is not None
        term = c.member(2).raft.term
        with trio.move_on_after(0.4):
            await c.leader(among=[2])
            raise AssertionError("a leader by a vote of a damaged member")
        assert c.member(2).raft.term == term, "pre-vote holds the term"
        await c.start(1)
        await c.append(await c.leader(), [(b"", b"again")])
        await until(lambda: c.member(3).raft.mend is None)


async def test_a_damaged_segment_stops_the_groups_that_need_it_alone(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, payload_cache_bytes=0) as c:
        await c.fill(1, 5, 100)
        data = c.member(1).raft.log.entry(c.member(1).raft.applied).data  # type: ignore[union-attr]
        await c.roll(1)
        await c.create("other", [1])
        await c.fill(1, 5, 100, "other")
        await c.crash(1)
        (segment,) = (c.path / "node-1" / "segments").glob("*.seg")
        damage(segment, data)
        await c.start(1)
        await c.leader("other")
        await goes_on(c)
        await until(lambda: c.member(1).state == "stopped")
        assert "damaged" in c.member(1).reason


async def test_what_a_group_that_nobody_can_mend_had_behind_its_damage_outlives_the_wal_file(tmp_path: Path) -> None:
    """A segment can't be read at one start; what the WAL had of the group gets a segment of its own meanwhile."""
    async with cluster(tmp_path, 1, payload_cache_bytes=0) as c:
        await c.fill(1, 5, 100)
        data = c.member(1).raft.log.entry(c.member(1).raft.applied).data  # type: ignore[union-attr]
        await c.roll(1)
        await c.create("other", [1])
        await c.append(1, [(b"", b"behind it")])
        want = await c.read(1)
        await c.crash(1)
        (segment,) = (c.path / "node-1" / "segments").glob("*.seg")
        whole = segment.read_bytes()
        damage(segment, data)
        await c.start(1)
        await until(lambda: c.member(1).state == "stopped")
        await c.leader("other")
        await c.append(1, [(b"", b"x")], "other")
        await c.roll(1)
        await c.fill(1, 5, 100, "other")
        await c.crash(1)
        segment.write_bytes(whole)
        await c.start(1)
        await c.leader()
        assert await c.read(1) == want


async def test_a_missing_segment_stops_the_groups_that_need_it_alone(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1) as c:
        await c.fill(1, 5, 100)
        await c.nodes[1].compact()
        await c.create("other", [1])
        await c.fill(1, 5, 100, "other")
        await c.crash(1)
        (segment,) = (c.path / "node-1" / "segments").glob("*.seg")
        segment.unlink()
        await c.start(1)
        await c.leader("other")
        await goes_on(c)
        await until(lambda: c.member(1).state == "stopped")


@pytest.mark.parametrize("call", ["datasync", "write"])
async def test_a_failing_disk_ends_acknowledgements_and_the_node(tmp_path: Path, call: str) -> None:
    disk = FaultyDisk()
    # Without probes: one of a disk that had nothing to do would meet the failure, and try again.
    async with cluster(tmp_path, disks={1: disk}, disk_probe_ms=60_000) as c:
        await c.lead(1)
        acknowledged = await c.fill(1, 3, 100)
        await c.applied()
        disk.fail(call, 1, errno.EIO)
        with pytest.raises(LogyardError) as caught, trio.fail_after(5):
            await c.append(1, [(b"", b"lost?")])
        assert caught.value.code == "wal_failed"
        await until(lambda: 1 in c.failures)
        assert isinstance(c.failures[1], WalFailed)
        synced = disk.fdatasyncs
        await c.crash(1)
        new = await c.leader()
        await c.append(new, [(b"", b"after")])
        assert disk.fdatasyncs == synced, "nothing is written after a failure"
        await c.start(1)
        await c.applied()
        for number in c.ids:
            bodies = [body for _, body in await c.read(number)]
            assert bodies[:3] == acknowledged and bodies[-1] == b"after"


@pytest.mark.parametrize("call", ["write", "sync_file", "rename"])
async def test_a_failing_segment_job_is_done_again_and_forgets_no_vote(tmp_path: Path, call: str) -> None:
    disk = FaultyDisk()
    async with cluster(tmp_path, 1, disks={1: disk}) as c:
        await c.fill(1, 3, 40 * KIB)
        system, member = c.system(1), c.member(1)
        term, vote = member.raft.term, member.raft.vote
        async with system.storage.janitor.lock:
            sealed = await system.storage.group_commit.exclusive(system.wal.roll)
            assert sealed is not None
            system.storage.segment_writer.unflushed.add([sealed])
            disk.fail(call, 1, errno.EIO)
        system.storage.janitor.look()
        await until(lambda: call not in disk._plans)
        system.storage.janitor.look()
        await until(lambda: sealed.file in system.storage.location.files)
        await c.nodes[1].compact()
        await c.crash(1)
        system = c.build(1)
        await system.open()
        assert (system.member("log").raft.term, system.member("log").raft.vote) == (term, vote)
        system.close()
        await c.start(1)
        await c.leader()
        assert len(await c.read(1)) == 3


async def test_a_follower_whose_sync_failed_acknowledges_nothing(tmp_path: Path) -> None:
    disk = FaultyDisk()
    async with cluster(tmp_path, disks={2: disk}) as c:
        await c.lead(1)
        await c.fill(1, 2, 100)
        await c.applied()
        await c.crash(3)
        disk.fail("datasync", 1, errno.EIO)
        with trio.move_on_after(0.3) as scope:
            await c.append(1, [(b"", b"stored once")])
        assert scope.cancelled_caught, "one durable copy is no majority"
        await until(lambda: 2 in c.failures)


async def test_a_vote_alone_in_a_file_outlives_a_failed_segment_job(tmp_path: Path) -> None:
    disk = FaultyDisk()
    async with cluster(tmp_path, disks={3: disk}) as c:
        await c.lead(1)
        await c.fill(1, 2, 100)
        await c.applied()
        # Nobody may give it another entry or another term while its file is sealed.
        c.partition(3)
        await c.roll(3)
        system, member = c.system(3), c.member(3)
        term = member.raft.term
        member.raft.campaign(True)
        system.ready_loop.mark(member)
        await until(lambda: raft_of(member).safe and member.raft.term == term + 1)
        async with system.storage.janitor.lock:
            sealed = await system.storage.group_commit.exclusive(system.wal.roll)
            assert sealed is not None and not sealed.entries
            system.storage.segment_writer.unflushed.add([sealed])
            disk.fail("sync_file", 1, errno.EIO)
        system.storage.janitor.look()
        await until(lambda: "sync_file" not in disk._plans)
        await c.nodes[3].compact()
        await c.crash(3)
        system = c.build(3)
        await system.open()
        assert (system.member("log").raft.term, system.member("log").raft.vote) == (term + 1, 3)
        system.close()


async def test_a_directory_has_one_owner_and_one_identity(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1) as c:
        with pytest.raises(DirectoryInUse):
            await c.build(1).open()
        await c.append(1, [(b"", b"mine")])
        await c.crash(1)
        before = open_descriptors()
        for node, name in ((2, "test"), (1, "another")):
            stranger = build_system(tmp_path / "node-1", node, name, c.config)
            with pytest.raises(WrongIdentity):
                await stranger.open()
        assert open_descriptors() == before
        await c.start(1)
        await c.leader()
        assert await c.read(1) == [(b"", b"mine")]


async def test_a_retransmission_does_not_fill_the_cache(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=64 * KIB) as c:
        await c.lead(1)
        for _ in range(4):
            await c.fill(1, 5, 30 * KIB)
            # What was under way is sent again; duplicates never reach the log.
            c.network.partition([1], [2, 3], one_way=True)
            with trio.move_on_after(0.02):
                await c.append(1, [(b"", b"d" * 30 * KIB)])
            c.network.heal()
            await c.applied()
            await c.lead(1)
        await c.fill(1, 10, 30 * KIB)
        await c.applied()
        for number in c.ids:
            held = [entry for entry in c.member(number).raft.log.entries if entry.bodies and entry.body_bytes]
            assert sum(entry.body_bytes for entry in held) <= 64 * KIB + 3 * 31 * KIB


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
        c.system(3).host.inbound.on_messages(2, [vote])
        assert (raft.term, raft.vote) == (term, 2)
        # Its only record of that is in the file in use; then that file gets its segment in another life.
        await c.restart(3)
        assert (c.member(3).raft.term, c.member(3).raft.vote) == (term, 2)
        await c.roll(3)
        await c.restart(3)
        assert (c.member(3).raft.term, c.member(3).raft.vote) == (term, 2)
