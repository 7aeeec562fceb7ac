"""The reconciler's plan: what it does for one log, and that it converges on random clusters. Planted bugs are found."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping

import pytest

from logyard.machines.catalog.logs import LIVE, RESERVED, Log
from logyard.machines.catalog.nodes import ACTIVE, DEAD, DRAINING, REMOVED, RETURNED, SILENT, Node
from logyard.service.catalog.planner import Plan, Planner, Proposed


def node(state: str = ACTIVE, zone: str = "", replaces: int = 0) -> Node:
    return Node(state, 1, "", "", 0, zone, replaces=replaces)


def log(uid: int, *voters: int, name: str = "", copies: int = 0, **more: object) -> Log:
    made = Log(name or f"log-{uid}", uid, "log", {}, voters, 0, LIVE, 1, copies=copies or len(voters), seen=1)
    return made._replace(voters=tuple(sorted(voters)), **more)  # type: ignore[arg-type]


def plan(
    nodes: Mapping[int, Node],
    logs: Iterable[Log],
    leaders: Mapping[int, int] | None = None,
    kind: type[Planner] = Planner,
) -> Plan:
    return kind(nodes, logs, leaders or {}, {}).plan()


FOUR = {1: node(), 2: node(), 3: node(), 4: node()}


def moves(found: Plan) -> list[tuple[str, int, int]]:
    return [(move.kind, move.source, move.target) for move in found.moves]


def test_a_dead_member_is_replaced_by_who_has_least_or_takes_its_place() -> None:
    logs = [log(1, 1, 2, 3)]
    dead = {**FOUR, 3: node(DEAD)}
    assert moves(plan(dead, logs)) == [("replace", 3, 4)]
    assert moves(plan({**dead, 5: node(replaces=3)}, logs)) == [("replace", 3, 5)]
    assert moves(plan({**FOUR, 3: node(SILENT)}, logs)) == [], "silent is not dead"
    assert moves(plan({**FOUR, 3: node(RETURNED)}, logs)) == [], "it is a member still"
    assert moves(plan({**dead, 4: node(RETURNED)}, logs)) == [], "it gets nothing new"


def test_what_can_not_be_helped_is_listed_with_what_to_type() -> None:
    dead = {**FOUR, 2: node(DEAD), 3: node(DEAD)}
    found = plan(dead, [log(1, 1, 2, 3), log(2, 2, 3)])
    assert found.moves == []
    assert [one.hint for one in found.stuck] == [
        "logyard force-shrink log-1 --node 1 --yes-the-quorum-is-lost", "bring back one of their directories",
    ]  # fmt: skip
    short = plan({1: node(), 2: node(), 3: node(DEAD)}, [log(1, 1, 2, 3)])
    assert short.moves == [] and "no node can take its place" in short.stuck[0].why
    assert short.stuck[0].hint.endswith("or have one copy fewer: logyard members remove --all --node 3"), "to shrink"
    late = plan(FOUR, [log(1, 1, 2, 7)])
    assert late.moves == [] and "has not said yet who it is" in late.stuck[0].why, "it starts later, with its logs"
    assert plan({**FOUR, 2: node(DEAD)}, [log(1, 1, 2, 7)]).moves == [], "and who it is nobody knows"
    waits = plan({**FOUR, 2: node(DEAD), 3: node(SILENT)}, [log(1, 1, 2, 3)])
    assert waits.moves == [] and waits.stuck == [], "the silent one may come back"


def test_short_logs_draining_nodes_and_learners_of_the_dead() -> None:
    assert moves(plan(FOUR, [log(1, 1, 2, copies=3)])) == [("add", 0, 3)]
    assert moves(plan({**FOUR, 2: node(DRAINING)}, [log(1, 1, 2, 3)])) == [("replace", 2, 4)]
    assert moves(plan({**FOUR, 4: node(DEAD)}, [log(1, 1, 2, 3, learners=(4,))])) == [("remove", 4, 0)]
    assert moves(plan(FOUR, [log(1, 1, 2, 3, 4, copies=3)])) == [], "what an operator added stays"


def test_a_node_that_drains_gives_up_its_learners() -> None:
    """It never got empty: a learner is counted as a log that it has."""
    drains = {**FOUR, 2: node(DRAINING)}
    found = plan(drains, [log(1, 1, 3, 4, learners=(2,))])
    assert moves(found) == [("remove", 2, 0)] and found.moves[0].why == "node 2 drains"
    assert moves(plan(FOUR, [log(1, 1, 3, 4, learners=(2,))])) == [], "an operator's"


def test_a_short_log_without_a_place_is_listed_and_what_drains_beside_it() -> None:
    """Nothing was said of either."""
    short = [log(1, 1, 2, copies=3)]
    found = plan({1: node(), 2: node()}, short)
    assert found.moves == [] and found.stuck[0].why == "2 of 3 copies, and no node can take one"
    assert found.stuck[0].hint == "add a node: logyard nodes invite"
    drains = plan({1: node(), 2: node(DRAINING)}, short)
    assert drains.moves == [] and any("node 2 drains" in one.why for one in drains.stuck)
    refused = Planner({1: node(), 2: node(), 3: node()}, short, {}, {}, {1: {3}}).plan()
    assert refused.stuck[0].why.endswith("no node can take one; node 3 refused it")


def test_system_logs_come_first_and_the_catalogue_looks_after_itself() -> None:
    dead = {**FOUR, 3: node(DEAD)}
    found = plan(dead, [log(1, 1, 2, 3), log(9, 1, 2, 3, name="_groups-0"), log(5, 1, 2, 3, name=RESERVED)])
    assert [move.name for move in found.moves] == ["_groups-0", "log-1"]


def test_zones() -> None:
    nodes = {number: node(zone="abc"[number % 3]) for number in range(1, 7)}
    assert moves(plan(nodes, [log(1, 1, 4, 2)])) == [("replace", 4, 3)]
    assert moves(plan(nodes, [log(1, 1, 4, 2, pins=(1, 4))])) == []
    assert moves(plan(nodes, [log(1, 1, 2, copies=3, zones=("c", "b"))])) == [("add", 0, 4)]
    dead = {**nodes, 3: node(DEAD, "a")}
    assert moves(plan(dead, [log(1, 1, 2, 3)])) == [("replace", 3, 6)], "the zone that has none"


def test_a_third_silent_holds_everything() -> None:
    nodes = {**{number: node() for number in range(1, 7)}, 5: node(SILENT), 6: node(SILENT), 7: node(DEAD)}
    assert "a third or more" in plan(nodes, [log(1, 1, 2, 7)]).held
    assert plan({**nodes, 5: node()}, [log(1, 1, 2, 7)]).held == ""


def test_leaderships_are_evened_beyond_a_margin() -> None:
    logs = [log(uid, 1, 2, 3) for uid in range(1, 10)]
    three = {number: node() for number in (1, 2, 3)}
    assert moves(plan(three, logs, dict.fromkeys(range(1, 10), 1))) == [("lead", 1, target) for target in (2, 3) * 3]
    spread = {uid: 1 + uid % 3 for uid in range(1, 10)}
    assert moves(plan(three, logs, {**spread, 1: 3})) == [], "one more is no reason"


def test_a_log_that_moves_is_left_alone_and_counted_where_it_goes() -> None:
    dead = {**FOUR, 3: node(DEAD), 5: node()}
    found = Planner(dead, [log(1, 1, 2, 3), log(2, 1, 2, 3)], {}, {1: (4, 3)}).plan()
    assert [(move.uid, move.target) for move in found.moves] == [(2, 5)]


class Cluster:
    """A random cluster, and what a plan makes of it."""

    def __init__(self, seed: int, count: int = 8, logs: int = 300) -> None:
        self.draw = draw = random.Random(seed)
        zones = draw.choice([[""], ["a", "b", "c"]])
        self.nodes = {number: node(zone=draw.choice(zones)) for number in range(1, count + 1)}
        for number, state in enumerate(draw.sample([DEAD, DRAINING, SILENT, RETURNED, ACTIVE], 3), 1):
            self.nodes[number] = self.nodes[number]._replace(state=state)
        self.logs = {}
        for uid in range(1, logs + 1):
            voters = draw.sample(sorted(self.nodes), draw.choice([1, 3, 3, 3, 5]))
            extra = draw.choice([0, 0, 0, 1])
            self.logs[uid] = log(uid, *voters, copies=len(voters) + extra if len(voters) < 5 else 5)
        self.leaders = {uid: draw.choice(row.voters) for uid, row in self.logs.items()}

    def apply(self, move: Proposed) -> None:
        """Do a move, as the groups would."""
        row = self.logs[move.uid]
        assert move.kind in ("replace", "add", "remove", "lead"), f"{move} is no move"
        if move.kind == "lead":
            assert move.target in row.voters
            self.leaders[move.uid] = move.target
            return
        living = [one for one in row.voters if self.nodes[one].state not in (DEAD, REMOVED)]
        assert len(living) * 2 > len(row.voters), f"{move}: {row.voters} have no majority"
        assert move.target == 0 or self.nodes[move.target].state == ACTIVE, f"{move} to a node that gets nothing"
        voters = (set(row.voters) - {move.source}) | ({move.target} - {0})
        assert len(voters) >= len(row.voters), f"{move} makes {row.voters} smaller"
        self.logs[move.uid] = row._replace(voters=tuple(sorted(voters)))
        if self.leaders[move.uid] not in voters:
            self.leaders[move.uid] = min(voters)

    def needed(self) -> int:
        """Moves that have a reason other than evenness."""
        count = 0
        for row in self.logs.values():
            count += sum(self.nodes[one].state in (DEAD, DRAINING) for one in row.voters) + row.copies - len(row.voters)
        return count

    def settle(self, kind: type[Planner] = Planner) -> int:
        """Plan and do until there is nothing; return how many members moved."""
        members = 0
        for _ in range(12):
            found = plan(self.nodes, self.logs.values(), self.leaders, kind)
            if found.held:
                assert not kind(self.nodes, (), {}, {}).plan().moves
                return members
            if not found.moves:
                return members
            assert len({(move.uid, move.kind == "lead") for move in found.moves}) == len(found.moves), "two of a log"
            for move in found.moves:
                self.apply(move)
                members += move.kind != "lead"
        raise AssertionError(f"it does not come to rest: {found.moves[:5]}")


@pytest.mark.parametrize("seed", range(60))
def test_it_converges_and_then_finds_nothing(seed: int) -> None:
    cluster = Cluster(seed)
    stuck = {one.uid for one in plan(cluster.nodes, cluster.logs.values()).stuck}
    cluster.settle()
    for uid, row in cluster.logs.items():
        bad = [one for one in row.voters if cluster.nodes[one].state in (DEAD, DRAINING)]
        if uid not in stuck and bad:
            silent = [one for one in row.voters if cluster.nodes[one].state == SILENT]
            assert silent or plan(cluster.nodes, [row]).stuck, f"{row.voters} stays on {bad}"


@pytest.mark.parametrize("seed", range(12))
def test_growth_moves_no_more_than_it_has_to(seed: int) -> None:
    draw = random.Random(seed)
    nodes = {number: node() for number in range(1, 17)}
    before = 8 if seed % 2 else 15
    logs = {uid: log(uid, *draw.sample(range(1, before + 1), 3)) for uid in range(1, 2001)}
    cluster = Cluster(seed)
    cluster.nodes, cluster.logs = nodes, logs
    cluster.leaders = {uid: draw.choice(row.voters) for uid, row in logs.items()}
    load = Counter(one for row in logs.values() for one in row.voters)
    share = sum(load.values()) / len(nodes)
    above = sum(max(0, load[number] - share) for number in nodes)
    moved = cluster.settle()
    assert moved <= 1.1 * above
    load = Counter(one for row in cluster.logs.values() for one in row.voters)
    leads = Counter(cluster.leaders.values())
    assert max(load.values()) <= 1.05 * share
    assert max(leads.values()) <= 1.05 * len(logs) / len(nodes) + 2


class NoRuleForAThird(Planner):
    def plan(self) -> Plan:
        return super().plan()._replace(held="")


class DeletesOrphans(Planner):
    def plan(self) -> Plan:
        found = super().plan()
        lost = [row for row in self._rows if 1 not in row.voters and not row.moved]
        return found._replace(
            moves=[*found.moves, *(Proposed(one.uid, one.name, "delete", 1, 0, "") for one in lost[:1])]
        )


def test_planted_bugs_are_found() -> None:
    nodes = {**{number: node() for number in range(1, 7)}, 5: node(SILENT), 6: node(SILENT), 7: node(DEAD)}
    assert not plan(nodes, [log(1, 1, 2, 7)], kind=NoRuleForAThird).held, "which the test above would see"
    with pytest.raises(AssertionError, match="is no move"):
        Cluster(1).settle(DeletesOrphans)
