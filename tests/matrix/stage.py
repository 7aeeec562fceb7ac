"""A cell's stage: three daemons, a log with payloads in every kind of file of the victim, and what was acknowledged."""

from __future__ import annotations

import random
import subprocess
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from logyard.client.sync import Yard, connect_sync
from logyard.protocol.errors import LogyardError
from logyard.service.local_cluster import ClusterFailed, LocalCluster
from tests.chaos.judge import settled
from tests.wipe import wipe

LIMITS = {
    "wal_file_bytes": 1 << 20, "wal_stock_files": 0, "generation_bytes": 16 << 20, "migrate_dead_ratio": 1.0,
    "payload_cache_bytes": 0, "scrub_every_s": 0, "scrub_bytes_per_s": 1 << 30, "snapshot_entries": 1 << 30,
    "hibernate_after_ms": 0, "rewrite_live_ratio": 0.0,
    "generation_files": 1,
}  # fmt: skip
"""Small files, nothing read from memory, and nothing that moves by itself while a cell looks for its bytes."""
PAYLOAD, LARGE = 6000, 20_000
"""Bytes of a record: in LMDB, and in the file of large bodies beside it."""
BATCH = 4
OLD, MORE, LAST = 24, 220, 8
"""Records that go to a generation, that fill a WAL file so that it is sealed, and in the open one."""
PATIENCE_S = 40.0
STARTS = 6
"""A start that dies in a damaged environment is tried again: the journals need two deaths to set each aside."""


