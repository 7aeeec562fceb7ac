"""Elections: who stands, who is asked, and what is remembered of it, each as the smallest exchange that shows it."""

from __future__ import annotations

from logyard.engine.raft.core import FOLLOWER, PRECANDIDATE
from logyard.engine.raft.messages import PREVOTE, PREVOTE_REPLY, Message

from .network import UID, Network, drain, make


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


def test_each_denied_campaign_counts_once() -> None:
    raft = make()
    for denied in (1, 2, 3):
        raft.campaign()
        assert raft.role == PRECANDIDATE
        for node in (2, 3):
            raft.step(Message(PREVOTE_REPLY, UID, 1, node, 0, 1, reject=True))
        assert raft.role == FOLLOWER and raft.denials == denied
