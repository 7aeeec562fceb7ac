"""Pitfalls 16 to 22, by number: snapshots that replace the log, and configurations that live in it."""

from __future__ import annotations

import pytest

from logyard.engine.entry import CONFIGURATION, NOOP
from logyard.engine.raft.core import CANDIDATE, FOLLOWER, LEADER, PRECANDIDATE, Change, Configuration
from logyard.engine.raft.messages import APPEND, APPEND_REPLY, Message

from .network import UID, Network, drain, encode, make
from .test_pitfalls_protocol import ack, append, leading


def test_pitfall_16_an_old_snapshot_is_ignored_a_matching_log_kept_another_dropped() -> None:
    other = Configuration((1, 2, 3), (4,))
    raft = make(terms=(1, 1, 1, 1), term=5, vote=3, commit=2)
    assert not raft.install_snapshot(2, 1, other)
    assert raft.configuration.learners == () and raft.log.last_index == 4
    assert raft.install_snapshot(3, 1, other)
    assert (raft.log.last_index, raft.commit, raft.applied, raft.configuration) == (4, 3, 3, other)
    assert (raft.term, raft.vote) == (5, 3)
    assert raft.install_snapshot(4, 2, Configuration((1, 2)))
    assert (raft.log.last_index, raft.log.last_term, raft.log.stable, raft.commit) == (4, 2, 4, 4)
    assert (raft.term, raft.vote, raft.configuration.voters) == (5, 3, (1, 2))
    ready = raft.ready()
    assert ready is not None and ready.truncated == 5 and ready.hard_state is None
    raft.check()


def test_pitfall_17_two_snapshots_in_short_order() -> None:
    raft = make(terms=(1,))
    raft.step(append(2, 3, 1, 1))
    drain(raft)
    assert raft.install_snapshot(10, 2, Configuration((1, 2, 3)))
    assert raft.install_snapshot(20, 3, Configuration((1, 2, 3)))
    assert not raft.install_snapshot(15, 3, Configuration((1, 2)))
    assert (raft.commit, raft.log.last_index, raft.configuration.voters) == (20, 20, (1, 2, 3))
    assert max(m.index for m in drain(raft) if m.kind == APPEND_REPLY) == 20
    leader = leading()
    leader.snapshot_sent(2, 7, True)
    assert leader.progress[2].next <= leader.log.last_index + 1
    leader.check()


@pytest.mark.parametrize("role", [PRECANDIDATE, CANDIDATE])
def test_pitfall_18_a_snapshot_reaches_a_candidate(role: int) -> None:
    raft = make(terms=(1,))
    raft.campaign(transfer=role == CANDIDATE)
    assert raft.role == role
    term, vote = raft.term, raft.vote
    assert raft.install_snapshot(9, 1, Configuration((1, 2, 3)))
    assert (raft.role, raft.term, raft.vote, raft.commit) == (FOLLOWER, term, vote, 9)
    drain(raft)
    raft.campaign()
    assert {m.index for m in drain(raft)} == {9}


def test_pitfall_18_a_member_leads_right_after_it_installed_a_snapshot() -> None:
    """Ra 919a6484: nothing of the log is left but the snapshot's index and term."""
    raft = make(voters=(1,), terms=(1,))
    assert raft.install_snapshot(9, 1, Configuration((1,)))
    drain(raft)
    raft.campaign()
    drain(raft)
    assert raft.role == LEADER and raft.commit == 10 and raft.log.entries[0].kind == NOOP
    raft.check()


def test_pitfall_19_a_member_that_waits_for_a_snapshot_does_not_block_an_election() -> None:
    network = Network(3)
    network.isolate(3)
    leader = network.elect(1)
    for _ in range(3):
        network.hosts[1].propose(b"x")
        network.drain()
    network.hosts[1].take_snapshot()
    network.cut.clear()
    network.see()
    while leader.progress[3].state != 2:
        for host in network.up():
            host.turn()
            host.write(len(host.unwritten))
        if leader.progress[3].state != 2:
            network.deliver(network.queue.pop(0))
    network.crash(1)
    network.tick(40)
    new = network.leader()
    assert new is not None and new.node == 2 and network[3].log.last_index == new.log.last_index


def test_pitfall_20_an_overwritten_configuration_is_taken_back_with_the_right_to_vote() -> None:
    raft = make(voters=(2, 3, 4), learners=(1,))
    promoted = Configuration((1, 2, 3, 4))
    raft.step(append(2, 1, 0, 0, (1,)))
    entry = encode(2, 1, CONFIGURATION, promoted.encode())
    raft.step(Message(APPEND, UID, 1, 2, 1, 1, 1, 0, 0, False, [entry], 2, 2))
    assert raft.voter and raft.configuration == promoted
    raft.step(append(3, 2, 1, 1, (2,)))
    assert not raft.voter and raft.configuration == Configuration((2, 3, 4), (1,)) and raft.configuration_index == 0
    raft.campaign()
    assert raft.role == FOLLOWER


def test_pitfall_21_a_configuration_counts_from_its_append_on() -> None:
    raft = leading()
    ack(raft, 2)
    raft.propose_membership(Change("add", 4))
    assert 4 in raft.progress
    drain(raft)
    ack(raft, 2)
    assert raft.commit == 1  # two of four are no majority any more
    ack(raft, 4)
    assert raft.commit == 2
    follower = make()
    entry = encode(1, 1, CONFIGURATION, Configuration((1, 2)).encode())
    follower.step(Message(APPEND, UID, 1, 2, 1, 0, 0, 0, 0, False, [entry], 1, 1))
    assert follower.configuration.voters == (1, 2) and follower.commit == 0
    assert follower.applied_configuration.voters == (1, 2, 3)


def test_pitfall_22_a_removed_leader_commits_its_removal_without_counting_itself_then_goes() -> None:
    network = Network(3)
    leader = network.elect(1)
    index = leader.propose_membership(Change("remove", 1))
    network.said(1)
    leader.step(Message(APPEND_REPLY, UID, 1, 2, 1, index, last=index))
    assert leader.commit == index - 1  # its own copy and one other would be two of three
    leader.step(Message(APPEND_REPLY, UID, 1, 3, 1, index, last=index))
    assert leader.commit == index
    ready = leader.ready()
    assert ready is not None and leader.role == FOLLOWER and ready.role_changed
    assert [(m.kind, m.commit) for m in ready.messages if m.kind == APPEND] == [(APPEND, index)] * 2
    leader.campaign()
    assert leader.role == FOLLOWER and leader.ready() is None
    network = Network(3)
    network.elect(1).propose_membership(Change("remove", 1))
    network.drain()
    network.tick(12)
    new = network.leader()
    assert new is not None and new.node in (2, 3) and new.configuration.voters == (2, 3)
