"""The verbs that are not a log's: groups, members, snapshots, status; as calls, and as the methods of both clients.

`Call` says what to ask whom. `AsyncVerbs` and `SyncVerbs` are the same verbs over the same calls, one with await.
A verb that concerns a node rather than a group (snapshot, compact, status, list) asks every node unless told one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from logyard.protocol.errors import BadRequest, LogyardError, NotLeader, UnknownGroup

from .board import Board, merge_board, standings

T = TypeVar("T")
CREATE_GROUPS = 256
"""Groups of one create call: its arguments are bounded, and one slow call should not hold thousands of them."""
CHANGES = ("add", "remove", "add_learner", "promote")
BOARD_ROWS = 2000
"""Rows of one board answer; a node has more groups than fit into one."""
STATUS_PATIENCE_S = 3.0
"""A status report does not wait for a dead node as long as a command would."""


Rows: TypeAlias = list[dict[str, Any]]
"""(Inside the verbs' classes `list` is a verb.)"""
Nodes: TypeAlias = list[int]


def plain(value: Any) -> Any:
    """The answer as it came."""
    return value


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One question. `group`: for its leader; `nodes`: for one of these first; `pinned`: for nodes[0] and no other.

    `idempotent`: asking twice does no harm, so a cut connection is not an unknown outcome. `kind`: what the group must
    be, "" for whatever it is.
    """

    method: str
    arguments: dict[str, object]
    decode: Callable[[Any], T]
    group: str = ""
    nodes: tuple[int, ...] = ()
    pinned: bool = False
    idempotent: bool = True
    kind: str = ""


def call_node(method: str, node: int | None, **arguments: object) -> Call[Any]:
    """A call for one node, or for any."""
    return Call(method, arguments, plain, nodes=() if node is None else (node,), pinned=node is not None)


def call_leader(method: str, name: str, *, idempotent: bool = False, **arguments: object) -> Call[Any]:
    """A call for the leader of a group."""
    return Call(method, {"name": name, **arguments}, plain, group=name, idempotent=idempotent)


def group_spec(name: str, members: Sequence[int], machine: str, arguments: Mapping[str, object]) -> dict[str, object]:
    """What `create` needs to know of one group; raises `BadRequest`."""
    if not members or len(set(members)) != len(members):
        raise BadRequest(f"{name}: members are one or more different nodes, not {list(members)}")
    return {"name": name, "members": list(members), "machine": machine, "arguments": dict(arguments)}


def create_calls(specs: Iterable[Mapping[str, object]]) -> list[Call[Any]]:
    """Calls that create groups, a bounded number in each, for a node that is a member of them."""
    by_members: dict[tuple[int, ...], list[Mapping[str, object]]] = {}
    for spec in specs:
        members = spec["members"]
        assert isinstance(members, list)
        by_members.setdefault(tuple(members), []).append(spec)
    return [
        Call("create", {"specs": group[at : at + CREATE_GROUPS]}, plain, nodes=members, idempotent=False)
        for members, group in by_members.items()
        for at in range(0, len(group), CREATE_GROUPS)
    ]


def members_call(name: str, changes: Sequence[tuple[str, int]]) -> Call[Any]:
    """Change members: (kind, node) pairs that take effect together."""
    for kind, _ in changes:
        if kind not in CHANGES:
            raise BadRequest(f"a membership change is one of {', '.join(CHANGES)}, not {kind!r}")
    if len(changes) == 1:
        return call_leader("members", name, change=changes[0][0], node=changes[0][1])
    return call_leader("members", name, changes=[list(change) for change in changes])


def leaders_view(value: Any) -> dict[str, Any]:
    """A describe answer, if its leader gave it; another member's may be old. Raises `NotLeader`."""
    found: dict[str, Any] = value
    if found["role"] != "leader":
        raise NotLeader.told(f"{found['name']}: node {found['node']} does not lead it", {"leader": found["leader"]})
    return found


def merge_groups(rows_by_node: Iterable[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row a group from the lists of several nodes: its leader's where there is one."""
    merged: dict[str, dict[str, Any]] = {}
    for rows in rows_by_node:
        for row in rows:
            known = merged.get(row["name"])
            if known is None or (row.get("role") == "leader" and row.get("term", 0) >= known.get("term", 0)):
                merged[row["name"]] = row
    return [merged[name] for name in sorted(merged)]


def board_call(node: int, after: str) -> Call[Board]:
    """The groups of one node behind the name `after`, a bounded number."""
    arguments: dict[str, object] = {"after": after or " ", "limit": BOARD_ROWS}
    return Call("board", arguments, standings, nodes=(node,), pinned=True)


def unreached(node: int, error: LogyardError) -> dict[str, Any]:
    """A node's status when it gave none."""
    return {"node": node, "error": error.code, "message": error.message}


def located(found: Mapping[int, Any], name: str) -> dict[str, Any]:
    """Where one group is, from the locate answers of several nodes; raises `UnknownGroup` when none has it."""
    rows = [
        (row[2] == node, bool(row[2]), row)
        for node, answer in found.items()
        if not isinstance(answer, LogyardError)
        for row in answer
    ]
    if not rows:
        raise UnknownGroup(f"no group {name!r} on any node that answers", name=name)
    # The leader itself knows best; a member that knows no leader, or was removed, knows least.
    _, _, row = max(rows, key=lambda found: found[:2])
    more = {"kind": row[5]} if len(row) > 5 else {}
    return {"name": name, "uid": row[1], "leader": row[2], "members": list(row[3]), **more}


class AsyncVerbs(ABC):
    """The verbs of the asynchronous client."""

    __slots__ = ()

    @abstractmethod
    async def run(self, call: Call[T], timeout: float | None = None) -> T:
        """Ask, again where that is allowed, until answered or out of time."""

    @abstractmethod
    async def nodes(self) -> list[int]:
        """The nodes of the cluster."""

    async def cluster(self) -> dict[str, Any]:
        """``{cluster, node, nodes}``: the cluster's id, who answered, and the client address of every node."""
        found: dict[str, Any] = await self.run(call_node("cluster", None))
        return found

    async def create(
        self, name: str, *, members: Sequence[int] | None = None, machine: str = "log", **arguments: object
    ) -> None:
        """Create a group on `members` (all nodes); raises `GroupExists` when it is there with another definition."""
        await self.create_many([name], members=members, machine=machine, **arguments)

    async def create_many(
        self, names: Iterable[str], *, members: Sequence[int] | None = None, machine: str = "log", **arguments: object
    ) -> None:
        """Create many groups with the same members and machine; far cheaper than one by one."""
        chosen = list(members) if members is not None else await self.nodes()
        for call in create_calls(group_spec(name, chosen, machine, arguments) for name in names):
            await self.run(call)

    async def delete(self, name: str, force_on: int | None = None) -> None:
        """Delete a group and its data on all members; without a majority of them: from node `force_on`."""
        call = call_node("delete", force_on, name=name, force=True) if force_on else call_leader("delete", name)
        await self.run(call)

    async def list(self, node: int | None = None) -> list[dict[str, Any]]:
        """The groups: of one node, or of all nodes that answer, one row a group."""
        if node is not None:
            rows: list[dict[str, Any]] = await self.run(call_node("list", node))
            return rows
        found = await self._each("list", STATUS_PATIENCE_S)
        return merge_groups(rows for rows in found.values() if not isinstance(rows, LogyardError))

    async def describe(self, name: str, node: int | None = None) -> dict[str, Any]:
        """Everything about a group, as its leader (or member `node`) sees it."""
        if node is None:
            found: dict[str, Any] = await self.run(call_leader("describe", name, idempotent=True))
        else:
            found = await self.run(call_node("describe", node, name=name))
        return found

    async def locate(self, name: str) -> dict[str, Any]:
        """``{name, uid, leader, members, kind}`` of a group; leader 0: none known."""
        return located(await self._each("locate", STATUS_PATIENCE_S, names=[name]), name)

    async def snapshot(self, names: Sequence[str] | None = None, node: int | None = None) -> dict[int, Any]:
        """Snapshot groups (all) on one node or on every one; answers by node."""
        return await self._done("snapshot", node, names=None if names is None else list(names))

    async def compact(self, node: int | None = None) -> dict[int, Any]:
        """Seal, migrate and compact the payloads of one node or of every one; answers by node."""
        return await self._done("compact", node)

    async def scrub(self, node: int | None = None, *, start: bool = False) -> dict[int, Any]:
        """What the scrub of one node or of every one does, answers by node; `start`: begin a whole pass first, which
        has ended when `passes` is at least `wanted`."""
        return await self._done("scrub", node, start=start)

    async def add_member(self, name: str, node: int) -> None:
        """Make `node` a member of the group."""
        await self.run(members_call(name, [("add", node)]))

    async def remove_member(self, name: str, node: int) -> None:
        """Remove `node` from the group."""
        await self.run(members_call(name, [("remove", node)]))

    async def change_members(self, name: str, changes: Sequence[tuple[str, int]]) -> None:
        """Change members: (add, remove, add_learner or promote; node) pairs; several take effect together."""
        await self.run(members_call(name, changes))

    async def leader_view(self, name: str) -> dict[str, Any]:
        """`describe`, by the group's leader and by nobody else."""
        return await self.run(Call("describe", {"name": name}, leaders_view, group=name))

    async def transfer(self, name: str, to: int) -> None:
        """Hand the group's leadership to node `to`."""
        await self.run(call_leader("transfer", name, to=to))

    async def board(self, node: int) -> Board:
        """What node `node` knows of all its groups, from its own tables."""
        found: Board = []
        while True:
            page = await self.run(board_call(node, found[-1].name if found else ""), STATUS_PATIENCE_S)
            found += page
            if len(page) < BOARD_ROWS:
                return found

    async def leaders(self) -> tuple[Board, Nodes]:
        """Every group's standing by the tables of the nodes that answer, and the nodes that do not."""
        boards, missing = [], []
        for node in await self.nodes():
            try:
                boards.append(await self.board(node))
            except LogyardError:
                missing.append(node)
        return merge_board(boards), missing

    async def campaign(self, name: str, node: int) -> None:
        """Let the group's member on `node` ask to lead; who hears a live leader denies it."""
        await self.run(call_node("campaign", node, name=name))

    async def force_shrink(self, name: str, node: int) -> int:
        """Make the member on `node` the group's only one: only when its quorum is gone for good. What the others
        committed and it does not have is lost, and they must never come back. Returns the configuration's index."""
        found: int = await self.run(call_node("force_shrink", node, name=name))
        return found

    async def forget_node(self, lost: int, node: int, force: bool = False) -> bool:
        """Let `node` believe whoever comes next as node `lost`, whatever its data directory; whether it knew one."""
        found: bool = await self.run(call_node("forget_node", node, lost=lost, force=force))
        return found

    async def skip(self, name: str, index: int, ordinal: int) -> None:
        """Leave out the command that halted the group's machine, on every member."""
        await self.run(call_leader("skip", name, index=index, ordinal=ordinal))

    async def key_metrics(self, names: Sequence[str], node: int) -> Rows:
        """Roles, indexes and sizes of groups on node `node`, in whatever state they are there."""
        found: Rows = await self.run(call_node("key_metrics", node, names=list(names)))
        return found

    async def members(self, name: str) -> dict[str, Any]:
        """``{members, leader, uid}`` of a group."""
        found = await self.locate(name)
        return {key: found[key] for key in ("members", "leader", "uid")}

    async def status(self, node: int | None = None, timeout: float | None = STATUS_PATIENCE_S) -> dict[str, Any]:
        """What node `node` (any) holds and does."""
        found: dict[str, Any] = await self.run(call_node("status", node), timeout)
        return found

    async def statuses(self) -> dict[int, dict[str, Any]]:
        """The status of every node; one that does not answer has only ``node``, ``error`` and ``message``."""
        found = await self._each("status", STATUS_PATIENCE_S)
        return {at: unreached(at, row) if isinstance(row, LogyardError) else row for at, row in found.items()}

    async def _each(self, method: str, timeout: float, **arguments: object) -> dict[int, Any]:
        found: dict[int, Any] = {}
        for node in await self.nodes():
            try:
                found[node] = await self.run(call_node(method, node, **arguments), timeout)
            except LogyardError as error:
                found[node] = error
        return found

    async def _done(self, method: str, node: int | None, **arguments: object) -> dict[int, Any]:
        nodes = await self.nodes() if node is None else [node]
        return {at: await self.run(call_node(method, at, **arguments)) for at in nodes}


class SyncVerbs(ABC):
    """The verbs of the blocking client: the same calls as `AsyncVerbs`."""

    __slots__ = ()

    @abstractmethod
    def run(self, call: Call[T], timeout: float | None = None) -> T:
        """Ask, again where that is allowed, until answered or out of time."""

    @abstractmethod
    def nodes(self) -> list[int]:
        """The nodes of the cluster."""

    def cluster(self) -> dict[str, Any]:
        """See `AsyncVerbs.cluster`."""
        found: dict[str, Any] = self.run(call_node("cluster", None))
        return found

    def create(
        self, name: str, *, members: Sequence[int] | None = None, machine: str = "log", **arguments: object
    ) -> None:
        """See `AsyncVerbs.create`."""
        self.create_many([name], members=members, machine=machine, **arguments)

    def create_many(
        self, names: Iterable[str], *, members: Sequence[int] | None = None, machine: str = "log", **arguments: object
    ) -> None:
        """See `AsyncVerbs.create_many`."""
        chosen = list(members) if members is not None else self.nodes()
        for call in create_calls(group_spec(name, chosen, machine, arguments) for name in names):
            self.run(call)

    def delete(self, name: str, force_on: int | None = None) -> None:
        """See `AsyncVerbs.delete`."""
        call = call_node("delete", force_on, name=name, force=True) if force_on else call_leader("delete", name)
        self.run(call)

    def list(self, node: int | None = None) -> list[dict[str, Any]]:
        """See `AsyncVerbs.list`."""
        if node is not None:
            rows: list[dict[str, Any]] = self.run(call_node("list", node))
            return rows
        found = self._each("list", STATUS_PATIENCE_S)
        return merge_groups(rows for rows in found.values() if not isinstance(rows, LogyardError))

    def describe(self, name: str, node: int | None = None) -> dict[str, Any]:
        """See `AsyncVerbs.describe`."""
        if node is None:
            found: dict[str, Any] = self.run(call_leader("describe", name, idempotent=True))
        else:
            found = self.run(call_node("describe", node, name=name))
        return found

    def locate(self, name: str) -> dict[str, Any]:
        """See `AsyncVerbs.locate`."""
        return located(self._each("locate", STATUS_PATIENCE_S, names=[name]), name)

    def snapshot(self, names: Sequence[str] | None = None, node: int | None = None) -> dict[int, Any]:
        """See `AsyncVerbs.snapshot`."""
        return self._done("snapshot", node, names=None if names is None else list(names))

    def compact(self, node: int | None = None) -> dict[int, Any]:
        """See `AsyncVerbs.compact`."""
        return self._done("compact", node)

    def scrub(self, node: int | None = None, *, start: bool = False) -> dict[int, Any]:
        """See `AsyncVerbs.scrub`."""
        return self._done("scrub", node, start=start)

    def add_member(self, name: str, node: int) -> None:
        """See `AsyncVerbs.add_member`."""
        self.run(members_call(name, [("add", node)]))

    def remove_member(self, name: str, node: int) -> None:
        """See `AsyncVerbs.remove_member`."""
        self.run(members_call(name, [("remove", node)]))

    def transfer(self, name: str, to: int) -> None:
        """See `AsyncVerbs.transfer`."""
        self.run(call_leader("transfer", name, to=to))

    def board(self, node: int) -> Board:
        """See `AsyncVerbs.board`."""
        found: Board = []
        while True:
            page = self.run(board_call(node, found[-1].name if found else ""), STATUS_PATIENCE_S)
            found += page
            if len(page) < BOARD_ROWS:
                return found

    def leaders(self) -> tuple[Board, Nodes]:
        """See `AsyncVerbs.leaders`."""
        boards, missing = [], []
        for node in self.nodes():
            try:
                boards.append(self.board(node))
            except LogyardError:
                missing.append(node)
        return merge_board(boards), missing

    def campaign(self, name: str, node: int) -> None:
        """See `AsyncVerbs.campaign`."""
        self.run(call_node("campaign", node, name=name))

    def force_shrink(self, name: str, node: int) -> int:
        """See `AsyncVerbs.force_shrink`."""
        found: int = self.run(call_node("force_shrink", node, name=name))
        return found

    def forget_node(self, lost: int, node: int, force: bool = False) -> bool:
        """See `AsyncVerbs.forget_node`."""
        found: bool = self.run(call_node("forget_node", node, lost=lost, force=force))
        return found

    def skip(self, name: str, index: int, ordinal: int) -> None:
        """See `AsyncVerbs.skip`."""
        self.run(call_leader("skip", name, index=index, ordinal=ordinal))

    def key_metrics(self, names: Sequence[str], node: int) -> Rows:
        """See `AsyncVerbs.key_metrics`."""
        found: Rows = self.run(call_node("key_metrics", node, names=list(names)))
        return found

    def members(self, name: str) -> dict[str, Any]:
        """See `AsyncVerbs.members`."""
        found = self.locate(name)
        return {key: found[key] for key in ("members", "leader", "uid")}

    def status(self, node: int | None = None, timeout: float | None = STATUS_PATIENCE_S) -> dict[str, Any]:
        """See `AsyncVerbs.status`."""
        found: dict[str, Any] = self.run(call_node("status", node), timeout)
        return found

    def statuses(self) -> dict[int, dict[str, Any]]:
        """See `AsyncVerbs.statuses`."""
        found = self._each("status", STATUS_PATIENCE_S)
        return {at: unreached(at, row) if isinstance(row, LogyardError) else row for at, row in found.items()}

    def _each(self, method: str, timeout: float, **arguments: object) -> dict[int, Any]:
        found: dict[int, Any] = {}
        for node in self.nodes():
            try:
                found[node] = self.run(call_node(method, node, **arguments), timeout)
            except LogyardError as error:
                found[node] = error
        return found

    def _done(self, method: str, node: int | None, **arguments: object) -> dict[int, Any]:
        nodes = self.nodes() if node is None else [node]
        return {at: self.run(call_node(method, at, **arguments)) for at in nodes}
