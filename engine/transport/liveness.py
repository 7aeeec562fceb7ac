"""Which nodes are alive, per pair of nodes and never per group (law 10): a pure state machine with the time injected.

Each node sends each peer a renewal an interval: its own counter, and the peer's counter as it last saw it. A renewal
counts only if it echoes a recent counter of the receiver, so a link that works one way only is dead on both sides; a
restarted node (a higher epoch) is dead once before it is alive, so that groups it led notice. What this decides is when
to campaign or to wake, never a commit or a read. Driven by `peers` and `memory`.
"""

from __future__ import annotations

from ..identity import Vitals
from .config import TransportConfig
from .frame import SYNC_US_MAX, Renewal

REST_INTERVALS_MAX = 2
"""Two renewals in a row may be lost, as far as a timeout of six intervals goes."""
ANSWER_SECONDS = 0.01
"""At most one renewal out of turn in this time: it makes a new link count within a round trip, not an interval."""


NO_VITALS = Vitals()


class _Peer:
    """What is known of one other node. Times are seconds of the injected clock."""

    __slots__ = ("epoch", "counter", "digest", "vitals", "counted", "suspected", "refused", "answered")

    def __init__(self) -> None:
        self.epoch = 0
        self.counter = 0
        self.digest = 0
        self.vitals = NO_VITALS
        self.counted = 0.0
        self.suspected: float | None = None
        self.refused = False
        self.answered = -1.0

    def excuse(self, pause: float) -> None:
        """Leave a pause of this node's own out of the silence of the other."""
        self.counted += pause
        if self.suspected is not None:
            self.suspected += pause


class Liveness:
    """The node ids held alive, in the shared set `live` (changed in place; it always holds this node).

    Methods that may change the set return whether they did: the caller then tells its handler. What comes late for a
    peer that was removed is ignored.
    """

    __slots__ = (
        "node", "epoch", "live", "counter", "_peers", "_interval", "_timeout", "_refused", "_recent", "_ticked",
    )  # fmt: skip

    def __init__(self, node: int, epoch: int, config: TransportConfig, live: set[int] | None = None) -> None:
        self.node = node
        self.epoch = epoch
        self.live = set() if live is None else live
        self.live.add(node)
        self.counter = 0
        self._peers: dict[int, _Peer] = {}
        self._interval = config.liveness_interval_ms / 1000
        self._timeout = config.liveness_timeout_ms / 1000
        self._refused = config.refused_timeout_ms / 1000
        self._recent = config.liveness_timeout_ms // config.liveness_interval_ms
        self._ticked: float | None = None

    def add(self, node: int) -> None:
        """Add a new peer; dead until it renews."""
        assert node != self.node
        self._peers.setdefault(node, _Peer())

    def remove(self, node: int) -> bool:
        """Forget a peer."""
        self._peers.pop(node, None)
        return self._dead(node)

    def epoch_of(self, node: int) -> int:
        """Return the highest epoch seen of a peer; 0 before the first."""
        peer = self._peers.get(node)
        return peer.epoch if peer is not None else 0

    def digest_of(self, node: int) -> int:
        """Return what a peer's last renewal said of the hibernating groups it leads with this node."""
        peer = self._peers.get(node)
        return peer.digest if peer is not None else 0

    def vitals_of(self, node: int) -> Vitals:
        """Return what a peer's last renewal said of its disk."""
        peer = self._peers.get(node)
        return peer.vitals if peer is not None else NO_VITALS

    @property
    def rest_intervals(self) -> int:
        """How many intervals may lie between two renewals of a node at rest, as a death must not be noticed later: so
        many that a timeout has three of them, and one while a peer is suspect."""
        if any(peer.suspected is not None and node in self.live for node, peer in self._peers.items()):
            return 1
        return max(1, min(REST_INTERVALS_MAX, round(self._timeout / self._interval) // 3))

    def advance(self, intervals: int = 1) -> None:
        """Start the next round of renewals, the one after it comes in `intervals`: the counter tells time. Only while
        this node may renew at all: an unhealthy node's counter stands still, so that its own silence does not make the
        others look silent, too."""
        self.counter += intervals

    def renewal(self, node: int, digest: int = 0, vitals: Vitals = NO_VITALS) -> Renewal:
        """Return what to tell `node` now."""
        peer = self._peers[node]
        written, sync_us, slow = vitals
        return Renewal(
            self.epoch, self.counter, peer.epoch, peer.counter, digest, written, min(sync_us, SYNC_US_MAX), int(slow)
        )

    def on_epoch(self, node: int, epoch: int) -> bool:
        """Return whether the process restarted: a connection was accepted or opened whose epoch is higher than
        before."""
        peer = self._peers.get(node)
        if peer is None:
            return False
        assert epoch >= peer.epoch, "stale epochs are refused by the handshake"
        if epoch == peer.epoch:
            return False
        peer.epoch, peer.counter, peer.digest, peer.vitals = epoch, 0, 0, NO_VITALS
        return self._dead(node)

    def on_renewal(self, node: int, renewal: Renewal, now: float) -> tuple[bool, bool]:
        """Take a renewal that arrived; return (live changed, answer it out of turn)."""
        peer = self._peers.get(node)
        if peer is None or renewal.epoch != peer.epoch:
            return False, False
        if renewal.counter > peer.counter:
            peer.counter = renewal.counter
        peer.digest = renewal.digest
        peer.vitals = Vitals(renewal.written, renewal.sync_us, bool(renewal.slow & 1))
        fresh = renewal.echo_epoch == self.epoch and 0 < renewal.echo <= self.counter
        counts = fresh and self.counter - renewal.echo <= self._recent
        changed = False
        if counts:
            peer.counted = now
            peer.suspected = None
            if node not in self.live:
                self.live.add(node)
                changed = True
        answer = (changed or not counts) and now - peer.answered >= ANSWER_SECONDS
        if answer:
            peer.answered = now
        return changed, answer

    def on_lost(self, node: int, now: float) -> None:
        """Suspect `node`, the connection to which broke, until it renews, or until its redial is answered."""
        peer = self._peers.get(node)
        if peer is not None and peer.suspected is None:
            peer.suspected, peer.refused = now, False

    def on_connected(self, node: int) -> None:
        """Take note that a redial succeeded: a process is there. It stays alive on the strength of its renewals."""
        peer = self._peers.get(node)
        if peer is not None:
            peer.suspected = None

    def on_refused(self, node: int, now: float) -> bool:
        """Hold a node dead whose redial was refused: no process listens there."""
        peer = self._peers.get(node)
        if peer is None:
            return False
        peer.refused = True
        return self._expire(node, peer, now)

    def tick(self, now: float, intervals: int = 1) -> bool:
        """Look at the time, `intervals` after the last look or sooner."""
        if self._ticked is not None:
            pause = now - self._ticked - intervals * self._interval
            if pause > self._interval:
                # This node stood still (a stop, a long collection): renewals that came meanwhile are not read yet, and
                # its own pause must not look like everyone else's death.
                for peer in self._peers.values():
                    peer.excuse(pause)
        self._ticked = now
        changed = False
        for node, peer in self._peers.items():
            if self._expire(node, peer, now):
                changed = True
        return changed

    def _expire(self, node: int, peer: _Peer, now: float) -> bool:
        if node not in self.live:
            return False
        gone = peer.suspected is not None and peer.refused and now - peer.suspected >= self._refused
        return self._dead(node) if gone or now - peer.counted > self._timeout else False

    def _dead(self, node: int) -> bool:
        if node not in self.live:
            return False
        self.live.discard(node)
        return True
