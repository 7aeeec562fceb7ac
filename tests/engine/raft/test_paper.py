"""One test, or a few, for each section of the Raft paper and the thesis."""

from __future__ import annotations

import pytest

from logyard.engine.entry import NOOP
from logyard.engine.raft import membership
from logyard.engine.raft.core import CANDIDATE, FOLLOWER, LEADER, PRECANDIDATE, Change, Limits, RaftLog
from logyard.engine.raft.messages import (
    APPEND,
    APPEND_REPLY,
    PREVOTE,
    PREVOTE_REPLY,
    READ,
    SNAPSHOT,
    TIMEOUT_NOW,
    TRANSFER,
    VOTE,
    VOTE_REPLY,
    Message,
)
from logyard.engine.raft.progress import SNAPSHOTTING
from logyard.protocol.errors import Busy, NotLeader

from .network import UID, Network, command, drain, entries_of, make


def test_5_1_a_later_term_makes_a_follower_of_everyone() -> None:
    for role in (FOLLOWER, PRECANDIDATE, CANDIDATE, LEADER):
        network = Network(3)
        raft = network.elect(1) if role == LEADER else network[1]
        if role in (PRECANDIDATE, CANDIDATE):
            raft.campaign(transfer=role == CANDIDATE)
        assert raft.role == role
        raft.step(Message(APPEND, UID, 1, 2, raft.term + 3, raft.log.last_index, raft.log.last_term))
        assert (raft.role, raft.leader) == (FOLLOWER, 2)


def test_5_1_an_earlier_term_is_refused_with_the_current_one() -> None:
    raft = make(terms=(1, 3))
    raft.step(Message(APPEND, UID, 1, 2, 2, 1, 1, 1, entries=entries_of(2, first=2), first=2, last=2))
    (answer,) = drain(raft)
    assert (answer.kind, answer.term, answer.reject, raft.log.last_term) == (APPEND_REPLY, 3, True, 3)
    raft.step(Message(VOTE, UID, 1, 2, 2, 9, 2))
    (answer,) = drain(raft)
    assert (answer.kind, answer.term, answer.reject, raft.vote) == (VOTE_REPLY, 3, True, 0)


def test_5_2_a_majority_elects_and_the_leader_makes_itself_known() -> None:
    network = Network(3)
    raft = network.elect(1)
    assert raft.term == 1 and raft.log.entries[0].kind == NOOP
    assert [network[node].leader for node in (1, 2, 3)] == [1, 1, 1]


def test_5_2_a_follower_campaigns_when_its_timeout_passes_without_a_leader() -> None:
    raft = make(draw=lambda n: 3)
    for _ in range(raft.limits.election_ticks + 2):
        raft.tick()
    assert raft.role == FOLLOWER and drain(raft) == []
    raft.tick()
    assert raft.role == PRECANDIDATE
    assert sorted(m.to for m in drain(raft) if m.kind == PREVOTE) == [2, 3]


@pytest.mark.parametrize(("vote", "sender", "granted"), [(0, 2, True), (2, 2, True), (3, 2, False)])
def test_5_2_one_vote_a_term_first_come(vote: int, sender: int, granted: bool) -> None:
    raft = make(terms=(1,), term=2, vote=vote)
    raft.step(Message(VOTE, UID, 1, sender, 2, 1, 1))
    (answer,) = drain(raft)
    assert (answer.kind, not answer.reject, raft.vote) == (VOTE_REPLY, granted, vote or sender)


def test_5_2_a_candidate_yields_to_the_leader_of_its_term() -> None:
    raft = make()
    raft.campaign(transfer=True)
    drain(raft)
    raft.step(Message(APPEND, UID, 1, 3, 1))
    assert (raft.role, raft.leader, raft.vote) == (FOLLOWER, 3, 1)


def test_5_3_entries_are_replicated_and_committed() -> None:
    network = Network(3)
    network.elect(1)
    for number in range(5):
        network.hosts[1].propose(b"%d" % number)
    network.drain()
    assert network.states() == [[b"0", b"1", b"2", b"3", b"4"]] * 3
    assert all(host.raft.is_quiet for host in network.up())


def test_5_3_an_append_is_refused_unless_the_entry_before_matches() -> None:
    for index, log_term in ((3, 2), (2, 1), (9, 2)):
        raft = make(terms=(1, 2))
        raft.step(Message(APPEND, UID, 1, 2, 3, index, log_term, 9))
        (answer,) = drain(raft)
        assert answer.reject and raft.commit == 0 and raft.log.last_index == 2


