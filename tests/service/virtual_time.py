"""A cluster of this process under trio's MockClock: virtual time passes only when nothing else can happen.

trio's autojump looks at tasks alone: while a thread syncs the WAL all tasks wait, and the clock would run away. Here a
task of the test moves the clock to the next deadline, and only while no thread of any node has work under way. The
engine's other clock, the module `time`, follows trio's, so that both tell the same. Used by tests with `mock_clock`.
"""

from __future__ import annotations

import random
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import trio
import trio.testing

from logyard.client import aio
from logyard.client.aio import Yard, connect
from logyard.protocol.errors import decode_error
from logyard.protocol.frame import encode_frame
from logyard.service import memory_cluster
from logyard.service.door.server import Connection, RpcServer
from logyard.service.memory_cluster import MemoryCluster, cluster
from logyard.service.node import Node

WALL_S = 1_750_000_000
LOOK_S = 0.02
STEP_MS = 20
"""Of the memory network: no frame takes longer than it needs, but timers of links do."""
STILL_S = 0.0002
"""Of real time, between two looks at threads that have work under way."""
LIMITS: dict[str, Any] = {
    "tick_ms": 100,
    "election_ticks": 10,
    "liveness_interval_ms": 250,
    "liveness_timeout_ms": 1500,
    "disk_probe_ms": 60_000,
}
"""About those of a daemon: nobody waits for them here."""


class _Time:
    """Stands for the module `time`."""

    def __init__(self, clock: trio.testing.MockClock) -> None:
        self._clock = clock

    def monotonic(self) -> float:
        return self._clock.current_time() + 100.0

    def monotonic_ns(self) -> int:
        return round(self.monotonic() * 1e9)

    def clock_gettime_ns(self, clock: int) -> int:
        """Nothing is suspended here."""
        return self.monotonic_ns()

    def time(self) -> float:
        return WALL_S + self._clock.current_time()

    def time_ns(self) -> int:
        return round(self.time() * 1e9)

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


class Replies:
    """A sink: the answers by request, `(status, bytes)`."""

    def __init__(self) -> None:
        self.found: dict[int, tuple[int, bytes]] = {}

    def reply(self, request: int, status: int, data: bytes) -> None:
        self.found[request] = status, bytes(data)

    def code(self, request: int) -> str:
        """The error's, or nothing."""
        status, data = self.found[request]
        return decode_error(data).code if status else ""


class _Pair(Connection):
    """A client's end of a pair of sockets: what is sent is there at once, whatever the machine does meanwhile."""

    __slots__ = ()

    async def _secure(self) -> None:
        """No TCP, no TLS."""


class Doors:
    """What clients dial: "127.0.0.1:N" is node N's rpc server, without a port."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._open: dict[int, RpcServer] = {}

    def open(self, node: Node, ids: list[int]) -> None:
        """From now on a node answers clients."""
        addresses = {number: f"127.0.0.1:{number}" for number in ids}
        admission = node.system.admission
        server = RpcServer(node, "127.0.0.1:0", addresses, node.system.config, delay=admission.delay)
        admission.door(server.buffered)
        self._open[node.node_id] = server

    def close(self, number: int) -> None:
        """Its connections end, and it answers nobody."""
        server = self._open.pop(number, None)
        for connection in list(server.connections) if server is not None else ():
            connection.scope.cancel()

    async def dial(self, host: str, port: int, context: object = None) -> Any:
        """In place of the client's `open_socket`."""
        server = self._open.get(port)
        if server is None:
            raise ConnectionRefusedError(f"node {port} is not there")
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        connection = _Pair(server, ours)
        server.connections.add(connection)
        self._nursery.start_soon(self._serve, connection)
        return trio.socket.from_stdlib_socket(theirs)

    async def _serve(self, connection: Connection) -> None:
        try:
            await connection.run()
        finally:
            connection.server.connections.discard(connection)


