"""When a member needs the clock, and what ticks, node liveness and lost links mean to it (docs/internals/hosting.md).

Invariants: a quiet member needs no tick, timer or message; a leader is quiet only when every live member has said
that it holds the last entry *and* the commit index; liveness and links decide when to campaign, to ask again or to
step down, never what is committed or read (law 10).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from . import election, membership, mending, reads, replication
from .progress import PROBE, REPLICATE, SNAPSHOTTING
from .quorum import has_quorum
from .state import FOLLOWER, LEADER, LEFT

if TYPE_CHECKING:
    from .core import Raft


def is_quiet(raft: Raft) -> bool:
    """Return whether this member can do without ticks until something happens."""
    if raft.stopped:
        return True
    live = raft.live
    if raft.role != LEADER:
        if raft.mend is not None:
            return False
        return raft.role == FOLLOWER and (_trusts(raft) or election.parked(raft) or _waits(raft))
    last = raft.log.last_index
    commit = raft.commit
    if commit != last or raft.transferee or (raft.reads is not None and not raft.reads.idle):
        return False
    if (raft.chores and membership.owes(raft)) or (not raft.may_lead and election.heirs(raft)):
        return False
    for node, progress in raft.progress.items():
        if (progress.match != last or progress.commit != commit or progress.round) and node in live:
            return False
    return has_quorum(raft.configuration, live)


def _trusts(raft: Raft) -> bool:
    """Return whether a leader is known, and nothing speaks against it. One that is being removed may have left without
    being heard."""
    return not raft.doubt and raft.leader in raft.live and raft.configuration.votes(raft.leader)


def _waits(raft: Raft) -> bool:
    """Return whether this member does not campaign, and is known to the others. Who has lost sight of its leader asks
    all members once, since a leader at rest says nothing by itself; who is no voter goes on showing itself now and
    then: it may be the replica of a configuration that never was committed, of which nobody knows."""
    return not election.may_stand(raft) and (raft.leader != 0 or (raft.voter and raft.denials > 0))


def tick(raft: Raft) -> bool:
    """Count one tick of the host's clock; only members that are not quiet need it. Return whether this one is, now."""
    if raft.role == FOLLOWER and raft.mend is None and _trusts(raft):
        raft.elapsed = 0
        return True
    if raft.role == LEADER:
        _tick_leader(raft)
    elif raft.mend is not None:
        mending.tick(raft)
    else:
        _tick_other(raft)
    return is_quiet(raft)


def _tick_other(raft: Raft) -> None:
    """Count a tick without a leader."""
    if _trusts(raft):
        raft.elapsed = 0
        return
    if raft.role == FOLLOWER and election.parked(raft):
        return
    raft.elapsed += 1
    if raft.elapsed < raft.timeout:
        return
    if election.may_stand(raft):
        election.campaign(raft, False)
    elif not _waits(raft):
        election.show_all(raft)


def _tick_leader(raft: Raft) -> None:
    limits = raft.limits
    live = raft.live
    # CheckQuorum (thesis 6.2): a leader that can not commit must not hold its followers.
    if has_quorum(raft.configuration, live):
        raft.lost_ticks = 0
    else:
        raft.lost_ticks += 1
        if raft.lost_ticks >= limits.election_ticks:
            election.step_down(raft, raft.term)
            return
    if raft.transferee:
        raft.transfer_ticks += 1
        if raft.transfer_ticks >= limits.election_ticks:
            # It may not want to lead: when leadership is handed over again, others come first.
            raft.turned_down = (*raft.turned_down, raft.transferee)
            raft.transferee = 0
            raft.transfer_sent = False
            # Who waits for the outcome is told.
            raft.changed = raft.dirty = True
    elif not raft.may_lead:
        election.hand_over(raft)
    if raft.chores and membership.owes(raft):
        raft.dirty = True
    if raft.reads is not None:
        reads.tick(raft, raft.reads)
    if limits.lazy_commit and raft.untold != LEFT:
        replication.tell(raft)
    for node, progress in raft.progress.items():
        if node not in live:
            continue
        state = progress.state
        if state == REPLICATE:
            if progress.match == progress.next - 1 and progress.commit >= progress.told:
                continue
        elif state == SNAPSHOTTING or not progress.paused:
            continue
        progress.waited += 1
        if progress.waited >= limits.probe_ticks:
            # Nothing says that what was sent is lost; the probe finds out without sending it twice.
            progress.probe(progress.match + 1 if state == REPLICATE else progress.next, hollow=state == REPLICATE)
            raft.dirty = True


