"""The transport's limits, each with its unit and reason (law 9).

What an operator may set lives in `engine.config.SystemConfig` and is taken over by `TransportConfig.of`; the rest are
properties of the wire. All nodes of a cluster use the same figures: a frame that one may send, the other must accept.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..config import SystemConfig


@dataclass(slots=True, frozen=True)
class TransportConfig:
    """Bytes, milliseconds and counts of the peer transport."""

    frame_bytes: int = 8 << 20
    """A bulk frame of several messages is split at this size: one frame is one unit of loss and of memory."""
    frame_bytes_max: int = 72 << 20
    """A single message may be this large (64 MiB of payload and its metadata); beyond it a frame is refused unread."""
    control_frame_bytes: int = 1 << 20
    """A control frame: some 14,000 replies. Small, so that a hostile or broken peer costs little."""
    control_queue_bytes: int = 16 << 20
    """What may wait for the control lane. More means that the peer does not read: the connection is reset."""
    bulk_queue_bytes: int = 64 << 20
    """What may wait for the bulk lane. More is dropped whole and probed for again; one larger frame alone goes out."""
    receive_bytes: int = 256 << 10
    """The reused receive buffer of a connection. Frames above half of it get memory of their own."""
    handshakes: int = 256
    """Accepted connections that have not shown who they are yet; of more the oldest is closed."""
    handshake_timeout_ms: int = 5_000
    """A connection that takes longer to say hello is closed (slow-loris)."""
    backoff_min_ms: int = 50
    backoff_max_ms: int = 2_000
    """Redials wait a jittered, doubling time between these two."""
    stable_ms: int = 1_000
    """A connection that lived this long is redialled at once; a flapping one stays in its back-off."""
    dead_peer_ms: int = 10_000
    """The kernel gives up unacknowledged bytes after this time: a half-open connection ends."""
    liveness_interval_ms: int = 100
    """One renewal to each peer in this time, while the WAL's syncs complete."""
    liveness_timeout_ms: int = 600
    """A node without a counted renewal for this time is dead: six lost turns, shorter than an election timeout."""
    refused_timeout_ms: int = 150
    """A node whose connection broke and whose redial is refused is dead this soon (its process died)."""

    def __post_init__(self) -> None:
        assert self.frame_bytes <= self.frame_bytes_max
        assert self.control_frame_bytes <= self.control_queue_bytes
        assert self.receive_bytes >= 4096
        assert 2 * self.liveness_interval_ms <= self.liveness_timeout_ms

    @classmethod
    def of(cls, system: SystemConfig) -> TransportConfig:
        """Return the transport's share of a system's limits."""
        return cls(
            frame_bytes=system.peer_frame_bytes,
            frame_bytes_max=system.record_bytes_max + system.peer_frame_bytes,
            bulk_queue_bytes=system.peer_queue_bytes,
            handshake_timeout_ms=system.handshake_timeout_ms,
            backoff_min_ms=system.reconnect_ms_min,
            backoff_max_ms=system.reconnect_ms_max,
            liveness_interval_ms=system.liveness_interval_ms,
            liveness_timeout_ms=system.liveness_timeout_ms,
        )
