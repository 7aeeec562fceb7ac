"""Pitfalls 23 to 40, by number: who leads, who moves aside, and what is refused."""

from __future__ import annotations

import pytest

from logyard.engine.entry import CONFIGURATION
from logyard.engine.raft.core import CANDIDATE, FOLLOWER, LEADER, PRECANDIDATE, Change, Configuration, Limits
from logyard.engine.raft.messages import (
    APPEND,
    APPEND_REPLY,
    LEADER_GONE,
    PREVOTE,
    PREVOTE_REPLY,
    TIMEOUT_NOW,
    TRANSFER,
    VOTE,
    VOTE_REPLY,
    Message,
)
from logyard.engine.raft.state import TERM_MAX
from logyard.protocol.errors import Busy, NotLeader, Refused

from .network import UID, Network, command, drain, encode, make
from .test_pitfalls_protocol import ack, append, leading


def test_pitfall_23_a_removed_server_disturbs_nobody() -> None:
    network = Network(3)
    leader = network.elect(1)
    network.isolate(3)
    leader.propose_membership(Change("remove", 3))
    network.drain()
    network.heal()
    network.tick(100)
    assert (leader.role, leader.term) == (LEADER, 1) and network[3].term == 1
    # Even a vote for a later term, without a pre-vote, moves nobody who hears a living leader.
    for node in (1, 2):
        network[node].step(Message(VOTE, UID, node, 3, 9, 99, 9))
        assert [m.reject for m in network.said(node) if m.kind == VOTE_REPLY] == [True]
        assert network[node].term == 1
    network[2].step(Message(VOTE, UID, 2, 3, 9, 99, 9, 0, TRANSFER))
    assert network[2].term == 9


def test_pitfall_23_stickiness_ends_when_the_leaders_node_dies() -> None:
    raft = make(terms=(1,))
    raft.step(append(2, 1, 1, 1))
    drain(raft)
    raft.step(Message(PREVOTE, UID, 1, 3, 2, 1, 1))
    assert [m.reject for m in drain(raft) if m.kind == PREVOTE_REPLY] == [True]
    assert isinstance(raft.live, set)
    raft.live.discard(2)
    raft.step(Message(PREVOTE, UID, 1, 3, 2, 1, 1))
    assert [m.reject for m in drain(raft)] == [False]  # the set says it; the call that tells so may come later
    raft.on_liveness()
    assert raft.leader == 0 and not raft.is_quiet
    raft.step(Message(PREVOTE, UID, 1, 3, 2, 1, 1))
    assert [m.reject for m in drain(raft)] == [False]


def test_pitfall_24_a_learner_answers_when_asked_for_its_vote() -> None:
    """It may have been promoted by an entry that it does not have yet."""
    raft = make(node=4, learners=(4,))
    raft.step(Message(PREVOTE, UID, 4, 2, 1))
    raft.step(Message(VOTE, UID, 4, 2, 1))
    assert [(m.kind, m.reject) for m in drain(raft)] == [(PREVOTE_REPLY, False), (VOTE_REPLY, False)]
    for _ in range(50):
        raft.tick()
    raft.campaign()
    # It shows itself, for what it is worth to those who know that it is none of them, ever more rarely.
    shown = drain(raft)
    assert raft.role == FOLLOWER and raft.denials == len(shown) // 3 == 2
    assert {(m.kind, m.index, m.reject) for m in shown} == {(VOTE_REPLY, 0, True)}


def test_pitfall_25_a_campaign_is_held_under_the_newest_configuration_applied_or_not() -> None:
    raft = make()
    entry = encode(1, 1, CONFIGURATION, Configuration((1, 2, 3, 4, 5)).encode())
    raft.step(Message(APPEND, UID, 1, 2, 1, 0, 0, 1, 0, False, [entry], 1, 1))
    drain(raft)
    assert (raft.commit, raft.applied) == (1, 0)
    raft.campaign()
    assert [m.to for m in drain(raft)] == [2, 3, 4, 5]
    for node in (2, 3):
        raft.step(Message(PREVOTE_REPLY, UID, 1, node, 2, 2))
        assert raft.role == (PRECANDIDATE if node == 2 else CANDIDATE)