def wait(condition: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    """Ask until it holds; errors of the cluster are a no."""
    deadline, pause = time.monotonic() + patience_s, threading.Event().wait
    last: object = ""
    while time.monotonic() < deadline:
        try:
            if found := condition():
                return found
        except LogyardError as error:
            last = error
        pause(0.05)
    raise AssertionError(f"never happened: {what} {last}")


class Ended(Exception):
    """The victim's process ended by itself."""


class Stage:
    """One cluster, and one log a cell."""

    def __init__(self, cluster: LocalCluster, yard: Yard) -> None:
        self.cluster = cluster
        self.yard = yard
        self.name = ""
        self.victim = 0
        self.keyed = False
        self.payload = PAYLOAD
        self.acknowledged: dict[int, tuple[bytes, bytes]] = {}
        self.attempted: set[bytes] = set()
        self.refused: dict[str, int] = {}
        self.count = 0

    @property
    def data(self) -> Path:
        """The victim's directory."""
        return self.cluster.nodes[self.victim].data

    # Records

    def record(self, number: int) -> tuple[bytes, bytes]:
        """(metadata, payload) of the log's record `number`: bytes that nothing else has."""
        draw = random.Random(f"{self.name} {number}")
        return draw.randbytes(48), draw.randbytes(self.payload)

    def write(self, count: int, timeout: float = 10.0) -> int:
        """Append records; how many were acknowledged. What was refused is counted, what is open was attempted."""
        done = 0
        for first in range(0, count, BATCH):
            rows = [self.record(self.count + at) for at in range(min(BATCH, count - first))]
            keys = [b"key %d " % (self.count + at) + row[0] * 4 for at, row in enumerate(rows)]
            self.count += len(rows)
            self.attempted |= {payload for _, payload in rows}
            try:
                log = self.yard.log(self.name)
                offsets = log.append_many(rows, timeout=timeout, keys=keys if self.keyed else None)
            except LogyardError as error:
                self.refused[error.code] = self.refused.get(error.code, 0) + 1
                continue
            self.acknowledged.update(zip(offsets, rows, strict=True))
            done += len(rows)
        return done

    def verify(self, node: int) -> tuple[list[str], list[str]]:
        """(lost, wrong) of what a member says itself."""
        log, found = self.yard.log(self.name), {}
        start, end = log.latest(node=node, consistency="local")[:2]
        lost, wrong, at = [], [], start
        while at < end:
            page = log.poll(at, max_records=200, node=node, consistency="local", timeout=20)
            for record in page:
                found[record.offset] = (bytes(record.metadata), bytes(record.payload or b""))
                if found[record.offset][1] not in self.attempted:
                    wrong.append(f"{self.name} at {record.offset} on node {node}: bytes that nobody wrote")
            assert page.next > at, f"{self.name} on node {node}: nothing at {at} of {start} to {end}"
            at = page.next
        for offset, row in self.acknowledged.items():
            if found.get(offset) != row:
                there = "another record" if offset in found else "nothing"
                lost.append(f"{self.name} at {offset} on node {node}: acknowledged, {there} is there")
        return lost, wrong

    # Nodes

    def status(self) -> dict[str, Any]:
        """The victim's. Raises `Ended`."""
        if self.ended() is not None:
            raise Ended
        found: dict[str, Any] = self.yard.status(self.victim)
        return found

    def ended(self) -> int | None:
        """The victim's exit code, if its process ended by itself."""
        return self.cluster.exited().get(self.victim)

    def kill(self) -> None:
        """The victim dies, or has died."""
        if self.ended() is not None:
            self.cluster.nodes[self.victim].forget()
        elif self.cluster.nodes[self.victim].process is not None:
            self.cluster.kill9(self.victim)

    def start(self) -> list[int]:
        """Start the victim, again if it dies of what it reads; the exit codes of starts that failed. Raises
        `ClusterFailed` when it does not come."""
        codes: list[int] = []
        while True:
            self.cluster.spawn(self.victim)
            process = self.cluster.nodes[self.victim].process
            assert process is not None
            try:
                self.cluster.wait_ready(self.victim)
                return codes
            except ClusterFailed:
                code = process.poll()
                codes += [] if code is None else [code]
                if code is None or code > 0 or len(codes) == STARTS:
                    raise

    def pids(self) -> list[int]:
        """The victim's processes: the daemon and its writer."""
        process = self.cluster.nodes[self.victim].process
        assert process is not None
        listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True)
        return [process.pid, *map(int, listed.stdout.split())]

    def settle(self) -> None:
        """Until every member runs, is up to date, and nothing waits for repair. Raises `Ended`."""

        def whole() -> bool:
            if self.ended() is not None:
                raise Ended
            rows = self.yard.statuses().values()
            good = all(
                "error" not in row and not row["damage"]["mending"] and not row["damage"]["lost"]
                and not row["stopped"] for row in rows
            )  # fmt: skip
            return good and not settled(self.yard, [self.name])

        wait(whole, f"all members of {self.name} are whole")

    def scrub(self) -> dict[str, Any]:
        """A whole pass of the victim; `{}` when it died of it."""
        wanted = -1
        deadline, pause = time.monotonic() + 3 * PATIENCE_S, threading.Event().wait
        while time.monotonic() < deadline:
            if self.ended() is not None:
                return {}
            try:
                row = self.yard.scrub(self.victim, start=wanted < 0)[self.victim]
                wanted = row["wanted"] if wanted < 0 else wanted
                if row["passes"] >= wanted:
                    assert isinstance(row, dict)
                    return row
            except LogyardError:
                pass
            pause(0.05)
        raise AssertionError("a scrub does not end")

    def replace(self) -> None:
        """The victim comes back with an empty directory, as an operator would do it."""
        names = [row["name"] for row in self.yard.list(next(iter({1, 2, 3} - {self.victim})))]
        self.kill()
        for name in names:
            wait(partial(self.done, self.yard.remove_member, name, self.victim), f"{name} without the victim")
        for node in {1, 2, 3} - {self.victim}:
            self.yard.forget_node(self.victim, node, True)
        wipe(self.data)
        self.start()
        for name in names:
            wait(partial(self.done, self.yard.add_member, name, self.victim), f"{name} with the victim")

    @staticmethod
    def done(call: Callable[..., object], *arguments: object) -> bool:
        """It was not refused."""
        call(*arguments)
        return True

    # A cell's log

    def prepare(self, name: str, victim: int, leads: bool, keyed: bool, payload: int = PAYLOAD) -> None:
        """A new log, with records in a generation, in a sealed WAL file with its segment, in a snapshot, and in the
        open WAL file."""
        self.name, self.victim, self.keyed, self.payload = name, victim, keyed, payload
        self.acknowledged, self.attempted, self.refused, self.count = {}, set(), {}, 0
        members = sorted(self.cluster.nodes)
        self.yard.create(name, members=members, **({"compact": "key"} if keyed else {}))
        self.lead(leads)
        self.write(OLD)
        self.stored()
        self.yard.compact(victim)
        self.fill()
        self.snapshot()
        if name.startswith("_"):
            self.ringed()
        self.write(LAST)
        self.stored()

    def ringed(self) -> None:
        """Have entries in the victim's ring that its log needs: without payload, which is released."""
        self.write(LAST)
        self.release()
        self.stored()
        wait(lambda: self.yard.compact(self.victim) and self.ring(), "entries in the ring")

    def release(self) -> None:
        """Truncate all but the last few records."""
        before = max(self.acknowledged) - BATCH + 1
        self.yard.log(self.name).truncate(before)
        self.acknowledged = {offset: row for offset, row in self.acknowledged.items() if offset >= before}

    def ring(self) -> list[dict[str, int]]:
        """What the victim says that its ring has of the log."""
        found: list[dict[str, int]] = self.yard.describe(self.name, self.victim)["ring"]
        return found

    def lead(self, leads: bool) -> None:
        """The victim leads, or another node does."""
        target = self.victim if leads else next(iter({1, 2, 3} - {self.victim}))

        def led() -> bool:
            if self.yard.locate(self.name)["leader"] == target:
                return True
            self.yard.transfer(self.name, target)
            return False

        wait(led, f"node {target} leads {self.name}")

    def fill(self) -> None:
        """Write until the victim has sealed a WAL file that it did not have, and made its segment."""
        before = self.status()["segments"]["files"]
        wait(lambda: self.write(MORE // 4) and self.status()["segments"]["files"] > before, "a segment")

    def snapshot(self) -> None:
        """Let the victim take a snapshot of all that was written."""
        self.applied()
        self.yard.snapshot([self.name], self.victim)

    def applied(self) -> None:
        """Until the victim has applied everything."""
        wait(lambda: not settled(self.yard, [self.name]), "the victim has applied all")

    def stored(self) -> None:
        """Until the victim has applied everything, and its last batch is sealed."""
        self.applied()
        seen = [(-1, 0.0)]

        def still() -> bool:
            batches = self.status()["wal"]["batches"]
            if seen[-1][0] != batches:
                seen.append((batches, time.monotonic()))
            # An idle log is sealed by an empty batch after 100 ms; probes of an idle disk come later.
            return time.monotonic() - seen[-1][1] > 0.3

        wait(still, "the last batch is sealed")

    def drop(self) -> None:
        """The cell's log is not needed any more."""
        wait(partial(self.done, self.yard.delete, self.name), f"{self.name} goes")
        for node in self.cluster.nodes:
            self.yard.compact(node)


def connect(cluster: LocalCluster) -> Yard:
    """A client with little patience of its own."""
    return connect_sync(cluster.addresses, timeout=10.0)
