"""Nodes of one process for users' tests: real engines on real directories, joined by the in-memory twin of the network.

Nothing but sockets is left out: what is acknowledged is synced, a crash is one (nothing is flushed), links can be cut.
Waiting is always for a condition, and fails after `PATIENCE_S`. Shipped as `logyard.testing.cluster`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import trio
import trio.testing

from logyard.client.background import background
from logyard.engine.config import SystemConfig
from logyard.engine.machine import Machine
from logyard.engine.raft.state import LEADER
from logyard.engine.replica.member import Member
from logyard.engine.transport.config import TransportConfig
from logyard.engine.transport.memory import MemoryNetwork
from logyard.engine.types import Buffer
from logyard.machines.registry import create_machine
from logyard.protocol.errors import LogyardError
from logyard.protocol.frame import encode_frame

from .node import Node, build_system

PATIENCE_S = 20.0
LOOK_S = 0.001
CATALOG_LOOK_S = 0.05
MIB = 1 << 20
SMALL: dict[str, Any] = {
    "wal_file_bytes": MIB,
    "wal_unflushed_bytes_max": 64 * MIB,
    "wal_stock_files": 0,
    "disk_reserve_bytes": MIB,
    "generation_bytes": 16 * MIB,
    "generation_transaction_bytes": MIB,
    # All nodes are one process here: a disk that stands still for a moment is no reason to take leaderships from one.
    "disk_stall_ms": 600_000,
    "disk_slow_ms": 0,
    "tick_ms": 5,
    "liveness_interval_ms": 20,
    "liveness_timeout_ms": 120,
    "hibernate_after_ms": 0,
}
"""Small files and quick elections."""


class MemoryCluster:
    """Nodes 1 to n. `nodes` are those that run; `network` cuts and heals links. Made by `cluster`."""

    def __init__(
        self,
        path: Path,
        count: int,
        nursery: trio.Nursery,
        machines: Mapping[str, Callable[[], Machine]],
        limits: Mapping[str, Any],
        catalog: bool = False,
    ) -> None:
        self.path = path
        self.ids = list(range(1, count + 1))
        self.config = SystemConfig(**{**SMALL, **limits})
        self.network = MemoryNetwork(TransportConfig.of(self.config), seed=7, step_ms=5)
        self.nodes: dict[int, Node] = {}
        self.failures: dict[int, BaseException] = {}
        self.catalog = catalog
        self._machines = dict(machines)
        self._nursery = nursery
        self._scopes: dict[int, tuple[trio.CancelScope, trio.Event]] = {}

    # Nodes.

    async def start(self, number: int) -> Node:
        """Start a node on its directory, as it was left."""
        system = build_system(self.path / f"node-{number}", number, "testing", self.config, machines=self._machine)
        await system.open()
        peers = self.network.join(
            number, system.host.inbound, peers=[], healthy=system.host.disk_health.healthy,
            digest=system.quiescence.digests.digest, origin=system.incarnation.origin,
            known=system.incarnation.acquaintances, vitals=system.vitals,
        )  # fmt: skip
        scope, ended = self._scopes[number] = trio.CancelScope(), trio.Event()
        await self._nursery.start(self._run, number, partial(system.run, peers), scope, ended)
        node = self.nodes[number] = Node(system)
        for other in self.ids:
            if other != number:
                peers.add_peer(other)
                theirs = self.network.nodes.get(other)
                if theirs is not None and number not in theirs.known:
                    theirs.add_peer(number)
        self.network.connect()
        if self.catalog:
            said = {"peer": f"memory:{number}", "client": f"memory-client:{number}"}
            keeper = node.keep_catalogue(said, self.ids, _nothing, _nothing, CATALOG_LOOK_S)
            node.system.spawn(keeper.run)
        return node

    async def _run(
        self,
        number: int,
        run: Callable[..., Awaitable[None]],
        scope: trio.CancelScope,
        ended: trio.Event,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        try:
            with scope:
                await run(task_status=task_status)
        except* LogyardError as group:
            self.failures[number] = group
        finally:
            ended.set()

    def _machine(self, kind: str, arguments: dict[str, Any]) -> Machine:
        return self._machines[kind]() if kind in self._machines else create_machine(kind, arguments)

    async def crash(self, number: int) -> None:
        """Crash a node as kill -9 does: what was not synced is lost, nothing is flushed."""
        node = self.nodes.pop(number)
        scope, ended = self._scopes.pop(number)
        if number in self.network.nodes:
            self.network.crash(number)
        scope.cancel()
        await ended.wait()
        # What other threads had under way comes back to a dead engine first.
        await trio.lowlevel.cancel_shielded_checkpoint()
        await trio.testing.wait_all_tasks_blocked(LOOK_S)
        node.system.close()

    async def restart(self, number: int) -> Node:
        """Crash a node, then start it."""
        await self.crash(number)
        return await self.start(number)

    def partition(self, *some: int) -> None:
        """Cut some nodes off from the others."""
        self.network.partition(some, [number for number in self.ids if number not in some])

    def heal(self) -> None:
        """Heal all links."""
        self.network.heal()

    # Groups.

    async def create(self, name: str, machine: str = "log", members: Iterable[int] = (), **arguments: Any) -> None:
        """Create a group and wait for its leader."""
        await until(lambda: any(len(node.system.live) == len(self.nodes) for node in self.nodes.values()), "nodes meet")
        spec = {"name": name, "members": sorted(members) or self.ids, "machine": machine, "arguments": arguments}
        await next(iter(self.nodes.values())).create_groups([spec])
        await self.leader(name)

    def member(self, number: int, name: str) -> Member:
        """Return a group's replica on a node. Raises `UnknownGroup`."""
        return self.nodes[number].system.member(name)

    def machine(self, number: int, name: str) -> Any:
        """Return a replica's machine: to look at, not to change."""
        return self.member(number, name).machine

    def _leads(self, number: int, name: str) -> bool:
        system = self.nodes[number].system
        member = system.quiescence.unquiesce.find(system.names.get(name, 0))
        if member is None:
            return False
        raft = member.raft
        return raft.role == LEADER and raft.commit >= raft.lead_index and not raft.stopped

    async def leader(self, name: str) -> int:
        """Return the node that leads a group, once one does and knows what is committed."""
        found: list[int] = []

        def led() -> bool:
            found[:] = [number for number in self.nodes if self._leads(number, name)]
            return bool(found)

        await until(led, f"a leader of {name}")
        return max(found, key=lambda number: self.member(number, name).raft.term)

    async def command(
        self, name: str, command: bytes, payload: Buffer | None = None, *, metadata: bytes = b""
    ) -> bytes:  # fmt: skip
        """Commit one command through the leader; return its reply. Raises what it is refused with. Asked once: while
        leaders change it raises `NotLeader` or `Unknown`."""
        leader = await self.leader(name)
        with trio.fail_after(PATIENCE_S):
            return await self.nodes[leader].commit(
                self.member(leader, name), encode_frame([(metadata, payload)], command=command)
            )

    async def query(self, name: str, request: bytes, *, node: int | None = None) -> bytes:
        """Ask the leader's machine linearizably, or a node's as it is."""
        if node is not None:
            return await self.nodes[node].query(name, request, "local")
        return await self.nodes[await self.leader(name)].query(name, request, "linearizable")

    async def settled(self, name: str) -> None:
        """Wait until every running member has applied all there is."""

        def same() -> bool:
            rafts = [self.member(number, name).raft for number in self.nodes]
            return len({(raft.applied, raft.log.last_index) for raft in rafts}) == 1 and (
                rafts[0].applied == rafts[0].log.last_index
            )

        await until(same, f"all members of {name} are equal")

    async def check(self, name: str) -> None:
        """Check that all running members have the same sections and the same live payloads, and that their machines
        need none that they released. Raises AssertionError."""
        await self.settled(name)
        states: dict[int, tuple[dict[str, bytes], bytes]] = {}
        for number, node in self.nodes.items():
            member = self.member(number, name)
            assert not node.system.transfers.snapshots.compare(member, member.raft.applied), (
                f"node {number} released too much"
            )
            sections = {section: bytes(data) for section, data in member.machine.snapshot().items()}
            states[number] = sections, member.liveness.encode_live_set(member.raft.applied)
        first = next(iter(states.values()))
        assert all(state == first for state in states.values()), f"members of {name} differ: {states}"


