"""One seed: a cluster, clients, rounds of faults and of healing. What it returns is the whole result of the seed.

A round has a safety phase, in which anything may break, and a liveness phase, in which all is healed and the cluster
has to converge within `CONVERGE_S`. Swarm: what can go wrong in a round, how clients talk and how things are tuned is
drawn per seed and round. Called by `__main__`, `minimise` and the tests.
"""

from __future__ import annotations

import gc
import logging
import math
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from logyard.engine.replica import applier, quarantine
from logyard.payloads import layout
from logyard.protocol.errors import LogyardError, WalFailed

from .checks import Checker
from .clients import NO_FEATURES, Group, Workload
from .clients_kv import KvGroup
from .clients_log import LogGroup, pairs_of
from .clients_queue import QueueGroup
from .cluster import Cluster, Host
from .features import FEATURES, MORE_KINDS
from .keeping import Keeping
from .kinds import CLIENTS, KINDS, VERBS, forced_of, verbs_for
from .loop import Doomed, Life, Loop, Stop
from .machine import machines, old_machines, repaired_machines
from .nemesis import Nemesis
from .offline import complaints
from .patches import installed, old_stamps
from .terms import GROUPS, TermGroup, Terms

KINDS_OF_GROUPS = (LogGroup, LogGroup, KvGroup, QueueGroup)
NODES = 4
VOTERS = 3
TURN_S = (0.005, 0.05)
"""A turn of everybody else on a busy loop takes so long at most."""
RATE = 60.0
"""Client operations a simulated second."""
START_S = 2.0
SAFETY_S = (6.0, 9.0)
"""Of a round in which something is forced to happen."""
LONG_S = (15.0, 30.0)
"""Of one in which only the draw decides."""
NEWEST = 60
"""So many records of each group are read on each node after a round, and four times as many after the last."""
MORE_S = 240.0
"""So much longer at most."""
READ_S = 30.0
"""For the reads at the end of a round."""
BESIDE_BYTES = 256
"""From which size on a body is a large one: a run has few as large as those of a node."""
REPAIRS = 20
"""So often a read is tried again that met damage."""
REPAIRED = 3
"""Of other seeds with poisoned groups, every third goes on with repaired programs in the end."""
REPLAY_BYTES = 4096
"""They replay batches of so many bytes: a log has several."""
CONVERGE_S = 40.0
"""Ten election timeouts at their longest (2 s each) after the heal, and as much for what has to be transferred."""


@dataclass
class Result:
    """What a seed came to. `violations` is empty when all promises held."""

    seed: int
    simulated_s: float = 0.0
    cpu_s: float = 0.0
    operations: int = 0
    acknowledged: int = 0
    commits: int = 0
    elections: int = 0
    rounds: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    event_hash: str = ""
    events: int = 0
    notes: Counter[str] = field(default_factory=Counter)
    swarm: list[str] = field(default_factory=list)


@contextmanager
def _large_bodies(size: int) -> Iterator[None]:
    """Bodies of that size and more are large ones to generations with a file for them."""
    before, layout.BESIDE_BYTES = layout.BESIDE_BYTES, size
    try:
        yield
    finally:
        layout.BESIDE_BYTES = before


