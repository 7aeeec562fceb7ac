"""What only a lie explains changes nothing and raises nothing; replies of strangers depose nobody."""

from __future__ import annotations

import pytest

from logyard.engine.raft.configuration import Change, Configuration, apply_changes, enter_joint
from logyard.engine.raft.core import FOLLOWER, LEADER
from logyard.engine.raft.messages import (
    APPEND,
    APPEND_REPLY,
    DAMAGED,
    LEADER_GONE,
    PREVOTE_REPLY,
    READ,
    READ_REPLY,
    VOTE_REPLY,
    Message,
)
from logyard.protocol.errors import Refused

from .network import UID, Network, drain, entries_of, make


@pytest.mark.parametrize("kind", [APPEND, READ])
@pytest.mark.parametrize("role", ["follower", "leader"])
def test_two_leaders_in_a_term_are_told_and_change_nothing(kind: int, role: str) -> None:
    network = Network(3)
    leader = network.elect(1)
    raft = leader if role == "leader" else network[2]
    before = (raft.role, raft.leader, raft.term, raft.log.last_index, raft.commit)
    said = raft.step(Message(kind, UID, raft.node, 3, raft.term, raft.log.last_index, raft.log.last_term, 0, 1))
    assert said is not None and "two leaders in term 1: 1 and 3" in said
    assert (raft.role, raft.leader, raft.term, raft.log.last_index, raft.commit) == before
    raft.check()
    network.tick(5)
    assert network.leader() is leader and not network.queue


def test_a_committed_entry_is_never_overwritten() -> None:
    raft = make(2, terms=(1, 1, 1), term=1, commit=3)
    found = raft.log.entry(2)
    said = raft.step(Message(APPEND, UID, 2, 1, 4, 1, 1, 3, 0, False, entries_of(1, 4, 4, first=2), 2, 4))
    assert said is not None and "entry 3 is committed here in term 1, and entry 3 of its leader is of term 4" in said
    assert raft.stopped
    assert raft.log.entry(2) is found and raft.log.term(3) == 1
    drain(raft)
    raft.check()


@pytest.mark.parametrize("kind", [APPEND_REPLY, VOTE_REPLY, PREVOTE_REPLY, READ_REPLY, LEADER_GONE, DAMAGED])
@pytest.mark.parametrize("sender", [3, 9])
def test_a_later_term_in_a_reply_counts_if_a_member_says_it(kind: int, sender: int) -> None:
    network = Network(3)
    leader = network.elect(1)
    leader.step(Message(kind, UID, 1, sender, 7, 0, 0, 0, 0, True))
    assert (leader.role, leader.term) == ((FOLLOWER, 7) if sender == 3 else (LEADER, 1))


def test_a_change_of_nobody_is_refused_and_not_a_stop_iteration() -> None:
    for kind in ("add_learner", "add_promotable"):
        with pytest.raises(Refused, match="without voters"):
            apply_changes(Configuration(()), [Change(kind, 1)])
        with pytest.raises(Refused, match="without voters"):
            enter_joint(Configuration(()), [Change(kind, 1)])
    with pytest.raises(Refused, match="not a member"):
        apply_changes(Configuration(()), [Change("remove", 1)])
    with pytest.raises(Refused, match="without a change"):
        apply_changes(Configuration(()), [])
    with pytest.raises(Refused, match="node 1 is the last voter"):
        apply_changes(Configuration((1,)), [Change("remove", 1), Change("add_learner", 2)])
    assert apply_changes(Configuration(()), [Change("add", 1)]).voters == (1,)
