"""All faults of a run, and the end of a round: everything is healed, what was done stays done. Driven by `run`."""

from __future__ import annotations

from .faults_disk import DiskFaults
from .faults_features import FeatureFaults
from .faults_group import GroupFaults
from .faults_network import NetworkFaults
from .faults_process import ProcessFaults
from .faults_rot import RotFaults


class Nemesis(NetworkFaults, ProcessFaults, DiskFaults, GroupFaults, RotFaults, FeatureFaults):
    """One run's."""

    def heal(self) -> None:
        """Nothing is wrong any more, but what was done stays done."""
        self.active = False
        self.network.heal()
        for number in sorted(self.true_files):
            self.give_back(self.cluster.hosts[number])
        self.old_files.clear()
        for host in self.cluster.hosts.values():
            faults = host.faults
            faults.errors.clear()
            faults.short = faults.latency_s = 0.0
            faults.lost_write = faults.misdirect = faults.stale_read = False
            faults.quota = -1
            faults.map_full = faults.no_descriptors = False
            faults.no_commit.clear()
            faults.bug = ""
            host.cut_next = None
            host.drift = min(max(host.drift, 0.8), 1.25)
            if host.life is not None:
                host.life.paused_until = 0.0
                host.life.doomed = None
                host.life.disk.crash_in = -1

    def restore_members(self) -> bool:
        """Groups have three voters again; whether something is still to be done."""
        if not self.membership:
            return False
        todo = False
        for group in self.work.groups:
            for number in self.cluster.up:
                member = self.cluster.replica(number, group.name)
                if member is None or not self.cluster.leads(number, group.name) or member.halt is not None:
                    continue
                voters = member.raft.configuration.voters
                node = self.cluster.node(number)
                if member.raft.configuration.joint:
                    todo = True
                    if not member.raft.configuration.auto_leave:
                        self.leave_joint(number, group)
                elif len(voters) < 3:
                    todo = True
                    spare = [one for one in self.cluster.hosts if one not in voters]
                    kind = "promote" if spare[0] in member.raft.configuration.learners else "add"
                    self.ask(number, node.change_members(group.name, kind, spare[0]))
                elif len(voters) > 3:
                    todo = True
                    other = next(one for one in voters if one != number)
                    self.ask(number, node.change_members(group.name, "remove", other))
        return todo
