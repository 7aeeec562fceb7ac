"""Replication: what a follower takes and what a leader says again, each as the smallest exchange that shows it."""

from __future__ import annotations

from logyard.engine.raft.messages import APPEND, APPEND_REPLY, Message
from logyard.engine.raft.progress import SNAPSHOTTING
from logyard.engine.raft.state import Limits

from .network import UID, Network, command, drain, make


def test_an_append_behind_what_is_committed_is_looked_at_like_any_other() -> None:
    """No leader has another entry there; one that says so is of another lineage: this member stops, and nothing is
    built on its word."""
    raft = make()
    raft.step(Message(APPEND, UID, 1, 2, 1, 0, 0, 1, 0, False, [command(1, 1)], 1, 1))
    drain(raft)
    assert raft.commit == 1
    said = raft.step(Message(APPEND, UID, 1, 3, 3, 1, 2, 1, 0, False, [command(2, 3)], 2, 2))
    assert said is not None and "entry 1 is committed here in term 1" in said
    assert raft.stopped and raft.log.last_index == 1
    assert not [m for m in drain(raft) if m.kind == APPEND_REPLY]


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


def test_an_answer_that_commits_nothing_makes_room_for_the_one_entry_that_waits() -> None:
    network = Network(5, limits=Limits(inflight_messages=1))
    leader = network.elect(1)
    host = network.hosts[1]
    first = host.propose(b"x")
    assert network.said(1)
    second = host.propose(b"y")
    assert not network.said(1), "all that may be under way is"
    leader.step(Message(APPEND_REPLY, UID, 1, 2, leader.term, first, 0, leader.commit, last=first))
    assert leader.commit < first
    assert [(m.kind, m.to, m.last) for m in network.said(1)] == [(APPEND, 2, second)]
