"""Where the log is gone, a snapshot takes its place (Raft paper 7; pitfalls 16-19).

Invariants: a snapshot at or below the commit index changes nothing; the log above it is kept where it has the
snapshot's last entry, and dropped otherwise; term and vote stay unless the snapshot is of a later term. The bytes are
the host's business. Called by `core`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import election, membership, replication
from .membership import Configuration
from .progress import SNAPSHOTTING
from .state import FOLLOWER, LEADER

if TYPE_CHECKING:
    from .core import Raft


def sent(raft: Raft, node: int, index: int, ok: bool) -> None:
    """Go on after a leader's transfer of a snapshot at `index` to `node` ended."""
    progress = raft.progress.get(node)
    if progress is None or progress.state != SNAPSHOTTING:
        return
    if ok:
        progress.probe(min(max(progress.match, index), raft.log.last_index) + 1)
    else:
        # Not at once: what made it fail may last. Then from the end: the follower may have the entries itself, and says
        # where the logs meet.
        progress.probe(raft.log.last_index + 1)
        progress.paused = progress.failed = True
    raft.dirty = True


def install(raft: Raft, index: int, term: int, configuration: Configuration) -> bool:
    """Take over a snapshot that is durable here. False: it is not needed."""
    if raft.role == LEADER:
        return False
    if index <= raft.commit:
        _acknowledge(raft)
        return False
    if raft.role != FOLLOWER or term > raft.term:
        # A snapshot of a later term is how this member hears of that term; a candidacy of an older log is pointless.
        election.follow(raft, max(raft.term, term), 0)
    log = raft.log
    if log.term(index) == term:
        log.stable = max(log.stable, min(index, raft.offered))
        if raft.base[0] <= index:
            at = max((at for at, _ in raft.history if at <= index), default=raft.base[0])
            raft.base = (at, configuration)
        # Else a member that is being mended: its checkpoint knew a later one.
        raft.history = tuple(item for item in raft.history if item[0] > index)
    else:
        replication.void(raft, index + 1)
        log.reset(index, term)
        raft.offered = index
        raft.base = (index, configuration)
        raft.history = ()
    membership.use(raft, *(raft.history[-1] if raft.history else raft.base))
    raft.commit = raft.applied = index
    raft.dirty = True
    _acknowledge(raft)
    return True


def _acknowledge(raft: Raft) -> None:
    if raft.role == FOLLOWER and raft.leader:
        # What is committed agrees with every leader.
        raft.validated = max(raft.validated, raft.commit)
        replication.acknowledge(raft)
