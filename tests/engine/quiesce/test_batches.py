"""Groups that are created at once, asleep: what a node stores of them, their first use, restarts and crashes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import trio

from logyard.engine.log import meta_rows
from logyard.engine.log.meta import MetaStore
from logyard.protocol.errors import Busy, GroupExists, LogyardError, WalFailed
from logyard.service.door.dispatch import serve_call

from ..host.cluster import Cluster, cluster, until

QUICK: dict[str, Any] = {"hibernate_after_ms": 30}
NAMES = [f"log-{number:02d}" for number in range(40)]


async def create(c: Cluster, by: int = 1, names: Sequence[str] = NAMES, members: Sequence[int] = (1, 2, 3)) -> int:
    return await c.nodes[by].create_batch(names, members, "log", {})


def asleep(c: Cluster, number: int) -> set[str]:
    """Which of them sleep on a node and were never used."""
    return {row.name for _, row in c.system(number).quiescence.table.rows("last = 0")}


def written_to(c: Cluster, number: int) -> tuple[int, int]:
    """How far a node's WAL goes: the number of the next batch, its offset in the file."""
    wal = c.system(number).wal
    return wal.next_batch, wal._tail


def has(c: Cluster, number: int, name: str) -> bool:
    """Whether a node has a group: its name is taken before it is durable, and only then can it be found."""
    system = c.system(number)
    return name in system.names and system.has(system.names[name])


async def use(c: Cluster, by: int, name: str) -> int:
    """Ask a node for a group, as a client does, until it says who leads; append to it there."""
    await until(lambda: c.nodes[by].locate([name])[0][2], f"a leader of {name}")
    leader = int(c.nodes[by].locate([name])[0][2])
    await c.append(leader, [(b"", name.encode())], name)
    return leader


async def again(c: Cluster, by: int) -> None:
    """As a client does: again while what a creation left behind is in the way."""
    with trio.fail_after(20):
        while True:
            try:
                await create(c, by)
                return
            except Busy as busy:
                await trio.sleep(busy.retry_after / 10)


async def test_a_batch_costs_a_commit_and_sleeps_on_all_its_nodes(tmp_path: Path) -> None:
    async with cluster(tmp_path, group="", **QUICK) as c:
        before = {number: c.system(number).meta.info()["commit"] for number in c.ids}
        written = {number: written_to(c, number) for number in c.ids}
        assert await create(c) == 40
        for number in c.ids:
            system = c.system(number)
            assert asleep(c, number) == {*NAMES} and not system.members and system.group_count == 40
            assert system.meta.info()["commit"] == before[number] + 1 and written_to(c, number) == written[number]
            status = c.nodes[number].status()
            assert (status["groups"], status["hibernating"], status["led"]) == (40, 40, 0)
        assert await create(c, by=2) == 0 and await create(c, by=3, names=[*NAMES[:2], "new"]) == 1
        with pytest.raises(GroupExists):
            await create(c, names=["other", NAMES[0]], members=(1, 2))
        assert "other" not in c.system(1).names


async def test_the_first_use_elects_and_leaders_are_spread(tmp_path: Path) -> None:
    async with cluster(tmp_path, group="", **QUICK) as c:
        await create(c)
        leaders = Counter([await use(c, 1, name) for name in NAMES[:12]])
        assert len(leaders) == 3 and max(leaders.values()) < 10, "all were asked for at one node"
        await until(lambda: all(asleep(c, number) == {*NAMES[12:]} for number in c.ids))
        for number in c.ids:
            await c.restart(number)
        assert all(asleep(c, number) == {*NAMES[12:]} for number in c.ids)
        await use(c, 2, NAMES[0])
        await use(c, 3, NAMES[20])
        leader = await c.leader(NAMES[0])
        await c.applied(NAMES[0])
        assert len(await c.read(leader, name=NAMES[0])) == 2


@pytest.mark.parametrize("nodes", (1, 3))
async def test_who_asks_for_a_sleeping_group_hears_who_leads_it(tmp_path: Path, nodes: int) -> None:
    async with cluster(tmp_path, nodes, group="", **QUICK) as c:
        await until(lambda: all(len(c.system(number).live) == nodes for number in c.ids))
        await create(c, members=c.ids)
        (row,) = c.nodes[1].locate([NAMES[1]])
        assert not row[2], "it was woken just now"
        found: Any = await serve_call(c.nodes[1], "locate", {"names": ["unknown", *NAMES[2:4]]})
        # Three nodes that share one busy processor may take longer than anybody waits.
        assert [row[0] for row in found] == NAMES[2:4] and (nodes > 1 or [row[2] for row in found] == [1, 1])
        if nodes > 1:
            c.partition(1)
            started = time.monotonic()
            ((_, _, leader, *_),) = cast(Any, await serve_call(c.nodes[1], "locate", {"names": [NAMES[9]]}))
            assert not leader and time.monotonic() - started < 5, "nobody waits for long"


