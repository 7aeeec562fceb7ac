"""Random histories of whole nodes: crashes, partitions, truncations, snapshots, migrations, all at once; then
everything must add up.

After each: no acknowledged record is lost, all members read the same, cores keep their invariants, and the books of
payload bytes equal
a count from scratch.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from logyard.protocol.errors import LogyardError

from .cluster import KIB, Cluster, cluster, payload_books, until

STEPS = 45


class History:
    """One run; `acknowledged` is what clients were told, by offset."""

    def __init__(self, c: Cluster, draw: random.Random) -> None:
        self.c = c
        self.draw = draw
        self.acknowledged: dict[int, bytes] = {}
        self.started: set[bytes] = set()
        self.written = 0
        self.cut = 0

    async def step(self) -> None:
        verbs = ["append"] * 8 + ["truncate"] * 2 + ["snapshot", "compact", "roll", "crash", "start", "start"]
        verbs += ["part", "heal", "heal", "transfer", "read", "read"]
        if self.c.config.hibernate_after_ms:
            verbs += ["rest"] * 8
        verb = self.draw.choice(verbs)
        try:
            with trio.move_on_after(2):
                await getattr(self, verb)()
        except LogyardError as error:
            assert error.code not in ("corrupt", "error", "bad_request"), (verb, error)

    def running(self) -> int:
        return self.draw.choice(sorted(self.c.nodes))

    def believed_leader(self) -> int:
        led = [number for number in sorted(self.c.nodes) if self.c.leads(number)]
        return self.draw.choice(led) if led else self.running()

    async def append(self) -> None:
        number = self.believed_leader()

        async def one(size: int) -> None:
            self.written += 1
            bodies = [b"%d/%d;" % (self.written, at) * size for at in range(self.draw.randint(1, 4))]
            self.started.update(bodies)
            try:
                with trio.move_on_after(0.3):
                    offsets = await self.c.append(number, [(b"", body) for body in bodies])
                    for offset, body in zip(offsets, bodies, strict=True):
                        assert self.acknowledged.setdefault(offset, body) == body, "one offset, one record"
            except LogyardError:
                pass

        async with trio.open_nursery() as nursery:
            for _ in range(self.draw.randint(1, 6)):
                nursery.start_soon(one, self.draw.choice((1, 5, 600, 6 * KIB)))

    async def truncate(self) -> None:
        number = self.believed_leader()
        log = self.c.log(number)
        before = self.draw.randint(log.start, log.start + (log.end - log.start) // 2)
        self.cut = max(self.cut, before)
        await self.c.nodes[number].truncate("log", before)

    async def snapshot(self) -> None:
        await self.c.nodes[self.running()].snapshot()

    async def compact(self) -> None:
        await self.c.nodes[self.running()].compact()

    async def roll(self) -> None:
        await self.c.roll(self.running())

    async def crash(self) -> None:
        if len(self.c.nodes) > 1:
            with trio.CancelScope(shield=True):
                await self.c.crash(self.running())

    async def start(self) -> None:
        for number in self.c.ids:
            if number not in self.c.nodes:
                with trio.CancelScope(shield=True):
                    await self.c.start(number)
                return

    async def part(self) -> None:
        self.c.partition(self.draw.choice(self.c.ids))

    async def heal(self) -> None:
        self.c.network.heal()

    async def transfer(self) -> None:
        await self.c.nodes[self.believed_leader()].transfer("log", self.draw.choice(self.c.ids))

    async def rest(self) -> None:
        """Long enough to fall asleep, if it can."""
        sleepers = [self.c.system(number).quiescence.table for number in self.c.nodes]
        with trio.move_on_after(0.2):
            await until(lambda: any(sleepers))

    async def read(self) -> None:
        number = self.running()
        start = self.c.log(number).start
        try:
            found = await self.c.read(number, start)
        except LogyardError as error:
            # Truncated meanwhile, or still on the way to the floor.
            assert error.code in ("out_of_range", "gone"), error
            return
        self.check(start, [body for _, body in found])

    def check(self, start: int, bodies: Sequence[bytes | None]) -> None:
        assert len(set(bodies)) == len(bodies) and set(bodies) <= self.started
        for offset, body in enumerate(bodies, start):
            assert self.acknowledged.get(offset, body) == body

    async def settle(self) -> None:
        """All nodes run and agree."""
        self.c.network.heal()
        for number in self.c.ids:
            if number not in self.c.nodes:
                await self.c.start(number)
        for _ in range(50):
            try:
                with trio.fail_after(5):
                    await self.c.append(await self.c.leader(), [(b"", b"last")])
                break
            except LogyardError:
                await trio.testing.wait_all_tasks_blocked(0.01)
        await self.c.applied()


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(int(os.environ.get("LOGYARD_SEEDS", "4"))))
async def test_a_random_history_adds_up(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed + int(os.environ.get("LOGYARD_SEED_BASE", "0")))
    cache = draw.choice((0, 0, 20 * KIB, 1 << 20))
    # Also with groups that fall asleep at every opportunity.
    rest = 5 * (seed % 2)
    limits: dict[str, Any] = {
        "payload_cache_bytes": cache,
        "snapshot_piece_bytes": 64 * KIB,
        "hibernate_after_ms": rest,
    }
    async with cluster(tmp_path, **limits) as c:
        history = History(c, draw)
        for _ in range(STEPS):
            await history.step()
        await history.settle()
        reads = []
        start = c.log(1).start
        assert start <= history.cut
        for number in c.ids:
            c.member(number).raft.check()
            assert c.member(number).state == "running", c.member(number).reason
            reads.append([body for _, body in await c.read(number, start)])
            assert c.log(number).start == start
        assert reads[0] == reads[1] == reads[2]
        history.started.add(b"last")
        assert reads[0][-1] == b"last"
        history.check(start, reads[0])
        missing = [offset for offset in history.acknowledged if offset >= start + len(reads[0])]
        assert not missing, "acknowledged and gone"
        live = [c.member(number).liveness.encode_live_set(c.member(number).raft.applied) for number in c.ids]
        assert live[0] == live[1] == live[2]
        for number in c.ids:
            await check_books(c, number, reads[0])


def counted(c: Cluster, number: int) -> dict[int, int]:
    """Live payload bytes at home in each sealed WAL file, entry by entry."""
    system, member = c.system(number), c.member(number)
    found = dict.fromkeys(system.storage.location.files, 0)
    for run in member.segments:
        if run.segment in found:
            for entry in system.storage.segments.reader(run.segment).entries(member.uid, run.first, run.last):
                if entry.tombstone or member.is_dead(entry) or system.store.home(member.uid, entry.index) is not None:
                    continue
                found[run.segment] += entry.body_bytes
    return {file: live for file, live in found.items() if live}


async def check_books(c: Cluster, number: int, bodies: Sequence[bytes | None]) -> None:
    """Counters equal a count from scratch: of the rows, and of everything after a restart."""
    store = c.system(number).store._store  # type: ignore[attr-defined]
    assert {one: found.live for one, found in store.recount().items()} == payload_books(c.system(number))["generations"]
    await c.roll(number)
    books = payload_books(c.system(number))
    assert books["wal"] == counted(c, number), "running"
    await c.restart(number)
    await c.applied()
    await c.roll(number)
    after = payload_books(c.system(number))
    assert after["wal"] == counted(c, number), "restarted"
    assert books["wal"].items() <= after["wal"].items(), "a home went without a migration"
    assert after["generations"] == books["generations"]
    member = c.member(number)
    await until(lambda: member.resolves)
    start = c.log(number).start
    assert [body for _, body in await c.read(number, start)] == bodies
    await c.nodes[number].compact()
    assert [body for _, body in await c.read(number, start)] == bodies
