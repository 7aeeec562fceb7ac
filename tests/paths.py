"""`python -m tests.paths [--rounds N] [--json] [--record]`: how long the product's paths are, in files and calls.

Three real nodes and a client run in this process, on loopback. Three things are done again and again, alone: one append
of 8 KiB until it is acknowledged, one release until its bytes are recycled (`truncate`, then `compact` everywhere), and
one snapshot transfer to a new member. While one is under way every call of a function of ours is counted, in every
thread: `calls`, the `files` they lie in, the `changes` from one file to another, the `objects` that were made of our
classes, the `turns` of the ready loop, and the system calls of sockets and of the disk, by name. Of each figure the
smallest of all rounds is shown: the rest is what ticks and renewals add by chance. `--record` writes those of an append
into paths.json, under this version of Python: what a change may not make longer unnoticed (`tests/test_paths.py`).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import trio

from logyard.client.aio import Yard, connect
from logyard.engine.config import SystemConfig
from logyard.protocol.errors import UnknownGroup
from logyard.service.config import NodeConfig, make_secret
from logyard.service.local_cluster import free_ports
from logyard.service.node import serve
from tests.crash.run import place

from .source_tree import PACKAGES, ROOT

MIB = 1 << 20
BODY = bytes(8 << 10)
QUIET: dict[str, Any] = {
    "wal_file_bytes": MIB, "generation_bytes": 16 * MIB, "generation_transaction_bytes": MIB, "wal_stock_files": 0,
    "disk_reserve_bytes": MIB, "hibernate_after_ms": 0, "snapshot_entries": 1 << 30, "migrate_budget_bytes": 1 << 30,
    "disk_probe_ms": 60_000,
}  # fmt: skip
OURS = tuple(str(ROOT / name) + "/" for name in (*PACKAGES, "protocol")) + (str(ROOT / "logyard") + "/",)
TURN = ("ready_loop.py",)
RECORDED = Path(__file__).with_name("paths.json")
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
SYSTEM_CALLS = frozenset(
    {
        "sendmsg", "send", "writev", "recv_into", "recv", "recvmsg_into", "readv", "poll",
        "pwritev", "pwrite", "preadv", "pread", "fdatasync", "fsync",
    }
)  # fmt: skip
NODES = (1, 2, 3)
PATIENCE_S = 60.0
Deed = Callable[[], Awaitable[Any]]


class Counter:
    """Calls of ours while `on`, in all threads. Frames of one file in a row are one visit."""

    def __init__(self) -> None:
        self.on = False
        self.begin()

    def begin(self) -> None:
        """Forget what was counted."""
        self.calls = self.changes = self.objects = self.turns = 0
        self.system: dict[str, int] = {}
        self.files: set[str] = set()
        self.last: dict[int, str] = {}

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Count one call: what `sys.setprofile` calls."""
        if not self.on:
            return
        if event == "c_call":
            name = getattr(argument, "__name__", "")
            if name in SYSTEM_CALLS:
                self.system[name] = self.system.get(name, 0) + 1
            return
        if event != "call":
            return
        code = frame.f_code
        path = code.co_filename
        if not path.startswith(OURS):
            return
        self.calls += 1
        self.files.add(path)
        self.objects += code.co_name in ("__init__", "__new__")
        self.turns += code.co_name == "turn" and path.endswith(TURN)
        thread = threading.get_ident()
        if self.last.get(thread) != path:
            self.last[thread] = path
            self.changes += 1

    def row(self) -> dict[str, int]:
        """Return what was counted."""
        return {
            "files": len(self.files), "calls": self.calls, "changes": self.changes, "objects": self.objects,
            "turns": self.turns, **self.system,
        }  # fmt: skip


