"""Random histories of whole groups, by seed: loss, duplicates, reordering, slow disks, crashes, partitions, wrong
liveness, snapshots, transfers and membership changes. Safety after each step; after healing, everybody agrees and
falls silent.
"""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace

import pytest

from logyard.engine.entry import CONFIGURATION, Entry
from logyard.engine.raft import quiescence
from logyard.engine.raft.configuration import KINDS
from logyard.engine.raft.core import LEADER, Change, Limits
from logyard.protocol.errors import Busy, NotLeader, Refused

from .network import Disk, Host, Network

LIMITS = Limits(append_bytes=200, inflight_bytes=400, inflight_messages=3, uncommitted_bytes=4000)
LAZY = replace(LIMITS, lazy_commit=True)
TIGHT = replace(LIMITS, lazy_commit=True, follower_bytes=150)


class Chaos(Network):
    """Also checks that reads are linearizable and that commit indexes and terms never fall while a member is up."""

    def __init__(self, count: int, seed: int, *, membership: bool = False, limits: Limits = LIMITS) -> None:
        voters = range(1, 4) if membership else range(1, count + 1)
        super().__init__(count, voters=voters, seed=seed, limits=limits)
        self.membership = membership
        # Swarm: calm histories get far, wild ones get odd.
        self.trouble = self.random.choice((0.001, 0.004, 0.015, 0.05))
        self.reads: dict[int, tuple[int, int]] = {}
        self.answered = 0
        self.proposed = 0
        self.seen: dict[int, tuple[int, int]] = {}
        self.joints = self.forgotten = 0
        self.gone: dict[int, int] = {}
        self.admitted: dict[int, int] = {}

    def committed(self, host: Host, entry: Entry) -> None:
        super().committed(host, entry)
        if entry.kind == CONFIGURATION:
            assert self.membership

    def step(self) -> None:
        rng = self.random
        host = rng.choice(list(self.hosts.values()))
        dice = rng.random()
        if dice < 0.03:
            for other in self.up():
                if not other.raft.is_quiet and rng.random() < 0.9:
                    other.raft.tick()
                    self.look(other)
        elif host.node in self.down:
            if dice < 0.06:
                self.restart(host.node)
        elif dice < 0.12:
            leader = self.leader()
            self.request(self.hosts[leader.node] if leader is not None and rng.random() < 0.9 else host)
        elif dice < 0.12 + self.trouble:
            self.fault(host)
            self.look(host)
        else:
            self.motion(host)
            self.look(host)

    def motion(self, host: Host) -> None:
        """A turn, a finished write, some deliveries: mostly in order, sometimes late, twice or never."""
        rng = self.random
        dice = rng.random()
        if dice < 0.4:
            host.turn()
            self.answer(host)
        if dice > 0.3:
            host.write(rng.randrange(3))
        if host.raft.limits.lazy_commit and rng.random() < 0.05:
            # The host's short timer: sometimes late, sometimes never.
            host.raft.tell()
        for _ in range(rng.randrange(4)):
            if not self.queue:
                break
            at = 0 if rng.random() < 0.8 else rng.randrange(len(self.queue))
            message = self.queue[at] if rng.random() < 0.03 else self.queue.pop(at)
            if rng.random() < 2 * self.trouble:
                self.lose(message)
            else:
                self.deliver(message)
                self.resume(self.hosts[message.to])
                self.look(self.hosts[message.to])

    def resume(self, host: Host) -> None:
        """What the sender does when bytes were acknowledged: who waits for room tries again."""
        for window in host.raft.windows.values():
            if window.waiting and window.bytes < window.limit and host.raft.role == LEADER:
                window.waiting.clear()
                host.raft.dirty = True

    def tick(self, count: int = 1) -> None:
        super().tick(count)
        for host in self.up():
            self.resume(host)

    def request(self, host: Host) -> None:
        rng, raft = self.random, host.raft
        dice = rng.random()
        try:
            if self.membership and rng.random() < 0.15:
                self.change(host)
            elif dice < 0.7:
                self.proposed += 1
                host.propose(b"%d" % self.proposed * rng.choice((1, 1, 1, 20)))
            elif dice < 0.85:
                context = len(self.reads) + 1
                raft.read(context)
                self.reads[context] = (host.node, max(self.log, default=0))
            else:
                raft.transfer(rng.choice(list(self.hosts)))
        except (NotLeader, Busy, Refused):
            pass

    def change(self, host: Host) -> None:
        """One change, or several at once: then the way leads through a joint configuration."""
        rng, raft = self.random, host.raft
        if raft.configuration.joint and not raft.configuration.auto_leave:
            raft.leave_joint()
            return
        count = rng.choice((1, 1, 2, 2, 3))
        changes = []
        for node in rng.sample(list(self.hosts), count):
            if node in raft.configuration.voters:
                fitting: tuple[str, ...] = ("remove", "demote")
            elif node in raft.configuration.learners:
                fitting = ("promote", "add_promotable", "remove")
            else:
                fitting = ("add", "add_learner", "add_promotable")
            changes.append(Change(rng.choice(KINDS if rng.random() < 0.1 else fitting), node))
        raft.propose_membership(changes, auto_leave=rng.random() < 0.7)
        self.joints += raft.configuration.joint

    def forget(self, host: Host) -> None:
        """What the directory does when a member that applied a configuration without `host` says so: the replica goes,
        all but its hard state and how far its log went."""
        raft = host.raft
        for teller in self.up():
            index, known = teller.raft.applied, raft.configuration_index
            if host.node in teller.raft.base[1].nodes() or host.node in teller.raft.configuration.nodes():
                continue
            if index <= self.admitted.get(host.node, 0) or not teller.raft.base[0]:
                continue
            term = teller.raft.log.term(index) or 0
            if raft.role == LEADER:
                out = term > raft.term
            elif raft.log.term(known) is None:
                out = index > known
            else:
                out = (term, index) > (raft.log.term(known), known)
            if not out:
                continue
            host.write(len(host.unwritten))
            host.promise = max(host.promise, (raft.log.last_term, raft.log.last_index))
            self.crash(host.node)
            host.disk = Disk(self.configuration)
            host.disk.term, host.disk.vote = raft.term, raft.vote
            self.gone[host.node] = index
            self.forgotten += 1
            return

    def restart(self, node: int) -> None:
        """A forgotten replica is made anew only when a member's configuration says that it is one again."""
        least = self.gone.get(node)
        if least is not None:
            found = [host.raft for host in self.up() if node in host.raft.configuration.nodes()]
            index = max((raft.configuration_index for raft in found), default=0)
            if index <= least:
                return
            self.admitted[node] = index
            del self.gone[node]
        super().restart(node)

    def fault(self, host: Host) -> None:
        rng = self.random
        dice = rng.random()
        if self.membership and rng.random() < 0.3:
            self.forget(rng.choice(self.up() or [host]))
        if dice < 0.08:
            self.crash(host.node)
        elif dice < 0.16:
            self.isolate(*rng.sample(list(self.hosts), rng.randrange(1, len(self.hosts))))
        elif dice < 0.24:
            self.cut.add((host.node, rng.choice(list(self.hosts))))
            self.see()
        elif dice < 0.44:
            self.heal()
        elif dice < 0.6:
            host.take_snapshot()
        elif dice < 0.7:
            # Node liveness may be wrong: that may cost time, never safety.
            host.live ^= {rng.choice([node for node in self.hosts if node != host.node])}
            host.raft.on_liveness()
        elif dice < 0.8:
            host.raft.on_link_reset(rng.choice(list(self.hosts)))
        elif dice < 0.82:
            host.raft.campaign(transfer=rng.random() < 0.5)
        elif dice < 0.84:
            quiescence.abdicate(host.raft)
        elif dice < 0.88:
            # A newer machine version is installed, node by node; those before it had better not lead.
            host.raft.may_lead = not host.raft.may_lead

    def answer(self, host: Host) -> None:
        for context, index in host.reads:
            node, least = self.reads[context]
            assert node == host.node and index >= least, f"read {context} at {index}, but {least} was applied before"
            self.answered += 1
        host.reads.clear()

    def look(self, host: Host) -> None:
        if host.node in self.down:
            self.seen.pop(host.node, None)
            return
        raft = host.raft
        raft.check()
        for node, window in raft.windows.items():
            progress = raft.progress.get(node)
            assert window.bytes == (progress.inflight_bytes + progress.probed if progress is not None else 0)
        self.check_leader(host)
        term, commit = self.seen.get(host.node, (0, 0))
        assert raft.term >= term and raft.commit >= commit
        self.seen[host.node] = (raft.term, raft.commit)

    def crash(self, node: int) -> None:
        super().crash(node)
        self.seen.pop(node, None)

    def calm(self) -> None:
        """Everybody is up and connected: the group must come to rest, in agreement."""
        for node in list(self.down):
            self.restart(node)
        for host in self.hosts.values():
            host.raft.may_lead = True
        self.heal()
        for _ in range(300):
            for node in list(self.gone):
                self.restart(node)
            self.tick()
            leader = self.leader()
            if leader is not None and leader.configuration.joint and not leader.configuration.auto_leave:
                with suppress(NotLeader, Refused):
                    leader.leave_joint()
                continue
            if leader is not None:
                # Who was removed and has not heard of it goes on asking, ever more rarely.
                members = leader.configuration.nodes()
                if leader.is_quiet and all(self[node].is_quiet for node in members):
                    break
        else:
            raise AssertionError(f"no rest after 300 ticks: {[host.raft for host in self.up()]}")
        state = self.hosts[leader.node].state
        assert leader.commit == leader.log.last_index >= max(self.log)
        for host in self.up():
            if host.node in members:
                assert not any(window.bytes for window in host.raft.windows.values()), host.raft.progress
                assert host.state == state and host.raft.commit == leader.commit and host.raft.leader == leader.node
            else:
                assert host.state == state[: len(host.state)]
        self.check_logs()


