"""Who votes in the catalogue, and the next change of its members that leads there. Pure.

Voters: one of up to two nodes, three, five from seven nodes on. A voter stays as long as its node is neither dead nor
leaving; a lost one is replaced first, by the lowest number, and all other nodes learn. Invariant: each step is one
change of membership (joint, where more than one voter changes), and only a node that has caught up is given a vote.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from typing import TypeAlias

from logyard.engine.raft.configuration import Configuration
from logyard.machines.catalog.nodes import ACTIVE, DEAD, DRAINING, JOINING, REMOVED, RETURNED, SILENT

Changes: TypeAlias = list[tuple[str, int]]

VOTES = (ACTIVE, SILENT)
LEARNS = (ACTIVE, SILENT, DRAINING, RETURNED, JOINING)


def voters_wanted(current: Collection[int], states: Mapping[int, str]) -> tuple[int, ...]:
    """Return who should vote: those of now that may, then the lowest active nodes."""
    kept = [node for node in sorted(current) if states.get(node) in VOTES]
    fresh = [node for node in sorted(states) if node not in kept and states[node] == ACTIVE]
    return tuple(sorted((kept + fresh)[: votes(states)]))


def votes(states: Mapping[int, str]) -> int:
    """Return how many should vote."""
    there = sum(state != REMOVED for state in states.values())
    return 1 if there < 3 else 5 if there >= 7 else 3


def next_step(configuration: Configuration, states: Mapping[int, str], live: Set[int], caught_up: Set[int]) -> Changes:
    """Return the next change, or nothing. `caught_up`: learners that have stored what is committed."""
    if configuration.joint:
        return []
    voters, learners = set(configuration.voters), set(configuration.learners)
    wanted = set(voters_wanted(configuration.voters, states))
    fresh = wanted - voters
    leaving = sorted(voters - wanted, key=lambda node: (states.get(node) in LEARNS, node))
    if len(wanted) < votes(states):
        # Too few may vote: a lost vote stays until somebody takes its place, one that was taken away goes.
        surplus = len(voters) + len(fresh) - votes(states)
        leaving = [node for at, node in enumerate(leaving) if at < surplus or states.get(node, REMOVED) == REMOVED]
    after = (voters - set(leaving)) | fresh
    if after != voters and fresh <= learners & live & caught_up and len(after & live) * 2 > len(after):
        return [("promote", node) for node in sorted(fresh)] + [_leave(node, states) for node in sorted(leaving)]
    known = voters | learners
    for node in sorted(states):
        if states[node] in LEARNS and node in live and node not in known:
            return [("add_learner", node)]
    for node in sorted(learners):
        if states.get(node, REMOVED) in (DEAD, REMOVED):
            return [("remove", node)]
    return []


def _leave(node: int, states: Mapping[int, str]) -> tuple[str, int]:
    return ("remove" if states.get(node, REMOVED) in (DEAD, REMOVED) else "demote"), node
