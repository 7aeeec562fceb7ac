"""Moves of the plan, done where a group's leader is: a task for each, which takes one step after the other.

A step is read off the group's configuration, so a move goes on wherever its group is led next, and one that was done
already is done again without effect. A member that is replaced leaves in the same joint change in which the new one
gets its vote. A task ends where its move does, or where it waits for long: the next look takes it up again. Invariants:
nothing is begun while the plan is paused or too many nodes are silent; a move is over for the catalogue only when it
knows the group's members as they are then, so that nobody plans it again; what a node refuses is not asked of it for
ever. Called by the keeper.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from typing import NamedTuple, TypeAlias

import trio

from logyard.engine.raft.configuration import Configuration
from logyard.engine.raft.state import LEADER
from logyard.engine.replica.member import Member
from logyard.engine.types import position
from logyard.machines.catalog.plan import REFUSED, Move
from logyard.protocol.errors import LogyardError, Refused

from .calls import CatalogCalls
from .planner import ADD, LEAD, REMOVE, REPLACE

log = logging.getLogger(__name__)

UNDO = "undo"
"""The step of a move that is given up: what it added and has no vote leaves again."""
LAG_ENTRIES = 64
STEP_S = 30.0
WAIT_S = 2.0
"""A step that waits for so long leaves its place to others."""
PAUSE_S = 0.1
REFUSALS_MAX = 10
"""A node that has refused to be a member so often is left alone: the move is over."""
UNABLE_S = 60.0
"""A member that did not take a leadership over is not asked to for so long: a halted one never does, and the log takes
no commands while it is waited for."""
AT_ONCE = 64
APART_S = 0.003
"""Moves taken up in one look begin so far apart: begun at once, they would hold up the appends of everybody else."""


class Step(NamedTuple):
    """What to do next: `changes` of the members as one, a `transfer` of leadership, or the end, with its `outcome`; of
    none of these: wait."""

    changes: tuple[tuple[str, int], ...] = ()
    transfer: int = 0
    outcome: str = ""


WAIT = Step()


class Ended(NamedTuple):
    """A move that is over. `seen`: the group's members, as the catalogue has to know them first."""

    number: int
    outcome: str
    seen: Report | None


Report: TypeAlias = tuple[int, int, Sequence[int], Sequence[int]]
"""What a group's leader tells the catalogue: uid, position of the configuration (`engine.types`), voters, learners."""


def report_of(member: Member) -> Report | None:
    """Return what a leader knows of its group's members; None while they are changing."""
    index, configuration = member.raft.base
    if configuration.joint:
        return None
    return member.uid, position(member.raft.term, max(index, 1)), configuration.voters, configuration.learners


def next_step(
    move: Move, configuration: Configuration, leader: int, caught_up: Set[int], unable: Set[int] = frozenset()
) -> Step:
    """Return the next step of a move of a group, on its leader. `caught_up`: members that have almost everything;
    `unable`: those that did not take its leadership over when they were asked to."""
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
        return _removed(source, voters, leader, caught_up - unable)
    if move.kind == REPLACE and not {source, target} & (voters | learners):
        return Step(outcome="its source is no member")
    if target in voters:
        if move.kind == ADD or source not in voters | learners:
            return Step(outcome="done")
        return _removed(source, voters, leader, caught_up - unable)
    if target not in learners:
        return Step((("add_learner", target),))
    if target not in caught_up:
        return WAIT
    if move.kind == ADD or source not in voters:
        return Step((("promote", target),))
    if source == leader:
        able = sorted((voters - {source}) & caught_up - unable)
        # A group of one: the new member votes first.
        return Step(transfer=able[0]) if able else WAIT if len(voters) > 1 else Step((("promote", target),))
    return Step((("promote", target), ("remove", source)))


def _removed(source: int, voters: Set[int], leader: int, caught_up: Set[int]) -> Step:
    if source != leader:
        return Step((("remove", source),))
    able = sorted((voters - {source}) & caught_up)
    return Step(transfer=able[0]) if able else WAIT


