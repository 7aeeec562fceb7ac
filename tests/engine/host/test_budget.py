"""Back-pressure in bytes (law 9): every stage says when it is full, a full node can be emptied, a slow follower costs
the leader nothing."""

from __future__ import annotations

from pathlib import Path

import trio

from .cluster import KIB, cluster, until
from .slow_disk import SlowDisk


async def test_a_hanging_sync_is_seen_from_outside(tmp_path: Path) -> None:
    disk = SlowDisk()
    async with cluster(tmp_path, 1, disks={1: disk}) as c:
        durability = c.system(1).durability
        await until(lambda: not durability.busy and durability.sealed, "the log is at rest")
        assert durability.stalled_s() == 0.0
        # Above what is written in place: the loop goes on while the WAL's thread hangs.
        disk.gate.clear()
        done = trio.Event()

        async def append() -> None:
            await c.append(1, [(b"", bytes(64 * KIB))])
            done.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(append)
            try:
                await until(lambda: durability.stalled_s() > 0.05, "the hanging sync shows")
                assert not done.is_set()
                status = durability.status()
                assert status["stalled_ms"] >= 50 and status["queued_bytes"] >= 64 * KIB
            finally:
                disk.gate.set()
            await done.wait()
        await until(lambda: not durability.busy, "the batch is done")
        assert durability.stalled_s() == 0.0
        status = c.nodes[1].status()["wal"]
        assert status["sync_ms_max"] >= 50 and status["written_bytes"] >= 64 * KIB and status["queued_bytes"] == 0
