"""Who leads: pre-vote, vote, stickiness, transfer, stepping down (Raft paper 5.2, 5.4.1; thesis 3.10, 4.2.3, 9.6).

Invariants: one vote a term, and it leaves this node only when (term, vote) is durable here; a candidate counts its
own vote only then, too; a pre-vote changes nothing that is durable and no one's term. Called by `core`, `quiescence`
and, for transfers, `replication`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from logyard.protocol.errors import NotLeader, Refused

from ..entry import CONFIGURATION, NOOP
from ..types import FORCED_TERMS
from . import membership, reads, replication
from .messages import (
    CONFIRM,
    HEARS,
    LEADER_GONE,
    PREVOTE,
    PREVOTE_REPLY,
    TIMEOUT_NOW,
    TRANSFER,
    VOTE,
    VOTE_REPLY,
    Message,
)
from .quorum import LOST, WON, first_leader, vote_outcome
from .state import CANDIDATE, FOLLOWER, LEADER, PRECANDIDATE, TERM_MAX

if TYPE_CHECKING:
    from .core import Raft

BACKOFF_MAX = 6
PARKED = 3
"""So many denials by members that hear a leader: of at least two rounds in a group of three."""


def draw_timeout(raft: Raft) -> None:
    """Draw a new timeout for each election, so that equal members part (paper 5.2). Doubled for each denial in a row.

    A member that others deny because they hear a leader would else ask forever; news of nodes and links end that.
    """
    ticks = raft.limits.election_ticks
    raft.elapsed = 0
    raft.timeout = (ticks + raft.draw(ticks)) << min(raft.denials + raft.limits.patience, BACKOFF_MAX)


def forget_leader(raft: Raft) -> None:
    """Forget a leader that is known to be gone: campaign within `election_ticks`, but not all in the same tick.

    With `staggered` limits the voter that the uid picks, of those that live, campaigns in the first half of that time,
    and the others in the second one: two that campaign at once share the votes, and wait for another timeout.
    """
    gone = raft.leader
    raft.leader = raft.hearers = 0
    raft.changed = raft.dirty = True
    raft.doubt = False
    raft.elapsed = 0
    if not may_stand(raft):
        # It asks anew who leads.
        raft.denials = 0
    limits = raft.limits
    raft.timeout = _first_timeout(raft, gone)
    if limits.patience:
        raft.timeout += limits.election_ticks << limits.patience
        inquire(raft)


def _first_timeout(raft: Raft, gone: int) -> int:
    """Draw after how many ticks to campaign for the place of a leader that is gone, whose node may be alive."""
    ticks = raft.limits.election_ticks
    voters = [node for node in raft.configuration.voters if node in raft.live and node != gone]
    if not raft.limits.staggered or len(voters) < 2:
        return 1 + raft.draw(ticks)
    half = ticks // 2
    if first_leader(raft.uid, voters) == raft.node:
        # Not in the first tick: whoever does not know yet that the leader is gone denies its vote.
        soonest = min(2, half)
        return soonest + raft.draw(half - soonest + 1)
    return 1 + half + raft.draw(ticks - half)


def follow(raft: Raft, term: int, leader: int) -> None:
    """Become a follower in `term` (>= the own one) of `leader` (0: unknown)."""
    assert term >= raft.term
    if raft.role == LEADER:
        _drop_leadership(raft)
    if term != raft.term:
        raft.term = term
        raft.vote = raft.hearers = 0
        raft.safe = False
        raft.validated = raft.acked = 0
    raft.role = FOLLOWER
    raft.leader = leader
    raft.votes = None
    raft.doubt = False
    raft.changed = raft.dirty = True
    draw_timeout(raft)


def step_down(raft: Raft, term: int) -> None:
    """Stop leading without knowing a successor: the followers must not trust in this leader any longer."""
    assert raft.role == LEADER
    for node in raft.progress:
        raft.send(Message(LEADER_GONE, raft.uid, node, raft.node, raft.term))
    follow(raft, term, 0)


def _drop_leadership(raft: Raft) -> None:
    reads.fail_all(raft)
    for progress in raft.progress.values():
        progress.forget()
    raft.progress = {}
    raft.pair = None
    raft.transferee = 0
    raft.lead_index = raft.uncommitted_bytes = raft.lost_ticks = 0
    raft.leaving = raft.chores = False
    raft.turned_down = ()


def lead(raft: Raft) -> None:
    """Begin to lead, the election won: a no-op of the own term makes everything before it committable (paper 5.4.2,
    8)."""
    assert raft.safe and raft.role != LEADER
    log = raft.log
    raft.role = LEADER
    raft.leader = raft.node
    raft.votes = None
    raft.changed = True
    raft.denials = raft.lost_ticks = 0
    raft.doubt = raft.transfer_sent = False
    raft.progress = {}
    membership.track(raft)
    index = log.last_index + 1
    entry = raft.encode(index, raft.term, NOOP, b"")
    assert entry.index == index and entry.term == raft.term
    log.push(entry)
    raft.lead_index = index
    found = log.window(max(raft.commit + 1, log.memory_first), index, 1 << 62)
    raft.uncommitted_bytes = found[1] if found else 0
    raft.dirty = True


def may_stand(raft: Raft) -> bool:
    """Return whether this member may campaign: it is a voter, or its leaving is not known to be committed.

    The last leader of a group of two that removed itself, and went before the other heard of it, is the only one who
    can finish that: the other needs its vote, and has the shorter log (thesis 4.2.2).
    """
    if not raft.may_lead or raft.mend is not None:
        return False
    return raft.voter or (raft.configuration_index > raft.commit and membership.before_newest(raft).votes(raft.node))


def campaign(raft: Raft, transfer: bool) -> None:
    """Ask first (thesis 9.6), or, when the leader itself wants it, stand at once (thesis 3.10)."""
    if raft.role == LEADER or not may_stand(raft) or raft.term >= TERM_MAX - 1:
        return
    if (raft.log.last_term, raft.log.last_index) < raft.promise:
        # Made anew, and held to what it had: if the change that made it never was committed, nobody knows of it.
        if not transfer:
            show_all(raft)
        return
    raft.leader = 0
    raft.doubt = False
    raft.changed = raft.dirty = True
    draw_timeout(raft)
    if transfer:
        _stand(raft, TRANSFER)
        return
    raft.role = PRECANDIDATE
    # Who stands without being a voter of the newest configuration is not counted: quorums look at their own.
    raft.votes = {raft.node: True}
    if vote_outcome(raft.configuration, raft.votes) == WON:
        _stand(raft, 0)
        return
    _ask(raft, PREVOTE, raft.term + 1, 0)


def _stand(raft: Raft, context: int) -> None:
    """Stand as a real candidate. The own vote counts, and the requests leave, when (term, vote) is durable."""
    raft.role = CANDIDATE
    raft.term += 1
    raft.vote = raft.node
    raft.safe = False
    raft.validated = raft.acked = 0
    raft.votes = {}
    raft.changed = raft.dirty = True
    _ask(raft, VOTE, raft.term, context)


def _ask(raft: Raft, kind: int, term: int, context: int) -> None:
    log = raft.log
    configuration = raft.configuration
    for node in sorted({*configuration.voters, *configuration.outgoing}):
        if node != raft.node:
            raft.send(Message(kind, raft.uid, node, raft.node, term, log.last_index, log.last_term, 0, context))


def tally(raft: Raft) -> None:
    """Look at the votes after one came in."""
    assert raft.votes is not None
    outcome = vote_outcome(raft.configuration, raft.votes)
    if outcome == WON:
        if raft.role == PRECANDIDATE:
            raft.denials = 0
            draw_timeout(raft)
            _stand(raft, 0)
        elif raft.safe:
            lead(raft)
    elif outcome == LOST:
        if raft.role == PRECANDIDATE:
            raft.denials += 1
        follow(raft, raft.term, 0)


def sticks(raft: Raft, sender: int) -> bool:
    """Return whether a leader is known that others should not depose: its node is alive (leader stickiness, thesis
    4.2.3)."""
    leader = raft.leader
    return leader != 0 and leader != sender and leader in raft.live


def doubt(raft: Raft) -> None:
    """Doubt the known leader, against which something speaks: ask it, and campaign if it does not answer.

    Without heartbeats a follower that missed its leader's farewell would wait forever, and deny others their election.
    """
    if raft.role == FOLLOWER and raft.leader:
        if not raft.doubt:
            raft.doubt = True
            draw_timeout(raft)
        replication.acknowledge(raft, CONFIRM)


def _up_to_date(raft: Raft, m: Message) -> bool:
    """Return whether the candidate's log is at least as complete as this one's: a voter denies who has less (paper
    5.4.1)."""
    log = raft.log
    if m.log_term == log.last_term:
        newer = m.index >= log.last_index
    else:
        newer = m.log_term > log.last_term
    return newer and (m.log_term, m.index) >= raft.promise


def on_prevote(raft: Raft, m: Message) -> None:
    """Answer whether this member would vote for `sender` in term `m.term`: in every case, as a silent refusal can lock
    a group (pitfall 26)."""
    if m.term > raft.term and m.sender == raft.leader:
        # In its own term a leader asks for nothing: this one does not lead any more.
        forget_leader(raft)
    if parked(raft):
        # Who asks hears no leader any more.
        unpark(raft)
    sticky = sticks(raft, m.sender)
    granted = m.term > raft.term and not sticky and _up_to_date(raft, m) and raft.mend is None
    term = m.term if granted else raft.term
    # One that was removed is to speak on, until it is told.
    context = HEARS if sticky and raft.configuration.votes(m.sender) else 0
    raft.send(Message(PREVOTE_REPLY, raft.uid, m.sender, raft.node, term, m.term, 0, 0, context, not granted))
    if raft.role == LEADER:
        replication.remind(raft, m.sender)
    elif sticky and not raft.doubt:
        doubt(raft)


def on_prevote_reply(raft: Raft, m: Message) -> None:
    """Count it; a refusal from a higher term is where this member's term comes from (pitfall 26)."""
    if m.reject and m.term > raft.term:
        if raft.role == LEADER:
            if m.sender in raft.configuration.nodes():
                step_down(raft, m.term)
        else:
            follow(raft, m.term, 0)
    elif raft.role == PRECANDIDATE and raft.votes is not None and m.index == raft.term + 1:
        raft.votes[m.sender] = not m.reject
        tally(raft)
        if m.reject and m.context == HEARS and raft.role != LEADER:
            raft.hearers += 1
            if parked(raft):
                follow(raft, raft.term, 0)


