"""The one timer of a node: ticks the cores that need it, seals the WAL when writing stops, and looks after storage.

A quiet group is not in `system.active` and costs nothing here (law 10). Called by `system`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import trio

from .member import RUNNING

if TYPE_CHECKING:
    from .system import System

HOUSEKEEPING_SECONDS = 1.0


async def run(system: System) -> None:
    """Tick until cancelled."""
    interval = system.config.tick_ms / 1000
    seal_after = system.config.wal_seal_idle_ms / 1000
    housekeeping = time.monotonic()
    while True:
        await trio.sleep(interval)
        active = system.active
        if active:
            for member in list(active):
                if member.state != RUNNING:
                    active.discard(member)
                    continue
                member.raft.tick()
                if member.raft.has_ready:
                    system.scheduler.mark(member)
                elif member.raft.is_quiet:
                    active.discard(member)
        now = time.monotonic()
        if not system.durability.sealed and now - system.durability.last_write >= seal_after:
            system.durability.seal()
        if now - housekeeping >= HOUSEKEEPING_SECONDS:
            housekeeping = now
            system.inbound.forget_asked()
            system.leaderboard.prune(system.names)
            system.storage.look()
