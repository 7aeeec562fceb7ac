"""Who holds up the oldest WAL file and the oldest segment is named, and asked to let it go."""

from __future__ import annotations

from pathlib import Path

from logyard.machines.log.command import APPEND
from logyard.protocol.frame import encode_frame
from logyard.protocol.pending import DROP

from .cluster import KIB, cluster, until


async def test_a_slow_log_is_asked_for_a_snapshot_and_its_segment_goes(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, segments_max=1, payload_cache_bytes=0, migrate_budget_bytes=0) as c:
        await c.create("slow")
        await c.fill(1, 1, 100, name="slow")
        storage = c.system(1).storage
        await c.fill(1, 30, 40 * KIB)
        await c.roll(1)
        oldest = storage.gc_blockers.status()["segment"]
        assert oldest == 1
        assert ["slow", "no snapshot at 2"] in storage.gc_blockers.status()["segment_names"]
        assert c.member(1, "slow").snapshot_index == 0
        await c.fill(1, 30, 40 * KIB)
        await c.roll(1)
        storage.janitor.look()
        await until(lambda: storage.gc_blockers.asked > 0, "the groups of the oldest segment are asked")
        assert c.member(1, "slow").snapshot_index == 2
        await until(lambda: not storage.segments.path(oldest).exists(), "nothing holds the oldest segment")
        assert storage.gc_blockers.status()["segment"] != oldest


async def test_what_is_not_committed_holds_a_wal_file_and_is_named(tmp_path: Path) -> None:
    async with cluster(tmp_path, migrate_budget_bytes=0) as c:
        await c.lead(1)
        await c.fill(1, 2, 100)
        await c.applied()
        await c.crash(2)
        await c.crash(3)
        member = c.member(1)
        (frame,) = encode_frame([(b"", b"x" * 100)], command=APPEND)
        c.system(1).replicas.commands.submit(member.uid, memoryview(frame), DROP, 0)
        last = member.raft.log.last_index + 1
        await until(lambda: member.raft.log.stable == last, "the leader has it on its disk")
        storage = c.system(1).storage
        await c.roll(1)
        status = storage.gc_blockers.status()
        assert (status["wal_file"], status["wal_groups"]) == (1, 1)
        assert status["wal_names"] == [["log", f"entry {last} is not committed"]]
        await c.start(2)
        await c.start(3)
        await until(lambda: member.raft.commit >= last, "it is committed")
        storage.janitor.look()
        await until(lambda: 1 not in dict(c.system(1).wal.files), "the file was let go")
        assert storage.gc_blockers.status()["wal_file"] != 1
