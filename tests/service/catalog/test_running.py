"""The catalogue of a running cluster: founded once, known on every node, and creations go by it."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from logyard.machines.catalog.logs import RESERVED, Log
from logyard.machines.log.command import APPEND
from logyard.protocol.errors import BadRequest, Busy, GroupExists, LogyardError, NotLeader, Refused, Unknown
from logyard.service.catalog import mover
from logyard.service.catalog.calls import PATIENCE_S
from logyard.service.catalog.keeper import Keeper, catalog_uid, logs_of, nodes_of
from logyard.service.cli.nodes import invitation
from logyard.service.memory_cluster import MemoryCluster
from logyard.testing import cluster, until

YEAR_NS = 365 * 86_400 * 1_000_000_000
GOOD = {"members": [1, 2], "machine": "log", "arguments": {}}


def known(run: MemoryCluster, node: int) -> dict[str, Log]:
    keeper = run.nodes[node].keeper
    assert keeper is not None
    return {} if keeper.catalog is None else {row.name: row for row in logs_of(keeper.catalog)}


def states(run: MemoryCluster, node: int) -> dict[int, str]:
    keeper = run.nodes[node].keeper
    assert keeper is not None
    return {} if keeper.catalog is None else {number: row.state for number, row in nodes_of(keeper.catalog).rows}


def voters(run: MemoryCluster) -> set[tuple[int, ...]]:
    uid = catalog_uid("testing")
    members = [node.system.members.get(uid) for node in run.nodes.values()]
    return {member.raft.base[1].voters if member is not None else () for member in members}


async def founded(run: MemoryCluster, *expected: int) -> None:
    """Wait until all nodes know one another by the catalogue, and these vote."""
    await until(lambda: all(len(states(run, node)) == len(run.nodes) for node in run.nodes), "all are known")
    await until(lambda: voters(run) == {expected}, f"{expected} vote")


async def test_founded_by_the_lowest_and_known_everywhere(tmp_path: Path) -> None:
    async with cluster(tmp_path, 4, catalog=True) as run:
        await founded(run, 1, 2, 3)
        await run.create("a", members=[2, 3, 4])
        await until(lambda: all(known(run, node).get("a") for node in run.nodes), "all know it")
        await until(lambda: {known(run, node)["a"].state for node in run.nodes} == {"live"}, "it lives")
        await until(lambda: known(run, 4)["a"].voters == (2, 3, 4), "its members were seen")
        with pytest.raises(GroupExists, match="another definition"):
            await run.create("a", members=[1, 2, 4])
        with pytest.raises(LogyardError, match="the cluster's own"):
            await run.create("_mine")
        leader = await run.leader("a")
        await run.nodes[leader].delete_group("a")
        await until(lambda: all("a" not in known(run, node) for node in run.nodes), "it is gone, and let go")
        with pytest.raises(Refused, match="the cluster's own"):
            await run.nodes[1].delete_group(RESERVED)


@pytest.mark.parametrize(
    "wrong",
    [
        {"members": [9]},
        {"members": [1, 2, 9]},
        {"members": [1, 1 << 40]},
        {"machine": "catalog"},
        {"machine": "none"},
        {"arguments": {"none": 1}},
        {"arguments": {"start": "x"}},
    ],
    ids=str,
)
async def test_what_can_not_be_made_leaves_no_intent(tmp_path: Path, wrong: dict[str, Any]) -> None:
    """Who is no node never says that it has let go, so each of these stayed in the catalogue for ever."""
    async with cluster(tmp_path, 2, catalog=True) as run:
        await founded(run, 1)
        spec = {"members": [1, 2], "machine": "log", "arguments": {}, **wrong}
        with trio.fail_after(PATIENCE_S):
            with pytest.raises(BadRequest):
                await run.nodes[1].create_groups([{"name": "good", **spec, **GOOD}, {"name": "a", **spec}])
            with pytest.raises(BadRequest):
                await run.nodes[1].create_batch(["a", "b"], **spec)
        assert not known(run, 1)
        await run.create("a")


async def test_a_node_is_invited_also_where_the_catalogues_time_is_ahead(tmp_path: Path) -> None:
    """It never goes back, so after one moment of a wall clock that was ahead an invitation "was over" at once."""
    async with cluster(tmp_path, 1, catalog=True) as run:
        await founded(run, 1)
        node, told = run.nodes[1], []
        clocks = node.system.clocks
        clocks.wall_ns = lambda: time.time_ns() + YEAR_NS
        await node.catalog_change("nodes", "update", {"node": 1, "zone": "z"})
        clocks.wall_ns = time.time_ns
        token, _ = invitation(cast(Any, SimpleNamespace(change_catalog=lambda *given: told.append(given))))
        await node.catalog_change(*told[0])
        assert (await node.join(token.encode(), 7, "n:1", "n:2", "", 0))["node"] == 2
        for wrong in (0, -1, "x", 1 << 63, None):
            with pytest.raises(BadRequest, match="for_ms"):
                await node.catalog_change("nodes", "invite", {**told[0][2], "for_ms": wrong})


async def test_a_batch_is_the_clusters_too_and_sleeps(tmp_path: Path) -> None:
    async with cluster(tmp_path, 3, catalog=True, hibernate_after_ms=1000) as run:
        await founded(run, 1, 2, 3)
        names = [f"g{number}" for number in range(300)]
        assert await run.nodes[2].create_batch(names, [1, 2, 3], "log", {}) == 300
        assert await run.nodes[3].create_batch(names[:7], [1, 2, 3], "log", {}) == 0
        tables = [run.nodes[node].system.quiescence.table for node in run.nodes]
        assert all(len(list(table.rows("last = 0"))) == 300 for table in tables)
        await until(lambda: all(known(run, 1)[name].state == "live" for name in names), "all live")
        with pytest.raises(GroupExists, match="another definition"):
            await run.nodes[1].create_batch(["g0"], [1, 2], "log", {})
        with pytest.raises(LogyardError, match="the cluster's own"):
            await run.nodes[1].create_batch(["_mine"], [1, 2, 3], "log", {})


async def test_a_snapshot_of_it_writes_only_what_changed(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, catalog=True) as run:
        await founded(run, 1)
        assert await run.nodes[1].create_batch([f"g{number}" for number in range(600)], [1], "log", {}) == 600
        await until(lambda: all(row.seen for row in known(run, 1).values()), "all were seen: nothing else changes")
        member = run.nodes[1].system.members[catalog_uid("testing")]
        await run.nodes[1].snapshot([RESERVED])
        before = set(member.chunks)
        await run.nodes[1].delete_group("g599")
        await run.nodes[1].snapshot([RESERVED])
        kept = before & set(member.chunks)
        assert kept and kept != set(member.chunks), "the shard of the first 512 logs is written once"


async def test_its_books_of_payload_do_not_grow_with_its_commands(tmp_path: Path) -> None:
    """It keeps none: a snapshot of it looks through the whole of what is not dead."""
    async with cluster(tmp_path, 1, catalog=True) as run:
        await founded(run, 1)
        for number in range(40):
            await run.create(f"g{number}")
        member = run.nodes[1].system.members[catalog_uid("testing")]
        ranges = list(member.liveness.live_ranges(member.raft.applied))
        assert member.raft.applied > 40 and len(ranges) <= 1, ranges


async def test_one_node_alone_has_one_too(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, catalog=True) as run:
        await founded(run, 1)
        await run.create("a")
        await until(lambda: known(run, 1)["a"].state == "live", "it lives")
        await run.restart(1)
        await founded(run, 1)
        await until(lambda: known(run, 1)["a"].voters == (1,), "it is known after a restart")


async def test_what_was_there_before_is_imported(tmp_path: Path) -> None:
    async with cluster(tmp_path, 3) as run:
        for name in ("a", "_b"):
            await run.create(name)
        run.catalog = True
        for node in (1, 2, 3):
            await run.restart(node)
        await founded(run, 1, 2, 3)
        await until(lambda: all({"a", "_b"} <= known(run, node).keys() for node in run.nodes), "both are imported")
        assert {known(run, 1)[name].state for name in ("a", "_b")} == {"live"}
        with pytest.raises(GroupExists):
            await run.nodes[1].create_groups([{"name": "a", "members": [1], "machine": "log", "arguments": {}}])


@pytest.mark.long
async def test_a_log_of_its_name_stops_it_by_name(tmp_path: Path) -> None:
    async with cluster(tmp_path, 3) as run:
        await run.create(RESERVED)
        run.catalog = True
        for node in (1, 2, 3):
            await run.restart(node)
        keeper = run.nodes[1].keeper
        assert keeper is not None
        await until(lambda: "'_catalog': rename or delete it" in keeper.trouble, "it says why")
        with pytest.raises(Busy):
            await run.create("a")
        assert await run.leader(RESERVED)


@pytest.mark.long
async def test_data_goes_on_without_it(tmp_path: Path) -> None:
    async with cluster(tmp_path, 6, catalog=True) as run:
        await founded(run, 1, 2, 3)
        await run.create("a", members=[3, 4, 5])
        await run.command("a", APPEND, b"x")
        await run.create("gone", members=[4, 5, 6])
        await until(lambda: {known(run, node)["gone"].state for node in (4, 5, 6)} == {"live"}, "it is known")
        for node in (1, 2):
            await run.crash(node)
        for number in range(5):
            await run.command("a", APPEND, b"y%d" % number)
        # An election, a node's restart with its sleepless catalogue, and reads.
        first = await run.leader("a")
        await run.crash(first)
        await run.command("a", APPEND, b"z")
        await run.start(first)
        await run.command("a", APPEND, b"z")
        bounds = await run.nodes[await run.leader("a")].bounds("a", "linearizable")
        assert (bounds["start"], bounds["end"]) == (0, 8)
        with pytest.raises(Busy, match="the catalogue"):
            await run.nodes[4].create_groups([{"name": "b", "members": [4, 5, 6], "machine": "log", "arguments": {}}])
        leader = await run.leader("gone")
        with pytest.raises(Busy, match="the catalogue"):
            await run.nodes[leader].delete_group("gone")
        assert await run.leader("gone") and known(run, 6)["gone"].state == "live", "looked up from memory"
        for node in (1, 2):
            await run.start(node)
        await run.create("b", members=[4, 5, 6])


async def test_of_two_founders_one_is_one_too_many(tmp_path: Path) -> None:
    async with cluster(tmp_path, 5) as run:
        await run.create("a", members=[2, 3, 4])
        for node, configured in ((3, (3, 4, 5)), (4, (3, 4, 5)), (5, (3, 4, 5)), (1, (1, 2, 3)), (2, (1, 2, 3))):
            keeper = run.nodes[node].keep_catalogue({}, configured, told, told, 0.02)
            run.nodes[node].system.spawn(keeper.run)
            await until(lambda k=keeper: k.catalog is not None or k.trouble, "it looked")  # type: ignore[misc]
        await until(lambda: len(states(run, 5)) == 5, "all are in the first one")
        # Who was refused as a second founder says so until it looks again: it may be known before that.
        await until(
            lambda: not any("founded" in str(node.keeper and node.keeper.trouble) for node in run.nodes.values()),
            "nobody complains",
        )
        uid = catalog_uid("testing")
        found = {node.system.members[uid].spec.voters for node in run.nodes.values() if uid in node.system.members}
        assert found == {(3,)}, "who came later was told"


async def test_two_founders_that_did_not_see_each_other(tmp_path: Path) -> None:
    async with cluster(tmp_path, 6) as run:
        await run.create("a", members=[2, 3, 4])
        run.partition(1, 2, 3)
        await until(lambda: run.nodes[4].system.live == {4, 5, 6} and run.nodes[1].system.live == {1, 2, 3}, "cut")
        for node in run.ids:
            configured = (1, 2, 3) if node < 4 else (4, 5, 6)
            run.nodes[node].system.spawn(run.nodes[node].keep_catalogue({}, configured, told, told, 0.02).run)
        await until(lambda: len(states(run, 3)) == 3 and len(states(run, 6)) == 3, "there are two")
        uid = catalog_uid("testing")
        await until(lambda: all(uid in run.nodes[node].system.members for node in run.ids), "each has its member")
        members = [run.nodes[node].system.members[uid] for node in run.ids]

        def both() -> bool:
            return {member.raft.base[1].voters for member in members} == {(1, 2, 3), (4, 5, 6)}

        await until(both, "each has its voters")
        run.heal()
        troubles = [node.keeper for node in run.nodes.values() if node.keeper is not None]
        await until(lambda: any("founded by another" in one.trouble for one in troubles), "it is said")
        await run.command("a", APPEND, b"x")
        assert {states(run, node).keys() >= {1, 2, 3} for node in (1, 2, 3)} == {True}
        assert both(), "and neither is touched"


async def told(*what: object) -> None:
    """Learn nothing of addresses."""


def replicas(run: MemoryCluster, name: str) -> set[int]:
    """The voters of a log, as the catalogue's newest copy has them."""
    row = max((known(run, node)[name] for node in run.nodes if name in known(run, node)), key=lambda row: row.seen)
    return set(row.voters)


