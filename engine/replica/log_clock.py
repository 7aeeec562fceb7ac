"""The clocks of the groups that this node leads, and whether a term that a machine granted (a lease, a delay: a length
of log time) is running: what forbids log time to jump (docs/decisions/0025-terms-are-never-early.md).

Invariants: log time goes on where the log ends, and a doubt counts as a term that is running. A machine that can
prolong what it granted (`jumped`) is told by how much log time jumps, in the very entry that does. Called by the ready
loop for each entry, by effects and the timers of quiesced groups for what is due, and by the ticker.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from logyard.protocol.errors import LogyardError

from ..entry import NOOP, build_system, encode_system
from ..machine import check_reply
from ..raft.state import LEADER
from .apply import says
from .log_time import MS, LogTime
from .member import RUNNING, Member

log = logging.getLogger(__name__)

BOOT: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
BEHIND_MS = 1000
"""So far log time may be behind the wall clock where a machine can be told of a jump."""
JUMPS_VERSION = 2
"""The version of a machine with `jumped` from which on it is told."""


class Clocks:
    """The clocks of this machine, that log time is made from; whoever tests sets them. `boot_ns` goes on also while the
    machine is suspended, where the system has such a clock."""

    def __init__(self) -> None:
        self.wall_ns: Callable[[], int] = time.time_ns
        self.monotonic_ns: Callable[[], int] = time.monotonic_ns
        self.boot_ns: Callable[[], int] = partial(time.clock_gettime_ns, BOOT)


def none_runs(member: Member) -> bool:
    """Return whether no term is running, and no command is under way that could have granted one."""
    raft = member.raft
    if member.halt is not None or raft.applied != raft.log.last_index:
        return False
    timers = () if member.kept is None else member.kept.timers
    try:
        ask = getattr(member.machine, "has_terms", None)
        if ask is not None:
            return not ask()
        ask = getattr(member.machine, "has_terms_beside", None)
        return not timers if ask is None else not ask(timers)
    except Exception:
        log.exception("group %s: has_terms of its machine failed", member.spec.name)
        return False


def renews(member: Member) -> bool:
    """Return whether everything that the machine granted begins anew with the first command of a new leader."""
    return says(member.machine, "renews_terms")


class Propose(Protocol):
    """The way to commands of the engine's own."""

    def __call__(self, member: Member, name: str, *arguments: object) -> None:
        """Queue one. Raises `NotLeader`, `GroupStopped`."""
        ...


class LogClock:
    """Gives log time of groups, which is kept in the member while it leads. `newest_time` is the last one of a group's
    log, None while nobody can tell; `knows(node, kind)` the newest version of a machine there; `mark` says that a
    member has something to do."""

    def __init__(
        self,
        clocks: Clocks,
        newest_time: Callable[[Member], int | None],
        knows: Callable[[int, str], int],
        propose: Propose,
        mark: Callable[[Member], None],
    ) -> None:
        self._clocks = clocks
        self._newest_time = newest_time
        self._knows = knows
        self._propose = propose
        self._mark = mark

    def now(self, member: Member) -> int:
        """Return log time, in ms, of a group that this member leads."""
        clock = member.clock
        if clock is None:
            fresh = self.fresh(member)
            if fresh is None:
                return member.log_time
            clock = member.begin_clock(fresh)
        clocks = self._clocks
        if member.wall_time or (member.leading and none_runs(member)):
            now = clock.follow(clocks.wall_ns(), clocks.monotonic_ns())
        else:
            now = clock.now(clocks.monotonic_ns())
        return max(member.log_time, now)

    def of_own_entry(self, member: Member, kind: int) -> int:
        """Return log time, in ms, of an entry of the core's own: a no-op begins the clock of its leadership."""
        if kind == NOOP and (clock := self.fresh(member)) is not None:
            member.begin_clock(clock)
            if renews(member):
                clock.jump(self._clocks.wall_ns())
        if member.clock is None:
            return self._newest_time(member) or member.log_time
        return self.now(member)

    def fresh(self, member: Member) -> LogTime | None:
        """Return a clock that goes on where the log ends, also above what is applied here, from when its end came: what
        has passed since then had passed for its leader as well. A log without any time begins now. None while nobody
        can tell where it ends: begun anywhere else, log time would be early, or stand still for as long as the wall
        clock was set back; an entry with a lower stamp than the one before it is of that one's time."""
        newest, now = self._newest_time(member), self._clocks.monotonic_ns()
        if newest is None:
            return None
        clock = LogTime(newest, self._clocks.wall_ns(), member.heard_ns if newest else now)
        clock.now(now)
        return clock

    def latest(self, member: Member | None) -> int:
        """Return the latest log time, in ms, that a group may have by now, whoever leads it, as far as this member of
        it knows: the wall clock's, to which it may jump, or what goes on where the log ends."""
        clock = self.fresh(member) if member is not None else None
        wall = self._clocks.wall_ns() // MS
        return max(wall, clock.now(self._clocks.monotonic_ns())) if clock is not None else wall

    def catch_up(self, members: Iterable[Member]) -> None:
        """Tell machines that can prolong terms of a jump, where those keep log time from catching up with the wall
        clock. A version that can is asked for when all of a group's nodes have it. Called once a second with the
        members that have something pending."""
        for member in list(members):
            if member.state != RUNNING or not member.leading or not says(member.machine, "jumped"):
                continue
            if member.raft.role != LEADER or member.dirty:
                continue
            behind, clock = self._clocks.wall_ns() // MS - self.now(member), member.clock
            if behind < BEHIND_MS or clock is None:
                # Without a clock nobody can tell yet where the log ends.
                continue
            if member.version >= JUMPS_VERSION:
                self._jump(member, clock, behind)
            elif all(
                self._knows(node, member.spec.machine) >= JUMPS_VERSION for node in member.raft.configuration.nodes()
            ):
                self._propose(member, "upgrade", JUMPS_VERSION)

    def _jump(self, member: Member, clock: LogTime, ms: int) -> None:
        """Propose the entry in which log time jumps ahead by so much, and its machine prolongs what it granted."""
        raft = member.raft
        stamp = self.now(member) + ms
        try:
            command = member.machine.jumped(ms)  # type: ignore[attr-defined]
            check_reply(command)
            frame = encode_system("append", 0, 0, command)
        except Exception:
            log.exception("group %s: jumped of its machine failed", member.spec.name)
            return
        index = raft.log.last_index + 1
        try:
            raft.propose(build_system(index, raft.term, stamp, [frame]), True)
        except LogyardError as error:
            log.info("group %s: log time stays behind the wall clock: %s", member.spec.name, error)
            return
        clock.jump(stamp * MS)
        self._mark(member)
