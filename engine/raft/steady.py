"""The steady state: what most turns ask of a core, without a `Ready` and what a `Ready` is made for.

A leader whose followers have all that came before sends what is new, a follower stores it, the commit index moves: no
hard state, no vote, no probe, no read, no change of members. Invariant: `hand_out` changes the core, and gives to send
and to store, exactly what `Raft.ready` would, or it changes nothing and says so: the core is the judge, and the same
seeds give the same histories with and without it (`tests/sim/test_sim.py`). Called by `engine.host.ready_loop`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from ..entry import Entry
from .messages import APPEND, Message
from .progress import PROBE, REPLICATE
from .state import LEADER, UNTOLD

if TYPE_CHECKING:
    from .core import Raft

Handed: TypeAlias = tuple[Sequence[Entry], tuple[int, int, int, int] | None]
"""What has to be made durable, and the token to report it with: those of a `Ready`. Both empty: nothing has."""

NOTHING: Handed = ((), None)


def hand_out(raft: Raft, out: list[Message]) -> Handed | None:
    """Return what a `Ready` would give to make durable, with its messages, which may leave at once, in `out`. None
    where more is due than entries and the commit index, and nothing was changed: ask `Raft.ready`."""
    if (
        not raft.safe
        or raft.outbox
        or raft.held
        or raft.changed
        or raft.truncated
        or raft.confirmed_reads
        or raft.failed_reads
        or raft.told_term != raft.term
        or raft.told_vote != raft.vote
    ):
        return None
    log = raft.log
    last = log.last_index
    before = raft.offered
    if raft.role == LEADER:
        if raft.chores or raft.leaving or not raft.limits.lazy_commit:
            return None
        reads = raft.reads
        if reads is not None and not reads.idle:
            return None
        if not (_send(raft, before, last, out) if before < last else _hold_back(raft, last)):
            return None
    raft.dirty = False
    raft.told_commit = raft.commit
    if before == last:
        return NOTHING
    raft.offered = last
    token = (raft.term, raft.vote, last, log.last_term)
    raft.pending.append((*token, last))
    return log.entries[before + 1 - log.memory_first :], token


def _send(raft: Raft, before: int, last: int, out: list[Message]) -> bool:
    """Send what is new to every follower, which has, or was sent, all that came before. False: one of them needs
    another thing."""
    log = raft.log
    limits = raft.limits
    for node, progress in raft.progress.items():
        if progress.state == REPLICATE:
            if (
                progress.next != before + 1
                or progress.window.bytes >= progress.window.limit
                or len(progress.inflight) >= limits.inflight_messages
                or progress.inflight_bytes >= limits.inflight_bytes
            ):
                return False
        elif progress.state == PROBE and not progress.paused and node in raft.live:
            return False
    prev_term = log.term(before)
    found = log.window(before + 1, last, limits.append_bytes)
    if prev_term is None or found is None or len(found[0]) != last - before:
        return False
    entries, size = found
    commit = raft.commit
    for node, progress in raft.progress.items():
        if progress.state == REPLICATE:
            progress.told = commit
            progress.next = last + 1
            progress.take(last, size)
            out.append(
                Message(
                    APPEND, raft.uid, node, raft.node, raft.term, before, prev_term, commit, 0, False, entries,
                    before + 1, last,
                )
            )  # fmt: skip
    return True


def _hold_back(raft: Raft, last: int) -> bool:
    """Leave the commit index to entries that come, or to `Raft.tell`. False: a follower needs more than that."""
    untold = raft.untold
    for node, progress in raft.progress.items():
        if progress.state == REPLICATE:
            if progress.next <= last:
                return False
            if progress.told < raft.commit and progress.match == last:
                untold = untold or UNTOLD
        elif progress.state == PROBE and not progress.paused and node in raft.live:
            return False
    raft.untold = untold
    return True
