"""The way back for a node that lost its data: once it is a member of nothing, the others may forget its directory.

Why that is safe: a removal is committed by a quorum without the node, so whoever stood for election with a vote that
the lost directory held can't win against it; and a member that is added again begins with nothing, as a new node does.
Called by the service.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from logyard.protocol.errors import BadRequest, Refused

from ..log import meta_rows

if TYPE_CHECKING:
    from .system import System

NAMES_SHOWN = 5


async def forget_node(system: System, node: int, force: bool = False) -> bool:
    """Believe whoever comes next as `node`; return whether anything was known of it. Raises `Refused` while a group
    here still counts it as a member, unless forced: then what it had promised there may be broken."""
    if node == system.node_id or node not in system.peers.nodes:
        raise BadRequest(f"node {node} is no peer of node {system.node_id}")
    names = [] if force else sorted(_groups_with(system, node))
    if names:
        shown = ", ".join(names[:NAMES_SHOWN]) + (", ..." if len(names) > NAMES_SHOWN else "")
        raise Refused(
            f"node {system.node_id}: node {node} is still a member of {len(names)} logs ({shown}); "
            "remove or replace it there first"
        )
    known = node in system.incarnation.acquaintances.known
    await system.storage.books.commit(
        lambda: [(meta_rows.peer_key(node), None)], then=lambda: system.peers.forget(node)
    )
    return known


def _groups_with(system: System, node: int) -> Iterator[str]:
    for member in system.members.values():
        raft = member.raft
        # What was in force until the newest change is committed counts as well.
        if any(node in found.nodes() for _, found in (raft.base, *raft.history)):
            yield member.spec.name
    sleepers = system.quiesced
    for name, uid in system.names.items():
        if uid in sleepers:
            shape = sleepers.row(uid).shape
            if node in shape.voters or node in shape.learners:
                yield name
