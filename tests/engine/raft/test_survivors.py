"""Small changes of the core that no other test noticed, each as the smallest exchange that shows it."""

from __future__ import annotations

from logyard.engine.raft.core import FOLLOWER, PRECANDIDATE
from logyard.engine.raft.messages import APPEND, APPEND_REPLY, PREVOTE, PREVOTE_REPLY, READ, Message
from logyard.engine.raft.progress import SNAPSHOTTING

from .network import UID, Network, command, drain, make


def test_a_member_that_may_not_lead_does_not_stand_for_election() -> None:
    raft = make()
    raft.may_lead = False
    for _ in range(60):
        raft.tick()
    raft.campaign()
    assert raft.role == FOLLOWER and raft.term == 0
    assert not [m for m in drain(raft) if m.kind == PREVOTE]


def test_a_late_question_of_a_leader_in_the_term_that_it_won_makes_nobody_forget_it() -> None:
    network = Network(3)
    leader = network.elect(1)
    follower = network[2]
    assert follower.leader == 1
    # It asked before it stood, in the term that it then led.
    follower.step(Message(PREVOTE, UID, 2, 1, leader.term, leader.log.last_index, leader.log.last_term))
    assert follower.leader == 1 and follower.role == FOLLOWER
    follower.step(Message(PREVOTE, UID, 2, 1, leader.term + 1, leader.log.last_index, leader.log.last_term))
    assert follower.leader == 0


def test_an_append_behind_what_is_committed_is_looked_at_like_any_other() -> None:
    """No leader has another entry there; one that says so is refused, and nothing is built on its word."""
    raft = make()
    raft.step(Message(APPEND, UID, 1, 2, 1, 0, 0, 1, 0, False, [command(1, 1)], 1, 1))
    drain(raft)
    assert raft.commit == 1
    raft.step(Message(APPEND, UID, 1, 3, 3, 1, 2, 1, 0, False, [command(2, 3)], 2, 2))
    (answer,) = [m for m in drain(raft) if m.kind == APPEND_REPLY]
    assert answer.reject and raft.log.last_index == 1


def test_each_denied_campaign_counts_once() -> None:
    raft = make()
    for denied in (1, 2, 3):
        raft.campaign()
        assert raft.role == PRECANDIDATE
        for node in (2, 3):
            raft.step(Message(PREVOTE_REPLY, UID, 1, node, 0, 1, reject=True))
        assert raft.role == FOLLOWER and raft.denials == denied


def test_a_snapshot_under_way_keeps_no_other_follower_from_being_asked_again() -> None:
    network = Network(3)
    leader = network.elect(1)
    leader.progress[2].state = SNAPSHOTTING
    network.hosts[1].propose(b"x")
    for turn in range(2):
        found = network.said(1)
        assert [m.kind for m in found if m.to == 3] == [APPEND], turn
        assert not [m for m in found if m.to == 2]
        # All of it is lost.
        for _ in range(leader.limits.probe_ticks):
            leader.tick()


def test_who_hears_a_read_of_its_leader_doubts_it_no_more() -> None:
    network = Network(3)
    leader, follower = network.elect(1), network[2]
    follower.on_link_reset(1)
    assert not follower.is_quiet
    follower.step(Message(READ, UID, 2, 1, leader.term, context=7))
    assert follower.is_quiet and follower.leader == 1
