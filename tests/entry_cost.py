"""`python -m tests.entry_cost [--logs N] [--nodes N] [--seconds S] [--json]`: processor time of an entry.

All nodes and a client run in this process, on loopback, over a directory in memory: each log has one caller, which
appends again when it is answered, so each entry holds one record. What is counted is this thread's time, and that of
the whole process, in windows of a quarter of a second; `us` is the window at a fifth of them, `us_median` the middle
one: what others on the machine take of its caches adds to the rest. `per_entry` is how often what happened:
messages that cores took (`step`), `Ready`s made, commit indexes that went alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import trio

from logyard.client.aio import Log, Yard, connect
from logyard.engine.config import SystemConfig
from logyard.engine.raft import replication
from logyard.engine.raft.core import Raft
from logyard.service import memory
from logyard.service.config import NodeConfig, make_secret
from logyard.service.local_cluster import free_ports
from logyard.service.node import serve

WARMUP_S = 2.0
WINDOW_S = 0.25
BATCH = 500
COUNTED = ((Raft, "step"), (Raft, "ready"), (replication, "_send_commit"))


@contextmanager
def counting(counts: Counter[str]) -> Iterator[None]:
    """Count calls of what tells how much is done for an entry."""
    before = [(owner, name, getattr(owner, name)) for owner, name in COUNTED]

    def counted(name: str, call: Any) -> Any:
        def one(*arguments: Any) -> Any:
            counts[name] += 1
            return call(*arguments)

        return one

    for owner, name, call in before:
        setattr(owner, name, counted(name.strip("_"), call))
    try:
        yield
    finally:
        for owner, name, call in before:
            setattr(owner, name, call)


class Meter:
    """Appends answered so far, and what they cost by windows."""

    def __init__(self, size: int) -> None:
        self.body = bytes(size)
        self.appended = 0
        self.over = False
        self.thread_us: list[float] = []
        self.process_us: list[float] = []
        self.rates: list[float] = []

    async def append(self, log: Log) -> None:
        """Append again and again."""
        while not self.over:
            await log.append(b"", self.body)
            self.appended += 1

    async def watch(self, seconds: float) -> None:
        """Measure windows for so long, then end the appends."""
        for _ in range(max(1, round(seconds / WINDOW_S))):
            before, thread, process, began = self.appended, time.thread_time(), time.process_time(), time.monotonic()
            await trio.sleep(WINDOW_S)
            done = max(1, self.appended - before)
            self.thread_us.append((time.thread_time() - thread) / done * 1e6)
            self.process_us.append((time.process_time() - process) / done * 1e6)
            self.rates.append(done / (time.monotonic() - began))
        self.over = True


async def run(directory: Path, nodes: int, logs: int, size: int, seconds: float) -> dict[str, Any]:
    """Start a cluster, load it, and return what an entry cost."""
    numbers = range(1, nodes + 1)
    ports = free_ports(2 * nodes)
    doors = {number: ("127.0.0.1", ports[number - 1]) for number in numbers}
    peers = {number: ("127.0.0.1", ports[nodes + number - 1]) for number in numbers}
    secret = directory / "peer.secret"
    make_secret(secret)
    meter, counts = Meter(size), Counter[str]()
    async with AsyncExitStack() as stack:
        nursery = await stack.enter_async_context(trio.open_nursery())
        for number in numbers:
            config = NodeConfig(
                id=number, directory=directory / f"node-{number}", client_listen=doors[number],
                peer_listen=peers[number], peers={other: peers[other] for other in numbers if other != number},
                clients={other: doors[other] for other in numbers if other != number}, peer_secret_file=secret,
                limits=SystemConfig(hibernate_after_ms=0),
            )  # fmt: skip
            await nursery.start(serve, config)
        async with connect([f"127.0.0.1:{ports[0]}"]) as yard:
            await _load(yard, meter, counts, logs, seconds, tuple(numbers))
        nursery.cancel_scope.cancel()
    fifth = sorted(meter.thread_us)[len(meter.thread_us) // 5]
    return {
        "ok": True, "nodes": nodes, "logs": logs, "size": size, "seconds": seconds, "us": round(fifth, 1),
        "us_median": round(statistics.median(meter.thread_us), 1),
        "process_us_median": round(statistics.median(meter.process_us), 1),
        "entries_per_s": round(statistics.median(meter.rates)),
        "per_entry": {name: round(count / meter.appended, 2) for name, count in sorted(counts.items())},
    }  # fmt: skip


async def _load(
    yard: Yard, meter: Meter, counts: Counter[str], logs: int, seconds: float, members: Sequence[int]
) -> None:
    names = [f"log-{number}" for number in range(logs)]
    for at in range(0, logs, BATCH):
        await yard.create_many(names[at : at + BATCH], members=list(members))
    async with trio.open_nursery() as nursery:
        for name in names:
            nursery.start_soon(meter.append, yard.log(name))
        await trio.sleep(WARMUP_S)
        memory.begin()
        meter.appended = 0
        with counting(counts):
            await meter.watch(seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.entry_cost", description=__doc__)
    parser.add_argument("--logs", type=int, default=1000)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--json", action="store_true", help="one object instead of lines")
    given = parser.parse_args(arguments)
    if min(given.logs, given.nodes, given.size) < 1 or given.seconds <= 0:
        parser.error("logs, nodes, size and seconds are above 0")
    memory_directory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="logyard-entry-", dir=memory_directory) as name:
        found = trio.run(run, Path(name), given.nodes, given.logs, given.size, given.seconds)
    if given.json:
        print(json.dumps(found))
    else:
        print(f"{found['us']} us of this thread an entry (median {found['us_median']}), {found['entries_per_s']} /s")
        print("an entry: " + ", ".join(f"{count} {name}" for name, count in found["per_entry"].items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