class VirtualCluster:
    """Nodes whose time is the clock's. `run` is the cluster; `threads` counts jobs under way."""

    def __init__(self, run: MemoryCluster, clock: trio.testing.MockClock, doors: Doors) -> None:
        self.run = run
        self.clock = clock
        self.doors = doors
        self.threads = 0

    def busy(self) -> bool:
        """Whether a thread has work that was not brought back yet."""
        return self.threads > 0 or any(node.system.storage.group_commit.busy for node in self.run.nodes.values())

    async def flow(self) -> None:
        """Move the clock whenever nothing else can happen."""
        while True:
            await trio.testing.wait_all_tasks_blocked(STILL_S if self.busy() else 0.0)
            if not self.busy():
                seconds = trio.lowlevel.current_statistics().seconds_to_next_deadline
                assert seconds < 1e6, "nothing will ever happen again"
                self.clock.jump(max(0.0, seconds))

    async def until(self, condition: Callable[[], object], seconds: float = 60.0) -> float:
        """Virtual seconds until `condition` holds. Fails after `seconds`."""
        began = trio.current_time()
        with trio.move_on_after(seconds):
            while not condition():
                await trio.sleep(LOOK_S)
            return trio.current_time() - began
        raise AssertionError(f"not within {seconds} s of virtual time")

    def leaders(self, name: str) -> list[int]:
        """The nodes that lead a group and know what is committed."""
        return [number for number in self.run.nodes if self.run._leads(number, name)]

    async def create(self, name: str, machine: str = "log") -> int:
        """A group on all nodes; its leader."""
        nodes = self.run.nodes
        await self.until(lambda: all(len(node.system.live) == len(nodes) for node in nodes.values()))
        await nodes[1].create_groups([{"name": name, "members": list(nodes), "machine": machine, "arguments": {}}])
        await self.until(lambda: self.leaders(name))
        return self.leaders(name)[0]

    def submit(self, number: int, name: str, sink: Replies, request: int, frame: bytes) -> None:
        """One frame to a node, answered at `sink`. Raises what it is refused with at once."""
        node = self.run.nodes[number]
        node.system.replicas.commands.submit(node.system.member(name).uid, memoryview(frame), sink, request)

    async def stop(self, number: int) -> None:
        """A node ends in order: as a daemon does that was told to."""
        self.doors.close(number)
        node = self.run.nodes.pop(number)
        scope, ended = self.run._scopes.pop(number)
        scope.cancel()
        await ended.wait()
        self.run.network.crash(number)
        node.system.part()
        node.system.close()


def frame(body: bytes, *, command: bytes, session: int = 0, sequence: int = 0) -> bytes:
    """One record as a client's frame."""
    return b"".join(encode_frame([(b"", body)], command=command, session=session, sequence=sequence))


@contextmanager
def _on_clock(found: VirtualCluster) -> Iterator[None]:
    """The modules of logyard see the clock, and jobs of threads are counted."""
    shown = _Time(found.clock)
    changed = [
        one for name, one in sys.modules.items() if name.startswith("logyard.") and vars(one).get("time") is time
    ]
    real: Any = trio.to_thread.run_sync

    async def run_sync(*arguments: Any, **named: Any) -> Any:
        found.threads += 1
        try:
            return await real(*arguments, **named)
        finally:
            found.threads -= 1

    for one in changed:
        vars(one)["time"] = shown
    vars(trio.to_thread)["run_sync"] = run_sync
    dial: Any = aio.open_socket
    vars(aio)["open_socket"] = found.doors.dial
    build: Any = vars(memory_cluster)["build_system"]

    def built(path: Path, number: int, *given: Any, **named: Any) -> Any:
        return build(path, number, *given, draw=apart(number), **named)

    vars(memory_cluster)["build_system"] = built
    try:
        yield
    finally:
        vars(memory_cluster)["build_system"] = build
        vars(aio)["open_socket"] = dial
        vars(trio.to_thread)["run_sync"] = real
        for one in changed:
            vars(one)["time"] = time


def apart(number: int) -> Callable[[int], int]:
    """Draw timeouts that no two of three nodes share: no election is split, so there is a bound on how long one takes
    (split ones have their tests in `engine/raft` and in the simulator)."""
    chance, ticks = random.Random(number), LIMITS["election_ticks"]
    return lambda count: number * count // 4 if count == ticks else chance.randrange(count)


@asynccontextmanager
async def virtual_cluster(
    path: Path, clock: trio.testing.MockClock, nodes: int = 3, **limits: Any
) -> AsyncIterator[VirtualCluster]:
    """A running cluster whose time flows while the block runs."""
    async with trio.open_nursery() as nursery:
        doors = Doors(nursery)
        found = VirtualCluster(None, clock, doors)  # type: ignore[arg-type]
        with _on_clock(found):
            async with cluster(path, nodes, **{**LIMITS, **limits}) as run:
                found.run = run
                run.network._step_ms = STEP_MS
                for node in run.nodes.values():
                    doors.open(node, run.ids)
                async with trio.open_nursery() as inner:
                    inner.start_soon(found.flow)
                    yield found
                    inner.cancel_scope.cancel()
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def client(found: VirtualCluster, **options: Any) -> AsyncIterator[Yard]:
    """A client of all its nodes."""
    async with connect([f"127.0.0.1:{number}" for number in found.run.ids], **options) as yard:
        yield yard


__all__ = ["Doors", "Replies", "VirtualCluster", "client", "frame", "virtual_cluster"]
