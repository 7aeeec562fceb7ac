"""Elections in turns with real cores: members on some nodes, ticked as the ticker does it, messages between ticks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from logyard.engine.entry import build_plain
from logyard.engine.host.elections import TURN, Elections
from logyard.engine.raft.configuration import Configuration
from logyard.engine.raft.core import Raft
from logyard.engine.raft.raft_log import RaftLog
from logyard.engine.raft.state import LEADER, Limits

TURN_TICKS = TURN * Limits().election_ticks


class Member:
    """A core, and what it is called."""

    def __init__(self, uid: int, raft: Raft) -> None:
        self.uid, self.raft = uid, raft


class Nodes:
    """Nodes that live, of which each has `most` places."""

    def __init__(self, live: set[int], most: int, limits: Mapping[int, Limits] | None = None) -> None:
        self.live = live
        self.limits = limits or {}
        self.turns = {node: Elections(node, live, most) for node in live}
        self.active: dict[int, dict[Any, None]] = {node: {} for node in live}
        self.members: dict[tuple[int, int], Any] = {}
        self.seed = 7

    def draw(self, n: int) -> int:
        self.seed = (self.seed * 1103515245 + 12345) % (1 << 31)
        return (self.seed >> 8) % n

    def add(self, uid: int, voters: tuple[int, ...], learners: tuple[int, ...] = ()) -> None:
        """A group whose leader is gone."""
        for node in (*voters, *learners):
            if node in self.live:
                self.join(node, uid, Configuration(voters, learners))

    def join(self, node: int, uid: int, configuration: Configuration) -> None:
        """A member of it, on a node that lives."""
        raft = Raft(
            uid, node, configuration, RaftLog(), term=1, vote=1, live=self.live, draw=self.draw,
            limits=self.limits.get(node, Limits()),
            encode=lambda index, term, kind, content: build_plain(index, term, kind, 0, content),
        )  # fmt: skip
        member = self.members[node, uid] = Member(uid, raft)
        self.active[node][member] = None

    def deliver(self) -> None:
        for _ in range(20):
            sent = []
            for (node, _), member in self.members.items():
                ready = member.raft.ready()
                if ready is None:
                    continue
                sent += ready.messages
                if ready.token is not None:
                    member.raft.on_persisted(*ready.token)
                sent += ready.after
                self.active[node][member] = None
            if not sent:
                break
            for message in sent:
                if (message.to, message.uid) in self.members:
                    self.members[message.to, message.uid].raft.step(message)

    def tick(self) -> None:
        for node, turns in self.turns.items():
            active = self.active[node]
            active.update(dict.fromkeys(turns.begin()))
            for member in list(active):
                raft = member.raft
                if (not raft.leader and not turns.stands(member)) or (raft.tick() and not raft.dirty):
                    active.pop(member)
        self.deliver()

    def led(self, uid: int) -> int:
        """Who leads a group, 0 for nobody."""
        return next((node for (node, at), one in self.members.items() if at == uid and one.raft.role == LEADER), 0)

    def until_led(self, uid: int, most: int) -> int:
        """Ticks until a group is led."""
        for at in range(most):
            if self.led(uid):
                return at
            self.tick()
        return most


def test_groups_without_a_quorum_hold_up_none_that_has_one() -> None:
    # Nodes 1 and 4 are dead.
    nodes = Nodes({2, 3}, 16)
    for uid in range(10, 510):
        nodes.add(uid, (1, 2, 4))
        nodes.add(10_000 + uid, (1, 3, 4))
    nodes.add(30_000, (1, 2, 3))
    assert nodes.until_led(30_000, 6000) <= 2 * TURN_TICKS


def test_who_can_win_waits_behind_none_that_has_no_quorum() -> None:
    nodes = Nodes({2, 3}, 16)
    for uid in range(10, 300):
        nodes.add(uid, (1, 2, 4))
    for _ in range(200):
        nodes.tick()
    # Its uid picks node 3.
    nodes.add(10_001, (1, 2, 3))
    nodes.members[3, 10_001].raft.give_way()
    assert nodes.until_led(10_001, 4000) <= 2 * TURN_TICKS


def test_groups_that_are_asked_for_and_have_no_leader_starve_nobody() -> None:
    nodes = Nodes({2, 3}, 2)
    for uid in range(10, 20):
        nodes.add(uid, (1, 2, 4))
    nodes.add(10_000, (1, 2, 3))
    for uid in range(20, 30):
        # Of these there is a quorum, and node 2 can't win.
        nodes.add(uid, (1, 2, 3))
        nodes.members.pop((3, uid))
    took = 0
    while not nodes.led(10_000):
        took += 1
        assert took < 20 * TURN_TICKS
        if took % 20 == 0:
            for uid in (*range(10, 20), *range(20, 30)):
                member = nodes.members[2, uid]
                nodes.active[2][member] = None
                nodes.turns[2].ask(member)
        nodes.tick()


def test_a_node_that_is_to_lead_last_leads_few() -> None:
    nodes = Nodes({2, 3}, 8, {2: Limits(patience=3)})
    for uid in range(10, 210):
        nodes.add(uid, (1, 2, 3))
    for _ in range(400):
        nodes.tick()
    leaders = [nodes.led(uid) for uid in range(10, 210)]
    assert leaders.count(2) + leaders.count(3) == 200 and leaders.count(2) < 20


def test_who_never_campaigns_takes_no_turn() -> None:
    nodes = Nodes({2, 3}, 2)
    for uid in range(10, 14):
        nodes.add(uid, (1, 4, 5), (2, 3))
    nodes.add(10_000, (1, 2, 3))
    assert nodes.until_led(10_000, 1000) <= 2 * Limits().election_ticks


def test_two_nodes_whose_turns_coincide_do_not_collide_for_ever() -> None:
    limits = Limits(election_ticks=100)
    nodes = Nodes({2, 3}, 1, {2: limits, 3: limits})
    nodes.add(7, (1, 2, 4))
    nodes.add(8, (1, 3, 4))
    nodes.tick()
    nodes.add(10_000, (1, 2, 3))
    nodes.tick()
    for node in (2, 3):
        nodes.turns[node].ask(nodes.members[node, 10_000])
    assert nodes.until_led(10_000, 10_000) < 10_000


def test_groups_without_a_quorum_are_elected_when_nodes_come_back() -> None:
    nodes = Nodes({2, 3}, 2)
    for uid in range(10, 30):
        nodes.add(uid, (1, 2, 4))
    for _ in range(100):
        nodes.tick()
    nodes.live.add(1)
    nodes.turns[1], nodes.active[1] = Elections(1, nodes.live, 2), {}
    for uid in range(10, 30):
        nodes.join(1, uid, Configuration((1, 2, 4)))
        nodes.members[2, uid].raft.on_liveness()
        nodes.active[2][nodes.members[2, uid]] = None
    for _ in range(4 * TURN_TICKS):
        nodes.tick()
    assert all(nodes.led(uid) for uid in range(10, 30))
