"""The other nodes, for parts that are built before the transport is: nobody hears what is said before `attach`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from ..identity import Vitals
from ..ports import NoPeers, PeersPort
from ..raft.messages import Message
from ..types import Buffer


class Network:
    """The transport, when it is there. `live`: nodes that are up."""

    __slots__ = ("_live", "_peers")

    def __init__(self, live: Set[int]) -> None:
        self._live = live
        self._peers: PeersPort = NoPeers()

    def attach(self, peers: PeersPort) -> None:
        """Take the transport: the node runs from now on."""
        self._peers = peers

    @property
    def nodes(self) -> frozenset[int]:
        """Nodes with an address, without this one."""
        return self._peers.nodes

    def send(self, messages: Sequence[Message]) -> None:
        """Send messages, or lose them."""
        self._peers.send(messages)

    def send_blob(
        self, node: int, kind: int, request: int, header: Mapping[str, Any], body: Sequence[Buffer] = ()
    ) -> bool:
        """Send a node one blob; return False when it was dropped."""
        return self._peers.send_blob(node, kind, request, header, body)

    def epoch_of(self, node: int) -> int:
        """Return the highest epoch seen of a peer; 0 before the first."""
        return self._peers.epoch_of(node)

    def digest_of(self, node: int) -> int:
        """Return what a peer's last renewal said of the groups that sleep; 0 before the first."""
        return self._peers.digest_of(node)

    def vitals_of(self, node: int) -> Any:
        """Return what a peer's last renewal said of its disk."""
        return self._peers.vitals_of(node)

    def forget(self, node: int) -> None:
        """Believe whoever comes next under this number."""
        self._peers.forget(node)

    def status(self) -> Sequence[Any]:
        """Return a row a peer."""
        return self._peers.status()

    def others(self) -> Iterator[tuple[int, Vitals]]:
        """Yield the live nodes, and what they say of themselves."""
        peers = self._peers
        return ((node, peers.vitals_of(node)) for node in peers.nodes if node in self._live)

    def is_talking(self) -> bool:
        """Return whether something that was said has not left yet."""
        return any(peer.up and peer.queued for peer in self._peers.status())
