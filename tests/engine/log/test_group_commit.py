"""What goes into a batch of the write-ahead log when large records wait beside small ones, and who begins the next."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing

from logyard.engine.entry import COMMANDS, Entry
from logyard.engine.log import group_commit as durability_module
from logyard.engine.log.group_commit import MIXED_BYTES, SMALL_BYTES, FullBatch, GroupCommit
from logyard.engine.log.wal import Wal, WalItem
from logyard.protocol.errors import NoSpace

from ..host.cluster import cluster, until

MIB = 1 << 20


class Idle:
    """A log that is never written: batches are only taken."""


def group_commit() -> GroupCommit:
    unused: Any = Idle()
    return GroupCommit(unused, unused, unused, unused, unused, MIB)


def item(uid: int, index: int, size: int) -> WalItem:
    found = WalItem(uid)
    found.entries = [Entry(index, 1, COMMANDS, b"x" * size)]
    return found


def take(one: GroupCommit) -> list[tuple[int, int]]:
    items, size = one._take()
    one.bytes -= size
    return [(found.uid, found.entries[0].index) for found in items]


def test_a_full_batch_is_what_the_disk_writes_in_ten_milliseconds() -> None:
    full = FullBatch(4 * MIB)
    assert full.bytes == MIB

    def after(rate: float, batches: int = 60) -> int:
        for _ in range(batches):
            full.look(full.bytes, full.bytes / rate)
        return full.bytes

    assert after(1000e6) == 4 * MIB
    assert after(200e6) == pytest.approx(2e6, rel=0.02)
    assert after(20e6) == MIB, "no less on a slow disk: only the syncs would be more"
    assert after(1000e6) == 4 * MIB
    full.look(4 * MIB, 0.5)
    assert full.bytes == MIB, "one that hangs counts at once"
    after(1000e6)
    full.look(4096, 0.5)
    assert full.bytes == 4 * MIB, "a small batch says nothing of the bytes"
    assert FullBatch(64 << 10).bytes == 64 << 10


@pytest.mark.parametrize(("rate", "records"), [(1000e6, 4), (20e6, 1)])
def test_batches_are_as_large_as_the_disk_is_fast(monkeypatch: pytest.MonkeyPatch, rate: float, records: int) -> None:
    now = [0.0]

    class Timed:
        """A log whose writes take their time by this clock."""

        next_batch = 0

        def write(self, items: Sequence[WalItem]) -> None:
            now[0] += sum(len(entry.data) for one in items for entry in one.entries) / rate

    monkeypatch.setattr("logyard.engine.log.group_commit.time", SimpleNamespace(monotonic=lambda: now[0]))
    unused: Any = Idle()
    one = GroupCommit(cast(Wal, Timed()), unused, unused, unused, unused, 4 * MIB)
    for index in range(1, 61):
        one._write([item(1, index, MIB)], MIB)
    for index in range(61, 69):
        one.add(item(1, index, MIB))
    assert len(take(one)) == records


def test_a_small_group_waits_for_one_large_record() -> None:
    one = group_commit()
    for found in (item(1, 1, MIB // 2), item(1, 2, MIB // 2 + 1), item(2, 1, 100), item(1, 3, 100), item(3, 1, 100)):
        one.add(found)
    assert take(one) == [(2, 1), (3, 1)], "small groups go first"
    assert take(one) == [(1, 1)], "and then as many large ones as fit"
    assert take(one) == [(1, 2), (1, 3)] and not one.items and not one.bytes


def test_a_batch_that_is_small_is_not_sorted() -> None:
    one = group_commit()
    for found in (item(1, 1, SMALL_BYTES + 1), item(2, 1, 100)):
        one.add(found)
    assert one.bytes <= MIXED_BYTES and take(one) == [(1, 1), (2, 1)]


def test_small_ones_behind_large_ones_of_their_group() -> None:
    one = group_commit()
    for found in (item(1, 1, MIB), item(1, 2, 10), item(2, 1, MIB), item(2, 2, 10)):
        one.add(found)
    assert take(one) == [(1, 1), (1, 2)] and take(one) == [(2, 1), (2, 2)]


def test_nothing_is_lost_overtaken_or_starved() -> None:
    chance = random.Random(1)
    for _ in range(200):
        one, added, taken = group_commit(), [], []
        last = dict.fromkeys(range(1, 6), 0)
        for _ in range(chance.randrange(1, 30)):
            for _ in range(chance.randrange(4)):
                uid = chance.randrange(1, 6)
                last[uid] += 1
                one.add(item(uid, last[uid], chance.choice((10, 1000, 200_000, MIB))))
                added.append((uid, last[uid]))
            if one.items and chance.random() < 0.5:
                got = take(one)
                assert got, "a batch is never empty"
                taken += got
        while one.items:
            oldest = one.items[0]
            first, second = take(one), take(one) if one.items else []
            place = (oldest.uid, oldest.entries[0].index)
            assert place in first + second, "the oldest waits for one batch at most"
            taken += first + second
        assert sorted(taken) == sorted(added) and not one.bytes
        for uid in last:
            assert [index for other, index in taken if other == uid] == list(range(1, last[uid] + 1))


class Timed:
    """A log whose writes take as long as told, by a clock of its own."""

    next_batch = 1

    def __init__(self) -> None:
        self.now = 0.0
        self.takes = 0.0

    def monotonic(self) -> float:
        """The time."""
        return self.now

    def write(self, items: Sequence[WalItem]) -> None:
        """Take that long."""
        self.now += self.takes


def test_one_slow_sync_moves_no_small_batch_to_the_thread_and_several_do(monkeypatch: pytest.MonkeyPatch) -> None:
    wal, one = Timed(), group_commit()
    monkeypatch.setattr("logyard.engine.log.group_commit.time.monotonic", wal.monotonic)
    one.wal, one.persisted = cast(Wal, wal), lambda items: None

    def by_thread(seconds: float) -> bool:
        wal.takes = seconds
        one.add(item(1, 1, 100))
        one.kick()
        busy = one.busy
        if busy:
            # As the thread would.
            jobs = one._jobs.get()
            assert jobs is not None
            one._finished(*jobs, *one._write(*jobs))
        return busy

    assert not any(by_thread(0.0001) for _ in range(20))
    assert not by_thread(0.5) and not by_thread(0.0001), "one slow sync says nothing yet"
    assert [by_thread(0.02) for _ in range(4)][-1], "a disk that stays slow does"
    moved = [by_thread(0.0001) for _ in range(60)]
    assert moved[0] and not moved[-1], "and one that is fast again is trusted again"
    assert one.sync_seconds_max == pytest.approx(0.5)


async def test_who_gives_up_waiting_for_the_wal_does_not_take_the_next_batch_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verb that has the WAL to itself is cancelled while a batch is under way: what queued behind that batch is
    written at its end all the same."""
    monkeypatch.setattr(durability_module, "INLINE_BYTES", -1)
    async with cluster(tmp_path, 1) as c:
        await c.leader()
        group_commit = c.system(1).storage.group_commit
        await until(lambda: not group_commit.busy)
        group_commit._alone = True
        with trio.move_on_after(0):
            await group_commit.exclusive(lambda: None)
        done = trio.Event()

        async def append() -> None:
            await c.append(1, [(b"", b"x")])
            done.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(append)
            await until(lambda: group_commit.items)
            group_commit._alone = False
            group_commit._freed()
            await until(done.is_set, "the append waits for a batch that nobody starts")


