"""Simulated nodes: each a file system, clocks and, while it is up, a process with the real engine.

A crash ends the process between two events or at a step of its disk; a power cut takes what was not synced as well. The
runner drives what is here from outside: everything is one thread. Used by `run`, `nemesis` and `clients`.
"""

from __future__ import annotations

import errno
import os
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from logyard.engine.config import SystemConfig
from logyard.engine.host.engine import System
from logyard.engine.machine import Machine
from logyard.engine.raft.core import LEADER
from logyard.engine.replica.member import Member
from logyard.engine.transport.config import TransportConfig
from logyard.machines.registry import create_machine
from logyard.protocol.errors import LogyardError, Outdated, WalFailed
from logyard.service.node import Node, build_system

from .disk import Faults, SimDisk, SimPath
from .files import FileSystem
from .loop import Doomed, Life, Loop, Task
from .network import SimNetwork

KIB = 1024
MIB = 1024 * KIB
SYNC_S = 0.0004
"""A sync of the simulated disk, when nothing is wrong with it."""
LIMITS: dict[str, Any] = {
    "wal_file_bytes": MIB,
    "wal_batch_bytes": 256 * KIB,
    "wal_unflushed_bytes_max": 16 * MIB,
    "wal_stock_files": 1,
    "disk_reserve_bytes": MIB,
    "generation_bytes": 16 * MIB,
    "generation_transaction_bytes": MIB,
    "migrate_budget_bytes": 2 * MIB,
    "snapshot_piece_bytes": 64 * KIB,
    "tick_ms": 200,
    "election_ticks": 6,
    "liveness_interval_ms": 400,
    "liveness_timeout_ms": 2000,
    "disk_probe_ms": 5000,
    "hibernate_after_ms": 3000,
}


class Host:
    """A machine: what outlives its processes."""

    def __init__(self, number: int, draw: random.Random) -> None:
        self.number = number
        self.files = FileSystem(f"/n{number}")
        self.faults = Faults(random.Random(draw.getrandbits(64)))
        self.drift = 1.0
        self.life: SimLife | None = None
        self.system: System | None = None
        # Starting: its process is recovering; `ready` when it takes part.
        self.ready = False
        self.failure: BaseException | None = None
        self.starts = 0
        self.thread_s = 0.002
        self.wall_jump_ns = 0
        # When it dies at a step of its disk the power goes too: (chance of a sector, of a name, zeros for the lost).
        self.cut_next: tuple[float, float, bool] | None = None
        # What the directory it runs on is, when it is not its own.
        self.other = ""
        # What was damaged while it was down.
        self.rot = ""
        # Its program knows older versions of machines only.
        self.old_program = False


class SimLife(Life):
    """A process with its door to the disk."""

    files: FileSystem
    disk: HostDisk
    old_program: bool


class HostDisk(SimDisk):
    """A door that knows how long a sync takes now."""

    __slots__ = ()

    def sync_seconds(self) -> float:
        """Of the next batch of the WAL."""
        slow = self.faults.latency_s
        if slow:
            self.faults.hits["D11.slow_sync"] += 1
        return SYNC_S + slow * self.faults.draw.uniform(0.5, 1.5)


Machines = Callable[[str, dict[str, Any]], Machine]


