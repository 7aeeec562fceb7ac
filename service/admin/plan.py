"""What to do next with one group to reach an operator's goal: pure functions of the group's present configuration.

Nothing is remembered between two looks, so a plan that was stopped at any point goes on where it stood: run again, it
looks again. Invariants: a new voter is promoted only when it holds nearly everything; the old one is removed only when
the new one votes; a leader is asked to hand over before it is removed. Called by `run`; shown by `cli.members`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from logyard.client.admin import CATALOG

DONE: Final = "done"
CHANGE: Final = "change"
TRANSFER: Final = "transfer"
WAIT: Final = "wait"
REFUSE: Final = "refuse"

LAG_ENTRIES: Final = 64
"""A learner this close behind the commit index counts as caught up: under load it is never exactly there."""

Change: TypeAlias = tuple[str, int]
"""(add_learner, promote or remove; node)."""


class View(NamedTuple):
    """One group as its leader sees it. `matches` has what each other member is known to hold."""

    name: str
    leader: int
    voters: tuple[int, ...]
    learners: tuple[int, ...]
    outgoing: tuple[int, ...]
    commit: int
    matches: Mapping[int, int]

    @staticmethod
    def of(described: Mapping[str, Any]) -> View:
        """Return the view of a `describe` answer of the leader."""
        return View(
            described["name"],
            described["leader"],
            tuple(described["voters"]),
            tuple(described["learners"]),
            tuple(described.get("outgoing", ())),
            described["commit"],
            {int(node): row["match"] for node, row in described.get("progress", {}).items()},
        )

    @property
    def members(self) -> set[int]:
        """Voters and learners."""
        return {*self.voters, *self.learners}

    def lag(self, node: int) -> int:
        """Return entries that a member lacks of what is committed; all of them while it has not answered once."""
        match = self.matches.get(node, 0)
        return max(0, self.commit - match) if match else max(self.commit, LAG_ENTRIES + 1)

    def caught_up(self, node: int) -> bool:
        """Return whether its vote would not hold the group up."""
        return node == self.leader or self.lag(node) <= LAG_ENTRIES


class Step(NamedTuple):
    """The next thing to do. `changes` of a CHANGE take effect together; `node` of a TRANSFER shall lead, of a WAIT is
    waited for."""

    kind: str
    changes: tuple[Change, ...] = ()
    node: int = 0
    why: str = ""


class Targets:
    """Who may be given leaderships: nodes that answer, each time the one that leads least."""

    __slots__ = ("counts",)

    def __init__(self, leaders: Iterable[int], live: Collection[int]) -> None:
        self.counts = dict.fromkeys(live, 0)
        for leader in leaders:
            if leader in self.counts:
                self.counts[leader] += 1

    def choose(self, nodes: Iterable[int]) -> int:
        """Return one of `nodes`, or 0 when none of them answers."""
        found = min((node for node in nodes if node in self.counts), key=lambda node: self.counts[node], default=0)
        if found:
            self.counts[found] += 1
        return found


class Goal(Protocol):
    """What shall become of a group."""

    def step(self, view: View, targets: Targets) -> Step:
        """Return the next step, or DONE."""
        ...


def change(kind: str, node: int) -> Step:
    """Return the step for a change of one member."""
    return Step(CHANGE, ((kind, node),))


def under_way(view: View) -> Step | None:
    """Return a step that waits for a joint change, which ends by itself: nothing else can be begun before."""
    return Step(WAIT, why="a membership change is under way") if view.outgoing else None


def promote(view: View, node: int) -> Step:
    """Return the learner's next step to a vote."""
    if view.caught_up(node):
        return change("promote", node)
    return Step(WAIT, node=node, why=f"node {node} lacks {view.lag(node)} entries")


def hand_over(view: View, node: int, targets: Targets) -> Step | None:
    """Return a TRANSFER when `node` leads and another voter that is caught up answers."""
    if view.leader != node:
        return None
    to = targets.choose(other for other in view.voters if other != node and view.caught_up(other))
    return Step(TRANSFER, node=to) if to else None


