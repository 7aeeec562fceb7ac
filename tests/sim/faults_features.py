"""M2, M3, N6, L5, Q2, U1: what runs with features have besides. Each is a verb of the nemesis."""

from __future__ import annotations

from typing import Any

from logyard.engine.replica.member import Member

from .clients_log import LogGroup
from .cluster import Host
from .ground import Ground


class FeatureFaults(Ground):
    """Each verb brings one about."""

    def _led(self) -> tuple[Any, int, Member] | None:
        found = self.leader()
        if found is None:
            return None
        group, number = found
        member = self.cluster.replica(number, group.name)
        return (group, number, member) if member is not None else None

    # M2: roles

    def learner(self) -> None:
        """Somebody who is no member becomes a learner, for good or until it has caught up; or a learner leaves."""
        found = self._led()
        if found is None:
            return
        group, number, member = found
        configuration = member.raft.configuration
        node = self.cluster.node(number)
        spare = [one for one in self.cluster.hosts if one not in configuration.nodes()]
        if spare and not configuration.joint:
            promotable = not self.victim and self.draw.random() < 0.4
            kind, name = ("add_promotable", "M2.promotable") if promotable else ("add_learner", "M2.learner")
            self.membership = self.membership or promotable
            self.ask(number, node.change_members(group.name, kind, self.draw.choice(spare)), name)
        elif configuration.learners and self.draw.random() < 0.3:
            self.ask(number, node.change_members(group.name, "remove", configuration.learners[0]))

    def demote(self) -> None:
        """A voter becomes a learner, and another node a voter, in one step."""
        self._joint("demote", "M2.demoted")

    def swap(self) -> None:
        """A voter goes and another node comes, in one step; whether the joint phase ends by itself is drawn."""
        self._joint("remove", "M2.joint")

    def _joint(self, kind: str, hit: str) -> None:
        found = self._led()
        if found is None or self.hurt or self.victim:
            return
        group, number, member = found
        configuration = member.raft.configuration
        spare = [one for one in self.cluster.hosts if one not in configuration.voters]
        if configuration.joint or not spare or len(configuration.voters) < 3:
            return
        self.membership = True
        changes = [(kind, self.draw.choice(configuration.voters)), ("add", self.draw.choice(spare))]
        node = self.cluster.node(number)
        self.ask(number, node.change_membership(group.name, changes, self.draw.random() < 0.7), hit)

    def may_not_lead(self) -> None:
        """A member may not lead until its process ends: with three sound voters the other two are enough."""
        found = self._led()
        if found is None or self.victim or self.hurt:
            return
        group, number, _ = found
        others = [one for one in self.cluster.up if one != number and self.cluster.replica(one, group.name)]
        held = [self.cluster.replica(one, group.name) for one in self.cluster.up]
        if not others or any(member is not None and not member.raft.may_lead for member in held):
            return
        one = self.draw.choice([number, *others])
        self.as_node(one, self._forbid, one, group.name)
        self.hits["M3.may_not_lead"] += 1

    def _forbid(self, number: int, name: str) -> None:
        member, system = self.cluster.replica(number, name), self.cluster.system(number)
        if member is not None and system is not None:
            member.raft.may_lead = False
            system.active.add(member)

    def allow_leading(self) -> None:
        """Where less than three sound voters are left, everybody may lead again."""
        for number in self.cluster.up:
            system = self.cluster.system(number)
            for member in list(system.members.values()) if system is not None else ():
                if not member.raft.may_lead and member.halt is None:
                    member.raft.may_lead = True

    def leave_joint(self, number: int, group: Any) -> None:
        """A joint configuration that was entered to stay is left by hand."""
        self.ask(number, self.cluster.node(number).leave_joint(group.name))

    # N6: liveness

    def mute(self) -> None:
        """Renewals of a node do not arrive, at one other or at all, for longer than the timeout or shorter."""
        a = self.draw.choice(list(self.cluster.hosts))
        others = [number for number in self.cluster.hosts if number != a]
        if self.draw.random() < 0.5:
            others = [self.draw.choice(others)]
        pairs = [(a, b) for b in others]
        self.network.weather.mute.update(pairs)
        self.after(self.draw.uniform(1.0, 5.0), self.network.weather.mute.difference_update, pairs)

    # L5: truncation beside what moves payloads

    def truncate_beside(self) -> None:
        """All logs are truncated, again and again, while nodes migrate and compact."""
        for number in self.cluster.up:
            life = self.cluster.hosts[number].life
            if life is not None:
                life.thread_s = self.draw.choice((0.002, 0.05, 0.2))
            self._roll(number)
            for step in range(3):
                self.after(0.02 + 0.4 * step + 0.3 * self.draw.random(), self._compact, number)
        for step in range(24):
            self.after(0.05 * step + 0.05 * self.draw.random(), self._truncate_all)

    def _compact(self, number: int) -> None:
        if number in self.cluster.up:
            self.ask(
                number,
                self.cluster.node(number).compact(),
                "L5.truncated_beside" if "truncations" in self.work.features else "",
            )

    def _truncate_all(self) -> None:
        for group in self.work.groups:
            if isinstance(group, LogGroup) and group.acked_end > group.start and not group.poisoned:
                led = [number for number in self.cluster.up if self.cluster.leads(number, group.name)]
                if led:
                    # All of it, or some: a share of a sealed file goes with its last record.
                    low = group.acked_end if self.draw.random() < 0.5 else group.start
                    group.start = self.draw.randint(low, group.acked_end)
                    self.ask(led[0], self.cluster.node(led[0]).truncate(group.name, group.start))

    # P4: descriptors

    def descriptors(self) -> None:
        """A node has none left for a while, in which its WAL rolls, and sometimes a process starts."""
        host = self.some()
        if host is None:
            return
        host.faults.no_descriptors = True
        self._roll(host.number)
        self.after(0.1 + 0.2 * self.draw.random(), self._compact, host.number)
        self.after(self.draw.uniform(0.3, 3.0), self._have_descriptors, host)
        if self.draw.random() < 0.3:
            self.down(host)

    def _have_descriptors(self, host: Host) -> None:
        host.faults.no_descriptors = False

    # D6: maps

    def map_full(self) -> None:
        """While payloads are moved: the map of a generation ends sooner than was estimated."""
        for number in self.cluster.up:
            self.cluster.hosts[number].faults.map_full = True
            self._roll(number)
            self.after(0.1 + 0.3 * self.draw.random(), self._compact, number)

    def commit_full(self) -> None:
        """Some commits of a node's meta store, its generations or both fail, few or all for a while, in which its WAL
        rolls again and again and its groups take snapshots; sometimes it dies in that while."""
        host = self.some()
        if host is None:
            return
        stores = self.draw.choice((("meta",), ("sealing",), ("sealing",), ("generation",), ("meta", "generation")))
        host.faults.no_commit = dict.fromkeys(stores, self.draw.choice((1, 1, 2, 5, 1_000)))
        self._roll(host.number)
        for _ in range(self.draw.randrange(1, 4)):
            self.after(self.draw.uniform(0.0, 2.0), self._roll, host.number)
            self.after(self.draw.uniform(0.0, 1.0), self._snapshot, host.number)
        self.after(self.draw.uniform(0.3, 4.0), self._can_commit, host)
        if self.draw.random() < 0.5:
            self.after(self.draw.uniform(0.1, 3.0), self.down, host)

    def _snapshot(self, number: int) -> None:
        if number in self.cluster.up:
            self.ask(number, self.cluster.node(number).snapshot())

    def _can_commit(self, host: Host) -> None:
        host.faults.no_commit.clear()

    # Q2: sessions

    def close_session(self) -> None:
        """Somebody ends a client's session while its frames are under way."""
        clients = [client for client in self.work.clients if client.session and client.group.created]
        if not clients:
            return
        client = self.draw.choice(clients)
        name = client.group.name
        led = [number for number in self.cluster.up if self.cluster.leads(number, name)]
        if led:
            self.ask(led[0], self.cluster.node(led[0]).close_session(name, client.session), "Q2.closed")

    # U1: versions

    def old_program(self) -> None:
        """A node's next process is of an older program, where nothing needs the newer one yet."""
        host = self.some()
        if host is not None and not self._upgraded():
            host.old_program = True
            self.hits["U1.old"] += 1
            self.down(host)

    def new_program(self) -> None:
        """A node's next process is of the newer program."""
        old = [host for number, host in self.cluster.hosts.items() if host.old_program and number in self.cluster.up]
        if old:
            host = self.draw.choice(old)
            host.old_program = False
            self.hits["U1.new"] += 1
            self.down(host)

    def use_new(self) -> None:
        """Somebody asks a log for what only the newer program has."""
        found = self.leader(LogGroup)
        if found is not None:
            group, number = found
            self.ask(number, self.cluster.node(number).open_producer(group.name, self.draw.getrandbits(40)), "U1.used")

    def _upgraded(self) -> bool:
        members = [m for number in self.cluster.up for m in self.cluster.system(number).members.values()]  # type: ignore[union-attr]
        return any(member.version > 1 and member.spec.machine == "log" for member in members)

    def renew_programs(self) -> None:
        """Who waits for a newer program gets it."""
        for number in list(self.cluster.up):
            host = self.cluster.hosts[number]
            system = self.cluster.system(number)
            if host.old_program and system is not None:
                waits = [one for one in system.members.values() if one.halt is not None and one.halt.version]
                if waits or self._upgraded():
                    host.old_program = False
                    self.cluster.crash(number)