class Paths:
    """The cluster, and what is done with it."""

    def __init__(self, counter: Counter, rounds: int) -> None:
        self.counter = counter
        self.rounds = rounds
        self.found: dict[str, dict[str, int]] = {}
        self.where: dict[str, list[str]] = {}

    async def measure(self, name: str, prepare: Deed, act: Deed, times: int = 1) -> None:
        """Do it `rounds` times `times`; keep the least of each figure, and the files of the shortest."""
        for _ in range(self.rounds * times):
            await prepare()
            self.counter.begin()
            self.counter.on = True
            with trio.fail_after(PATIENCE_S):
                await act()
            self.counter.on = False
            row = self.counter.row()
            kept = self.found.setdefault(name, row)
            if row["calls"] <= kept["calls"]:
                self.where[name] = sorted(str(Path(path).resolve().relative_to(ROOT)) for path in self.counter.files)
            self.found[name] = {key: min(kept.get(key, 0), row.get(key, 0)) for key in {**kept, **row}}

    async def run(self, yard: Yard) -> None:
        """Measure all three."""
        await yard.create("one", members=[1, 2, 3])
        log = yard.log("one")

        async def nothing() -> None:
            await trio.lowlevel.checkpoint()

        async def append() -> None:
            await log.append(b"", BODY)

        await append()
        # It is what is held against a record, and beside other work most rounds have what timers add.
        await self.measure("append", nothing, append, 20)

        async def release() -> None:
            await log.truncate((await log.latest()).end)
            await yard.compact()

        await self.measure("release", append, release)
        number = 0

        async def behind() -> None:
            nonlocal number
            number += 1
            name = f"moved-{number}"
            await yard.create(name, members=[1, 2])
            for _ in range(4):
                await yard.log(name).append(b"", BODY)
            await yard.log(name).truncate(2)
            for node in (1, 2):
                await yard.snapshot([name], node)

        async def transfer() -> None:
            name = f"moved-{number}"
            await yard.add_member(name, 3)
            while True:
                with suppress(UnknownGroup):
                    if (await yard.describe(name, 3)).get("end", 0) >= 4:
                        return
                await trio.sleep(0.001)

        await self.measure("transfer", behind, transfer)


async def measured(directory: Path, counter: Counter, rounds: int) -> Paths:
    """Start three nodes, measure, stop them."""
    ports = free_ports(6)
    make_secret(directory / "peer.secret")
    doors = {number: ("127.0.0.1", ports[number - 1]) for number in NODES}
    peers = {number: ("127.0.0.1", ports[number + 2]) for number in NODES}
    paths = Paths(counter, rounds)
    async with AsyncExitStack() as stack:
        nursery = await stack.enter_async_context(trio.open_nursery())
        for number in NODES:
            config = NodeConfig(
                id=number, directory=directory / f"node-{number}", client_listen=doors[number],
                peer_listen=peers[number], peers={other: peers[other] for other in peers if other != number},
                clients={other: doors[other] for other in doors if other != number},
                peer_secret_file=directory / "peer.secret", limits=SystemConfig(**QUIET),
            )  # fmt: skip
            await nursery.start(serve, config)
        async with connect([f"127.0.0.1:{ports[0]}"]) as yard:
            await paths.run(yard)
        nursery.cancel_scope.cancel()
    return paths


def main(arguments: Sequence[str]) -> int:
    """Measure and print; return the exit code."""
    parser = argparse.ArgumentParser("python -m tests.paths", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--files", action="store_true", help="name the files of each path too")
    parser.add_argument("--json", action="store_true", help="one object instead of lines")
    parser.add_argument("--record", action="store_true", help="write down what an append is now")
    given = parser.parse_args(arguments)
    counter = Counter()
    threading.setprofile(counter)
    sys.setprofile(counter)
    try:
        with tempfile.TemporaryDirectory(prefix="logyard-paths-", dir=place()) as name:
            paths = trio.run(measured, Path(name), counter, given.rounds)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    if given.record:
        kept = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
        kept[VERSION] = paths.found["append"]
        RECORDED.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    if given.json:
        print(json.dumps({"ok": True, "paths": paths.found, **({"where": paths.where} if given.files else {})}))
        return 0
    for what, row in paths.found.items():
        print(f"{what:10}" + "".join(f"  {count:6} {key}" for key, count in row.items()))
        if given.files:
            print("".join(f"    {path}\n" for path in paths.where[what]), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