def parked(raft: Raft) -> bool:
    """Return whether others said often enough that they hear a leader: this member stops asking until there is news of
    nodes or links, or one of them asks for votes or shows itself (docs/internals/hosting.md).

    Nobody waits for good: who denies asks its leader at the same time (`doubt`), and campaigns if that leads no more;
    or shows itself, if it may not lead.
    """
    return raft.hearers >= PARKED and not raft.leader


def unpark(raft: Raft) -> None:
    """Wake a parked member: there is news."""
    if raft.hearers:
        raft.hearers = 0
        if not raft.leader and raft.role == FOLLOWER:
            draw_timeout(raft)


def refuse(raft: Raft, m: Message) -> None:
    """Deny a vote without touching anything; the own term tells an old candidate how far behind it is."""
    raft.send(Message(VOTE_REPLY, raft.uid, m.sender, raft.node, raft.term, m.term, 0, 0, 0, True))
    if raft.role == LEADER:
        replication.remind(raft, m.sender)


def show(raft: Raft, node: int) -> None:
    """Show this member, which never campaigns and has heard of no leader, to `node`: a learner that was removed while
    it was away would else wait for good, because only who speaks is told. Counts for nothing: nobody asks for term
    0."""
    raft.send(Message(VOTE_REPLY, raft.uid, node, raft.node, raft.term, 0, 0, 0, 0, True))


