"""The transport's in-memory twin: API and callbacks of `peers.Peers`, without sockets and with faults on order.

Every message goes through the real codec, renewals through the real state machine of `liveness`: what a test sees is
what the wire would carry. Nothing happens by itself: `MemoryNetwork.step` moves the virtual clock and delivers, in an
order that depends on the calls and the seed alone; `MemoryNetwork.run` does so in a trio task. Shipped for users.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import trio

from logyard.protocol.errors import LogyardError, Outdated

from ..identity import Acquaintances, Origin, Vitals
from ..raft.messages import APPEND, LEADER_GONE, Message
from ..types import Buffer
from .codec import decode_messages, encode_messages
from .config import TransportConfig
from .frame import (
    BLOB,
    BULK,
    CONTROL,
    HEADER_BYTES,
    LIVENESS,
    MESSAGES,
    check_section,
    decode_blob,
    decode_renewal,
    encode_blob,
    encode_renewal,
    parse_header,
)
from .handler import Handler, PeerStatus
from .link import Address
from .liveness import NO_VITALS, Liveness

Lane = tuple[int, int, int]


class MemoryPeers:
    """One node's end; made by `MemoryNetwork.join`. The public methods are those of `Peers`."""

    def __init__(
        self,
        network: MemoryNetwork,
        node_id: int,
        handler: Handler,
        healthy: Callable[[], bool],
        digest: Callable[[int], int],
        known: Acquaintances,
        vitals: Callable[[], Vitals],
        origin: Origin,
    ) -> None:
        self.network = network
        self.node_id = node_id
        self.epoch = origin.epoch
        self.origin = origin
        self.known_origins = known
        self.config = network.config
        self.liveness = Liveness(node_id, self.epoch, network.config)
        self.live = self.liveness.live
        self.address: Address = ("memory", node_id)
        self.handler = handler
        self.known: set[int] = set()
        self.up: set[int] = set()
        self.dropped = 0
        self.sent_bytes = 0
        self._healthy = healthy
        self._digest = digest
        self._vitals = vitals

    @property
    def nodes(self) -> frozenset[int]:
        """All peers, without this node."""
        return frozenset(self.known)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Take part until cancelled; then the node has crashed. `MemoryNetwork.run` delivers."""
        task_status.started()
        try:
            await trio.sleep_forever()
        finally:
            if self.network.nodes.get(self.node_id) is self:
                self.network.crash(self.node_id)

    def add_peer(self, node: int, address: Address = ("memory", 0)) -> None:
        """Accept `node`; the link stands once both sides know each other."""
        self.liveness.add(node)
        self.known.add(node)
        self.network.connect()

    def remove_peer(self, node: int) -> None:
        """Refuse `node` from now on."""
        self.known.discard(node)
        self.network.disconnect(self.node_id, node)
        self.notify(self.liveness.remove(node))

    def send(self, messages: Sequence[Message]) -> None:
        """Send as `Peers.send` does."""
        boxes: dict[tuple[int, int], list[Message]] = {}
        for message in messages:
            if message.kind == LEADER_GONE:
                boxes.setdefault((message.to, BULK), []).append(message)
            lane = BULK if message.kind == APPEND else CONTROL
            boxes.setdefault((message.to, lane), []).append(message)
        for (node, lane), box in boxes.items():
            limit = self.config.frame_bytes if lane else self.config.control_frame_bytes
            for frame in encode_messages(box, limit):
                self._send(node, lane, frame)

    def send_blob(
        self,
        node: int,
        kind: int,
        request: int,
        header: Mapping[str, Any] | bytes,
        body: Buffer | Sequence[Buffer] = (),
        *,
        control: bool = False,
    ) -> bool:
        """Send as `Peers.send_blob` does."""
        lane = CONTROL if control else BULK
        frame = encode_blob(kind, request, header, body)
        parse_header(frame[0], lane, self.config)
        return self._send(node, lane, frame)

    def epoch_of(self, node: int) -> int:
        """Return the highest epoch seen of a peer; 0 before the first."""
        return self.liveness.epoch_of(node)

    def vitals_of(self, node: int) -> Vitals:
        """Return what a peer's last renewal said of its disk."""
        return self.liveness.vitals_of(node)

    def forget(self, node: int) -> None:
        """Forget as `Peers.forget` does."""
        self.known_origins.forget(node)
        if node in self.known:
            self.remove_peer(node)
            self.add_peer(node)

    def digest_of(self, node: int) -> int:
        """Return what a peer's last renewal said of the hibernating groups it leads with this node; 0 before the
        first."""
        return self.liveness.digest_of(node)

    def status(self) -> list[PeerStatus]:
        """Return what `Peers.status` does; the drops and bytes are those of all peers."""
        return [
            PeerStatus(
                node, ("memory", node), node in self.up, node in self.live, self.liveness.epoch_of(node),
                0, self.dropped, self.sent_bytes, "", self.known_origins.outdated.get(node, ""),
                self.vitals_of(node).sync_us, self.vitals_of(node).slow,
            )
            for node in sorted(self.known)
        ]  # fmt: skip

    def renew(self, now: float) -> None:
        """Count one interval of liveness."""
        self.notify(self.liveness.tick(now))
        if self._healthy():
            self.liveness.advance()
            for node in sorted(self.up):
                self.send_renewal(node)

    def send_renewal(self, node: int) -> None:
        """Tell `node` that this one lives."""
        if self.liveness.counter and self._healthy():
            renewal = self.liveness.renewal(node, self._digest(node), self._vitals())
            self._send(node, CONTROL, [encode_renewal(renewal)])

    def notify(self, changed: bool) -> None:
        """Tell the handler of a changed live set."""
        if changed:
            self.handler.on_liveness(self.live)

    def _send(self, node: int, lane: int, frame: Sequence[Buffer]) -> bool:
        if node not in self.up:
            self.dropped += 1
            return False
        data = b"".join(frame)
        self.sent_bytes += len(data)
        self.network.carry((self.node_id, node, lane), data)
        return True

    def receive(self, node: int, lane: int, data: bytes) -> None:
        """Take one frame from `node`, as the wire would bring it."""
        header = parse_header(data[:HEADER_BYTES], lane, self.config)
        assert len(data) == header.total, "a frame is as long as its header says"
        view = memoryview(data)
        section, body = view[HEADER_BYTES : HEADER_BYTES + header.section], view[HEADER_BYTES + header.section :]
        check_section(header, section)
        if header.type == MESSAGES:
            self.handler.on_messages(node, decode_messages(section, body, node, self.node_id))
        elif header.type == BLOB:
            self.handler.on_blob(node, *decode_blob(section, body))
        else:
            assert header.type == LIVENESS
            renewal = decode_renewal(section)
            changed, answer = self.liveness.on_renewal(node, renewal, self.network.now)
            self.notify(changed)
            if renewal.epoch == self.liveness.epoch_of(node):
                self.known_origins.heard(node, renewal.written)
            if renewal.echo_epoch == self.epoch:
                self.known_origins.answer()
            if answer:
                self.send_renewal(node)


