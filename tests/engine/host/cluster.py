"""Nodes of one process: real engines on real directories, joined by the in-memory twin of the transport.

A crash cancels a node's run and closes its files: nothing is flushed. Waiting is always for a condition.
"""

from __future__ import annotations

import math
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import trio
import trio.testing

from logyard.engine.config import SystemConfig
from logyard.engine.disk.door import Disk
from logyard.engine.host.engine import System
from logyard.engine.log import meta_rows
from logyard.engine.machine import Machine
from logyard.engine.quiesce.payload_flush import PayloadFlush
from logyard.engine.raft.core import LEADER, Raft
from logyard.engine.replica.build import MakeCore, make_raft
from logyard.engine.replica.member import Member
from logyard.engine.transport.config import TransportConfig
from logyard.engine.transport.memory import MemoryNetwork, MemoryPeers
from logyard.machines.log.command import APPEND, APPEND_REPLY
from logyard.machines.registry import create_machine
from logyard.protocol.errors import LogyardError, NotLeader, Refused
from logyard.protocol.frame import encode_frame
from logyard.protocol.records import Page
from logyard.service.node import Node, build_system
from logyard.service.writer.process import COMMAND

KIB = 1024
MIB = 1024 * KIB
PATIENCE = 45.0
"""Seconds; a machine that does much else is no failure."""
WRITER_VARIABLE = "LOGYARD_TEST_WRITER"
SMALL: dict[str, Any] = {
    "wal_file_bytes": MIB,
    "wal_unflushed_bytes_max": 64 * MIB,
    "wal_stock_files": 0,
    "disk_reserve_bytes": MIB,
    "generation_bytes": 16 * MIB,
    "generation_transaction_bytes": MIB,
    # Nothing moves by itself: a test that wants it to asks for it.
    "migrate_budget_bytes": 1 << 30,
    "migrate_dead_ratio": 1.0,
    "snapshot_entries": 1 << 30,
    "tick_ms": 5,
    "liveness_interval_ms": 20,
    "liveness_timeout_ms": 120,
    # Most tests look at members: nothing becomes a row by itself.
    "hibernate_after_ms": 0,
    # Tests count syncs, and let the nth fail.
    "disk_probe_ms": 60_000,
    # Nor does a leader move because this machine's disk is slow: only tests of that say when it is.
    "disk_stall_ms": 600_000,
    "disk_slow_ms": 0,
}

Records = Sequence[tuple[bytes, bytes | None]]
Machines = Callable[[str, dict[str, Any]], Machine]


async def until(condition: Callable[..., object], what: str | Callable[[], str] = "") -> None:
    """Return when `condition` holds; fail after a long time, saying `what` never happened."""
    with trio.move_on_after(PATIENCE):
        while not condition():
            await trio.sleep(0.001)
        return
    raise AssertionError(f"never happened: {what() if callable(what) else what or condition}")


def raft_of(member: Member) -> Raft:
    """The core of a member, whose inside a test looks into."""
    assert isinstance(member.raft, Raft)
    return member.raft


def plain(found: Any) -> bytes:
    """What a read of a payload found, as one object of its own."""
    return bytes(found)


