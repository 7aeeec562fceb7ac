"""Each step of a move, read off its group's configuration; and what of a plan is begun."""

from __future__ import annotations

import pytest

from logyard.engine.raft.configuration import Change, Configuration, apply_changes
from logyard.machines.catalog.logs import LIVE, Log
from logyard.machines.catalog.nodes import ACTIVE, DEAD, RETURNED, Node
from logyard.machines.catalog.plan import Move
from logyard.service.catalog.mover import UNDO, WAIT, Step, next_step
from logyard.service.catalog.planner import Plan, Proposed
from logyard.service.catalog.reconciler import AT_ONCE, PER_NODE, doing, planned


def move(kind: str, source: int, target: int, step: str = "proposed", why: str = "node 3 is dead") -> Move:
    return Move(7, kind, source, target, why, 0, step)


@pytest.mark.parametrize("first", [1, 3], ids=["follower", "leader"])
@pytest.mark.parametrize("voters", [(3,), (1, 2, 3)])
def test_a_member_is_replaced_whoever_leads(first: int, voters: tuple[int, ...]) -> None:
    leader = first if first in voters else 3
    configuration, seen = Configuration(voters), []
    for _ in range(8):
        step = next_step(move("replace", 3, 4), configuration, leader, {1, 2, 3, 4})
        seen.append(step)
        if step.outcome:
            break
        if step.transfer:
            assert step.transfer in configuration.voters
            leader = step.transfer
            continue
        made = apply_changes(configuration, [Change(*change) for change in step.changes])
        assert len(made.voters) >= len(voters)
        configuration = Configuration(made.voters, made.learners)
    assert seen[-1].outcome == "done" and configuration == Configuration(tuple(sorted({*voters, 4} - {3})))
    if len(voters) == 3:
        assert Step((("promote", 4), ("remove", 3))) in seen, "in one joint change"


def test_nobody_votes_who_has_not_caught_up_and_a_joint_one_is_waited_for() -> None:
    learning = Configuration((1, 2, 3), (4,))
    assert next_step(move("replace", 3, 4), learning, 1, {1, 2}) == WAIT
    joint = Configuration((1, 2, 4), (), (1, 2, 3), auto_leave=True)
    assert next_step(move("replace", 3, 4), joint, 1, {1, 2, 4}) == WAIT


def test_what_is_given_up_takes_its_learner_back() -> None:
    learning = Configuration((1, 2, 3), (4,))
    given = move("replace", 3, 4, UNDO)
    assert next_step(given, learning, 1, {1, 2, 3, 4}) == Step((("remove", 4),))
    assert next_step(given, Configuration((1, 2, 3)), 1, set()) == Step(outcome="cancelled")
    assert next_step(given, Configuration((1, 2, 4)), 1, set()).outcome == "cancelled", "too late"


def test_leaderships_additions_and_removals() -> None:
    three = Configuration((1, 2, 3))
    assert next_step(move("lead", 1, 2), three, 1, {1, 2}) == Step(transfer=2)
    assert next_step(move("lead", 1, 2), three, 2, {1, 2}) == Step(outcome="done")
    assert next_step(move("lead", 1, 4), three, 1, {1, 2}).outcome == "its target has no vote"
    assert next_step(move("add", 0, 4), three, 1, set()) == Step((("add_learner", 4),))
    assert next_step(move("add", 0, 4), Configuration((1, 2, 3), (4,)), 1, {4}) == Step((("promote", 4),))
    assert next_step(move("remove", 3, 0), Configuration((1, 2), (3,)), 1, set()) == Step((("remove", 3),))
    assert next_step(move("remove", 3, 0), Configuration((1, 2)), 1, set()) == Step(outcome="done")


def node(state: str = ACTIVE) -> Node:
    return Node(state, 1, "", "", 0)


def test_what_is_begun_is_bounded_and_what_is_vain_given_up() -> None:
    nodes = {1: node(), 2: node(), 3: node(DEAD), 4: node()}
    moves = [Proposed(uid, f"log-{uid}", "replace", 3, 4, "node 3 is dead") for uid in range(1, 100)]
    assert len(doing(Plan(moves, [], ""), nodes, {}, {}).propose) == PER_NODE
    assert doing(Plan(moves, [], "held"), nodes, {}, {}).propose == []
    spread = [one._replace(source=uid, target=uid + 1000) for uid, one in enumerate(moves)]
    assert len(doing(Plan(spread, [], ""), nodes, {}, {}).propose) == AT_ONCE
    row = Log("a", 7, "log", {}, (1, 2, 3), 0, LIVE, 1, seen=1, voters=(1, 2, 3), copies=3)
    under_way = {1: move("replace", 3, 4)}
    assert doing(Plan([], [], ""), nodes, {7: row}, under_way) == ([], [], [])
    assert doing(Plan([], [], ""), {**nodes, 3: node(RETURNED)}, {7: row}, under_way).undo == [1]
    assert doing(Plan([], [], ""), {**nodes, 4: node(DEAD)}, {7: row}, under_way).undo == [1]
    assert doing(Plan([], [], ""), nodes, {7: None}, under_way).end == [1]
    assert planned(nodes, [row], {}, under_way).moves == [], "it moves already"
