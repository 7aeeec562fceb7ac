"""Random histories in which everything of the storage goes wrong at once: laggards that need a snapshot, payloads that
rot, generations that vanish, disks that fill up, nodes that crash in the middle of all that; with a writer process
where the environment says so. One node is ever damaged, so that two copies of each payload are good.

In the end all is as if nothing had happened: nothing acknowledged is lost, all members read the same, the damaged one
from its own disk, and the books equal a count from scratch.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import trio

from logyard.protocol.errors import LogyardError
from logyard.service.check.run import check_directory

from .cluster import KIB, MIB, Cluster, cluster, until
from .full_disk import QuotaDisk
from .test_histories import History, check_books

STEPS = 50
VICTIM = 3
"""Its payloads rot, its generations vanish."""
FULL = 2
"""Its disk fills up."""


class Storm(History):
    def __init__(self, c: Cluster, draw: random.Random, disk: QuotaDisk) -> None:
        super().__init__(c, draw)
        self.disk = disk
        self.damaged = 0

    async def step(self) -> None:
        verbs = ["append"] * 8 + ["truncate"] * 3 + ["snapshot", "compact", "roll", "crash", "crash", "start", "start"]
        verbs += ["part", "heal", "heal", "heal", "transfer", "read", "read", "lag", "lag", "rot", "rot", "vanish"]
        verbs += ["fill", "room", "room", "janitor", "janitor"]
        verb = self.draw.choice(verbs)
        try:
            with trio.move_on_after(2):
                await getattr(self, verb)()
        except LogyardError as error:
            # The victim may have nobody to ask.
            allowed = error.code == "corrupt" and verb in ("read", "compact") and self.damaged
            assert allowed or error.code not in ("corrupt", "error", "bad_request"), (verb, error)

    async def read(self) -> None:
        number = self.running()
        start = self.c.log(number).start
        try:
            found = await self.c.read(number, start)
        except LogyardError as error:
            # Truncated meanwhile, on the way to a floor, or damaged with nobody to ask.
            assert error.code in ("out_of_range", "gone") or (number == VICTIM and self.damaged), error
            return
        self.check(start, [body for _, body in found])

    async def lag(self) -> None:
        """A node goes, the others move on and forget what it would need, and it comes back."""
        if len(self.c.nodes) < 3 or self.disk.quota >= 0:
            return
        number = self.draw.choice(self.c.ids)
        with trio.CancelScope(shield=True):
            await self.c.crash(number)
            with trio.move_on_after(1.5):
                for _ in range(self.draw.randint(2, 6)):
                    await self.append()
                for other in list(self.c.nodes):
                    await self.c.nodes[other].snapshot()
                    await self.c.roll(other)
            await self.c.start(number)

    async def janitor(self) -> None:
        for number in list(self.c.nodes):
            self.c.system(number).storage.janitor.look()

    async def rot(self) -> None:
        """A bit flips in payloads of the victim's sealed files."""
        if VICTIM not in self.c.nodes:
            return
        number = self.c.system(VICTIM).wal.current
        bodies = [body for body in self.started if len(body) > 2000]
        if not bodies:
            return
        picked = self.draw.sample(sorted(bodies), min(3, len(bodies)))
        for path in sorted((self.c.path / f"node-{VICTIM}" / "wal").glob("*.wal")):
            if int(path.stem, 16) >= number:
                continue
            data = path.read_bytes()
            with path.open("r+b") as file:
                for body in picked:
                    at = data.find(body)
                    if at >= 0:
                        file.seek(at + 100)
                        file.write(bytes([data[at + 100] ^ 16]))
                        self.damaged += 1

    async def vanish(self) -> None:
        """A generation of the victim is gone after a crash."""
        if VICTIM not in self.c.nodes or len(self.c.nodes) < 2:
            return
        with trio.CancelScope(shield=True):
            await self.c.crash(VICTIM)
            generations = sorted((self.c.path / f"node-{VICTIM}" / "payloads").glob("gen-??????????"))
            if generations:
                shutil.rmtree(self.draw.choice(generations))
                self.damaged += 1
            await self.c.start(VICTIM)
            for _ in range(self.draw.randint(0, 2)):
                await self.c.restart(VICTIM)

    async def fill(self) -> None:
        if FULL in self.c.nodes:
            self.disk.fill(self.draw.choice((0, 200 * KIB, MIB)))

    async def room(self) -> None:
        self.disk.quota = -1
        if FULL in self.c.nodes:
            self.c.system(FULL).storage.janitor.look()

    async def start(self) -> None:
        # A start needs some room: that it may be refused for want of it is another test's matter.
        self.disk.quota = -1
        await super().start()

    async def crash(self) -> None:
        await self.room()
        await super().crash()


@pytest.mark.parametrize("seed", range(int(os.environ.get("LOGYARD_SEEDS", "3"))))
async def test_a_stormy_history_adds_up(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed + int(os.environ.get("LOGYARD_SEED_BASE", "0")))
    limits: dict[str, Any] = {
        "payload_cache_bytes": draw.choice((0, 0, 20 * KIB)),
        "snapshot_piece_bytes": 64 * KIB,
        "snapshot_stall_ms": 300,
        "snapshot_entries": draw.choice((30, 1 << 30)),
        "migrate_budget_bytes": draw.choice((MIB, 1 << 30)),
        "migrate_dead_ratio": draw.choice((0.5, 1.0)),
    }
    disk = QuotaDisk(tmp_path / f"node-{FULL}")
    async with cluster(tmp_path, disks={FULL: disk}, **limits) as c:
        history = Storm(c, draw, disk)
        for _ in range(STEPS):
            await history.step()
        await history.room()
        await history.settle()
        start, reads = c.log(1).start, []
        for number in c.ids:
            member = c.member(number)
            member.raft.check()
            assert member.state == "running", member.reason
            await until(lambda member=member: member.resolves)
            reads.append([body for _, body in await c.read(number, start)])
        assert reads[0] == reads[1] == reads[2]
        history.started.add(b"last")
        history.check(start, reads[0])
        missing = [offset for offset in history.acknowledged if offset >= start + len(reads[0])]
        assert not missing, "acknowledged and gone"
        live = [c.member(number).liveness.encode_live_set(c.member(number).raft.applied) for number in c.ids]
        assert live[0] == live[1] == live[2]
        # The victim's are its own again.
        await until(lambda: not c.system(VICTIM).repair.refill.status()["lost"], "what it lost is back")
        c.partition(VICTIM)
        assert [body for _, body in await c.read(VICTIM, start)] == reads[0]
        c.network.heal()
        for number in c.ids:
            await check_books(c, number, reads[0])
        await c.close()
        for number in c.ids:
            report = await trio.to_thread.run_sync(check_directory, tmp_path / f"node-{number}")
            assert report["ok"], report["findings"]
