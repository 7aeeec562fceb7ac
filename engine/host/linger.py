"""Lets the proposals of a saturated node gather for a moment, so that commands of one group share an entry.

An entry costs as much as a hundred commands (docs/performance.md, cost model). Where clients keep many groups busy, a
loop that never waits finds one command a group each time it looks, and spends itself on entries; what it leaves waiting
for a few milliseconds comes to fewer of them (Kafka's linger.ms, at the server). Invariants: nothing is put off for
longer than one interval and the turn under way; nothing is put off on a node whose loop waits for its sockets now and
then, where few groups propose, or where it was tried and commands still came one a group. Called by `ready_loop`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from ..replica.member import Member

SATURATED = 0.8
"""Share of the time in which the loop did not wait, from which on it has no time to lose."""
WORTH = 1.2
"""Commands an entry that gathering has to come to, at least."""
REST_SECONDS = 1.0
"""It is not tried again for so long where it did not."""


class Linger:
    """One node's: `interval_s` long (0: never), where at least `groups` propose in one turn. While `open`, proposals
    are taken at once; else their members are to be `put_off`. Until `watch` was called it stays open."""

    __slots__ = (
        "groups", "open", "_clock", "_gathered", "_interval_s", "_lot", "_mark", "_not_before", "_put_off", "_since",
        "_waited", "_waited_s",
    )  # fmt: skip

    def __init__(
        self,
        interval_s: float,
        groups: int,
        mark: Callable[[Member], None],
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.groups = groups
        self.open = True
        self._interval_s = interval_s
        self._mark = mark
        self._clock = clock or time.monotonic
        self._waited: Callable[[], float] | None = None
        self._waited_s = self._since = self._not_before = 0.0
        self._gathered = False
        self._put_off: dict[Member, None] = {}
        self._lot = trio.lowlevel.ParkingLot()

    def watch(self, waited: Callable[[], float]) -> None:
        """Judge by `waited`, the seconds that the loop has waited for its sockets so far, whether it is saturated."""
        if self._interval_s:
            self._waited = waited
            self._waited_s, self._since = waited(), self._clock()

    @property
    def is_on(self) -> bool:
        """Whether it ever puts anything off: then `run` has to run."""
        return self._waited is not None

    def put_off(self, member: Member) -> None:
        """Have a member looked at again when the interval is over."""
        if not self._put_off:
            self._lot.unpark_all()
        self._put_off[member] = None

    def end_turn(self, groups: int, commands: int) -> None:
        """Decide what becomes of the next proposals, after a turn in which so many groups proposed commands."""
        if self._waited is None:
            return
        now, waited_s = self._clock(), self._waited()
        passed, waited = now - self._since, waited_s - self._waited_s
        self._since, self._waited_s = now, waited_s
        if self._gathered and commands < WORTH * groups:
            self._not_before = now + REST_SECONDS
        self._gathered = False
        self.open = now < self._not_before or waited > (1 - SATURATED) * passed

    async def run(self) -> None:
        """Let go of what was put off, one interval after the first of it."""
        while True:
            if not self._put_off:
                await self._lot.park()
            await trio.sleep(self._interval_s)
            self.open = self._gathered = True
            put_off, self._put_off = self._put_off, {}
            for member in put_off:
                self._mark(member)
