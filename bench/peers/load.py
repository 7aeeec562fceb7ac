"""One load process of a rival: connections, clients with a window each or a rate, one loop of callbacks.

Run as ``python -m logyard.bench.peers.load`` with the conversation of `bench.load`: a specification, "ready", "go", one
JSON line. A rival brings a `Wire`: bytes of a request, and what an answer's bytes mean. No task is switched for an
operation, so that the process is not what is measured; `client_share` of the report shows it.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ..histogram import Histogram
from ..loops import run_process
from ..report import shares
from ..workload import Workload
from .peer import WATCH, PeerSpec

DRAIN_S = 60.0
PROBLEMS_MAX = 5
PACE_S = 0.001
OPEN_S = 120.0
BUFFER = 1 << 20
CONNECTIONS = 4
"""Of a process, where a rival lets many operations share one; one for each client else."""


class Wire(asyncio.Protocol):
    """One connection to a rival. `answered(count)` is called with how many operations, oldest first, were done.

    A rival overrides `hello`, `request` and `feed`; `shared`: many clients may use one connection.
    """

    shared = True

    def __init__(self, spec: PeerSpec) -> None:
        self.spec = spec
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport
        self.waiting: deque[tuple[int, float]] = deque()
        self.load: PeerLoad | None = None
        self.buffer = bytearray()
        self.out: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport and greet."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.hello()

    def hello(self) -> None:
        """Say what has to be said before the first request; set `opened` when requests may come."""
        self.opened.set_result(None)

    def data_received(self, data: bytes) -> None:
        """Hand over what came, with what was left before."""
        self.buffer += data
        try:
            used = self.feed(self.buffer)
        except Exception as error:
            self.failed(error)
            return
        del self.buffer[:used]
        self.flush()

    def feed(self, data: bytearray) -> int:
        """Take whole answers; return how many bytes they were."""
        raise NotImplementedError

    def request(self, log: str, body: bytes) -> None:
        """Put one operation's bytes to `out`."""
        raise NotImplementedError

    def serve(self, load: PeerLoad) -> None:
        """Take whose operations these are."""
        self.load = load

    def flush(self) -> None:
        """Send what was put out, all in one call."""
        if self.out:
            self.transport.write(b"".join(self.out))
            self.out.clear()

    def answered(self, count: int = 1) -> None:
        """Count the oldest operations as done, and submit as many again."""
        assert self.load is not None
        self.load.done(self, [self.waiting.popleft() for _ in range(count)])

    def watch(self, count: int) -> None:
        """Open so many watches of the one key of a load that watches; tell `load` of them, and of what they see."""
        raise NotImplementedError

    def failed(self, error: Exception) -> None:
        """End the load: an answer that is none."""
        if not self.opened.done():
            self.opened.set_exception(error)
        elif self.load is not None:
            self.load.fail(error)

    def connection_lost(self, error: Exception | None) -> None:
        """Fail if anything was under way."""
        if self.load is None or self.waiting:
            self.failed(error or ConnectionError("the connection was closed"))


