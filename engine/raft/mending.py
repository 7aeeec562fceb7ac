"""A member that lost records takes part again only when nothing it forgot can matter (docs/internals/repair.md).

Invariants: while `Raft.mend` is set a member neither votes, acknowledges, confirms reads nor campaigns, and says so
(DAMAGED). It is sound again when a leader of its term, confirmed after the damage by a quorum *without* it, has named
its commit index (MEND) and all up to there is stable here. Whose term or vote may be lost needs more: every other voter
of the newest configuration has reported its durable term, this member's is at least the highest of them, in that very
term its vote is spent, and the index was named in that term or a later one. Called by `core` and the verbs.

Why acknowledgements wait for the terms, too: a vote that was forgotten may elect its candidate later, and an
acknowledgement to an older leader would then be part of a commit which that candidate does not have
(docs/decisions/0008-what-a-forgotten-vote-forbids.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import election, membership, reads, replication
from .messages import APPEND_REPLY, DAMAGED, MEND, MENDED, TERMS, TERMS_REPLY, Message
from .progress import SNAPSHOTTING, Progress
from .state import FOLLOWER, LEADER, TERM_MAX

if TYPE_CHECKING:
    from .core import Raft

PATIENCE_MAX = 5
"""What is not answered is asked again after `probe_ticks`, then twice that, at most this often doubled."""


class Mend:
    """What a damaged member waits for. `round` (> 0) names this damage: no word about another one counts. `terms`: its
    term or vote may be lost. `fence`: the index that the leader of `fence_term` named (0: none did)."""

    __slots__ = ("round", "terms", "fence", "fence_term", "reports", "waited", "tries")

    def __init__(self, round_: int, terms: bool) -> None:
        assert round_ > 0
        self.round = round_
        self.terms = terms
        self.fence = self.fence_term = 0
        # Durable terms of other voters, all of the configuration with the digest 0.
        self.reports: tuple[int, dict[int, int]] = (0, {})
        self.waited = self.tries = 0


def _digest(raft: Raft) -> int:
    """Return the same number for all members with the same newest configuration: FNV-1a, of 63 bits."""
    digest = 0xCBF29CE484222325
    for byte in raft.configuration.encode():
        digest = ((digest ^ byte) * 0x100000001B3) & TERM_MAX
    return digest


# ---- the damaged member


def _held(raft: Raft) -> int:
    """Return what is stable here and agrees with the leader."""
    return min(raft.log.stable, raft.validated)


def say(raft: Raft, *nodes: int) -> None:
    """Tell the leader, or who may be it, that this member is damaged, and how far it has come."""
    mend = raft.mend
    assert mend is not None
    if not nodes:
        known = raft.leader and raft.leader in raft.live
        nodes = (raft.leader,) if known else tuple(sorted(raft.configuration.nodes()))
    for node in nodes:
        if node != raft.node:
            _say(raft, node, mend.round)


def _say(raft: Raft, node: int, round_: int) -> None:
    raft.acked = held = _held(raft)
    raft.send(
        Message(
            DAMAGED, raft.uid, node, raft.node, raft.term, held, raft.log.last_index, raft.commit, round_, False, None,
            0, raft.validated,
        )
    )  # fmt: skip


def came_on(raft: Raft) -> None:
    """Look again, and report: entries, a snapshot, or (term, vote) are durable, or the leader spoke."""
    look(raft)
    if raft.mend is not None and raft.leader:
        say(raft)


def tick(raft: Raft) -> None:
    """Ask again; what was asked may be lost."""
    mend = raft.mend
    assert mend is not None
    mend.waited += 1
    if mend.waited < raft.limits.probe_ticks << min(mend.tries, PATIENCE_MAX):
        return
    mend.waited = 0
    mend.tries += 1
    say(raft)
    look(raft)


def on_mend(raft: Raft, m: Message) -> None:
    """Take the commit index that the leader, confirmed, names. A member that has everything but its leader
    hears nothing else of that one."""
    if raft.role != FOLLOWER or raft.leader not in (0, m.sender):
        return
    if not raft.leader:
        raft.leader = m.sender
        raft.changed = raft.dirty = True
    mend = raft.mend
    if mend is None:
        # It did not hear that this member is sound again.
        if _held(raft) >= m.index:
            _tell_sound(raft, m.context)
        else:
            # An old word of its damage came late: what it lacks since comes only to who says how far it is.
            _say(raft, m.sender, m.context)
    elif m.context == mend.round:
        mend.fence, mend.fence_term = m.index, m.term
        mend.tries = 0
        look(raft)


def look(raft: Raft) -> None:
    """Check whether this member is sound again; if not for want of reports, ask for them."""
    mend = raft.mend
    if mend is None or mend.fence_term != raft.term or not raft.leader or _held(raft) < mend.fence or not raft.safe:
        return
    if mend.terms and not _knows_terms(raft, mend):
        return
    raft.mend = None
    raft.changed = raft.dirty = True
    election.draw_timeout(raft)
    _tell_sound(raft, mend.round)


def _knows_terms(raft: Raft, mend: Mend) -> bool:
    """Return whether no vote of this member can count in a term that it may still vote in."""
    digest = _digest(raft)
    if mend.reports[0] != digest:
        mend.reports = (digest, {})
    reports = mend.reports[1]
    configuration = raft.configuration
    silent = {*configuration.voters, *configuration.outgoing} - {raft.node} - reports.keys()
    for node in sorted(silent):
        raft.send(Message(TERMS, raft.uid, node, raft.node, raft.term, digest, 0, 0, mend.round))
    if silent:
        return False
    highest = max(reports.values(), default=0)
    if highest > raft.term:
        election.follow(raft, highest, 0)
    if highest == raft.term and not raft.vote:
        # It may have voted in this term, nobody knows for whom: never again.
        raft.vote = raft.node
        raft.safe = False
        raft.dirty = True
    # A higher term has another leader, who has to name its own index.
    return raft.safe


def on_terms(raft: Raft, m: Message) -> None:
    """Tell a member that may have lost its term this one's; the answer leaves when that is durable. It is denied where
    this member's own may be lost, or its configuration is another: the asker may not know all voters."""
    known = (raft.mend is None or not raft.mend.terms) and m.index == _digest(raft)
    raft.send(Message(TERMS_REPLY, raft.uid, m.sender, raft.node, raft.term, m.index, 0, 0, m.context, not known))