def run(network: Chaos, steps: int) -> None:
    for at in range(steps):
        network.step()
        if at % 100 == 0:
            network.check_logs()
    network.calm()
    leader = network.leader()
    assert leader is not None
    before = len(network.hosts[leader.node].state)
    network.hosts[leader.node].propose(b"after all")
    network.drain()
    if leader.tell():
        network.drain()
    members = leader.configuration.nodes()
    assert all(len(host.state) == before + 1 for host in network.up() if host.node in members)


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize("count", [3, 5])
def test_a_random_history_is_safe_and_ends_in_agreement(count: int, seed: int) -> None:
    run(Chaos(count, seed), 2500)


@pytest.mark.parametrize("seed", range(25))
def test_a_random_history_with_membership_changes(seed: int) -> None:
    run(Chaos(5, 1000 + seed, membership=True), 2500)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("limits", [LAZY, TIGHT], ids=["lazy", "tight"])
def test_a_random_history_with_lazy_commits_and_small_windows(limits: Limits, seed: int) -> None:
    run(Chaos(5, 7000 + seed, membership=True, limits=limits), 2500)


def test_histories_with_membership_changes_are_worth_something() -> None:
    """Joint configurations are entered and left, and replicas of removed members are forgotten, in them."""
    joints = forgotten = 0
    for seed in range(12):
        network = Chaos(5, 5000 + seed, membership=True)
        run(network, 2500)
        joints += network.joints
        forgotten += network.forgotten
    assert joints > 5 and forgotten > 2, (joints, forgotten)


def test_histories_are_worth_something() -> None:
    """Commands are committed, reads answered and leaders change in them; else the tests above would check nothing."""
    network = Chaos(3, 4)
    network.trouble = 0.01
    run(network, 6000)
    assert len(network.log) > 100 and len(network.leaders) > 5 and network.answered > 20, (
        len(network.log), len(network.leaders), network.answered,
    )  # fmt: skip


def test_the_same_seed_is_the_same_history() -> None:
    def fingerprint() -> tuple[object, ...]:
        network = Chaos(3, 99)
        for _ in range(1500):
            network.step()
        return [repr(host.raft) for host in network.hosts.values()], network.log, network.random.random()

    assert fingerprint() == fingerprint()
    assert random.Random(99).random() == random.Random(99).random()
