"""What no other test noticed when one line of the core was broken on purpose: votes that are told before they are
durable, chores of a new leader before its own term is committed, transfers whose only message is lost."""

from __future__ import annotations

import pytest

from logyard.engine.entry import CONFIGURATION
from logyard.engine.raft.configuration import Change, Configuration
from logyard.engine.raft.core import CANDIDATE, FOLLOWER, LEADER, Limits
from logyard.engine.raft.messages import (
    APPEND,
    APPEND_REPLY,
    READ,
    TIMEOUT_NOW,
    VOTE,
    VOTE_REPLY,
    Message,
)

from .network import UID, Network, drain, encode, make, persist


def test_a_vote_in_a_term_that_is_durable_already_waits_for_the_disk_too() -> None:
    raft = make(1, (1, 2, 3), (1,), term=5)
    raft.step(Message(VOTE, UID, 1, 3, 5, 0, 0))  # denied: its log is shorter
    assert [m.reject for m in drain(raft)] == [True]
    raft.step(Message(VOTE, UID, 1, 2, 5, 1, 1))
    ready = raft.ready()
    assert ready is not None and ready.hard_state == (5, 2)
    assert not ready.messages and [m.kind for m in ready.after] == [VOTE_REPLY]
    # Nor does an answer to the same question, put again meanwhile.
    raft.step(Message(VOTE, UID, 1, 2, 5, 1, 1))
    again = raft.ready()
    assert again is None or not again.messages


def test_votes_that_come_before_the_own_one_is_durable_elect_nobody_yet() -> None:
    raft = make(1, (1, 2, 3, 4, 5), (1,))
    raft.campaign(transfer=True)
    ready = raft.ready()
    assert ready is not None and ready.token is not None
    for node in (2, 3, 4):
        raft.step(Message(VOTE_REPLY, UID, 1, node, raft.term, raft.term))
    assert raft.role == CANDIDATE
    raft.on_persisted(*ready.token)
    assert raft.role == LEADER


def test_the_last_leader_of_two_that_removed_itself_finishes_that_after_a_restart() -> None:
    """Only its own disk has the entry: the other one's log is shorter, so it needs a vote that it does not get."""
    network = Network(2)
    leader = network.elect(1)
    network.hosts[1].propose(b"a")
    network.drain()
    leader.propose_membership(Change("remove", 1))
    host = network.hosts[1]
    host.turn()
    host.write(len(host.unwritten))
    network.queue.clear()
    network.crash(1)
    network.tick(5)
    network.restart(1)
    assert not network[1].voter
    network.tick(60)
    assert network[2].role == LEADER and network[2].configuration == Configuration((2,))
    assert network.hosts[2].state == [b"a"]


def test_it_does_so_also_when_the_group_began_without_it() -> None:
    """After a restart its commit index is 0, where others were the members; the change before the last was committed
    all the same."""
    network = Network(3, voters=(1,))
    network.elect(1)
    network[1].propose_membership(Change("add", 2))
    network.drain()
    network[1].transfer(2)
    network.drain()
    leader = network[2]
    assert leader.role == LEADER
    for change in (Change("remove", 1), Change("add", 3)):
        leader.propose_membership(change)
        network.drain()
    assert leader.configuration == network[3].configuration == Configuration((2, 3))
    leader.propose_membership(Change("remove", 2))
    host = network.hosts[2]
    host.turn()
    host.write(len(host.unwritten))
    network.queue.clear()
    network.crash(2)
    network.tick(5)
    network.restart(2)
    assert network[2].commit == 0 and not network[2].voter
    network.tick(60)
    assert network[3].role == LEADER and network[3].configuration == Configuration((3,))


def test_a_transfer_to_another_node_asks_that_one() -> None:
    network = Network(3)
    leader = network.elect(1)
    leader.transfer(2)
    assert [m.to for m in drain(leader) if m.kind == TIMEOUT_NOW] == [2]
    leader.transfer(3)
    assert [m.to for m in drain(leader) if m.kind == TIMEOUT_NOW] == [3]


def test_a_transfer_whose_word_was_lost_ends_and_is_asked_again_on_a_new_link() -> None:
    network = Network(3)
    leader = network.elect(1)
    assert leader.is_quiet
    leader.transfer(2)
    drain(leader)
    assert not leader.is_quiet, "nobody would end it"
    leader.on_link_reset(2)
    found = drain(leader)
    for message in found:
        network.deliver(message)
    network.hosts[2].turn()
    assert not [m for m in found if m.kind == TIMEOUT_NOW]
    leader.step(next(m for m in network.said(2) if m.kind == APPEND_REPLY))
    assert [m.to for m in drain(leader) if m.kind == TIMEOUT_NOW] == [2]
    for _ in range(leader.limits.election_ticks):
        leader.tick()
    assert not leader.transferring and leader.role == LEADER
    leader.propose(encode(leader.log.last_index + 1, leader.term, 1, b"on"))


@pytest.mark.parametrize("lazy", [False, True])
def test_a_removed_leader_tells_of_its_removal_before_it_goes(lazy: bool) -> None:
    """Else two of three would have to find out by an election timeout and a campaign what is committed."""
    network = Network(3, limits=Limits(lazy_commit=lazy))
    leader = network.elect(1)
    index = leader.propose_membership(Change("remove", 1))
    network.drain()
    assert leader.role == FOLLOWER and [network[node].commit for node in (2, 3)] == [index, index]


