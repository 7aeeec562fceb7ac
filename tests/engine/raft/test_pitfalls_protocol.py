"""Pitfalls 1 to 15 of docs' fault list, by number: each is a bug that a real Raft has had."""

from __future__ import annotations

import pytest

from logyard.engine.raft.core import CANDIDATE, FOLLOWER, LEADER, Change, Raft
from logyard.engine.raft.messages import (
    APPEND,
    APPEND_REPLY,
    PREVOTE_REPLY,
    READ,
    READ_REPLY,
    VOTE,
    VOTE_REPLY,
    Message,
)
from logyard.protocol.errors import Refused

from .network import UID, Network, command, drain, entries_of, make, persist


def append(sender: int, term: int, index: int, log_term: int, terms: tuple[int, ...] = (), commit: int = 0) -> Message:
    """An APPEND to node 1."""
    entries = entries_of(*terms, first=index + 1)
    return Message(
        APPEND, UID, 1, sender, term, index, log_term, commit, 0, False, entries, index + 1, index + len(terms)
    )


def leading(voters: tuple[int, ...] = (1, 2, 3), **more: object) -> Raft:
    """Node 1 leads; its no-op is stable, and committed only if it is alone."""
    raft = make(voters=voters, **more)  # type: ignore[arg-type]
    raft.campaign()
    drain(raft)
    for node in voters[1:]:
        raft.step(Message(PREVOTE_REPLY, UID, 1, node, raft.term + 1, raft.term + 1))
    drain(raft)
    for node in voters[1:]:
        raft.step(Message(VOTE_REPLY, UID, 1, node, raft.term, raft.term))
    drain(raft)
    assert raft.role == LEADER
    return raft


def ack(raft: Raft, node: int, index: int | None = None) -> None:
    index = raft.log.last_index if index is None else index
    raft.step(Message(APPEND_REPLY, UID, 1, node, raft.term, index, last=index, commit=raft.commit))


@pytest.mark.parametrize("change", [Change("add", 4), Change("remove", 3), Change("add_learner", 4)])
def test_pitfall_01_no_membership_change_before_the_own_no_op_is_committed(change: Change) -> None:
    raft = leading()
    with pytest.raises(Refused, match="own term"):
        raft.propose_membership(change)
    ack(raft, 2)
    index = raft.propose_membership(change)
    with pytest.raises(Refused, match="not committed yet"):
        raft.propose_membership(Change("add_learner", 9))
    drain(raft)
    ack(raft, 2)
    ack(raft, 4)
    assert raft.commit == index
    raft.propose_membership(Change("add_learner", 9))


def test_pitfall_02_an_entry_of_an_earlier_term_is_not_committed_by_counting() -> None:
    raft = leading(terms=(1, 2), term=2)
    ack(raft, 2, 2)
    ack(raft, 3, 2)
    assert raft.commit == 0
    ack(raft, 2, 3)
    assert raft.commit == 3


def test_pitfall_03_a_new_leader_answers_no_read_before_its_no_op_is_committed() -> None:
    raft = leading(terms=(1,), commit=1)
    raft.read(5)
    assert [m for m in drain(raft) if m.kind == READ] == []
    ack(raft, 2)
    reads = [m for m in drain(raft) if m.kind == READ]
    assert len(reads) == 2
    raft.step(Message(READ_REPLY, UID, 1, 2, raft.term, context=reads[0].context))
    ready = raft.ready()
    assert ready is not None and list(ready.reads) == [(5, 2)]


def test_pitfall_04_a_read_fails_when_leadership_is_lost_in_between() -> None:
    raft = leading()
    ack(raft, 2)
    raft.read(1)
    drain(raft)
    raft.read(2)
    raft.step(append(3, 2, 0, 0))
    ready = raft.ready()
    assert ready is not None and list(ready.failed_reads) == [1, 2] and not ready.reads
    raft.step(Message(READ_REPLY, UID, 1, 2, 1, context=1))
    assert not raft.confirmed_reads


def test_pitfall_04_learners_are_not_asked_and_do_not_count_and_equal_contexts_are_both_answered() -> None:
    raft = leading(learners=(4,))
    ack(raft, 2)
    raft.read(9)
    raft.read(9)
    reads = [m for m in drain(raft) if m.kind == READ]
    assert [m.to for m in reads] == [2, 3]
    raft.step(Message(READ_REPLY, UID, 1, 4, raft.term, context=reads[0].context))
    assert raft.ready() is None
    raft.step(Message(READ_REPLY, UID, 1, 3, raft.term, context=reads[0].context))
    ready = raft.ready()
    assert ready is not None and list(ready.reads) == [(9, 1), (9, 1)]


