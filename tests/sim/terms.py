"""Terms under faults: KV leases, queue leases and delays, with both bounds (the feature `terms`).

Clients of two groups of their own grant, keep alive, publish later and hold messages that they never settle; what
becomes of it is seen in the members' states. Invariants, by the loop's clock, which is the true one: a term is not over
before its length since the last request about it that was answered was made (a queue's lease: its length for each
delivery that failed since the message was published), and not running much later while there is a leader and nothing
is broken. Clocks of nodes that drift bound their pace; what passed before a restart need not count.

Everything is drawn from a stream of its own. Used by `run`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgpack

from logyard.engine.raft.progress import SNAPSHOTTING
from logyard.engine.raft.quorum import has_quorum
from logyard.engine.replica.member import Member
from logyard.machines.kv import command as kv
from logyard.machines.queue.command import PUBLISH_REPLY
from logyard.protocol import queue as qw
from logyard.protocol.frame import encode_frame

from .clients import Client, Frame, Group, Workload
from .cluster import Cluster

LOOK_S = 0.1
EARLY_S = 0.005
"""Milliseconds are rounded down, at each end of a term and of a reading."""
LATE_S = 1.0 + 2 * LOOK_S
QUIET_S = (0.05, 0.2, 0.5, 2.0, 6.0, 12.0)
"""Between two things that a client says: at times long enough for its group to fall asleep."""
OPEN_MAX = 24
"""Terms of one group that are looked at."""
ATTACH = 1
"""The sequence number of a session's first frame, by which its consumer begins."""


class Term:
    """Something granted for `length_s`: when the last request about it that was answered was made, and, by the clock of
    good times, when it may have begun at the latest. `seen`: applied somewhere; in which raft term that was."""

    __slots__ = ("length_s", "made", "begun", "seen", "term", "leaders")

    def __init__(self, length_s: float, made: float, begun: float) -> None:
        self.length_s = length_s
        self.made = made
        self.begun = begun
        self.seen = 0
        self.term = 0
        self.leaders = 0


class TermGroup(Group):
    """A group whose terms are looked at. `good_s`: how long it had a leader while nothing was broken."""

    def __init__(self, work: Workload, name: str) -> None:
        super().__init__(work, name)
        self.draw = random.Random(f"terms of {name} {work.more.random()}")
        self.good_s = 0.0
        self.checked = 0
        # Of the nodes' clocks so far: the slowest and the fastest.
        self.paces = (1.0, 1.0)
        self.reset()

    def reset(self) -> None:
        self.terms: dict[int, Term] = {}
        self.applied = 0

    def rebase(self) -> None:
        """A process ended: the time that passed since the last entry need not be remembered."""
        for term in self.terms.values():
            term.begun = self.good_s

    def judge_term(self, number: int, term: Term, over: bool, paces: tuple[float, float]) -> bool:
        """Look at one; whether it is still of interest."""
        now, (slowest, fastest) = self.work.loop.now, paces
        if over:
            self.checked += 1
            if now - term.made < term.length_s / fastest - EARLY_S:
                self.work.fault(
                    f"{self.name}: term {number} of {term.length_s} s was over {now - term.made:.3f} s after it was "
                    f"last asked for, with clocks of a pace up to {fastest:.2f}"
                )
        elif self.good_s - term.begun > (1 + term.leaders) * term.length_s / slowest + LATE_S:
            self.work.fault(
                f"{self.name}: term {number} of {term.length_s} s runs {self.good_s - term.begun:.3f} s after it was "
                f"last asked for, with a leader, {term.leaders} changes of leader since"
            )
        return not over

    def look(self, member: Member, paces: tuple[float, float]) -> None:
        """What a member's machine has of the terms; it has applied at least as much as any that was looked at."""

    def look_asleep(self, paces: tuple[float, float]) -> None:
        """No member is awake: nothing that runs may be over."""
        for number, term in self.terms.items():
            if term.seen:
                self.judge_term(number, term, False, paces)


class LeaseGroup(TermGroup):
    """A KV group: leases by number."""

    machine = "kv"

    def __init__(self, work: Workload, name: str) -> None:
        super().__init__(work, name)
        LeaseClient(work, self)

    def look(self, member: Member, paces: tuple[float, float]) -> None:
        rows = member.machine.state.leases.rows  # type: ignore[attr-defined]
        for number, term in list(self.terms.items()):
            if number in rows:
                term.seen = 1
                if member.raft.term > term.term:
                    term.leaders += bool(term.term)
                    term.term = member.raft.term
            if term.seen and not self.judge_term(number, term, number not in rows, paces):
                del self.terms[number]


