"""The network between simulated nodes: the transport's in-memory twin with times, faults and a hash of it all.

Frames of a lane keep their order, as on TCP; what is lost ends in a reset of the link, once frames pass again. All go
through the real codec. On top of that, whole frames of messages may come twice or late, also from a link or a process
that is no more: the core has to bear that though TCP would not do it. Used by `cluster`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import xxhash

from logyard.engine.identity import Acquaintances, Origin, Vitals
from logyard.engine.raft.messages import Message
from logyard.engine.transport.codec import decode_messages
from logyard.engine.transport.config import TransportConfig
from logyard.engine.transport.frame import HEADER_BYTES, LIVENESS, MESSAGES, check_section, parse_header
from logyard.engine.transport.memory import Lane, MemoryNetwork, MemoryPeers
from logyard.protocol.errors import LogyardError

from .loop import Life, Loop, Timer

REDIAL_S = 0.08
KEPT = 64
KIND_AT = 5
"""Where in a frame its type is."""


class Weather:
    """What the network does to frames. Rates are chances a frame; `base_s` and `spread_s` make its delay."""

    def __init__(self) -> None:
        self.base_s = 0.0005
        self.spread_s = 0.001
        self.loss = 0.0
        self.replay = 0.0
        self.late = 0.0
        self.late_s = 0.0
        self.corrupt = 0.0
        # Links that stand still until then: (from, to) -> time.
        self.clogged: dict[tuple[int, int], float] = {}
        # Renewals do not pass, everything else does: (from, to).
        self.mute: set[tuple[int, int]] = set()


class SimPeers(MemoryPeers):
    """One process's end; `life` is whose."""

    life: Life

    def send(self, messages: Sequence[Message]) -> None:
        """As `Peers.send`, told to whoever checks it."""
        network: Any = self.network
        network.on_send(self.node_id, [message for message in messages if message.to in self.up])
        super().send(messages)


