"""What must hold after every event, looked at on the node that the event ran on; and what must hold once all is quiet.

After every event: one leader a term, votes cast once, terms, commits and applied indexes never fall, every member's
committed entry is the same, a new leader has all that was committed, what is committed is stable on a majority, the
same prefix gives the same state, committed configurations are the same. After every start: what the process before
told anybody is still there, and nothing is called damaged that nobody damaged. Used by `run`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from logyard.engine.raft.core import LEADER
from logyard.engine.raft.messages import APPEND_REPLY, PREVOTE, PREVOTE_REPLY, VOTE, VOTE_REPLY, Message
from logyard.engine.replica.member import RUNNING, STOPPED, Member
from logyard.machines.kv import KV
from logyard.machines.log import AppendLog
from logyard.machines.queue import Queue

from .clients import Group
from .cluster import Cluster, Host
from .loop import Life


def brief(machine: Any) -> tuple[int, ...]:
    """A few numbers of a machine's state: equal states have equal ones, and most different ones do not."""
    if isinstance(machine, AppendLog):
        return machine.start, machine.end
    if isinstance(machine, KV):
        return machine.state.revision, machine.state.compacted, len(machine.state.live)
    assert isinstance(machine, Queue)
    state = machine.state
    return state.next_number, state.ready, len(state.consumers), state.dead.messages


class _Seen:
    """What was last seen of one replica in one life."""

    __slots__ = ("term", "vote", "commit", "applied", "role", "stable", "checked", "configuration", "raft", "now")

    def __init__(self, raft: Any) -> None:
        self.raft = raft
        self.term = self.vote = self.commit = self.applied = self.role = self.stable = -1
        self.checked = 0
        self.configuration = -1
        # All of it, to see at once that nothing changed.
        self.now: tuple[int, ...] = ()


class _Told:
    """What one node told others of a group: its promises. `stable` is (index, term)."""

    __slots__ = ("term", "votes", "stable")

    def __init__(self) -> None:
        self.term = 0
        self.votes: dict[int, int] = {}
        self.stable = (0, 0)


class _Truth:
    """What is known to be so of a group, by uid."""

    __slots__ = ("committed", "newest", "leaders", "states", "configurations", "floor")

    def __init__(self) -> None:
        # index -> (term, the entry's bytes).
        self.committed: dict[int, tuple[int, bytes]] = {}
        self.newest = 0
        self.leaders: dict[int, int] = {}
        self.states: dict[int, Any] = {}
        self.configurations: dict[int, Any] = {}
        self.floor = 0


