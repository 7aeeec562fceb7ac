"""A follower that is far behind hears who leads, whatever is under way to it: entries, a snapshot, or nothing, because
its leader does not hold its node alive."""

from __future__ import annotations

import pytest

from logyard.engine.raft import election
from logyard.engine.raft.configuration import Configuration
from logyard.engine.raft.core import Limits, Raft
from logyard.engine.raft.messages import APPEND, SNAPSHOT, Message
from logyard.engine.raft.progress import SNAPSHOTTING

from .network import Network

PATIENCE = 10
"""Election timeouts within which a member of an unbroken link knows its leader."""


class Chased(Network):
    """Node 3 needs a snapshot; transfers take as long as `held` says, and what is `deaf` to does not arrive."""

    def __init__(self) -> None:
        super().__init__(3)
        self.transfers: list[tuple[Message, tuple[int, int, Configuration, list[bytes]]]] = []
        self.deaf = False
        self.elect(1)
        self.isolate(3)
        self.write(20)
        self.cut.clear()

    def write(self, count: int) -> None:
        """Entries that are compacted at once: whoever lacks them needs a snapshot."""
        for _ in range(count):
            self.hosts[1].propose(b"x")
            self.drain()
        self.hosts[1].take_snapshot()

    def transfer(self, message: Message) -> None:
        self.transfers.append((message, self.hosts[message.sender].disk.snapshot))

    def finish(self) -> None:
        """What was offered is installed, and the log it leads to is gone again by then."""
        transfers, self.transfers = self.transfers, []
        for message, snapshot in transfers:
            self.hosts[message.to].install(snapshot)
            self.hosts[message.sender].raft.snapshot_sent(message.to, snapshot[0], True)

    def deliver(self, message: Message) -> None:
        if self.deaf and message.kind == APPEND and message.to == 3:
            # Its sender's queue was full; the receiver never hears of that.
            return
        super().deliver(message)

    def lose_sight(self) -> None:
        """Node 3 does not see node 1 for a moment; no link is touched."""
        self.flap(3, 1)
        self.flap(3, 1)

    def flap(self, at: int, node: int) -> None:
        self.hosts[at].live ^= {node}
        self.hosts[at].raft.on_liveness()

    def knows(self) -> bool:
        for _ in range(PATIENCE * self.limits.election_ticks):
            if self[3].leader == 1:
                return True
            self.tick()
        return False


def parked(network: Chased) -> Raft:
    """Node 3 was told so often that others hear a leader that it asks no more."""
    raft = network[3]
    raft.leader = 0
    raft.hearers = election.PARKED
    assert election.parked(raft) and raft.is_quiet
    return raft


def test_whose_node_is_not_held_alive_hears_who_leads() -> None:
    """Its disk is slow and its renewals come late: nothing is sent to it, but when it asks it is answered."""
    network = Network(3)
    network.elect(1)
    network.tick(5)
    for at, node in ((1, 3), (3, 1), (3, 1)):
        network.hosts[at].live ^= {node}
        network.hosts[at].raft.on_liveness()
    assert network[3].leader == 0
    network.tick(PATIENCE * network.limits.election_ticks)
    assert network[3].leader == 1 and network[1].term == 1


@pytest.mark.parametrize("link", [False, True])
def test_one_that_should_be_the_last_to_lead_asks_at_once(link: bool) -> None:
    """Its host's disk is slow, so it campaigns late; who leads it may know all the same."""
    network = Network(3, limits=Limits(patience=6))
    network.elect(1)
    network.tick(5)
    host = network.hosts[3]
    for _ in range(2):
        host.live ^= {1}
        host.raft.on_liveness()
    if link:
        # What it asked is lost.
        network.said(3)
        host.raft.on_link_reset(1)
    assert network[3].leader == 0
    network.tick(PATIENCE * 10)
    assert network[3].leader == 1 and network[1].term == 1


@pytest.mark.parametrize("patience", [0, 6])
def test_one_that_campaigns_late_asks_with_every_news_of_nodes(patience: int) -> None:
    network = Network(3, limits=Limits(patience=patience))
    host = network.hosts[3]
    for _ in range(2):
        host.live ^= {1}
        host.raft.on_liveness()
        asked = {message.to for message in network.said(3)}
        assert asked == ({1, 2} if patience else set())


def test_while_a_snapshot_is_under_way() -> None:
    network = Chased()
    network.see()
    network.tick(3)
    assert network.transfers and network[1].progress[3].state == SNAPSHOTTING
    network.deaf = True
    network.lose_sight()
    network.tick(2 * network.limits.election_ticks)
    parked(network)
    network.deaf = False
    network.hosts[1].raft.on_link_reset(3)
    assert network.knows(), "the leader says so anew on a link that lost something"


def test_a_chase_of_snapshots_is_no_silence() -> None:
    """Each transfer ends behind a log that is gone already: the next one begins, and never an entry comes."""
    network = Chased()
    network.see()
    network.tick(3)
    for _ in range(4):
        parked(network)
        network.write(5)
        assert network.transfers
        before = network[3].log.snapshot_index
        network.finish()
        network.drain()
        assert network[3].log.snapshot_index > before, "it gets on"
        assert network.transfers, "and is behind again"
        assert network.knows()


@pytest.mark.parametrize("state", ["probe", "snapshot"])
def test_who_asks_is_answered_by_a_message_of_its_own(state: str) -> None:
    """Entries to read back from segments, or a queue full of them, may delay or lose what carries them."""
    network = Chased()
    if state == "snapshot":
        network.see()
        network.tick(3)
    raft, leader = network[3], network[1]
    raft.leader = 0
    raft.campaign()
    (ask,) = [m for m in network.said(3) if m.to == 1]
    leader.step(ask)
    said = [m for m in network.said(1) if m.to == 3 and m.kind in (APPEND, SNAPSHOT)]
    assert any(m.kind == APPEND and not m.entries and m.last < m.first for m in said), said


def test_behind_a_dead_member_a_lost_append_to_a_living_one_is_probed() -> None:
    network = Network(4)
    network.elect(1)
    network.crash(2)
    network.tick(5)
    network.hosts[1].propose(b"x")
    for host in network.up():
        host.turn()
        host.write(1)
    lost = [m for m in network.queue if m.to in (3, 4)]
    assert len(lost) == 2
    # No link says that anything was lost.
    network.queue = [m for m in network.queue if m not in lost]
    assert not network[1].is_quiet
    network.tick(network.limits.probe_ticks + 2)
    assert [host.state for host in network.up()] == [[b"x"]] * 3