class SimNetwork(MemoryNetwork):
    """Carries frames as events of the loop."""

    def __init__(self, loop: Loop, config: TransportConfig, seed: int) -> None:
        super().__init__(config, seed=seed)
        self.loop = loop
        self.draw = random.Random(seed)
        self.weather = Weather()
        self.hits: Counter[str] = Counter()
        self.hash = xxhash.xxh3_64()
        self.frames = 0
        self.on_send: Callable[[int, Sequence[Message]], None] = lambda node, messages: None
        # What a partition is called that stands between two nodes.
        self.names: dict[tuple[int, int], str] = {}
        self._last: dict[Lane, float] = {}
        self._link: dict[tuple[int, int], int] = {}
        self._repairs: Timer | None = None
        self._old: list[tuple[int, int, bytes]] = []

    @property
    def now(self) -> float:
        """The clock of whoever asks."""
        life = self.loop.life
        return life.now() if life is not None else self.loop.now

    def enter(
        self, life: Life, handler: Any, peers: Iterable[int], healthy: Callable[[], bool], digest: Callable[[int], int],
        origin: Origin, known: Acquaintances, vitals: Callable[[], Vitals],
    ) -> SimPeers:  # fmt: skip
        """A process takes part."""
        own = SimPeers(self, life.node, handler, healthy, digest, known, vitals, origin)
        own.life = life
        self.nodes[life.node] = own
        for node in peers:
            own.add_peer(node)
        self.loop.at(self.loop.now, life, self._renew, own)
        return own

    def _renew(self, own: SimPeers) -> None:
        life = own.life
        self.loop.at(life.when(life.now() + self.config.liveness_interval_ms / 1000), life, self._renew, own)
        own.renew(life.now())
        for other in sorted(own.known - self.nodes.keys()):
            own.notify(own.liveness.on_refused(other, life.now()))

    # Links

    def connect(self) -> None:
        """Links come up a little later, as dials take their time."""
        self._repair_soon()

    def _repair_soon(self) -> None:
        if self._repairs is None or self._repairs.call is None:
            self._repairs = self.loop.at(self.loop.now + REDIAL_S * self.draw.uniform(0.2, 1.0), None, self._redial)

    def _redial(self) -> None:
        self._repairs = None
        for pair in sorted(self._broken):
            if pair in self._blocked or pair[::-1] in self._blocked:
                continue
            self._broken.discard(pair)
            self.disconnect(*pair)
        for a in self._running():
            for b in self._running():
                pair = (a.node_id, b.node_id)
                if pair[0] >= pair[1] or b.node_id in a.up or b.node_id not in a.known or a.node_id not in b.known:
                    continue
                if pair in self._blocked or pair[::-1] in self._blocked:
                    continue
                if self._as(a, self._meet, a, b) and self._as(b, self._meet, b, a):
                    self._bring_up(a, b)
        if self._broken:
            self._repair_soon()

    def _as(self, own: Any, call: Callable[..., Any], *arguments: Any) -> Any:
        """Within another event, as one node."""
        before, self.loop.life = self.loop.life, own.life
        try:
            return call(*arguments)
        finally:
            self.loop.life = before

    def _bring_up(self, a: Any, b: Any) -> None:
        self._link[a.node_id, b.node_id] = self._link.get((a.node_id, b.node_id), 0) + 1
        a.up.add(b.node_id)
        b.up.add(a.node_id)
        for own, other in ((a, b), (b, a)):
            self.loop.soon(own.life, self._told_up, own, other)

    def _told_up(self, own: Any, other: Any) -> None:
        known: Any = self.nodes.get(other.node_id)
        if other.node_id not in own.up or known is not other:
            return
        own.notify(own.liveness.on_epoch(other.node_id, other.epoch))
        own.liveness.on_connected(other.node_id)
        own.send_renewal(other.node_id)
        own.handler.on_link_up(other.node_id)

    def disconnect(self, a: int, b: int) -> None:
        """Take a link down; what is under way on it is lost."""
        pair = (min(a, b), max(a, b))
        self._link[pair] = self._link.get(pair, 0) + 1
        for node, other in ((a, b), (b, a)):
            own: Any = self.nodes.get(node)
            if own is not None and other in own.up:
                own.up.discard(other)
                self.loop.soon(own.life, own.handler.on_link_down, other)

    def leave(self, life: Life) -> None:
        """A process is gone; the others notice as a reset connection."""
        own: Any = self.nodes.get(life.node)
        if own is None or own.life is not life:
            return
        del self.nodes[life.node]
        other: Any
        for other in self._running():
            self.disconnect(other.node_id, life.node)
            self.loop.soon(other.life, self._lost, other, life.node)

    def _lost(self, own: Any, node: int) -> None:
        own.liveness.on_lost(node, own.life.now())

    def reset(self, a: int, b: int) -> None:
        """A connection breaks in the middle of whatever it carries."""
        self.disconnect(a, b)
        self._repair_soon()

    def cut(self, name: str, pairs: Iterable[tuple[int, int]]) -> None:
        """Nothing passes from the first to the second of each pair from now on."""
        for pair in pairs:
            self._blocked.add(pair)
            self.names[pair] = name

    def heal(self) -> None:
        """All of it ends, for good weather."""
        self._blocked.clear()
        self.names.clear()
        self.weather = Weather()
        for a in self._running():
            for b in self._running():
                if b.node_id in a.up and a.node_id not in b.up:
                    # Half open: the kernel would give it up by now.
                    self.disconnect(a.node_id, b.node_id)
        self._repair_soon()

    # Frames

    @property
    def delayed_until(self) -> float:
        """Until when frames are under way that were sent in bad weather: it may be over, and they are late."""
        return max(self._last.values(), default=0.0) - Weather().base_s - Weather().spread_s

    def carry(self, lane: Lane, data: bytes) -> None:
        """Take one frame."""
        weather, draw, loop = self.weather, self.draw, self.loop
        pair = lane[:2]
        if self._blocked and pair in self._blocked:
            self.hits[f"N2.{self.names.get(pair, 'cut')}"] += 1
            self._lose(pair)
            return
        if weather.loss and draw.random() < weather.loss:
            self.hits["N1.loss"] += 1
            self._lose(pair)
            return
        if weather.mute and pair in weather.mute and data[KIND_AT] == LIVENESS:
            self.hits["N6.mute"] += 1
            return
        delay = weather.base_s + weather.spread_s * draw.random()
        if weather.late and draw.random() < weather.late:
            self.hits["N1.delay"] += 1
            delay += weather.late_s * draw.random()
        when = loop.now + delay
        if weather.clogged:
            until = weather.clogged.get(pair, 0.0)
            if until > when:
                self.hits["N3.clog"] += 1
                when = until
        last = self._last.get(lane, 0.0)
        if last > when:
            when = last
        self._last[lane] = when
        link = self._link.get((min(pair), max(pair)), 0)
        if weather.corrupt and draw.random() < weather.corrupt:
            loop.at(when, None, self._arrive, lane, self._damage(data), link, True)
        else:
            loop.at(when, None, self._arrive, lane, data, link)
        if weather.replay and data[4:5] and draw.random() < weather.replay:
            loop.at(when + draw.random() ** 3 * 5.0, None, self._again, pair, data)
        if draw.random() < 0.02:
            self._old.append((*pair, data))
            if len(self._old) > KEPT:
                self._old.pop(draw.randrange(KEPT // 2))

    def _lose(self, pair: tuple[int, int]) -> None:
        self.lost += 1
        self._broken.add((min(pair), max(pair)))
        self._repair_soon()

    def _damage(self, data: bytes) -> bytes:
        """A bit flipped, an end cut off, noise, or a length that promises far too much."""
        kind = self.draw.choice(("bit_flip", "truncation", "garbage", "oversized"))
        self.hits[f"N4.{kind}"] += 1
        if kind == "bit_flip":
            at = self.draw.randrange(len(data) * 8)
            changed = bytearray(data)
            changed[at // 8] ^= 1 << at % 8
            return bytes(changed)
        if kind == "truncation":
            return data[: self.draw.randrange(len(data))]
        if kind == "garbage":
            return self.draw.randbytes(len(data))
        changed = bytearray(data)
        at = self.draw.randrange(4, max(5, HEADER_BYTES - 4))
        changed[at : at + 4] = b"\xff\xff\xff\x7f"
        return bytes(changed)

    def _arrive(self, lane: Lane, data: bytes, link: int, damaged: bool = False) -> None:
        a, b, number = lane
        node: Any = self.nodes.get(b)
        if node is None or a not in node.up or self._link.get((min(a, b), max(a, b)), 0) != link:
            return
        life = node.life
        if life.paused_until > self.loop.now:
            self.loop.at(life.paused_until, None, self._arrive, lane, data, link, damaged)
            return
        self.frames += 1
        self.hash.update(data)
        self.loop.perform(life, self._receive, (node, a, number, data, damaged))

    def _receive(self, node: Any, sender: int, lane: int, data: bytes, damaged: bool) -> None:
        try:
            # A stream would wait for more, or take what comes next for the rest: both end in a reset.
            whole = not damaged or (
                len(data) >= HEADER_BYTES and len(data) == parse_header(data[:HEADER_BYTES], lane, self.config).total
            )
            if not whole:
                raise LogyardError("the frame is cut")
            node.receive(sender, lane, data)
        except LogyardError:
            # As on a real connection: what the handler refuses costs the link.
            self._broken.add((min(sender, node.node_id), max(sender, node.node_id)))
            self._repair_soon()

    def _again(self, pair: tuple[int, int], data: bytes) -> None:
        """The messages of a frame come again, whatever became of link and sender."""
        node: Any = self.nodes.get(pair[1])
        if node is None or node.life.paused_until > self.loop.now or len(data) < HEADER_BYTES:
            return
        try:
            header = parse_header(data[:HEADER_BYTES], 0, self.config)
        except LogyardError:
            try:
                header = parse_header(data[:HEADER_BYTES], 1, self.config)
            except LogyardError:
                return
        if header.type != MESSAGES or len(data) != header.total:
            return
        self.hash.update(data)
        self.loop.perform(node.life, self._hand_again, (node, pair[0], data, header))

    def _hand_again(self, node: Any, sender: int, data: bytes, header: Any) -> None:
        view = memoryview(data)
        section, body = view[HEADER_BYTES : HEADER_BYTES + header.section], view[HEADER_BYTES + header.section :]
        try:
            check_section(header, section)
            node.handler.on_messages(sender, decode_messages(section, body, sender, node.node_id))
        except LogyardError:
            return
        self.hits["N1.replay"] += 1

    def recall(self) -> tuple[int, int, bytes] | None:
        """A frame of long ago: of an older link, an older process, or a group that is no more."""
        return self.draw.choice(self._old) if self._old else None

    def deliver_old(self) -> bool:
        """Let one of them come again; whether there was one."""
        old = self.recall()
        if old is None:
            return False
        before = self.hits["N1.replay"]
        self._again(old[:2], old[2])
        hit = self.hits["N1.replay"] > before
        if hit:
            self.hits["N1.replay"] -= 1
            self.hits["N5.old_incarnation"] += 1
        return hit
