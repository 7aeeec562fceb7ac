"""Counting, as tables. The joint rows are the seam for joint consensus; the exhaustive test defines what a majority
is."""

from __future__ import annotations

import itertools

import pytest

from logyard.engine.raft.membership import Configuration
from logyard.engine.raft.quorum import LOST, PENDING, WON, committed_index, has_quorum, vote_outcome


@pytest.mark.parametrize(
    ("voters", "outgoing", "match", "want"),
    [
        ((), (), {}, 0),
        ((), (), {1: 9}, 0),
        ((), (1,), {1: 9}, 0),
        ((1,), (), {1: 9}, 9),
        ((1,), (), {}, 0),
        ((1, 2), (), {1: 9}, 0),
        ((1, 2), (), {1: 9, 2: 4}, 4),
        ((1, 2, 3), (), {1: 9, 2: 4}, 4),
        ((1, 2, 3), (), {1: 9, 2: 4, 3: 12}, 9),
        ((1, 2, 3, 4), (), {1: 9, 2: 4, 3: 12}, 4),
        ((1, 2, 3, 4, 5), (), {1: 9, 2: 4, 3: 12, 4: 1}, 4),
        ((1, 2, 3), (), {1: 9, 4: 100, 5: 100}, 0),  # who is no voter does not count
        ((1, 2, 3), (3, 4, 5), {1: 9, 2: 9, 3: 0, 4: 7, 5: 5}, 5),
        ((1, 2, 3), (3, 4, 5), {1: 9, 2: 9, 3: 9}, 0),
        ((1, 2), (2,), {1: 9, 2: 3}, 3),
    ],
)
def test_committed_index(voters: tuple[int, ...], outgoing: tuple[int, ...], match: dict[int, int], want: int) -> None:
    assert committed_index(Configuration(voters, (), outgoing), match) == want


@pytest.mark.parametrize(
    ("voters", "outgoing", "votes", "want"),
    [
        ((), (), {}, LOST),
        ((), (), {1: True}, LOST),
        ((1,), (), {}, PENDING),
        ((1,), (), {1: True}, WON),
        ((1,), (), {1: False}, LOST),
        ((1, 2), (), {1: True}, PENDING),
        ((1, 2), (), {1: True, 2: False}, LOST),
        ((1, 2, 3), (), {1: True}, PENDING),
        ((1, 2, 3), (), {1: True, 2: False}, PENDING),
        ((1, 2, 3), (), {1: True, 2: False, 3: False}, LOST),
        ((1, 2, 3), (), {1: True, 3: True}, WON),
        ((1, 2, 3), (), {1: True, 7: True, 8: True}, PENDING),
        ((1, 2, 3, 4), (), {1: True, 2: True}, PENDING),
        ((1, 2, 3, 4), (), {1: True, 2: True, 3: False, 4: False}, LOST),
        ((1, 2, 3), (3, 4, 5), {1: True, 2: True}, PENDING),
        ((1, 2, 3), (3, 4, 5), {1: True, 2: True, 4: False, 5: False}, LOST),
        ((1, 2, 3), (3, 4, 5), {1: True, 3: True, 4: True}, WON),
        ((1, 2, 3), (3, 4, 5), {3: True, 4: True, 1: False, 2: False}, LOST),
    ],
)
def test_vote_outcome(voters: tuple[int, ...], outgoing: tuple[int, ...], votes: dict[int, bool], want: int) -> None:
    assert vote_outcome(Configuration(voters, (), outgoing), votes) == want


@pytest.mark.parametrize(
    ("voters", "outgoing", "nodes", "want"),
    [
        ((), (), {1, 2}, False),
        ((1,), (), {1}, True),
        ((1,), (), set(), False),
        ((1, 2), (), {1}, False),
        ((1, 2, 3), (), {1, 3}, True),
        ((1, 2, 3), (), {1, 8, 9}, False),
        ((1, 2, 3, 4), (), {1, 2}, False),
        ((1, 2, 3), (3, 4, 5), {1, 2, 3}, False),
        ((1, 2, 3), (3, 4, 5), {1, 3, 4}, True),
        ((), (1,), {1}, False),
    ],
)
def test_has_quorum(voters: tuple[int, ...], outgoing: tuple[int, ...], nodes: set[int], want: bool) -> None:
    assert has_quorum(Configuration(voters, (), outgoing), nodes) is want


@pytest.mark.parametrize("count", range(1, 7))
def test_two_quorums_always_meet_and_agree_with_the_votes(count: int) -> None:
    """Pitfall 39: even sizes, one node, two nodes. A set of nodes is a quorum iff its votes win iff its entries
    commit."""
    voters = tuple(range(1, count + 1))
    configuration = Configuration(voters, learners=(8, 9))
    quorums = []
    for size in range(count + 1):
        for nodes in itertools.combinations(voters, size):
            quorum = has_quorum(configuration, set(nodes))
            assert quorum is (2 * size > count)
            votes = {node: node in nodes for node in voters}
            assert (vote_outcome(configuration, votes) == WON) is quorum
            assert (committed_index(configuration, {8: 5, 9: 5} | dict.fromkeys(nodes, 5)) == 5) is quorum
            if quorum:
                quorums.append(set(nodes))
    assert all(a & b for a in quorums for b in quorums)