async def test_a_first_leader_that_is_away_is_not_waited_for_and_learns_of_it_later(tmp_path: Path) -> None:
    async with cluster(tmp_path, group="", **QUICK) as c:
        await until(lambda: all(len(c.system(number).live) == 3 for number in c.ids))
        await c.crash(3)
        await until(lambda: all(3 not in c.system(number).live for number in (1, 2)))
        await create(c)
        assert {await use(c, 1, name) for name in NAMES[:6]} <= {1, 2}
        await c.start(3)
        await until(lambda: all(has(c, 3, name) for name in NAMES[:6]), "it learns of those that are used")
        await use(c, 3, NAMES[0])
        # What nobody uses it hears of when somebody does.
        assert await use(c, 1, NAMES[30]) in c.ids
        await until(lambda: has(c, 3, NAMES[30]))


async def test_groups_of_a_batch_are_deleted_as_others_are(tmp_path: Path) -> None:
    async with cluster(tmp_path, group="", **QUICK) as c:
        await create(c)
        await until(lambda: c.nodes[1].locate([NAMES[1]])[0][2])
        leader = c.nodes[1].locate([NAMES[1]])[0][2]
        keys = [meta_rows.group_key(c.system(1).names[name]) for name in NAMES[1:3]]
        await c.nodes[leader].delete_group(NAMES[1])
        await c.nodes[1].delete_group(NAMES[2], force=True)
        await until(lambda: not any({*NAMES[1:3]} & {*c.system(number).names} for number in c.ids))
        # Names go at once, rows with the next commit: a crash before it has the group there again until somebody tells.
        await until(lambda: not any(c.system(number).meta.get(key) for number in c.ids for key in keys))
        for number in c.ids:
            await c.restart(number)
        assert all({*c.system(number).names} == {*NAMES} - {*NAMES[1:3]} for number in c.ids)


async def test_without_hibernation_a_batch_is_awake(tmp_path: Path) -> None:
    async with cluster(tmp_path, group="", hibernate_after_ms=0) as c:
        await create(c, names=NAMES[:5])
        await until(lambda: all(any(c.leads(number, name) for number in c.ids) for name in NAMES[:5]))
        await c.restart(1)
        await until(lambda: len(c.system(1).members) == 5)


@pytest.mark.parametrize("step", range(4))
@pytest.mark.parametrize("node", (1, 2))
async def test_a_node_that_dies_in_the_middle_of_a_batch_has_all_of_it_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, node: int
) -> None:
    """Steps of a commit: before it, one copy written, both written, told."""
    async with cluster(tmp_path, group="", **QUICK) as c:
        await until(lambda: all(len(c.system(number).live) == 3 for number in c.ids))
        dead, done = trio.Event(), [0]
        token = trio.lowlevel.current_trio_token()
        real = MetaStore._apply
        hit = c.system(node).meta

        def apply(self: MetaStore, environment: Any, changes: Any) -> None:
            if self is hit and any(key[:1] == b"g" for key, _ in changes):
                if done[0] == step:
                    token.run_sync_soon(dead.set)
                    raise WalFailed("the power is gone")
                done[0] += 1
            real(self, environment, changes)

        monkeypatch.setattr(MetaStore, "_apply", apply)
        async with trio.open_nursery() as nursery:

            async def begin() -> None:
                try:
                    await create(c)
                except LogyardError:
                    assert step < 2
                finally:
                    if step >= 2:
                        dead.set()

            async def crash() -> None:
                await dead.wait()
                await c.crash(node)
                nursery.cancel_scope.cancel()

            nursery.start_soon(begin)
            nursery.start_soon(crash)
        monkeypatch.setattr(MetaStore, "_apply", real)
        await c.start(node)
        assert asleep(c, node) in ({*NAMES}, set()), "wholly there or not at all"
        assert step < 1 or asleep(c, node) == {*NAMES}
        await until(lambda: all(len(c.system(number).live) == 3 for number in c.ids))
        # Whoever asked asks again, and all of them are there for use.
        await again(c, 3)
        assert all({*c.system(number).names} == {*NAMES} for number in c.ids)
        assert await use(c, node, NAMES[7]) in c.ids
