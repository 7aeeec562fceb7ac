"""L, G, M: faults in the middle of the engine's own work, and what operators do to groups meanwhile."""

from __future__ import annotations

from typing import Any

from logyard.engine.raft.core import LEADER
from logyard.protocol.errors import LogyardError
from logyard.protocol.frame import encode_frame

from .clients_log import LogGroup
from .ground import Ground

BOOM = b"boom"


class GroupFaults(Ground):
    """Each verb brings one about; some are no faults, but make something for faults to hit."""

    def roll(self) -> None:
        """Not a fault: sealed files, so that there is something to lose."""
        for number in self.cluster.up:
            if self.draw.random() < 0.6:
                self._roll(number)

    def compact(self) -> None:
        host = self.some()
        if host is not None:
            self.ask(host.number, self.cluster.node(host.number).compact())

    def snapshot(self) -> None:
        host = self.some()
        if host is not None:
            self.ask(host.number, self.cluster.node(host.number).snapshot())

    def crash_in_migration(self) -> None:
        self._crash_in("L1.crash_in_migration")

    def crash_in_compaction(self) -> None:
        self._crash_in("L2.crash_in_compaction")

    def _crash_in(self, kind: str) -> None:
        host = self.some()
        if host is None or host.life is None:
            return
        node, life = self.cluster.node(host.number), host.life

        async def keep() -> None:
            pass

        async def work() -> None:
            if kind.startswith("L2"):
                system = host.system
                assert system is not None
                await node.compact()
                system.store.seal_current()
                await system.store.rewrite_sparse(1.1, 0, lambda size: True, keep)
            else:
                await node.compact()

        def arm() -> None:
            if host.life is life:
                life.disk.crash_in = self.draw.randrange(1, 30)
                life.disk.crash_kind = kind

        self._roll(host.number)
        self.ask(host.number, work())
        self.after(0.01 * self.draw.random(), arm)
        self.revive_later(host, 1.5)

    def transfer(self) -> None:
        found = self.leader()
        if found is not None:
            group, number = found
            to = self.draw.choice(list(self.cluster.hosts))
            self.ask(number, self.cluster.node(number).transfer(group.name, to), "M1.transfer")

    def change_members(self) -> None:
        """One goes, another comes, in either order, under everything else."""
        found = self.leader()
        if found is None or self.hurt:
            # With fewer voters a damaged one leaves no quorum that could tell what it lost.
            return
        group, number = found
        member = self.cluster.replica(number, group.name)
        assert member is not None
        self.membership = True
        voters = member.raft.configuration.voters
        spare = [one for one in self.cluster.hosts if one not in voters]
        node = self.cluster.node(number)
        # Damage may have been done and not be found yet: then three have to be left.
        if len(voters) > (3 if self.victim else 2) and self.draw.random() < 0.5:
            self.ask(number, node.change_members(group.name, "remove", self.draw.choice(voters)), "M1.remove")
        elif spare:
            self.ask(number, node.change_members(group.name, "add", self.draw.choice(spare)), "M1.add")
        self.after(self.draw.uniform(0.3, 1.0), self._change_again)

    def _change_again(self) -> None:
        if self.draw.random() < 0.6:
            self.change_members()

    def truncate(self) -> None:
        """Not a fault: what is released dies."""
        found = self.leader(LogGroup)
        if found is not None:
            group, number = found
            if group.acked_end > group.start:
                before = self.draw.randint(group.start, group.acked_end)
                group.start = max(group.start, before)
                self.ask(number, self.cluster.node(number).truncate(group.name, before))

    def poison(self) -> None:
        """A command that the machine fails at: this group stops, the others go on."""
        found = self.leader(LogGroup)
        if found is None or found[0].poisoned:
            return
        group, number = found
        data = memoryview(b"".join(encode_frame([(b"", b"x")], command=BOOM)))
        system = self.cluster.system(number)
        assert system is not None

        class Nobody:
            def reply(self, request: int, status: int, data: bytes) -> None:
                """It was sent once."""

        def submit() -> None:
            try:
                system.replicas.commands.submit(group.uid, data, Nobody(), 0)
            except LogyardError:
                return
            group.poisoned = True
            self.hits["G1.poison"] += 1

        self.as_node(number, submit)

    def skip_poison(self) -> None:
        """The operator's answer."""
        for group in self.work.groups:
            if not group.poisoned:
                continue
            for number in self.cluster.up:
                member = self.cluster.replica(number, group.name)
                if member is not None and member.halt is not None and member.raft.role == LEADER:
                    halt = member.halt
                    self.ask(number, self.cluster.node(number).skip(group.name, halt.index, halt.ordinal))

    def recreate(self) -> None:
        """A group is deleted and made again under its name while logs hold its entries."""
        found = self.leader()
        if found is None or found[0].poisoned or self.membership:
            return
        group, number = found
        group.created, group.recreate = False, True
        node = self.cluster.node(number)

        async def act() -> list[Any]:
            await node.delete_group(group.name)
            return []

        def done(result: Any, error: BaseException | None) -> None:
            if error is None:
                self.hits["G2.recreated"] += 1
            elif not isinstance(error, LogyardError):
                self.cluster.on_bug("deleting a group", error)

        self.cluster.spawn(number, act(), "delete", done)