FIGURE_7 = {
    "a": (1, 1, 1, 4, 4, 5, 5, 6, 6),
    "b": (1, 1, 1, 4),
    "c": (1, 1, 1, 4, 4, 5, 5, 6, 6, 6, 6),
    "d": (1, 1, 1, 4, 4, 5, 5, 6, 6, 6, 7, 7),
    "e": (1, 1, 1, 4, 4, 4, 4),
    "f": (1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 3),
}


@pytest.mark.parametrize("name", sorted(FIGURE_7))
def test_5_3_a_leader_brings_every_log_of_figure_7_to_its_own(name: str) -> None:
    network = Network(3)
    for node, terms in ((1, (1, 1, 1, 4, 4, 5, 5, 6, 6, 6)), (2, (1, 1, 1, 4, 4, 5, 5, 6, 6)), (3, FIGURE_7[name])):
        network.hosts[node].disk.entries = entries_of(*terms)
        network.hosts[node].disk.term = 7
        network.hosts[node].start()
    leader = network.elect(1)
    assert leader.log.last_index == 11 and leader.commit == 11
    assert network[3].log.runs == leader.log.runs and network[3].log.last_index == 11
    assert network.states()[2] == network.states()[0]


@pytest.mark.parametrize(
    ("mine", "index", "log_term", "granted"),
    [
        ((1, 1), 2, 1, True),
        ((1, 1), 3, 1, True),
        ((1, 1), 1, 1, False),
        ((1, 1), 1, 2, True),
        ((1, 2), 9, 1, False),
        ((), 0, 0, True),
    ],
)
def test_5_4_1_a_vote_goes_to_who_has_as_much(mine: tuple[int, ...], index: int, log_term: int, granted: bool) -> None:
    raft = make(terms=mine)
    raft.step(Message(PREVOTE, UID, 1, 2, 9, index, log_term))
    raft.step(Message(VOTE, UID, 1, 2, 9, index, log_term))
    answers = drain(raft)
    assert [(m.kind, not m.reject) for m in answers] == [(PREVOTE_REPLY, granted), (VOTE_REPLY, granted)]


def test_5_4_2_figure_8_an_earlier_term_commits_only_with_the_own() -> None:
    network = Network(5)
    for node, terms in ((1, (1, 2)), (2, (1, 2)), (3, (1,)), (4, (1,)), (5, (1,))):
        network.hosts[node].disk.entries = entries_of(*terms)
        network.hosts[node].disk.term = 3
        network.hosts[node].start()
    leader = network[1]
    leader.campaign()
    while leader.role != LEADER:
        for host in network.up():
            host.turn()
            host.write(len(host.unwritten))
        batch, network.queue = network.queue, []
        for message in batch:
            network.deliver(message)
    # Entry 2 of term 2 is on a majority, the no-op of term 4 is not.
    for node in (2, 3):
        leader.step(Message(APPEND_REPLY, UID, 1, node, 4, 2, last=2))
    assert leader.commit == 0
    network.said(1)
    for node in (2, 3):
        leader.step(Message(APPEND_REPLY, UID, 1, node, 4, 3, last=3))
    assert leader.commit == 3


def test_6_members_are_added_promoted_and_removed_while_work_goes_on() -> None:
    network = Network(4, voters=(1, 2, 3))
    leader = network.elect(1)
    network.hosts[1].propose(b"before")
    network.drain()
    leader.propose_membership(Change("add_learner", 4))
    network.hosts[1].propose(b"meanwhile")
    network.drain()
    assert network.states()[3] == [b"before", b"meanwhile"] and not network[4].voter
    leader.propose_membership(Change("promote", 4))
    network.drain()
    assert network[4].voter and network[4].configuration.voters == (1, 2, 3, 4)
    leader.propose_membership(Change("remove", 2))
    network.hosts[1].propose(b"after")
    network.drain()
    assert leader.configuration.voters == (1, 3, 4) and 2 not in leader.progress
    assert network.states()[0] == network.states()[3] == [b"before", b"meanwhile", b"after"]


def test_7_a_laggard_behind_the_log_gets_a_snapshot() -> None:
    network = Network(3)
    leader = network.elect(1)
    network.isolate(3)
    for number in range(4):
        network.hosts[1].propose(b"%d" % number)
    network.drain()
    network.hosts[1].take_snapshot()
    assert leader.log.first_index > network[3].log.last_index + 1
    network.hosts[1].propose(b"4")
    network.heal()
    network.drain()
    assert network.states() == [[b"0", b"1", b"2", b"3", b"4"]] * 3
    assert network[3].log.snapshot_index == leader.log.snapshot_index