class PeerLoad:
    """The state of one load process."""

    def __init__(self, spec: PeerSpec, wires: Sequence[Wire]) -> None:
        self.spec = spec
        self.wires = wires
        self.workload = Workload(spec.size, spec.seed, spec.lane)
        self.histogram = Histogram()
        self.places = [client * len(spec.names) // spec.clients for client in range(spec.clients)]
        self.number = 0
        self.outstanding = self.acknowledged = self.counted = self.lost = 0
        self.problems: list[str] = []
        self.measure_from = self.measure_until = 0.0
        self.drained = asyncio.Event()

    def submit(self, wire: Wire, client: int, start: float) -> None:
        """Submit one operation of a client; `start` is when it was due."""
        names, place = self.spec.names, self.places[client]
        self.places[client] = place + 1 if place + 1 < len(names) else 0
        wire.waiting.append((client, start))
        self.number += 1
        self.outstanding += 1
        wire.request(names[place], self.workload.body(self.number))

    def done(self, wire: Wire, operations: Sequence[tuple[int, float]]) -> None:
        """Count operations that are answered."""
        now = time.perf_counter()
        self.outstanding -= len(operations)
        self.acknowledged += len(operations)
        if self.measure_from <= now < self.measure_until:
            self.counted += len(operations)
        for _, start in operations:
            # With a rate by when it was due, as in `bench.load`.
            if self.measure_from <= (start if self.spec.rate else now) < self.measure_until:
                self.histogram.add(now - start)
        if now < self.measure_until:
            if not self.spec.rate:
                for client, _ in operations:
                    self.submit(wire, client, now)
        elif not self.outstanding:
            self.drained.set()

    def fail(self, error: Exception) -> None:
        """Note what went wrong and end."""
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(f"{type(error).__name__}: {error}")
        self.drained.set()

    def wire_of(self, client: int) -> Wire:
        """Return the connection of a client."""
        return self.wires[client % len(self.wires)]

    async def run(self) -> None:
        """Warm up, measure, drain."""
        spec, began = self.spec, time.perf_counter()
        self.measure_from = began + spec.warmup_s
        self.measure_until = self.measure_from + spec.seconds
        if spec.rate:
            await self.pace(began)
        else:
            for client in range(spec.clients):
                wire = self.wire_of(client)
                for _ in range(spec.window):
                    self.submit(wire, client, time.perf_counter())
                wire.flush()
                await asyncio.sleep(0)
        try:
            await asyncio.wait_for(self.drained.wait(), spec.warmup_s + spec.seconds + DRAIN_S)
        except TimeoutError:
            self.fail(TimeoutError(f"{self.outstanding} operations were not answered"))

    async def pace(self, began: float) -> None:
        """Submit each operation when it is due; those that became due during a stall at once, with their times."""
        spec, number = self.spec, 0
        total = int((self.measure_until - began) * spec.rate)
        # To the end of the time, also when all are sent: only what is answered after it looks whether it was the last.
        while (now := time.perf_counter()) < self.measure_until or number < total:
            if self.problems:
                break
            due = min(total, int((now - began) * spec.rate) + 1)
            for at in range(number, due):
                self.submit(self.wire_of(at % spec.clients), at % spec.clients, began + at / spec.rate)
            for wire in self.wires if due > number else ():
                wire.flush()
            number = due
            await asyncio.sleep(PACE_S)
        if not self.outstanding:
            self.drained.set()

    def result(self, cpu_s: float) -> dict[str, Any]:
        """Return what the parent merges."""
        return {
            "counted": self.counted, "acknowledged": self.acknowledged,
            "failed": self.outstanding if self.problems else 0, "verified": 0, "lost": 0,
            "histogram": self.histogram.dump(), "problems": self.problems, "cpu_s": round(cpu_s, 3),
        }  # fmt: skip


class WatchLoad(PeerLoad):
    """Watchers, and in the process of lane 0 one client that writes what all watch. What counts is events: a body's
    number is when its put began, in nanoseconds of the clock that all processes share; that of the last one is 0."""

    def __init__(self, spec: PeerSpec, wires: Sequence[Wire]) -> None:
        super().__init__(spec, wires)
        self.workload = Workload(spec.size, spec.seed, 0)
        self.watching = self.ended = 0
        self.everybody = asyncio.Event()
        self.over = False

    def created(self) -> None:
        """Count a watch that is there."""
        self.watching += 1
        if self.watching == self.spec.watchers:
            self.everybody.set()

    def seen(self, body: bytes) -> None:
        """Count an event."""
        now, number = time.perf_counter(), self.workload.number_of(body)
        if number:
            self.acknowledged += 1
            if self.measure_from <= now < self.measure_until:
                self.counted += 1
                self.histogram.add(now - number / 1e9)
        elif number is None:
            self.fail(ValueError("an event of a value that nobody put"))
        else:
            self.ended += 1
            if self.ended == self.spec.watchers:
                self.drained.set()

    def put(self, wire: Wire) -> None:
        """Put the next value, or the last one."""
        number = 0 if self.over else time.perf_counter_ns()
        wire.waiting.append((0, 0.0))
        wire.request(self.spec.names[0], self.workload.body(number))
        wire.flush()

    def done(self, wire: Wire, operations: Sequence[tuple[int, float]]) -> None:
        """Go on after a put."""
        if not self.over:
            self.over = time.perf_counter() >= self.measure_until
            self.put(wire)

    async def run(self) -> None:
        """Watch, write, and wait until every watcher has seen the last write."""
        spec = self.spec
        try:
            for wire, count in zip(self.wires, shares(spec.watchers, len(self.wires)), strict=True):
                wire.watch(count)
                wire.flush()
            await asyncio.wait_for(self.everybody.wait(), OPEN_S)
            self.measure_from = time.perf_counter() + spec.warmup_s
            self.measure_until = self.measure_from + spec.seconds
            if not spec.lane:
                self.put(self.wires[0])
            await asyncio.wait_for(self.drained.wait(), spec.warmup_s + spec.seconds + DRAIN_S)
        except TimeoutError:
            self.fail(TimeoutError(f"{spec.watchers - self.ended} watchers have not seen the last write"))


async def connected(make: Callable[[PeerSpec], Wire], spec: PeerSpec) -> list[Wire]:
    """Return the connections of this process, spread over the addresses, greeted."""
    loop = asyncio.get_running_loop()
    wires: list[Wire] = []
    for number in range(min(spec.watchers or spec.clients, CONNECTIONS) if make(spec).shared else spec.clients):
        host, _, port = spec.addresses[number % len(spec.addresses)].rpartition(":")
        transport, wire = await loop.create_connection(lambda: make(spec), host, int(port))
        transport.set_write_buffer_limits(high=BUFFER)
        await asyncio.wait_for(wire.opened, OPEN_S)
        wires.append(wire)
    return wires


async def load_main(spec: PeerSpec) -> None:
    """Connect, load, print."""
    from .catalogue import MODULES

    make = importlib.import_module(f"logyard.bench.peers.{MODULES[spec.peer]}").WIRE
    wires = await connected(make, spec)
    load = (WatchLoad if spec.mode == WATCH else PeerLoad)(spec, wires)
    for wire in wires:
        wire.serve(load)
    print("ready", flush=True)
    if sys.stdin.readline().strip() != "go":
        return
    cpu = time.process_time()
    await load.run()
    print(json.dumps(load.result(time.process_time() - cpu)), flush=True)


def free_ports(count: int) -> list[int]:
    """Return loopback ports that are free now."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def accepts(address: str) -> bool:
    """Return whether somebody listens there."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), 1.0):
            return True
    except OSError:
        return False


def asked(address: str, question: bytes, until: bytes, timeout_s: float = 5.0) -> bytes:
    """Send bytes, return what comes until `until` is in it, or the connection ends."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout_s) as stream:
        stream.sendall(question)
        found = b""
        while until not in found:
            more = stream.recv(65_536)
            if not more:
                break
            found += more
        return found


def main() -> None:
    """Enter the process: its specification is the first line that it reads."""
    spec = PeerSpec(**json.loads(sys.stdin.readline()))
    run_process(load_main, spec, "asyncio", "load process")


if __name__ == "__main__":
    main()
