"""The plans of the verbs for many logs: from every configuration a group can be left in, the goal is reached safely."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from logyard.client.board import Standing
from logyard.protocol.errors import NotLeader
from logyard.service.admin.plan import (
    CHANGE,
    DONE,
    LAG_ENTRIES,
    REFUSE,
    TRANSFER,
    WAIT,
    Add,
    Goal,
    Leave,
    Promote,
    Remove,
    Replace,
    Step,
    Targets,
    View,
    affected,
)  # fmt: skip
from logyard.service.admin.run import bring

ALL = (1, 2, 3, 4)


def view(
    voters: Sequence[int], learners: Sequence[int] = (), leader: int = 1, outgoing: Sequence[int] = (), behind: int = 0
) -> View:
    """A group at commit 1,000 whose node 4 lacks `behind` entries."""
    matches = {node: 1000 - (behind if node == 4 else 0) for node in {*voters, *learners} - {leader}}
    return View("g", leader, tuple(voters), tuple(learners), tuple(outgoing), 1000, matches)


def targets(live: Sequence[int] = ALL, leaders: Sequence[int] = ()) -> Targets:
    return Targets(leaders, live)


def applied(found: View, step: Step) -> View:
    """The group after a step, as the engine would have it."""
    voters, learners, leader = set(found.voters), set(found.learners), found.leader
    if step.kind == TRANSFER:
        assert step.node in voters, "only a voter may lead"
        return view(sorted(voters), sorted(learners), step.node)
    for kind, node in step.changes:
        if kind == "add_learner":
            assert node not in voters | learners
            learners.add(node)
        elif kind == "promote":
            assert node in learners and found.caught_up(node), "a vote that would hold the group up"
            learners.remove(node)
            voters.add(node)
        else:
            assert node in voters | learners
            voters.discard(node)
            learners.discard(node)
    assert voters, "a group keeps a voter"
    if leader not in voters:
        leader = min(voters)
    return view(sorted(voters), sorted(learners), leader)


def pursue(goal: Goal, start: View, live: Sequence[int] = ALL) -> tuple[View, list[Step]]:
    found = start
    steps: list[Step] = []
    while (step := goal.step(found, targets(live))).kind != DONE:
        assert step.kind in (CHANGE, TRANSFER) and len(steps) < 8, step
        steps.append(step)
        found = applied(found, step)
    return found, steps


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("leader", [1, 2, 3])
def test_replacing_ends_with_the_new_node_from_every_stop(leader: int, joint: bool) -> None:
    goal = Replace(3, 4, joint)
    end, steps = pursue(goal, view((1, 2, 3), leader=leader))
    assert (end.voters, end.learners) == ((1, 2, 4), ())
    assert end.leader != 3
    found = view((1, 2, 3), leader=leader)
    for step in steps:
        assert len(found.voters) >= 3, "never fewer copies that vote than before"
        # Killed here and run again, by another process that knows nothing.
        assert pursue(goal, found)[0].voters == (1, 2, 4)
        found = applied(found, step)
    assert any(step.kind == TRANSFER for step in steps) == (leader == 3)


def test_a_dead_node_is_replaced_too() -> None:
    end, steps = pursue(Replace(3, 4), view((1, 2, 3), leader=2), live=(1, 2, 4))
    assert end.voters == (1, 2, 4)
    assert [step.changes[0] for step in steps] == [("add_learner", 4), ("promote", 4), ("remove", 3)]


def test_the_only_voter_and_a_learner_are_replaced() -> None:
    assert pursue(Replace(1, 4), view((1,)))[0].voters == (4,)
    end, _ = pursue(Replace(3, 4), view((1, 2), (3,)))
    assert (end.voters, end.learners) == ((1, 2), (4,))


def test_a_swap_is_one_change_where_joint_changes_are_there() -> None:
    step = Replace(3, 4, True).step(view((1, 2, 3), (4,)), targets())
    assert step.changes == (("promote", 4), ("remove", 3))


@pytest.mark.parametrize("goal", [Replace(3, 4), Add(4), Promote(4)])
def test_nobody_votes_before_it_has_caught_up(goal: Goal) -> None:
    step = goal.step(view((1, 2, 3), (4,), behind=LAG_ENTRIES + 1), targets())
    assert (step.kind, step.node) == (WAIT, 4) and str(LAG_ENTRIES + 1) in step.why
    assert goal.step(view((1, 2, 3), (4,), behind=LAG_ENTRIES), targets()).changes == (("promote", 4),)
    silent = view((1, 2, 3), (4,))._replace(commit=5, matches={2: 5, 3: 5})
    assert goal.step(silent, targets()).kind == WAIT, "few entries, but it never answered"


def test_what_is_under_way_is_waited_for() -> None:
    found = view((1, 2, 4), outgoing=(1, 2, 3))
    for goal in (Replace(3, 4), Remove(1), Add(3), Remove(9)):
        assert goal.step(found, targets()).kind == WAIT


def test_adding_removing_promoting() -> None:
    assert pursue(Add(4), view((1, 2, 3)))[0].voters == (1, 2, 3, 4)
    assert pursue(Add(4, learner=True), view((1, 2, 3)))[0].learners == (4,)
    assert Add(4, learner=True).step(view((1, 2, 3, 4)), targets()).kind == DONE
    assert Promote(4).step(view((1, 2, 3)), targets()).kind == REFUSE
    assert Remove(1).step(view((1,)), targets()).kind == REFUSE
    end, steps = pursue(Remove(1), view((1, 2, 3)))
    assert end.voters == (2, 3) and [step.kind for step in steps] == [TRANSFER, CHANGE]
    # Nobody else answers: the leader removes itself.
    assert Remove(1).step(view((1, 2, 3)), targets((1,))).changes == (("remove", 1),)


def test_leaderships_go_to_who_leads_least() -> None:
    spread = targets((2, 3), leaders=(2, 2, 3))
    given = [Leave(1).step(view((1, 2, 3)), spread).node for _ in range(5)]
    assert given == [3, 2, 3, 2, 3]
    assert Leave(1).step(view((1, 2, 3)), targets((1,))).kind == WAIT
    assert Leave(1).step(view((1,)), targets()).kind == REFUSE
    assert Leave(1).step(view((1, 2, 3), leader=2), targets()).kind == DONE


def test_which_groups_a_goal_concerns() -> None:
    def row(name: str, leader: int, voters: tuple[int, ...], learners: tuple[int, ...] = ()) -> Standing:
        return Standing(name, 1, leader, 1, 0, "leader", "running", voters, learners, ())

    rows = [row("a", 1, (1, 2, 3)), row("b", 2, (1, 2, 4)), row("c", 3, (2, 3), (4,))]
    goals = (Add(4), Promote(4), Remove(3), Replace(1, 4), Leave(2))
    assert [affected(goal, rows) for goal in goals] == [["a", "c"], ["c"], ["a", "c"], ["a", "b"], ["b"]]
    own = row("_catalog", 2, (1, 2, 3))
    assert [affected(goal, [*rows, own]) for goal in goals[:4]] == [affected(goal, rows) for goal in goals[:4]]
    assert affected(Leave(2), [own]) == ["_catalog"] and not affected(Leave(2), [row("_catalog", 2, (2,), (1,))])


def test_random_walks_reach_their_goal() -> None:
    for voters in itertools.chain.from_iterable(itertools.combinations(ALL, size) for size in (1, 2, 3)):
        for leader, old, new in itertools.product(voters, voters, ALL):
            if old != new:
                end, _ = pursue(Replace(old, new), view(voters, leader=leader))
                assert old not in end.members and new in end.voters


async def test_a_change_whose_answer_was_lost_is_done_and_not_skipped() -> None:
    class Losing:
        """Does what it is told, and says that the leader has moved."""

        voters: Sequence[int] = (1, 2, 3)

        async def leader_view(self, name: str) -> dict[str, Any]:
            return {"name": name, "leader": 1, "voters": self.voters, "learners": [], "commit": 9}

        async def change_members(self, name: str, changes: object) -> None:
            self.voters = (1, 2)
            raise NotLeader(2)

    yard: Any = Losing()
    assert await bring(yard, Remove(3), "g", Targets((), (1, 2)), 10.0)
    assert not await bring(yard, Remove(3), "g", Targets((), (1, 2)), 10.0), "it is there already"