def test_7_the_leader_asks_for_a_snapshot_once_and_sends_no_entries_meanwhile() -> None:
    """Only that it leads, with each one and on each link made anew."""

    def kinds(messages: list[Message]) -> list[int]:
        assert all(not m.entries and m.last < m.first for m in messages if m.kind == APPEND)
        return [m.kind for m in messages if m.to == 3]

    network = Network(3)
    network.isolate(3)
    leader = network.elect(1)
    for _ in range(3):
        network.hosts[1].propose()
        network.drain()
    network.hosts[1].take_snapshot()
    network.cut.clear()
    for host in network.hosts.values():
        host.live.update((1, 2, 3))
    leader.on_liveness()
    leader.on_link_reset(3)
    told, asked = [m for m in network.said(1) if m.to == 3]
    assert kinds([told, asked]) == [APPEND, SNAPSHOT] and asked.index == leader.log.snapshot_index
    for _ in range(20):
        leader.tick()
        leader.on_link_reset(3)
        assert kinds(network.said(1)) == [APPEND]
        leader.tick()
        assert kinds(network.said(1)) == []
    leader.snapshot_sent(3, leader.log.snapshot_index, False)
    assert kinds(network.said(1)) == []
    # It refuses what told it who leads. A transfer that fails at once would begin anew with each such answer, which
    # comes to more and more of them: 10,000 a second were seen.
    leader.step(Message(APPEND_REPLY, leader.uid, 1, 3, leader.term, told.index, 0, 0, 0, True))
    assert kinds(network.said(1)) == []
    for _ in range(leader.limits.probe_ticks):
        leader.tick()
    # Before the next one it is asked where it is: meanwhile it may have got the entries from somebody else.
    (probe,) = [m for m in network.said(1) if m.to == 3]
    assert kinds([probe]) == [APPEND] and probe.index == leader.log.last_index
    leader.step(Message(APPEND_REPLY, leader.uid, 1, 3, leader.term, probe.index, 0, 0, 0, True))
    assert kinds(network.said(1)) == [APPEND, SNAPSHOT]


@pytest.mark.parametrize("failed", ["link", "transfer"])
def test_a_follower_that_has_what_its_leader_compacted_needs_no_snapshot(failed: str) -> None:
    """Neither where a link is made anew before it has answered, nor where a transfer to it failed."""
    network = Network(3)
    leader = network.elect(1)
    for _ in range(3):
        network.hosts[1].propose()
        network.drain()
    network.hosts[1].take_snapshot()
    # As after its election: nothing is known of the others.
    leader.progress = {}
    membership.track(leader)
    if failed == "transfer":
        leader.progress[3].state = SNAPSHOTTING
        leader.snapshot_sent(3, leader.log.snapshot_index, False)
    for _ in range(leader.limits.probe_ticks):
        leader.on_link_reset(3)
        leader.tick()
        told = [m for m in network.said(1) if m.to == 3]
        assert all(m.kind == APPEND and m.index == leader.log.last_index for m in told)
    leader.on_link_reset(3)
    network.drain()
    assert leader.progress[3].match == leader.log.last_index


def test_8_reads_wait_for_the_own_no_op_and_a_quorum() -> None:
    network = Network(3)
    leader = network.elect(1)
    network.hosts[1].propose(b"x")
    network.drain()
    leader.read(77)
    leader.read(78)
    network.drain()
    assert network.hosts[1].reads == [(77, leader.commit), (78, leader.commit)]
    with pytest.raises(NotLeader):
        network[2].read(1)


def test_thesis_3_10_transfer_waits_for_the_target_then_it_leads_at_once() -> None:
    network = Network(3)
    leader = network.elect(1)
    network.hosts[1].propose(b"x")
    leader.transfer(2)
    assert leader.transferring
    with pytest.raises(Busy):
        leader.propose(command(leader.log.last_index + 1, leader.term))
    assert TIMEOUT_NOW not in [m.kind for m in network.said(1)]
    leader.on_link_reset(2)
    leader.on_link_reset(3)
    network.drain()
    assert (network[2].role, leader.role, leader.leader, leader.transferring) == (LEADER, FOLLOWER, 2, False)
    assert network.states() == [[b"x"]] * 3


def test_thesis_3_10_the_target_is_not_held_up_by_stickiness() -> None:
    network = Network(3)
    network.elect(1)
    raft = network[2]
    raft.step(Message(TIMEOUT_NOW, UID, 2, 1, 1))
    votes = [m for m in network.said(2) if m.kind == VOTE]
    assert [m.context for m in votes] == [TRANSFER, TRANSFER]
    network[3].step(votes[1])
    assert not network.said(3)[0].reject