def test_pitfall_26_longer_log_in_an_older_term_against_shorter_log_in_a_newer() -> None:
    """Two of three are up; only node 1 can win, and only if node 2's refusals teach it the term."""
    network = Network(3)
    for node, terms, term in ((1, (1, 1), 1), (2, (1,), 7)):
        network.hosts[node].disk.entries = [command(i + 1, t) for i, t in enumerate(terms)]
        network.hosts[node].disk.term = term
        network.hosts[node].start()
    network.down.add(3)
    network.see()
    network.tick(60)
    leader = network.leader()
    assert leader is not None and leader.node == 1 and leader.term > 7


def test_pitfall_26_a_member_stuck_in_a_later_term_gets_its_leader_to_follow() -> None:
    network = Network(3)
    leader = network.elect(1)
    network.crash(3)
    network.hosts[3].disk.term = 5
    network.restart(3)
    network.tick(40)
    assert leader.term > 5 and len({host.raft.leader for host in network.up()}) == 1
    assert all(host.raft.is_quiet for host in network.up())


def test_pitfall_26_a_refusal_of_an_older_term_counts() -> None:
    raft = make(terms=(1,), term=5)
    raft.campaign()
    drain(raft)
    for node in (2, 3):
        raft.step(Message(PREVOTE_REPLY, UID, 1, node, 3, 6, reject=True))
    assert raft.role == FOLLOWER
    raft.campaign(transfer=True)
    drain(raft)
    for node in (2, 3):
        raft.step(Message(VOTE_REPLY, UID, 1, node, 3, 6, reject=True))
    assert raft.role == FOLLOWER


def test_pitfall_27_a_pre_vote_leaves_no_trace() -> None:
    raft = make(terms=(1,), term=3, vote=2)
    raft.elapsed = 4
    raft.step(Message(PREVOTE, UID, 1, 3, 9, 1, 1))
    assert (raft.term, raft.vote, raft.leader, raft.role, raft.elapsed) == (3, 2, 0, FOLLOWER, 4)
    (answer,) = drain(raft)
    assert not answer.reject and answer.term == 9
    raft.campaign()
    assert (raft.term, raft.vote) == (3, 2)
    assert {m.term for m in drain(raft)} == {4}
    ready = raft.ready()
    assert ready is None and raft.pending == []


def test_pitfall_28_a_pre_candidate_knows_no_leader() -> None:
    raft = make(terms=(1,))
    raft.step(append(2, 1, 1, 1))
    raft.campaign()
    assert (raft.role, raft.leader) == (PRECANDIDATE, 0)
    drain(raft)
    raft.step(Message(PREVOTE, UID, 1, 3, 2, 1, 1))
    assert [m.reject for m in drain(raft)] == [False]


def test_pitfall_29_a_leader_that_cannot_commit_does_not_hold_followers_over_a_bridge() -> None:
    """1 leads and still reaches 2; 3, 4 and 5 reach each other and 2. One quorum exists, and 2 is needed for it."""
    network = Network(5)
    leader = network.elect(1)
    network.down.add(5)
    for node in (3, 4):
        network.cut |= {(1, node), (node, 1)}
    network.see()
    network.tick(60)
    new = network.leader()
    assert new is not None and new.node in (2, 3, 4) and new.commit == new.log.last_index
    assert leader.role == FOLLOWER and leader.term <= new.term


def test_pitfall_30_a_leader_without_contact_steps_down_and_its_followers_hear_of_it() -> None:
    raft = leading()
    ack(raft, 2)
    drain(raft)
    assert isinstance(raft.live, set)
    raft.live -= {2, 3}
    raft.on_liveness()
    for _ in range(raft.limits.election_ticks - 1):
        raft.tick()
    assert raft.role == LEADER
    raft.tick()
    assert (raft.role, raft.leader, raft.term) == (FOLLOWER, 0, 1)
    assert [(m.kind, m.to, m.term) for m in drain(raft)] == [(LEADER_GONE, 2, 1), (LEADER_GONE, 3, 1)]
    raft = leading()
    assert isinstance(raft.live, set)
    raft.live -= {2, 3}
    for _ in range(raft.limits.election_ticks - 1):
        raft.tick()
    raft.live.add(2)
    raft.tick()
    raft.live.discard(2)
    for _ in range(raft.limits.election_ticks - 1):
        raft.tick()
    assert raft.role == LEADER


