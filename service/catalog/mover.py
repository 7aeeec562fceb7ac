"""Moves of the plan, done where a group's leader is: each look takes the next step of each move of a group led here.

A step is read off the group's configuration, so a move goes on wherever its group is led next, and one that was done
already is done again without effect. A member that is replaced leaves in the same joint change in which the new one
gets its vote. Invariant: nothing is begun while the plan is paused or too many nodes are silent. Called by the keeper.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from typing import NamedTuple

import trio

from logyard.engine.raft.configuration import Configuration
from logyard.engine.raft.state import LEADER
from logyard.engine.replica.member import Member
from logyard.machines.catalog.plan import Move
from logyard.protocol.errors import LogyardError

from .calls import CatalogCalls
from .planner import ADD, LEAD, REMOVE, REPLACE

log = logging.getLogger(__name__)

UNDO = "undo"
"""The step of a move that is given up: what it added and has no vote leaves again."""
LAG_ENTRIES = 64
STEP_S = 30.0
AT_ONCE = 16


class Step(NamedTuple):
    """What to do next: `changes` of the members as one, a `transfer` of leadership, or the end, with its `outcome`; of
    none of these: wait."""

    changes: tuple[tuple[str, int], ...] = ()
    transfer: int = 0
    outcome: str = ""


WAIT = Step()


def next_step(move: Move, configuration: Configuration, leader: int, caught_up: Set[int]) -> Step:
    """Return the next step of a move of a group, on its leader. `caught_up`: members that have almost everything."""
    voters, learners = set(configuration.voters), set(configuration.learners)
    source, target = move.source, move.target
    if configuration.joint:
        return WAIT
    if move.step == UNDO:
        added = move.kind in (REPLACE, ADD) and target in learners
        return Step((("remove", target),)) if added else Step(outcome="cancelled")
    if move.kind == LEAD:
        if leader == target or target not in voters:
            return Step(outcome="done" if leader == target else "its target has no vote")
        return Step(transfer=target) if target in caught_up else WAIT
    if move.kind == REMOVE:
        if source not in voters | learners:
            return Step(outcome="done")
        return _removed(source, voters, leader, caught_up)
    if target in voters:
        if move.kind == ADD or source not in voters | learners:
            return Step(outcome="done")
        return _removed(source, voters, leader, caught_up)
    if target not in learners:
        return Step((("add_learner", target),))
    if target not in caught_up:
        return WAIT
    if move.kind == ADD or source not in voters:
        return Step((("promote", target),))
    if source == leader:
        able = sorted((voters - {source}) & caught_up)
        # A group of one: the new member votes first.
        return Step(transfer=able[0]) if able else WAIT if len(voters) > 1 else Step((("promote", target),))
    return Step((("promote", target), ("remove", source)))


def _removed(source: int, voters: Set[int], leader: int, caught_up: Set[int]) -> Step:
    if source != leader:
        return Step((("remove", source),))
    able = sorted((voters - {source}) & caught_up)
    return Step(transfer=able[0]) if able else WAIT


class Mover:
    """One node's. `find` returns a group's member here; `change` makes one change of membership, `transfer` hands a
    leadership over; `spawn` runs a task."""

    def __init__(
        self,
        calls: CatalogCalls,
        members: Mapping[int, Member],
        change: Callable[[str, Sequence[tuple[str, int]]], Awaitable[object]],
        transfer: Callable[[str, int], Awaitable[object]],
        spawn: Callable[..., None],
    ) -> None:
        self._calls = calls
        self._members = members
        self._change = change
        self._transfer = transfer
        self._spawn = spawn
        self._busy: set[int] = set()

    def look(self, moves: Mapping[int, Move], live: Set[int]) -> None:
        """Begin the next step of each move (by number) of a group led here."""
        for number, move in moves.items():
            member = self._members.get(move.uid)
            if member is None or member.raft.role != LEADER or not member.leading or number in self._busy:
                continue
            if len(self._busy) >= AT_ONCE:
                return
            raft = member.raft
            if raft.configuration_index > raft.commit:
                continue
            caught_up = {raft.node} | {
                node
                for node, progress in raft.progress.items()
                if node in live and progress.match + LAG_ENTRIES >= raft.commit and progress.match
            }
            step = next_step(move, raft.configuration, raft.node, caught_up)
            if step != WAIT:
                self._busy.add(number)
                self._spawn(self._do, number, move, member.spec.name, step)

    async def _do(self, number: int, move: Move, name: str, step: Step) -> None:
        try:
            with trio.move_on_after(STEP_S):
                if step.outcome:
                    await self._calls.change("plan", "finish", {"number": number, "outcome": step.outcome})
                elif step.transfer:
                    await self._transfer(name, step.transfer)
                else:
                    await self._change(name, step.changes)
        except LogyardError as error:
            # The next look does what is left, here or where the group is led then.
            log.info("move %d of %s, %s: %s", number, name, move.kind, error)
        finally:
            self._busy.discard(number)