class LeaseClient(Client):
    """Grants leases and keeps some alive; `what`: (order, lease, length in s, when it was made)."""

    group: LeaseGroup
    talks = False

    def __init__(self, workload: Workload, group: Group) -> None:
        super().__init__(workload, group)
        self.leases = 0
        workload.loop.at(0.0, None, self.go)

    def talk(self, begun: int) -> None:
        """It goes on by itself."""

    def go(self) -> None:
        """One order."""
        work, group, draw = self.work, self.group, self.group.draw
        work.loop.at(work.loop.now + draw.choice(QUIET_S) * draw.uniform(0.5, 1.5), None, self.go)
        if not group.created:
            return
        if not self.session:
            self.open()
            return
        if work.stopping or self.full:
            return
        if draw.random() < 0.5 and group.terms:
            lease = draw.choice(sorted(group.terms))
            self.order("keep", lease, group.terms[lease].length_s, [kv.KEEP, lease])
        elif len(group.terms) < OPEN_MAX:
            self.leases += 1
            lease, length_s = 1000 * self.number + self.leases, draw.choice((0.5, 2.0, 6.0, 15.0))
            self.order("grant", lease, length_s, [kv.GRANT, int(length_s * 1000), lease])

    def order(self, what: str, lease: int, length_s: float, command: Sequence[object]) -> None:
        """Send it."""
        self.sequence += 1
        data = encode_frame(
            [(b"", None)], commands=[msgpack.packb(command)], session=self.session, sequence=self.sequence
        )
        self.put((what, lease, length_s, self.work.loop.now), b"".join(data))

    def answered(self, frame: Frame, data: bytes) -> None:
        group = self.group
        what, lease, length_s, made = frame.what
        reply = msgpack.unpackb(data)
        if what == "grant" and reply[0] == 0:
            group.terms[lease] = Term(length_s, made, group.good_s)
        elif what == "keep" and lease in group.terms:
            term = group.terms[lease]
            if reply[0]:
                # It was over before.
                group.judge_term(lease, group.terms.pop(lease), True, group.paces)
            else:
                term.made, term.begun, term.leaders, term.term = max(term.made, made), group.good_s, 0, 0

    def lost(self, frames: Sequence[Frame]) -> None:
        # Whether they were applied, and when, is not known.
        for frame in frames:
            self.group.terms.pop(frame.what[1], None)


class DelayGroup(TermGroup):
    """A queue: delayed messages by id, and messages that a consumer holds and does not settle."""

    machine = "queue"

    def __init__(self, work: Workload, name: str) -> None:
        self.lease_s = 1.0
        super().__init__(work, name)
        self.lease_s = self.draw.choice((1.0, 3.0, 8.0))
        self.publisher = DelayClient(work, self)
        HoldingClient(work, self)
        HoldingClient(work, self)

    def reset(self) -> None:
        super().reset()
        # When each message was made, and its delay; who holds what since when, by the good clock.
        self.made: dict[int, tuple[float, float]] = {}
        self.held: dict[tuple[tuple[int, int], int], float] = {}
        self.sessions: set[int] = set()
        # What was published before came back with a session that ended, perhaps, though its answer came later.
        self.known_from = 0.0

    def rebase(self) -> None:
        super().rebase()
        self.held = dict.fromkeys(self.held, self.good_s)

    def look(self, member: Member, paces: tuple[float, float]) -> None:
        state: Any = member.machine.state  # type: ignore[attr-defined]
        for number, term in list(self.terms.items()):
            if number in state.delayed:
                term.seen = 1
            if term.seen and not self.judge_term(number, term, number not in state.delayed, paces):
                del self.terms[number]
        self._look_at_leases(state, paces)

    def _look_at_leases(self, state: Any, paces: tuple[float, float]) -> None:
        now, (slowest, fastest) = self.work.loop.now, paces
        sessions = {key[0] for key in state.consumers}
        if self.sessions - sessions:
            # What one held came back with it: nothing is known of messages from before.
            self.made.clear()
            self.known_from = now
        self.sessions = sessions
        for run in state.runs():
            if run.id not in self.made or not run.deliveries:
                continue
            self.checked += 1
            made, delay_s = self.made[run.id]
            # A clock may have become faster since the message was made.
            least = (delay_s + run.deliveries * self.lease_s) / fastest
            if now - made < least - EARLY_S * (1 + run.deliveries):
                self.work.fault(
                    f"{self.name}: message {run.id} came back {run.deliveries} times within {now - made:.3f} s after "
                    f"it was published for {delay_s} s later, with a lease of {self.lease_s} s and clocks of a pace up "
                    f"to {fastest:.2f}"
                )
        held: dict[tuple[tuple[int, int], int], float] = {}
        for consumer in state.consumers.values():
            for one in consumer.held:
                since = held[consumer.key, one.tag] = self.held.get((consumer.key, one.tag), self.good_s)
                if self.good_s - since > self.lease_s / slowest + LATE_S:
                    self.work.fault(
                        f"{self.name}: message {one.run.id} is held for {self.good_s - since:.3f} s with a leader, its "
                        f"lease was {self.lease_s} s"
                    )
        self.held = held