def inquire(raft: Raft) -> None:
    """Ask all members who leads, without asking for votes: whoever leads says so (`on_vote_reply`). For one that
    campaigns late, and would else know no leader until then."""
    for node in sorted(raft.configuration.nodes() - {raft.node}):
        show(raft, node)


def show_all(raft: Raft) -> None:
    """Call `show` for all members that are known here; the next time after twice as long, or, of a voter, with the next
    news of nodes, links or the leader: it is known to whoever leads."""
    inquire(raft)
    raft.denials += 1
    draw_timeout(raft)


def on_vote(raft: Raft, m: Message) -> None:
    """Answer a request for a vote in the own term (paper 5.2, 5.4.1). The answer leaves when the vote is durable."""
    free = raft.vote == m.sender or (not raft.vote and not raft.leader)
    if not free or raft.mend is not None or not _up_to_date(raft, m):
        refuse(raft, m)
        return
    if raft.vote != m.sender:
        raft.vote = m.sender
        raft.safe = False
        raft.dirty = True
    raft.elapsed = 0
    raft.send(Message(VOTE_REPLY, raft.uid, m.sender, raft.node, raft.term, m.term))


def on_vote_reply(raft: Raft, m: Message) -> None:
    """Count a vote for the candidacy of the own term. Who `show`s itself to its leader is told that it leads."""
    if m.reject and not m.index and parked(raft):
        # Who shows itself hears no leader any more, and does not campaign: nobody else may ask for votes.
        unpark(raft)
        raft.changed = raft.dirty = True
    if raft.role == LEADER and m.reject and not m.index:
        replication.remind(raft, m.sender)
    if raft.role == CANDIDATE and raft.votes is not None and m.index == raft.term:
        raft.votes[m.sender] = not m.reject
        tally(raft)