async def commit(run: MemoryCluster, name: str) -> None:
    """Append once more, asked again while leaderships are evened."""
    with trio.fail_after(20):
        while True:
            with suppress(Busy, NotLeader, Unknown):
                await run.command(name, APPEND, b"y")
                return
            await trio.lowlevel.checkpoint()


async def change(run: MemoryCluster, section: str, command: str, **values: object) -> None:
    await next(iter(run.nodes.values())).catalog_change(section, command, values)


async def test_a_dead_node_s_members_are_replaced_and_it_returns(tmp_path: Path) -> None:
    async with cluster(tmp_path, 4, catalog=True) as run:
        await founded(run, 1, 2, 3)
        for name in ("a", "b", "c"):
            await run.create(name, members=[1, 2, 3])
            await run.command(name, APPEND, b"x")
        await until(lambda: known(run, 1)["c"].seen, "all are known")
        await run.crash(3)
        await until(lambda: states(run, 1)[3] == "silent", "it is silent")
        assert replicas(run, "a") == {1, 2, 3}, "which is no reason"
        keeper = run.nodes[1].keeper
        assert keeper is not None
        await until(lambda: not keeper.hears(3), "nobody hears it")
        await change(run, "nodes", "declare_dead", node=3)
        for name in ("a", "b", "c"):
            await until(lambda name=name: replicas(run, name) == {1, 2, 4}, f"{name} has another member")  # type: ignore[misc]
            await commit(run, name)
        await until(lambda: voters(run) == {(1, 2, 4)}, "and the catalogue another voter")
        await run.start(3)
        await until(lambda: states(run, 1)[3] == "returned", "it is back")
        await until(lambda: run.nodes[3].system.names.get("a") is None, "and lets its replicas go")
        await run.create("d", members=[1, 2, 4])
        await change(run, "nodes", "admit", node=3)
        await until(lambda: states(run, 3).get(3) == "active", "it may have members again")


