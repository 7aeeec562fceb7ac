"""A full disk, without a system: the accounts of space over a disk of so many bytes and a log asked for its room."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from logyard.engine.config import SystemConfig
from logyard.engine.disk.door import Disk
from logyard.engine.entry import NOOP, build_plain
from logyard.engine.log.group_commit import GroupCommit
from logyard.engine.log.space import DISK, MARGIN_BYTES, Space
from logyard.protocol.errors import NoSpace

MIB = 1 << 20
CONFIG = SystemConfig(disk_reserve_bytes=MIB, wal_file_bytes=MIB)


class Small(Disk):
    """A disk with `left` bytes."""

    left = 8 * MIB

    def free_bytes(self, path: str) -> int:
        return self.left

    def preallocate(self, fd: int, size: int, fill: bool = True) -> None:
        if size > self.left:
            raise OSError(errno.ENOSPC, "no room")
        self.left -= size

    def unlink(self, path: str) -> None:
        if path.endswith("reserve") and Path(path).exists():
            self.left += MIB
        super().unlink(path)


class Log:
    """The write-ahead log and its queue: what is left of the file in use, and what a look made of it."""

    def __init__(self) -> None:
        self.wal = self.stock = self
        self.room, self.spare_bytes, self.short, self.missing = MIB, 0, False, 0
        self.held = False
        self.queued_bytes = self.resumed = 0
        self.frugal = False

    def economize(self, frugal: bool) -> None:
        self.frugal = frugal

    def resume(self) -> None:
        self.resumed += 1


class Bench:
    def __init__(self, path: Path) -> None:
        self.disk, self.log, self.waiting = Small(), Log(), 0
        self.counted: list[str] = []
        log = cast("GroupCommit", self.log)
        self.space = Space(path, self.disk, CONFIG, log, lambda: self.waiting, self.counted.append)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def test_the_reserve_is_claimed_given_up_and_claimed_again(bench: Bench, tmp_path: Path) -> None:
    space, disk = bench.space, bench.disk
    await space.look(quiet=True)
    assert not space.full and (tmp_path / "reserve").exists() and disk.left == 7 * MIB
    tries: list[int] = []

    async def job() -> str:
        tries.append(disk.left)
        if len(tries) == 1:
            raise OSError(errno.ENOSPC, "no room")
        return "done"

    assert await space.out_of_reserve("a segment", job) == "done"
    assert tries == [7 * MIB, 8 * MIB] and space.full and not (tmp_path / "reserve").exists()
    assert bench.log.frugal, "the log does not take what was given up"
    disk.left = 0
    await space.look(quiet=True)
    assert space.full, "there is no room for the reserve"
    disk.left = 8 * MIB
    await space.look(quiet=True)
    assert not space.full and (tmp_path / "reserve").exists() and bench.log.resumed == 3
    assert not bench.log.frugal


async def test_what_is_not_for_want_of_space_is_not_tried_again(bench: Bench) -> None:
    async def job() -> None:
        raise OSError(errno.EIO, "the disk")

    with pytest.raises(OSError, match="the disk"):
        await bench.space.out_of_reserve("a segment", job)
    assert not bench.space.full

    async def never() -> None:
        raise OSError(errno.ENOSPC, "no room")

    with pytest.raises(NoSpace, match="a segment"):
        await bench.space.out_of_reserve("a segment", never)


def test_a_write_has_room_behind_all_that_is_queued(bench: Bench) -> None:
    space, log = bench.space, bench.log
    space.note("a test")
    most = MIB - MARGIN_BYTES
    assert space.takes(most) and not space.takes(most + 1)
    log.queued_bytes, bench.waiting = 100, 50
    assert space.takes(most - 150) and not space.takes(most - 149)
    full: list[Callable[[], None]] = [lambda: setattr(log, "short", True), lambda: setattr(log, "held", True)]
    for change in full:
        log.short = log.held = False
        change()
        assert not space.takes(1)
    refused = space.refusal()
    assert "a test" in str(refused) and bench.counted == [DISK]


def test_a_follower_takes_what_may_free_space_out_of_half_the_reserve(bench: Bench) -> None:
    space, log = bench.space, bench.log
    space.note("a test")
    entries: list[Any] = [build_plain(index, 1, NOOP, 0, bytes(1000)) for index in range(1, 2000)]
    log.room, log.spare_bytes = 0, MIB
    taken = space.accepts(entries)
    assert 400 < taken < MIB // 2 // 1000 + 1 and space.refused == 1
    log.spare_bytes = MIB // 2
    assert space.accepts(entries) == 0


def test_copies_wait_after_one_that_found_no_room(bench: Bench) -> None:
    space = bench.space
    assert space.may_copy(MIB) and not space.may_copy(4 * MIB)
    space.defer_copies()
    assert not space.may_copy(0)
    space.allow_copies()
    assert space.may_copy(MIB)


def test_a_start_on_a_full_disk_gives_up_the_reserve_and_one_spare_file(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "reserve").write_bytes(b"")
    (tmp_path / "wal").mkdir()
    for name in ("1.spare", "2.spare", "3.wal"):
        (tmp_path / "wal" / name).write_bytes(b"")
    bench.disk.left = -MIB
    bench.space.open()
    assert not (tmp_path / "reserve").exists()
    assert sorted(path.name for path in (tmp_path / "wal").iterdir()) == ["2.spare", "3.wal"]
