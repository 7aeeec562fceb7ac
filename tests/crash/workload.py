"""A node's life in a few seconds, run under strace: ``python -m tests.crash.workload DIRECTORY SEED STEPS [EVENTS]``.

Appends of all sizes, truncations, snapshots, migrations, groups that come and go, system groups whose rings wrap, and
a restart in the middle; with some seeds large bodies of generations lie in files beside LMDB. What it is about to do
and what is done it writes to DIRECTORY.marks, one JSON object a line: both are part of the trace.
With EVENTS the disk door records too, as `recorder` does it, into that file.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import trio

from logyard.engine.config import SystemConfig
from logyard.engine.disk.door import Disk
from logyard.machines.log import AppendLog
from logyard.payloads.layout import BESIDE_BYTES
from logyard.service import embedded, node
from tests.inside import engine_of
from tests.notes import KIND, NAME, SLOTS, Notes

from .recorder import RecordingDisk

CONFIG = SystemConfig(
    wal_file_bytes=1 << 20, wal_batch_bytes=64 << 10, wal_stock_files=1, disk_reserve_bytes=0,
    generation_bytes=16 << 20, snapshot_entries=16, tick_ms=5, hibernate_after_ms=600_000, disk_probe_ms=60_000,
    ring_slots=SLOTS,
)  # fmt: skip
"""Nothing falls asleep; what is created asleep stays so until it is used."""
MACHINES = {KIND: Notes}
BATCH = 12
SIZES = (0, 5, 100, 3000, 20_000, 90_000)


def body(number: int) -> bytes:
    """The payload of record `number`."""
    draw = random.Random(number)
    return number.to_bytes(8, "big") + draw.randbytes(draw.choice(SIZES))


class Script:
    """One run of steps drawn from a seed."""

    def __init__(self, path: Path, seed: int, marks: int) -> None:
        self.path = path
        self.draw = random.Random(seed)
        self.marks = marks
        self.number = 0
        self.ends: dict[str, int] = {}
        self.asleep: list[str] = []
        """Of batches, those that nobody used yet."""
        self.greedy = False
        """Only appends and notes, until something is full."""
        self.noted = ""
        """The system group that there is."""
        self.own = random.Random(f"{seed} bodies")
        """Of what came later than the seeds that are to be run again."""
        self.beside = self.own.random() < 0.5
        """With a file for large bodies beside the rows of each generation."""

    def mark(self, **what: object) -> None:
        """A line among the marks, in one write."""
        os.write(self.marks, (json.dumps(what) + "\n").encode())

    async def life(self, steps: int) -> None:
        """Open, do `steps` things, close."""
        config = replace(CONFIG, generation_files=int(self.beside))
        moved = self.own.randrange(steps) if self.beside else steps
        async with embedded.open_system(self.path, config, machines=MACHINES) as system:
            logs: dict[str, embedded.EmbeddedLog] = {}
            for name in list(self.ends):
                logs[name] = await system.start_group(name, AppendLog())
            for number in range(steps):
                await self.step(system, logs)
                if number == moved:
                    await self.move(system, logs)

    async def step(self, system: embedded.EmbeddedSystem, logs: dict[str, embedded.EmbeddedLog]) -> None:
        """One thing."""
        chance = 1.0 if self.greedy else self.draw.random()
        if self.draw.random() < 0.4:
            await self.note(system)
        if len(logs) < 2 or (chance < 0.04 and len(logs) < 5):
            name = f"log-{self.number}-{len(logs)}"
            self.mark(do="create", log=name)
            logs[name] = await system.start_group(name, AppendLog())
            self.ends[name] = 0
            self.mark(done="create", log=name)
            return
        if not self.greedy and len(self.asleep) < BATCH and self.draw.random() < 0.05:
            await self.create_batch(system)
            return
        if self.asleep and self.draw.random() < 0.03:
            name = self.asleep.pop(self.draw.randrange(len(self.asleep)))
            logs[name], self.ends[name] = await system.start_group(name, AppendLog()), 0
        name = self.draw.choice(sorted(logs))
        if chance < 0.07 and len(logs) > 2:
            self.mark(do="delete", log=name)
            await system.delete_group(name)
            del logs[name], self.ends[name]
            self.mark(done="delete", log=name)
        elif chance < 0.14 and self.ends[name]:
            before = self.draw.randrange(self.ends[name]) + 1
            self.mark(do="truncate", log=name, before=before)
            await logs[name].truncate(before)
            self.mark(done="truncate", log=name, before=before)
        elif chance < 0.18:
            await logs[name].snapshot()
        elif chance < 0.20:
            await system.compact()
        else:
            async with trio.open_nursery() as nursery:
                for one in self.draw.sample(sorted(logs), self.draw.randint(1, 2)):
                    nursery.start_soon(self.append, one, logs[one])

    async def move(self, system: embedded.EmbeddedSystem, logs: dict[str, embedded.EmbeddedLog]) -> None:
        """Have a large body come to lie in a generation."""
        while len(body(self.number + 1)) < BESIDE_BYTES:
            self.number += 1
        name = self.own.choice(sorted(logs))
        await self.append(name, logs[name])
        await system.compact()

    async def note(self, system: embedded.EmbeddedSystem) -> None:
        """Some commands of a system group, whose WAL file may be full by then; now and then the group is another."""
        if self.noted and not self.greedy and self.draw.random() < 0.05:
            self.mark(do="delete", log=self.noted)
            await system.delete_group(self.noted)
            self.mark(done="delete", log=self.noted)
            self.noted = ""
        if not self.noted:
            self.number += 1
            self.noted = f"{NAME}-{self.number}"
            self.mark(do="create", log=self.noted)
            await system.start_group(self.noted, Notes())
            self.mark(done="create", log=self.noted)
        for _ in range(self.draw.randint(1, 6)):
            self.number += 1
            number = self.number
            self.mark(do="note", log=self.noted, number=number)
            await system.machine(self.noted).command(b"%d" % number + bytes(self.draw.choice((0, 0, 200, 5000))))
            self.mark(done="note", log=self.noted, number=number)
        if self.draw.random() < 0.5:
            janitor = engine_of(system).storage.janitor
            async with janitor.lock:
                await janitor.roll()

    async def create_batch(self, system: embedded.EmbeddedSystem) -> None:
        """Many at once."""
        self.number += 1
        names = [f"batch-{self.number}-{number}" for number in range(BATCH)]
        for name in names:
            self.mark(do="create", log=name, batch=self.number)
        await system.create_batch(names)
        for name in names:
            self.mark(done="create", log=name)
        self.asleep += names

    async def append(self, name: str, log: embedded.EmbeddedLog) -> None:
        """One record."""
        self.number += 1
        number = self.number
        self.mark(do="append", log=name, number=number)
        offset = await log.append(b"", body(number))
        self.ends[name] = offset + 1
        self.mark(done="append", log=name, number=number, offset=offset)


def main() -> None:
    """Two lives on one directory."""
    path, seed, steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    recorder: RecordingDisk | None = None
    if len(sys.argv) > 4:
        recorder = RecordingDisk(str(path))
        make: Callable[[], Disk] = partial(lambda found: found, recorder)
        setattr(node, "Disk", make)  # noqa: B010  # a class is no place to assign to for mypy
    marks = os.open(f"{path}.marks", os.O_CREAT | os.O_WRONLY, 0o600)
    script = Script(path, seed, marks)
    for _ in range(2):
        trio.run(script.life, steps)
    if recorder is not None:
        Path(sys.argv[4]).write_bytes(pickle.dumps(recorder.events))


if __name__ == "__main__":
    main()
