"""What a transport calls back: the host's side of it.

Invariant: every call is synchronous, on the loop, and does not block. Called by `peers` and `memory`.
"""

from __future__ import annotations

from typing import Any, Protocol

from ..raft.messages import Message


class Handler(Protocol):
    """What the host gives the transport. All calls are synchronous, on the loop, and must not block.

    A `LogyardError` raised by `on_messages` or `on_blob` (an entry whose payload is damaged, say) closes the connection
    the frame came by, like a damaged frame; anything else is a bug and ends the node.
    """

    def on_messages(self, node: int, messages: list[Message]) -> None:
        """The messages of one frame from `node`, in the order they were sent in (per lane)."""
        ...

    def on_link_up(self, node: int) -> None:
        """All lanes stand. Whatever was sent to `node` before is lost: `raft.on_link_reset(node)` for its groups."""
        ...

    def on_link_down(self, node: int) -> None:
        """Messages to or from `node` may have been lost; `on_link_up` follows when it is worth probing."""
        ...

    def on_liveness(self, live: set[int]) -> None:
        """The shared set of live nodes changed."""
        ...

    def on_blob(self, node: int, kind: int, request: int, header: dict[str, Any], body: memoryview) -> None:
        """A blob; `body` is verified and may be kept."""
        ...

    def on_outdated(self, node: int, reason: str) -> None:
        """`node` knows this node by a newer or another data directory: it must say nothing more under its name."""
        ...
