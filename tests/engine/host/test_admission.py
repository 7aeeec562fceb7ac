"""Back-pressure in bytes (law 9): every stage says when it is full, a full node can be emptied, a slow follower costs
the leader nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from logyard.engine.config import SystemConfig
from logyard.engine.host import admission as budget
from logyard.engine.host.admission import Drain
from logyard.machines.log.command import APPEND
from logyard.protocol.errors import Busy
from logyard.protocol.frame import encode_frame
from logyard.protocol.pending import PendingReply

from .cluster import KIB, MIB, Cluster, cluster, until
from .slow_disk import SlowDisk


def push(c: Cluster, size: int, name: str = "log", number: int = 1) -> PendingReply[bytes]:
    """Submit one record of about `size` bytes without waiting; raises `Busy`."""
    sink: PendingReply[bytes] = PendingReply()
    frame = b"".join(encode_frame([(b"", bytes(size))], command=APPEND))
    c.system(number).replicas.commands.submit(c.member(number, name).uid, memoryview(frame), sink, 0)
    return sink


async def at_rest(c: Cluster) -> None:
    """Until nothing is being written."""
    group_commit = c.system(1).storage.group_commit
    await until(lambda: not group_commit.busy and group_commit.sealed and not group_commit.items, "the log is at rest")


async def test_a_hanging_sync_is_seen_from_outside(tmp_path: Path) -> None:
    disk = SlowDisk()
    async with cluster(tmp_path, 1, disks={1: disk}) as c:
        group_commit = c.system(1).storage.group_commit
        await at_rest(c)
        assert group_commit.stalled_s() == 0.0
        disk.hang(group_commit)
        try:
            sink = push(c, 64 * KIB)
            await until(lambda: group_commit.stalled_s() > 0.05, "the hanging sync shows")
            status = group_commit.status()
            assert status["stalled_ms"] >= 50 and status["queued_bytes"] >= 64 * KIB
        finally:
            disk.gate.set()
        await sink.wait(trio.Event)
        await until(lambda: not group_commit.busy, "the batch is done")
        assert group_commit.stalled_s() == 0.0
        status = c.nodes[1].status()["wal"]
        assert status["sync_ms_max"] >= 20 and status["written_bytes"] >= 64 * KIB and status["queued_bytes"] == 0


STAGES: list[tuple[str, dict[str, Any], int]] = [
    (budget.GROUP, {"group_inflight_bytes": MIB}, MIB),
    (budget.NODE, {"group_inflight_bytes": MIB, "node_inflight_bytes": MIB}, MIB),
    (budget.WAL_QUEUE, {"wal_queue_bytes_max": MIB}, MIB),
    (budget.MEMORY, {"node_memory_bytes": 32 * MIB, "payload_cache_bytes": 0}, 32 * MIB),
]


@pytest.mark.parametrize(("cause", "limits", "bound"), STAGES, ids=[stage[0] for stage in STAGES])
async def test_a_full_stage_names_itself_and_can_be_emptied(
    tmp_path: Path, cause: str, limits: dict[str, Any], bound: int
) -> None:
    disk = SlowDisk()
    limits = {"group_inflight_bytes": 64 * MIB, "wal_queue_bytes_max": 64 * MIB, **limits}
    async with cluster(tmp_path, 1, disks={1: disk}, **limits) as c:
        await c.create("victim")
        if cause == budget.NODE:
            await c.create("other")
        await c.fill(1, 3, KIB)
        await at_rest(c)
        books = c.system(1).admission
        disk.hang(c.system(1).storage.group_commit)
        try:
            # One on its way to the disk; what is marked in this turn waits behind it.
            first = push(c, 64 * KIB)
            await until(lambda: c.system(1).storage.group_commit.busy, "the write is under way")
            taken: list[PendingReply[bytes]] = [first]
            if cause == budget.NODE:
                taken.append(push(c, 300 * KIB, "other"))
            busy = None
            while busy is None:
                some, busy = await filled_in_turns(c, 100 * KIB)
                taken += some
            assert busy.cause == cause and 0 < busy.retry_after <= budget.RETRY_S_MAX
            assert c.system(1).counters.busy == {cause: 1}
            assert bound * 0.6 < books.memory() and books.inflight <= bound + 200 * KIB
            # A truncation is let in where an append is not.
            truncated: list[int] = []
            async with trio.open_nursery() as nursery:

                async def truncate() -> None:
                    truncated.append(await c.nodes[1].truncate("log", 2))

                nursery.start_soon(truncate)
                nursery.start_soon(c.nodes[1].delete_group, "victim")
                await until(lambda: c.system(1).storage.group_commit.items, "the truncation is queued")
                disk.gate.set()
        finally:
            disk.gate.set()
        assert truncated == [2] and "victim" not in c.system(1).names
        for sink in taken:
            await sink.wait(trio.Event)
        proposals = c.member(1).proposals
        assert books.inflight == books.queued == proposals.inflight_bytes == proposals.queue_bytes == 0
        await c.append(1, [(b"", bytes(100 * KIB))])


async def test_too_much_wal_without_segments_names_itself_and_is_left_behind(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, wal_unflushed_bytes_max=4 * MIB) as c:
        storage, books = c.system(1).storage, c.system(1).admission
        await c.fill(1, 3, KIB)
        async with storage.janitor.lock:
            # No segment is made now: sealed files pile up.
            with pytest.raises(Busy) as busy:
                for _ in range(100):
                    await c.append(1, [(b"", bytes(100 * KIB))])
            assert busy.value.cause == budget.WAL_UNFLUSHED and storage.segment_writer.unflushed.backlog_files == 4
            assert await c.nodes[1].truncate("log", 2) == 2
            metadata = books.memory()
            assert metadata > 4 * 256
        await until(lambda: not storage.segment_writer.unflushed.backlog_files, "segments are made")
        await c.append(1, [(b"", bytes(100 * KIB))])
        await until(lambda: c.system(1).storage.group_commit.metadata_bytes < 20 * KIB, "memtables are given back")


async def filled_in_turns(c: Cluster, size: int) -> tuple[list[PendingReply[bytes]], Busy | None]:
    """One frame, and a turn of the loop that proposes it."""
    try:
        sink = push(c, size)
    except Busy as busy:
        return [], busy
    await trio.lowlevel.checkpoint()
    return [sink], None


async def test_what_is_larger_than_a_budget_goes_alone(tmp_path: Path) -> None:
    limits: dict[str, Any] = {"group_inflight_bytes": 64 * KIB, "node_inflight_bytes": MIB, "wal_queue_bytes_max": MIB}
    async with cluster(tmp_path, 1, **limits) as c:
        await c.append(1, [(b"", bytes(3 * MIB))])
        assert len((await c.read(1))[0][1] or b"") == 3 * MIB


async def test_a_deposed_leader_gives_its_bytes_back(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await c.lead(1)
        c.partition(1)
        taken = [push(c, 10 * KIB) for _ in range(10)]
        assert c.system(1).admission.inflight > 100 * KIB
        await c.leader(among=(2, 3))
        c.network.heal()
        await c.applied()
        for sink in taken:
            with pytest.raises(Exception, match="lead"):
                await sink.wait(trio.Event)
        assert c.system(1).admission.inflight == c.system(1).admission.queued == 0
        await until(lambda: all(not window.bytes for window in c.system(1).windows.values()), "windows are given back")


def test_the_wait_is_what_the_rate_and_the_others_ask_for() -> None:
    now = 0.0
    drain = Drain(now)
    assert drain.retry("stage", 1000, 1000, now) == budget.RETRY_S_UNKNOWN
    total = 0
    for _ in range(50):
        now += 0.1
        total += 100_000
        drain.sample(total, now)
    assert drain.rate == pytest.approx(1_000_000, rel=0.01)
    waits = [drain.retry("stage", 50_000, 100_000, now) for _ in range(5)]
    # Each comes back when the room of those before it has gone by.
    assert waits == pytest.approx([0.05, 0.15, 0.25, 0.35, 0.45], rel=0.01)
    assert drain.retry("other", 50_000, 1, now) == pytest.approx(0.05, rel=0.01)
    assert drain.retry("stage", 1 << 40, 1, now) == budget.RETRY_S_MAX
    assert drain.retry("other", 1, 1, now + 10) == budget.RETRY_S_MIN
    for _ in range(20):
        now += 0.1
        drain.sample(total, now)
    assert drain.rate < 10 and drain.retry("stage", 50_000, 1, now) == budget.RETRY_S_MAX


def test_clients_write_as_fast_as_the_debt_is_paid_where_it_comes_near_its_limit() -> None:
    class Debt:
        debt = repaid = 0

    now, debt = 100.0, Debt()
    config = SystemConfig(migrate_debt_bytes_max=1000 * MIB, migrate_bytes_s_min=10 * MIB, reserved_ratio=0.2)
    nothing: Any = None
    books = budget.Admission(config, nothing, nothing, nothing, debt, nothing, {}, nothing, lambda: now)
    assert books.delay(MIB) == 0.0
    debt.debt = 600 * MIB
    assert books.delay(64 * MIB) == 0.0, "0.75 of the 0.8 that clients may use"
    for _ in range(200):
        now += 0.1
        debt.repaid += 20 * MIB
        books._copying.sample(debt.repaid, now)
    for owed, factor in ((601, 4.0), (700, 2.0), (750, 1.0), (775, 0.5)):
        now, debt.debt = now + 10, owed * MIB
        debt.repaid += 2000 * MIB
        waits = [books.delay(2 * MIB) for _ in range(4)]
        # One behind the other, at that multiple of 200 MiB a second.
        assert waits == pytest.approx([number * 0.01 / factor for number in (1, 2, 3, 4)], rel=0.05)
    # Just below the limit nobody waits for longer than that, at it not at all: the frame is refused, and what comes
    # behind it on its connection must not wait for that.
    debt.debt = 800 * MIB - 1
    assert [books.delay(2 * MIB) for _ in range(3)] == pytest.approx([budget.DELAY_S_MAX] * 3)
    for owed in (800, 801, 2000):
        debt.debt = owed * MIB
        assert books.delay(64 * MIB) == 0.0
    now, debt.debt = now + 100, 750 * MIB
    assert books.delay(MIB) == pytest.approx(0.1), "what copying is never slowed below"


def test_who_is_refused_for_the_debt_comes_back_when_so_much_is_copied() -> None:
    class Debt:
        debt = repaid = 0

    now, debt = 100.0, Debt()
    config = SystemConfig(migrate_debt_bytes_max=1000 * MIB, reserved_ratio=0.2)
    nothing: Any = None
    books = budget.Admission(config, nothing, nothing, nothing, debt, nothing, {}, lambda cause: None, lambda: now)
    for _ in range(200):
        now += 0.1
        debt.repaid += 10 * MIB
        books._copying.sample(debt.repaid, now)
    # No client was answered all the while.
    for over in (10, 30):
        with pytest.raises(Busy) as busy:
            books._refuse_debt(over * MIB, 0)
        assert busy.value.cause == budget.MIGRATION
        assert busy.value.retry_after == pytest.approx(over / 100, rel=0.1)


@pytest.mark.long
async def test_a_stopped_follower_costs_its_leader_nothing(tmp_path: Path) -> None:
    disk = SlowDisk()
    limits: dict[str, Any] = {
        "follower_inflight_bytes": 2 * MIB, "payload_cache_bytes": MIB, "append_bytes_max": 256 * KIB,
        "node_memory_bytes": 32 * MIB, "liveness_timeout_ms": 60_000,
    }  # fmt: skip
    async with cluster(tmp_path, disks={3: disk}, group="", **limits) as c:
        await until(lambda: all(len(one.system.live) == 3 for one in c.nodes.values()), "all are live")
        names = [f"log-{number}" for number in range(8)]
        for name in names:
            await c.create(name)
            await c.lead(1, name)
        system = c.system(1)
        window = system.windows[3]
        disk.hang(c.system(3).storage.group_commit)
        try:
            # 24 MiB in turns over eight groups: each alone would fill a window of its own.
            most = 0
            for round_ in range(48):
                for name in names:
                    await c.append(1, [(b"", b"%8d" % round_ + bytes(64 * KIB))], name)
                most = max(most, system.admission.memory() - system.storage.group_commit.metadata_bytes)
                assert window.bytes <= 2 * MIB + 512 * KIB
            row = next(row for row in c.nodes[1].status()["followers"] if row["node"] == 3)
            assert row["pulling"] and row["waiting_groups"] == len(names)
            # The window, the cache, and what is on its way to the follower that keeps up.
            assert most < 2 * MIB + 512 * KIB + MIB + 2 * MIB
            # And nothing piles up on the other side either.
            assert c.system(3).storage.group_commit.queued_bytes < 4 * MIB
            held = [entry for name in names for entry in c.member(1, name).raft.log.entries if entry.bodies]
            assert sum(entry.body_bytes for entry in held) < 3 * MIB, "bodies left memory although one is behind"
        finally:
            disk.gate.set()
        for name in names:
            await c.applied(name)
            assert len(await c.read(3, name=name)) == 48
        assert window.bytes == 0 and not window.waiting
        row = next(row for row in c.nodes[1].status()["followers"] if row["node"] == 3)
        assert not row["pulling"]
