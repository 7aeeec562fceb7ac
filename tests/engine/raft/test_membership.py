"""The verbs of membership on whole groups: joint changes, promotion, forced shrinking, who may lead, old replicas."""

from __future__ import annotations

import pytest

from logyard.engine.raft.configuration import Change, Configuration
from logyard.engine.raft.core import FOLLOWER, LEADER
from logyard.engine.raft.messages import APPEND, PREVOTE, VOTE, VOTE_REPLY, Message
from logyard.protocol.errors import Busy, NotLeader, Refused

from .network import UID, Disk, Network, drain, make


def test_two_of_three_are_replaced_in_one_joint_change() -> None:
    network = Network(5, voters=(1, 2, 3))
    leader = network.elect(1)
    network.hosts[1].propose(b"a")
    leader.propose_membership([Change("add", 4), Change("add", 5), Change("remove", 2), Change("remove", 3)])
    assert leader.configuration == Configuration((1, 4, 5), (), (1, 2, 3), (), (), True)
    network.drain()
    network.hosts[1].propose(b"b")
    network.drain()
    assert leader.configuration == Configuration((1, 4, 5)) and leader.is_quiet
    assert [network.hosts[node].state for node in (1, 4, 5)] == [[b"a", b"b"]] * 3
    network.down.update((2, 3))
    leader.transfer(4)
    network.drain()
    assert network[4].role == LEADER and network[5].leader == 4


def test_a_change_is_settled_when_its_entry_is_applied() -> None:
    raft = make(voters=(1,), learners=(2,))
    raft.campaign()
    drain(raft)
    index = raft.propose_membership(Change("remove", 2))
    drain(raft)
    assert raft.commit == index
    raft.on_applied(index - 1)
    assert raft.all_nodes() == {1, 2}
    raft.on_applied(index)
    assert raft.all_nodes() == {1} and raft.may_hibernate()


def test_a_joint_leader_needs_both_majorities_to_stay() -> None:
    network = Network(5, voters=(1, 2, 3))
    leader = network.elect(1)
    leader.propose_membership([Change(kind, node) for kind, node in (("add", 4), ("add", 5))], auto_leave=False)
    network.drain()
    assert leader.configuration == Configuration((1, 2, 3, 4, 5), (), (1, 2, 3))
    network.isolate(2, 3)  # 1, 4, 5: a majority of the new half only
    network.tick(12)
    assert leader.role != LEADER and network.leader() is None
    network.heal()
    network.tick(30)
    new = network.leader()
    assert new is not None and new.configuration.joint
    new.leave_joint()
    network.drain()
    assert all(network[node].configuration == Configuration((1, 2, 3, 4, 5)) for node in network.hosts)


def test_a_later_leader_leaves_the_joint_configuration() -> None:
    network = Network(5, voters=(1, 2, 3))
    leader = network.elect(1)
    leader.propose_membership([Change("add", 4), Change("remove", 3)])
    for _ in range(3):
        host = network.hosts[1]
        host.turn()
        host.write(len(host.unwritten))
        batch, network.queue = network.queue, []
        for message in batch:
            network.deliver(message)
        for other in (2, 3, 4):
            network.hosts[other].turn()
            network.hosts[other].write(len(network.hosts[other].unwritten))
    network.crash(1)
    assert all(network[node].configuration.joint for node in (2, 3))
    network.tick(40)
    new = network.leader()
    assert new is not None and new.node in (2, 4)
    assert new.configuration == Configuration((1, 2, 4)) and new.commit == new.log.last_index


def test_a_removed_joint_leader_leaves_then_steps_down() -> None:
    network = Network(5, voters=(1, 2, 3))
    network.elect(1).propose_membership([Change("add", 4), Change("add", 5), Change("remove", 1), Change("demote", 3)])
    network.drain()
    assert network[1].role == FOLLOWER
    network.tick(30)
    new = network.leader()
    assert new is not None and new.node in (2, 4, 5)
    assert new.configuration == Configuration((2, 4, 5), (3,)) and not network[3].voter


def test_a_learner_is_promoted_when_it_has_caught_up_also_by_a_later_leader() -> None:
    network = Network(4, voters=(1, 2, 3))
    network.isolate(4)
    leader = network.elect(1)
    network.hosts[1].propose(b"a")
    leader.propose_membership(Change("add_promotable", 4))
    target = leader.log.last_index - 1
    network.drain()
    assert leader.configuration == Configuration((1, 2, 3), (4,), (), ((4, target),)) and leader.is_quiet
    network.isolate(1)
    network.tick(40)
    later = network.leader()
    assert later is not None and later.node in (2, 3)
    network.heal()
    network.tick(5)
    assert later.configuration == Configuration((1, 2, 3, 4))
    assert later.progress[4].match == later.log.last_index and network.hosts[4].state == [b"a"]