def test_pitfall_31_transfer_to_self_to_a_stranger_to_a_laggard_and_to_one_that_is_removed() -> None:
    raft = leading(learners=(4,))
    ack(raft, 2)
    drain(raft)
    raft.transfer(1)
    assert raft.transferee == 0
    for node in (4, 9):
        with pytest.raises(Refused, match="not a voter"):
            raft.transfer(node)
    with pytest.raises(NotLeader):
        make().transfer(2)
    raft.transfer(3)
    assert [m for m in drain(raft) if m.kind == TIMEOUT_NOW] == []  # it lags
    with pytest.raises(Refused, match="on its way"):
        raft.propose_membership(Change("remove", 3))
    ack(raft, 3)
    assert [m.to for m in drain(raft) if m.kind == TIMEOUT_NOW] == [3]
    for _ in range(raft.limits.election_ticks):
        raft.tick()
    assert raft.transferee == 0 and raft.role == LEADER
    raft.propose(command(raft.log.last_index + 1, raft.term))
    assert isinstance(raft.live, set)
    raft.live.discard(2)
    with pytest.raises(Refused, match="does not answer"):
        raft.transfer(2)


def test_pitfall_32_a_proposal_during_a_transfer_is_refused_at_once() -> None:
    raft = leading()
    ack(raft, 2)
    raft.transfer(3)
    last = raft.log.last_index
    with pytest.raises(Busy):
        raft.propose(command(last + 1, raft.term))
    assert raft.log.last_index == last
    raft.step(Message(VOTE, UID, 1, 3, 2, last, 1, 0, TRANSFER))
    with pytest.raises(NotLeader):
        raft.propose(command(last + 1, raft.term))


def test_pitfall_33_timeouts_are_drawn_for_each_election() -> None:
    drawn: list[int] = []

    def draw(n: int) -> int:
        drawn.append(n)
        return len(drawn) % n

    raft = make(draw=draw)
    timeouts = []
    for _ in range(5):
        raft.campaign()
        timeouts.append(raft.timeout)
    assert len(set(timeouts)) == 5 and all(10 <= ticks < 20 for ticks in timeouts) and set(drawn) == {10}


def test_pitfall_33_a_split_vote_is_resolved() -> None:
    network = Network(4, seed=3)
    for node in (1, 2):
        network[node].campaign(transfer=True)
    for node in (3, 4):
        network[node].step(Message(VOTE, UID, node, node - 2, 1, 0, 0, 0, TRANSFER))
    network.drain()
    assert network.leader() is None
    network.tick(60)
    assert network.leader() is not None


def test_pitfall_34_a_full_window_stops_and_a_probe_resumes() -> None:
    raft = leading(limits=Limits(inflight_messages=2, append_bytes=1))
    ack(raft, 2)
    ack(raft, 3)
    drain(raft)
    for _ in range(5):
        raft.propose(command(raft.log.last_index + 1, raft.term))
    sent = [m for m in drain(raft) if m.to == 3]
    assert [m.last for m in sent] == [2, 3]
    assert [m for m in drain(raft) if m.to == 3] == []
    for _ in range(raft.limits.probe_ticks):
        raft.tick()
    (probe,) = [m for m in drain(raft) if m.to == 3]
    assert (probe.index, list(probe.entries or ())) == (1, [])
    ack(raft, 3, 2)
    assert [m.first for m in drain(raft) if m.to == 3] == [3, 4]
    raft.on_link_reset(3)
    assert [(m.first, m.last) for m in drain(raft) if m.to == 3] == [(3, 3)]


def test_pitfall_35_an_entry_larger_than_a_message_still_moves() -> None:
    network = Network(3, limits=Limits(append_bytes=10, inflight_bytes=10))
    network.elect(1)
    for _ in range(3):
        network.hosts[1].propose(b"x" * 5000)
    network.drain()
    assert [len(state) for state in network.states()] == [3, 3, 3]


