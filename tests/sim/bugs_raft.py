"""Bugs in the core: elections, commits, reads, configurations. Planted by `planted`."""

from __future__ import annotations

from typing import Any

from logyard.engine.host.inbound import Inbound
from logyard.engine.raft import core, election, quorum, raft_log, reads, replication
from logyard.engine.raft.core import LEADER
from logyard.engine.replica.leadership import Leadership
from logyard.protocol.errors import NotLeader

from .bugs import Bug, edited


def _told_early(old: Any) -> Any:
    def ready(self: Any) -> Any:
        found = old(self)
        if found is not None and found.after:
            found.messages, found.after = [*found.messages, *found.after], ()
        return found

    return ready


def _votes_again(old: Any) -> Any:
    def on_vote(raft: Any, message: Any) -> None:
        if not raft.leader:
            raft.vote = 0
        old(raft, message)

    return on_vote


def _counts_prior_terms(old: Any) -> Any:
    def advance_commit(raft: Any) -> None:
        lead, raft.lead_index = raft.lead_index, 0
        try:
            old(raft)
        finally:
            raft.lead_index = lead

    return advance_commit


def _counts_unstable(old: Any) -> Any:
    def acknowledgement(raft: Any, context: int = 0) -> Any:
        message = old(raft, context)
        message.index = max(message.index, min(message.last, raft.validated))
        return message

    return acknowledgement


def _commits_alone(old: Any) -> Any:
    def advance_commit(raft: Any) -> None:
        if raft.log.stable >= raft.lead_index and raft.commit < raft.log.stable:
            raft.commit, raft.dirty = raft.log.stable, True

    return advance_commit


def _commits_unvalidated(old: Any) -> Any:
    def on_append(raft: Any, message: Any) -> None:
        old(raft, message)
        commit = min(message.commit, raft.log.last_index)
        if commit > raft.commit and raft.leader == message.sender and message.term == raft.term:
            raft.commit, raft.dirty = commit, True

    return on_append


def _stays_stable(old: Any) -> Any:
    def truncate(self: Any, from_index: int) -> None:
        stable = self.stable
        old(self, from_index)
        self.stable = stable

    return truncate


def _reads_at_once(old: Any) -> Any:
    async def read_index(self: Any, member: Any) -> int:
        if member.raft.role != LEADER:
            raise NotLeader(member.raft.leader)
        return int(member.raft.applied)

    return read_index


def _reads_without_own_term(old: Any) -> Any:
    def on_start(raft: Any, context: int) -> None:
        if raft.role != LEADER:
            raise NotLeader(raft.leader)
        raft.confirmed_reads = (*raft.confirmed_reads, (context, raft.commit))
        raft.dirty = True

    return on_start


def _believes_anything(old: Any) -> Any:
    return lambda *arguments, **named: True


def _majority_of_one_less(old: Any) -> Any:
    def outcome(configuration: Any, votes: Any) -> int:
        return quorum.WON if sum(votes.values()) * 2 >= len(configuration.voters) - 1 else old(configuration, votes)

    return outcome


def _sends_less(old: Any) -> Any:
    def on_messages(self: Any, node: int, messages: Any) -> None:
        for message in messages:
            if message.entries and len(message.entries) > 1:
                message.entries = [message.entries[0], *message.entries[2:]]
        old(self, node, messages)

    return on_messages


def _counts_refusals(old: Any) -> Any:
    def on_vote_reply(raft: Any, message: Any) -> None:
        message.reject = False
        old(raft, message)

    return on_vote_reply


def _cuts_without_conflict(old: Any) -> Any:
    def reconcile(raft: Any, message: Any, prev: int, end: int) -> Any:
        fresh = old(raft, message, prev, end)
        if fresh is not None and not fresh and raft.commit <= end < raft.log.last_index:
            replication.overwrite(raft, end + 1)
        return fresh

    return reconcile


def _counts_held(old: Any) -> Any:
    def flow(raft: Any, progress: Any, message: Any) -> Any:
        message.index = max(message.index, min(message.last, raft.log.last_index))
        return old(raft, progress, message)

    return flow


def _counts_own_unstable(old: Any) -> Any:
    def advance_commit(raft: Any) -> None:
        stable, raft.log.stable = raft.log.stable, raft.log.last_index
        try:
            old(raft)
        finally:
            raft.log.stable = stable

    return advance_commit


BUGS = (
    Bug("vote_told_before_durable", "votes are durable before they are told", [(core.Raft, "ready", _told_early)]),
    Bug(
        "lane_takes_handed_for_stable",
        "only stable entries are acknowledged, by the lane as well",
        [(core.Raft, "hand_out", edited(("raft.offered = last", "raft.offered = log.stable = last")))],
    ),
    Bug("votes_twice", "one vote a term", [(election, "on_vote", _votes_again)]),
    Bug("vote_for_shorter_log", "a leader has all that is committed", [(election, "_up_to_date", _believes_anything)]),
    Bug("elected_by_less", "a leader has a majority", [(election, "vote_outcome", _majority_of_one_less)]),
    Bug("refusal_counted", "a refusal is no vote", [(election, "on_vote_reply", _counts_refusals)]),
    Bug(
        "counts_prior_terms",
        "only entries of the own term are counted",
        [(replication, "advance_commit", _counts_prior_terms)],
    ),
    Bug(
        "acknowledges_unstable",
        "only stable entries are acknowledged",
        [(replication, "acknowledgement", _counts_unstable)],
    ),
    Bug("counts_what_is_held", "a leader counts what followers have stable", [(replication, "flow", _counts_held)]),
    Bug(
        "counts_itself_early",
        "a leader counts its own copy when it is stable",
        [(replication, "advance_commit", _counts_own_unstable)],
    ),
    Bug("commits_alone", "a majority has what is committed", [(replication, "advance_commit", _commits_alone)]),
    Bug(
        "commits_unvalidated",
        "a follower commits what the leader validated",
        [(replication, "on_append", _commits_unvalidated)],
    ),
    Bug(
        "truncates_without_conflict",
        "only a conflict takes entries away",
        [(replication, "_reconcile", _cuts_without_conflict)],
    ),
    Bug("stable_after_truncation", "stable falls with the log", [(raft_log.RaftLog, "truncate", _stays_stable)]),
    Bug("read_without_round", "a read is confirmed by a quorum", [(Leadership, "read_index", _reads_at_once)]),
    Bug("read_before_own_entry", "a new leader knows what is committed", [(reads, "read", _reads_without_own_term)]),
    Bug("entry_lost_on_the_way", "a log has no holes", [(Inbound, "on_messages", _sends_less)]),
    Bug(
        "reads_before_own_entry_is_applied",
        "who leads answers with all that was acknowledged",
        [(Leadership, "led", _reads_at_once)],
        featured=frozenset({"reads"}),
    ),
    Bug(
        "who_asks_for_its_leader_is_not_answered",
        "who lost sight of its leader finds it again",
        [(election, "on_vote_reply", edited(("replication.remind(raft, m.sender)", "pass")))],
        featured=frozenset({"roles", "mute"}),
    ),
    Bug(
        "window_kept_by_who_leads_no_more",
        "what is under way to a node is that of its groups",
        [(election, "_drop_leadership", edited(("progress.forget()", "pass")))],
    ),
)