def test_pitfall_05_a_leader_that_slept_through_an_election_serves_no_read() -> None:
    network = Network(3)
    paused = network.elect(1)
    network.hosts[1].propose(b"old")
    network.drain()
    network.isolate(1)
    network.tick(30)
    new = network.leader()
    assert new is not None and new.node != 1
    network.hosts[new.node].propose(b"new")
    network.drain()
    assert paused.role != LEADER or paused.term < new.term
    other = Network(3)
    sleeper = other.elect(1)
    sleeper.read(1)
    other[2].step(Message(READ, UID, 2, 3, 5))
    for m in other.said(1):
        if m.to == 2:
            other[2].step(m)
    for m in other.said(2):
        if m.to == 1:
            sleeper.step(m)
    other.said(1)
    assert other.hosts[1].failed_reads == [1] and other.hosts[1].reads == [] and sleeper.role == FOLLOWER


def test_pitfall_06_term_and_vote_are_one_write() -> None:
    raft = make()
    raft.step(Message(VOTE, UID, 1, 2, 4, 0, 0))
    ready = raft.ready()
    assert ready is not None and ready.hard_state == (4, 2)
    assert [m.kind for m in ready.after] == [VOTE_REPLY] and not ready.messages


def test_pitfall_07_a_vote_survives_a_crash() -> None:
    network = Network(3)
    network[1].step(Message(VOTE, UID, 1, 2, 4, 0, 0))
    assert [m.reject for m in network.said(1)] == [False]
    network.crash(1)
    network.restart(1)
    assert (network[1].term, network[1].vote) == (4, 2)
    network[1].step(Message(VOTE, UID, 1, 3, 4, 9, 3))
    assert [m.reject for m in network.said(1) if m.kind == VOTE_REPLY] == [True]


def test_pitfall_08_no_vote_leaves_before_it_is_durable() -> None:
    raft = make()
    raft.step(Message(VOTE, UID, 1, 2, 4, 0, 0))
    first = raft.ready()
    assert first is not None and not first.messages
    # The candidate asks again while the write is under way: still nothing may leave.
    raft.step(Message(VOTE, UID, 1, 2, 4, 0, 0))
    assert raft.ready() is None
    assert first.token is not None
    raft.on_persisted(*first.token)
    second = raft.ready()
    assert second is not None and [m.kind for m in second.messages] == [VOTE_REPLY] and second.hard_state is None


def test_pitfall_08_a_candidate_counts_its_own_vote_when_it_is_durable() -> None:
    raft = make(voters=(1,))
    raft.campaign()
    ready = raft.ready()
    assert raft.role == CANDIDATE and ready is not None and ready.token is not None
    raft.on_persisted(*ready.token)
    assert raft.role == LEADER
    raft = make(voters=(1, 2))
    raft.campaign(transfer=True)
    ready = raft.ready()
    assert ready is not None and not ready.messages and [m.kind for m in ready.after] == [VOTE]
    raft.step(Message(VOTE_REPLY, UID, 1, 2, 1, 1))
    assert raft.role == CANDIDATE
    persist(raft, ready)
    assert raft.role == LEADER


def test_pitfall_09_another_groups_sync_says_nothing_of_this_one() -> None:
    first, second = make(), make()
    for raft in (first, second):
        raft.step(append(2, 1, 0, 0, (1,)))
    a, b = first.ready(), second.ready()
    assert a is not None and b is not None and a.token is not None
    first.on_persisted(*a.token)
    assert [m.index for m in drain(first)] == [1]
    assert (second.log.stable, second.safe) == (0, False) and second.ready() is None


def test_pitfall_10_a_single_voter_commits_when_its_disk_has_it() -> None:
    raft = leading(voters=(1,))
    assert raft.commit == 1
    raft.propose(command(2, raft.term))
    ready = raft.ready()
    assert ready is not None and raft.commit == 1 and ready.commit == 1 and ready.token is not None
    raft.on_persisted(*ready.token)
    assert raft.commit == 2


