"""Coming to rest, never too early: the ways to wait forever that liveness in place of heartbeats could open."""

from __future__ import annotations

import pytest

from logyard.engine.raft import election
from logyard.engine.raft.core import FOLLOWER, LEADER, Limits
from logyard.engine.raft.membership import Change
from logyard.engine.raft.messages import (
    APPEND,
    APPEND_REPLY,
    CONFIRM,
    HEARS,
    LEADER_GONE,
    PREVOTE,
    PREVOTE_REPLY,
    READ,
    VOTE_REPLY,
    Message,
)

from .network import UID, Network, command, drain, make
from .test_pitfalls_protocol import ack, leading


def test_a_follower_whose_leader_said_farewell_unheard_asks_and_campaigns() -> None:
    network = Network(3)
    leader = network.elect(1)
    leader.stop()
    network.queue.clear()
    network.hosts[1].turn()
    network.queue.clear()  # the farewell is lost without a trace
    assert network[2].is_quiet and network[3].is_quiet
    network[3].campaign()
    network.tick(40)
    new = network.leader()
    assert new is not None and new.node in (2, 3) and new is not leader


def test_a_doubting_follower_hears_from_its_leader_or_that_it_leads_no_more() -> None:
    network = Network(3)
    leader = network.elect(1)
    network[2].on_link_reset(1)
    assert not network[2].is_quiet and network[2].leader == 1
    (asked,) = network.said(2)
    assert (asked.kind, asked.context) == (APPEND_REPLY, CONFIRM)
    leader.step(asked)
    for m in network.said(1):
        network[2].step(m)
    assert network[2].is_quiet
    network.drain()
    network.isolate(1)
    network.tick(12)
    assert leader.role != LEADER and leader.leader == 0
    leader.step(asked)
    (answer,) = [m for m in network.said(1) if m.kind == LEADER_GONE]
    assert (answer.to, answer.term) == (2, leader.term)


def test_the_last_voter_notices_that_its_removed_leader_is_gone() -> None:
    network = Network(2)
    leader = network.elect(1)
    index = leader.propose_membership(Change("remove", 1))
    for m in network.said(1):
        network[2].step(m)
    for m in network.said(2):
        leader.step(m)
    network.said(1)  # commit index and farewell are lost
    assert leader.role == FOLLOWER and network[2].leader == 1 and network[2].commit < index
    network.tick(30)
    assert network[2].role == LEADER and network[2].commit > index


def test_a_member_that_others_deny_asks_ever_more_rarely_until_there_is_news() -> None:
    raft = make(terms=(1,))
    asked = 0
    for _ in range(2000):
        raft.tick()
        for m in drain(raft):
            asked += m.kind == PREVOTE
            raft.step(Message(PREVOTE_REPLY, UID, 1, m.to, 1, m.term, reject=True))
    assert asked < 20 and raft.term == 1
    raft.on_liveness()
    assert raft.timeout < 2 * raft.limits.election_ticks


def test_no_pair_ends_with_a_follower_that_lacks_the_commit_index_while_its_leader_is_quiet() -> None:
    network = Network(3)
    leader = network.elect(1)
    network.hosts[1].propose(b"x")
    lost = 0
    for _ in range(200):
        for host in network.up():
            host.turn()
            host.write(len(host.unwritten))
        if not network.queue:
            if leader.is_quiet:
                break
            for host in network.up():
                if not host.raft.is_quiet:
                    host.raft.tick()
            continue
        message = network.queue.pop(0)
        if message.kind == APPEND and message.commit == 2 and lost < 4:
            lost += 1  # silently
        else:
            network.deliver(message)
    assert lost == 4 and [host.raft.commit for host in network.up()] == [2, 2, 2]


def test_a_quiet_group_says_nothing_and_needs_no_tick() -> None:
    network = Network(3)
    network.elect(1)
    network.hosts[1].propose(b"x")
    network.drain()
    for host in network.up():
        assert host.raft.is_quiet
        for _ in range(100):
            host.raft.tick()
        assert host.raft.ready() is None


