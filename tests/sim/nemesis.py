"""Faults by kind, as docs name them (design: the fault matrix). Each method brings one about; `hits` counts what hit.

Invariant: what is lost for good is lost on one node at a time (`victim`), so that every record keeps a good copy that a
quorum knows of; a node becomes the victim only when all others are whole. Driven by `run`, which heals everything at
the end of each round.
"""

from __future__ import annotations

import errno
import random
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from typing import Any

from logyard.client.wire import encode_frame
from logyard.engine.errors import LogyardError, Outdated
from logyard.engine.raft.messages import APPEND, VOTE, Message

from .checks import Checker
from .clients import Group, Workload
from .cluster import Cluster, Host
from .files import File, FileSystem

BOOM = b"boom"


class Nemesis:
    """One run's faults."""

    def __init__(self, cluster: Cluster, work: Workload, checker: Checker, draw: random.Random) -> None:
        self.cluster = cluster
        self.loop = cluster.loop
        self.network = cluster.network
        self.work = work
        self.checker = checker
        self.draw = draw
        self.hits: Counter[str] = Counter()
        # The node whose disk may be damaged in this round.
        self.victim = 0
        self.membership = False
        self.active = False
        # Nodes that a revival is under way for.
        self.reviving: set[int] = set()
        # Nodes with another file system than theirs for a while: theirs.
        self.true_files: dict[int, FileSystem] = {}
        self.old_files: dict[int, FileSystem] = {}

    # How things are said

    def after(self, seconds: float, call: Callable[..., Any], *arguments: Any) -> None:
        """Later in this round, if it is still on."""

        def act() -> None:
            if self.active:
                call(*arguments)

        self.loop.at(self.loop.now + seconds, None, act)

    def some(self) -> Host | None:
        """A node that is up."""
        up = self.cluster.up
        return self.cluster.hosts[self.draw.choice(up)] if up else None

    def leader(self) -> tuple[Group, int] | None:
        """A group and the node that leads it."""
        groups = list(self.work.groups)
        self.draw.shuffle(groups)
        for group in groups:
            for number in self.cluster.up:
                if self.cluster.leads(number, group.name):
                    return group, number
        return None

    def as_node(self, number: int, call: Callable[..., Any], *arguments: Any) -> Any:
        """Do something as a node's process."""
        life = self.cluster.hosts[number].life
        return self.loop.perform(life, call, arguments) if life is not None else None

    def ask(self, number: int, coro: Any, kind: str = "") -> None:
        """A verb of an operator; refusals are fine."""

        def done(result: Any, error: BaseException | None) -> None:
            if error is None:
                if kind:
                    self.hits[kind] += 1
            elif not isinstance(error, LogyardError):
                self.cluster.on_bug(kind or "a verb", error)

        self.cluster.spawn(number, coro, kind, done)

    def down(self, host: Host, cut: Callable[[FileSystem], None] | None = None, pause: float = 0.0) -> None:
        """A node goes, and comes back later in the round (or at its end)."""
        self.cluster.crash(host.number, cut)
        self.revive_later(host, pause)

    def revive_later(self, host: Host, pause: float = 0.0) -> None:
        """Start a node again after a while."""
        self.after(pause or self.draw.uniform(0.2, 2.5), self.revive, host, -1)

    def revive(self, host: Host, crash_in: int = -1) -> None:
        """Start a node that is down."""
        if host.life is None:
            self.cluster.start(host.number, crash_in)

    # N1 to N5: the network

    def loss(self) -> None:
        self.network.weather.loss = self.draw.choice((0.003, 0.01, 0.05, 0.3))

    def replay(self) -> None:
        self.network.weather.replay = self.draw.choice((0.02, 0.1, 0.5))

    def delay(self) -> None:
        weather = self.network.weather
        weather.late, weather.late_s = self.draw.choice(((0.2, 0.05), (0.05, 0.5), (0.02, 5.0)))

    def corrupt(self) -> None:
        self.network.weather.corrupt = self.draw.choice((0.004, 0.02))

    def _part(self, name: str, pairs: list[tuple[int, int]]) -> None:
        self.network.cut(name, pairs)
        self.after(self.draw.uniform(0.5, 4.0), self._mend, pairs)

    def _mend(self, pairs: list[tuple[int, int]]) -> None:
        for pair in pairs:
            self.network._blocked.discard(pair)
            self.network.names.pop(pair, None)
        self.network._repair_soon()

    def _split(self, name: str, side: list[int]) -> None:
        rest = [number for number in self.cluster.hosts if number not in side]
        self._part(name, [pair for a in side for b in rest for pair in ((a, b), (b, a))])

    def halves(self) -> None:
        self._split("halves", self.draw.sample(list(self.cluster.hosts), len(self.cluster.hosts) // 2))

    def isolate(self) -> None:
        self._split("isolate", [self.draw.choice(list(self.cluster.hosts))])

    def ring(self) -> None:
        """Each node hears its two neighbours only."""
        nodes = list(self.cluster.hosts)
        self.draw.shuffle(nodes)
        count = len(nodes)
        far = [(a, b) for i, a in enumerate(nodes) for j, b in enumerate(nodes) if (i - j) % count not in (0, 1, count - 1)]
        self._part("ring", far)

    def bridge(self) -> None:
        """Two halves, and one node that hears both."""
        nodes = list(self.cluster.hosts)
        self.draw.shuffle(nodes)
        middle = nodes.pop()
        half = nodes[: len(nodes) // 2]
        rest = [node for node in nodes if node not in half]
        assert middle not in half
        self._part("bridge", [pair for a in half for b in rest for pair in ((a, b), (b, a))])

    def one_way(self) -> None:
        a = self.draw.choice(list(self.cluster.hosts))
        others = [number for number in self.cluster.hosts if number != a]
        pairs = [(a, b) for b in others] if self.draw.random() < 0.5 else [(b, a) for b in others]
        self._part("one_way", pairs)

    def flap(self) -> None:
        """A link that works every other tenth of a second."""
        a, b = self.draw.sample(list(self.cluster.hosts), 2)
        for step in range(self.draw.randrange(6, 16)):
            self.after(step * 0.1, self._flap, a, b, step % 2 == 0)

    def _flap(self, a: int, b: int, off: bool) -> None:
        if off:
            if self.network.nodes.get(a) and b in self.network.nodes[a].up:
                self.hits["N3.flap"] += 1
            self.network.cut("flap", [(a, b), (b, a)])
        else:
            self._mend([(a, b), (b, a)])

    def clog(self) -> None:
        """Nothing gets through for a while, nothing is lost."""
        a, b = self.draw.sample(list(self.cluster.hosts), 2)
        self.network.weather.clogged[a, b] = self.loop.now + self.draw.uniform(0.3, 3.0)

    def half_open(self) -> None:
        """One side believes that the connection stands."""
        a, b = self.draw.sample(list(self.cluster.hosts), 2)
        own = self.network.nodes.get(a)
        if own is not None and b in own.up:
            own.up.discard(b)
            self.loop.soon(own.life, own.handler.on_link_down, b)
            self.hits["N3.half_open"] += 1
            self.after(self.draw.uniform(0.2, 1.5), self.network.reset, a, b)

    def reset(self) -> None:
        """A connection breaks in the middle of its frames."""
        a, b = self.draw.sample(list(self.cluster.hosts), 2)
        own = self.network.nodes.get(a)
        if own is not None and b in own.up:
            self.network.reset(a, b)
            self.hits["N3.reset"] += 1

    def old_incarnation(self) -> None:
        for _ in range(20):
            if self.network.deliver_old():
                return

    def strangers(self) -> None:
        """Messages for groups that nobody has, of nodes that are no members, of replicas removed."""
        host = self.some()
        if host is None or host.system is None:
            return
        others = [number for number in self.cluster.hosts if number != host.number]
        node = self.draw.choice(others)
        unknown = Message(VOTE, self.draw.getrandbits(63) | 1, host.number, node, 1 << 40, 1 << 40, 1 << 40)
        self._say(host, node, unknown)
        self.hits["N5.unknown"] += 1
        for uid, member in list(host.system.members.items()):
            outsiders = [number for number in others if number not in member.raft.configuration.nodes()]
            if outsiders and not member.raft.stopped:
                term, node = member.raft.term, outsiders[0]
                for message in (
                    Message(VOTE, uid, host.number, node, term + 1, member.raft.log.last_index + 9, term),
                    Message(APPEND, uid, host.number, node, term, member.raft.log.last_index + 9, term),
                ):
                    self._say(host, node, message)
                self.hits["N5.removed"] += 1
                return

    def _say(self, host: Host, node: int, message: Message) -> None:
        """As if `node` had said it; what a host refuses costs the link, as on a real connection."""

        def hand() -> None:
            assert host.system is not None
            try:
                host.system.inbound.on_messages(node, [message])
            except LogyardError:
                self.network.reset(host.number, node)

        self.as_node(host.number, hand)

    # P, C: processes and clocks

    def kill(self) -> None:
        host = self.some()
        if host is not None:
            self.hits["P1.kill"] += 1
            self.down(host)

    def kill_all(self) -> None:
        """All at once."""
        for number in self.cluster.up:
            self.down(self.cluster.hosts[number])
        self.hits["G1.restart_all"] += 1

    def at_step(self) -> None:
        """A process dies at some step of its disk; and its successor in the middle of recovery."""
        host = self.some()
        if host is not None and host.life is not None:
            host.life.disk.crash_in = self.draw.randrange(40)
            for step in range(3):
                self.after(1.0 + step, self._again_at_step, host)

    def _again_at_step(self, host: Host) -> None:
        if host.life is None:
            self.revive(host, self.draw.randrange(30))
            life = host.life

            def look() -> None:
                if host.life is not life and not host.ready:
                    self.hits["P5.crash_in_recovery"] += 1

            self.loop.at(self.loop.now + 0.5, None, look)
            self.revive_later(host, 0.8)

    def writer_dies(self) -> None:
        host = self.some()
        if host is not None:
            host.faults.bug = "P2.wal_writer"
            self.revive_later(host, 2.0)

    def segment_writer_dies(self) -> None:
        host = self.some()
        if host is not None and host.life is not None:
            host.life.doomed = ("_write_in_thread", "P2.segment_writer")
            self._roll(host.number)
            self.revive_later(host, 2.0)

    def snapshot_writer_dies(self) -> None:
        host = self.some()
        if host is not None and host.life is not None:
            host.life.doomed = ("commit", "P2.snapshot_writer")
            self.ask(host.number, self.cluster.node(host.number).snapshot())
            self.revive_later(host, 2.0)

    def pause(self) -> None:
        host = self.some()
        if host is not None and host.life is not None:
            host.life.paused_until = self.loop.now + self.draw.choice((0.3, 2.0, 5.0))
            self.hits["P3.pause"] += 1

    def wall_jump(self) -> None:
        host = self.some()
        if host is not None and host.life is not None:
            host.wall_jump_ns = int(self.draw.uniform(-3600, 3600) * 1e9)
            host.life.wall_jump_ns = host.wall_jump_ns
            self.hits["C1.wall_jump"] += 1

    def drift(self) -> None:
        """The clock of the next process runs faster or slower."""
        host = self.some()
        if host is not None:
            host.drift = self.draw.uniform(0.7, 1.4)
            self.down(host, None, 0.3)
            self.hits["C1.drift"] += 1

    def freeze(self) -> None:
        """A process that stands still for a moment, as in a long collection."""
        host = self.some()
        if host is not None and host.life is not None:
            host.life.paused_until = self.loop.now + 1.7
            self.hits["C1.freeze"] += 1

    # D1 to D6: power and errors

    def power_cut(self) -> None:
        self._cut(0.0, 0.0, False)

    def torn(self) -> None:
        self._cut(self.draw.choice((0.2, 0.5, 0.9)), 1.0, False)

    def stale_tail(self) -> None:
        self._cut(0.5, 1.0, True)

    def lost_names(self) -> None:
        self._cut(1.0, 0.5, False)

    def _cut(self, chance: float, names: float, garbage: bool) -> None:
        """In the middle of a write, so that something is not synced: at a step of the disk."""
        host = self.some()
        if host is None or host.life is None:
            return
        disk = host.life.disk
        disk.crash_in = self.draw.randrange(1, 25)
        disk.crash_kind = "power"
        host.cut_next = (chance, names, garbage)
        self.revive_later(host, 2.0)

    def sync_error(self) -> None:
        self._error("sync", "D4.sync_EIO")

    def write_error(self) -> None:
        self._error("write", "D5.write_EIO")

    def _error(self, operation: str, kind: str) -> None:
        host = self.some()
        if host is not None:
            host.faults.errors[operation] = errno.EIO
            self.revive_later(host, 3.0)

    def short_writes(self) -> None:
        host = self.some()
        if host is not None:
            host.faults.short = 0.2

    def slow_disk(self) -> None:
        host = self.some()
        if host is not None and host.system is not None:
            host.faults.latency_s = self.draw.choice((0.01, 0.1, 0.7, 4.0))
            # It is felt to be slow at once: the first slow sync would not block anybody here.
            host.system.durability.pace_seconds = 0.004
            self.after(self.draw.uniform(1.0, 4.0), self._fast, host)

    def _fast(self, host: Host) -> None:
        host.faults.latency_s = 0.0

    def full(self) -> None:
        host = self.some()
        if host is not None:
            host.faults.quota = host.files.used() + self.draw.choice((0, 0, 50_000))
            self._roll(host.number)
            self.after(self.draw.uniform(0.5, 3.0), self._room, host)

    def _room(self, host: Host) -> None:
        host.faults.quota = -1

    # L, G, M: the engine's own work under way

    def _roll(self, number: int) -> None:
        system = self.cluster.system(number)
        if system is not None:

            async def roll() -> None:
                async with system.storage.janitor_lock:
                    await system.storage.roll()

            self.ask(number, roll())

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

        async def work() -> None:
            if kind.startswith("L2"):
                system = host.system
                assert system is not None
                await node.compact()
                system.store.seal_current()
                await system.store.rewrite_sparse(1.1, 0)
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
        if found is None:
            return
        group, number = found
        member = self.cluster.replica(number, group.name)
        assert member is not None
        self.membership = True
        voters = member.raft.configuration.voters
        spare = [one for one in self.cluster.hosts if one not in voters]
        node = self.cluster.node(number)
        if len(voters) > 2 and self.draw.random() < 0.5:
            self.ask(number, node.change_members(group.name, "remove", self.draw.choice(voters)), "M1.remove")
        elif spare:
            self.ask(number, node.change_members(group.name, "add", self.draw.choice(spare)), "M1.add")
        self.after(self.draw.uniform(0.3, 1.0), self._change_again)

    def _change_again(self) -> None:
        if self.draw.random() < 0.6:
            self.change_members()

    def truncate(self) -> None:
        """Not a fault: what is released dies."""
        found = self.leader()
        if found is not None:
            group, number = found
            if group.acked_end > group.start:
                before = self.draw.randint(group.start, group.acked_end)
                group.start = max(group.start, before)
                self.ask(number, self.cluster.node(number).truncate(group.name, before))

    def poison(self) -> None:
        """A command that the machine fails at: this group stops, the others go on."""
        found = self.leader()
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
                system.submit(group.uid, data, Nobody(), 0)
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
                if member is not None and member.halt is not None and member.raft.role == 3:
                    halt = member.halt
                    self.ask(number, self.cluster.node(number).skip(group.name, halt.index, halt.ordinal))

    def recreate(self) -> None:
        """A group is deleted and made again under its name while logs hold its entries."""
        found = self.leader()
        if found is None or found[0].poisoned or self.membership:
            return
        group, number = found
        group.created = False
        node = self.cluster.node(number)

        async def act() -> list[Any]:
            await node.delete_group(group.name)
            return []

        def done(result: Any, error: BaseException | None) -> None:
            if error is None:
                self.hits["G2.recreated"] += 1
            elif not isinstance(error, LogyardError):
                self.cluster.on_bug("deleting a group", error)
            group.recreate = True

        self.cluster.spawn(number, act(), "delete", done)

    # The end of a round

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
            faults.lost_write = faults.misdirect = False
            faults.quota = -1
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
                if member is None or not self.cluster.leads(number, group.name) or group.poisoned:
                    continue
                voters = member.raft.configuration.voters
                node = self.cluster.node(number)
                if member.raft.configuration.joint:
                    todo = True
                elif len(voters) < 3:
                    todo = True
                    spare = [one for one in self.cluster.hosts if one not in voters]
                    self.ask(number, node.change_members(group.name, "add", spare[0]))
                elif len(voters) > 3:
                    todo = True
                    other = next(one for one in voters if one != number)
                    self.ask(number, node.change_members(group.name, "remove", other))
        return todo

    # D12: another directory

    def wiped(self) -> None:
        """A node starts on an empty directory, and is refused; then it gets its own again."""
        self._other_files("D12.wiped", None)

    def old_copy(self) -> None:
        """A node starts on an old copy of its directory."""
        for number, files in sorted(self.old_files.items()):
            if self._is_known(number):
                self._other_files("D12.old_copy", (number, files))
                return
        host = self.some()
        if host is not None:
            self.cluster.crash(host.number)
            self.old_files[host.number] = deepcopy(host.files)
            self.revive_later(host, 0.3)
            self.after(2.5, self.old_copy)

    def _is_known(self, number: int) -> bool:
        """Whether every other node has met this process, and stored that: what nobody saw nobody can tell."""
        own = self.cluster.system(number)
        if own is None or len(self.cluster.up) < len(self.cluster.hosts):
            return False
        for other in self.cluster.up:
            known = self.cluster.system(other).acquaintances  # type: ignore[union-attr]
            if other != number and (
                number in known.fresh or number not in known.known or known.known[number].start != own.origin.start
            ):
                return False
        return True

    def _other_files(self, kind: str, other: tuple[int, FileSystem] | None) -> None:
        host = self.cluster.hosts[other[0]] if other is not None else self.some()
        if host is None or host.number in self.true_files or not self._is_known(host.number):
            return
        self.cluster.crash(host.number)
        self.true_files[host.number] = host.files
        host.files = other[1] if other is not None else FileSystem(host.files.prefix)
        self.old_files.pop(host.number, None)
        host.other = kind
        self.after(0.1, self.revive, host)
        self.after(3.0, self.give_back, host)

    def give_back(self, host: Host) -> None:
        """Its own directory again."""
        files = self.true_files.pop(host.number, None)
        if files is None:
            return
        if isinstance(host.failure, Outdated):
            self.hits[host.other] += 1
        self.cluster.crash(host.number)
        host.files = files
        host.other = ""
        self.revive(host)


def damaged(file: File, draw: random.Random, low: int, high: int, how: str) -> None:
    """Damage bytes low..high of a file, on the disk and in what is seen of it."""
    high = min(high, len(file.seen))
    if low >= high:
        return
    at = draw.randrange(low, high)
    for data in (file.seen, file.held):
        if how == "flip":
            data[at] ^= 1 << draw.randrange(8)
        else:
            end = min(high, at + 512)
            data[at:end] = bytes(end - at)
