"""The one timer of a node: ticks the cores that need it, seals the WAL when writing stops, and looks after storage.

A quiet group is not in `system.active` and costs nothing here (law 10); a node without an active one rests, and looks
only at its disk and at what other nodes say of sleeping groups. While the disk does not answer nobody is ticked,
because nobody could keep what a campaign promises. Called by `system`; whoever makes work for it calls `stir`.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import trio

from ..raft import quiescence

if TYPE_CHECKING:
    from ..replica.member import Member
    from .system import System

log = logging.getLogger(__name__)

HOUSEKEEPING_SECONDS = 1.0
SESSIONS_SECONDS = 0.5
"""So often silent clients are looked for: a session is late by no more than a second."""
REST_SECONDS = 0.2
"""A node at rest looks up this often, at multiples of it on the loop's clock: with the renewals, as a wake-up costs a
node at rest more than what it does then."""
STORAGE_REST_SECONDS = 5.0
"""So often the janitor looks at a node at rest: nothing is written, so only pins and files grow old."""


class Ticker:
    """One node's. `resting` while nothing needs a tick: the turn that makes a member active says `stir`."""

    __slots__ = ("system", "resting", "_lot", "_healthy", "_machines", "_housekeeping", "_sessions", "_storage")

    def __init__(self, system: System) -> None:
        self.system = system
        self.resting = False
        self._lot = trio.lowlevel.ParkingLot()
        self._healthy = True
        self._machines = 0.0
        self._housekeeping = 0.0
        self._sessions = 0.0
        self._storage = 0.0

    def is_resting(self) -> bool:
        """Return whether no group here needs a tick."""
        return self.resting

    def stir(self) -> None:
        """Have the next tick come one interval from now: there is something to tick."""
        if self.resting:
            self.resting = False
            self._lot.unpark_all()

    async def run(self) -> None:
        """Tick until cancelled."""
        interval = self.system.config.tick_ms / 1000
        self._machines = self._housekeeping = self._storage = time.monotonic()
        while True:
            until = self._rest_until()
            self.resting = until > trio.current_time() + interval
            if self.resting:
                with trio.move_on_at(until):
                    await self._lot.park()
            if not self.resting:
                await trio.sleep(interval)
            if self.system.failure is not None:
                return
            self._look()

    def _rest_until(self) -> float:
        """Return until when nothing has to be done, by the loop's clock; 0.0 while a tick may change anything."""
        system = self.system
        if (
            system.active or system.effects.timed or system.effects.ticking or system.budget.full or system.space.full
            or not self._healthy or not system.durability.sealed or system.unquiesce.is_busy
            or any(window.waiting for window in system.windows.values())
        ):  # fmt: skip
            return 0.0
        now = trio.current_time()
        return min((now // REST_SECONDS + 1) * REST_SECONDS, now + system.quiesced_timers.next_s())

    def _look(self) -> None:
        system = self.system
        system.pulse.look()
        system.slow_disk.tick()
        if system.pulse.healthy():
            self._healthy = True
            _tick(system)
            system.unquiesce.tick()
            system.digests.compare()
        elif self._healthy:
            self._healthy = False
            _abdicate(system)
        if system.effects.timed:
            system.effects.tick()
        system.budget.look()
        system.outbound.resume_all()
        now = time.monotonic()
        if now >= self._machines:
            self._machines = now + system.config.machine_tick_ms / 1000
            system.effects.tick_machines()
        if not system.durability.sealed and now - system.durability.last_write >= system.config.wal_seal_idle_ms / 1000:
            system.durability.seal()
        if now - self._sessions >= SESSIONS_SECONDS:
            self._sessions = now
            system.heartbeats.look()
        if now - self._housekeeping >= HOUSEKEEPING_SECONDS:
            self._housekeeping = now
            _keep_house(system)
        if now - self._storage >= (HOUSEKEEPING_SECONDS if not self.resting else STORAGE_REST_SECONDS):
            self._storage = now
            system.storage.look()


def _keep_house(system: System) -> None:
    system.inbound.forget_asked()
    system.departures.forget_told()
    system.quiesce.look()
    system.unquiesce.look()
    system.leaderboard.prune(system.members, len(system.members))
    system.versions.look()
    system.log_clock.catch_up(system.effects.timed)
    system.refill.look()
    system.storage.books.look()


def _tick(system: System) -> None:
    active = system.active
    for member in list(active):
        if member.raft.stopped:
            active.discard(member)
            continue
        member.raft.tick()
        if member.raft.has_ready:
            system.scheduler.mark(member)
        elif member.raft.is_quiet:
            active.discard(member)
            system.quiesce.rest(member)


def _abdicate(system: System) -> None:
    """Leave the groups that others can lead to them: the disk hangs."""
    log.warning("the disk has not completed a sync for %d ms: leaderships move", system.pulse.stalled_s() * 1000)

    def abdicate(member: Member) -> None:
        quiescence.abdicate(member.raft)
        if member.raft.has_ready:
            system.scheduler.mark(member)
            system.active.add(member)

    system.walks.over_members(abdicate)
