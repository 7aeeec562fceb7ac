"""A leader that is stopped, deposed meanwhile and goes on: what its reads at each level say then."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import trio
import trio.testing

from logyard.client.aio import Log, connect
from logyard.protocol.errors import LogyardError
from logyard.service.local_cluster import LocalCluster

TRIES = 5


async def ends(log: Log, found: dict[str, list[int]], level: str) -> None:
    """What node 1 says of the log's end at a level, if it says anything."""
    try:
        if level == "staleness":
            end = (await log.latest(node=1, staleness=0)).end
        else:
            end = (await log.latest(node=1, consistency=level)).end
    except LogyardError:
        return
    found.setdefault(level, []).append(end)


@pytest.mark.long
def test_a_deposed_leader_that_was_stopped_is_stale_at_the_levels_that_say_so(tmp_path: Path) -> None:
    with LocalCluster(tmp_path / "yard", 3) as cluster:
        cluster.start()
        process = cluster.nodes[1].process
        assert process is not None

        async def once() -> dict[str, list[int]]:
            """Stop the leader, append elsewhere, ask it, let it go on: by level how far behind its answers were."""
            found: dict[str, list[int]] = {}
            async with connect([cluster.addresses[0]]) as old, connect(cluster.addresses[1:]) as new:
                await new.transfer("a", 1)
                before = await old.log("a").append(b"", b"before")
                assert (await old.log("a").latest(node=1)).end == before + 1
                os.kill(process.pid, signal.SIGSTOP)
                try:
                    acknowledged = await new.log("a").append(b"", b"after") + 1
                    async with trio.open_nursery() as nursery:
                        for level in ("leader", "local", "linearizable", "staleness") * 5:
                            nursery.start_soon(ends, old.log("a"), found, level)
                        await trio.testing.wait_all_tasks_blocked(0.05)
                        os.kill(process.pid, signal.SIGCONT)
                finally:
                    os.kill(process.pid, signal.SIGCONT)
            return {level: [acknowledged - end for end in some] for level, some in found.items()}

        async def all_tries() -> None:
            async with connect(cluster.addresses) as yard:
                await yard.create("a", members=(1, 2, 3))
            stale: set[str] = set()
            for _ in range(TRIES):
                with trio.fail_after(60):
                    behind = await once()
                for level in ("linearizable", "staleness"):
                    assert all(by <= 0 for by in behind.get(level, [])), behind
                stale |= {level for level, some in behind.items() if max(some) > 0}
                if stale >= {"leader", "local"}:
                    return
            raise AssertionError(f"only {stale} were ever stale: the docs say more")

        trio.run(all_tries)
