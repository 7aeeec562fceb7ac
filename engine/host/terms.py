"""Whether a term that a machine granted (a lease, a delay: a length of log time) is running: what forbids log time to
jump (docs/decisions/0025-terms-are-never-early.md).

Invariant: a doubt counts as a term that is running. A machine that can prolong what it granted (`jumped`) is told by
how much log time jumps, in the very entry that does. Used by `scheduler`, `alarms` and `ticker`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ..raft.core import LEADER
from ..replica.log_time import MS
from ..replica.member import RUNNING, Member

if TYPE_CHECKING:
    from .system import System

log = logging.getLogger(__name__)

BEHIND_MS = 1000
"""So far log time may be behind the wall clock where a machine can be told of a jump."""
JUMPS_VERSION = 2
"""The version of a machine with `jumped` from which on it is told."""


def none_runs(member: Member) -> bool:
    """Whether no term is running, and no command is under way that could have granted one."""
    raft = member.raft
    if member.halt is not None or raft.applied != raft.log.last_index:
        return False
    ask = getattr(member.machine, "has_terms", None)
    if ask is None:
        return member.kept is None or not member.kept.timers
    try:
        return not ask()
    except Exception:
        log.exception("group %s: has_terms of its machine failed", member.spec.name)
        return False


def renews(member: Member) -> bool:
    """Whether everything that the machine granted begins anew with the first command of a new leader."""
    return bool(getattr(member.machine, "renews_terms", False))


def look(system: System) -> None:
    """Once a second: where terms keep log time from catching up with the wall clock, tell machines that can prolong
    them of a jump. A version that can is asked for when all of a group's nodes have it."""
    for member in list(system.timed):
        if not hasattr(member.machine, "jumped") or member.state != RUNNING or not member.leading:
            continue
        if member.raft.role != LEADER or member.dirty:
            continue
        behind = system.wall_ns() // MS - system.scheduler.log_time(member)
        if behind < BEHIND_MS:
            continue
        if member.version >= JUMPS_VERSION:
            system.scheduler.jump(member, behind)
        elif all(
            system.versions.knows(node, member.spec.machine) >= JUMPS_VERSION
            for node in member.raft.configuration.nodes()
        ):
            system.propose(member, "upgrade", JUMPS_VERSION)
