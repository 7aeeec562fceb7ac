"""Whether a term that a machine granted (a lease, a delay: a length of log time) is running: what forbids log time to
jump (docs/decisions/0025-terms-are-never-early.md).

Invariant: a doubt counts as a term that is running. Read by `scheduler` and `alarms`; changes nothing.
"""

from __future__ import annotations

import logging

from .member import Member

log = logging.getLogger(__name__)


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
