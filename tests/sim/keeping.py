"""The liveness oracle of a run with features: who has an unbroken link to its group's leader knows it and keeps up.

Within `KNOWS_S` (ten election timeouts at their longest) of an unbroken link a live member knows its leader; from then
on its lag shrinks over every `SHRINKS_S`, or what is counted of its snapshot does. A link counts from when both nodes
hold it and nothing stands in its way; a standing process, a cut, clogged, lossy or muted link begins anew.
"""

from __future__ import annotations

from collections.abc import Callable

from logyard.engine.raft.core import LEADER
from logyard.engine.replica.member import RUNNING, Member

from .cluster import Cluster

LOOK_S = 0.5
KNOWS_S = 20.0
SHRINKS_S = 30.0


class _Seen:
    """One member under one leader: since when, until when it has time to know it, and how it got on."""

    __slots__ = ("life", "since", "best", "progress", "moved")

    def __init__(self, life: tuple[object, ...], now: float) -> None:
        self.life = life
        self.since = now
        self.best = -1
        self.progress: object = None
        self.moved = now


class Keeping:
    """One run's."""

    def __init__(self, cluster: Cluster, fault: Callable[[str], None]) -> None:
        self.cluster = cluster
        self.fault = fault
        self._seen: dict[tuple[int, int], _Seen] = {}

    def go(self) -> None:
        """Look, and again later."""
        loop = self.cluster.loop
        loop.at(loop.now + LOOK_S, None, self.go)
        leaders = self._leaders()
        seen: dict[tuple[int, int], _Seen] = {}
        for number in self.cluster.up:
            system = self.cluster.system(number)
            for uid, member in system.members.items() if system is not None else ():
                leader = leaders.get(uid)
                if leader is None or leader[0] == number or member.state != RUNNING or member.raft.stopped:
                    continue
                if number in leader[1].raft.configuration.nodes():
                    self._look(number, leader[0], member, leader[1], seen)
        self._seen = seen

    def _leaders(self) -> dict[int, tuple[int, Member]]:
        """By group, who leads its newest term."""
        found: dict[int, tuple[int, Member]] = {}
        for number in self.cluster.up:
            system = self.cluster.system(number)
            for uid, member in system.members.items() if system is not None else ():
                raft = member.raft
                if raft.role == LEADER and (uid not in found or raft.term > found[uid][1].raft.term):
                    found[uid] = number, member
        return found

    def _look(self, number: int, lead: int, member: Member, leader: Member, seen: dict[tuple[int, int], _Seen]) -> None:
        cluster, now = self.cluster, self.cluster.loop.now
        link = self._link(number, lead)
        if not link:
            return
        raft, uid = member.raft, member.raft.uid
        life = (*link, leader.raft.term, id(leader), id(member))
        last = self._seen.get((number, uid))
        if last is None or last.life != life:
            last = _Seen(life, now)
        seen[number, uid] = last
        if raft.leader != lead:
            if now - last.since > KNOWS_S:
                self.fault(f"node {number}, group {member.spec.name}: it does not know its leader, node {lead}, "
                           f"{now - last.since:.0f} s after their link came up")  # fmt: skip
            last.best, last.moved = -1, now
            return
        lag = leader.raft.log.last_index - raft.log.stable
        pulled = cluster.hosts[number].files.used() if raft.log.last_index < leader.raft.log.snapshot_index else 0
        if lag <= 0 or last.best < 0 or lag < last.best or pulled != last.progress:
            last.best, last.progress, last.moved = max(lag, 0), pulled, now
        elif now - last.moved > SHRINKS_S:
            self.fault(f"node {number}, group {member.spec.name}: it is {lag} entries behind node {lead} and does not "
                       f"get nearer for {now - last.moved:.0f} s")  # fmt: skip

    def _link(self, a: int, b: int) -> tuple[object, ...]:
        """What names an unbroken link of two processes; nothing while something stands in its way."""
        network, now = self.cluster.network, self.cluster.loop.now
        weather = network.weather
        ends = [(self.cluster.hosts[number].life, network.nodes.get(number)) for number in (a, b)]
        for life, own in ends:
            if life is None or own is None or life.paused_until > now or life.disk.faults.latency_s:
                return ()
        for pair in ((a, b), (b, a)):
            if pair in network._blocked or pair in weather.mute or weather.clogged.get(pair, 0.0) > now:
                return ()
            if pair[1] not in network.nodes[pair[0]].up:
                return ()
        if weather.loss or weather.corrupt or weather.late or (min(a, b), max(a, b)) in network._broken:
            return ()
        return network._link.get((min(a, b), max(a, b)), 0), id(ends[0][0]), id(ends[1][0])
