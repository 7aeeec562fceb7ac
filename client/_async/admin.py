"""The verbs that are not a log's: groups, members, snapshots, status. Mixed into `network.Network` and `sync.Yard`.

A verb that concerns a node rather than a group (snapshot, compact, status, list) asks every node unless told one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from logyard.protocol.errors import LogyardError, NotLeader
from logyard.protocol.verbs import BATCH_NAMES, BOARD_ROWS

from ..admin import (
    CATALOG,
    STATUS_PATIENCE_S,
    Call,
    Nodes,
    Rows,
    T,
    add_page,
    all_of,
    ask,
    batch_call,
    board_call,
    call_leader,
    call_node,
    create_calls,
    group_spec,
    leader_in,
    leaders_view,
    list_call,
    located,
    members_call,
    merge_groups,
    plain,
    unreached,
)
from ..board import Board, merge_board


class AdminVerbs(ABC):
    """The admin verbs of a yard."""

    __slots__ = ()

    @abstractmethod
    async def run(self, call: Call[T], timeout: float | None = None) -> T:
        """Ask, again where that is allowed, until answered or out of time."""

    @abstractmethod
    async def nodes(self) -> list[int]:
        """Return the nodes of the cluster."""

    async def cluster(self) -> dict[str, Any]:
        """Return ``{cluster, node, nodes}``: the cluster's id, who answered, and the client address of every node."""
        found: dict[str, Any] = await self.run(call_node("cluster", None))
        return found

    async def create(
        self, name: str, *, members: Sequence[int] | None = None, machine: str = "log", **arguments: object
    ) -> None:
        """Create a group on `members` (all nodes); raise `GroupExists` when it is there with another definition."""
        await self.create_many([name], members=members, machine=machine, **arguments)

    async def create_many(
        self, names: Iterable[str], *, members: Sequence[int] | None = None, machine: str = "log", **arguments: object
    ) -> None:
        """Create many groups with the same members and machine; far cheaper than one by one."""
        chosen = list(members) if members is not None else await self.nodes()
        for call in create_calls(group_spec(name, chosen, machine, arguments) for name in names):
            await self.run(call)

    async def create_batch(
        self, names: Iterable[str], *, members: Sequence[int] | None = None, machine: str = "log", **arguments: object
    ) -> int:
        """Create groups of one definition, as many as there are, asleep: an idle one costs some hundred bytes, and has
        no leader until it is used first. Return how many are new; those that were there with the same definition are
        left as they are. Raises `GroupExists`; calls of `BATCH_NAMES` names each are made one after the other, and each
        is done wholly or not at all."""
        chosen = list(members) if members is not None else await self.nodes()
        created, left = 0, iter(names)
        while batch := list(islice(left, BATCH_NAMES)):
            created += await self.run(batch_call(batch, chosen, machine, arguments))
        return created

    async def delete(self, name: str, force_on: int | None = None) -> None:
        """Delete a group and its data on all members; without a majority of them: from node `force_on`."""
        call = call_node("delete", force_on, name=name, force=True) if force_on else call_leader("delete", name)
        await self.run(call)

    async def list(self, node: int | None = None) -> list[dict[str, Any]]:
        """List the groups: of one node, or of all nodes that answer, one row a group."""
        if node is not None:
            return await self._rows(node, None)
        found: list[Rows] = []
        for at in await self.nodes():
            with suppress(LogyardError):
                found.append(await self._rows(at, STATUS_PATIENCE_S))
        return merge_groups(found)

    async def _rows(self, node: int, timeout: float | None) -> Rows:
        """Return a row for each group of a node, page by page; each has `timeout` seconds."""
        found: Rows = []
        while add_page(found, await self.run(list_call(node, found), timeout)):
            pass
        return found

    async def describe(self, name: str, node: int | None = None) -> dict[str, Any]:
        """Describe everything about a group, as its leader (or member `node`) sees it."""
        at = await self._catalogs(name) if node is None else node
        found: dict[str, Any] = await self.run(ask("describe", plain, at=at, name=name))
        return found

    async def _catalogs(self, name: str) -> int | None:
        """Return the node that leads the catalogue, as it says itself, for its name: no client finds it by that. None
        for any other group, which has a leader that is found."""
        if name != CATALOG:
            return None
        leader: int = (await self.catalog("nodes", "list"))["leader"]
        if not leader:
            raise NotLeader.told("the catalogue has no leader just now")
        return leader

    async def locate(self, name: str) -> dict[str, Any]:
        """Find ``{name, uid, leader, members, kind}`` of a group; leader 0: none known. No node is asked behind the
        leader itself: of several that are dead, each would have to be waited for."""
        if name == CATALOG:
            view = await self.leader_view(name)
            kept = {key: view[key] for key in ("name", "uid", "leader")}
            return {**kept, "members": view["voters"], "kind": view["machine"]}
        hint = leader_in(await self._ask("locate", None, names=[name]))
        found: dict[int, Any] = {}
        for node in sorted(await self.nodes(), key=lambda node: node != hint):
            found[node] = await self._ask("locate", node, names=[name])
            if leader_in(found[node]) == node:
                break
        return located(found, name)

    async def snapshot(self, names: Sequence[str] | None = None, node: int | None = None) -> dict[int, Any]:
        """Snapshot groups (all) on one node, or on every one that has a member of them; answers by node. Raises
        `UnknownGroup`, and when all were asked what a node did not do it for: see `all_of`."""
        if node is not None or not names:
            return await self._done("snapshot", node, names=None if names is None else list(names))
        held: dict[int, list[str]] = {}
        for name in names:
            for at in (await self.locate(name))["members"]:
                held.setdefault(at, []).append(name)
        return all_of({at: await self._reached("snapshot", at, names=held[at]) for at in sorted(held)})

    async def compact(self, node: int | None = None) -> dict[int, Any]:
        """Seal, migrate and compact the payloads of one node or of every one; answers by node. Raises when all were
        asked what one did not do it for: see `all_of`."""
        return await self._done("compact", node)

    async def scrub(self, node: int | None = None, *, start: bool = False) -> dict[int, Any]:
        """Tell what the scrub of one node or of every one does, answers by node; `start`: begin a whole pass first,
        which has ended when `passes` is at least `wanted`. Raises as `compact` does."""
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
        """Describe a group, by its leader and by nobody else."""
        return await self.run(ask("describe", leaders_view, at=await self._catalogs(name), name=name))

    async def transfer(self, name: str, to: int) -> None:
        """Hand the group's leadership to node `to`."""
        await self.run(ask("transfer", plain, at=await self._catalogs(name), name=name, to=to))

    async def board(self, node: int) -> Board:
        """Tell what node `node` knows of all its groups, from its own tables."""
        found: Board = []
        while True:
            page = await self.run(board_call(node, found[-1].name if found else ""), STATUS_PATIENCE_S)
            found += page
            if len(page) < BOARD_ROWS:
                return found

    async def leaders(self) -> tuple[Board, Nodes]:
        """Tell every group's standing by the tables of the nodes that answer, and the nodes that do not."""
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
        """Let `node` believe whoever comes next as node `lost`, whatever its data directory; return whether it knew
        one."""
        found: bool = await self.run(call_node("forget_node", node, lost=lost, force=force))
        return found

    async def catalog(
        self,
        section: str,
        question: str,
        values: Mapping[str, Any] | None = None,
        *,
        node: int | None = None,
        consistency: str = "linearizable",
    ) -> dict[str, Any]:
        """Ask what the cluster's catalogue says, of node `node` (any): ``result``, and how fresh that is."""
        said = {"section": section, "question": question, "values": dict(values or {}), "consistency": consistency}
        found: dict[str, Any] = await self.run(call_node("catalog", node, **said))
        return found

    async def change_catalog(self, section: str, command: str, values: Mapping[str, Any]) -> Any:
        """Change what operators may change in the cluster's catalogue; return what came of it."""
        return await self.run(call_node("catalog_change", None, section=section, change=command, values=dict(values)))

    async def join(
        self, token: bytes, directory: int, peer: str, client: str, zone: str = "-", replaces: int = 0
    ) -> dict[str, Any]:
        """Let an empty data directory become a node of the cluster, by an invitation; return its number."""
        said = {"token": token, "directory": directory, "zone": zone, "replaces": replaces}
        found: dict[str, Any] = await self.run(
            call_node("join", None, peer_address=peer, client_address=client, **said)
        )
        return found

    async def skip(self, name: str, index: int, ordinal: int) -> None:
        """Leave out the command that halted the group's machine, on every member."""
        await self.run(call_leader("skip", name, index=index, ordinal=ordinal))

    async def key_metrics(self, names: Sequence[str], node: int) -> Rows:
        """Return roles, indexes and sizes of groups on node `node`, in whatever state they are there."""
        found: Rows = await self.run(call_node("key_metrics", node, names=list(names)))
        return found

    async def members(self, name: str) -> dict[str, Any]:
        """Return ``{members, leader, uid}`` of a group."""
        found = await self.locate(name)
        return {key: found[key] for key in ("members", "leader", "uid")}

    async def status(self, node: int | None = None, timeout: float | None = STATUS_PATIENCE_S) -> dict[str, Any]:
        """Tell what node `node` (any) holds and does."""
        found: dict[str, Any] = await self.run(call_node("status", node), timeout)
        return found

    async def statuses(self) -> dict[int, dict[str, Any]]:
        """Return the status of every node; one that does not answer has only ``node``, ``error`` and ``message``."""
        found = await self._each("status")
        return {at: unreached(at, row) if isinstance(row, LogyardError) else row for at, row in found.items()}

    async def _each(self, method: str) -> dict[int, Any]:
        return {node: await self._ask(method, node) for node in await self.nodes()}

    async def _ask(self, method: str, node: int | None, **arguments: object) -> Any:
        """Return what a node (None: any) answers, or the error in its place."""
        try:
            return await self.run(call_node(method, node, **arguments), STATUS_PATIENCE_S)
        except LogyardError as error:
            return error

    async def _done(self, method: str, node: int | None, **arguments: object) -> dict[int, Any]:
        if node is not None:
            return {node: await self.run(call_node(method, node, **arguments))}
        return all_of({at: await self._reached(method, at, **arguments) for at in await self.nodes()})

    async def _reached(self, method: str, node: int, **arguments: object) -> Any:
        """Return what a node answers, however long its work takes, or the error in its place: a dead one is not waited
        for as long."""
        error = await self._ask("cluster", node)
        if isinstance(error, LogyardError):
            return error
        try:
            return await self.run(call_node(method, node, **arguments))
        except LogyardError as failed:
            return failed
