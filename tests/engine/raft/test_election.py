"""Elections: who stands, who is asked, and what is remembered of it, each as the smallest exchange that shows it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from logyard.engine.raft.core import CANDIDATE, FOLLOWER, LEADER, PRECANDIDATE
from logyard.engine.raft.messages import (
    APPEND,
    APPEND_REPLY,
    CONFIRM,
    LEADER_GONE,
    PREVOTE,
    PREVOTE_REPLY,
    READ,
    READ_REPLY,
    VOTE_REPLY,
    Message,
)
from logyard.engine.raft.quorum import first_leader
from logyard.engine.raft.state import Limits

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


def test_a_leader_answers_who_asks_for_it_and_not_a_late_denial() -> None:
    raft = make(voters=(1,), learners=(2,))
    raft.campaign()
    drain(raft)
    raft.step(Message(VOTE_REPLY, UID, 1, 2, raft.term, raft.term, reject=True))
    assert not drain(raft)
    raft.step(Message(VOTE_REPLY, UID, 1, 2, raft.term, reject=True))
    assert {(m.kind, m.to) for m in drain(raft)} == {(APPEND, 2)}


def test_who_is_asked_whether_it_still_leads_an_earlier_term_says_no() -> None:
    raft = make(terms=(1,), term=3)
    raft.step(Message(APPEND_REPLY, UID, 1, 2, 2, 1, context=CONFIRM))
    assert [(m.kind, m.to, m.term) for m in drain(raft)] == [(LEADER_GONE, 2, 3)]
    raft.step(Message(APPEND_REPLY, UID, 1, 2, 2, 1))
    raft.step(Message(APPEND_REPLY, UID, 1, 2, 2, 1, context=CONFIRM, reject=True))
    assert not drain(raft), "nobody asked"


def test_a_candidate_follows_the_winner_of_its_term_that_asks_for_a_confirmation() -> None:
    raft = make()
    raft.campaign(transfer=True)
    drain(raft)
    assert raft.role == CANDIDATE
    raft.step(Message(READ, UID, 1, 2, raft.term, context=4))
    assert (raft.role, raft.leader) == (FOLLOWER, 2)
    assert [(m.kind, m.to, m.context) for m in drain(raft)] == [(READ_REPLY, 2, 4)]


def test_who_leads_no_more_keeps_nothing_of_it() -> None:
    network = Network(3)
    leader = network.elect(1)
    network.isolate(1)
    network.hosts[1].propose(b"x")
    network.tick()
    assert leader.role == LEADER and leader.lead_index and leader.uncommitted_bytes and leader.lost_ticks
    network.tick(leader.limits.election_ticks)
    fresh = make()
    kept = (
        "lead_index",
        "uncommitted_bytes",
        "lost_ticks",
        "transferee",
        "leaving",
        "chores",
        "turned_down",
        "progress",
    )
    assert leader.role != LEADER and [getattr(leader, name) for name in kept] == [getattr(fresh, name) for name in kept]


@pytest.mark.parametrize("ticks", [2, 3, 10])
@pytest.mark.parametrize("voters", [(1, 2, 3), (1, 2, 3, 4, 5)])
def test_of_those_that_outlive_a_leader_one_campaigns_before_the_others(voters: tuple[int, ...], ticks: int) -> None:
    gone, lived = voters[0], voters[1:]

    def campaigns_at(node: int, draw: Callable[[int], int]) -> int:
        limits = Limits(election_ticks=ticks, staggered=True)
        raft = make(node, voters, live={*lived}, limits=limits, draw=draw)
        raft.leader = gone
        raft.on_liveness()
        return next(tick for tick in range(1, 3 * ticks) if raft.tick() or raft.role == PRECANDIDATE)

    soonest = {node: campaigns_at(node, lambda n: 0) for node in lived}
    latest = {node: campaigns_at(node, lambda n: n - 1) for node in lived}
    first = first_leader(UID, lived)
    assert soonest.pop(first) == min(2, ticks // 2) and latest[first] == ticks // 2
    assert set(soonest.values()) == {latest.pop(first) + 1}
    # Nobody waits for longer than before.
    assert set(latest.values()) == {ticks}


def test_the_last_voter_that_lives_waits_for_nobody() -> None:
    for node in (2, 3):
        raft = make(node, live={node}, limits=Limits(staggered=True))
        raft.leader = 1
        raft.on_liveness()
        raft.tick()
        assert raft.role == PRECANDIDATE


def test_who_says_farewell_is_not_the_one_that_is_waited_for() -> None:
    """Its node is alive, and a uid picks the same one of all voters for every group that never changed leaders."""
    gone = first_leader(UID, (1, 2, 3))
    timeouts = set()
    for node in {1, 2, 3} - {gone}:
        raft = make(node, limits=Limits(staggered=True))
        raft.leader = gone
        raft.step(Message(LEADER_GONE, UID, node, gone, raft.term))
        assert not raft.leader
        timeouts.add(raft.timeout)
    assert timeouts == {2, 1 + raft.limits.election_ticks // 2}
