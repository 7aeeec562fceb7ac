"""Attempts to break the laws at the write-ahead log: each test is named after the law it attacks."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from logyard.engine.disk import FaultyDisk
from logyard.engine.errors import WalFailed
from logyard.engine.log.wal import WalItem
from logyard.engine.log.wal_files import wal_name

from .model import commands, open_wal


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