def test_a_quiet_leader_wakes_for_a_node_that_returns() -> None:
    network = Network(3)
    leader = network.elect(1)
    network.crash(3)
    network.hosts[1].propose(b"x")
    network.drain()
    assert leader.is_quiet
    network.restart(3)
    assert not leader.is_quiet or leader.has_ready
    network.drain()
    assert leader.is_quiet and network.states() == [[b"x"]] * 3


def test_frequent_news_does_not_put_a_campaign_off() -> None:
    raft = make(terms=(1,))
    raft.step(Message(APPEND, UID, 1, 2, 1, 1, 1))
    drain(raft)
    raft.on_link_reset(2)
    asked = []
    for _ in range(raft.limits.election_ticks):
        raft.tick()
        raft.on_liveness()
        raft.on_link_reset(2)
        asked += drain(raft)
    assert PREVOTE in [m.kind for m in asked] and CONFIRM in [m.context for m in asked if m.kind == APPEND_REPLY]


def test_a_lazy_leader_lets_entries_carry_the_commit_index_and_tells_the_rest_when_asked() -> None:
    leader = leading(limits=Limits(lazy_commit=True))
    for node in (2, 3):
        ack(leader, node)
    drain(leader)
    assert leader.tell() and drain(leader)

    def say(what: list[Message]) -> list[tuple[int, int, int]]:
        return [(m.to, m.last, m.commit) for m in what if m.kind == APPEND]

    leader.propose(command(2, 1))
    assert say(drain(leader)) == [(2, 2, 1), (3, 2, 1)]
    ack(leader, 2, 2)
    assert leader.commit == 2 and say(drain(leader)) == [] and leader.untold and not leader.is_quiet
    leader.propose(command(3, 1))
    ack(leader, 3, 2)
    assert say(drain(leader)) == [(2, 3, 2), (3, 3, 2)]
    ack(leader, 2, 3)
    ack(leader, 3, 3)
    assert say(drain(leader)) == []
    assert leader.tell() and say(drain(leader)) == [(2, 3, 3), (3, 3, 3)]
    assert not leader.tell() and drain(leader) == []
    assert not leader.untold
    # The tick asks as well, should nobody else.
    leader.propose(command(4, 1))
    drain(leader)
    ack(leader, 2, 4)
    drain(leader)
    leader.tick()
    assert say(drain(leader)) == [(2, 4, 4)]


def test_a_member_that_others_deny_because_they_hear_the_leader_parks_until_there_is_news() -> None:
    network = Network(3)
    leader = network.elect(1)
    network.hosts[1].propose(b"x")
    network.drain()
    # Between 1 and 3 nothing passes; 2 hears both.
    cut_off = network[3]
    cut_off.live = {2, 3}
    cut_off.on_liveness()
    asked = 0
    for _ in range(200):
        cut_off.tick()
        for m in network.said(3):
            if m.kind == PREVOTE and m.to == 2:
                asked += 1
                network[2].step(m)
        for m in network.said(2):
            if m.to == 3:
                cut_off.step(m)
            elif m.to == 1:
                leader.step(m)
        for m in network.said(1):
            if m.to == 2:
                network[2].step(m)
    assert asked == 3 and cut_off.is_quiet and cut_off.leader == 0
    assert leader.role == LEADER and network[2].leader == 1 and network[2].is_quiet
    # News of nodes: it asks again.
    cut_off.on_liveness()
    assert not cut_off.is_quiet
    for _ in range(40):
        cut_off.tick()
    assert any(m.kind == PREVOTE for m in network.said(3))


@pytest.mark.parametrize(
    ("kind", "term", "reject", "why"),
    [
        (PREVOTE, 2, False, "2 has no leader, and its log is too short to be elected"),
        (VOTE_REPLY, 1, True, "2 shows itself (`election.show`): it may not lead, and never asks for votes"),
    ],
)
def test_a_parked_member_is_roused_by_one_that_hears_no_leader_any_more(
    kind: int, term: int, reject: bool, why: str
) -> None:
    raft = make(3, terms=(1,))
    for _ in range(60):
        raft.tick()
        for m in drain(raft):
            if m.to == 2:
                raft.step(Message(PREVOTE_REPLY, UID, 3, 2, 1, m.term, context=HEARS, reject=True))
    assert raft.is_quiet and raft.role == FOLLOWER and raft.term == 1 and not drain(raft)
    raft.step(Message(kind, UID, 3, 2, term, reject=reject))
    assert not raft.is_quiet and raft.ready() is not None, why
    asked = []
    for _ in range(40):
        raft.tick()
        asked += [m.to for m in drain(raft) if m.kind == PREVOTE]
    assert 2 in asked


