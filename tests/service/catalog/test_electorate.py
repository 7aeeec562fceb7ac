"""Who votes in the catalogue, and each change on the way there."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from logyard.engine.raft.configuration import Change, Configuration, apply_changes
from logyard.machines.catalog.nodes import ACTIVE, DEAD, DRAINING, REMOVED, SILENT
from logyard.service.catalog.electorate import next_step, voters_wanted


def settled(configuration: Configuration, states: Mapping[int, str], live: set[int]) -> Configuration:
    """Make steps until there are none; each must keep a majority that is there."""
    for _ in range(40):
        changes = next_step(configuration, states, live, set(configuration.learners) & live)
        if not changes:
            return configuration
        made = apply_changes(configuration, [Change(kind, node) for kind, node in changes])
        for half in (configuration.voters, made.voters):
            assert len(live & set(half)) * 2 > len(half), f"{changes} on {configuration} can't be committed"
        configuration = Configuration(made.voters, made.learners)
    raise AssertionError("no end")


def test_it_grows_from_its_founder() -> None:
    found = Configuration((1,))
    for count, voters in ((1, (1,)), (2, (1,)), (3, (1, 2, 3)), (6, (1, 2, 3)), (7, (1, 2, 3, 4, 5))):
        states = dict.fromkeys(range(1, count + 1), ACTIVE)
        found = settled(found, states, set(states))
        assert (found.voters, set(found.learners)) == (voters, set(states) - set(voters))


@pytest.mark.parametrize(
    ("states", "voters"),
    [
        ({1: ACTIVE, 2: SILENT, 3: ACTIVE, 4: ACTIVE}, (1, 2, 3)),
        ({1: ACTIVE, 2: DEAD, 3: ACTIVE, 4: ACTIVE}, (1, 3, 4)),
        ({1: DRAINING, 2: ACTIVE, 3: ACTIVE, 4: ACTIVE}, (2, 3, 4)),
        ({1: ACTIVE, 2: REMOVED, 3: ACTIVE}, (1,)),
    ],
)
def test_whose_vote_moves(states: dict[int, str], voters: tuple[int, ...]) -> None:
    live = {node for node, state in states.items() if state in (ACTIVE, DRAINING)}
    before = Configuration((1, 2, 3), tuple(node for node in states if node > 3))
    assert settled(before, states, live).voters == voters


def test_a_lost_vote_without_anybody_to_take_it_stays() -> None:
    states = {1: ACTIVE, 2: ACTIVE, 3: DEAD}
    assert voters_wanted((1, 2, 3), states) == (1, 2)
    assert settled(Configuration((1, 2, 3)), states, {1, 2}).voters == (1, 2, 3)


def test_nobody_votes_who_has_not_caught_up() -> None:
    states = dict.fromkeys(range(1, 4), ACTIVE)
    assert next_step(Configuration((1,), (2, 3)), states, {1, 2, 3}, {2}) == []
    assert next_step(Configuration((1,), (2, 3)), states, {1, 2, 3}, {2, 3}) == [("promote", 2), ("promote", 3)]


@pytest.mark.parametrize("seed", range(60))
def test_it_settles_whatever_the_states(seed: int) -> None:
    draw = random.Random(seed)
    states = {node: draw.choice([ACTIVE, ACTIVE, ACTIVE, SILENT, DRAINING, DEAD]) for node in range(1, 9)}
    live = {node for node, state in states.items() if state in (ACTIVE, DRAINING)}
    voters = tuple(sorted(draw.sample(sorted(states), 3)))
    if len(live & set(voters)) < 2:
        return
    found = settled(Configuration(voters, tuple(set(states) - set(voters))), states, live)
    assert settled(found, states, live) == found
