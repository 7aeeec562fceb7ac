"""The one timer of a node: ticks the cores that need it, seals the WAL when writing stops, and looks after storage.

A quiet group is not in `system.active` and costs nothing here (law 10). While the disk does not answer nobody is
ticked, because nobody could keep what a campaign promises. Called by `system`.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import trio

from ..raft import quiescence
from . import effects

if TYPE_CHECKING:
    from .system import System

log = logging.getLogger(__name__)

HOUSEKEEPING_SECONDS = 1.0


async def run(system: System) -> None:
    """Tick until cancelled."""
    interval = system.config.tick_ms / 1000
    seal_after = system.config.wal_seal_idle_ms / 1000
    machine_tick = system.config.machine_tick_ms / 1000
    housekeeping = machines = time.monotonic()
    healthy = True
    while True:
        await trio.sleep(interval)
        system.pulse.look()
        if system.pulse.healthy():
            healthy = True
            _tick(system)
            system.hibernation.tick()
        elif healthy:
            healthy = False
            _abdicate(system)
        if system.timed:
            effects.tick(system)
        system.budget.look()
        system.sender.resume_all()
        now = time.monotonic()
        if now >= machines:
            machines = now + machine_tick
            effects.tick_machines(system)
        if not system.durability.sealed and now - system.durability.last_write >= seal_after:
            system.durability.seal()
        if now - housekeeping >= HOUSEKEEPING_SECONDS:
            housekeeping = now
            system.inbound.forget_asked()
            system.departures.forget_told()
            system.hibernation.look()
            system.leaderboard.prune(system.names)
            system.heartbeats.look()
            system.storage.look()
            system.refill.look()
            system.versions.look()


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
            system.hibernation.rest(member)


def _abdicate(system: System) -> None:
    """The disk hangs: groups that others can lead are theirs now."""
    log.warning("the disk has not completed a sync for %d ms: leaderships move", system.pulse.stalled_s() * 1000)
    for member in system.members.values():
        if not member.raft.stopped:
            quiescence.abdicate(member.raft)
            if member.raft.has_ready:
                system.scheduler.mark(member)
                system.active.add(member)
