"""Configurations as values: the tables of changes, simple and joint, what is refused and why, and that neighbouring
configurations always share a quorum."""

from __future__ import annotations

import itertools
import random

import msgpack
import pytest

from logyard.engine.raft.configuration import (
    Change,
    Configuration,
    apply_change,
    apply_changes,
    enter_joint,
    leave_joint,
    with_targets,
)
from logyard.engine.raft.quorum import LOST, WON, committed_index, has_quorum, vote_outcome
from logyard.protocol.errors import BadRequest, Refused

THREE = Configuration((1, 2, 3), (4,))


def steps(text: str) -> list[Change]:
    """`add:4 remove:2` and the like."""
    return [Change(kind, *map(int, numbers)) for kind, *numbers in (word.split(":") for word in text.split())]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("add:5", Configuration((1, 2, 3, 5), (4,))),
        ("add_learner:5", Configuration((1, 2, 3), (4, 5))),
        ("add_promotable:5:9", Configuration((1, 2, 3), (4, 5), (), ((5, 9),))),
        ("add_promotable:4:9", Configuration((1, 2, 3), (4,), (), ((4, 9),))),
        ("promote:4", Configuration((1, 2, 3, 4))),
        ("demote:3", Configuration((1, 2), (3, 4))),
        ("remove:2", Configuration((1, 3), (4,))),
        ("remove:4", Configuration((1, 2, 3))),
        # Many learners are one step; so are learners and one voter.
        ("add_learner:5 add_learner:6 remove:4", Configuration((1, 2, 3), (5, 6))),
        ("add:5 remove:4 add_learner:6", Configuration((1, 2, 3, 5), (6,))),
        # Two voters are a joint step.
        ("add:5 remove:1", Configuration((2, 3, 5), (4,), (1, 2, 3), (), (), True)),
        ("promote:4 remove:1", Configuration((2, 3, 4), (), (1, 2, 3), (), (), True)),
        ("promote:4 demote:1", Configuration((2, 3, 4), (), (1, 2, 3), (), (1,), True)),
        ("remove:1 remove:2 remove:3 add:5", Configuration((5,), (4,), (1, 2, 3), (), (), True)),
        ("add:5 remove:1 add_promotable:6:7", Configuration((2, 3, 5), (4, 6), (1, 2, 3), ((6, 7),), (), True)),
    ],
)
def test_changes(text: str, want: Configuration) -> None:
    assert apply_changes(THREE, steps(text)) == want
    assert Configuration.decode(want.encode()) == want