def on_timeout_now(raft: Raft) -> None:
    """Campaign at once: the leader wants this member to lead (thesis 3.10)."""
    if raft.role == FOLLOWER:
        campaign(raft, True)


def deny_leading(raft: Raft, m: Message) -> None:
    """Tell `m`'s sender, which answers a leader, that this member does not lead (any more)."""
    raft.send(Message(LEADER_GONE, raft.uid, m.sender, raft.node, raft.term))


def on_leader_gone(raft: Raft, m: Message) -> None:
    """Take the word of this term's leader that it leads no more."""
    if raft.leader == m.sender and raft.role == FOLLOWER:
        forget_leader(raft)


def transfer(raft: Raft, to: int) -> None:
    """Hand leadership to voter `to` once it has everything; given up after an election timeout (thesis 3.10)."""
    if raft.role != LEADER:
        raise NotLeader(raft.leader)
    if to == raft.node:
        raft.transferee = 0
        return
    if to not in raft.configuration.voters:
        raise Refused(f"node {to} is not a voter of this group")
    if to not in raft.live:
        raise Refused(f"node {to} does not answer")
    if raft.progress[to].round:
        raise Refused(f"node {to} lost records and is being repaired")
    raft.transferee = to
    raft.transfer_ticks = 0
    raft.transfer_sent = False
    replication.push_transfer(raft)


def heirs(raft: Raft) -> list[int]:
    """Return the live voters that may take over from a leader that should not lead, the most advanced first."""
    progress = raft.progress
    voters = [
        node
        for node in raft.configuration.voters
        if node in progress and node in raft.live and not progress[node].round
    ]
    return sorted(voters, key=lambda node: (node in raft.turned_down, -progress[node].match, node))


def hand_over(raft: Raft) -> None:
    """Ask the next heir to take over from a leader that may not lead. When all have turned it down it waits as long as
    that took, so that the group is not held up all the time."""
    found = heirs(raft)
    if not found or raft.commit < raft.lead_index:
        return
    if found[0] not in raft.turned_down:
        transfer(raft, found[0])
        return
    raft.transfer_ticks += 1
    if raft.transfer_ticks >= (len(found) + 1) * raft.limits.election_ticks:
        raft.turned_down = ()


def resign(raft: Raft, name_heir: bool) -> None:
    """Give up leading as the host is about to end: the best heir campaigns at once, the others hear that nobody leads.
    Hints both: whoever lacks a committed entry is not elected."""
    found = heirs(raft) if name_heir else []
    if found:
        raft.send(Message(TIMEOUT_NOW, raft.uid, found[0], raft.node, raft.term))
    step_down(raft, raft.term)


def force(raft: Raft) -> int:
    """Make this member the only voter: for a group whose quorum is gone for good (Ra:
    force_shrink_members_to_current_member). Returns the index of the configuration entry.

    A new term far above the old one, the vote in it, and the configuration become durable in one write; then the
    member leads. Its whole log counts, also what was never committed. **Lost**: what a quorum of the others committed
    and this member does not have. The others must be down, or be wiped: as long as they form a quorum of the old
    configuration they can go on as a second group. They can't touch this one: it does not listen to nodes outside its
    configuration while it is the sole voter, its terms are above theirs, so none of them is elected by its new
    members, and their hosts drop their replicas when they hear of the configuration. Raises `Refused`.
    """
    if raft.stopped or raft.term >= TERM_MAX - 2 * FORCED_TERMS:
        raise Refused("this member takes no part in its group")
    if raft.mend is not None:
        raise Refused("this member lost records, and nobody can tell which: what is left of them is no group")
    log = raft.log
    if (log.last_term, log.last_index) < raft.promise:
        raise Refused("this member lacks what an earlier replica of it had here")
    if raft.role == LEADER:
        step_down(raft, raft.term)
    follow(raft, raft.term + FORCED_TERMS, 0)
    raft.role = CANDIDATE
    raft.vote = raft.node
    raft.votes = {}
    index = log.last_index + 1
    configuration = membership.Configuration((raft.node,))
    log.push(raft.encode(index, raft.term, CONFIGURATION, configuration.encode()))
    membership.adopt(raft, index, configuration)
    return index