class Cluster:
    """Nodes 1..n, one network."""

    disk_type: type[HostDisk] = HostDisk
    network_type: type[SimNetwork] = SimNetwork

    def __init__(
        self,
        loop: Loop,
        seed: int,
        count: int,
        limits: Mapping[str, Any],
        machines: Machines = create_machine,
        old_machines: Machines = create_machine,
    ) -> None:
        self.loop = loop
        self.draw = random.Random(seed)
        self.config = SystemConfig(**{**LIMITS, **limits})
        transport = replace(TransportConfig.of(self.config), refused_timeout_ms=300)
        self.network = self.network_type(loop, transport, self.draw.getrandbits(64))
        self.hosts = {number: Host(number, self.draw) for number in range(1, count + 1)}
        self.machines = machines
        self.old_machines = old_machines
        # Who outlives a leader campaigns as it did when histories were recorded.
        self.staggered = False
        # More than a run has: a segment is switched to in one step.
        self.groups_per_step = 1000
        self.hits: Counter[str] = Counter()
        # Called with (host): when a process is gone, and when its engine takes part.
        self.on_gone: Callable[[Host], None] = lambda host: None
        self.on_ready: Callable[[Host], None] = lambda host: None
        self.on_bug: Callable[[str, BaseException], None] = lambda what, error: None
        SimPath.loop = loop
        loop.on_crash = self._crashed

    # Processes

    def start(self, number: int, crash_in: int = -1) -> None:
        """Begin a process; it takes part when it has recovered. `crash_in`: steps of its disk until it dies."""
        host = self.hosts[number]
        assert host.life is None, f"node {number} is up"
        host.starts += 1
        life = SimLife(self.loop, number, random.Random(self.draw.getrandbits(64)), host.drift, 100.0)
        life.files = host.files
        life.old_program = host.old_program
        life.disk = self.disk_type(host.files, host.faults, life)
        life.disk.crash_in = crash_in
        life.thread_s = host.thread_s
        life.wall_jump_ns = host.wall_jump_ns
        life.doom = self._doomed
        host.life, host.failure, host.ready = life, None, False
        self.spawn(number, self._live(host, life), f"node {number}")

    def _doomed(self, kind: str) -> None:
        self.hits[kind] += 1

    async def _live(self, host: Host, life: SimLife) -> None:
        system = build_system(
            cast(Path, SimPath(host.files.prefix)), host.number, "sim", self.config, disk=life.disk,
            machines=self.old_machines if host.old_program else self.machines, draw=life.draw.randrange,
        )  # fmt: skip
        system.limits.staggered = self.staggered
        system.storage.segment_writer.groups_per_step = self.groups_per_step
        await system.open()
        peers = self.network.enter(
            life, system.host.inbound, self.known_to(host), system.host.disk_health.healthy,
            system.quiescence.digests.digest, system.incarnation.origin, system.incarnation.acquaintances,
            system.vitals,
        )  # fmt: skip
        host.system = system
        host.ready = True
        self.on_ready(host)
        await system.run(peers)

    def known_to(self, host: Host) -> list[int]:
        """The other nodes that a process dials when it begins."""
        return [number for number in self.hosts if number != host.number]

    def spawn(
        self, number: int, coro: Coroutine[Any, Any, Any], what: str, done: Callable[..., None] | None = None
    ) -> None:
        """Run something as a task of a node; what it raises and nobody takes is a bug, or the end of the node."""
        life = self.hosts[number].life
        assert life is not None

        def ended(task: Task, result: Any, error: BaseException | None) -> None:
            if done is not None:
                done(result, error)
            elif error is not None:
                self._ended(self.hosts[number], what, error)

        self.loop.spawn(life, coro, ended)

    def _ended(self, host: Host, what: str, error: BaseException) -> None:
        for cause in leaves(error):
            if host.ready and is_short(cause):
                self.on_bug(what, RuntimeError(f"{type(cause).__name__} ended it for want of descriptors"))
            refused = isinstance(cause, LogyardError | OSError) and not host.ready
            if refused or isinstance(cause, WalFailed | Outdated | Doomed):
                host.failure = cause
            else:
                self.on_bug(what, cause)
                host.failure = cause
        self.loop.soon(None, self.crash, host.number)

    def _crashed(self, life: Life) -> None:
        host = self.hosts[life.node]
        if host.life is life:
            power, host.cut_next = host.cut_next, None
            self.loop.soon(None, self.crash, life.node, None if power is None else partial(self.cut_power, host, power))
            life.alive = False

    def cut_power(self, host: Host, power: tuple[float, float, bool], files: FileSystem) -> None:
        """What was not synced is lost, or part of it."""
        waiting = files.unsynced()
        sectors, names = files.cut(self.draw, *power)
        if sectors or names or waiting:
            self.hits["D1.power_cut"] += 1
        if 0 < sectors < waiting:
            self.hits["D2.zero_tail" if power[2] else "D2.torn"] += 1
        if names:
            self.hits["D3.lost_names"] += 1

    def crash(self, number: int, cut: Callable[[FileSystem], None] | None = None) -> None:
        """End the process as kill -9 does; with `cut` the machine loses power as well."""
        host = self.hosts[number]
        life = host.life
        if life is None:
            return
        self.on_gone(host)
        self.network.leave(life)
        life.alive = True
        life.disk.crash_in = -1
        life.alive = False
        for task in list(life.tasks):
            _close(self.loop, life, task)
        life.tasks.clear()
        host.life, host.system, host.ready = None, None, False
        host.files.kill()
        if cut is not None:
            cut(host.files)

    def stop_all(self) -> None:
        """End of the run."""
        for number in self.hosts:
            self.crash(number)

    # Looking

    @property
    def up(self) -> list[int]:
        """Nodes whose engine takes part."""
        return [number for number, host in self.hosts.items() if host.ready]

    def system(self, number: int) -> System | None:
        """A node's engine, while it takes part."""
        host = self.hosts[number]
        return host.system if host.ready else None

    def node(self, number: int) -> Node:
        """The verbs of a node that is up, made in its process: they read its clock."""
        system, loop = self.system(number), self.loop
        assert system is not None
        before, loop.life = loop.life, self.hosts[number].life
        try:
            return Node(system)
        finally:
            loop.life = before

    def replica(self, number: int, name: str) -> Member | None:
        """A group's member object on a node; None while it hibernates or is not there. Wakes nobody."""
        system = self.system(number)
        return system.members.get(system.names.get(name, 0)) if system is not None else None

    def leads(self, number: int, name: str) -> bool:
        """Whether a node leads a group and knows what is committed."""
        member = self.replica(number, name)
        if member is None or member.raft.stopped:
            return False
        return member.raft.role == LEADER and member.raft.commit >= member.raft.lead_index


def _close(loop: Loop, life: Life, task: Task) -> None:
    before = loop.life
    loop.life, loop.task = life, task
    try:
        task.coro.close()
    except BaseException as error:
        # A clean-up that meets the end of its own world: nothing of it reaches anybody.
        loop.closed_by.append(error)
    finally:
        loop.life, loop.task = before, None


def is_short(error: BaseException | None) -> bool:
    """Return whether a failure comes of a want of descriptors. What was being handled when it happened (`__context__`)
    does not count: a batch that was refused for that hands the WAL to the next, whose failure is its own."""
    while error is not None:
        # The WAL's own failure tells of the first one in words only.
        if os.strerror(errno.EMFILE) in str(error):
            return True
        error = error.__cause__
    return False


def leaves(error: BaseException) -> list[BaseException]:
    """What failed, out of the groups that nurseries make of it."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in leaves(inner)]
    return [error]