def test_pitfall_36_the_uncommitted_limit_refuses_commands_and_never_the_no_op() -> None:
    limits = Limits(uncommitted_bytes=200)
    raft = leading(limits=limits)
    raft.propose(command(2, 1, b"x" * 60))
    with pytest.raises(Busy, match="uncommitted"):
        raft.propose(command(3, 1, b"x" * 60))
    drain(raft)
    ack(raft, 2)
    assert raft.uncommitted_bytes == 0
    raft.propose(command(3, 1, b"x" * 500))  # alone, any entry moves
    with pytest.raises(Busy):
        raft.propose(command(4, 1))
    raft.propose_membership(Change("add_learner", 9))  # nor a change: a full group can still be mended
    full = leading(limits=limits, terms=(1,) * 20)
    assert full.uncommitted_bytes > limits.uncommitted_bytes and full.log.last_index == 21


def test_pitfall_36_what_is_committed_in_part_frees_its_part() -> None:
    raft = leading()
    sizes = []
    for length in (10, 20, 30):
        raft.propose(command(raft.log.last_index + 1, 1, b"x" * length))
        sizes.append(raft.log.entries[-1].size)
    drain(raft)
    ack(raft, 2, 3)
    assert raft.commit == 3 and raft.uncommitted_bytes == sizes[2]


def test_pitfall_38_numbers_beyond_63_bits_are_dropped() -> None:
    raft = make(terms=(1,))
    for term in (TERM_MAX + 1, 1 << 64, 1 << 80):
        raft.step(append(2, term, 1, 1))
        raft.step(Message(VOTE, UID, 1, 2, term, 9, 9))
    assert raft.term == 1 and raft.ready() is None
    last = make(term=TERM_MAX - 1)
    last.campaign()
    assert (last.term, last.role) == (TERM_MAX - 1, FOLLOWER)
    raft.step(Message(APPEND_REPLY, UID, 1, 2, 1, 1 << 70))
    leader = leading()
    leader.step(Message(APPEND_REPLY, UID, 1, 2, 1, 1 << 70, last=1 << 70))
    leader.check()
    assert leader.commit == 0


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_pitfall_39_groups_of_every_size_elect_commit_and_survive_a_minority(count: int) -> None:
    network = Network(count)
    network.elect(1)
    network.hosts[1].propose(b"a")
    network.drain()
    down = list(range(count, count - (count - 1) // 2, -1))
    for node in down:
        network.crash(node)
    network.hosts[1].propose(b"b")
    network.drain()
    assert all(state == [b"a", b"b"] for state in network.states())
    for node in down:
        network.restart(node)
    network.tick(20)
    assert network.states() == [[b"a", b"b"]] * count


def test_pitfall_39_a_learner_receives_everything_and_decides_nothing() -> None:
    network = Network(3, voters=(1, 2), learners=(3,))
    network.elect(1)
    network.crash(2)
    network.hosts[1].propose(b"x")
    network.tick(5)
    assert network[1].commit == 1 and network[3].log.last_index == 2
    network.restart(2)
    network.drain()
    assert network.states() == [[b"x"]] * 3


def test_pitfall_40_a_node_with_an_older_disk_completes_no_stale_quorum() -> None:
    """3 acknowledged entries 1..4 and comes back without 3 and 4; 2 never had them."""
    network = Network(3)
    leader = network.elect(1)
    network.isolate(2)
    for _ in range(3):
        network.hosts[1].propose(b"x")
        network.drain()
    assert leader.commit == 4 and leader.progress[3].match == 4
    network.crash(3)
    network.hosts[3].disk.entries = network.hosts[3].disk.entries[:2]
    network.restart(3)
    index = network.hosts[1].propose(b"y")
    probes = [m for m in network.said(1) if m.to == 3]
    network[3].step(probes[-1])
    for m in network.said(3):
        leader.step(m)
    assert leader.progress[3].match <= 2 and leader.commit == 4
    network.drain()
    assert leader.commit == index and network[3].log.last_index == index
    # It lacked committed entries until now: it must get them all from the leader.
    assert network.hosts[3].state == network.hosts[1].state
