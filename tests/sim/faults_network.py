"""N1 to N5: what a network does. Partitions end by themselves within the round."""

from __future__ import annotations

from typing import Any

from logyard.engine.raft.messages import APPEND, VOTE, Message
from logyard.engine.replica.sessions import EXPIRE
from logyard.protocol.errors import LogyardError

from .cluster import Host
from .ground import Ground


class NetworkFaults(Ground):
    """Each verb brings one about."""

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
        far = [
            (a, b) for i, a in enumerate(nodes) for j, b in enumerate(nodes) if (i - j) % count not in (0, 1, count - 1)
        ]
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

    def ring_tail(self) -> None:
        """A leader that is cut off writes what no quorum has, without payload, to its ring: others overwrite it."""
        found = self.leader()
        if found is None:
            return
        group, number = found
        self._split("isolate", [number])
        for step in range(self.draw.randrange(3, 12)):
            self.after(0.02 * step, self._own_command, number, group)
        self.after(0.4, self._roll, number)

    def _own_command(self, number: int, group: Any) -> None:
        system, member = self.cluster.system(number), self.cluster.replica(number, group.name)
        if system is not None and member is not None and self.cluster.leads(number, group.name):
            # The end of a session that nobody has.
            self.as_node(number, system.replicas.commands.queue_own, member, EXPIRE, 1)
            self.hits["R1.ring_tail"] += 1

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
        own: Any = self.network.nodes.get(a)
        if own is not None and b in own.up:
            own.up.discard(b)
            self.loop.soon(own.life, own.handler.on_link_down, b)
            self.hits["N3.half_open"] += 1
            self.after(self.draw.uniform(0.2, 1.5), self.network.reset, a, b)

    def reset(self) -> None:
        """A connection breaks in the middle of its frames."""
        a, b = self.draw.sample(list(self.cluster.hosts), 2)
        own: Any = self.network.nodes.get(a)
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
                host.system.host.inbound.on_messages(node, [message])
            except LogyardError:
                self.network.reset(host.number, node)

        self.as_node(host.number, hand)