@pytest.mark.parametrize("may_lead", [True, False])
def test_a_parked_member_leads_when_the_leader_that_others_heard_is_gone(may_lead: bool) -> None:
    network = Network(3)
    network.elect(1)
    network.hosts[1].propose(b"x")
    network.tick(20)
    network[2].may_lead = may_lead
    # Between 1 and 3 nothing passes; 2 hears both.
    network.cut = {(1, 3), (3, 1)}
    network.see()
    network.tick(300)
    assert election.parked(network[3]) and network[3].is_quiet and network[2].leader == 1
    # Of this 3 hears nothing: 1 was gone for it.
    network.crash(1)
    network.tick(100)
    leader = network.leader()
    assert leader is not None and leader.node in ((2, 3) if may_lead else (3,))


def test_an_answer_after_the_commit_wakes_no_leader_whose_host_is_going_to_tell() -> None:
    leader = leading(limits=Limits(lazy_commit=True))
    for node in (2, 3):
        ack(leader, node)
    drain(leader)
    assert leader.tell() and drain(leader)
    leader.propose(command(2, 1))
    drain(leader)
    ack(leader, 2, 2)
    assert leader.dirty and leader.commit == 2
    drain(leader)
    assert leader.untold
    ack(leader, 3, 2)
    assert not leader.dirty, "nothing to do: the telling that is due looks at both"
    assert leader.tell() and sorted(m.to for m in drain(leader) if m.kind == APPEND) == [2, 3]
    # One that answers only after that is told by another telling.
    leader.propose(command(3, 1))
    drain(leader)
    ack(leader, 2, 3)
    drain(leader)
    assert leader.tell() and [m.to for m in drain(leader) if m.kind == APPEND] == [2]
    ack(leader, 3, 3)
    assert leader.dirty and drain(leader) == [] and leader.untold
    assert leader.tell() and [m.to for m in drain(leader) if m.kind == APPEND] == [3]


def test_a_lone_acknowledgement_leaves_with_the_report_and_anything_else_in_a_ready() -> None:
    network = Network(3)
    leader, follower = network.elect(1), network[2]
    network.drain()
    for busy in (False, True):
        leader.propose(command(leader.log.last_index + 1, leader.term))
        (sent,) = [m for m in drain(leader) if m.to == 2 and m.kind == APPEND and m.entries]
        follower.step(sent)
        ready = follower.ready()
        assert ready is not None and ready.token is not None and not ready.messages and not ready.after
        if busy:
            follower.on_link_reset(1)
        out: list[Message] = []
        follower.on_persisted(*ready.token, out)
        if not busy:
            (answer,) = out
            assert not follower.dirty and follower.ready() is None
        else:
            assert not out
            answer = next(m for m in drain(follower) if m.kind == APPEND_REPLY and not m.context)
        assert (answer.kind, answer.to, answer.index, answer.last) == (APPEND_REPLY, 1, sent.last, sent.last)
        follower.check()


def test_who_hears_a_read_of_its_leader_doubts_it_no_more() -> None:
    network = Network(3)
    leader, follower = network.elect(1), network[2]
    follower.on_link_reset(1)
    assert not follower.is_quiet
    follower.step(Message(READ, UID, 2, 1, leader.term, context=7))
    assert follower.is_quiet and follower.leader == 1


def test_who_resumes_under_the_leader_it_slept_under_does_not_doubt_it() -> None:
    follower = make(terms=(1,), commit=1)
    follower.resume_follower(2)
    drain(follower)
    assert follower.is_quiet and follower.leader == 2


def test_a_leader_abdicates_only_where_another_voter_lives() -> None:
    leader = leading(learners=(4,))
    for live, leads in (({1}, True), ({1, 4}, True), ({1, 2}, False)):
        leader.live = live
        leader.abdicate()
        assert (leader.role == LEADER) == leads, live