async def test_a_node_that_is_heard_of_is_not_declared_dead(tmp_path: Path) -> None:
    async with cluster(tmp_path, 2, catalog=True) as run:
        await founded(run, 1)
        for node in (1, 2):
            with pytest.raises(Refused, match=f"node {node} is heard of: drain it"):
                await change(run, "nodes", "declare_dead", node=node)
        assert set(states(run, 1).values()) == {"active"}
        await change(run, "nodes", "declare_dead", node=2, force=True)
        await until(lambda: states(run, 1)[2] != "active", "it was declared dead")


async def test_a_node_that_drains_gives_up_what_it_has_and_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Who did not take a leadership over in time is soon asked again.
    monkeypatch.setattr(mover, "UNABLE_S", 0.5)
    async with cluster(tmp_path, 4, catalog=True) as run:
        await founded(run, 1, 2, 3)
        for name in ("a", "b"):
            await run.create(name, members=[2, 3, 4])
            await run.command(name, APPEND, b"x")
        await run.create("single", members=[4])
        await until(lambda: known(run, 1)["single"].seen, "all are known")
        await change(run, "plan", "pause", why="to look at it")
        await change(run, "nodes", "drain", node=4)
        with pytest.raises(Refused, match="have a member on node 4"):
            await change(run, "nodes", "remove", node=4)
        found = await run.nodes[1].catalog("plan", "wanted", {}, "linearizable")
        assert {(one["name"], one["source"]) for one in found["result"]["moves"]} == {("a", 4), ("b", 4), ("single", 4)}
        await change(run, "plan", "resume")
        for name in ("a", "b"):
            await until(lambda name=name: replicas(run, name) == {1, 2, 3}, f"{name} is elsewhere")  # type: ignore[misc]
        await until(lambda: 4 not in replicas(run, "single"), "also what had one member")
        await change(run, "nodes", "remove", node=4)
        await until(lambda: states(run, 1)[4] == "removed", "it is gone")