def test_a_promotion_by_hand_is_refused_with_the_lag() -> None:
    network = Network(4, voters=(1, 2, 3))
    network.isolate(4)
    leader = network.elect(1)
    leader.propose_membership(Change("add_learner", 4))
    network.drain()
    with pytest.raises(Refused, match="stored 0 of 2 entries"):
        leader.propose_membership(Change("promote", 4))
    network.heal()
    network.drain()
    leader.propose_membership(Change("promote", 4))
    network.drain()
    assert leader.configuration == Configuration((1, 2, 3, 4))


def test_an_overwritten_joint_configuration_is_taken_back_with_the_role() -> None:
    """Pitfall 20 for joint configurations: who came with it can not vote any more, who left with it can."""
    network = Network(5, voters=(1, 2, 3))
    network.elect(1)
    network.isolate(1, 5)
    network[1].propose_membership([Change("add", 5), Change("remove", 2)])
    network.drain()
    assert network[1].configuration.joint and network[5].configuration.joint and network[5].voter
    new = network.elect(2)
    network.hosts[2].propose(b"x")
    network.drain()
    network.heal()
    network.tick(30)
    assert new.role == LEADER and network[1].configuration == Configuration((1, 2, 3))
    network[5].step(Message(APPEND, UID, 5, 2, new.term, 0, 0, 0, 0, False, network[2].log.entries, 1, 3))
    assert network[5].configuration == Configuration((1, 2, 3)) and not network[5].voter


def test_force_shrink_makes_a_group_of_one_that_the_others_can_not_touch() -> None:
    network = Network(3)
    network.elect(1)
    network.hosts[1].propose(b"kept")
    network.drain()
    network.crash(2)
    network.crash(3)
    network.tick(30)
    survivor = network[1]
    assert network.leader() is None
    index = survivor.force_shrink()
    assert survivor.role != LEADER and survivor.commit < index  # nothing before it is durable
    network.drain()
    assert survivor.role == LEADER and survivor.commit > index and survivor.configuration == Configuration((1,))
    network.hosts[1].propose(b"after")
    network.drain()
    network.crash(1)
    network.restart(1)
    network[1].campaign()
    network.drain()
    assert network[1].role == LEADER and network.hosts[1].state == [b"kept", b"after"]
    # Another comes back as it was: it is not heard, and hears no term.
    network.restart(2)
    network.tick(40)
    assert network[1].role == LEADER and network[1].configuration == Configuration((1,))
    network[1].step(Message(VOTE, UID, 1, 2, network[1].term + 1, 99, network[1].term + 1))
    network[1].step(Message(APPEND, UID, 1, 2, network[1].term + 1, 3, 1, 3, 0, False, (), 4, 3))
    network.drain()
    assert network[1].role == LEADER and network[2].term < network[1].term
    # Added again, it takes over what is there.
    network[1].propose_membership(Change("add", 2))
    network.tick(10)
    assert network.hosts[2].state == [b"kept", b"after"] and network[2].leader == 1


def test_what_is_forced_is_durable_before_it_counts() -> None:
    raft = make(1, (1, 2, 3), (1, 1))
    raft.force_shrink()
    ready = raft.ready()
    assert ready is not None and ready.hard_state == (raft.term, 1) and len(ready.entries) == 1 and not ready.after
    assert raft.role != LEADER and raft.commit == 0
    assert ready.token is not None
    raft.on_persisted(*ready.token)
    assert raft.role == LEADER and raft.commit == 0
    drain(raft)
    assert raft.commit == 4


def test_who_may_not_lead_never_campaigns_and_hands_over() -> None:
    network = Network(3)
    leader = network.elect(1)
    leader.may_lead = network[2].may_lead = False
    network.tick(30)
    assert network[3].role == LEADER
    network[2].campaign()
    assert network[2].role == FOLLOWER and network[2].is_quiet
    network.crash(3)
    network.tick(60)
    assert network.leader() is None and all(network[node].is_quiet for node in (1, 2))
    network[1].may_lead = True
    network.tick(60)
    assert network[1].role == LEADER


def test_a_leader_that_no_heir_follows_goes_on() -> None:
    """An heir that may not lead either does not take over, and the group is not Busy for good."""
    network = Network(3)
    leader = network.elect(1)
    for node in network.hosts:
        network[node].may_lead = False
    done = 0
    for _ in range(200):
        network.tick()
        try:
            network.hosts[1].propose(b"x")
            network.drain()
            done += 1
        except Busy:
            pass
    assert leader.role == LEADER and done > 60
    assert network.hosts[2].state == [b"x"] * done


def forget(network: Network, node: int) -> None:
    """The directory's part when a member left: everything goes but the hard state and how far the log went."""
    host = network.hosts[node]
    log, disk = host.raft.log, host.disk
    host.promise = (log.last_term, log.last_index)
    host.disk = Disk(network.configuration)
    host.disk.term, host.disk.vote = disk.term, disk.vote
    network.crash(node)
    network.restart(node)


