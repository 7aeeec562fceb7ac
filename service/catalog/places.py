"""Where the cluster's nodes are reached: rows of this node's own meta store, used before the catalogue is there.

A node's configuration is where it begins; what the catalogue says later counts. Called by the keeper, and by a start.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgpack

from logyard.engine.log.meta_rows import PLACES
from logyard.protocol.errors import BadRequest

Address = tuple[str, int]

log = logging.getLogger(__name__)


class Network(Protocol):
    """Who dials the other nodes."""

    def add_peer(self, node: int, address: Address) -> None:
        """Dial a node, there from now on."""
        ...

    def remove_peer(self, node: int) -> None:
        """Know a node no more."""
        ...


class Place(NamedTuple):
    """A node's addresses, as HOST:PORT."""

    peer: str
    client: str


class Places:
    """The other nodes' places, as this node has them. `store` makes rows of the meta store durable; `tell(node,
    client)` has clients told of an address, or of none. A node that dials nobody has no `network`."""

    def __init__(
        self,
        known: Mapping[int, Place],
        network: Network | None,
        store: Callable[[Sequence[tuple[bytes, bytes]]], Awaitable[None]],
        tell: Callable[[int, str], None],
    ) -> None:
        self._known = dict(known)
        self._network = network
        self._store = store
        self._tell = tell
        self._parted: set[int] = set()

    async def meet(self, node: int, peer: str, client: str) -> None:
        """Take note of a node's addresses: durable first, then used."""
        place = Place(peer, client)
        if not peer or self._known.get(node) == place:
            return
        reachable = address(peer)
        known = {**self._known, node: place}
        await self._store([encode(known)])
        self._known = known
        self._parted.discard(node)
        if self._network is not None:
            self._network.add_peer(node, reachable)
        self._tell(node, client)

    async def part(self, node: int) -> None:
        """Know a node no more, one of the configuration included."""
        if node in self._parted:
            return
        if node in self._known:
            known = {other: place for other, place in self._known.items() if other != node}
            await self._store([encode(known)])
            self._known = known
        self._parted.add(node)
        if self._network is not None:
            self._network.remove_peer(node)
        self._tell(node, "")


def address(text: str) -> Address:
    """Return (host, port) of HOST:PORT. Raises `BadRequest` for what no name or port is."""
    host, _, port = text.rpartition(":")
    try:
        host.strip("[]").encode("idna")
        number = int(port)
    except ValueError:
        number = 0
    if not host or not 0 < number < 1 << 16:
        raise BadRequest(f"{text!r} is no address: give HOST:PORT")
    return host, number


def reachable(known: Mapping[int, Place]) -> dict[int, Address]:
    """Return where the nodes listen for others, as far as that is an address."""
    found = {}
    for node, place in known.items():
        try:
            found[node] = address(place.peer)
        except BadRequest as error:
            log.error("node %d is not dialled: %s", node, error)
    return found


def encode(known: Mapping[int, Place]) -> tuple[bytes, bytes]:
    """Return the row of the meta store: ``[[node, peer, client], ...]``."""
    return PLACES, msgpack.packb([[node, *place] for node, place in sorted(known.items())])


def decode(row: bytes | None) -> dict[int, Place]:
    """Return what a row says."""
    rows: list[Any] = [] if row is None else msgpack.unpackb(row)
    return {int(node): Place(peer, client) for node, peer, client in rows}


def joined(directory: Path) -> Path:
    """Return the file that says which node a directory became by joining."""
    return directory / "joined.json"