async def test_what_is_deleted_waits_for_no_node_that_is_gone_for_good(tmp_path: Path) -> None:
    """A dead node lets nothing go: it could never be removed, and what it once had stayed in the catalogue for ever."""
    async with cluster(tmp_path, 4, catalog=True) as run:
        await founded(run, 1, 2, 3)
        for name in ("a", "b"):
            await run.create(name, members=[2, 3, 4])
        await until(lambda: known(run, 1)["b"].seen, "both are known")
        await run.crash(4)
        await change(run, "nodes", "declare_dead", node=4, force=True)
        await run.nodes[await run.leader("a")].delete_group("a")
        await until(lambda: "a" in known(run, 1) and known(run, 1)["a"].waiting == (4,), "it waits for the dead one")
        await until(lambda: replicas(run, "b") == {1, 2, 3}, "the other one is elsewhere")
        rows = (await run.nodes[1].catalog("nodes", "list", {}, "linearizable"))["result"]
        assert {row["node"]: row["held"] for row in rows} == {1: 1, 2: 1, 3: 1, 4: 0}
        await change(run, "nodes", "remove", node=4)
        await until(lambda: "a" not in known(run, 1), "nobody waits for a node that was removed")
        # It was to be made on that node, too.
        await run.nodes[await run.leader("b")].delete_group("b")
        await until(lambda: not known(run, 1), "nor does what goes later")


