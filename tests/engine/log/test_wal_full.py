"""The WAL on a full disk: what is cut off, and what the reserve is for."""

from __future__ import annotations

import dataclasses
import errno
from pathlib import Path

import pytest

from logyard.engine.disk.door import Disk
from logyard.engine.disk.faulty import FaultyDisk
from logyard.engine.log.record import FileHead
from logyard.engine.log.wal import WalItem
from logyard.engine.log.wal_files import WalFiles
from logyard.protocol.errors import NoSpace

from .model import SMALL, command, open_wal, recover


def test_what_a_full_disk_cut_off_goes_on_where_it_was_cut(tmp_path: Path) -> None:
    """Of one write of several batches, the durable items are not written again: they may have left memory."""
    disk = FaultyDisk()
    wal, _, _ = open_wal(disk, str(tmp_path))
    items = [WalItem(uid, [command(uid, 1, bodies=[b"m" * 9000])]) for uid in range(1, 21)]
    # The last item is larger than a batch, and cut between its entries.
    items.append(WalItem(30, [command(30, index, bodies=[b"n" * 9000]) for index in range(1, 12)]))
    refused: list[int] = []
    while items:
        disk.fail("preallocate", 1, errno.ENOSPC)
        try:
            wal.write(items)
        except NoSpace:
            done = wal.written(items)
            assert all(entry.file for item in items[:done] for entry in item.entries)
            assert not any(entry.file for item in items[done:] for entry in item.entries)
            refused.append(done)
            items = items[done:]
            disk._plans.clear()
            wal.prepare_next()
        else:
            items = []
    assert len(refused) >= 2 and any(refused), refused
    wal.close()
    memory, result = recover(Disk(), str(tmp_path))
    assert not result.damage and all(sorted(memory.log[uid]) == [1] for uid in range(1, 21))
    assert sorted(memory.log[30]) == list(range(1, 12))


def test_the_reserve_is_used_only_when_no_file_can_be_made(tmp_path: Path) -> None:
    disk = FaultyDisk()
    config = dataclasses.replace(SMALL, stock=1, reserve=1)
    files = WalFiles(disk, str(tmp_path / "wal"), config.file_bytes, config.stock, config.reserve)
    files.open()
    files.prepare(False)
    assert files.missing == 0 and files.spare_bytes == 2 * config.file_bytes
    files.start(FileHead(1, 1, 0, 0, 1), 0)
    assert not files.short and files.missing == 1
    files.start(FileHead(2, 2, 1, 0, 1), 0)
    assert not files.short and files.missing == 1, "another file was made: the reserve stays"
    disk.fail("preallocate", 1, errno.ENOSPC)
    files.start(FileHead(3, 3, 2, 0, 1), 0)
    assert files.short and files.missing == 2
    disk.fail("preallocate", 1, errno.ENOSPC)
    with pytest.raises(OSError):
        files.start(FileHead(4, 4, 3, 0, 1), 0)
    files.close()


def test_while_what_is_free_was_given_up_for_others_the_reserve_comes_first(tmp_path: Path) -> None:
    files = WalFiles(Disk(), str(tmp_path), SMALL.file_bytes, 1, 1)
    files.open()
    files.prepare(False)
    files.economize(True)
    files.start(FileHead(1, 1, 0, 0, 1), 0)
    assert not files.short and files.missing == 1, "there was one beside the reserve"
    files.start(FileHead(2, 2, 1, 0, 1), 0)
    assert files.short and files.missing == 2
    files.start(FileHead(3, 3, 2, 0, 1), 0)
    assert not files.short and files.missing == 2, "only without a spare is another one made"
    files.prepare(False)
    files.economize(False)
    files.start(FileHead(4, 4, 3, 0, 1), 0)
    files.start(FileHead(5, 5, 4, 0, 1), 0)
    assert not files.short and files.missing == 1, "the reserve stays"
    files.close()