def test_replicas_that_were_forgotten_elect_nobody_who_lacks_what_they_held() -> None:
    """Two of three leave in a joint change, and their replicas go. The third has heard of nothing: with the others'
    memory gone it would be elected by the old configuration, and take committed entries back."""
    network = Network(5, voters=(1, 2, 3))
    network.isolate(1)
    leader = network.elect(2)
    network.hosts[2].propose(b"committed")
    leader.propose_membership([Change("add", 4), Change("add", 5), Change("remove", 2), Change("remove", 3)])
    network.drain()
    network.tick(40)
    for node in (2, 3):
        forget(network, node)
    network.down.update((4, 5))
    network.heal()
    network[1].campaign(transfer=True)
    network.drain()
    assert network[1].role != LEADER
    for node in (2, 3):
        network[node].campaign(transfer=True)
        network.drain()
    assert network.leader() is None


def test_a_forgotten_replica_votes_once_a_term_and_again_for_who_has_its_log() -> None:
    raft = make(3, (1, 2, 3), (), term=5, vote=1)
    raft.promise = (4, 7)

    def ask(sender: int, term: int, index: int, log_term: int) -> bool:
        raft.step(Message(VOTE, UID, 3, sender, term, index, log_term))
        (answer,) = [m for m in drain(raft) if m.kind == VOTE_REPLY]
        return not answer.reject

    assert not ask(2, 5, 9, 5)  # its vote of term 5 is 1's
    assert not ask(2, 6, 6, 4) and not ask(2, 7, 9, 3)
    assert ask(2, 8, 7, 4)
    raft.campaign()
    assert raft.role == FOLLOWER and not [m for m in drain(raft) if m.kind == PREVOTE]
    with pytest.raises(Refused):
        raft.force_shrink()


def test_a_forgotten_replica_that_nobody_knows_of_shows_itself_now_and_then() -> None:
    """It was made for a change that never was committed, and may not campaign for what it once held: it said nothing
    for good, and nobody told it that it is out (seed 3001591)."""
    raft = make(3, (1, 2, 3), (), term=5, vote=3)
    raft.promise = (4, 7)
    told: list[int] = []
    for _ in range(40 * raft.limits.election_ticks):
        raft.tick()
        for m in drain(raft):
            assert (m.kind, m.term, m.index, m.reject) == (VOTE_REPLY, 5, 0, True), "it asks for no votes"
            told.append(m.to)
    assert not raft.is_quiet and 2 < told.count(1) == told.count(2) < 10, "ever more seldom"


def test_a_member_removed_and_added_again_goes_on_from_what_it_has() -> None:
    """Ra #528, with its old replica still there and with a new one."""
    network = Network(3)
    leader = network.elect(1)
    for fresh in (False, True):
        network.hosts[1].propose(b"x")
        network.drain()
        leader.propose_membership(Change("remove", 3))
        network.drain()
        network.hosts[1].propose(b"y")
        network.drain()
        assert network[3].log.last_index < leader.log.last_index
        if fresh:
            forget(network, 3)
        leader.propose_membership(Change("add", 3))
        network.drain()
        network.tick(10)
        assert network[3].commit == leader.commit and network.hosts[3].state == network.hosts[1].state
        network[1].transfer(3)
        network.drain()
        assert network[3].role == LEADER
        network[3].transfer(1)
        network.drain()
        assert leader.role == LEADER


def test_verbs_are_the_leaders() -> None:
    network = Network(3)
    network.elect(1)
    with pytest.raises(NotLeader):
        network[2].propose_membership(Change("add", 4))
    with pytest.raises(NotLeader):
        network[2].leave_joint()
    with pytest.raises(Refused, match="no joint"):
        network[1].leave_joint()
    network[1].stop()
    with pytest.raises(Refused):
        network[1].force_shrink()


@pytest.mark.parametrize("packed", [False, True])
def test_who_went_on_without_the_survivor_is_not_taken_for_a_member_of_its_lineage(packed: bool) -> None:
    network = Network(3)
    network.elect(3)
    network.hosts[3].propose(b"kept")
    network.drain()
    network.tick(3)
    network.crash(1)
    for body in (b"fork1", b"fork2", b"fork3"):
        network.hosts[3].propose(body)
        network.drain()
    network.tick(3)
    network.crash(3)
    network.crash(2)  # It knows what was committed, as one does that slept.
    if packed:
        network.hosts[2].take_snapshot()
    network.restart(1)
    network.tick(40)
    for check in ("check_leader", "committed"):
        setattr(network, check, lambda *_: None)
    network[1].force_shrink()
    network.drain()
    for body in (b"a", b"b", b"c", b"d"):
        network.hosts[1].propose(body)
        network.drain()
    network.down.discard(2)
    network[1].propose_membership(Change("add", 2))
    network.see()
    network.tick(20)
    assert network[2].stopped and network[1].progress[2].match == 0
    assert network.hosts[2].state == [b"kept", b"fork1", b"fork2", b"fork3"]