async def test_a_lost_majority_is_recovered_and_what_the_copy_lacks_reported_again(tmp_path: Path) -> None:
    async with cluster(tmp_path, 5, catalog=True) as run:
        await founded(run, 1, 2, 3)
        await run.create("a", members=[3, 4, 5])
        await until(lambda: all(known(run, node).get("a") for node in (4, 5)), "it is known")
        run.partition(5)
        await run.create("b", members=[3, 4])
        await until(lambda: known(run, 4).get("b") is not None and known(run, 4)["b"].seen, "one copy knows it")
        for node in (1, 2, 3):
            await run.crash(node)
        run.heal()
        await until(lambda: run.nodes[4].system.live == {4, 5}, "two are left")
        assert "b" not in known(run, 5)
        # The older copy, on purpose: what it lacks is to come from the logs.
        await run.nodes[5].force_shrink(RESERVED)
        await until(lambda: states(run, 4).get(1) == "silent", "it goes on, and node 4 learns from it")
        await change(run, "plan", "pause", why="recovered")
        await run.start(3)
        await until(lambda: "b" in known(run, 5), "b is imported by its leader")
        await run.command("b", APPEND, b"x")


async def test_a_node_that_is_refused_under_its_number_still_reports_its_groups(tmp_path: Path) -> None:
    async with cluster(tmp_path, 3, catalog=True) as run:
        await founded(run, 1, 2, 3)
        keeper = run.nodes[3].keeper
        assert keeper is not None and keeper.catalog is not None
        said = keeper._here.said()
        keeper._here = keeper._here._replace(said=lambda: {**said, "directory": 99})
        await until(lambda: "another number" in keeper.trouble, "it is refused")
        await run.create("a", members=[3])
        await until(lambda: known(run, 1)["a"].seen, "what it leads is known all the same")


async def test_a_name_that_a_node_has_for_another_log_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was renamed, which its node does not know."""
    async with cluster(tmp_path, 3, catalog=True) as run:
        await founded(run, 1, 2, 3)
        await run.create("a", members=[3])
        await until(lambda: (row := known(run, 1).get("a")) is not None and row.seen, "it was seen")
        await change(run, "logs", "rename", uid=known(run, 1)["a"].uid, name="b")
        await until(lambda: all("b" in known(run, node) for node in run.nodes), "all know its new name")
        with monkeypatch.context() as patch, pytest.raises(GroupExists, match="node 3"):
            patch.setattr(Keeper, "_report", told)
            await run.nodes[1].create_groups([{"name": "a", **GOOD, "members": [1, 2, 3]}])
        await until(lambda: all("a" not in known(run, node) for node in run.nodes), "it is gone, and let go")
        assert not any("a" in run.nodes[node].system.names for node in (1, 2))
        await run.create("a", members=[1, 2])
        await until(lambda: known(run, 3)["a"].voters == (1, 2), "the name is free")