def test_a_new_leader_leaves_a_joint_configuration_only_in_its_own_term() -> None:
    """Ongaro's fix of 2015 holds for what a leader does by itself, too: the joint configuration is committed, the
    leader's own no-op is not yet."""
    network = Network(4, voters=(1, 2, 3))
    leader = network.elect(1)
    leader.propose_membership([Change("add", 4), Change("remove", 3)], auto_leave=False)
    network.drain()
    assert leader.configuration.joint and leader.commit == leader.configuration_index
    joint = Configuration((1, 2, 4), (), (1, 2, 3), (), (), True)
    for node in network.hosts:
        # As if it had been entered with `auto_leave`, and its leader had gone before it left.
        raft = network[node]
        raft.base = (raft.configuration_index, joint)
        raft.configuration = joint
    network.crash(1)
    raft = network[2]
    raft.campaign(transfer=True)
    for _ in range(4):
        host = network.hosts[2]
        host.turn()
        host.write(len(host.unwritten))
        batch, network.queue = network.queue, []
        for message in batch:
            if message.kind in (VOTE, VOTE_REPLY):
                network.deliver(message)
        for other in (3, 4):
            network.hosts[other].turn()
            network.hosts[other].write(len(network.hosts[other].unwritten))
    assert raft.role == LEADER and raft.chores and raft.commit < raft.lead_index
    raft.dirty = True
    drain(raft)
    assert raft.log.last_index == raft.lead_index and raft.configuration.joint
    raft.tick()
    network.drain()
    raft.on_link_reset(3)
    raft.on_link_reset(4)
    network.drain()
    assert raft.configuration == Configuration((1, 2, 4))
    assert raft.log.entry(raft.configuration_index).kind == CONFIGURATION  # type: ignore[union-attr]


def test_a_learner_that_is_gone_is_not_promoted_and_one_that_comes_back_is() -> None:
    network = Network(4, voters=(1, 2, 3))
    leader = network.elect(1)
    leader.propose_membership(Change("add_learner", 4))
    network.drain()
    leader.live.discard(4)  # type: ignore[attr-defined]
    leader.on_liveness()
    # It has everything that is asked of it, and can not vote.
    leader.propose_membership(Change("add_promotable", 4, 1))
    network.drain()
    for _ in range(3):
        network.tick()
    assert leader.configuration.voters == (1, 2, 3) and leader.is_quiet
    leader.live.add(4)  # type: ignore[attr-defined]
    leader.on_liveness()
    assert not leader.is_quiet, "nobody would promote it"
    network.tick()
    assert leader.configuration.voters == (1, 2, 3, 4)


def test_a_replica_made_anew_listens_although_its_first_configuration_has_only_itself() -> None:
    """A group that began on this node alone: it was removed, and is added again by strangers."""
    raft = make(1, (1,), (), term=3)
    raft.promise = (3, 5)
    raft.step(Message(APPEND, UID, 1, 2, 4, 0, 0, 0, first=1, last=0))
    assert raft.leader == 2 and drain(raft)


def test_the_only_voter_hears_out_the_leader_that_removes_itself() -> None:
    raft = make(1, (1, 2), (2,), term=2)
    raft.step(Message(APPEND, UID, 1, 2, 2, 1, 2, 1, first=2, last=1))
    entry = encode(2, 2, CONFIGURATION, Configuration((1,)).encode())
    raft.step(Message(APPEND, UID, 1, 2, 2, 1, 2, 1, entries=[entry], first=2, last=2))
    drain(raft)
    assert raft.configuration == Configuration((1,)) and raft.log.stable == 2
    raft.step(Message(APPEND, UID, 1, 2, 2, 2, 2, 2, first=3, last=2))
    assert raft.commit == 2


def test_a_link_that_is_made_anew_wakes_a_quiet_leader_until_the_other_end_has_spoken() -> None:
    """The other end may be a new process that knows of no commit; the probe may be lost."""
    network = Network(3)
    leader = network.elect(1)
    assert leader.is_quiet
    leader.on_link_reset(3)
    assert persist(leader, leader.ready()) and not leader.is_quiet
    for _ in range(leader.limits.probe_ticks + 1):
        leader.tick()
    assert [m.to for m in drain(leader)] == [3]


def test_a_read_whose_probe_was_lost_with_the_link_is_asked_again_at_once() -> None:
    network = Network(3)
    leader = network.elect(1)
    leader.read(1)
    drain(leader)
    leader.on_link_reset(2)
    assert [m.to for m in drain(leader) if m.kind == READ] == [2]


def test_a_member_that_never_campaigns_shows_itself_until_it_knows_a_leader() -> None:
    """A learner that was removed while it was away would else never be told; whatever it says counts for nothing."""
    network = Network(4, voters=(1, 2, 3), learners=(4,))
    leader = network.elect(1)
    term = leader.term
    learner = make(4, (1, 2, 3), (), learners=(4,), term=term)
    learner.on_link_reset(2)
    (shown,) = drain(learner)
    assert (shown.kind, shown.to, shown.index, shown.reject) == (VOTE_REPLY, 2, 0, True)
    for node in (1, 2):
        before = (network[node].role, network[node].term, network[node].vote, network[node].leader)
        network[node].step(Message(VOTE_REPLY, UID, node, 4, term, 0, reject=True))
        assert (network[node].role, network[node].term, network[node].vote, network[node].leader) == before
    network[2].campaign(transfer=True)
    votes = dict(network[2].votes or {})
    network[2].step(Message(VOTE_REPLY, UID, 2, 4, term, 0, reject=True))
    assert network[2].votes == votes
    learner.step(Message(APPEND, UID, 4, 1, term, 0, 0, 0, first=1, last=0))
    drain(learner)
    learner.on_link_reset(2)
    assert not drain(learner)