async def _nothing(*what: object) -> None:
    """Learn nothing of addresses: nodes of one process know each other."""


async def until(condition: Callable[[], object], what: str) -> None:
    """Return when `condition` holds; fail when it does not for a long time."""
    with trio.move_on_after(PATIENCE_S):
        while not condition():
            await trio.sleep(LOOK_S)
        return
    raise AssertionError(f"never happened: {what}")


@asynccontextmanager
async def cluster(
    path: str | Path,
    nodes: int = 3,
    *,
    machines: Mapping[str, Callable[[], Machine]] | None = None,
    catalog: bool = False,
    **limits: Any,
) -> AsyncIterator[MemoryCluster]:
    """Run `nodes` nodes in one process, with directories below `path`. `machines`: your own kinds by name, made without
    arguments; `catalog`: the nodes take part in a catalogue; `limits`: of `SystemConfig`."""
    Path(path).mkdir(parents=True, exist_ok=True)
    async with background(trio.open_nursery(), trio.Cancelled) as nursery:
        found = MemoryCluster(Path(path), nodes, nursery, machines or {}, limits, catalog)
        await nursery.start(found.network.run)
        for number in found.ids:
            await found.start(number)
        try:
            yield found
        finally:
            with trio.CancelScope(shield=True):
                for number in list(found.nodes):
                    await found.crash(number)