class Run:
    """One seed's. `allowed`: only these fault verbs, for the minimiser; None: all. `share`: how many are forced.
    `features`: what the run has of `features`; None: as before there were any."""

    def __init__(
        self,
        seed: int,
        minutes: float,
        groups: int = 4,
        allowed: frozenset[str] | None = None,
        share: int = len(VERBS),
        features: frozenset[str] | None = None,
    ) -> None:
        self.seed = seed
        self.seconds = minutes * 60
        # A run that is compared with one that was cut ends, well, where that one did.
        self.end = math.inf
        self.allowed = allowed
        self.forced = forced_of(seed, share)
        self.draw = random.Random(seed)
        self.loop = Loop(self.draw.getrandbits(64))
        limits = {
            "hibernate_after_ms": self.draw.choice((0, 1500, 4000)),
            "payload_cache_bytes": self.draw.choice((0, 0, 64 << 10, 1 << 20)),
            "snapshot_entries": self.draw.choice((16, 60, 1 << 20)),
            "hibernate_move_bytes": self.draw.choice((0, 64 << 10)),
        }
        self.features = features or NO_FEATURES
        # Features draw from a stream of their own.
        self.more = random.Random(f"more of {seed}")
        self.loop.turn_s = self.more.choice(TURN_S) if "checkpoints" in self.features else 0.0
        if "sleep" in self.features:
            limits["hibernate_after_ms"] = self.more.choice((1500, 1500, 4000))
        if "rings" in self.features:
            limits["ring_slots"] = random.Random(f"rings of {seed}").choice((16, 24, 64))
        if "linger" in self.features:
            limits |= {"linger_groups": 1, "linger_ms": random.Random(f"gathering of {seed}").choice((1, 8, 200))}
        if "turns" in self.features:
            limits["election_groups"] = random.Random(f"turns of {seed}").choice((1, 2, 3))
        limits["generation_files"] = int("bodies" in self.features)
        self.cluster = Cluster(self.loop, self.draw.getrandbits(64), NODES, limits, machines, old_machines)
        self.cluster.staggered = "staggered" in self.features
        if "steps" in self.features:
            self.cluster.groups_per_step = random.Random(f"steps of {seed}").choice((1, 1, 2))
        if "maps" in self.features:
            # Less than a user may ask for, so that a run has many.
            object.__setattr__(self.cluster.config, "generation_transaction_bytes", self.more.choice((4096, 1 << 20)))
        self.result = Result(seed)
        draw = random.Random(self.draw.getrandbits(64))
        kinds: list[Callable[[Workload, str], Group]] = [
            KINDS_OF_GROUPS[number % len(KINDS_OF_GROUPS)] for number in range(groups)
        ]
        if "terms" in self.features:
            kinds = [*kinds, *GROUPS]
        self.work = Workload(self.cluster, draw, kinds, RATE, self.fault, self.features, self.more)
        self.checker = Checker(self.cluster, self.fault)
        self.nemesis = Nemesis(self.cluster, self.work, self.checker, random.Random(self.draw.getrandbits(64)))
        self.keeping = Keeping(self.cluster, self.fault) if features is not None else None
        self.checker.leaders_known = features is not None
        looked_at = [group for group in self.work.groups if isinstance(group, TermGroup)]
        self.terms = Terms(self.cluster, looked_at, 2 if "versions" in self.features else 1)
        self.reading = 0
        self.result.swarm.append(" ".join(sorted(self.features)))
        self.result.swarm.append(str(limits))

    def fault(self, what: str) -> None:
        """A promise was broken."""
        self.result.violations.append(f"t={self.loop.now:.3f} {what}")
        raise Stop(what)

    def bug(self, what: str, error: BaseException) -> None:
        """Something raised that nothing should raise."""
        if isinstance(error, Doomed | WalFailed) or "(simulated" in str(error):
            # What was simulated came back to whoever asked; the node ends by it, where it does outside.
            return
        where = "".join(traceback.format_exception(error)[-9:])
        self.fault(f"{what}: {type(error).__name__}: {error}\n{where}")

    def go(self) -> Result:
        """Run it all."""
        with _large_bodies(BESIDE_BYTES):
            return self._go()

    def _go(self) -> Result:
        began = time.process_time()
        result = self.result
        previous = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        collecting = gc.isenabled()
        gc.disable()
        try:
            draw = random.Random(self.draw.getrandbits(64))
            with installed(self.loop, draw, self.keeping is not None), self._programs():
                self._connect()
                try:
                    self._whole()
                except Stop:
                    pass
                except Exception as error:
                    # An event that is no task's: a frame, a timer, an answer.
                    where = "".join(traceback.format_exception(error)[-9:])
                    result.violations.append(f"t={self.loop.now:.3f} {type(error).__name__}: {error}\n{where}")
                finally:
                    self.loop.on_event = lambda life: None
                    self.cluster.stop_all()
        finally:
            logging.disable(previous)
            if collecting:
                gc.enable()
        self._count()
        if "offline" in self.features and not result.violations:
            found = complaints(self.cluster, self.checker.damaged, result.faults)
            result.violations += [f"t={self.loop.now:.3f} {one}" for one in found]
        result.cpu_s = time.process_time() - began
        return result

    def _programs(self) -> AbstractContextManager[None]:
        return old_stamps(self.loop) if "versions" in self.features else nullcontext()

    def _connect(self) -> None:
        cluster, checker = self.cluster, self.checker
        self.loop.on_event = checker.look if self.end == math.inf else self._look_until_end
        self.loop.on_still = lambda: self.fault("events go round in a circle")
        cluster.on_bug = self.loop.on_defect = self.bug
        cluster.on_ready = self._started
        cluster.on_gone = self._gone
        cluster.network.on_send = checker.listen
        checker.on_elected = self._elected
        self.work.newest_leader = checker.newest_leader

    def _look_until_end(self, life: Life | None) -> None:
        if self.loop.now > self.end:
            raise Stop("the end")
        self.checker.look(life)

    def _started(self, host: Host) -> None:
        if not host.other:
            self.checker.started(host)
            self.nemesis.noticed(host)

    def _elected(self, number: int, uid: int) -> None:
        """Somebody asks a new leader at once, before it knows what is committed, and one that was."""
        group = self.checker.groups.get(uid)
        if group is not None:
            self.loop.soon(None, self.work.read, group, number, "linearizable")
            if "reads" in self.features:
                self.loop.soon(None, self.work.read, group, number, "leader")

    def _gone(self, host: Host) -> None:
        self.checker.seen[host.number] = {}

    def _whole(self) -> None:
        for number, host in self.cluster.hosts.items():
            host.drift = self.draw.choice((1.0, 1.0, self.draw.uniform(0.8, 1.25)))
            if "versions" in self.features:
                host.old_program = self.more.random() < 0.5
            self.cluster.start(number)
        if self.keeping is not None:
            self.keeping.go()
        if self.terms.groups:
            self.terms.go()
        self.loop.run(START_S)
        for group in self.work.groups:
            self.create(group)
        self.work.begin()
        self.loop.run(self.loop.now + 1.0)
        while self.loop.now < self.seconds or self._goes_on():
            gc.collect(0)
            self.safety()
            self.liveness()
            self.result.rounds += 1
        if not any(host.old_program for host in self.cluster.hosts.values()):
            if "repairs" in self.features:
                self.nemesis.poison()
                self.liveness()
            if self._hits()["G1.poison"] and ("repairs" in self.features or self.seed % REPAIRED == 0):
                self.repair()
        for group in self.work.groups:
            group.judge()

    def repair(self) -> None:
        """All nodes get a program that does not fail at what was skipped, and replay: nothing of it may be applied."""
        self.cluster.machines = repaired_machines
        before = applier.APPLY_BYTES, quarantine.SCAN_BYTES
        applier.APPLY_BYTES = quarantine.SCAN_BYTES = REPLAY_BYTES
        try:
            for number in list(self.cluster.up):
                self.cluster.crash(number)
            self.liveness()
        finally:
            applier.APPLY_BYTES, quarantine.SCAN_BYTES = before

    def _goes_on(self) -> bool:
        """Whether a run of a minute or more takes longer, as faults that it is to try have hit nothing so far."""
        if self.seconds < 60 or self.loop.now >= self.seconds + MORE_S or self.allowed is not None:
            return False
        hits = self._hits()
        # A swarm without them: from here on some frames come twice, and some answers get lost.
        self.work.twice, self.work.deaf = max(self.work.twice, 0.05), max(self.work.deaf, 0.02)
        wanted = [kind for verb in self.forced for kind in VERBS[verb]]
        return any(not hits[kind] for kind in (*wanted, *(CLIENTS if len(self.forced) == len(VERBS) else ())))

    # Groups

    def create(self, group: Any) -> None:
        """Make a group on three of the nodes, asking until it is there."""
        cluster = self.cluster
        first = self.work.groups.index(group)
        members = sorted({(first + at) % NODES + 1 for at in range(VOTERS)})
        by = [number for number in members if number in cluster.up]

        def done(result: Any, error: BaseException | None) -> None:
            if error is None:
                self._made(group, result[0]["uid"])
            elif not isinstance(error, LogyardError):
                self.bug("creating a group", error)

        if not by:
            return
        spec = {"name": group.name, "members": members, "machine": group.machine}
        cluster.spawn(by[0], cluster.node(by[0]).create_groups([spec]), "create", done)

    def _made(self, group: Any, uid: int) -> None:
        if group.uid != uid:
            group.uid = uid
            group.poisoned = False
            group.reset()
            for client in self.work.clients:
                if client.group is group:
                    client.forget()
        self.checker.groups[uid] = group
        group.created = True

    # Phases

    def safety(self) -> None:
        """Anything may break."""
        loop, nemesis, draw = self.loop, self.nemesis, self.draw
        chosen, forced = verbs_for(draw, self._hits(), self.forced, self.allowed)
        length = min(draw.uniform(*(SAFETY_S if forced else LONG_S)), max(5.0, self.seconds - loop.now))
        self.result.swarm.append(" ".join(chosen))
        nemesis.active = True
        nemesis.membership = False
        nemesis.hurt = False
        for verb in chosen:
            times = draw.choice((1, 1, 1, 2, 3))
            for _ in range(times):
                nemesis.after(draw.uniform(0.0, length * 0.85), getattr(nemesis, verb))
        for verb in ("roll", "snapshot", "compact", "truncate"):
            for _ in range(draw.choice((0, 1, 2))):
                nemesis.after(draw.uniform(0.0, length), getattr(nemesis, verb))
        if self.features:
            self._more(length)
        self.terms.good = False
        loop.run(loop.now + length)
        nemesis.active = False

    def _more(self, length: float) -> None:
        """What features bring about in a round."""
        more, now = self.more, self.loop.now
        for name in sorted(self.features):
            for verb in FEATURES[name]:
                if (self.allowed is None or verb in self.allowed) and more.random() < 0.75:
                    self.result.swarm.append(verb)
                    for _ in range(more.choice((1, 1, 2, 3))):
                        self.nemesis.after(more.uniform(0.0, length * 0.85), getattr(self.nemesis, verb))
        if "sleep" in self.features:
            for group in self.work.groups:
                if more.random() < 0.5:
                    group.quiet_until = now + more.uniform(4.0, max(5.0, length))

    def liveness(self) -> None:
        """All is healed: everybody has to agree, and everything pending be answered, in bounded time."""
        loop, cluster, work = self.loop, self.cluster, self.work
        self.nemesis.heal()
        self.terms.good = True
        for group in work.groups:
            group.quiet_until = 0.0
        deadline = loop.now + CONVERGE_S
        talked = False
        reasons: list[str] = []
        while loop.now < deadline:
            for number, host in cluster.hosts.items():
                if host.life is None:
                    cluster.start(number)
            self.nemesis.skip_poison()
            if self.features:
                self._give_way()
            for group in work.groups:
                if self._is_gone(group) or not group.created:
                    self.create(group)
            loop.run(loop.now + 0.25)
            if self.nemesis.restore_members():
                continue
            reasons = self._not_yet()
            if not reasons:
                if not talked:
                    # Once more with everybody talking: it must go on, not just stand still in agreement.
                    talked = True
                    work.stopping = True
                    continue
                break
            if talked is False and loop.now > deadline - CONVERGE_S / 2:
                work.stopping = talked = True
        else:
            self.fault(f"no convergence in {CONVERGE_S} s after the heal: {'; '.join(reasons[:6])}")
        for group in work.groups:
            group.poisoned = False
        self.checker.equal(work.groups)
        self.checker.windows()
        self._read_all()
        work.begin()

    def _give_way(self) -> None:
        """What operators do to what features left behind."""
        if "versions" in self.features:
            self.nemesis.renew_programs()
        if "roles" in self.features and (self.nemesis.victim or self.nemesis.membership):
            self.nemesis.allow_leading()

    def _is_gone(self, group: Any) -> bool:
        """A deletion that nobody was told of was carried out after all."""
        if not group.recreate:
            return False
        systems = [system for number in self.cluster.up if (system := self.cluster.system(number)) is not None]
        group.created = any(system.names.get(group.name) == group.uid for system in systems)
        return not group.created

    def _not_yet(self) -> list[str]:
        reasons = [
            f"node {number} is not up: {host.failure}" for number, host in self.cluster.hosts.items() if not host.ready
        ]
        for group in self.work.groups:
            if not group.created:
                reasons.append(f"{group.name} is not made")
            if group.poisoned:
                held = [self.cluster.replica(number, group.name) for number in self.cluster.up]
                if any(member is not None and member.halt is not None for member in held):
                    reasons.append(f"{group.name} is halted")
            if self.work.stopping:
                reasons += group.pending()
        for client in self.work.clients:
            old = [one for one in client.pending.values() if one.sends > 3]
            if old or (self.work.stopping and client.pending):
                reasons.append(f"{client.group.name}: {len(client.pending)} frames are pending")
        # While everybody talks, replicas are never equal for long: then only who is stuck counts.
        if self.work.stopping:
            reasons += self.checker.at_rest(self.work.groups)
        return reasons

    def _read_all(self) -> None:
        """Every node gives what was acknowledged, each record once."""
        for group in self.work.groups:
            if not isinstance(group, LogGroup):
                continue
            led = [number for number in self.cluster.up if self.cluster.leads(number, group.name)]
            leader = self.cluster.replica(led[0], group.name) if led else None
            for number in sorted(leader.raft.configuration.nodes()) if leader is not None else ():
                if self.cluster.replica(number, group.name) is not None:
                    self._read_one(group, number, REPAIRS)
        deadline = self.loop.now + READ_S
        while self.reading and self.loop.now < deadline:
            self.loop.run(self.loop.now + 0.25)
        if self.reading:
            self.fault(f"{self.reading} reads did not end within {READ_S} s")

    def _read_one(self, group: Any, number: int, tries: int) -> None:
        """What is damaged may be refused, and is repaired meanwhile: then it is read again, once a member that lost its
        log to the damage has what the others have."""

        def done(result: Any, error: BaseException | None) -> None:
            self.reading -= 1
            if error is None and tries and tries < REPAIRS and self._is_behind(group.name, number):
                self.reading += 1
                self.loop.at(self.loop.now + 1.0, None, again)
            elif error is None:
                self._compare(group, number, *result)
            elif not isinstance(error, LogyardError):
                self.bug(f"reading {group.name} at node {number}", error)
            elif error.code in ("corrupt", "group_stopped") and tries:
                # Another read may have met the damage: its group takes no part for as long as it is made anew.
                self.work.hits["read.repaired"] += 1
                self.reading += 1
                self.loop.at(self.loop.now + 1.0, None, again)
            elif error.code not in ("gone", "out_of_range", "unknown_group"):
                self.fault(f"{group.name}: node {number} can't be read: {type(error).__name__}: {error}")

        def again() -> None:
            self.reading -= 1
            self._read_one(group, number, tries - 1)

        if number in self.cluster.up:
            self.reading += 1
            self.cluster.spawn(number, self._read(number, group), "read", done)

    def _is_behind(self, name: str, number: int) -> bool:
        """Whether a member has applied less than another one knows to be committed."""
        replicas = {other: self.cluster.replica(other, name) for other in self.cluster.up}
        own = replicas.get(number)
        commits = [replica.raft.commit for replica in replicas.values() if replica is not None]
        return own is None or own.raft.applied < max(commits)

    def _compare(self, group: Any, number: int, start: int, end: int, records: Any) -> None:
        group.compare(records, number)
        tags = [int(bytes(payload[:20]).partition(b";")[0]) for _, payload in records if payload is not None]
        if len(set(tags)) < len(tags):
            self.fault(f"{group.name}: node {number} has a record twice")
        there = {offset for offset, _ in records}
        missing = [offset for offset in group.records if start <= offset and offset not in there]
        if missing:
            self.fault(f"{group.name}: node {number} lost acknowledged records {missing[:5]} of {start}..{end}")

    async def _read(self, number: int, group: Any) -> Any:
        from logyard.protocol.records import Page

        node = self.cluster.node(number)
        bounds = await node.bounds(group.name)
        offset, end = bounds["start"], bounds["end"]
        offset = max(offset, end - (NEWEST if self.loop.now < self.seconds else 4 * NEWEST))
        start = offset
        records: list[tuple[int, Any]] = []
        while offset < end:
            header, blocks = await node.poll(group.name, offset, 1000, 1 << 20, 0.0, True, "local")
            page = Page(b"".join(blocks), header["start"], header["end"], header["node"], offset, 1000)
            records += pairs_of(page)
            offset = page.next
        return start, end, records

    # Counting

    def _hits(self) -> Counter[str]:
        found = self.nemesis.hits + self.cluster.network.hits + self.cluster.hits + self.work.hits
        for host in self.cluster.hosts.values():
            found += host.faults.hits
        return found

    def _count(self) -> None:
        result, hits = self.result, self._hits()
        for kind, count in hits.items():
            (result.faults if kind in KINDS or kind in MORE_KINDS else result.notes)[kind] += count
        for group in self.terms.groups:
            result.notes[f"terms.{group.machine}"] += group.checked
        result.simulated_s = self.loop.now
        result.events = self.loop.events
        result.operations = self.work.operations
        result.acknowledged = self.work.acknowledged
        result.commits = self.checker.commits
        result.elections = self.checker.elections
        self.cluster.network.hash.update(repr((self.loop.events, self.loop.now, sorted(hits.items()))).encode())
        result.event_hash = self.cluster.network.hash.hexdigest()


__all__ = ["Result", "Run"]
