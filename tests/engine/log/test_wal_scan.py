"""What a replay reads: metadata, at a cost that a payload's size has no part in (law 5)."""

from __future__ import annotations

from pathlib import Path

import pytest

from logyard.engine.disk.door import Disk
from logyard.engine.log.record import BLOCK
from logyard.engine.log.wal import WalConfig, WalItem

from .model import command, open_wal, recover

ENTRIES = 20


class CountingDisk(Disk):
    """A disk that adds up what is read."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def read(self, fd: int, length: int, offset: int) -> bytes:
        found = super().read(fd, length, offset)
        self.count += len(found)
        return found


def replayed(path: Path, size: int) -> int:
    """Bytes read by a replay of `ENTRIES` batches of one payload each, of which none is in the last batch."""
    path.mkdir()
    # The file is as long as what is in it: a start searches the free space behind it, whatever lies before.
    config = WalConfig(ENTRIES * (size + BLOCK) + (1 << 16), 1 << 20, 0)
    wal, _, _ = open_wal(Disk(), str(path), config)
    for index in range(1, ENTRIES + 1):
        wal.write([WalItem(7, [command(7, index, bodies=[b"p" * size])])])
    wal.seal()
    wal.close()
    disk = CountingDisk()
    memory, result = recover(disk, str(path))
    assert sorted(memory.log[7]) == list(range(1, ENTRIES + 1)) and not result.damage
    return disk.count


@pytest.mark.parametrize("size", [1 << 18, 1 << 20])
def test_replay_reads_one_block_a_batch_whatever_its_payload(tmp_path: Path, size: int) -> None:
    small, large = replayed(tmp_path / "small", 1 << 17), replayed(tmp_path / "large", size)
    assert abs(large - small) < 1 << 16
    assert large < ENTRIES * 2 * BLOCK + (1 << 18)
