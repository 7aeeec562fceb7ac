"""Protocol histories that the simulator found (tests/sim), each cut down to what it takes."""

from __future__ import annotations

from logyard.engine.entry import CONFIGURATION, NOOP, build_plain
from logyard.engine.raft.core import Raft, RaftLog
from logyard.engine.raft.membership import Configuration
from logyard.engine.raft.mending import Mend
from logyard.engine.raft.messages import DAMAGED, Message
from logyard.engine.raft.state import Limits

from .network import Network, encode
from .test_mending import hurt

UID = 7
OLD, NEW = Configuration((1, 2, 4)), Configuration((2, 3, 4))


def test_a_snapshot_below_what_a_mended_member_knows_brings_no_older_configuration_back() -> None:
    entries = [build_plain(index, 1, NOOP, 0, b"") for index in range(1, 9)]
    entries[3] = build_plain(4, 1, CONFIGURATION, 0, NEW.encode())
    # What it committed counts for nothing until it is mended; its checkpoint says what it is a member of.
    raft = Raft(
        UID, 2, NEW, RaftLog(0, 0, (), entries), term=1, live={1, 2, 3, 4}, draw=lambda n: 0, encode=encode,
        limits=Limits(), configuration_index=4, mend=Mend(5, False),
    )  # fmt: skip
    assert raft.install_snapshot(2, 1, OLD)
    assert (raft.configuration_index, raft.configuration) == (4, NEW)
    raft.check()


def test_a_late_word_of_damage_about_who_lags_is_worked_off() -> None:
    # One entry a message: what a probe brings is not all there is.
    network = Network(3, limits=Limits(append_bytes=1))
    leader = network.elect(1)
    network.hosts[1].propose(b"a")
    network.drain()
    raft = hurt(network, 3, keep=1)
    network.tick(10)
    assert raft.mend is None and not leader.progress[3].round
    for name in (b"b", b"c", b"d"):
        network.hosts[1].propose(name)
        for host in network.up():
            host.turn()
            host.write(len(host.unwritten))
        # What is for node 3 gets lost.
        found, network.queue = [one for one in network.queue if one.to != 3], []
        for message in found:
            network.deliver(message)
    assert raft.mend is None and raft.log.last_index < leader.log.last_index
    # Its first word after the damage, when nothing was known to agree, comes once more.
    leader.step(Message(DAMAGED, leader.uid, 1, 3, leader.term, 0, 0, 0, 5))
    network.tick(60)
    assert network.hosts[3].state == [b"a", b"b", b"c", b"d"] and not leader.progress[3].round
