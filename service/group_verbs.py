"""The verbs about groups as such: created, deleted, found, of which kind. Made by `node`."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import trio

from logyard.engine.replica.leadership import wait
from logyard.engine.replica.member import Member
from logyard.engine.replica.submit import check_leader
from logyard.engine.types import Spec
from logyard.machines.catalog.logs import RESERVED
from logyard.machines.log import AppendLog
from logyard.machines.registry import BUILT_IN
from logyard.protocol.errors import BadRequest, Busy, LogyardError, Refused, UnknownGroup, WrongKind
from logyard.protocol.pending import PendingReply, Sink

LED_SECONDS = 0.2
"""An election is a few round trips and syncs; who asks who leads asks again, later and later."""
SYSTEM = ("catalog",)
"""Machines of groups that clients do not speak to."""


def _check_open(machine: object) -> None:
    if machine in SYSTEM:
        raise BadRequest(f"the machine {machine!r} is the cluster's own")


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

    async def create_batch(
        self, names: Sequence[str], members: Sequence[int], machine: str, arguments: Mapping[str, Any]
    ) -> int:
        """Create groups of one definition, asleep; return how many are new."""
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
        for spec in specs:
            _check_open(spec.get("machine"))
        found = await self._registry.create(specs)
        return [{"name": spec.name, "uid": spec.uid, "members": list(spec.voters)} for spec in found]

    async def create_batch(
        self, names: Sequence[str], members: Sequence[int], machine: str, arguments: Mapping[str, Any]
    ) -> int:
        """Create groups of one definition, asleep; return how many are new."""
        _check_open(machine)
        return await self._registry.create_batch(names, members, machine, arguments)

    async def delete_group(self, name: str, force: bool = False, topic: int = 0, uid: int = 0) -> None:
        """Delete a group: a command, on its leader; members that are away learn of it when they speak. `force`: tell
        the nodes one by one instead, from any member's, for a group without a quorum. `topic`: the one whose partition
        it is; `uid`: of the one that is meant, 0: whichever has the name. Raises `NotLeader`, `UnknownGroup`, `Refused`
        for a partition of a topic that does not ask for it."""
        member = self._groups.find(name)
        check_meant(member, uid)
        if not force:
            check_owner(member, topic)
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
            if member.spec.machine in SYSTEM:
                raise UnknownGroup(f"{name!r} is the cluster's own", name=name)
            compress = member.spec.arguments.get("compress") == "zstd"
            raft = member.raft
            found.append((name, member.uid, raft.leader, list(raft.configuration.voters), compress, kind_of(member)))
        return found

    def sleeping(self, names: Sequence[str]) -> list[str]:
        """Return which of some groups sleep here; wakes none."""
        known, members = self._groups.names, self._members
        return [name for name in names if (uid := known.get(name, 0)) and uid not in members]

    async def led_soon(self, names: Sequence[str]) -> None:
        """Wait a moment for groups that were woken just now to have a leader."""
        with trio.move_on_after(LED_SECONDS), contextlib.suppress(LogyardError):
            for member in map(self._groups.find, names):
                await wait(member, partial(_is_led, member))


def check_meant(member: Member, uid: int) -> None:
    """Raise `UnknownGroup` for a group that is not the one that is meant and had its name before (0: whichever)."""
    if uid not in (0, member.uid):
        name = member.spec.name
        raise UnknownGroup(f"{name!r} is another group now", name=name, another=True)


def check_owner(member: Member, topic: int) -> None:
    """Raise `Refused` for the log of a topic's partition, unless it is that topic that asks; and where a topic asks,
    for a group that was there before it under such a name, and has something of its own."""
    machine = member.machine
    partition = machine.partition if isinstance(machine, AppendLog) else None
    own = partition is None or not partition.topic
    if topic and own and not (isinstance(machine, AppendLog) and not machine.end):
        raise Refused(f"{member.spec.name!r} is no topic's partition: delete it by itself")
    if partition is not None and partition.topic not in (0, topic):
        name = member.spec.name.rpartition(".")[0]
        raise Refused(
            f"{member.spec.name!r} is partition {partition.number} of topic {name!r}, and goes with that: logyard "
            f"topic delete {name}, or with fewer partitions: logyard topic alter {name} --partitions N"
        )


def _is_led(member: Member) -> bool:
    return member.raft.leader != 0


class Births(Protocol):
    """Who makes groups by way of the catalogue."""

    async def create(self, requests: Sequence[Mapping[str, Any]]) -> Sequence[Spec]:
        """Create groups whose names nobody in the cluster has."""
        ...

    async def create_batch(
        self, names: Sequence[str], members: Sequence[int], machine: str, arguments: Mapping[str, Any]
    ) -> int:
        """Create groups of one definition, asleep; return how many are new."""
        ...

    async def delete(self, uid: int) -> None:
        """Mark a group as deleted. Raises `UnknownGroup`, `Refused`."""
        ...


class ByCatalogue:
    """Creations and deletions where the cluster has a catalogue. `delete` lets a group go, as without one; `let_go`
    does that without asking it; `check(nodes)` raises `Refused` where this node or one of them was removed."""

    def __init__(
        self,
        births: Births,
        find: Callable[[str], Member],
        delete: Callable[[str, bool, int], Awaitable[None]],
        let_go: Callable[[Sequence[int]], Awaitable[None]],
        check: Callable[[Collection[int]], None],
    ) -> None:
        self._check = check
        self._births = births
        self._find = find
        self._delete = delete
        self._let_go = let_go

    async def create_groups(self, specs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Create groups, whose names are nobody else's in the cluster; equal ones may exist."""
        for spec in specs:
            _check_open(spec.get("machine"))
            self._check(spec.get("members") or ())
        found = await self._births.create(specs)
        return [{"name": spec.name, "uid": spec.uid, "members": list(spec.voters)} for spec in found]

    async def create_batch(
        self, names: Sequence[str], members: Sequence[int], machine: str, arguments: Mapping[str, Any]
    ) -> int:
        """Create groups of one definition, asleep; return how many are new."""
        _check_open(machine)
        self._check(members)
        return await self._births.create_batch(names, members, machine, arguments)

    async def delete_group(self, name: str, force: bool = False, topic: int = 0, uid: int = 0) -> None:
        """Delete a group; the catalogue knows it first, so that nobody counts on it any more. Raises `NotLeader`,
        `Refused`."""
        if name == RESERVED:
            raise Refused(f"{name!r} is the cluster's own")
        member = self._find(name)
        check_meant(member, uid)
        if not force:
            check_owner(member, topic)
            check_leader(member)
        try:
            await self._births.delete(member.uid)
        except UnknownGroup:
            raise Busy(f"the catalogue, which does not know {name!r} yet,", 1.0) from None
        try:
            if self._find(name).uid == member.uid:
                # Else the name is another's already.
                await self._delete(name, force, topic)
        except LogyardError:
            # Decided it is: a node that heard the catalogue first has let it go before its own command was answered.
            await self._let_go([member.uid])