@pytest.mark.parametrize("voters", [(1, 2), (1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 4, 5)])
def test_pitfall_10_a_leader_counts_its_own_copy_when_its_disk_has_it(voters: tuple[int, ...]) -> None:
    raft = leading(voters)
    for node in voters[1:]:
        ack(raft, node)
    drain(raft)
    raft.propose(command(2, raft.term))
    ready = raft.ready()
    assert ready is not None and ready.token is not None
    others = voters[1 : len(voters) // 2 + 1]
    for node in others:
        ack(raft, node)
    assert raft.commit == 1
    raft.on_persisted(*ready.token)
    assert raft.commit == 2


def test_pitfall_10_a_leader_with_a_slow_disk_commits_with_its_followers() -> None:
    raft = leading()
    ack(raft, 2)
    drain(raft)
    raft.propose(command(2, raft.term))
    assert raft.ready() is not None
    ack(raft, 2)
    ack(raft, 3)
    assert (raft.commit, raft.log.stable) == (2, 1)


def test_pitfall_11_late_reports_of_overwritten_entries_count_for_nothing() -> None:
    """ABA: 1@1 is written, overwritten by 1@2, and stands there again from a leader of term 3 that has it."""
    raft = make()
    raft.step(append(2, 1, 0, 0, (1,)))
    first = raft.ready()
    raft.step(append(3, 2, 0, 0, (2,)))
    second = raft.ready()
    raft.step(append(2, 3, 0, 0, (1,)))
    third = raft.ready()
    assert first and second and third and first.token and second.token and third.token
    assert (second.truncated, third.truncated) == (1, 1)
    raft.on_persisted(*first.token)
    assert raft.log.stable == 0
    raft.on_persisted(*second.token)
    assert raft.log.stable == 0 and drain(raft) == []
    raft.on_persisted(*third.token)
    assert raft.log.stable == 1
    accepted = [m for m in drain(raft) if not m.reject]
    assert [(m.to, m.term, m.index) for m in accepted] == [(2, 3, 1)]


def test_pitfall_11_an_acknowledgement_never_goes_to_the_leader_of_an_older_term() -> None:
    raft = make()
    raft.step(append(2, 1, 0, 0, (1, 1)))
    first = raft.ready()
    raft.step(append(3, 2, 1, 1))
    second = raft.ready()
    assert first is not None and second is not None
    answers = persist(raft, first) + persist(raft, second) + drain(raft)
    assert {(m.to, m.term) for m in answers} == {(3, 2)}
    # Node 3 validated entry 1 only: that is what it hears of, whatever is stable here.
    assert raft.log.stable == 2 and max(m.index for m in answers) == 1


def test_pitfall_12_a_stale_shorter_append_truncates_nothing() -> None:
    raft = make(terms=(1, 1, 1, 1))
    for message in (append(2, 1, 0, 0, (1, 1)), append(2, 1, 1, 1), append(2, 1, 0, 0)):
        raft.step(message)
        ready = raft.ready()
        assert ready is not None and not ready.truncated and raft.log.last_index == 4
    raft.step(append(2, 2, 1, 1, (1, 2)))
    ready = raft.ready()
    assert ready is not None and ready.truncated == 3 and [entry.index for entry in ready.entries] == [3]
    assert raft.log.last_index == 3 and raft.log.stable == 2


def test_pitfall_13_pipelined_appends_that_arrive_out_of_order_sort_themselves_out() -> None:
    network = Network(3)
    leader = network.elect(1)
    for _ in range(5):
        network.hosts[1].propose(b"x")
        network.hosts[1].turn()
    network.queue.reverse()
    network.drain()
    assert [host.raft.commit for host in network.up()] == [6, 6, 6] and leader.is_quiet


def test_pitfall_14_a_rejection_says_where_to_go_on_and_never_below_the_commit_index() -> None:
    raft = make(terms=(1, 1, 1, 1, 2, 2, 2), commit=4)
    raft.step(append(2, 9, 7, 1))
    (answer,) = drain(raft)
    assert (answer.index, answer.context, answer.log_term) == (7, 4, 1)
    raft = make(terms=(3, 3, 3, 3), commit=2)
    raft.step(append(2, 9, 4, 1))
    (answer,) = drain(raft)
    assert (answer.context, answer.log_term) == (2, 3)


def test_pitfall_14_backing_off_takes_a_message_a_term_not_one_an_entry() -> None:
    network = Network(3)
    for node, terms in ((1, (1,) * 5 + (3,) * 200), (2, (1,) * 5 + (2,) * 300), (3, (1,) * 5 + (3,) * 200)):
        network.hosts[node].disk.entries = entries_of(*terms)
        network.hosts[node].disk.term = 3
        network.hosts[node].start()
    network.see()
    network[1].campaign()
    appends = 0
    for _ in range(30):
        for host in network.up():
            host.turn()
            host.write(len(host.unwritten))
        batch, network.queue = network.queue, []
        appends += sum(m.kind == APPEND and m.to == 2 for m in batch)
        for message in batch:
            network.deliver(message)
    assert network[2].log.runs == network[1].log.runs and appends <= 6


def test_pitfall_15_the_commit_index_stops_at_what_this_leader_validated() -> None:
    raft = make(terms=(1, 1, 1))
    raft.step(append(2, 2, 1, 1, commit=3))
    assert raft.commit == 1
    raft.step(append(2, 2, 1, 1, (1,), commit=3))
    assert raft.commit == 2
    raft.step(append(2, 2, 2, 1, (2,), commit=3))
    assert raft.commit == 3 and raft.log.last_term == 2
