"""Carries an operator's goal out over many groups: some at a time, at a bounded rate, each step by step.

A group's step comes from its leader's present view of it (`plan`), never from memory, so being stopped anywhere
does no harm and running again goes on. A group that does not come forward for `patience_s` is given up and reported;
the others go on. Called by `cli.members`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import trio

from logyard.protocol.errors import BadRequest, LogyardError, UnknownGroup

from .plan import CHANGE, DONE, REFUSE, TRANSFER, Goal, Step, Targets, View

if TYPE_CHECKING:
    from logyard.client._async.admin import AdminVerbs

FAILURES_SHOWN = 100
PAUSE_S = 0.05
PAUSE_S_MAX = 0.5


class Pace(NamedTuple):
    """`parallel` groups at a time, `rate` begun a second (0: as many as there are), given up after `patience_s`
    seconds without progress."""

    parallel: int
    rate: float
    patience_s: float


class GaveUp(Exception):
    """A group could not be brought to its goal; the message says why."""


class Report:
    """What became of the groups so far. `skipped` needed nothing; `failures` say why, by name."""

    __slots__ = ("began", "done", "failures", "groups", "skipped")

    def __init__(self, groups: int) -> None:
        self.groups = groups
        self.done = 0
        self.skipped = 0
        self.failures: dict[str, str] = {}
        self.began = trio.current_time()

    def brought(self, changed: bool) -> None:
        """Count a group that is where it should be."""
        self.done += changed
        self.skipped += not changed

    @property
    def finished(self) -> int:
        """Groups that need no more work."""
        return self.done + self.skipped + len(self.failures)

    def fields(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {
            "ok": not self.failures,
            "groups": self.groups,
            "done": self.done,
            "failed": len(self.failures),
            "skipped": self.skipped,
            "seconds": round(trio.current_time() - self.began, 3),
            "failures": dict(list(self.failures.items())[:FAILURES_SHOWN]),
        }


async def carry_out(
    yard: AdminVerbs, goal: Goal, names: Sequence[str], targets: Targets, pace: Pace, tell: Callable[[Report], object]
) -> Report:
    """Bring every group to the goal; `tell` is called after each. Failures are in the report, not raised."""
    report = Report(len(names))
    waiting = iter(names)
    starts = _Starts(pace.rate)

    async def worker() -> None:
        for name in waiting:
            await starts.turn()
            try:
                report.brought(await bring(yard, goal, name, targets, pace.patience_s))
            except GaveUp as error:
                report.failures[name] = str(error)
            tell(report)

    async with trio.open_nursery() as nursery:
        for _ in range(min(pace.parallel, len(names))):
            nursery.start_soon(worker)
    return report


async def bring(yard: AdminVerbs, goal: Goal, name: str, targets: Targets, patience_s: float) -> bool:
    """Bring one group to the goal; return False when it is there already. Raises `GaveUp`."""
    deadline = trio.current_time() + patience_s
    touched, best, pauses = False, -1, _pauses()
    why = "no leader answers"
    while True:
        try:
            # Asked anew each time: another operator, or an earlier run of ours, may have moved it.
            view = View.of(await yard.leader_view(name))
            step = goal.step(view, targets)
            if step.kind == DONE:
                return touched
            if step.kind == REFUSE:
                raise GaveUp(step.why)
            if step.kind in (CHANGE, TRANSFER):
                # Also what was refused may have been done: its answer was lost to an election.
                why, touched = "it goes on changing", True
                await _perform(yard, name, step)
                pauses = _pauses()
                if trio.current_time() < deadline:
                    continue
            else:
                why = step.why
                held = view.matches.get(step.node, 0)
                if held > best:
                    best, deadline = held, trio.current_time() + patience_s
        except (BadRequest, UnknownGroup) as error:
            raise GaveUp(error.message) from error
        except LogyardError as error:
            # Refused for the moment (a change is not committed, a learner lags), or its leader just moved.
            why = error.message
        if trio.current_time() >= deadline:
            raise GaveUp(why)
        await trio.sleep(next(pauses))


async def _perform(yard: AdminVerbs, name: str, step: Step) -> None:
    if step.kind == TRANSFER:
        await yard.transfer(name, step.node)
    else:
        await yard.change_members(name, step.changes)


def _pauses() -> Iterator[float]:
    pause = PAUSE_S
    while True:
        yield pause
        pause = min(2 * pause, PAUSE_S_MAX)


class _Starts:
    """Spaces the beginnings of groups evenly."""

    __slots__ = ("interval", "next")

    def __init__(self, rate: float) -> None:
        self.interval = 1 / rate if rate else 0.0
        self.next = trio.current_time()

    async def turn(self) -> None:
        """Wait until the next group may begin."""
        at = max(self.next, trio.current_time())
        self.next = at + self.interval
        await trio.sleep_until(at)
