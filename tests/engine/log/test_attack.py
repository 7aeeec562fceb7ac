"""Attempts to break the laws at the write-ahead log: each test is named after the law it attacks."""

from __future__ import annotations

import errno
import mmap
import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from logyard.engine.disk.door import ALIGNMENT, Disk
from logyard.engine.disk.faulty import FaultyDisk
from logyard.engine.log.record import BLOCK
from logyard.engine.log.wal import WalConfig, WalItem
from logyard.engine.log.wal_files import wal_name
from logyard.engine.types import Buffer
from logyard.protocol.errors import WalFailed

from .model import Memory, command, commands, open_wal, recover

ONE_BATCH = WalConfig(file_bytes=256 * 1024, batch_bytes=64 * 1024)


def test_law_2_the_name_of_a_file_is_durable_before_a_restart_writes_to_it(tmp_path: Path) -> None:
    disk = FaultyDisk()
    wal, _, _ = open_wal(disk, str(tmp_path))
    wal.write([WalItem(7, commands(7, 1, 1))])
    # The process dies between the rename and its sync: the name is there, but a power failure takes it back.
    disk.fail("sync_directory", 2, errno.EIO)
    with pytest.raises(WalFailed):
        wal.roll()
    wal.close()
    assert (tmp_path / wal_name(2)).exists()
    disk = FaultyDisk()
    again, _, _ = open_wal(disk, str(tmp_path))
    assert again.current == 2
    again.write([WalItem(7, commands(7, 2, 2))])
    again.close()
    names = [call.name for call in disk.calls]
    assert "sync_directory" in names[: names.index("write")]


class ShortDisk(Disk):
    """Writes as much as chance gives, and insists on what direct writes need."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.chance = chance

    def _pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        (data,) = buffers
        assert offset % ALIGNMENT == 0 == len(data) % ALIGNMENT
        return os.pwrite(fd, data[: self.chance.choice([len(data), self.chance.randint(ALIGNMENT, len(data))])], offset)


def test_law_8_direct_writes_are_whole_however_short_the_parts(tmp_path: Path) -> None:
    chance = random.Random(8)
    disk = ShortDisk(chance)
    for number in range(100):
        stage = memoryview(mmap.mmap(-1, ALIGNMENT * chance.randint(1, 4)))
        data = chance.randbytes(ALIGNMENT * chance.randint(1, 9))
        buffers: list[Buffer] = []
        at = 0
        while at < len(data):
            size = chance.choice([0, 1, 100, ALIGNMENT, 5000, 20_000])
            buffers.append(data[at : at + size] if size % 2 else memoryview(data)[at : at + size])
            at += size
        path = tmp_path / str(number)
        fd = os.open(path, os.O_RDWR | os.O_CREAT)
        assert disk.aligned_write(fd, buffers, 2 * ALIGNMENT, stage) == len(data)
        os.close(fd)
        assert path.read_bytes()[2 * ALIGNMENT :] == data


def test_law_8_blocks_of_the_last_batch_may_arrive_in_any_order(tmp_path: Path) -> None:
    chance = random.Random(8)
    for number in range(30):
        directory = tmp_path / str(number)
        directory.mkdir()
        disk = FaultyDisk()
        disk.direct = True
        wal, _, _ = open_wal(disk, str(directory), ONE_BATCH)
        model = Memory()
        first = [WalItem(7, commands(7, 1, 3), (1, 2, 0))]
        wal.write(first)
        if number % 2:
            wal.seal()
        model.take(first)
        start = wal.position[1]
        large = command(7, 4, bodies=[b"t" * 3 * BLOCK, b"u" * BLOCK])
        torn = [WalItem(7, [large], (2, 2, 3)), WalItem(8, commands(8, 1, 9))]
        wal.write(torn)
        end = wal.position[1]
        wal.close()
        before = model.state()
        model.take(torn)
        after = model.state()
        # Nobody was told of the last batch: any of its blocks may be missing, and what it lies in was never written.
        blocks = range(start, end, BLOCK)
        missing = chance.sample(blocks, chance.randint(1, len(blocks)))
        with (directory / wal_name(1)).open("r+b") as file:
            for at in missing:
                file.seek(at)
                file.write(bytes(BLOCK))
        again, memory, result = open_wal(disk, str(directory), ONE_BATCH)
        assert not result.damage
        assert memory.state() == before
        # What comes next lies over the rest of it, and nothing of it ever comes back.
        following = [WalItem(7, commands(7, 4, 4, term=5), (5, 1, 3))]
        again.write(following)
        again.close()
        memory.take(following)
        once_more, result = recover(disk, str(directory))
        assert once_more.state() == memory.state() != after
        assert not result.damage
