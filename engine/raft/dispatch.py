"""The term of a message, then its verb: everything that is not the hot path of `core.Raft.step` (Raft paper 5.1).

Invariants: a message of a later term is acted on in that term, one of an earlier term changes nothing here; a
pre-vote moves no term. Called by `core`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import election, membership, mending, reads, replication
from .messages import (
    APPEND,
    APPEND_REPLY,
    CONFIRM,
    DAMAGED,
    LEADER_GONE,
    MEND,
    PREVOTE,
    PREVOTE_REPLY,
    READ,
    READ_REPLY,
    TERMS,
    TERMS_REPLY,
    TIMEOUT_NOW,
    TRANSFER,
    VOTE,
    VOTE_REPLY,
    Message,
)
from .state import FOLLOWER, LEADER, TERM_MAX, Lie

if TYPE_CHECKING:
    from .core import Raft


def settle(raft: Raft, m: Message) -> None:
    """Settle the term, then call the verb. What is malformed or of no use is dropped."""
    kind, term = m.kind, m.term
    if term > TERM_MAX or m.index > TERM_MAX or m.sender == raft.node:
        return
    if membership.is_stranger(raft, m.sender):
        return
    if kind == PREVOTE:
        election.on_prevote(raft, m)
        return
    if kind == PREVOTE_REPLY:
        election.on_prevote_reply(raft, m)
        return
    if kind == TERMS:
        mending.on_terms(raft, m)
        return
    if kind == TERMS_REPLY:
        mending.on_terms_reply(raft, m)
        return
    if term < raft.term:
        _stale(raft, m)
        return
    if term > raft.term:
        if kind == VOTE and m.context != TRANSFER and election.sticks(raft, m.sender):
            election.refuse(raft, m)
            election.doubt(raft)
            return
        if raft.role == LEADER and kind not in (VOTE, APPEND, READ):
            if m.sender not in raft.configuration.nodes():
                # Nobody asked it anything: what it knows of terms comes here by a member, if it counts.
                return
            election.step_down(raft, term)
        else:
            election.follow(raft, term, 0)
    if kind == VOTE:
        election.on_vote(raft, m)
    elif kind == VOTE_REPLY:
        election.on_vote_reply(raft, m)
    elif kind == APPEND:
        replication.on_append(raft, m)
    elif kind == READ:
        if raft.role != FOLLOWER:
            doubt_sender(raft, m)
            election.follow(raft, term, m.sender)
        reads.on_read(raft, m)
    elif kind == READ_REPLY:
        if raft.role == LEADER:
            reads.on_read_reply(raft, m)
    elif kind == TIMEOUT_NOW:
        election.on_timeout_now(raft)
    elif kind == LEADER_GONE:
        election.on_leader_gone(raft, m)
    elif kind == DAMAGED:
        mending.on_damaged(raft, m)
    elif kind == MEND:
        mending.on_mend(raft, m)


def doubt_sender(raft: Raft, m: Message) -> None:
    """Raise `Lie`, before `m.sender` is followed, if another node leads this term. Nothing has been changed yet."""
    if raft.leader and raft.leader != m.sender:
        raise Lie(f"two leaders in term {m.term}: {raft.leader} and {m.sender}")


def _stale(raft: Raft, m: Message) -> None:
    """Answer a message of an older term: an old leader or candidate is told, everything else is dropped (paper 5.1;
    pitfall 26)."""
    kind = m.kind
    if kind == APPEND:
        raft.send(Message(APPEND_REPLY, raft.uid, m.sender, raft.node, raft.term, m.index, 0, raft.commit, 0, True))
    elif kind == READ:
        raft.send(Message(READ_REPLY, raft.uid, m.sender, raft.node, raft.term, 0, 0, 0, m.context, True))
    elif kind == VOTE:
        election.refuse(raft, m)
    elif kind == APPEND_REPLY and m.context == CONFIRM and not m.reject:
        election.deny_leading(raft, m)
    elif kind == DAMAGED:
        mending.on_damaged(raft, m)
    elif kind == VOTE_REPLY and m.reject:
        # Denied by one who sticks to its leader and did not take over the term.
        election.on_vote_reply(raft, m)
