"""The one timer of a node: ticks the cores that need it, seals the WAL when writing stops, and looks after storage.

A quiet group is not among the active ones and costs nothing here (law 10); a node without an active one rests, and
looks only at its disk and at what other nodes say of sleeping groups. While the disk does not answer nobody is ticked,
because nobody could keep what a campaign promises. Whoever makes work for it calls `stir`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import trio

from ..config import SystemConfig
from ..replica.member import Member
from .elections import Elections

log = logging.getLogger(__name__)

HOUSEKEEPING_SECONDS = 1.0
SESSIONS_SECONDS = 0.5
"""So often silent clients are looked for: a session is late by no more than a second."""
REST_SECONDS = 0.2
"""A node at rest looks up this often, at multiples of it on the loop's clock: with the renewals, as a wake-up costs a
node at rest more than what it does then."""
STORAGE_REST_SECONDS = 5.0
"""So often the janitor looks at a node at rest: nothing is written, so only pins and files grow old."""


class Disk(Protocol):
    """What the ticker needs of the disk's health."""

    def look(self, is_resting: bool) -> None:
        """Probe the disk when nothing was synced for a while; less often while nothing here needs a tick."""
        ...

    def healthy(self) -> bool:
        """Return whether it completes syncs."""
        ...

    def stalled_s(self) -> float:
        """Return for how long it has owed the oldest sync."""
        ...


class GroupCommit(Protocol):
    """What the ticker needs of group commit."""

    last_write: float

    @property
    def sealed(self) -> bool:
        """Return whether the last batch is known not to be torn."""
        ...

    def seal(self) -> None:
        """Write an empty batch after the last one."""
        ...


class Effects(Protocol):
    """What the ticker needs of effects."""

    timed: set[Member]
    ticking: set[Member]

    def tick(self) -> None:
        """Propose the timers that are due."""
        ...

    def tick_machines(self) -> None:
        """Call the machines that want to be called now and then."""
        ...


class Groups(NamedTuple):
    """The members that are ticked, and how they are told."""

    active: set[Member]
    mark: Callable[[Member], None]
    """Have a member looked at in the next turn."""
    walk: Callable[[Callable[[Member], None]], None]
    """Call something with every member, in steps."""
    rest: Callable[[Member], None]
    """Hear of a member that needs no ticks any more."""
    elections: Elections
    """Whose turn it is, of those that know no leader."""


class Chores(NamedTuple):
    """What else is done, how often."""

    needed: Callable[[], bool]
    """Return whether a tick may change anything for reasons of these chores."""
    due_s: Callable[[], float]
    """Return the seconds until the next timer of a group that sleeps."""
    first: Callable[[], None]
    """At each tick, when the disk has been looked at."""
    healthy: Sequence[Callable[[], None]]
    """At each tick, while the disk completes syncs."""
    each_tick: Sequence[Callable[[], None]]
    sessions: Callable[[], None]
    """Twice a second."""
    each_second: Sequence[Callable[[], None]]
    storage: Callable[[], None]
    """Each second, and less often at rest."""


class Ticker:
    """One node's. `resting` while nothing needs a tick: the turn that makes a member active says `stir`. `elections`:
    whose turn it is to stand."""

    __slots__ = (
        "resting", "elections", "_config", "_groups", "_disk", "_group_commit", "_effects", "_chores", "_lot",
        "_healthy", "_machines", "_housekeeping", "_sessions", "_storage", "_over",
    )  # fmt: skip

    def __init__(
        self,
        config: SystemConfig,
        groups: Groups,
        disk: Disk,
        group_commit: GroupCommit,
        effects: Effects,
        chores: Chores,
    ) -> None:
        self.resting = False
        self.elections = groups.elections
        self._config = config
        self._groups = groups
        self._disk = disk
        self._group_commit = group_commit
        self._effects = effects
        self._chores = chores
        self._lot = trio.lowlevel.ParkingLot()
        self._healthy = True
        self._machines = 0.0
        self._housekeeping = 0.0
        self._sessions = 0.0
        self._storage = 0.0
        self._over = False

    def is_resting(self) -> bool:
        """Return whether no group here needs a tick."""
        return self.resting

    def stir(self) -> None:
        """Tick again: there is something to tick, and the next tick comes one interval from now."""
        if self.resting:
            self.resting = False
            self._lot.unpark_all()

    def end(self) -> None:
        """Do nothing any more: this node stops."""
        self._over = True

    async def run(self) -> None:
        """Tick until cancelled, or until the end."""
        interval = self._config.tick_ms / 1000
        self._machines = self._housekeeping = self._storage = time.monotonic()
        while True:
            until = self._rest_until()
            self.resting = until > trio.current_time() + interval
            if self.resting:
                with trio.move_on_at(until):
                    await self._lot.park()
            if not self.resting:
                await trio.sleep(interval)
            if self._over:
                return
            self._look()

    def _rest_until(self) -> float:
        """Return until when nothing has to be done, by the loop's clock; 0.0 while a tick may change anything."""
        effects = self._effects
        if (
            self._groups.active or effects.timed or effects.ticking or not self._healthy
            or not self._group_commit.sealed or self.elections.is_waiting or self._chores.needed()
        ):  # fmt: skip
            return 0.0
        now = trio.current_time()
        return min((now // REST_SECONDS + 1) * REST_SECONDS, now + self._chores.due_s())

    def _look(self) -> None:
        config, group_commit, effects, chores = self._config, self._group_commit, self._effects, self._chores
        self._disk.look(self.resting)
        chores.first()
        if self._disk.healthy():
            self._healthy = True
            self._tick()
            for chore in chores.healthy:
                chore()
        elif self._healthy:
            self._healthy = False
            self._abdicate()
        if effects.timed:
            effects.tick()
        for chore in chores.each_tick:
            chore()
        now = time.monotonic()
        if now >= self._machines:
            self._machines = now + config.machine_tick_ms / 1000
            effects.tick_machines()
        if not group_commit.sealed and now - group_commit.last_write >= config.wal_seal_idle_ms / 1000:
            group_commit.seal()
        if now - self._sessions >= SESSIONS_SECONDS:
            self._sessions = now
            chores.sessions()
        if now - self._housekeeping >= HOUSEKEEPING_SECONDS:
            self._housekeeping = now
            for chore in chores.each_second:
                chore()
        if now - self._storage >= (HOUSEKEEPING_SECONDS if not self.resting else STORAGE_REST_SECONDS):
            self._storage = now
            chores.storage()

    def _tick(self) -> None:
        active, mark, _, rest, elections = self._groups
        active.update(elections.begin())
        for member in list(active):
            raft = member.raft
            if raft.stopped:
                active.discard(member)
                continue
            if not raft.leader and not elections.stands(member):
                active.discard(member)
                continue
            quiet = raft.tick()
            if raft.dirty:
                mark(member)
            elif quiet:
                active.discard(member)
                rest(member)

    def _abdicate(self) -> None:
        """Leave the groups that others can lead to them: the disk hangs."""
        log.warning("the disk has not completed a sync for %d ms: leaderships move", self._disk.stalled_s() * 1000)
        groups = self._groups

        def abdicate(member: Member) -> None:
            member.raft.abdicate()
            if member.raft.has_ready:
                groups.mark(member)
                groups.active.add(member)

        groups.walk(abdicate)