class Checker:
    """One run's."""

    def __init__(self, cluster: Cluster, fault: Callable[[str], None]) -> None:
        self.cluster = cluster
        self.fault = fault
        self.seen: dict[int, dict[int, _Seen]] = {number: {} for number in cluster.hosts}
        self.told: dict[tuple[int, int], _Told] = {}
        self.truth: dict[int, _Truth] = {}
        self.groups: dict[int, Group] = {}
        # Nodes whose disk was damaged, or set back, since they were last found whole.
        self.damaged: set[int] = set()
        self.elections = 0
        self.commits = 0
        # Whether who is at rest has to know its leader.
        self.leaders_known = False
        self.on_elected: Callable[[int, int], None] = lambda number, uid: None

    def newest_leader(self, uid: int) -> int:
        """Who leads, or led, the newest term of a group that anybody did."""
        truth = self.truth.get(uid)
        return truth.leaders[max(truth.leaders)] if truth is not None and truth.leaders else 0

    # After every event

    def look(self, life: Life | None) -> None:
        """Every member of the node that ran."""
        if life is None or not life.alive:
            return
        number = life.node
        host = self.cluster.hosts[number]
        system = host.system
        if not host.ready or system is None:
            return
        seen = self.seen[number]
        for uid, member in system.members.items():
            raft = member.raft
            last = seen.get(uid)
            if last is None or last.raft is not raft:
                last = seen[uid] = _Seen(raft)
            stable = raft.log.stable
            now = (raft.term, raft.role, raft.commit, raft.applied, raft.vote)
            if now != last.now or stable < last.stable:
                self._changed(number, uid, member, last)
                last.now = now
            last.stable = stable

    def _changed(self, number: int, uid: int, member: Member, last: _Seen) -> None:
        raft = member.raft
        truth = self.truth.get(uid)
        if truth is None:
            truth = self.truth[uid] = _Truth()
        term, vote, commit, applied = raft.term, raft.vote, raft.commit, raft.applied
        if term < last.term:
            self._broken(number, uid, f"the term fell from {last.term} to {term}")
        if term == last.term and last.vote > 0 and vote != last.vote:
            self._broken(number, uid, f"the vote in term {term} changed from {last.vote} to {vote}")
        if commit < last.commit and raft.mend is None:
            self._broken(number, uid, f"the commit index fell from {last.commit} to {commit}")
        if applied < last.applied and member.state == RUNNING:
            self._broken(number, uid, f"the applied index fell from {last.applied} to {applied}")
        if not applied <= commit <= raft.log.last_index or raft.log.stable > raft.log.last_index:
            self._broken(
                number, uid, f"applied {applied}, commit {commit}, last {raft.log.last_index} are out of order"
            )
        if commit > last.commit and term == last.term and raft.role == LEADER == last.role:
            # Paper 5.4.2: what earlier leaders left is committed with an entry of the own term, never by counting.
            found = raft.log.term(commit)
            if found not in (term, None):
                self._broken(number, uid, f"leads term {term}, and committed {commit} of term {found} by counting")
        if raft.log.stable < last.stable:
            told = self.told.get((number, uid))
            if told is not None and told.stable[0] > raft.log.stable:
                told.stable = (raft.log.stable, raft.log.term(raft.log.stable) or 0)
        if raft.role == LEADER and (last.role != LEADER or term != last.term):
            self._elected(number, uid, raft, truth)
        if commit > last.checked:
            self._committed(number, uid, raft, truth, last)
        if applied != last.applied:
            self._applied(number, uid, member, truth)
        last.term, last.vote, last.commit, last.applied, last.role = term, vote, commit, applied, raft.role

    def _broken(self, number: int, uid: int, what: str) -> None:
        group = self.groups.get(uid)
        self.fault(f"node {number}, group {group.name if group is not None else f'{uid:016x}'}: {what}")

    def _elected(self, number: int, uid: int, raft: Any, truth: _Truth) -> None:
        self.elections += 1
        other = truth.leaders.setdefault(raft.term, number)
        if other != number:
            self._broken(number, uid, f"leads term {raft.term}, which node {other} leads")
        newest = truth.newest
        if newest and truth.committed[newest][0] < raft.term and raft.log.snapshot_index < newest:
            found = raft.log.term(newest)
            if found != truth.committed[newest][0]:
                self._broken(number, uid, f"leads term {raft.term} without entry {newest}, which is committed")
        self.on_elected(number, uid)

    def _committed(self, number: int, uid: int, raft: Any, truth: _Truth, last: _Seen) -> None:
        log = raft.log
        commit = raft.commit
        known = truth.committed
        for index in range(max(last.checked, log.snapshot_index) + 1, commit + 1):
            entry = log.entry(index)
            term = log.term(index)
            if term is None:
                continue
            found = known.get(index)
            if found is None:
                if entry is not None:
                    known[index] = (term, entry.data)
                    self.commits += 1
            elif found[0] != term or (entry is not None and entry.data != found[1]):
                self._broken(number, uid, f"entry {index} of term {term} is not the committed one of term {found[0]}")
        last.checked = commit
        if commit > truth.newest and commit in known:
            truth.newest = commit
            self._durable(number, uid, raft, commit, known[commit][0])
        # Index 0 is no entry: a member that begins with nothing has the newest configuration known to it there.
        if 0 < raft.configuration_index <= commit and raft.configuration_index != last.configuration:
            last.configuration = raft.configuration_index
            known_as = truth.configurations.setdefault(raft.configuration_index, raft.configuration)
            if known_as != raft.configuration:
                self._broken(number, uid, f"configuration {raft.configuration_index}: {raft.configuration}, {known_as}")

    def _durable(self, number: int, uid: int, raft: Any, index: int, term: int) -> None:
        """A majority of the voters has it on their disks, as far as their own books say."""
        systems = [system for other in self.cluster.up if (system := self.cluster.system(other)) is not None]
        if any(uid in system.host.groups.deleted for system in systems):
            # It is being deleted: some have forgotten it already.
            return
        holders = set()
        for other in self.cluster.hosts:
            system = self.cluster.system(other)
            member = system.members.get(uid) if system is not None else None
            if member is not None:
                log = member.raft.log
                if log.stable >= index and (log.term(index) == term or log.snapshot_index > index):
                    holders.add(other)
            told = self.told.get((other, uid))
            if told is not None and told.stable[0] >= index:
                holders.add(other)
        configuration = raft.configuration
        for voters in (configuration.voters, configuration.outgoing):
            if voters and len(holders.intersection(voters)) * 2 <= len(voters):
                # The configuration may have changed since the entry was acknowledged: then the one before counts.
                if raft.configuration_index >= index or configuration.joint or len(raft.history) > 1:
                    continue
                self._broken(number, uid, f"entry {index} is committed and stable only on nodes {sorted(holders)}")

    def _applied(self, number: int, uid: int, member: Member, truth: _Truth) -> None:
        machine: Any = member.machine
        state = brief(machine)
        applied = member.raft.applied
        known = truth.states.setdefault(applied, state)
        if known != state and member.state == RUNNING:
            self._broken(number, uid, f"at {applied} the state is {state}, elsewhere it was {known}")
        group = self.groups.get(uid)
        raft = member.raft
        leads = raft.role == LEADER and applied >= raft.lead_index and applied == raft.commit
        if group is not None and leads and max(truth.leaders) == raft.term:
            missing = group.lacks(machine)
            if missing:
                self._broken(number, uid, f"it leads, and has {missing}")

    # Promises

    def listen(self, number: int, messages: Any) -> None:
        """What a node says to others."""
        for message in messages:
            kind = message.kind
            if kind in (PREVOTE, PREVOTE_REPLY):
                continue
            told = self.told.get((number, message.uid))
            if told is None:
                told = self.told[number, message.uid] = _Told()
            if message.term > told.term:
                told.term = message.term
            if kind == APPEND_REPLY:
                if not message.reject:
                    self._acknowledges(number, message, told)
            elif (kind == VOTE_REPLY and not message.reject) or kind == VOTE:
                vote = message.to if kind == VOTE_REPLY else number
                if told.votes.setdefault(message.term, vote) != vote:
                    self._broken(
                        number, message.uid, f"voted for {told.votes[message.term]} and {vote} in {message.term}"
                    )

    def _acknowledges(self, number: int, message: Message, told: _Told) -> None:
        system = self.cluster.system(number)
        member = system.members.get(message.uid) if system is not None else None
        if member is None or message.index <= told.stable[0]:
            return
        log = member.raft.log
        if message.index > log.stable:
            self._broken(number, message.uid, f"acknowledged {message.index}, its log is stable to {log.stable}")
        told.stable = (message.index, log.term(message.index) or 0)

    def started(self, host: Host) -> None:
        """A process takes part: does it know what the one before said?"""
        number = host.number
        self.seen[number] = {}
        system = host.system
        assert system is not None
        for (node, uid), told in list(self.told.items()):
            if node != number:
                continue
            member = system.members.get(uid)
            if member is None:
                if uid not in system.quiescence.table:
                    # Deleted, or it left: what it said is nobody's business any more.
                    if number not in self.damaged and uid in self.groups and uid not in system.host.groups.deleted:
                        self._left(number, uid, told)
                    del self.told[node, uid]
                continue
            raft = member.raft
            if raft.mend is not None or member.damaged or member.state == STOPPED:
                if number not in self.damaged:
                    self._broken(number, uid, f"calls itself damaged, and nobody damaged it: {member.reason}")
                told.stable = (0, 0)
                continue
            self._keeps(number, uid, raft, told)

    def _left(self, number: int, uid: int, told: _Told) -> None:
        system = self.cluster.system(number)
        assert system is not None
        if uid not in system.host.replica_gc.departed and told.stable[0]:
            self._broken(number, uid, "is not there after a restart")

    def _keeps(self, number: int, uid: int, raft: Any, told: _Told) -> None:
        if raft.term < told.term:
            self._broken(number, uid, f"restarted in term {raft.term}, and spoke in {told.term}")
        vote = told.votes.get(raft.term, 0)
        # Who lost a vote gives the rest of the term's to itself: nobody else gets it, and it is no candidate.
        burnt = number in self.damaged and raft.vote == number
        if vote and raft.vote != vote and not burnt:
            self._broken(number, uid, f"restarted with vote {raft.vote} in term {raft.term}, and voted for {vote}")
        index, term = told.stable
        # A later leader may have put another entry there, and the process ended before it said so.
        if not index or raft.log.snapshot_index >= index or (raft.log.term(index) or 0) >= term:
            return
        left = self.cluster.hosts[number].system.host.replica_gc.departed.get(raft.uid)  # type: ignore[union-attr]
        # One that left and came back has an empty log: what it acknowledged is a promise of its own.
        if left is None or (left.last_term, left.last_index) < (term, index):
            found = raft.log.term(index)
            self._broken(number, uid, f"acknowledged entry {index} of term {term}, restarted with {found}, left {left}")
        told.stable = (0, 0)

    # At rest

    def at_rest(self, groups: list[Group]) -> list[str]:
        """Why the cluster has not converged yet; nothing when it has."""
        reasons = []
        for group in groups:
            replicas = [(number, self.cluster.replica(number, group.name)) for number in self.cluster.up]
            awake = [(number, member) for number, member in replicas if member is not None]
            if not awake:
                continue
            leaders = [member for number, member in awake if self.cluster.leads(number, group.name)]
            if len(leaders) != 1:
                reasons.append(f"{group.name}: {len(leaders)} leaders")
                continue
            raft = leaders[0].raft
            for number, member in awake:
                if number not in raft.configuration.nodes():
                    continue
                if member.state != RUNNING or member.raft.mend is not None:
                    reasons.append(f"{group.name}: node {number} is {member.shown_state} {member.reason}")
                elif member.raft.applied != raft.log.last_index:
                    reasons.append(
                        f"{group.name}: node {number} applied {member.raft.applied} of {raft.log.last_index}"
                    )
                elif self.leaders_known and member.raft.leader != raft.node:
                    reasons.append(f"{group.name}: node {number} does not know that node {raft.node} leads")
                elif not member.resolves:
                    reasons.append(f"{group.name}: node {number} is below its floor")
        return reasons

    def windows(self) -> None:
        """What all groups of a node have under way to another is the sum of what each has, whatever became of others
        of them."""
        for number in self.cluster.up:
            system = self.cluster.system(number)
            assert system is not None
            owed = Counter[int]()
            for member in system.members.values():
                for node, progress in member.raft.progress.items():
                    owed[node] += progress.inflight_bytes + progress.probed
            for node, window in system.windows.items():
                if window.bytes != owed[node]:
                    self.fault(
                        f"node {number} counts {window.bytes} bytes under way to {node}, its groups {owed[node]}"
                    )

    def equal(self, groups: list[Group]) -> None:
        """All members of a converged cluster hold the same."""
        for group in groups:
            states: dict[int, Any] = {}
            for number in self.cluster.up:
                member = self.cluster.replica(number, group.name)
                if member is not None and member.state == RUNNING:
                    live = member.liveness.encode_live_set(member.raft.applied)
                    sessions = member.sessions.encode() if member.sessions is not None else b""
                    state = sorted(member.machine.snapshot().items())
                    states.setdefault(member.raft.applied, {})[number] = (live, sessions, state)
                    member.raft.check()
            for applied, found in states.items():
                if len({repr(one) for one in found.values()}) > 1:
                    parts = [name for at, name in enumerate(("live sets", "sessions", "states"))
                             if len({repr(one[at]) for one in found.values()}) > 1]  # fmt: skip
                    self.fault(f"{group.name}: nodes {sorted(found)} differ at {applied} in {parts}")
