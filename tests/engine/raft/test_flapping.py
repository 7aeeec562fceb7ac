"""Liveness that flaps while every link stays up and loses nothing: whoever lost sight of its leader finds it again.

The hosts of the other random histories reset a link whenever liveness changes, which heals what is looked for here.
"""

from __future__ import annotations

from contextlib import suppress

import pytest

from logyard.engine.raft.core import FOLLOWER, LEADER
from logyard.protocol.errors import Busy, NotLeader, Refused

from .network import Host, Network


class Flapping(Network):
    """`flap` changes what one member takes for alive, and tells it nothing else."""

    def flap(self, host: Host, node: int) -> None:
        host.live ^= {node}
        host.raft.on_liveness()

    def restore(self) -> None:
        """Everybody sees everybody again; one after the other hears of it."""
        for host in self.hosts.values():
            for node in self.hosts:
                if node not in host.live:
                    self.flap(host, node)

    def strangers(self) -> list[int]:
        """Members that do not know the leader."""
        leader = self.leader()
        return [host.node for host in self.up() if leader is None or host.raft.leader != leader.node]


def shaped(kind: str, seed: int = 1) -> Flapping:
    """Four members, of which the last is a learner, or a voter that may not lead; node 1 leads, and all is at rest."""
    if kind == "learner":
        network = Flapping(4, voters=(1, 2, 3), learners=(4,), seed=seed)
    else:
        network = Flapping(4, seed=seed)
        network[4].may_lead = False
    network.elect(1)
    network.tick(10)
    assert not network.strangers() and all(host.raft.is_quiet for host in network.up())
    return network


@pytest.mark.parametrize("kind", ["learner", "voter"])
def test_who_never_campaigns_finds_its_leader_again_in_an_idle_group(kind: str) -> None:
    network = shaped(kind)
    host = network.hosts[4]
    network.flap(host, 1)
    assert network[4].leader == 0
    network.flap(host, 1)
    network.tick(60)
    assert network[4].leader == 1 and network[4].is_quiet and network[1].is_quiet


@pytest.mark.parametrize("kind", ["learner", "voter"])
def test_who_asks_disturbs_nobody(kind: str) -> None:
    """The leader keeps its term, and whoever never gets an answer asks once for each change, or ever more rarely."""
    network = shaped(kind)
    term = network[1].term
    for _ in range(5):
        network.flap(network.hosts[4], 1)
        network.tick(40)
    assert network[1].role == LEADER and network[1].term == term
    network.down.add(1)
    for node in (2, 3):
        network[node].may_lead = False
    network.see()
    said = 0
    for _ in range(400):
        for host in network.up():
            if not host.raft.is_quiet:
                host.raft.tick()
        for node in (2, 3, 4):
            said += len(network.said(node))
    assert said <= (3 * 3 * 2 if kind == "voter" else 3 * 3 * 8), said


def test_one_that_may_not_lead_any_more_still_finds_its_leader() -> None:
    network = shaped("voter")
    network[3].campaign()
    network.queue.clear()
    network.flap(network.hosts[3], 1)
    network[3].may_lead = False
    network[3].tick()
    network.flap(network.hosts[3], 1)
    network.tick(60)
    assert not network.strangers()


@pytest.mark.parametrize("seed", range(120))
def test_random_flaps_end_with_everybody_knowing_the_leader(seed: int) -> None:
    network = Flapping(5, voters=(1, 2, 3, 4), learners=(5,), seed=seed)
    rng = network.random
    network.elect(rng.randrange(1, 4))
    for _ in range(60):
        dice, host = rng.random(), rng.choice(list(network.hosts.values()))
        if dice < 0.5:
            network.flap(host, rng.choice([node for node in network.hosts if node != host.node]))
        elif dice < 0.6:
            host.raft.may_lead = not host.raft.may_lead
            host.raft.tick()
        elif dice < 0.65:
            with suppress(NotLeader, Refused):
                host.raft.transfer(rng.randrange(1, 5))
        elif dice < 0.75:
            with suppress(NotLeader, Busy):
                host.propose(b"x")
        elif dice < 0.8:
            host.turn()
        network.tick(rng.choice((0, 0, 1, 3, 12)))
    # A quorum may lead: else the log of whoever may could be too short for good.
    for node in (1, 2, 3):
        network[node].may_lead = True
        network[node].tick()
    network.restore()
    network.tick(400)
    assert not network.strangers(), [str(host.raft) for host in network.up()]
    assert all(host.raft.is_quiet for host in network.up())
    assert [host.raft.role for host in network.up()].count(FOLLOWER) == 4
    network.check_logs()
