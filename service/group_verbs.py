"""The verbs about groups as such: created, deleted, found, of which kind. Made by `node`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import trio

from logyard.engine.replica.member import Member
from logyard.engine.types import Spec
from logyard.machines.registry import BUILT_IN
from logyard.protocol.errors import WrongKind
from logyard.protocol.pending import PendingReply, Sink


def kind_of(member: Member) -> str:
    """Return what a group's clients speak to: the name of its machine, or of the built-in one that it is a kind of."""
    return next((name for name, kind in BUILT_IN.items() if isinstance(member.machine, kind)), member.spec.machine)


class Groups(NamedTuple):
    """This node's groups."""

    names: Mapping[str, int]
    members: Mapping[int, Member]
    """Those that are awake."""
    find: Callable[[str], Member]
    """A group's member, woken. Raises `UnknownGroup`."""
    wake: Callable[[int], Member | None]
    """The same by uid; None when there is none."""


class Registry(Protocol):
    """Who knows the definitions: `engine.host.groups.GroupRegistry`."""

    async def create(self, requests: Sequence[Mapping[str, Any]]) -> Sequence[Spec]:
        """Create groups on all their members; equal ones may exist."""
        ...

    async def delete(self, uids: Sequence[int]) -> None:
        """Delete groups here, and tell the other members' nodes."""
        ...


class Propose(Protocol):
    """Queues a command of the engine's own."""

    def __call__(self, member: Member, name: str, *, sink: Sink) -> None:
        """Have it committed; `sink` gets its reply. Raises `NotLeader`."""
        ...


class GroupVerbs:
    """Groups as such, by name."""

    def __init__(self, groups: Groups, registry: Registry, propose: Propose) -> None:
        self._groups = groups
        self._members = groups.members
        self._registry = registry
        self._propose = propose

    async def create_groups(self, specs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Create groups; equal ones may exist. Returns name and uid of each."""
        found = await self._registry.create(specs)
        return [{"name": spec.name, "uid": spec.uid, "members": list(spec.voters)} for spec in found]

    async def delete_group(self, name: str, force: bool = False) -> None:
        """Delete a group: a command, on its leader; members that are away learn of it when they speak. `force`: tell
        the nodes one by one instead, from any member's, for a group without a quorum. Raises `NotLeader`."""
        member = self._groups.find(name)
        if not force:
            pending: PendingReply[bytes] = PendingReply()
            self._propose(member, "delete", sink=pending)
            await pending.wait(trio.Event)
        # Its apply does the same: when this returns, this node has forgotten the group.
        await self._registry.delete([member.uid])

    def require_kind(self, group: int | str, kind: str) -> None:
        """Raise `WrongKind` unless a group, by uid or by name, is of that kind. Who is not here is not judged."""
        member = self._members.get(group)  # type: ignore[arg-type]  # None for a name
        if member is not None and member.spec.machine == kind:
            return
        uid = self._groups.names.get(group, 0) if isinstance(group, str) else group
        member = self._members.get(uid) or self._groups.wake(uid)
        if member is not None and member.spec.machine != kind and kind_of(member) != kind:
            raise WrongKind(member.spec.name, kind_of(member), kind)

    def locate(self, names: Sequence[str]) -> list[tuple[str, int, int, list[int], bool, str]]:
        """Return (name, uid, leader or 0, members, whether its option asks for compressed payloads, kind) of each
        group."""
        found = []
        for name in names:
            member = self._groups.find(name)
            compress = member.spec.arguments.get("compress") == "zstd"
            raft = member.raft
            found.append((name, member.uid, raft.leader, list(raft.configuration.voters), compress, kind_of(member)))
        return found