def on_terms_reply(raft: Raft, m: Message) -> None:
    """Count another voter's durable term."""
    mend = raft.mend
    if mend is None or not mend.terms or m.reject or m.context != mend.round or m.index != mend.reports[0]:
        return
    mend.reports[1][m.sender] = max(m.term, mend.reports[1].get(m.sender, 0))
    look(raft)


def _tell_sound(raft: Raft, round_: int) -> None:
    """Send an acknowledgement that counts, as the first of this member since its damage."""
    raft.acked = held = _held(raft)
    raft.send(
        Message(
            APPEND_REPLY, raft.uid, raft.leader, raft.node, raft.term, held, round_, raft.commit, MENDED, False, None,
            0, raft.validated,
        )
    )  # fmt: skip


# ---- the leader


def on_damaged(raft: Raft, m: Message) -> None:
    """Forget what a member said that now says that it lost records: nothing of it counts any more."""
    if raft.role != LEADER:
        if raft.leader == m.sender and raft.term == m.term:
            # Who waits to be mended leads nobody, and is told this term if its own is lost.
            election.forget_leader(raft)
        election.deny_leading(raft, m)
        return
    progress = raft.progress.get(m.sender)
    if progress is None or not m.context:
        return
    progress.waited = 0
    if progress.round != m.context:
        _distrust(raft, m.sender, progress, m.context)
    if m.term < raft.term or not m.last:
        # Nothing of its log is known to agree; how long it is may help.
        if m.term < raft.term or not progress.paused:
            _probe(raft, progress, m.log_term)
    elif m.index <= raft.log.last_index:
        replication.flow(raft, progress, m)
    if progress.fence >= 0 and m.index >= progress.fence:
        _send_fence(raft, m.sender, progress)


def _distrust(raft: Raft, node: int, progress: Progress, round_: int) -> None:
    progress.round = round_
    progress.fence = -1
    progress.match = 0
    progress.paused = False
    raft.pair = None
    if raft.transferee == node:
        raft.transferee = 0
        raft.changed = True
    reads.confirm(raft, node)
    raft.dirty = True


def _probe(raft: Raft, progress: Progress, last: int) -> None:
    if progress.state != SNAPSHOTTING:
        progress.probe(max(progress.match, min(last, raft.log.last_index)) + 1)
        raft.dirty = True


def confirmed(raft: Raft, node: int, index: int) -> None:
    """Tell the damaged member on `node` how far to mend: a quorum without it has confirmed this leader since the damage
    was known; `index` was its commit index."""
    progress = raft.progress.get(node)
    if progress is not None and progress.round:
        progress.fence = index
        _send_fence(raft, node, progress)


def _send_fence(raft: Raft, node: int, progress: Progress) -> None:
    raft.send(Message(MEND, raft.uid, node, raft.node, raft.term, progress.fence, 0, raft.commit, progress.round))


def counts(raft: Raft, m: Message, progress: Progress) -> bool:
    """Return whether an acknowledgement of a member that was damaged counts: from the one on that answers the index
    named to it. Others may have been under way since before the damage."""
    if m.context != MENDED or m.log_term != progress.round or not 0 <= progress.fence <= m.index:
        if progress.fence >= 0:
            _send_fence(raft, m.sender, progress)
        return False
    progress.round = 0
    membership.track(raft)
    return True