@pytest.mark.parametrize("other", ["alone", "a batch"])
async def test_who_is_cancelled_as_its_turn_comes_passes_it_on(monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    one = group_commit()
    got: list[str] = []
    monkeypatch.setattr(one, "kick", lambda: got.append("a batch"))

    async def alone() -> None:
        got.append(await one.exclusive(lambda: "alone"))

    one._alone = True
    with trio.fail_after(5):
        async with trio.open_nursery() as outer, trio.open_nursery() as nursery:
            nursery.start_soon(one.exclusive, lambda: None)
            await trio.testing.wait_all_tasks_blocked()
            if other == "alone":
                outer.start_soon(alone)
                await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
            one._alone = False
            one._freed()
    assert other in got


async def test_a_wal_that_stops_ends_its_thread(tmp_path: Path) -> None:
    def threads() -> int:
        return sum(thread.name == "logyard-wal" for thread in threading.enumerate())

    before = threads()
    async with cluster(tmp_path, 1) as c:
        assert threads() == before + 1
        assert c.system(1).storage.group_commit.error is None
    assert threads() == before
    group_commit().stop()


def test_what_comes_back_of_a_full_disk_has_nothing_of_who_went_meanwhile() -> None:
    """A new replica's records must not come before an old one's."""

    class FullWal:
        """A log that has no room, and then has."""

        next_batch = 1

        def __init__(self) -> None:
            self.full = True
            self.got: list[int] = []

        def write(self, items: Sequence[WalItem]) -> None:
            if self.full:
                raise NoSpace("full")
            self.got += [found.uid for found in items]

        def written(self, items: Sequence[WalItem]) -> int:
            return 0

    wal = FullWal()
    nobody = cast(Any, lambda *_: None)
    one = GroupCommit(cast(Any, wal), nobody, nobody, nobody, nobody, MIB)
    for found in (item(7, 1, 100), item(8, 1, 100)):
        one.add(found)
    items, size = one._take()
    one.bytes -= size
    one.writing_bytes += size
    one._sizes.append(size)
    kept = one.metadata_bytes
    one.drop(7)
    one._finished(items, size, None, NoSpace("full"))
    assert [found.uid for found in one.items] == [8] and one.metadata_bytes == kept / 2 and not one._gone
    wal.full = False
    one.resume()
    assert wal.got == [8] and not one.bytes
