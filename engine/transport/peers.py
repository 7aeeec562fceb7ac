"""The transport as its host sees it: one object, `send` once a turn, and a handler that is called back.

For each peer two lanes are dialled and two accepted. The link to a peer is *up* while all four stand; whatever was sent
while it was not up is lost, and so is what a full queue dropped: the handler learns of both by `on_link_down` and
`on_link_up`, and Raft probes. A damaged frame costs its connection and nothing else. Called by `engine.host`.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import trio

from logyard.protocol.errors import BadRequest, LogyardError, Outdated, WrongIdentity

from ..identity import Acquaintances, Origin, Vitals
from ..raft.messages import APPEND, LEADER_GONE, Message
from ..types import Buffer
from .codec import decode_messages, encode_messages
from .config import TransportConfig
from .frame import (
    BLOB,
    BULK,
    CONTROL,
    LANES,
    LIVENESS,
    MESSAGES,
    Header,
    Hello,
    decode_blob,
    decode_renewal,
    encode_blob,
    encode_renewal,
    parse_header,
)
from .handler import Handler, PeerStatus, no_peer, was_removed
from .link import Address, Guard, Link, Stream, dial, receive
from .listener import Listener
from .liveness import NO_VITALS, Liveness
from .proof import Exchange, Secret, answer, decode_challenge


def _alike(some: list[Message], others: list[Message]) -> bool:
    """Return whether the same frames say both: messages that share their list of entries differ in `to` only."""
    if len(some) != len(others):
        return False
    for one, other in zip(some, others, strict=True):
        if one.entries is not other.entries or not one.entries:
            return False
    return True


class _Peer:
    """Both directions of one pair."""

    __slots__ = ("node", "address", "links", "inbound", "up", "error", "scope", "called", "proved", "plain")

    def __init__(self, node: int, address: Address, config: TransportConfig, on_drained: Callable[[int], None]) -> None:
        self.node = node
        self.address = address
        self.links = (
            Link(CONTROL, config.control_queue_bytes, lambda: on_drained(node)),
            Link(BULK, config.bulk_queue_bytes, lambda: on_drained(node)),
        )
        self.inbound: list[trio.CancelScope | None] = [None, None]
        self.up = False
        self.error = ""
        # Set when the peer dials this node.
        self.called = trio.Event()
        # Whether it has proved itself: who does not after that is somebody else. Whether to dial it without proof next.
        self.proved = self.plain = False
        self.scope = trio.CancelScope()

    def refused(self, reason: str, plain: bool) -> None:
        """Note why it could not be dialled, and whether to do it without proof next."""
        self.error, self.plain = reason, plain

    def answered(self) -> None:
        """Note that it was dialled."""
        self.error = ""

    def met(self, proved: bool) -> None:
        """Note whether it proved itself."""
        self.proved = proved

    def set_up(self, up: bool) -> bool:
        """Note whether the link stands; return False when that is nothing new."""
        if up == self.up:
            return False
        self.up = up
        return True


class Peers:
    """All peers of this node.

    `addresses` holds this node's own listening address, too (port 0: the kernel chooses; see `address`). `epoch` is
    this node's, raised and made durable before every start; `origin` has it, too, and all else that tells lives of
    directories apart, `known` what is known of the others' (see `identity`). `vitals()` goes with each renewal.
    `healthy()` says whether the WAL's syncs complete: renewals are sent only then; `at_rest()` whether fewer of them
    will do. `digest(node)` goes with each renewal (see `Liveness.digest_of`). `live` is shared and changed in place.
    `guard` secures every connection (TLS); without it only loopback addresses are dialled and listened on, and `secret`
    is what both sides prove to know. The constructor does no I/O.
    """

    def __init__(
        self,
        node_id: int,
        cluster_id: str,
        epoch: int,
        addresses: Mapping[int, Address],
        config: TransportConfig,
        handler: Handler,
        *,
        healthy: Callable[[], bool] = lambda: True,
        at_rest: Callable[[], bool] = lambda: False,
        digest: Callable[[int], int] = lambda node: 0,
        draw: random.Random | None = None,
        guard: Guard | None = None,
        secret: Secret | None = None,
        origin: Origin | None = None,
        known: Acquaintances | None = None,
        vitals: Callable[[], Vitals] = lambda: NO_VITALS,
    ) -> None:
        self.node_id = node_id
        self.cluster_id = cluster_id
        self.epoch = epoch
        self.config = config
        self.liveness = Liveness(node_id, epoch, config)
        self.live = self.liveness.live
        self.origin = origin or Origin(0, epoch, 0, 0)
        assert self.origin.epoch == epoch
        self.known = known or Acquaintances()
        self._vitals = vitals
        self._handler = handler
        self._healthy = healthy
        self._at_rest = at_rest
        self._digest = digest
        self._draw = draw or random.Random()
        self._guard = guard
        self._secret = None if guard is not None else secret
        assert guard is not None or secret is not None, "nobody is believed without a proof"
        required = secret is not None and secret.required
        self._listener = Listener(
            addresses[node_id], config, self._admit, self._serve, guard, self._prove if secret else None, required
        )
        self._nursery: trio.Nursery | None = None
        self._peers: dict[int, _Peer] = {}
        self._removed: set[int] = set()
        for node, address in addresses.items():
            if node != node_id:
                self.add_peer(node, address)

    @property
    def nodes(self) -> frozenset[int]:
        """All peers, without this node."""
        return frozenset(self._peers)

    @property
    def address(self) -> Address:
        """Where this node listens; the real port once `run` has started."""
        return self._listener.address

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen, dial and renew until cancelled. `started` when the address is bound."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                await nursery.start(self._listener.run)
                for peer in self._peers.values():
                    self._start(peer)
                nursery.start_soon(self._renew)
                task_status.started()
                await trio.sleep_forever()
            finally:
                self._nursery = None

    def add_peer(self, node: int, address: Address) -> None:
        """Begin to dial and to accept `node`; a known node with a new address is dialled there."""
        assert node != self.node_id
        known = self._peers.get(node)
        if known is not None:
            if known.address == address:
                return
            self.remove_peer(node)
        self._removed.discard(node)
        self.liveness.add(node)
        peer = self._peers[node] = _Peer(node, address, self.config, self._on_drained)
        if self._nursery is not None:
            self._start(peer)

    def remove_peer(self, node: int) -> None:
        """Close every connection with `node`, refuse it from now on, and tell it so."""
        self._removed.add(node)
        peer = self._peers.pop(node, None)
        if peer is None:
            return
        peer.scope.cancel()
        for scope in peer.inbound:
            if scope is not None:
                scope.cancel()
        self._notify(self.liveness.remove(node))
        self._set_up(peer, False)

    def send(self, messages: Sequence[Message]) -> None:
        """Send a turn's messages of all groups; never waits. Call it once a turn.

        Appends, empty ones too, take the bulk lane, so that they keep their order; all else the control lane. A
        leader's farewell takes both: an APPEND, READ or MEND behind it would pass for word of a leader. Messages to
        unknown peers and to a link without room are dropped: an `on_link_up` will follow.
        """
        boxes: dict[int, list[Message]] = {}
        for message in messages:
            if message.kind == LEADER_GONE:
                boxes.setdefault(message.to * 2 + BULK, []).append(message)
            key = message.to * 2 + (message.kind == APPEND)
            box = boxes.get(key)
            if box is None:
                boxes[key] = [message]
            else:
                box.append(message)
        config = self.config
        frames: list[list[Buffer]] = []
        encoded: list[Message] = []
        for key, box in boxes.items():
            peer = self._peers.get(key >> 1)
            if peer is None:
                continue
            link = peer.links[key & 1]
            if not link.connected or link.lossy:
                # Not worth encoding.
                link.drop()
            else:
                if not _alike(box, encoded):
                    frames = list(encode_messages(box, config.frame_bytes if key & 1 else config.control_frame_bytes))
                    encoded = box
                for frame in frames:
                    link.send(frame)
            if link.lossy and any(message.kind == LEADER_GONE for message in box):
                # Only the other side can ask whether somebody leads: it has to see the reset, too.
                link.reset("a farewell found the bulk queue full")

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
        """Send one blob; return False when it was dropped (no link, no room). `control` is for small, urgent ones.

        `header` holds plain values (or is the msgpack of such a map), at most 8 MiB; header and body together stay
        below `frame_bytes_max` (`control_frame_bytes`). Raises `BadRequest` for what the other side would refuse to
        read: a header, or all of it, that is too large.
        """
        peer = self._peers.get(node)
        if peer is None:
            return False
        link = peer.links[CONTROL if control else BULK]
        frame = encode_blob(kind, request, header, body)
        parse_header(frame[0], link.lane, self.config)
        return link.send(frame)

    def epoch_of(self, node: int) -> int:
        """Return the highest epoch seen of a peer; 0 before the first."""
        return self.liveness.epoch_of(node)

    def vitals_of(self, node: int) -> Vitals:
        """Return what a peer's last renewal said of its disk."""
        return self.liveness.vitals_of(node)

    def forget(self, node: int) -> None:
        """Believe whoever comes next under this number, whatever its data directory; see `identity`."""
        peer = self._peers.get(node)
        self.known.forget(node)
        if peer is not None:
            self.remove_peer(node)
            self.add_peer(node, peer.address)

    def digest_of(self, node: int) -> int:
        """Return what a peer's last renewal said of the hibernating groups it leads with this node; 0 before the
        first."""
        return self.liveness.digest_of(node)

    def status(self) -> list[PeerStatus]:
        """Return all peers, by node."""
        found = []
        for node, peer in sorted(self._peers.items()):
            a, b = peer.links
            error = peer.error or a.error or b.error
            state = (node, peer.address, peer.up, node in self.live, self.liveness.epoch_of(node))
            sums = (a.queued + b.queued, a.dropped + b.dropped, a.sent_bytes + b.sent_bytes)
            vitals = self.liveness.vitals_of(node)
            outdated = self.known.outdated.get(node, "")
            found.append(PeerStatus(*state, *sums, error, outdated, vitals.sync_us, vitals.slow))
        return found

    # The dialled half.

    def _start(self, peer: _Peer) -> None:
        assert self._nursery is not None
        self._nursery.start_soon(self._keep_dialled, peer)

    async def _keep_dialled(self, peer: _Peer) -> None:
        with peer.scope:
            async with trio.open_nursery() as nursery:
                for link in peer.links:
                    nursery.start_soon(self._keep_lane, peer, link)

    async def _keep_lane(self, peer: _Peer, link: Link) -> None:
        config = self.config
        hello = self._hello(peer.node, link.lane)
        wait = config.backoff_min_ms
        while True:
            key = self._key(peer)
            try:
                stream, write = await dial(peer.address, hello, config, self._meet, self._guard, key)
            except (OSError, trio.TooSlowError, LogyardError) as error:
                # One of the first release refuses a challenge, any later one a hello without a proof.
                plain = isinstance(error, WrongIdentity) and bool(key)
                peer.refused(f"{LANES[link.lane]}: {str(error) or 'handshake timed out'}", plain)
                if isinstance(error, Outdated) and error.node == self.node_id:
                    self._handler.on_outdated(peer.node, error.reason)
                if isinstance(error, OSError) and error.errno == errno.ECONNREFUSED:
                    self._notify(self.liveness.on_refused(peer.node, trio.current_time()))
            else:
                peer.answered()
                self.liveness.on_connected(peer.node)
                begun = trio.current_time()
                await link.run(stream, write, lambda: self._refresh(peer))
                now = trio.current_time()
                self.liveness.on_lost(peer.node, now)
                self._refresh(peer)
                if now - begun >= config.stable_ms / 1000:
                    # A stable connection broke: look at once whether the process is still there.
                    wait = config.backoff_min_ms
                    continue
            with trio.move_on_after(wait / 1000 * self._draw.uniform(0.5, 1.0)) as pause:
                await peer.called.wait()
            # A peer that has just dialled this node is there: no reason to let it wait.
            wait = min(2 * wait, config.backoff_max_ms) if pause.cancelled_caught else config.backoff_min_ms

    def _key(self, peer: _Peer) -> bytes:
        """Return what to dial with; nothing where TLS proves, or where a peer may do without and seems to."""
        secret = self._secret
        return b"" if secret is None or (peer.plain and not peer.proved and not secret.required) else secret.key

    # The accepted half.

    def _prove(self, first: bytes) -> Exchange:
        """Answer a challenge. This node proves to be itself, and nobody else: the check comes first."""
        assert self._secret is not None
        theirs = decode_challenge(first)
        self._check(theirs.cluster, theirs.node, theirs.expected)
        return Exchange(self._secret.key, first, answer(self._secret.key, first, theirs), dialled=False)

    def _admit(self, theirs: Hello) -> Hello:
        self._check(theirs.cluster, theirs.node, theirs.expected)
        self._meet(theirs)
        return self._hello(theirs.node, theirs.lane)

    def _check(self, cluster: str, node: int, expected: int) -> None:
        """Raise `WrongIdentity` unless a peer of this node means this node."""
        if cluster != self.cluster_id or expected != self.node_id:
            raise WrongIdentity(
                f"this is node {self.node_id} of cluster {self.cluster_id!r}, not node {expected} of {cluster!r}"
            )
        if node not in self._peers:
            raise self._unknown(node)

    def _unknown(self, node: int) -> WrongIdentity:
        return WrongIdentity((was_removed if node in self._removed else no_peer)(node, self.node_id))

    def _hello(self, node: int, lane: int) -> Hello:
        directory, epoch, start, written = self.origin
        return Hello(self.cluster_id, self.node_id, node, epoch, lane, directory, start, written)

    def _meet(self, theirs: Hello) -> None:
        """Compare a peer's epoch and directory with what is known. Raises `Outdated` for one that went back, which a
        late word of a process that was replaced looks like, and `WrongIdentity`. What was said without a proof is kept
        no longer than until the peer proves itself, and is not stored."""
        node, peer = theirs.node, self._peers.get(theirs.node)
        if peer is None:
            # It was removed while it answered.
            raise self._unknown(node)
        first_proof = theirs.proved and not peer.proved
        if peer.proved and not theirs.proved:
            raise WrongIdentity(f"node {node} has proved itself before: who does not is somebody else")
        self.known.meet(node, theirs.origin, proved=theirs.proved)
        peer.met(theirs.proved)
        seen = self.liveness.epoch_of(node)
        if theirs.epoch < seen:
            if not theirs.proved:
                raise WrongIdentity(f"epoch {theirs.epoch} of node {node} is before {seen}")
            # Somebody else said the later one.
            self._notify(self.liveness.remove(node))
            self.liveness.add(node)
        if first_proof or theirs.epoch > seen:
            self._notify(self.liveness.on_epoch(node, theirs.epoch))
            for scope in peer.inbound:
                if scope is not None:
                    scope.cancel()
        if first_proof:
            for link in peer.links:
                link.reset("the peer proves itself elsewhere")

    async def _serve(self, theirs: Hello, stream: Stream) -> None:
        peer = self._peers.get(theirs.node)
        if peer is None or theirs.epoch != self.liveness.epoch_of(theirs.node):
            return
        lane = theirs.lane
        peer.called.set()
        peer.called = trio.Event()
        old = peer.inbound[lane]
        if old is not None:
            # The peer dialled again before this side noticed that the old connection ended.
            old.cancel()
            self._set_up(peer, False)
        with trio.CancelScope() as scope:
            peer.inbound[lane] = scope
            self._refresh(peer)
            try:
                await receive(stream, lane, self.config, partial(self._deliver, peer))
            except (OSError, LogyardError) as error:
                peer.error = f"{LANES[lane]}: {error}"
        if peer.inbound[lane] is scope:
            peer.inbound[lane] = None
            self._refresh(peer)

    def _deliver(self, peer: _Peer, header: Header, section: memoryview, body: memoryview) -> None:
        node = peer.node
        if header.type == MESSAGES:
            messages = decode_messages(section, body, node, self.node_id)
            self._call(self._handler.on_messages, node, messages)
        elif header.type == LIVENESS:
            renewal = decode_renewal(section)
            changed, answer = self.liveness.on_renewal(node, renewal, trio.current_time())
            self._notify(changed)
            if peer.proved and renewal.epoch == self.liveness.epoch_of(node):
                self.known.heard(node, renewal.written)
            if renewal.echo_epoch == self.epoch:
                self.known.answer()
            if answer:
                self._send_renewal(peer)
        elif header.type == BLOB:
            self._call(self._handler.on_blob, node, *decode_blob(section, body))
        else:
            raise BadRequest(f"a frame of type {header.type} after the handshake")

    def _call(self, method: Callable[..., None], *arguments: object) -> None:
        """Call the handler; an OSError of its own must not pass for one of the connection."""
        try:
            method(*arguments)
        except OSError as error:
            raise AssertionError(f"the transport's handler raised {error!r}") from error

    # What both halves add up to.

    def _refresh(self, peer: _Peer) -> None:
        up = all(link.connected for link in peer.links) and None not in peer.inbound
        self._set_up(peer, up and self._peers.get(peer.node) is peer)

    def _set_up(self, peer: _Peer, up: bool) -> None:
        if not peer.set_up(up):
            return
        if up:
            self._send_renewal(peer)
            self._handler.on_link_up(peer.node)
        else:
            self._handler.on_link_down(peer.node)

    def _on_drained(self, node: int) -> None:
        peer = self._peers.get(node)
        if peer is not None and peer.up:
            self._handler.on_link_down(node)
            self._handler.on_link_up(node)

    def _notify(self, changed: bool) -> None:
        if changed:
            self._handler.on_liveness(self.live)

    def _send_renewal(self, peer: _Peer) -> None:
        link = peer.links[CONTROL]
        if link.connected and self.liveness.counter and self._healthy():
            link.send([encode_renewal(self.liveness.renewal(peer.node, self._digest(peer.node), self._vitals()))])

    async def _renew(self) -> None:
        interval = self.config.liveness_interval_ms / 1000
        due = trio.current_time()
        intervals = 1
        while True:
            now = trio.current_time()
            self._notify(self.liveness.tick(now, intervals))
            intervals = self.liveness.rest_intervals if self._at_rest() else 1
            if self._healthy():
                self.liveness.advance(intervals)
                for peer in self._peers.values():
                    self._send_renewal(peer)
            due = max(due + interval, now)
            if intervals > 1:
                due = next_beat(now, intervals * interval)
            await trio.sleep_until(due)


def next_beat(now: float, period: float) -> float:
    """Return the next multiple of `period`. At rest a wake-up costs more than what it is for (some 200 us, as all
    caches are cold): timers with the same period share theirs."""
    return (now // period + 1) * period