@pytest.mark.parametrize(
    ("configuration", "text", "reason"),
    [
        (THREE, "", "without a change"),
        (THREE, "add:1", "voter already"),
        (THREE, "add:4", "promote it"),
        (THREE, "add:0", "not a node id"),
        (THREE, f"add:{1 << 32}", "not a node id"),
        (THREE, "add_learner:1", "voter already; demote it"),
        (THREE, "add_learner:4", "learner already"),
        (THREE, "add_promotable:1", "voter already"),
        (THREE, f"add_promotable:5:{1 << 63}", "not a target index"),
        (Configuration((1,), (2,), (), ((2, 5),)), "add_promotable:2", "promotable already"),
        (THREE, "promote:1", "not a learner"),
        (THREE, "promote:9", "not a learner"),
        (THREE, "demote:4", "not a voter"),
        (THREE, "remove:9", "not a member"),
        (THREE, "swap:1", "not a membership change"),
        (THREE, "add:5 remove:5", "contradictory: node 5"),
        (THREE, "add:5 add:5", "contradictory: node 5"),
        (THREE, "remove:1 remove:2 remove:3", "last voter"),
        (THREE, "remove:1 remove:2 demote:3", "last voter"),
        (THREE, "add:5 remove:9", "not a member"),
        (Configuration((1,), (2,)), "remove:1", "last voter"),
        (Configuration((1,), (2,)), "demote:1", "last voter"),
        (Configuration((1, 2), (), (1, 3)), "add:4", "joint"),
        (Configuration(tuple(range(1, 65))), "add:99", "at most 64"),
        (Configuration(tuple(range(1, 65))), "add:99 remove:1", "at most 64"),
    ],
)
def test_refused_changes(configuration: Configuration, text: str, reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        apply_changes(configuration, steps(text))
    with pytest.raises(Refused, match=reason):
        enter_joint(configuration, steps(text))


def test_one_change_can_be_made_joint_and_is_left_by_hand() -> None:
    joint = enter_joint(THREE, steps("add:5"), auto_leave=False)
    assert joint == Configuration((1, 2, 3, 5), (4,), (1, 2, 3))
    assert leave_joint(joint) == apply_change(THREE, Change("add", 5))
    with pytest.raises(Refused, match="no joint"):
        leave_joint(THREE)
    with pytest.raises(Refused, match="without voters"):
        enter_joint(Configuration(()), steps("add:1"))
    assert apply_changes(Configuration(()), steps("add:1")) == Configuration((1,))


def test_a_demoted_voter_votes_until_the_joint_phase_ends() -> None:
    joint = enter_joint(THREE, steps("demote:3"))
    assert joint.votes(3) and 3 not in joint.learners and joint.nodes() == {1, 2, 3, 4}
    assert leave_joint(joint) == Configuration((1, 2), (3, 4))
    joint = enter_joint(THREE, steps("remove:3 add_promotable:5:8"))
    assert leave_joint(joint) == Configuration((1, 2), (4, 5), (), ((5, 8),))


def test_an_open_target_is_the_last_index() -> None:
    assert with_targets(steps("add_promotable:5 add_promotable:6:3 add:7"), 40) == [
        Change("add_promotable", 5, 40), Change("add_promotable", 6, 3), Change("add", 7),
    ]  # fmt: skip


def quorums(configuration: Configuration, nodes: list[int]) -> list[set[int]]:
    subsets = [set(chosen) for size in range(len(nodes) + 1) for chosen in itertools.combinations(nodes, size)]
    return [chosen for chosen in subsets if has_quorum(configuration, chosen)]


@pytest.mark.parametrize("count", range(1, 6))
def test_quorums_before_and_after_a_single_change_meet(count: int) -> None:
    """Thesis 4.1: the reason why one server at a time needs no joint configuration."""
    before = Configuration(tuple(range(1, count + 1)))
    changes = [Change("add", count + 1)]
    changes += [Change(kind, node) for node in before.voters for kind in ("remove", "demote") if count > 1]
    for change in changes:
        after = apply_change(before, change)
        nodes = sorted({*before.voters, *after.voters})
        assert all(a & b for a in quorums(before, nodes) for b in quorums(after, nodes))


@pytest.mark.parametrize("seed", range(40))
def test_quorums_along_any_way_of_changes_meet(seed: int) -> None:
    """Thesis 4.3: each configuration's quorums meet those of the next, whatever the list of changes; and commit index,
    votes and reachability mean the same by a quorum."""
    rng = random.Random(seed)
    nodes = [1, 2, 3, 4, 5, 6]
    configuration = Configuration(tuple(sorted(rng.sample(nodes, rng.randrange(1, 5)))))
    ways = 0
    for _ in range(30):
        if configuration.joint:
            after = leave_joint(configuration)
        else:
            kinds = ("add", "remove", "demote", "promote", "add_learner")
            changes = [Change(rng.choice(kinds), node) for node in rng.sample(nodes, rng.randrange(1, 5))]
            try:
                after = apply_changes(configuration, changes)
            except Refused:
                continue
        ways += 1
        assert Configuration.decode(after.encode()) == after
        assert not {*after.learners} & {*after.voters, *after.outgoing}
        found = quorums(after, nodes)
        assert all(a & b for a in quorums(configuration, nodes) for b in found)
        for size in range(len(nodes) + 1):
            some = set(rng.sample(nodes, size))
            outcome = vote_outcome(after, {node: node in some for node in nodes})
            assert outcome == (WON if some in found else LOST)
            assert committed_index(after, dict.fromkeys(some, 9)) == (9 if some in found else 0)
        configuration = after
    assert ways


@pytest.mark.parametrize(
    "configuration",
    [
        THREE,
        Configuration(()),
        Configuration((1, 2), (7,), (1, 3)),
        Configuration((1, 2), (7, 8), (1, 3), ((7, (1 << 63) - 1),), (3,), True),
        Configuration(tuple(range(1, 65)), tuple(range(65, 129)), (), tuple((node, node) for node in range(65, 129))),
    ],
)
def test_encoding_round_trip(configuration: Configuration) -> None:
    assert Configuration.decode(configuration.encode()) == configuration


def test_what_the_first_release_wrote_is_read_and_written_as_it_was() -> None:
    assert Configuration((1, 2, 3), (4,)).encode() == msgpack.packb([[1, 2, 3], [4], []])
    assert Configuration.decode(msgpack.packb([[1, 2], [7], [1, 3]])) == Configuration((1, 2), (7,), (1, 3))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgpack.packb(7),
        msgpack.packb([[1], []]),
        msgpack.packb([[1], [], [], []]),
        msgpack.packb([[1], [], [], [], []]),
        msgpack.packb([[1], [], [], [], [], False, 1]),
        msgpack.packb([[1], [], [], [], [], 1]),
        msgpack.packb([[1], [], [], [], [], True]),
        msgpack.packb([[1], [2], [], [2], [], False]),
        msgpack.packb([[1], [2], [], [[2, -1]], [], False]),
        msgpack.packb([[1], [2], [], [[2, True]], [], False]),
        msgpack.packb([[1], [2], [], [[3, 1]], [], False]),
        msgpack.packb([[1], [2], [], [[2, 1], [2, 1]], [], False]),
        msgpack.packb([[1], [], [1, 2], [], [1], False]),
        msgpack.packb([[1], [], [1, 2], [], [3], False]),
        msgpack.packb([[1], [2], [1, 2], [], [], False]),
        msgpack.packb([[1], [1], []]),
        msgpack.packb([["one"], [], []]),
        msgpack.packb([[True], [], []]),
        msgpack.packb([[0], [], []]),
        msgpack.packb([[1 << 32], [], []]),
        msgpack.packb([[1, 1], [], []]),
        msgpack.packb([list(range(1, 100)), [], []]),
        Configuration((1, 2, 3)).encode() + b"\x00",
        Configuration((1, 2, 3)).encode()[:-1],
    ],
)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(BadRequest):
        Configuration.decode(data)
