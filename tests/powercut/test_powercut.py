"""A few power cuts where they can be tried; `python -m tests.powercut` tries more."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from tests.crash.trace import available

from . import blocks
from .failing import failing_blocks
from .image import MAKE, attach, command, reason_against
from .life import Counts
from .run import failing_sync, row, run


@pytest.mark.skipif(bool(reason_against("ext4")), reason=reason_against("ext4") or "-")
@pytest.mark.long
def test_nothing_acknowledged_is_lost_by_a_power_cut_or_on_a_full_disk() -> None:
    found = run(cycles=4, seed=3)
    assert found.by_kind["ext4"] == 4 and found.by_kind["ext4 full"] == 1
    assert (found.lost, found.violations) == (0, []) and found.acknowledged > 100


@pytest.mark.skipif(not available(), reason="no strace that may trace: not run")
def test_nothing_acknowledged_is_lost_by_a_failed_sync(tmp_path: Path) -> None:
    found = Counts()
    for number in range(2):
        failing_sync(tmp_path / f"node-{number}", tmp_path, number, 4, found)
    assert found.by_kind == {"eio of a sync": 2} and (found.lost, found.violations) == (0, [])


NO_BLOCKS = blocks.reason_against() or reason_against("ext4")


@pytest.mark.skipif(bool(NO_BLOCKS), reason=NO_BLOCKS or "-")
@pytest.mark.long
def test_nothing_acknowledged_is_lost_by_blocks_that_fail(tmp_path: Path) -> None:
    found = Counts()
    failing_blocks(tmp_path, tmp_path, 1, 4, found)
    assert found.by_kind == {"eio of a block, write": 1, "eio of a block, read": 1}
    assert (found.lost, found.violations) == (0, []) and found.acknowledged > 10


def test_what_can_not_be_tried_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    found: Counts = run(cycles=1, seed=1)
    assert {kind: found.not_run[kind] for kind in MAKE} == dict.fromkeys(MAKE, "needs root")
    assert found.not_run["eio of a block"] == "needs root"
    assert not found.by_kind.keys() & set(MAKE) and row(found)["not_run"] == found.not_run


@pytest.mark.skipif(bool(NO_BLOCKS), reason=NO_BLOCKS or "-")
def test_a_write_whose_end_meets_bad_blocks_fails(tmp_path: Path) -> None:
    """A disk that called it good would have the node believe in bytes that are not there."""
    with blocks.BadBlocks(tmp_path, 8 << 20) as disk:
        device = attach(disk.file)
        fd = os.open(device, os.O_WRONLY | os.O_DIRECT)
        try:
            disk.order(write=[(150_000, 150_001)])
            with mmap.mmap(-1, 1 << 20) as data, pytest.raises(OSError, match="Input/output error"):
                os.pwrite(fd, data, 0)
        finally:
            os.close(fd)
            command("losetup", "--detach", device)