class Mover:
    """One node's. `find` returns a move that is under way, None for one that is over or stands still; `change` makes
    one change of membership, `transfer` hands a leadership over; `spawn` runs a task."""

    def __init__(
        self,
        calls: CatalogCalls,
        members: Mapping[int, Member],
        live: Set[int],
        find: Callable[[int], Move | None],
        change: Callable[[str, Sequence[tuple[str, int]]], Awaitable[object]],
        transfer: Callable[[str, int], Awaitable[object]],
        spawn: Callable[..., None],
    ) -> None:
        self._calls = calls
        self._members = members
        self._live = live
        self._find = find
        self._change = change
        self._transfer = transfer
        self._spawn = spawn
        self._busy: set[int] = set()
        self._last = 0
        # By move: how often its target refused to be a member; and until when whom not to hand a leadership to.
        self._refusals: Counter[int] = Counter()
        self._unable: dict[int, dict[int, float]] = {}
        # Moves that are over, and are to be told.
        self._ended: list[Ended] = []
        self._telling = False

    def look(self, moves: Mapping[int, Move]) -> None:
        """Take up each move (by number) of a group led here."""
        begun = 0
        # Those go first that had no turn the last time: many that can't go on would keep the others out.
        after = [number for number in moves if number > self._last]
        for kept in (self._refusals, self._unable):
            for number in kept.keys() - moves.keys():
                del kept[number]
        for number in (*after, *(number for number in moves if number <= self._last)):
            if len(self._busy) >= AT_ONCE:
                return
            if number not in self._busy and self._led(moves[number].uid) is not None:
                self._busy.add(number)
                self._last = number
                self._spawn(self._do, number, begun * APART_S)
                begun += 1

    def _led(self, uid: int) -> Member | None:
        """Return a group's member, if it leads and knows all of its earlier leaders."""
        member = self._members.get(uid)
        return member if member is not None and member.raft.role == LEADER and member.leading else None

    def _next(self, number: int, move: Move) -> tuple[Member, Step] | None:
        """Return what is to be done next for a group that is led here; None when it is not."""
        member = self._led(move.uid)
        if member is None:
            return None
        raft = member.raft
        if raft.configuration_index > raft.commit:
            return member, WAIT
        caught_up = {raft.node} | {
            node
            for node, progress in raft.progress.items()
            if node in self._live and progress.match + LAG_ENTRIES >= raft.commit and progress.match
        }
        now = trio.current_time()
        unable = {node for node, until in self._unable.get(number, {}).items() if until > now}
        return member, next_step(move, raft.configuration, raft.node, caught_up, unable)

    async def _do(self, number: int, after_s: float) -> None:
        waited, told, asked = 0.0, False, None
        try:
            await trio.sleep(after_s)
            with trio.move_on_after(STEP_S):
                while waited < WAIT_S:
                    move = self._find(number)
                    found = None if move is None else self._next(number, move)
                    if move is None or found is None:
                        return
                    member, step = found
                    if step == WAIT:
                        await trio.sleep(PAUSE_S)
                        waited += PAUSE_S
                        continue
                    waited = 0.0
                    if step.outcome:
                        told = True
                        self._finish(number, member, step.outcome)
                        return
                    asked = move, member, step
                    if step.transfer:
                        await self._transfer(member.spec.name, step.transfer)
                    else:
                        await self._change(member.spec.name, step.changes)
        except Refused as error:
            log.info("move %d: %s", number, error)
            told = asked is not None and self._refused(number, *asked, str(error))
        except LogyardError as error:
            # The next look does what is left, here or where the group is led then.
            log.info("move %d: %s", number, error)
        finally:
            if not told:
                self._busy.discard(number)

    def _refused(self, number: int, move: Move, member: Member, step: Step, why: str) -> bool:
        """Note what a node refused; return whether that ends the move."""
        if step.transfer:
            self._unable.setdefault(number, {})[step.transfer] = trio.current_time() + UNABLE_S
        elif step.changes[:1] == (("add_learner", move.target),):
            self._refusals[number] += 1
        if move.kind != LEAD and self._refusals[number] < REFUSALS_MAX:
            return False
        self._finish(number, member, REFUSED + why)
        return True

    def _finish(self, number: int, member: Member, outcome: str) -> None:
        """Tell the catalogue, with whatever else ends until the last telling is answered."""
        self._ended.append(Ended(number, outcome, report_of(member)))
        if not self._telling:
            self._telling = True
            self._spawn(self._tell)

    async def _tell(self) -> None:
        try:
            while self._ended:
                ended, self._ended = self._ended, []
                try:
                    if rows := [one.seen for one in ended if one.seen is not None]:
                        await self._calls.change("logs", "report", {"logs": rows})
                    moves = [(one.number, one.outcome) for one in ended]
                    await self._calls.change("plan", "finish", {"moves": moves})
                except LogyardError as error:
                    log.info("the ends of %d moves: %s", len(ended), error)
                finally:
                    self._busy.difference_update(one.number for one in ended)
        finally:
            self._telling = False