def test_thesis_6_2_a_leader_without_a_quorum_steps_down_and_lets_its_followers_go() -> None:
    network = Network(5)
    leader = network.elect(1)
    network.isolate(1, 2)
    for _ in range(leader.limits.election_ticks):
        assert leader.role == LEADER and not leader.is_quiet
        network.tick()
    assert leader.role != LEADER and network[2].leader == 0
    new = network.leader()
    assert new is not None and new.node in (3, 4, 5)


def test_thesis_6_4_one_round_serves_all_who_wait_and_latecomers_wait_for_the_next() -> None:
    network = Network(3)
    leader = network.elect(1)
    leader.read(1)
    leader.read(2)
    first = [m for m in network.said(1) if m.kind == READ]
    assert [m.to for m in first] == [2, 3]
    leader.read(3)
    assert network.said(1) == []
    network[2].step(first[0])
    (answer,) = network.said(2)
    leader.step(answer)
    ready = leader.ready()
    assert ready is not None and [context for context, _ in ready.reads] == [1, 2]
    assert [m.context for m in ready.messages] == [first[0].context + 1] * 2
    leader.step(answer)
    assert leader.ready() is None


def test_thesis_9_6_a_returning_member_disturbs_nobody() -> None:
    network = Network(3)
    leader = network.elect(1)
    network.isolate(3)
    network.tick(200)
    assert network[3].term == 1 and network[3].role != LEADER
    network.hosts[1].propose(b"x")
    network.drain()
    network.heal()
    network.tick(50)
    assert (leader.role, leader.term, network[3].leader) == (LEADER, 1, 1)
    assert network.states() == [[b"x"]] * 3


def test_window_entries_flow_in_bounded_messages() -> None:
    limits = Limits(append_bytes=300, inflight_messages=2)
    network = Network(3, limits=limits)
    leader = network.elect(1)
    for _ in range(12):
        network.hosts[1].propose(b"x" * 40)
    sent = [m for m in network.said(1) if m.to == 2]
    assert len(sent) == 2 and all(sum(entry.size for entry in m.entries or ()) <= 300 for m in sent)
    leader.on_link_reset(2)
    leader.on_link_reset(3)
    network.drain()
    assert [len(state) for state in network.states()] == [12] * 3


def test_entries_below_memory_are_asked_of_the_host_one_range_at_a_time() -> None:
    network = Network(3)
    network.isolate(3)
    leader = network.elect(1)
    for _ in range(6):
        network.hosts[1].propose(b"x" * 10)
        network.drain()
    held = list(leader.log.entries)
    leader.log.release_memory(5)
    network.cut.clear()
    network.see()
    network[3].on_link_reset(1)
    seen = []
    for _ in range(20):
        for m in [m for m in network.said(1) if m.to == 3]:
            if m.kind == APPEND and m.entries is None and m.last >= m.first:
                assert m.last <= 5
                m.last = min(m.last, m.first + 1)  # the host may send fewer than it was asked for
                m.entries = held[m.first - 1 : m.last]
                seen.append((m.first, m.last))
            network[3].step(m)
        for m in network.said(3):
            if m.to == 1:
                leader.step(m)
    assert seen == [(1, 2), (3, 4), (5, 5)] and network[3].log.last_index == leader.log.last_index
    assert network[3].commit == leader.commit


def test_restart_finds_term_vote_log_and_configuration() -> None:
    network = Network(4, voters=(1, 2, 3))
    leader = network.elect(1)
    leader.propose_membership(Change("add_learner", 4))
    network.hosts[1].propose(b"x")
    network.drain()
    before = repr(network[2].log), network[2].term, network[2].vote
    network.crash(2)
    network.restart(2)
    raft = network[2]
    assert (repr(raft.log), raft.term, raft.vote) == before
    assert raft.configuration.learners == (4,) and raft.role == FOLLOWER and raft.applied == 0
    network.drain()
    assert raft.leader == 1 and network.states() == [[b"x"]] * 4


def test_a_stored_commit_index_is_a_hint() -> None:
    raft = make(terms=(1, 1), commit=9)
    assert raft.commit == 2
    raft = make(log=RaftLog(5, 2), commit=0)
    assert raft.commit == raft.applied == 5 and raft.term == 2


def test_a_snapshot_may_be_durable_before_the_term_that_came_with_it() -> None:
    raft = make(log=RaftLog(5, 3), term=2, vote=3)
    assert (raft.term, raft.vote) == (3, 0)
    ready = raft.ready()
    assert ready is not None and ready.hard_state == (3, 0)