def may_hibernate(raft: Raft) -> bool:
    """Return whether nothing at all is under way: everything this member has is durable, committed, applied and settled
    here, and the configuration is a plain one. What other members have is the host's question."""
    log = raft.log
    last = log.last_index
    return (
        not (raft.stopped or raft.dirty or raft.pending or raft.held or raft.doubt or raft.untold or raft.transferring)
        and raft.role in (LEADER, FOLLOWER)
        and raft.safe
        and raft.commit == last == raft.applied == log.stable == raft.offered
        and not raft.history
        and not (raft.configuration.outgoing or raft.configuration.promotable or raft.leaving)
        and is_quiet(raft)
    )


def fall_asleep(raft: Raft) -> None:
    """Give back what is under way to members that are absent: the windows outlive this object."""
    for progress in raft.progress.values():
        progress.forget()


def resume_leader(raft: Raft, asleep: Collection[int]) -> None:
    """Lead on: this member slept as the leader of its term, in this very process, and everything it had was durable.
    The followers in `asleep` hold all of it, the others are asked.

    After a restart it must not: what it had sent and not synced may be lost here and stored elsewhere.
    """
    assert raft.role == FOLLOWER and raft.vote == raft.node and raft.safe and raft.commit == raft.log.last_index
    raft.role = LEADER
    raft.leader = raft.node
    raft.progress = {}
    membership.track(raft)
    last = raft.log.last_index
    # Its own no-op lies at or below: it was committed before it slept.
    raft.lead_index = last
    for node in asleep:
        progress = raft.progress.get(node)
        if progress is not None:
            progress.match = progress.commit = progress.told = last
            progress.replicate(last + 1)
    raft.changed = raft.dirty = True


def resume_follower(raft: Raft, leader: int) -> None:
    """Follow on: this member slept under `leader`, whose appends had validated all it has."""
    assert raft.role == FOLLOWER and raft.commit == raft.log.last_index
    raft.leader = leader
    raft.validated = raft.acked = raft.log.last_index
    raft.changed = raft.dirty = True


def orphan(raft: Raft) -> None:
    """Campaign soon, but not all in the same tick: this member slept under a leader that is gone."""
    election.forget_leader(raft)


def abdicate(raft: Raft) -> None:
    """Stop leading while another voter can take over: this node's disk does not answer.

    Silence alone would not do: a leader whose word still travels reminds whoever asks for votes that it leads.
    """
    if raft.role == LEADER and any(raft.configuration.votes(node) for node in raft.live if node != raft.node):
        election.step_down(raft, raft.term)


def on_liveness(raft: Raft) -> None:
    """Act on a change of the set of live nodes: a dead leader is forgotten, who came back is asked where it is."""
    denied, raft.denials = raft.denials, 0
    election.unpark(raft)
    live = raft.live
    if raft.role == LEADER:
        for node, progress in raft.progress.items():
            if progress.state == PROBE and node in live:
                progress.paused = False
                raft.dirty = True
    elif raft.leader:
        if raft.leader not in live:
            election.forget_leader(raft)
    else:
        if raft.limits.patience:
            election.inquire(raft)
        if denied:
            # Only then: news that come often must not put the campaign off forever.
            election.draw_timeout(raft)


def on_link_reset(raft: Raft, node: int) -> None:
    """Count what was under way to and from `node` as lost: ask anew, and trust its leadership only when it speaks
    again."""
    raft.denials = 0
    election.unpark(raft)
    if raft.mend is not None:
        if node in raft.configuration.nodes():
            mending.say(raft, node)
    elif raft.role == LEADER:
        progress = raft.progress.get(node)
        if progress is None:
            return
        progress.commit = 0
        if progress.state != SNAPSHOTTING:
            progress.resume()
        else:
            replication.declare(raft, node)
        if node == raft.transferee:
            raft.transfer_sent = False
        reads.ask_again(raft, node)
        raft.dirty = True
    elif node == raft.leader and node != raft.node:
        election.doubt(raft)
    elif not raft.leader and raft.role == FOLLOWER and (raft.limits.patience or not election.may_stand(raft)):
        election.show(raft, node)
