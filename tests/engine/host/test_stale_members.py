"""What was begun for one member of a group is not finished in another one that stands for it by then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import trio

from logyard.engine.replica.member import ASLEEP

from .cluster import KIB, cluster, until


async def test_no_snapshot_is_installed_in_a_member_that_fell_asleep(tmp_path: Path) -> None:
    """It started the log of the member that woke over, and acknowledged entries went with that."""
    async with cluster(tmp_path, hibernate_after_ms=300) as c:
        await c.lead(1)
        await c.fill(1, 4, KIB)
        await c.nodes[1].truncate("log", c.log(1).end)
        await c.applied()
        system, old = c.system(3), c.member(3)
        hibernation = system.quiescence.quiesce._hibernation
        checkpoints: Any = system.transfers.snapshot_receiver._checkpoints
        gate, at_gate, stored = trio.Event(), trio.Event(), checkpoints.store_installed

        async def slowly(*what: Any) -> None:
            at_gate.set()
            await gate.wait()
            await stored(*what)

        checkpoints.store_installed = slowly
        await hibernation._preparing.acquire()
        await c.nodes[3].compact()
        await until(lambda: hibernation._preparing.statistics().tasks_waiting, "node 3 was asked to sleep")
        c.partition(3)
        await c.fill(1, 4, KIB)
        await c.nodes[1].truncate("log", c.log(1).end)
        await until(lambda: c.member(1).raft.applied == c.member(1).raft.log.last_index, "applied")
        await c.nodes[1].snapshot(["log"])
        await c.roll(1)
        await until(lambda: c.member(1).raft.log.snapshot_index > old.raft.log.last_index, "its log went")
        c.network.heal()
        await at_gate.wait()
        hibernation._preparing.release()
        await until(lambda: old.state == ASLEEP, "it sleeps")
        new = system.find(old.uid)
        assert new is not None and new is not old
        for number in c.ids:
            # Clients keep it awake from here on.
            other: Any = c.system(number).quiescence.quiesce._hibernation
            other.may_sleep = lambda member: False
        await c.lead(2)
        await c.fill(2, 8, KIB)
        await c.applied()
        new = c.member(3)
        await until(lambda: new.raft.log.stable == new.raft.log.last_index, "it acknowledged all of it")
        acknowledged = new.raft.log.stable
        gate.set()
        await until(lambda: not system.transfers.snapshot_receiver._offers, "the transfer is over")
        c.partition(3)
        await c.restart(3)
        again = c.member(3)
        assert again.raft.log.last_index >= acknowledged and again.raft.mend is None
