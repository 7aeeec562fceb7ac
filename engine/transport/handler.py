"""What the transport asks of its host, and what it shows of its peers. Implemented by `engine.host.inbound`, called by
`peers` and by `memory`."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from ..raft.messages import Message
from .link import Address


class Handler(Protocol):
    """What the host gives the transport. All calls are synchronous, on the loop, and must not block.

    A `LogyardError` raised by `on_messages` or `on_blob` (an entry whose payload is damaged, say) closes the connection
    the frame came by, like a damaged frame; anything else is a bug and ends the node.
    """

    def on_messages(self, node: int, messages: list[Message]) -> None:
        """Take the messages of one frame from `node`, in the order they were sent in (per lane)."""
        ...

    def on_link_up(self, node: int) -> None:
        """Take note that all lanes stand. Whatever was sent to `node` before is lost: `raft.on_link_reset(node)` for
        its groups."""
        ...

    def on_link_down(self, node: int) -> None:
        """Take note that messages to or from `node` may have been lost; `on_link_up` follows when it is worth
        probing."""
        ...

    def on_liveness(self, live: set[int]) -> None:
        """Take the changed, shared set of live nodes."""
        ...

    def on_blob(self, node: int, kind: int, request: int, header: dict[str, Any], body: memoryview) -> None:
        """Take a blob; `body` is verified and may be kept."""
        ...

    def on_outdated(self, node: int, reason: str) -> None:
        """Take note that `node` knows this node by a newer or another data directory: it must say nothing more under
        its name."""
        ...


def no_peer(node: int, of: int) -> str:
    """Return what a node is told that dials one which does not know it, or not any more."""
    return f"node {node} is no peer of node {of}"


def was_removed(node: int, of: int) -> str:
    """Return what a node is told that dials one which was told to know it no more."""
    return f"{no_peer(node, of)} any more: it was removed"


class PeerStatus(NamedTuple):
    """One peer for operators. Queues in bytes, drops in frames since the start; `error` is the last one, or empty;
    `outdated` why its data directory is refused; `sync_us` the time of a sync of its disk, `slow`: it holds that for
    slow."""

    node: int
    address: Address
    up: bool
    live: bool
    epoch: int
    queued: int
    dropped: int
    sent_bytes: int
    error: str
    outdated: str = ""
    sync_us: int = 0
    slow: bool = False
