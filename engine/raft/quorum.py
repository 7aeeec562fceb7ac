"""Counting: what a majority of a configuration has stored, voted or can reach (Raft paper 5.2, 5.4; etcd quorum
package).

Invariants: with `outgoing` voters (joint consensus, thesis 4.3) both majorities must agree; learners never count; a
configuration without voters has no quorum, elects nobody and commits nothing. Pure functions, called by the verbs.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .membership import Configuration

PENDING: Final = 0
WON: Final = 1
LOST: Final = 2


def _majority_index(voters: tuple[int, ...], match: Mapping[int, int]) -> int:
    count = len(voters)
    if not count:
        return 0
    found = sorted([match.get(node, 0) for node in voters])
    return found[(count - 1) >> 1]


def committed_index(configuration: Configuration, match: Mapping[int, int]) -> int:
    """Return the largest index that a quorum has stored; `match` gives each node's (absent: 0)."""
    index = _majority_index(configuration.voters, match)
    if configuration.outgoing:
        return min(index, _majority_index(configuration.outgoing, match))
    return index


def _majority_vote(voters: tuple[int, ...], votes: Mapping[int, bool]) -> int:
    need = len(voters) // 2 + 1
    granted = missing = 0
    for node in voters:
        vote = votes.get(node)
        if vote is None:
            missing += 1
        elif vote:
            granted += 1
    if granted >= need:
        return WON
    return PENDING if granted + missing >= need else LOST


def vote_outcome(configuration: Configuration, votes: Mapping[int, bool]) -> int:
    """Return WON, LOST or PENDING, from the votes known so far (True: granted)."""
    outcome = _majority_vote(configuration.voters, votes)
    if configuration.outgoing and outcome != LOST:
        other = _majority_vote(configuration.outgoing, votes)
        if other != WON:
            return other
    return outcome


def _majority_of(voters: tuple[int, ...], nodes: Container[int]) -> bool:
    need = len(voters) // 2 + 1
    for node in voters:
        if node in nodes:
            need -= 1
            if not need:
                return True
    return False


def has_quorum(configuration: Configuration, nodes: Container[int]) -> bool:
    """Return whether `nodes` contain a quorum."""
    if not _majority_of(configuration.voters, nodes):
        return False
    return not configuration.outgoing or _majority_of(configuration.outgoing, nodes)


def first_leader(uid: int, voters: Sequence[int]) -> int:
    """Return which of these nodes is to lead a group before others, 0 for none: a uid picks one, so that leaders are
    spread."""
    return voters[uid % len(voters)] if voters else 0
