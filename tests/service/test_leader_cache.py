"""Who leads what: a node's own table, and the one row a group that a client makes of several nodes' tables."""

from __future__ import annotations

import time
from pathlib import Path

from logyard.client.board import Standing, merge_board, standings
from logyard.engine.host.leader_cache import STALE_MIN, LeaderCache
from logyard.engine.host.leader_cache import Standing as Row
from logyard.machines.log import AppendLog
from logyard.service.embedded import open_system
from tests.engine.host.cluster import cluster, until


def standing(name: str, node: int, leader: int, term: int, state: str = "running") -> Standing:
    role = "leader" if node == leader else "follower"
    return Standing(name, 7, leader, term, 0, role, state, (1, 2, 3), (), ())


def test_the_leader_in_the_newest_term_is_believed() -> None:
    old, new = standing("a", 1, 1, 4), standing("a", 2, 2, 5)
    follower = standing("a", 3, 2, 5)
    for boards in ([[old], [new], [follower]], [[follower], [new], [old]]):
        assert merge_board(boards) == [new]
    assert merge_board([[follower], [standing("a", 2, 2, 5, "halted")]])[0].role == "leader"
    stopped = standing("a", 1, 1, 5, "stopped")
    assert merge_board([[stopped], [standing("a", 2, 0, 6)]])[0].term == 6
    assert [row.name for row in merge_board([[standing("b", 1, 1, 1)], [new]])] == ["a", "b"]


def test_rows_of_groups_that_are_gone_do_not_pile_up() -> None:
    board = LeaderCache()
    board.rows = {uid: Row(1, 1, 1) for uid in range(STALE_MIN + 3)}
    board.prune({1}, 1)
    assert set(board.rows) == {1}
    board.prune(set(), 0)
    assert set(board.rows) == {1}, "few are not worth the walk"


async def test_a_nodes_table_follows_elections_and_answers_for_stopped_groups(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        for name in ("a", "b", "c"):
            await c.create(name)
        before = time.time_ns() // 1_000_000
        leader = await c.leader("b")
        target = leader % 3 + 1
        won = c.system(target).leader_cache.elections
        await c.nodes[leader].transfer("b", target)
        for number in c.ids:
            await until(lambda number=number: standings(c.nodes[number].board("a", 1))[0].leader == target)
        (row,) = standings(c.nodes[target].board("a", 1))
        assert (row.name, row.role, row.members) == ("b", "leader", (1, 2, 3))
        assert before <= row.since_ms <= time.time_ns() // 1_000_000
        assert c.system(target).leader_cache.elections == won + 1
        c.system(3).replicas.retire.stop(c.member(3, "a"), "a test")
        rows = standings(c.nodes[3].board("", 3))
        assert [(one.name, one.state) for one in rows] == [("a", "stopped"), ("b", "running"), ("c", "running")]


async def test_an_embedded_system_has_one(tmp_path: Path) -> None:
    async with open_system(tmp_path) as system:
        assert system.leaderboard() == []
        await system.start_group("events", AppendLog())
        (row,) = system.leaderboard()
        assert (row.name, row.leader, row.voters) == ("events", 1, (1,)) and row.since_ms > 0