class Cluster:
    """Nodes 1..n in directories of their own."""

    def __init__(
        self,
        path: Path,
        count: int,
        nursery: trio.Nursery,
        limits: Mapping[str, Any],
        machines: Machines,
        disks: Mapping[int, Disk],
        writer: Sequence[str],
        make_core: MakeCore,
    ) -> None:
        self.path = path
        self.ids = list(range(1, count + 1))
        self.config = SystemConfig(**{**SMALL, **limits})
        transport = replace(TransportConfig.of(self.config), refused_timeout_ms=40)
        self.network = MemoryNetwork(transport, seed=7, step_ms=5)
        self.nodes: dict[int, Node] = {}
        self.machines = machines
        self.disks = dict(disks)
        self.writer = writer
        self.make_core = make_core
        self.failures: dict[int, LogyardError] = {}
        self._nursery = nursery
        self._scopes: dict[int, tuple[trio.CancelScope, trio.Event]] = {}

    async def start(self, number: int) -> Node:
        """Open a node's directory and let it run."""
        system = self.build(number)
        await system.open()
        peers = self.network.join(
            number, system.host.inbound, peers=[], healthy=system.host.disk_health.healthy,
            digest=system.quiescence.digests.digest, origin=system.incarnation.origin,
            known=system.incarnation.acquaintances, vitals=system.vitals,
        )  # fmt: skip
        scope, ended = self._scopes[number] = trio.CancelScope(), trio.Event()
        await self._nursery.start(self._run, number, system, peers, scope, ended)
        self.nodes[number] = Node(system)
        for other in self.ids:
            if other != number:
                peers.add_peer(other)
                theirs = self.network.nodes.get(other)
                if theirs is not None and number not in theirs.known:
                    theirs.add_peer(number)
        self.network.connect()
        return self.nodes[number]

    def build(self, number: int) -> System:
        """A node's engine, not opened."""
        return build_system(
            self.path / f"node-{number}", number, "test", self.config,
            disk=self.disks.get(number), machines=self.machines, writer_command=self.writer,
            make_core=self.make_core,
        )  # fmt: skip

    async def _run(
        self,
        number: int,
        system: System,
        peers: MemoryPeers,
        scope: trio.CancelScope,
        ended: trio.Event,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        try:
            with scope:
                await system.run(peers, task_status)
        except* LogyardError as group:
            self.failures[number] = next(iter(_leaves(group)))
        finally:
            ended.set()

    async def crash(self, number: int) -> None:
        """As kill -9: what was not synced may be lost, nothing is flushed."""
        node = self.nodes.pop(number)
        scope, ended = self._scopes.pop(number)
        if number in self.network.nodes:
            self.network.crash(number)
        scope.cancel()
        await ended.wait()
        # What the WAL thread had handed over comes back to a dead engine first.
        await trio.lowlevel.cancel_shielded_checkpoint()
        await trio.testing.wait_all_tasks_blocked(0.001)
        node.system.close()

    async def restart(self, number: int) -> Node:
        """Crash, then start from the directory."""
        await self.crash(number)
        return await self.start(number)

    async def close(self) -> None:
        """Crash all."""
        for number in list(self.nodes):
            await self.crash(number)

    # Groups

    async def create(self, name: str = "log", members: Iterable[int] = (), by: int = 1, machine: str = "log") -> None:
        """Create a group and wait for its leader."""
        spec = {"name": name, "members": sorted(members) or self.ids, "machine": machine}
        await self.nodes[by].create_groups([spec])
        await self.leader(name)

    def system(self, number: int) -> System:
        """A running node's engine."""
        return self.nodes[number].system

    def member(self, number: int, name: str = "log") -> Member:
        """A group's replica."""
        return self.nodes[number].system.member(name)

    def replica(self, number: int, name: str = "log") -> Member | None:
        """A group's replica, if the node has one."""
        system = self.nodes[number].system
        return system.quiescence.unquiesce.find(system.names.get(name, 0))

    def log(self, number: int, name: str = "log") -> Any:
        """A replica's machine."""
        return self.member(number, name).machine

    def leads(self, number: int, name: str = "log") -> bool:
        """Whether a node leads a group, and knows what is committed."""
        member = self.replica(number, name)
        if member is None:
            return False
        raft = member.raft
        return raft.role == LEADER and raft.commit >= raft.lead_index and not raft.stopped

    async def leader(self, name: str = "log", among: Iterable[int] = ()) -> int:
        """The node that leads, once one does."""
        found: list[int] = []

        def led() -> bool:
            found[:] = [number for number in (among or self.nodes) if number in self.nodes and self.leads(number, name)]
            return bool(found)

        await until(led, f"a leader of {name}")
        return max(found, key=lambda number: self.member(number, name).raft.term)

    async def lead(self, number: int, name: str = "log") -> None:
        """Make a node the leader. Asked again when it is refused: on a busy machine a leader may not have heard of
        the node yet (it refuses at once), and an election may come in between."""
        with trio.move_on_after(PATIENCE):
            while (leader := await self.leader(name)) != number:
                raft = self.member(leader, name).raft
                await until(lambda raft=raft: raft.role != LEADER or number in raft.live, f"node {number} is live")
                try:
                    await self.nodes[leader].transfer(name, number)
                except (NotLeader, Refused):
                    await trio.lowlevel.checkpoint()
            return
        raise AssertionError(f"never happened: node {number} leads {name}")

    async def start_unfilled(self, number: int) -> None:
        """Start a node that does not fetch lost payloads by itself: only who reads them does."""
        await self.start(number)
        self.system(number).repair.refill._not_before = math.inf

    async def transfer(self, number: int, to: int, name: str = "log") -> None:
        """Hand a leader's place to another node, once the leader has heard of that."""
        system = self.system(number)
        await until(lambda: to in system.live, f"node {to} is live")
        await self.nodes[number].transfer(name, to)

    async def append(self, number: int, records: Records, name: str = "log") -> range:
        """One frame to a leader; the offsets it got."""
        node = self.nodes[number]
        frame = encode_frame(records, command=APPEND)
        with trio.fail_after(PATIENCE):
            reply = await node.commit(self.member(number, name), frame)
        first, count = APPEND_REPLY.unpack(reply)
        return range(first, first + count)

    async def fill(self, number: int, count: int, size: int, name: str = "log", tag: bytes = b"r") -> list[bytes]:
        """`count` records of `size` bytes each, one entry a record; what was written."""
        raft = self.member(number, name).raft
        await until(lambda: raft.applied >= raft.lead_index, "the leader has applied what others left")
        bodies = []
        raft = self.member(number, name).raft
        await until(lambda: raft.applied == raft.log.last_index, f"{name} on {number} has applied what it has")
        for _ in range(count):
            at = self.log(number, name).end
            body = (tag + b"%08d" % at).ljust(size, b".")
            assert (await self.append(number, [(b"m%d" % at, body)], name)).start == at
            bodies.append(body)
        return bodies

    async def read(
        self, number: int, offset: int = 0, count: int = 100_000, name: str = "log"
    ) -> list[tuple[bytes, bytes | None]]:
        """Records from `offset` on, in as many polls as it takes."""
        found: list[tuple[bytes, bytes | None]] = []
        end = min(self.log(number, name).end, offset + count)
        while offset < end:
            page, before = await self.page(number, offset, end - offset, name), len(found)
            for record in page:
                assert record.offset == offset + len(found) - before, "offsets are dense"
                found.append((record.metadata, record.payload))
            assert page.next > offset, "a poll moves on"
            offset = page.next
        return found

    async def page(self, number: int, offset: int, count: int = 100_000, name: str = "log") -> Page:
        """One poll."""
        header, blocks = await self.nodes[number].poll(name, offset, count, 1 << 20, 0.0, True, "local")
        return Page(b"".join(blocks), header["start"], header["end"], header["node"], offset, count)

    async def applied(self, name: str = "log", among: Iterable[int] = ()) -> None:
        """Until every running member has applied all there is."""
        numbers: list[int] = []

        def same() -> bool:
            found = {number: one for number in self.nodes if (one := self.replica(number, name)) is not None}
            newest = max((member.raft for member in found.values()), key=lambda raft: raft.log.last_index)
            numbers[:] = among or [node for node in self.nodes if node in newest.configuration.nodes()]
            if not found.keys() >= set(numbers):
                return False
            places = {(found[number].raft.applied, found[number].raft.log.last_index) for number in numbers}
            return len(places) == 1 and all(applied == last for applied, last in places)

        def rows() -> str:
            return "\n".join(
                f"{number}: {member.state} {member.reason} {member.raft} floor {member.floor} {member.raft.progress}"
                for number in self.nodes
                if (member := self.replica(number, name)) is not None
            )

        await until(same, lambda: f"all of {numbers} apply {name}\n{rows()}")

    async def bare(self, *numbers: int) -> None:
        """Until nodes have no group, and a crash would bring none back: a replica leaves memory first, its rows go with
        a commit after that."""

        def is_bare(number: int) -> bool:
            system = self.system(number)
            return not (
                system.group_count or system.names or system.storage.meta_batch.meta.keys(meta_rows.GroupRow.PREFIX)
            )

        await until(lambda: all(is_bare(number) for number in numbers), f"nodes {numbers} have no group")

    def partition(self, *some: int) -> None:
        """Cut some nodes off from the others."""
        self.network.partition(some, [number for number in self.ids if number not in some])

    async def roll(self, number: int) -> None:
        """Seal the WAL file of a node and write its segment."""
        storage = self.system(number).storage
        async with storage.janitor.lock:
            await storage.janitor.roll()


def _leaves(group: BaseExceptionGroup[Any]) -> Iterable[Any]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


@asynccontextmanager
async def cluster(
    path: Path,
    count: int = 3,
    *,
    machines: Machines = create_machine,
    disks: Mapping[int, Disk] | None = None,
    group: str = "log",
    writer: Sequence[str] | None = None,
    make_core: MakeCore = make_raft,
    **limits: Any,
) -> AsyncIterator[Cluster]:
    """`count` running nodes, and a group on all of them unless `group` is empty. `writer`: the command of their writer
    processes; by default there is none, or, when the environment says LOGYARD_TEST_WRITER=process, the real one."""
    if writer is None:
        writer = COMMAND if os.environ.get(WRITER_VARIABLE) == "process" else ()
    async with trio.open_nursery() as nursery:
        found = Cluster(path, count, nursery, limits, machines, disks or {}, writer, make_core)
        await nursery.start(found.network.run)
        for number in found.ids:
            await found.start(number)
        if group:
            await until(lambda: all(len(one.system.live) == count for one in found.nodes.values()), "all are live")
            await found.create(group)
        try:
            yield found
        finally:
            with trio.CancelScope(shield=True):
                await found.close()
        nursery.cancel_scope.cancel()


def payload_flush(system: System, bytes_max: int) -> PayloadFlush:
    """What moves payloads out of WAL files before sleep, whatever the configuration says of how much."""
    location, move = system.storage.location, system.storage.rehoming.move
    return PayloadFlush(
        system.store, location.files, location, system.replicas.reader, system.wal.read_payload, move, bytes_max
    )


def payload_books(system: System) -> dict[str, Any]:
    """What the counters say of payload bytes, per home."""
    return {
        "wal": {number: file.live for number, file in system.storage.location.files.items() if file.live},
        "generations": {one.id: one.live for one in system.store.generations()},
    }


def open_descriptors() -> int:
    """Open files of this process."""
    return len(os.listdir("/proc/self/fd"))


class Replies:
    """Counts the answers of frames that nobody waits for."""

    def __init__(self) -> None:
        self.found: list[tuple[int, int]] = []

    def reply(self, request: int, status: int, data: bytes) -> None:
        self.found.append((request, status))


def frame(body: bytes = b"x", command: bytes = APPEND) -> memoryview:
    return memoryview(b"".join(encode_frame([(b"", body)], command=command)))