@dataclass(frozen=True, slots=True)
class Add:
    """`node` becomes a voter by way of learner, or a learner."""

    node: int
    learner: bool = False

    def step(self, view: View, targets: Targets) -> Step:
        """See `Goal`."""
        if self.node in view.voters or (self.learner and self.node in view.learners):
            return Step(DONE)
        if self.node in view.learners:
            return under_way(view) or promote(view, self.node)
        return under_way(view) or change("add_learner", self.node)


@dataclass(frozen=True, slots=True)
class Promote:
    """The learner `node` becomes a voter."""

    node: int

    def step(self, view: View, targets: Targets) -> Step:
        """See `Goal`."""
        if self.node in view.voters:
            return Step(DONE)
        if self.node not in view.learners:
            return Step(REFUSE, why=f"node {self.node} is not a learner of it")
        return under_way(view) or promote(view, self.node)


@dataclass(frozen=True, slots=True)
class Remove:
    """`node` leaves; a leader hands over first where it can."""

    node: int

    def step(self, view: View, targets: Targets) -> Step:
        """See `Goal`."""
        if self.node not in view.members:
            return under_way(view) or Step(DONE)
        if view.voters == (self.node,):
            return Step(REFUSE, why=f"node {self.node} is its last voter")
        return under_way(view) or hand_over(view, self.node, targets) or change("remove", self.node)


@dataclass(frozen=True, slots=True)
class Replace:
    """`new` takes the place of `old`, as voter or learner. `joint`: the swap is one joint change."""

    old: int
    new: int
    joint: bool = False

    def step(self, view: View, targets: Targets) -> Step:
        """See `Goal`."""
        waiting = under_way(view)
        if waiting is not None:
            return waiting
        if self.old not in view.members:
            return Step(DONE)
        if self.new not in view.members:
            return change("add_learner", self.new)
        if not view.caught_up(self.new):
            return Step(WAIT, node=self.new, why=f"node {self.new} lacks {view.lag(self.new)} entries")
        if self.old in view.voters and self.new in view.learners:
            if not self.joint:
                return change("promote", self.new)
            swap = Step(CHANGE, (("promote", self.new), ("remove", self.old)))
            return hand_over(view, self.old, targets) or swap
        return hand_over(view, self.old, targets) or change("remove", self.old)


@dataclass(frozen=True, slots=True)
class Leave:
    """`node` does not lead."""

    node: int

    def step(self, view: View, targets: Targets) -> Step:
        """See `Goal`."""
        if view.leader != self.node:
            return Step(DONE)
        moved = hand_over(view, self.node, targets)
        if moved is not None:
            return moved
        others = [other for other in view.voters if other != self.node]
        if not others:
            return Step(REFUSE, why=f"node {self.node} is its only voter")
        return Step(WAIT, why=f"none of its voters {others} answers and has caught up")


def affected(goal: Goal, rows: Sequence[Any]) -> list[str]:
    """Return the groups, of all there are, that a goal concerns. `rows` are `client.board.Standing`s. The members of
    the catalogue are its own to choose; its leadership can be moved, unless it has one voter."""
    if isinstance(goal, Leave):
        rows = [row for row in rows if row.name != CATALOG or len(row.voters) > 1]
    else:
        rows = [row for row in rows if row.name != CATALOG]
    match goal:
        case Add():
            chosen = [row for row in rows if goal.node not in row.voters]
        case Promote():
            chosen = [row for row in rows if goal.node in row.learners]
        case Remove():
            chosen = [row for row in rows if goal.node in row.members]
        case Replace():
            chosen = [row for row in rows if goal.old in row.members]
        case Leave():
            chosen = [row for row in rows if row.leader == goal.node]
        case _:
            chosen = list(rows)
    return [row.name for row in chosen]