class MemoryNetwork:
    """Connects nodes in one process. One step is `step_ms` of virtual time; a frame without delay arrives in the next.

    Frames of one lane keep their order, as on TCP. What a fault loses ends, as there, in a reset: `on_link_down` and
    `on_link_up` on both sides once frames pass again.
    """

    def __init__(self, config: TransportConfig | None = None, *, seed: int = 0, step_ms: int = 10) -> None:
        self.config = config or TransportConfig()
        self.nodes: dict[int, MemoryPeers] = {}
        self.steps = 0
        self.lost = 0
        self._step_ms = step_ms
        self._draw = random.Random(seed)
        self._rate = 0.0
        self._lanes: dict[Lane, deque[tuple[int, bytes]]] = {}
        self._delays: dict[tuple[int, int], int] = {}
        self._blocked: set[tuple[int, int]] = set()
        self._broken: set[tuple[int, int]] = set()
        self._epochs: dict[int, int] = {}
        self._traffic = trio.Event()

    @property
    def now(self) -> float:
        """The virtual time in seconds."""
        return self.steps * self._step_ms / 1000

    def join(
        self,
        node_id: int,
        handler: Handler,
        *,
        peers: Iterable[int] | None = None,
        healthy: Callable[[], bool] = lambda: True,
        digest: Callable[[int], int] = lambda node: 0,
        origin: Origin | None = None,
        known: Acquaintances | None = None,
        vitals: Callable[[], Vitals] = lambda: NO_VITALS,
    ) -> MemoryPeers:
        """Start a node; after a crash, with the next epoch, unless `origin` has one. `peers` None: it and all others
        know each other."""
        assert node_id not in self.nodes, f"node {node_id} is running"
        self._epochs[node_id] = self._epochs.get(node_id, 0) + 1
        origin = origin or Origin(0, self._epochs[node_id], 0, 0)
        own = MemoryPeers(self, node_id, handler, healthy, digest, known or Acquaintances(), vitals, origin)
        everyone = list(self.nodes.values()) if peers is None else []
        self.nodes[node_id] = own
        for node in [other.node_id for other in everyone] if peers is None else peers:
            own.add_peer(node)
        for other in everyone:
            other.add_peer(node_id)
        self.connect()
        return own

    def crash(self, node: int) -> None:
        """End a node as kill -9 would: what it sent may still arrive or not (here: not); redials are refused."""
        del self.nodes[node]
        for other in self._running():
            self.disconnect(other.node_id, node)
            other.liveness.on_lost(node, self.now)

    def partition(self, some: Iterable[int], others: Iterable[int], *, one_way: bool = False) -> None:
        """Lose what goes from `some` to `others` silently, and back unless `one_way`."""
        others = list(others)
        for a in some:
            for b in others:
                self._blocked.add((a, b))
                if not one_way:
                    self._blocked.add((b, a))

    def heal(self) -> None:
        """End all partitions, drops and delays."""
        self._blocked.clear()
        self._delays.clear()
        self._rate = 0.0

    def drop(self, rate: float) -> None:
        """Lose each frame with this probability."""
        self._rate = rate

    def delay(self, a: int, b: int, steps: int) -> None:
        """Delay frames from `a` to `b` that are sent from now on by `steps` more."""
        self._delays[a, b] = steps

    def carry(self, lane: Lane, data: bytes) -> None:
        """Take one frame (called by `MemoryPeers`)."""
        pair = lane[:2]
        if pair in self._blocked or (self._rate and self._draw.random() < self._rate):
            self.lost += 1
            self._broken.add((min(pair), max(pair)))
            return
        queue = self._lanes.setdefault(lane, deque())
        due = self.steps + self._delays.get(pair, 0)
        queue.append((max(due, queue[-1][0]) if queue else due, data))
        self._traffic.set()

    def step(self, count: int = 1) -> None:
        """Move the clock by `count` steps and deliver what is due in each."""
        for _ in range(count):
            self.steps += 1
            before = (self.steps - 1) * self._step_ms // self.config.liveness_interval_ms
            if self.steps * self._step_ms // self.config.liveness_interval_ms > before:
                for node in self._running():
                    node.renew(self.now)
            for node in self._running():
                for other in sorted(node.known - self.nodes.keys()):
                    node.notify(node.liveness.on_refused(other, self.now))
            self.deliver()

    def deliver(self) -> int:
        """Deliver what is due now, without moving the clock; frames sent meanwhile wait for the next call."""
        self._repair()
        due: list[tuple[Lane, bytes]] = []
        for lane in sorted(self._lanes):
            queue = self._lanes[lane]
            while queue and queue[0][0] <= self.steps:
                due.append((lane, queue.popleft()[1]))
        for (a, b, lane_of), data in due:
            node = self.nodes.get(b)
            if node is not None and a in node.up:
                try:
                    node.receive(a, lane_of, data)
                except LogyardError:
                    # As on a real connection: what the handler refuses costs the link.
                    self._broken.add((min(a, b), max(a, b)))
        return len(due)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Step in real (or trio's mock) time until cancelled, and deliver at once what has no delay."""
        task_status.started()
        due = trio.current_time()
        while True:
            due = max(due + self._step_ms / 1000, trio.current_time())
            with trio.move_on_at(due):
                while True:
                    await self._traffic.wait()
                    self._traffic = trio.Event()
                    await trio.lowlevel.checkpoint()
                    while self.deliver():
                        await trio.lowlevel.checkpoint()
            self.step()

    def connect(self) -> None:
        """Bring up every link whose two sides run and know each other."""
        for a in self._running():
            for b in self._running():
                meet = a.node_id < b.node_id and b.node_id in a.known and a.node_id in b.known
                # Both look, as on the wire, where each dials the other.
                if meet and b.node_id not in a.up and self._meet(a, b) & self._meet(b, a):
                    self._up(a, b)

    def _meet(self, own: MemoryPeers, other: MemoryPeers) -> bool:
        try:
            own.known_origins.meet(other.node_id, other.origin)
        except Outdated as error:
            if not {(own.node_id, other.node_id), (other.node_id, own.node_id)} & self._blocked:
                other.handler.on_outdated(own.node_id, error.reason)
            return False
        return True

    def disconnect(self, a: int, b: int) -> None:
        """Take a link down; what is under way on it is lost."""
        for lane in [lane for lane in self._lanes if set(lane[:2]) == {a, b}]:
            del self._lanes[lane]
        for node, other in ((a, b), (b, a)):
            own = self.nodes.get(node)
            if own is not None and other in own.up:
                own.up.discard(other)
                own.handler.on_link_down(other)

    def _running(self) -> list[MemoryPeers]:
        return [self.nodes[node] for node in sorted(self.nodes)]

    def _up(self, a: MemoryPeers, b: MemoryPeers) -> None:
        a.up.add(b.node_id)
        b.up.add(a.node_id)
        for own, other in ((a, b), (b, a)):
            own.notify(own.liveness.on_epoch(other.node_id, other.epoch))
            own.liveness.on_connected(other.node_id)
        for own, other in ((a, b), (b, a)):
            own.send_renewal(other.node_id)
            own.handler.on_link_up(other.node_id)

    def _repair(self) -> None:
        """Reset the links that lost something, as soon as frames pass both ways."""
        for a, b in sorted(self._broken):
            if (a, b) in self._blocked or (b, a) in self._blocked:
                continue
            self._broken.discard((a, b))
            self.disconnect(a, b)
        self.connect()
