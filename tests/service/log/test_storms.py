"""Logs with limits, producers and keys under crashes, snapshots and compactions: every member comes to the same, and
each of them can read all that is left."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import trio

from logyard.machines.log.command import APPEND_REPLY
from logyard.protocol.errors import Busy, NotLeader, Unknown
from logyard.protocol.frame import Frame, produce_command
from logyard.protocol.records import Page
from logyard.testing import MemoryCluster, cluster

STEPS = 90


class Storm:
    """One log of each shape, and what must be in it: bodies by offset, and by key the offset of its newest record."""

    def __init__(self, run: MemoryCluster, seed: int) -> None:
        self.run = run
        self.draw = random.Random(seed)
        self.bodies: dict[str, dict[int, bytes | None]] = {"kept": {}, "keyed": {}}
        self.newest: dict[bytes, int] = {}
        self.sequence = 0
        self.down = 0

    async def commit(self, name: str, frame: Frame) -> range:
        """A frame, sent until it is in; only frames that may be sent twice."""
        while True:
            leader = await self.run.leader(name)
            try:
                node = self.run.nodes[leader]
                with trio.fail_after(20):
                    reply = await node.commit(self.run.member(leader, name), frame.encode())
                first, count = APPEND_REPLY.unpack(reply)
                return range(first, first + count)
            except (Busy, NotLeader, Unknown):
                await trio.sleep(0.01)

    async def produce(self) -> None:
        self.sequence += 1
        bodies = [self.draw.randbytes(self.draw.choice([5, 800, 6000])) for _ in range(self.draw.choice([1, 3]))]
        for _ in range(self.draw.choice([1, 1, 2])):
            frame = Frame(command=produce_command(7, self.sequence))
            frame.put_many([(b"%d" % self.sequence, body) for body in bodies])
            offsets = await self.commit("kept", frame)
            self.bodies["kept"].update(zip(offsets, bodies, strict=True))

    async def put(self) -> None:
        keys = [b"%d" % self.draw.randrange(12) for _ in range(self.draw.choice([1, 1, 4]))]
        bodies = [None if self.draw.random() < 0.1 else self.draw.randbytes(3000) for _ in keys]
        frame = Frame()
        frame.put_many([(key, body) for key, body in zip(keys, bodies, strict=True)], keys)
        # Sent twice after an unknown outcome it takes its own place: the newest one is what counts.
        offsets = await self.commit("keyed", frame)
        self.bodies["keyed"].update(zip(offsets, bodies, strict=True))
        self.newest.update(zip(keys, offsets, strict=True))

    async def step(self) -> None:
        """One thing that happens."""
        what = self.draw.random()
        if what < 0.35:
            await self.produce()
        elif what < 0.75:
            await self.put()
        elif what < 0.82 and not self.down:
            self.down = self.draw.choice(self.run.ids)
            await self.run.crash(self.down)
        elif what < 0.90 and self.down:
            await self.run.start(self.down)
            self.down = 0
        else:
            node = self.run.nodes[self.draw.choice(list(self.run.nodes))]
            await (node.snapshot() if what < 0.95 else node.compact())

    async def check(self) -> None:
        """All members equal; what is left is what was written."""
        for name in ("kept", "keyed"):
            await self.run.check(name)
            for number in self.run.ids:
                found = await self.read(number, name)
                machine = self.run.machine(number, name)
                want = sorted(self.newest.values()) if name == "keyed" else list(range(machine.start, machine.end))
                assert list(found) == want, (name, number)
                assert found == {offset: self.bodies[name][offset] for offset in want}, (name, number)
        kept = self.run.machine(1, "kept")
        assert 40 <= kept.end - kept.start <= 40 + 40 // 8 + 3

    async def read(self, number: int, name: str) -> dict[int, bytes | None]:
        node = self.run.nodes[number]
        bounds = await node.bounds(name)
        found: dict[int, bytes | None] = {}
        at = bounds["start"]
        while at < bounds["end"]:
            header, blocks = await node.poll(name, at, 1000, 1 << 20, 0.0, True, "local")
            page = Page(b"".join(blocks), header["start"], header["end"], number, at, 1000)
            found.update((record.offset, record.payload) for record in page)
            assert page.next > at
            at = page.next
        return found


async def retained(run: MemoryCluster, name: str, records: int) -> None:
    """Once all nodes have said that they know limits."""
    while True:
        try:
            await run.nodes[await run.leader(name)].retain(name, 0, 0, records)
            await run.nodes[await run.leader(name)].open_producer(name, 7)
            return
        except (Busy, NotLeader):
            await trio.sleep(0.02)


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_logs_of_all_shapes_through_a_storm(tmp_path: Path, seed: int) -> None:
    async with cluster(tmp_path, 3, snapshot_entries=25, rewrite_live_ratio=0.8) as run:
        await run.create("kept")
        await run.create("keyed", compact="key")
        await retained(run, "kept", 40)
        storm = Storm(run, seed)
        for _ in range(STEPS):
            await storm.step()
        if storm.down:
            await run.start(storm.down)
        for _ in range(15):
            await storm.produce()
        await storm.check()
        for number in run.ids:
            await run.nodes[number].snapshot()
            await run.nodes[number].compact()
            await run.restart(number)
        await storm.check()
