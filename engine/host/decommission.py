"""The way back for a node that lost its data: once it is a member of nothing, the others may forget its directory.

Why that is safe: a removal is committed by a quorum without the node, so whoever stood for election with a vote that
the lost directory held can't win against it; and a member that is added again begins with nothing, as a new node does.
Called by the service.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Protocol

from logyard.protocol.errors import BadRequest, Refused

from ..log import meta_rows
from ..log.checkpoint_rows import Put
from ..quiesce.quiesced_table import QuiescedTable
from ..replica.member import Member

NAMES_SHOWN = 5


class Peers(Protocol):
    """What is known of the other nodes."""

    @property
    def nodes(self) -> Iterable[int]:
        """Return those that this node has an address for."""
        ...

    def forget(self, node: int) -> None:
        """Believe whoever comes next as `node`."""
        ...


class Commit(Protocol):
    """Store rows, and call `then` when they are durable."""

    def __call__(self, build: Callable[[], Iterable[Put]], *, then: Callable[[], None]) -> Awaitable[None]:
        """Raise `NoSpace`."""
        ...


class Decommission:
    """One node's. `known(node)`: something is known of it."""

    def __init__(
        self,
        node_id: int,
        members: Mapping[int, Member],
        quiesced: QuiescedTable,
        commit: Commit,
        known: Callable[[int], bool],
        peers: Peers,
    ) -> None:
        self._node_id = node_id
        self._members = members
        self._quiesced = quiesced
        self._commit = commit
        self._known = known
        self._peers = peers

    async def forget_node(self, node: int, force: bool = False) -> bool:
        """Believe whoever comes next as `node`; return whether anything was known of it. Raises `Refused` while a group
        here still counts it as a member, unless forced: then what it had promised there may be broken."""
        peers = self._peers
        if node == self._node_id or node not in peers.nodes:
            raise BadRequest(f"node {node} is no peer of node {self._node_id}")
        names = [] if force else sorted(self._groups_with(node))
        if names:
            shown = ", ".join(names[:NAMES_SHOWN]) + (", ..." if len(names) > NAMES_SHOWN else "")
            raise Refused(
                f"node {self._node_id}: node {node} is still a member of {len(names)} logs ({shown}); "
                "remove or replace it there first"
            )
        known = self._known(node)
        await self._commit(lambda: [(meta_rows.peer_key(node), None)], then=lambda: peers.forget(node))
        return known

    def _groups_with(self, node: int) -> Iterator[str]:
        for member in self._members.values():
            raft = member.raft
            # What was in force until the newest change is committed counts as well.
            if any(node in found.nodes() for _, found in (raft.base, *raft.history)):
                yield member.spec.name
        for _, row in self._quiesced.rows():
            if node in row.shape.voters or node in row.shape.learners:
                yield row.name
