"""Which groups a node has: creation with nodes away, names, deletion, and that nothing old is ever read (invariant 6,
fault G2)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from logyard.engine.raft.quorum import first_leader
from logyard.engine.transport.blobs import DELETE_GROUPS, UNKNOWN_GROUPS
from logyard.protocol.errors import BadRequest, Busy, GroupExists, LogyardError, UnknownGroup

from .cluster import KIB, cluster, payload_books, until


async def test_a_group_created_while_a_node_is_away_reaches_it_later(tmp_path: Path) -> None:
    async with cluster(tmp_path, group="") as c:
        await until(lambda: all(len(c.system(number).live) == 3 for number in c.ids))
        await c.crash(3)
        await until(lambda: 3 not in c.system(1).live)
        await c.create("log", c.ids)
        await c.append(await c.leader(), [(b"", b"without three")])
        await c.start(3)
        await c.applied()
        assert await c.read(3) == [(b"", b"without three")]
        await c.restart(3)
        await c.applied()
        assert await c.read(3) == [(b"", b"without three")]


async def test_names_and_definitions_are_checked(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        node = c.nodes[1]
        (again,) = await node.create_groups([{"name": "log", "members": [1, 2, 3]}])
        assert again["uid"] == c.member(1).uid
        with pytest.raises(GroupExists):
            await node.create_groups([{"name": "log", "members": [1]}])
        for name in ("", ".", "..", "a/b", "x" * 129, "ä"):
            with pytest.raises(BadRequest):
                await node.create_groups([{"name": name, "members": [1]}])
        with pytest.raises(BadRequest):
            await node.create_groups([{"name": "far", "members": [1, 9]}])
        with pytest.raises(BadRequest):
            await node.create_groups([{"name": "odd", "members": [1], "machine": "no such"}])
        assert set(c.system(1).names) == {"log"}
        with pytest.raises(UnknownGroup):
            node.describe("far")


async def test_a_name_taken_elsewhere_is_a_conflict_and_leaves_nothing_behind(tmp_path: Path) -> None:
    async with cluster(tmp_path, group="") as c:
        await until(lambda: all(len(c.system(number).live) == 3 for number in c.ids))
        await c.nodes[2].create_groups([{"name": "log", "members": [2]}])
        with pytest.raises(GroupExists):
            await c.nodes[1].create_groups([{"name": "log", "members": [1, 2, 3]}])
        await c.bare(1, 3)
        await c.append(2, [(b"", b"untouched")])
        for number in (1, 3):
            await c.restart(number)
            assert not c.system(number).members


async def test_two_creators_of_one_name_never_both_win(tmp_path: Path) -> None:
    async with cluster(tmp_path, group="") as c:
        await until(lambda: all(len(c.system(number).live) == 3 for number in c.ids))
        won: list[int] = []

        async def create(number: int) -> None:
            try:
                (row,) = await c.nodes[number].create_groups([{"name": "log", "members": [1, 2, 3]}])
                won.append(row["uid"])
            except (GroupExists, Busy):
                pass

        async with trio.open_nursery() as nursery:
            for number in c.ids:
                nursery.start_soon(create, number)
        assert len(set(won)) <= 1
        if not won:
            await until(lambda: not any(c.system(number).names for number in c.ids))
            await create(1)
        await c.append(await c.leader(), [(b"", b"one log")])
        await c.applied()
        assert {c.member(number).uid for number in c.ids} == set(won)


async def test_a_group_created_anew_reads_nothing_old(tmp_path: Path) -> None:
    async with cluster(tmp_path, payload_cache_bytes=0) as c:
        leader = await c.leader()
        await c.fill(leader, 10, 40 * KIB, tag=b"old")
        await c.applied()
        await c.nodes[1].compact()
        await c.fill(leader, 3, 40 * KIB, tag=b"old")
        await c.applied()
        old = c.member(1).uid
        await c.nodes[leader].delete_group("log")
        await until(lambda: not any("log" in c.system(number).names for number in c.ids))
        await until(lambda: all(old in c.system(number).host.groups.deleted for number in c.ids))
        for number in c.ids:
            books = payload_books(c.system(number))
            assert not books["wal"] and not any(books["generations"].values())
            assert c.nodes[number].status()["payload_live_bytes"] == 0
        with pytest.raises(LogyardError):
            await c.append(leader, [(b"", b"late")])
        await c.create("log")
        assert c.member(1).uid != old and c.log(1).end == 0
        await c.append(await c.leader(), [(b"", b"new")])
        await c.applied()
        # The WAL still holds the old group's records.
        for number in c.ids:
            await c.restart(number)
        await c.append(await c.leader(), [(b"", b"newer")])
        await c.applied()
        for number in c.ids:
            assert await c.read(number) == [(b"", b"new"), (b"", b"newer")]
            assert old not in c.system(number).members


async def test_a_node_that_was_away_learns_of_a_deletion(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        await c.append(await c.leader(), [(b"", b"x")])
        await c.applied()
        await c.crash(3)
        await c.nodes[await c.leader()].delete_group("log")
        await until(lambda: not c.system(2).members)
        await c.start(3)
        await c.bare(3)
        await c.restart(3)
        assert not c.system(3).members


async def test_a_member_added_later_is_told_of_the_deletion(tmp_path: Path) -> None:
    async with cluster(tmp_path, 4, group="") as c:
        await until(lambda: all(len(c.system(number).live) == 4 for number in c.ids))
        await c.create("log", [1, 2, 3])
        leader = await c.leader()
        await c.nodes[leader].change_members("log", "add", 4)
        await c.applied()
        await c.nodes[leader].delete_group("log")
        await until(lambda: not any(c.system(number).members for number in c.ids))


async def test_each_new_group_is_led_at_once_by_the_node_its_uid_picks(tmp_path: Path) -> None:
    """Also where that is who made it, and asks for votes before the others have it; no election times out here."""
    async with cluster(tmp_path, group="", election_ticks=1000) as c:
        await until(lambda: all(len(c.system(number).live) == 3 for number in c.ids))
        names = [f"g{number}" for number in range(30)]
        await c.nodes[1].create_groups([{"name": name, "members": [1, 2, 3]} for name in names])
        for name in names:
            assert await c.leader(name) == first_leader(c.member(1, name).uid, (1, 2, 3))
        pairs = [f"pair{number}" for number in range(20)]
        await c.nodes[1].create_groups([{"name": name, "members": [1, 2]} for name in pairs])
        for name in pairs:
            assert await c.leader(name) == first_leader(c.member(1, name).uid, (1, 2))
        assert {await c.leader(name) for name in pairs} == {1, 2}, "each has a share"


async def test_many_groups_share_syncs_and_survive_together(tmp_path: Path) -> None:
    async with cluster(tmp_path, group="") as c:
        await until(lambda: all(len(c.system(number).live) == 3 for number in c.ids))
        names = [f"g{number}" for number in range(30)]
        await c.nodes[1].create_groups([{"name": name, "members": [1, 2, 3]} for name in names])
        leaders = {name: await c.leader(name) for name in names}
        assert len(set(leaders.values())) == 3, "a fresh group is first led by the node its uid picks"
        async with trio.open_nursery() as nursery:
            for name in names:
                nursery.start_soon(c.append, leaders[name], [(b"", name.encode())], name)
        for number in c.ids:
            await c.crash(number)
        for number in c.ids:
            await c.start(number)
        for name in names:
            await c.leader(name)
            await c.applied(name)
            for number in c.ids:
                assert await c.read(number, name=name) == [(b"", name.encode())]


async def test_a_creation_that_failed_is_taken_back_by_a_creator_that_is_no_member(tmp_path: Path) -> None:
    """Nobody speaks to it about the group, so nobody would hear of it: also who stored the definition and was cut off
    before it was taken back."""
    async with cluster(tmp_path, 4, group="") as c:
        await until(lambda: all(len(one.system.live) == 4 for one in c.nodes.values()))
        await c.create("taken", [3])
        spec = {"name": "taken", "members": [1, 2, 3], "machine": "log"}
        told = c.system(4).peers.send_blob
        cut: list[int] = []

        def lossy(node: int, kind: int, *rest: Any, **more: Any) -> bool:
            if kind == DELETE_GROUPS and node == 1 and not cut:
                cut.append(kind)
                return False
            return told(node, kind, *rest, **more)

        c.system(4).peers.send_blob = lossy  # type: ignore[method-assign]
        with pytest.raises(GroupExists):
            await c.nodes[4].create_groups([spec])
        await until(lambda: not c.system(2).members)
        assert cut
        c.partition(1)
        await until(lambda: 1 not in c.system(4).live)
        c.network.heal()
        await until(lambda: not c.system(1).members and not c.system(1).names, "node 1 drops it, too")


async def test_a_new_member_that_hears_of_nothing_but_a_snapshot_asks_what_it_is_of(tmp_path: Path) -> None:
    """Its question was lost with the link, and the leader has no log left to probe with."""
    async with cluster(tmp_path, 4, group="") as c:
        await until(lambda: all(len(one.system.live) == 4 for one in c.nodes.values()))
        await c.create("log", [1, 2, 3])
        await c.lead(1)
        bodies = await c.fill(1, 20, KIB)
        await c.applied()
        await c.nodes[1].snapshot()
        await c.roll(1)
        await until(lambda: c.member(1).raft.log.snapshot_index > 10)
        send = c.system(4).peers.send_blob
        lost: list[int] = []

        def lossy(node: int, kind: int, *rest: Any, **more: Any) -> bool:
            if kind == UNKNOWN_GROUPS and not lost:
                lost.append(node)
                c.partition(4)
                return False
            return send(node, kind, *rest, **more)

        c.system(4).peers.send_blob = lossy  # type: ignore[method-assign]
        with trio.move_on_after(0.2):
            await c.nodes[1].change_members("log", "add", 4)
        await until(lambda: lost and 4 not in c.system(1).live)
        c.network.heal()
        await c.applied(among=[1, 2, 3, 4])
        assert [body for _, body in await c.read(4)] == bodies
