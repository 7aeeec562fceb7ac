"""A follower that is far behind knows its leader, and gets on, while more is written than a log keeps."""

from __future__ import annotations

from pathlib import Path

import trio

from .cluster import KIB, cluster, until


async def test_a_follower_that_chases_snapshots_knows_who_leads_and_gets_on(tmp_path: Path) -> None:
    """It is away while more is written than a log keeps, and while it catches up, too."""
    async with cluster(tmp_path, snapshot_entries=16) as c:
        await c.lead(1)
        await c.fill(1, 4, 40 * KIB)
        await c.crash(3)
        await c.fill(1, 40, 40 * KIB)
        for number in (1, 2):
            await c.roll(number)
            await c.nodes[number].snapshot()
        await c.start(3)
        writing = True

        async def write() -> None:
            while writing:
                await c.fill(1, 4, 40 * KIB)
                await c.roll(1)
                await c.nodes[1].snapshot()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            for _ in range(4):
                before = c.member(3).raft.applied
                # Sight of the leader is lost, and no link: as under a load that holds up renewals.
                inbound, live = c.system(3).host.inbound, set(c.system(3).live)
                inbound.on_liveness(live - {1})
                inbound.on_liveness(live)
                await until(lambda: c.member(3).raft.leader == 1, "it knows who leads")
                await until(lambda before=before: c.member(3).raft.applied > before, "it gets on")
            writing = False
        await c.applied()
        assert c.system(3).transfers.snapshot_receiver.installed
