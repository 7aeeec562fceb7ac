"""A full batch is handed to the WAL's thread while another one is being written: order, refusals, failures."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import trio

from logyard.engine.entry import COMMANDS, Entry
from logyard.engine.log.group_commit import GroupCommit
from logyard.engine.log.wal import WalItem
from logyard.protocol.errors import LogyardError, NoSpace, WalFailed

MIB = 1 << 20


class Gated:
    """A log whose writes wait for the test, which says what becomes of them."""

    def __init__(self) -> None:
        self.written_items: list[tuple[int, int]] = []
        self.begun = 0
        self.gate = threading.Semaphore(0)
        self.errors: dict[int, tuple[LogyardError, int]] = {}

    @property
    def next_batch(self) -> int:
        return self.begun

    def write(self, items: Sequence[WalItem]) -> None:
        self.begun += 1
        assert self.gate.acquire(timeout=30)
        error, done = self.errors.get(self.begun, (None, len(items)))
        self.done = done
        self.refused = items
        self.written_items += [(item.uid, item.entries[0].index) for item in items[:done]]
        if error is not None:
            raise error

    def written(self, items: Sequence[WalItem]) -> int:
        return self.done if items is self.refused else 0


class Bench:
    """A durability over a gated log, and what it told."""

    def __init__(self) -> None:
        self.wal = Gated()
        self.told: list[tuple[int, int]] = []
        self.failures: list[LogyardError] = []
        self.full = 0
        wal: Any = self.wal
        self.one = GroupCommit(wal, self._persisted, lambda rolled: None, self.failures.append, self._no_space, MIB)

    def _persisted(self, items: Sequence[WalItem]) -> None:
        self.told += [(item.uid, item.entries[0].index) for item in items]
        self.one.kick()

    def _no_space(self, reason: str) -> None:
        self.full += 1

    def add(self, *items: tuple[int, int, int]) -> None:
        for uid, index, size in items:
            found = WalItem(uid)
            found.entries = [Entry(index, 1, COMMANDS, b"x" * size)]
            self.one.add(found)
        self.one.kick()

    async def until(self, condition: Callable[[], bool]) -> None:
        with trio.fail_after(20):
            while not condition():
                await trio.lowlevel.checkpoint()


@asynccontextmanager
async def bench() -> AsyncIterator[Bench]:
    found = Bench()
    found.one.start()
    try:
        yield found
    finally:
        for _ in range(20):
            found.wal.gate.release()
        await trio.to_thread.run_sync(found.one.stop)


async def test_a_full_batch_is_handed_over_ahead_and_no_more() -> None:
    async with bench() as b:
        b.add((1, 1, MIB), (1, 2, MIB), (1, 3, MIB))
        assert b.one.writing_bytes == 2 * MIB and b.one.bytes == MIB and b.one.queued_bytes == 3 * MIB
        b.wal.gate.release()
        await b.until(lambda: b.told == [(1, 1)])
        assert b.one.writing_bytes == 2 * MIB and not b.one.items
        b.wal.gate.release()
        b.wal.gate.release()
        await b.until(lambda: len(b.told) == 3)
        assert b.told == [(1, 1), (1, 2), (1, 3)] and not b.one.busy and not b.one.queued_bytes
        assert b.one.stalled_s() == 0.0 and b.one.batch_bytes == 3 * MIB


async def test_less_than_a_batch_waits_for_what_may_join_it() -> None:
    async with bench() as b:
        b.add((1, 1, MIB))
        b.add((2, 1, 100), (3, 1, 100_000))
        assert b.one.writing_bytes == MIB and len(b.one.items) == 2
        b.wal.gate.release()
        await b.until(lambda: b.wal.begun == 2)
        assert b.told == [(1, 1)] and not b.one.items


async def test_what_stands_behind_a_refused_batch_is_not_written_before_it() -> None:
    async with bench() as b:
        b.wal.errors[1] = (NoSpace("full"), 0)
        b.add((1, 1, MIB), (1, 2, MIB), (1, 3, MIB))
        b.wal.gate.release()
        await b.until(lambda: not b.one.busy)
        assert b.wal.begun == 1 and b.told == [] and b.full == 2 and b.one.held
        assert [item.entries[0].index for item in b.one.items] == [1, 2, 3]
        assert b.one.queued_bytes == b.one.bytes == 3 * MIB
        for _ in range(3):
            b.wal.gate.release()
        b.one.resume()
        await b.until(lambda: len(b.told) == 3)
        assert b.wal.written_items == b.told == [(1, 1), (1, 2), (1, 3)] and not b.one.queued_bytes


async def test_half_of_a_batch_is_refused_and_a_replica_goes_meanwhile() -> None:
    async with bench() as b:
        b.wal.errors[1] = (NoSpace("full"), 1)
        b.add((1, 1, MIB // 2), (2, 1, MIB // 2), (2, 2, MIB), (1, 2, MIB))
        b.wal.gate.release()
        await b.until(lambda: b.one.held and not b.one.busy)
        assert [(item.uid, item.entries[0].index) for item in b.one.items] == [(2, 1), (2, 2), (1, 2)]
        b.one.drop(2)
        assert b.told == [(1, 1)] and [(item.uid, item.entries[0].index) for item in b.one.items] == [(1, 2)]
        assert b.one.bytes == MIB
        b.wal.gate.release()
        b.one.resume()
        await b.until(lambda: b.told == [(1, 1), (1, 2)])


async def test_nothing_is_written_behind_a_failure() -> None:
    async with bench() as b:
        b.wal.errors[1] = (WalFailed("the disk is gone"), 0)
        b.add((1, 1, MIB), (1, 2, MIB))
        for _ in range(2):
            b.wal.gate.release()
        await b.until(lambda: not b.one.busy)
        assert b.wal.begun == 1 and len(b.failures) == 1 and b.told == []


async def test_who_wants_the_log_alone_gets_it() -> None:
    async with bench() as b, trio.open_nursery() as nursery:
        b.add((1, 1, MIB))
        got: list[int] = []

        async def alone() -> None:
            await b.one.exclusive(lambda: got.append(len(b.told)))

        nursery.start_soon(alone)
        await b.until(lambda: bool(b.one._idle))
        b.add((1, 2, MIB), (1, 3, MIB))
        assert b.one.writing_bytes == MIB, "nothing is handed over in front of it"
        for _ in range(3):
            b.wal.gate.release()
        await b.until(lambda: len(b.told) == 3)
        assert got == [1]
