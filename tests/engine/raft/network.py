"""A group in memory: real cores, a toy disk for each that knows what is durable, and links that can be cut. No clock,
no task.

`Host` keeps the contract of `logyard.engine.raft` to the letter: what is not persisted is lost in a crash, `after`
waits for the disk.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

from logyard.engine.entry import COMMANDS, Entry, build_plain, plain_content
from logyard.engine.raft.core import LEADER, Configuration, Limits, Raft, RaftLog, Ready
from logyard.engine.raft.mending import Mend
from logyard.engine.raft.messages import (
    APPEND,
    APPEND_REPLY,
    DAMAGED,
    LEADER_GONE,
    MEND,
    MENDED,
    PREVOTE,
    PREVOTE_REPLY,
    READ,
    READ_REPLY,
    SNAPSHOT,
    TERMS,
    TERMS_REPLY,
    TIMEOUT_NOW,
    VOTE,
    VOTE_REPLY,
    Message,
    describe,
)

UID = 7
CARRIED = {
    PREVOTE: "index log_term context", PREVOTE_REPLY: "index context reject",
    VOTE: "index log_term context", VOTE_REPLY: "index reject",
    APPEND: "index log_term commit entries first last", APPEND_REPLY: "index log_term commit context reject last",
    SNAPSHOT: "index log_term commit",
    READ: "context", READ_REPLY: "context reject",
    TIMEOUT_NOW: "", LEADER_GONE: "",
    DAMAGED: "index log_term commit context last", MEND: "index commit context",
    TERMS: "index context", TERMS_REPLY: "index context reject",
}  # fmt: skip
"""What each kind of message says; everything else in it is empty."""


def encode(index: int, term: int, kind: int, content: bytes) -> Entry:
    return build_plain(index, term, kind, 0, content)


def command(index: int, term: int, content: bytes = b"") -> Entry:
    return build_plain(index, term, COMMANDS, 0, content)


def entries_of(*terms: int, first: int = 1) -> list[Entry]:
    """Entries first, first + 1, ... of the given terms."""
    return [command(first + at, term) for at, term in enumerate(terms)]


def make(
    node: int = 1,
    voters: Sequence[int] = (1, 2, 3),
    terms: Sequence[int] = (),
    *,
    learners: Sequence[int] = (),
    term: int | None = None,
    vote: int = 0,
    commit: int = 0,
    log: RaftLog | None = None,
    live: set[int] | None = None,
    limits: Limits | None = None,
    draw: Callable[[int], int] = lambda n: 0,
) -> Raft:
    """A core with the given log, everyone alive, and timeouts that are not random unless `draw` says so."""
    log = log or RaftLog(entries=entries_of(*terms))
    return Raft(
        UID,
        node,
        Configuration(tuple(voters), tuple(learners)),
        log,
        term=log.last_term if term is None else term,
        vote=vote,
        commit=commit,
        live={*voters, *learners, node} if live is None else live,
        draw=draw,
        encode=encode,
        limits=limits or Limits(),
    )


def check_message(message: Message) -> None:
    """A message says nothing that its kind does not."""
    for name in Message.__slots__[5:]:
        assert name in CARRIED[message.kind].split() or not getattr(message, name), (name, describe(message))
    if message.kind == APPEND_REPLY and not message.reject and message.context != MENDED:
        assert not message.log_term, describe(message)


def persist(raft: Raft, ready: Ready | None) -> list[Message]:
    """Make a Ready durable at once; all its messages, in order."""
    if ready is None:
        return []
    if ready.token is not None:
        raft.on_persisted(*ready.token)
    for message in (*ready.messages, *ready.after):
        check_message(message)
    return [*ready.messages, *ready.after]


def drain(raft: Raft) -> list[Message]:
    """Everything the core has to say, its disk being infinitely fast."""
    found: list[Message] = []
    while (ready := raft.ready()) is not None:
        found += persist(raft, ready)
    return found


class Disk:
    """What survives a crash of one member."""

    def __init__(self, configuration: Configuration) -> None:
        self.term = self.vote = 0
        self.snapshot: tuple[int, int, Configuration, list[bytes]] = (0, 0, configuration, [])
        self.entries: list[Entry] = []

    def write(self, ready: Ready) -> None:
        if ready.hard_state is not None:
            self.term, self.vote = ready.hard_state
        first = ready.truncated or (ready.entries[0].index if ready.entries else 0)
        if first:
            self.entries = [entry for entry in self.entries if entry.index < first]
        self.entries += ready.entries
        base = self.snapshot[0]
        self.entries = [entry for entry in self.entries if entry.index > base]
        assert [entry.index for entry in self.entries] == list(range(base + 1, base + 1 + len(self.entries)))


class Host:
    """One member: core, disk, and a machine that remembers the commands it applied."""

    def __init__(self, network: Network, node: int) -> None:
        self.network = network
        self.node = node
        self.live: set[int] = set()
        self.disk = Disk(network.configuration)
        self.unwritten: list[Ready] = []
        self.promise = (0, 0)
        self.damage: tuple[int, bool] | None = None
        self.reads: list[tuple[int, int]] = []
        self.failed_reads: list[int] = []
        self.start()

    def start(self) -> None:
        """(Re)start from what is durable."""
        index, term, configuration, state = self.disk.snapshot
        self.unwritten = []
        self.state = list(state)
        self.raft = Raft(
            UID,
            self.node,
            configuration,
            RaftLog(index, term, entries=self.disk.entries),
            term=self.disk.term,
            vote=self.disk.vote,
            live=self.live,
            draw=self.network.random.randrange,
            encode=encode,
            limits=self.network.limits,
            configuration_index=index,
            promise=self.promise,
            mend=Mend(*self.damage) if self.damage is not None else None,
        )

    def turn(self) -> None:
        """One Ready: send, apply, and put on the way to the disk."""
        ready = self.raft.ready()
        if self.raft.mend is None:
            self.damage = None
        if ready is None:
            return
        self.network.send(self, ready.messages)
        assert not ready.after or ready.hard_state is not None
        if ready.token is not None:
            self.unwritten.append(ready)
        else:
            assert not ready.after
            if ready.truncated:
                self.disk.write(ready)
        self.reads += ready.reads
        self.failed_reads += ready.failed_reads
        self.apply()

    def apply(self) -> None:
        raft = self.raft
        while raft.applied < raft.commit:
            entry = raft.log.entry(raft.applied + 1)
            assert entry is not None
            self.network.committed(self, entry)
            if entry.kind == COMMANDS:
                self.state.append(plain_content(entry))
            raft.on_applied(entry.index)

    def hurt(self, round_: int, keep: int, term: int | None = None, snapshot: bool = False) -> None:
        """The disk lost all entries above `keep`; with `term` also (term, vote), of which an older term is left;
        `snapshot`: everything else, too. Down, and not yet started again."""
        disk = self.disk
        if snapshot:
            disk.snapshot = (0, 0, self.network.configuration, [])
            disk.entries = []
        disk.entries = [entry for entry in disk.entries if entry.index <= keep]
        if term is not None:
            disk.term, disk.vote = term, 0
        lost = term is not None or (self.damage is not None and self.damage[1])
        self.damage = (round_, lost)

    def write(self, count: int = 1) -> None:
        """The oldest `count` writes become durable."""
        for _ in range(min(count, len(self.unwritten))):
            ready = self.unwritten.pop(0)
            self.disk.write(ready)
            assert ready.token is not None
            self.raft.on_persisted(*ready.token)
            self.network.send(self, ready.after)

    def take_snapshot(self) -> None:
        """A durable snapshot at the applied index; the log below goes."""
        raft = self.raft
        index = min(raft.applied, raft.log.stable)
        if index != raft.applied or index <= raft.log.snapshot_index:
            return
        term = raft.log.term(index)
        assert term is not None
        self.disk.snapshot = (index, term, raft.applied_configuration, list(self.state))
        self.disk.entries = [entry for entry in self.disk.entries if entry.index > index]
        raft.log.compact(index, term)

    def install(self, snapshot: tuple[int, int, Configuration, list[bytes]]) -> None:
        index, term, configuration, state = snapshot
        # A write that is under way stays ordered before the snapshot, as on one WAL.
        self.write(len(self.unwritten))
        before = self.raft.log.term(index)
        if self.raft.install_snapshot(index, term, configuration):
            self.state = list(state)
            self.disk.snapshot = snapshot
            kept = before == term
            self.disk.entries = [entry for entry in self.disk.entries if kept and entry.index > index]

    def propose(self, content: bytes = b"") -> int:
        raft = self.raft
        index = raft.log.last_index + 1
        raft.propose(command(index, raft.term, content))
        return index


class Network:
    """Hosts 1..n. `drain` runs everything to silence; the random tests call the parts themselves."""

    def __init__(
        self, count: int, *, voters: Iterable[int] | None = None, learners: Iterable[int] = (), seed: int = 1,
        limits: Limits | None = None,
    ) -> None:  # fmt: skip
        self.random = random.Random(seed)
        self.limits = limits or Limits()
        self.configuration = Configuration(tuple(voters or range(1, count + 1)), tuple(learners))
        self.queue: list[Message] = []
        self.cut: set[tuple[int, int]] = set()
        self.down: set[int] = set()
        self.log: dict[int, tuple[int, bytes]] = {}
        self.leaders: dict[int, int] = {}
        self.hosts = {node: Host(self, node) for node in range(1, count + 1)}
        self.heal()

    def __getitem__(self, node: int) -> Raft:
        return self.hosts[node].raft

    # ---- faults

    def heal(self) -> None:
        self.cut.clear()
        self.see()

    def isolate(self, *nodes: int) -> None:
        """Cut `nodes` off from all others, both ways."""
        for a in self.hosts:
            for b in self.hosts:
                if (a in nodes) != (b in nodes):
                    self.cut.add((a, b))
        self.see()

    def see(self) -> None:
        """Node-level liveness: who is up and reachable both ways. Links that changed are reset."""
        for host in self.hosts.values():
            if host.node in self.down:
                continue
            live = {
                other for other in self.hosts
                if other not in self.down and not {(host.node, other), (other, host.node)} & self.cut
            }  # fmt: skip
            changed = live ^ host.live
            if not changed:
                # A host hears of nothing then.
                continue
            host.live.clear()
            host.live.update(live)
            host.raft.on_liveness()
            for other in sorted(changed - {host.node}):
                host.raft.on_link_reset(other)

    def crash(self, node: int) -> None:
        """Lose what is not durable, and what is under way."""
        self.down.add(node)
        lost = [m for m in self.queue if node in (m.to, m.sender)]
        self.queue = [m for m in self.queue if node not in (m.to, m.sender)]
        for message in lost:
            self.lose(message)
        self.see()

    def restart(self, node: int) -> None:
        self.down.discard(node)
        self.hosts[node].live.clear()
        self.hosts[node].start()
        self.see()
        for other, host in self.hosts.items():
            if other != node and other not in self.down:
                host.raft.on_link_reset(node)

    # ---- motion

    def send(self, host: Host, messages: Sequence[Message]) -> None:
        for message in messages:
            assert message.sender == host.node
            check_message(message)
            self.queue.append(message)

    def deliver(self, message: Message) -> None:
        if message.to in self.down or message.sender in self.down or (message.sender, message.to) in self.cut:
            self.lose(message)
            return
        if message.kind == SNAPSHOT:
            self.transfer(message)
            return
        host = self.hosts[message.to]
        if message.kind == APPEND and message.entries is None and message.last >= message.first:
            raise AssertionError("no segments here")
        host.raft.step(message)
        host.raft.check()

    def lose(self, message: Message) -> None:
        """The message never arrives. A host notices when a transfer of a snapshot fails."""
        if message.kind == SNAPSHOT and message.sender not in self.down:
            self.hosts[message.sender].raft.snapshot_sent(message.to, message.index, False)

    def transfer(self, message: Message) -> None:
        source, target = self.hosts[message.sender], self.hosts[message.to]
        snapshot = source.disk.snapshot
        assert snapshot[0] >= message.index
        target.install(snapshot)
        source.raft.snapshot_sent(message.to, snapshot[0], True)

    def said(self, node: int) -> list[Message]:
        """What `node` has to say now, its disk being fast; taken off the network."""
        host = self.hosts[node]
        while host.raft.has_ready or host.unwritten:
            host.turn()
            host.write(len(host.unwritten))
        found = [message for message in self.queue if message.sender == node]
        self.queue = [message for message in self.queue if message.sender != node]
        return found

    def up(self) -> list[Host]:
        return [host for host in self.hosts.values() if host.node not in self.down]

    def drain(self) -> None:
        """Until nobody has anything to do, with fast disks."""
        for _ in range(10_000):
            for host in self.up():
                host.turn()
                host.write(len(host.unwritten))
                self.check_leader(host)
            if self.queue:
                batch, self.queue = self.queue, []
                for message in batch:
                    self.deliver(message)
            elif not any(host.raft.has_ready for host in self.up()):
                return
        raise AssertionError("the group never comes to rest")

    def tick(self, count: int = 1) -> None:
        """Tick whoever needs it, and run to silence after each."""
        for _ in range(count):
            for host in self.up():
                if not host.raft.is_quiet:
                    host.raft.tick()
            self.drain()

    def elect(self, node: int) -> Raft:
        raft = self[node]
        raft.campaign()
        self.drain()
        assert raft.role == LEADER, raft
        return raft

    def leader(self) -> Raft | None:
        """The leader of the highest term, if any."""
        found = [host.raft for host in self.up() if host.raft.role == LEADER]
        return max(found, key=lambda raft: raft.term, default=None)

    def states(self) -> list[list[bytes]]:
        return [host.state for host in self.up()]

    # ---- properties

    def committed(self, host: Host, entry: Entry) -> None:
        """State-machine safety: one entry an index, forever."""
        seen = self.log.setdefault(entry.index, (entry.term, entry.data))
        assert seen == (entry.term, entry.data), f"node {host.node} applied {entry}, others {seen[0]}"

    def check_leader(self, host: Host) -> None:
        """Election safety, and leader completeness."""
        raft = host.raft
        if raft.role != LEADER:
            return
        assert self.leaders.setdefault(raft.term, host.node) == host.node, f"two leaders in term {raft.term}"
        for index, (term, _) in self.log.items():
            if index > raft.log.snapshot_index:
                known = raft.log.term(index)
                assert known == term or term > raft.term, f"leader {raft} lacks committed {index}@{term}"

    def check_logs(self) -> None:
        """Log matching: equal index and term mean equal logs up to there."""
        logs = [host.raft.log for host in self.hosts.values()]
        for number, a in enumerate(logs):
            for b in logs[number + 1 :]:
                low = max(a.snapshot_index, b.snapshot_index)
                same = False
                for index in range(min(a.last_index, b.last_index), low, -1):
                    same = same or a.term(index) == b.term(index)
                    assert not same or a.term(index) == b.term(index), f"{a} and {b} differ below a match at {index}"
