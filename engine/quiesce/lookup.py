"""The groups of a node, whether they are awake or asleep: found by uid or by name, woken where somebody needs them.

Called by the doors of the node and by whatever another node's word sets off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from logyard.protocol.errors import UnknownGroup

from ..replica.member import Member
from ..types import Spec
from .names import Names
from .quiesced_table import QuiescedTable
from .unquiesce import Unquiesce


class Lookup:
    """One node's. `active`: members that do not rest just now; `stored_spec(uid)` reads a sleeping group's
    definition; `asked(member)` hears of one without a leader that somebody is going to use."""

    __slots__ = ("_node_id", "_members", "_active", "_names", "_table", "_unquiesce", "_stored_spec", "_asked")

    def __init__(
        self,
        node_id: int,
        members: Mapping[int, Member],
        active: set[Member],
        names: Names,
        table: QuiescedTable,
        unquiesce: Unquiesce,
        stored_spec: Callable[[int], Spec],
        asked: Callable[[Member], None],
    ) -> None:
        self._node_id = node_id
        self._members = members
        self._active = active
        self._names = names
        self._table = table
        self._unquiesce = unquiesce
        self._stored_spec = stored_spec
        self._asked = asked

    def find(self, uid: int) -> Member | None:
        """Return a group's member, woken if it hibernates; None when this node has none."""
        return self._unquiesce.find(uid)

    def find_used(self, uid: int) -> Member | None:
        """Find a member for somebody who is going to use it."""
        return self._unquiesce.find(uid, use=True)

    def find_by(self, uid: int, node: int) -> Member | None:
        """Find a member by the word of a node."""
        return self._unquiesce.find(uid, by=node)

    def member(self, name: str) -> Member:
        """Return a member by name, woken if it hibernates. Raises `UnknownGroup`."""
        # A name is taken before its group is durable, and so before there is a member.
        member = self._unquiesce.find(self._names.get(name, 0), use=True)
        if member is None:
            raise UnknownGroup(f"no group {name!r} on node {self._node_id}", name=name)
        # Whoever asks is going to use it: it does not rest just now.
        self._active.add(member)
        if not member.raft.leader:
            self._asked(member)
        return member

    def has(self, uid: int) -> bool:
        """Return whether this node has a group, awake or not."""
        return uid in self._members or uid in self._table

    def spec(self, uid: int) -> Spec | None:
        """Return a group's definition; wakes nobody."""
        member = self._members.get(uid)
        if member is not None:
            return member.spec
        return self._stored_spec(uid) if uid in self._table else None

    def count(self) -> int:
        """Return how many groups there are, awake or not."""
        return len(self._members) + len(self._table)