class DelayClient(Client):
    """Publishes one message at a time, for now or for later; `what`: (delay in s, when it was made)."""

    group: DelayGroup
    talks = False

    def __init__(self, workload: Workload, group: Group) -> None:
        super().__init__(workload, group)
        workload.loop.at(0.0, None, self.go)

    def talk(self, begun: int) -> None:
        """It goes on by itself."""

    def go(self) -> None:
        """One message."""
        work, group, draw = self.work, self.group, self.group.draw
        work.loop.at(work.loop.now + draw.choice(QUIET_S) * draw.uniform(0.5, 1.5), None, self.go)
        if not group.created:
            return
        if not self.session:
            self.open()
            return
        if work.stopping or self.full or len(group.terms) >= OPEN_MAX:
            return
        delay_s = draw.choice((0.0, 0.0, 1.0, 5.0, 12.0))
        self.sequence += 1
        command = qw.publish_command(delay=delay_s or None) + (1).to_bytes(4, "little")
        data = encode_frame([(b"", b"x")], command=command, session=self.session, sequence=self.sequence)
        self.put((delay_s, work.loop.now), b"".join(data))

    def answered(self, frame: Frame, data: bytes) -> None:
        number, count = PUBLISH_REPLY.unpack(data)
        delay_s, made = frame.what
        group = self.group
        if count and delay_s:
            group.terms[number] = Term(delay_s, made, group.good_s)
        if count and made >= group.known_from:
            group.made[number] = made, delay_s


class HoldingClient(Client):
    """A consumer that takes what it gets credit for; it settles nothing, or, at times, all that it has."""

    group: DelayGroup
    talks = False

    def __init__(self, workload: Workload, group: Group) -> None:
        super().__init__(workload, group)
        workload.loop.at(0.0, None, self.go)

    def talk(self, begun: int) -> None:
        """It goes on by itself."""

    def go(self) -> None:
        """A session; now and then everything is settled, so that nothing grows."""
        work, draw = self.work, self.group.draw
        work.loop.at(work.loop.now + draw.uniform(1.0, 8.0), None, self.go)
        if not self.group.created:
            return
        if not self.session:
            self.open()
        elif not work.stopping and not self.full and draw.random() < 0.3 and ATTACH not in self.pending:
            # Frames of a session are applied in any order: before there is a consumer nothing can be settled.
            self._command(qw.settle_command(0, [(1, 1 << 40)]))

    def began(self) -> None:
        self._command(qw.attach_command(16, 1 << 20, 0, self.group.lease_s, False, True))

    def _command(self, command: bytes) -> None:
        self.sequence += 1
        data = encode_frame([(b"", None)], command=command, session=self.session, sequence=self.sequence)
        self.put(None, b"".join(data))


GROUPS = (LeaseGroup, DelayGroup)


class Terms:
    """One run's: looks at every group of `GROUPS`."""

    def __init__(self, cluster: Cluster, groups: Sequence[TermGroup], slew: int = 1) -> None:
        """`slew`: of nodes with the program before, by how much log time is faster or slower."""
        self.cluster = cluster
        self.groups = groups
        self.slew = slew
        # Whether nothing is broken just now.
        self.good = False
        self.paces = (1.0, 1.0)
        self._starts = 0
        self._looked = 0.0
        # Until when any process stood still: its timers wait for that, also when it is let go before.
        self._stands = 0.0

    def go(self) -> None:
        """Look, and again later."""
        loop, hosts = self.cluster.loop, self.cluster.hosts.values()
        loop.at(loop.now + LOOK_S, None, self.go)
        passed, self._looked = loop.now - self._looked, loop.now
        drifts = [host.life.drift for host in hosts if host.life is not None]
        self.paces = min([self.paces[0], *drifts]), max([self.paces[1], *drifts])
        starts = sum(host.starts for host in hosts)
        self._stands = max([self._stands, *(host.life.paused_until for host in hosts if host.life is not None)])
        still = max(self._stands, self.cluster.network.delayed_until)
        sound = self.good and still <= loop.now and all(host.ready for host in hosts)
        for group in self.groups:
            group.paces = self.paces[0] / self.slew, self.paces[1] * self.slew
            if starts != self._starts:
                group.rebase()
            if not group.created:
                continue
            members = [found for number in self.cluster.up if (found := self.cluster.replica(number, group.name))]
            if sound and self._is_led(group):
                group.good_s += passed
            newest = max(members, key=lambda one: one.raft.applied, default=None)
            if newest is not None and newest.uid == group.uid and newest.raft.applied >= group.applied:
                group.applied = newest.raft.applied
                group.look(newest, group.paces)
            elif newest is None:
                group.look_asleep(group.paces)
        self._starts = starts

    def _is_led(self, group: TermGroup) -> bool:
        for number in self.cluster.up:
            system = self.cluster.system(number)
            if self.cluster.leads(number, group.name):
                return self._commits(number, group)
            sleepers = system.quiescence.table if system is not None else ()
            if group.uid in sleepers and sleepers.row(group.uid).leader == number:  # type: ignore[union-attr]
                return True
        return False

    def _commits(self, number: int, group: TermGroup) -> bool:
        """Whether a leader has a quorum without voters that are being sent a snapshot: who is a voter before it has a
        log holds up whom it is counted with."""
        member = self.cluster.replica(number, group.name)
        assert member is not None
        sent = {node for node, progress in member.raft.progress.items() if progress.state == SNAPSHOTTING}
        configuration = member.raft.configuration
        return has_quorum(configuration, configuration.nodes() - sent)


__all__ = ["GROUPS", "Term", "TermGroup", "Terms"]
