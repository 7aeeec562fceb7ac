"""The writing side of the WAL on real files: what a write leaves behind, rolling, gaps, failures, recycling."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from logyard.engine.disk.door import Disk
from logyard.engine.disk.faulty import FaultyDisk
from logyard.engine.log.record import BLOCK, DATA_START, RECORD_BYTES
from logyard.engine.log.wal import Gap, Sealed, WalConfig, WalItem
from logyard.engine.log.wal_ahead import AHEAD_BYTES, SMALL_BYTES
from logyard.engine.log.wal_files import wal_name
from logyard.protocol.errors import Gone, NoSpace, WalFailed

from .model import SMALL, Memory, command, commands, open_wal, payload, recover


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    disk, model = Disk(), Memory()
    wal, _, _ = open_wal(disk, str(tmp_path))
    batches = [
        [WalItem(7, commands(7, 1, 3), (1, 2, 0)), WalItem(8, [command(8, 1, bodies=[b"x" * 100, b"y" * 5000])])],
        [WalItem(7, floor=2), WalItem(7, [command(7, 4, tombstone=2)], (1, 2, 3)), WalItem(9, hard_state=(4, 0, 0))],
        [WalItem(7, commands(7, 3, 4, term=2), truncate=3), WalItem(8, [command(8, 2)])],
    ]
    for batch in batches:
        assert wal.write(batch) is None
        model.take(batch)
    wal.close()
    memory, result = recover(disk, str(tmp_path))
    assert memory.state() == model.state()
    assert not result.damage and not result.healed
    assert result.last_index == {7: 4, 8: 2}
    assert result.current is not None and len(result.current.entries) == 8


def test_payload_bytes_lie_where_the_entry_says_and_go_there_unjoined(tmp_path: Path) -> None:
    disk = FaultyDisk()
    wal, _, _ = open_wal(disk, str(tmp_path))
    entries = [command(7, 1, bodies=[b"a" * 10, b"b" * 9000, b"c" * 20]), command(7, 2, bodies=[b"d" * 4096])]
    wal.write([WalItem(7, entries)])
    for entry in entries:
        assert entry.file == wal.current
        assert wal.read_payload(entry.file, entry.offset, entry.body_bytes) == payload(entry)
    wal.close()
    memory, _ = recover(disk, str(tmp_path))
    for (_, found), entry in zip(memory.found, entries, strict=True):
        assert (found.file, found.offset, found.bodies) == (entry.file, entry.offset, None)


def test_one_batch_one_sync_for_a_thousand_groups(tmp_path: Path) -> None:
    disk = Disk()
    wal, _, _ = open_wal(disk, str(tmp_path), WalConfig(file_bytes=4 << 20))
    before = disk.fdatasyncs
    wal.write([WalItem(uid, [command(uid, 1)]) for uid in range(1, 1001)])
    assert disk.fdatasyncs == before + 1
    wal.close()
    memory, _ = recover(disk, str(tmp_path))
    assert len(memory.log) == 1000


def test_a_big_write_is_split_and_each_batch_is_synced_before_the_next(tmp_path: Path) -> None:
    disk = FaultyDisk()
    wal, _, _ = open_wal(disk, str(tmp_path), WalConfig(file_bytes=1 << 20, batch_bytes=16 * 1024))
    disk.calls.clear()
    items = [WalItem(7, [command(7, index, bodies=[b"z" * 6000]) for index in range(1, 11)], (3, 1, 0))]
    items.append(WalItem(8, [command(8, 1, bodies=[b"q" * 40_000])]))
    wal.write(items)
    names = [call.name for call in disk.calls]
    assert names == ["write", "datasync"] * (len(names) // 2) and len(names) >= 12
    wal.close()
    memory, _ = recover(disk, str(tmp_path))
    assert sorted(memory.log[7]) == list(range(1, 11)) and sorted(memory.log[8]) == [1]
    assert memory.hard[7] == (3, 1, 0)


def test_rolling_returns_the_sealed_file_and_its_entries(tmp_path: Path) -> None:
    disk = Disk()
    wal, _, _ = open_wal(disk, str(tmp_path))
    sealed = []
    written = []
    for index in range(1, 30):
        entry = command(7, index, bodies=[b"w" * 5000])
        rolled = wal.write([WalItem(7, [entry])])
        written.append(entry)
        if rolled is not None:
            sealed += rolled.sealed
    assert [one.file for one in sealed] == [1, 2, 3, 4]
    kept = [entry for one in sealed for _, entry in one.entries]
    assert kept == written[: len(kept)]
    assert [file for file, _ in wal.files] == [1, 2, 3, 4, 5]
    forced = wal.roll()
    assert forced is not None and forced.file == 5 and forced.entries[-1] == (7, written[-1])
    assert wal.roll() is None
    wal.close()
    memory, result = recover(disk, str(tmp_path))
    assert sorted(memory.log[7]) == list(range(1, 30))
    assert [one.file for one in result.sealed] == [1, 2, 3, 4, 5]
    for found, one in zip(result.sealed, sealed, strict=False):
        assert (found.length, len(found.entries)) == (one.length, len(one.entries))


def test_an_entry_larger_than_a_file_gets_a_file_of_its_size(tmp_path: Path) -> None:
    disk = Disk()
    wal, _, _ = open_wal(disk, str(tmp_path))
    entry = command(7, 1, bodies=[b"L" * 200_000])
    wal.write([WalItem(7, [entry])])
    assert wal.read_payload(entry.file, entry.offset, 10) == payload(entry)[:10]
    assert dict(wal.files)[entry.file] > 200_000
    wal.close()
    memory, _ = recover(disk, str(tmp_path))
    assert sorted(memory.log[7]) == [1]


def test_pitfall_47_a_gap_is_refused_named_and_leaves_the_others_alone(tmp_path: Path) -> None:
    wal, _, _ = open_wal(Disk(), str(tmp_path))
    wal.write([WalItem(7, commands(7, 1, 3))])
    rolled = wal.write([WalItem(7, [command(7, 5)], (2, 0, 0)), WalItem(8, [command(8, 40)])])
    assert rolled is not None and rolled.gaps == [Gap(7, 4)] and not rolled.sealed
    assert wal.write([WalItem(7, commands(7, 4, 5))]) is None
    wal.close()
    memory, _ = recover(Disk(), str(tmp_path))
    assert sorted(memory.log[7]) == [1, 2, 3, 4, 5] and sorted(memory.log[8]) == [40]
    assert 7 not in memory.hard


def test_the_gap_rule_holds_across_a_restart_and_ends_with_the_group(tmp_path: Path) -> None:
    wal, _, _ = open_wal(Disk(), str(tmp_path))
    wal.write([WalItem(7, commands(7, 1, 3))])
    wal.close()
    wal, _, _ = open_wal(Disk(), str(tmp_path))
    rolled = wal.write([WalItem(7, [command(7, 9)])])
    assert rolled is not None and rolled.gaps == [Gap(7, 4)]
    wal.forget(7)
    assert wal.write([WalItem(7, [command(7, 9)])]) is None
    wal.close()


def test_pitfall_52_a_snapshot_may_jump_ahead_of_what_was_written(tmp_path: Path) -> None:
    disk, model = Disk(), Memory()
    wal, _, _ = open_wal(disk, str(tmp_path))
    items = [WalItem(7, commands(7, 1, 3)), WalItem(7, truncate=100), WalItem(7, commands(7, 100, 101))]
    assert wal.write(items) is None
    model.take(items)
    rolled = wal.write([WalItem(7, [command(7, 103)])])
    assert rolled is not None and rolled.gaps == [Gap(7, 102)]
    wal.close()
    memory, result = recover(disk, str(tmp_path))
    assert memory.state() == model.state() and result.last_index == {7: 101} and not result.damage


def test_pitfall_45_46_an_index_written_twice_in_one_batch(tmp_path: Path) -> None:
    disk, model = Disk(), Memory()
    wal, _, _ = open_wal(disk, str(tmp_path))
    old, new = command(7, 2, term=1, bodies=[b"old"]), command(7, 2, term=2, bodies=[b"new"])
    items = [WalItem(7, [command(7, 1), old, command(7, 3)]), WalItem(7, [new])]
    wal.write(items)
    model.take(items)
    assert wal.read_payload(old.file, old.offset, old.body_bytes) == payload(old)
    assert wal.read_payload(new.file, new.offset, new.body_bytes) == payload(new)
    sealed = wal.roll()
    assert sealed is not None
    assert [(entry.index, entry.term) for _, entry in sealed.entries] == [(1, 1), (2, 1), (3, 1), (2, 2)]
    wal.close()
    memory, _ = recover(disk, str(tmp_path))
    assert memory.state() == model.state() and sorted(memory.log[7]) == [1, 2] and memory.log[7][2][0] == 2


def test_pitfall_41_a_failed_sync_fails_every_group_of_the_batch_for_good(tmp_path: Path) -> None:
    disk = FaultyDisk()
    wal, _, _ = open_wal(disk, str(tmp_path))
    wal.write([WalItem(7, [command(7, 1)])])
    entries = [command(uid, 2, bodies=[b"p"]) for uid in (7, 8, 9)]
    disk.fail("datasync", 1, errno.EIO)
    with pytest.raises(WalFailed):
        wal.write([WalItem(uid, [entry]) for uid, entry in zip((7, 8, 9), entries, strict=True)])
    assert all(entry.file == 0 for entry in entries)
    disk.calls.clear()
    for call in (lambda: wal.write([WalItem(8, [command(8, 1)])]), wal.seal, wal.roll):
        with pytest.raises(WalFailed):
            call()
    assert disk.calls == []
    wal.close()


@pytest.mark.parametrize("written", [0, 100, BLOCK])
def test_a_failed_write_is_final_too(tmp_path: Path, written: int) -> None:
    disk = FaultyDisk()
    wal, _, _ = open_wal(disk, str(tmp_path))
    wal.write([WalItem(7, [command(7, 1)])])
    disk.fail("write", 1, errno.EIO, written=written)
    with pytest.raises(WalFailed):
        wal.write([WalItem(7, [command(7, 2, bodies=[b"b" * 5000])])])
    with pytest.raises(WalFailed):
        wal.write([WalItem(7, [command(7, 2)])])
    wal.close()
    memory, result = recover(Disk(), str(tmp_path))
    assert sorted(memory.log[7]) == [1] and not result.damage


def test_a_full_disk_refuses_and_recovers(tmp_path: Path) -> None:
    """D6: no half batch, and writes go on when there is space."""
    disk = FaultyDisk()
    wal, _, _ = open_wal(disk, str(tmp_path))
    model = Memory()
    refused = 0
    sealed = []
    for index in range(1, 60):
        items = [WalItem(7, [command(7, index, bodies=[b"s" * 4200])])]
        if index % 7 == 0:
            disk.fail("preallocate", 1, errno.ENOSPC)
        for _ in range(2):
            try:
                rolled = wal.write(items)
            except NoSpace:
                refused += 1
                continue
            sealed += rolled.sealed if rolled else []
            break
        model.take(items)
    disk.fail("write", 1, errno.EDQUOT, written=5000)
    with pytest.raises(NoSpace):
        wal.write([WalItem(7, commands(7, 60, 62), (9, 9, 9))])
    items = [WalItem(7, [command(7, 60)])]
    wal.write(items)
    model.take(items)
    assert refused >= 3 and [one.file for one in sealed] == list(range(1, wal.current))
    wal.close()
    memory, result = recover(Disk(), str(tmp_path))
    assert memory.state() == model.state() and not result.damage
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]


def test_a_sealed_file_is_reported_even_if_the_disk_fills_up_in_the_same_write(tmp_path: Path) -> None:
    disk = FaultyDisk()
    wal, _, _ = open_wal(disk, str(tmp_path))
    items = [WalItem(7, [command(7, index, bodies=[b"s" * 9000]) for index in range(1, 16)])]
    disk.fail("preallocate", 2, errno.ENOSPC)
    with pytest.raises(NoSpace):
        wal.write(items)
    assert wal.current == 2
    rolled = wal.write(items)
    assert rolled is not None and [one.file for one in rolled.sealed][:2] == [1, 2]
    wal.close()
    memory, result = recover(disk, str(tmp_path))
    assert sorted(memory.log[7]) == list(range(1, 16)) and not result.damage


def test_a_failed_sync_of_a_new_files_name_is_final(tmp_path: Path) -> None:
    """Its head may be there for the next replay, and it ends the file before: batches written there would be lost."""
    disk = FaultyDisk()
    wal, _, _ = open_wal(disk, str(tmp_path))
    wal.write([WalItem(7, [command(7, 1)])])
    wal.prepare_next()
    disk.fail("sync_directory", 1, errno.ENOSPC)
    with pytest.raises(WalFailed):
        wal.roll()
    with pytest.raises(WalFailed):
        wal.write([WalItem(7, [command(7, 2)])])
    wal.close()


def test_pitfall_42_every_batch_is_synced_on_the_file_it_was_written_to(tmp_path: Path) -> None:
    disk = FaultyDisk()
    wal, _, _ = open_wal(disk, str(tmp_path))
    for _ in range(3):
        wal.prepare_next()
    disk.calls.clear()
    for index in range(1, 40):
        wal.write([WalItem(7, [command(7, index, bodies=[b"r" * 5000])])])
    dirty: set[str | int] = set()
    for call in disk.calls:
        if call.name == "write":
            assert not dirty - {call.target}, "a second file is written before the first one's sync"
            dirty.add(call.target)
        elif call.name in ("datasync", "sync_file"):
            dirty.discard(call.target)
    assert not dirty and wal.current > 2
    wal.close()


def test_a_spares_space_is_durable_before_its_name(tmp_path: Path) -> None:
    """A start takes it for a file of its whole size."""
    disk = FaultyDisk()
    wal, _, _ = open_wal(disk, str(tmp_path / "wal"))
    names = [call.name for call in disk.calls]
    at = names.index("preallocate")
    assert names[at : at + 4] == ["preallocate", "sync_file", "rename", "sync_directory"]
    wal.close()


def test_a_batch_takes_entries_up_to_its_very_limit(tmp_path: Path) -> None:
    items = [WalItem(7, [command(7, 1)]), WalItem(8, [command(8, 1)])]
    exactly = sum(len(one.data) + one.body_bytes + RECORD_BYTES for item in items for one in item.entries)
    for room, batches in ((exactly, 1), (exactly - 1, 2)):
        disk = Disk()
        wal, _, _ = open_wal(disk, str(tmp_path / str(room)), WalConfig(file_bytes=1 << 20, batch_bytes=room))
        before = disk.fdatasyncs
        wal.write(items)
        assert disk.fdatasyncs == before + batches
        wal.close()


def test_pitfall_49_a_file_has_a_durable_name_and_head_before_its_first_batch(tmp_path: Path) -> None:
    disk = FaultyDisk()
    wal, _, _ = open_wal(disk, str(tmp_path / "wal"))
    wal.write([WalItem(7, [command(7, 1)])])
    names = [call.name for call in disk.calls]
    head = next(n for n, call in enumerate(disk.calls) if call.data[:4] == b"LYWF")
    batch = next(n for n, call in enumerate(disk.calls) if call.data[:4] == b"LYWB")
    between = names[head:batch]
    assert between.index("datasync") < between.index("rename") < between.index("sync_directory")
    wal.close()


def test_reads_of_a_recycled_file_and_pins(tmp_path: Path) -> None:
    wal, _, _ = open_wal(Disk(), str(tmp_path))
    entry = command(7, 1, bodies=[b"n" * 6000])
    wal.write([WalItem(7, [entry])])
    wal.roll()
    wal.pin(entry.file)
    fd, _ = wal.stock.descriptor(entry.file)
    assert not wal.recycle(entry.file)
    with pytest.raises(Gone):
        wal.pin(entry.file)
    for index in range(2, 40):
        wal.write([WalItem(7, [command(7, index, bodies=[b"m" * 6000])])])
    assert os.pread(fd, entry.body_bytes, entry.offset) == payload(entry)
    wal.unpin(entry.file)
    with pytest.raises(Gone):
        wal.read_payload(entry.file, entry.offset, 10)
    assert wal.recycle(entry.file)
    wal.close()


def test_files_are_reused_and_the_stock_is_bounded(tmp_path: Path) -> None:
    disk = FaultyDisk()
    wal, _, _ = open_wal(disk, str(tmp_path))
    highest = 0
    index = 0
    for _ in range(6):
        sealed: list[Sealed] = []
        while len(sealed) < 3:
            index += 1
            rolled = wal.write([WalItem(7, [command(7, index, bodies=[b"k" * 6000])])])
            sealed += rolled.sealed if rolled else []
        for one in sealed:
            assert wal.recycle(one.file)
        highest = max(highest, wal.allocated_bytes())
    made = sum(call.name == "preallocate" for call in disk.calls)
    assert highest <= (SMALL.stock + 1) * SMALL.file_bytes
    assert made < wal.current, "space written before is never used again"
    wal.close()
    wal, memory, result = open_wal(disk, str(tmp_path), flushed_through=wal.current - 1)
    assert not result.damage and max(memory.log[7]) == index
    assert wal.allocated_bytes() <= (SMALL.stock + 1) * SMALL.file_bytes
    wal.close()


def test_a_recycled_files_old_name_is_gone_for_good_before_its_space_is_used(tmp_path: Path) -> None:
    disk = FaultyDisk()
    wal, _, _ = open_wal(disk, str(tmp_path))
    wal.write([WalItem(7, [command(7, 1)])])
    wal.roll()
    disk.calls.clear()
    wal.recycle(1)
    assert [call.name for call in disk.calls] == ["rename", "sync_directory", "sync_file"]
    wal.close()


def test_a_file_that_is_not_kept_is_gone_for_good(tmp_path: Path) -> None:
    disk = FaultyDisk()
    wal, _, _ = open_wal(disk, str(tmp_path), WalConfig(file_bytes=1 << 20, stock=0))
    wal.write([WalItem(7, [command(7, 1)])])
    wal.roll()
    disk.calls.clear()
    assert wal.recycle(1)
    assert "sync_directory" in [call.name for call in disk.calls] and wal_name(1) not in os.listdir(tmp_path)
    wal.close()


def test_sealing_writes_one_empty_batch_and_no_second_one(tmp_path: Path) -> None:
    disk = Disk()
    wal, _, _ = open_wal(disk, str(tmp_path))
    wal.seal()
    assert (wal.next_batch, wal._tail) == (1, DATA_START)
    wal.write([WalItem(7, [command(7, 1)])])
    wal.seal()
    wal.seal()
    assert (wal.next_batch, wal._tail) == (3, DATA_START + 2 * BLOCK)
    wal.close()


def test_a_full_file_can_still_be_sealed(tmp_path: Path) -> None:
    config = WalConfig(file_bytes=DATA_START + 3 * BLOCK)
    wal, _, _ = open_wal(Disk(), str(tmp_path), config)
    for index in (1, 2):
        wal.write([WalItem(7, [command(7, index)])])
    assert wal.current == 1
    wal.seal()
    assert (wal.next_batch, wal._tail) == (4, config.file_bytes)
    wal.write([WalItem(7, [command(7, 3)])])
    assert wal.current == 2
    wal.close()
    memory, result = recover(Disk(), str(tmp_path))
    assert sorted(memory.log[7]) == [1, 2, 3] and not result.damage


def test_an_item_that_wants_nothing_costs_nothing(tmp_path: Path) -> None:
    disk = Disk()
    wal, _, _ = open_wal(disk, str(tmp_path))
    before = disk.fdatasyncs
    assert wal.write([WalItem(7), WalItem(8)]) is None and wal.write([]) is None
    assert disk.fdatasyncs == before
    wal.close()


class Reserved(Disk):
    """Space counts as never written from `unwritten` on; `ahead` are the zeros that were asked for: (offset, bytes)."""

    __slots__ = ("ahead", "unwritten")

    def __init__(self, unwritten: int) -> None:
        super().__init__()
        self.unwritten = unwritten
        self.ahead: list[tuple[int, int]] = []

    def open_direct(self, path: str) -> int:
        """A descriptor that is not direct, so that every file system will do."""
        return os.open(path, os.O_WRONLY)

    def unwritten_from(self, fd: int, offset: int) -> int:
        """As told."""
        return self.unwritten

    def direct_write(self, fd: int, memory: memoryview, offset: int) -> None:
        """Remember it."""
        self.ahead.append((offset, len(memory)))
        super().direct_write(fd, memory, offset)


def test_small_batches_find_the_space_behind_them_written(tmp_path: Path) -> None:
    disk, model = Reserved(DATA_START), Memory()
    config = WalConfig(file_bytes=2 * AHEAD_BYTES, stock=0)
    wal, _, _ = open_wal(disk, str(tmp_path), config)
    tails = []
    for index in range(1, 200):
        batch = [WalItem(7, [command(7, index, bodies=[b"x" * 3000])])]
        wal.write(batch)
        model.take(batch)
        tails.append(wal._tail)
    # Once for many batches, always behind what is there, never behind the file's end.
    assert disk.ahead == [(tails[0], AHEAD_BYTES), (at := disk.ahead[1][0], 2 * AHEAD_BYTES - at)]
    assert at in tails and tails[0] + AHEAD_BYTES < at < tails[0] + AHEAD_BYTES + 3 * BLOCK
    wal.close()
    memory, result = recover(disk, str(tmp_path))
    assert memory.state() == model.state() and not result.damage and not result.healed


def test_neither_large_batches_nor_written_space_get_zeros(tmp_path: Path) -> None:
    disk = Reserved(DATA_START)
    wal, _, _ = open_wal(disk, str(tmp_path / "fresh"), WalConfig(file_bytes=4 * AHEAD_BYTES))
    wal.write([WalItem(7, [command(7, 1, bodies=[b"x" * (SMALL_BYTES + 1)])])])
    assert not disk.ahead
    wal.write([WalItem(7, [command(7, 2)])])
    assert disk.ahead == [(wal._tail, AHEAD_BYTES)]
    wal.close()
    disk = Reserved(4 * AHEAD_BYTES)
    wal, _, _ = open_wal(disk, str(tmp_path / "recycled"), WalConfig(file_bytes=4 * AHEAD_BYTES))
    wal.write([WalItem(7, [command(7, 1)])])
    assert not disk.ahead
    wal.close()


def test_a_file_says_where_its_space_was_never_written(tmp_path: Path) -> None:
    disk = Disk()
    fd = disk.create(str(tmp_path / "file"))
    disk.preallocate(fd, 64 * BLOCK, False)
    os.pwrite(fd, bytes(2 * BLOCK), 0)
    disk.datasync(fd)
    # Where the file system can't tell, nothing is written ahead.
    assert disk.unwritten_from(fd, 0) in (2 * BLOCK, 64 * BLOCK)
    os.pwrite(fd, bytes(62 * BLOCK), 2 * BLOCK)
    disk.datasync(fd)
    assert disk.unwritten_from(fd, 0) == 64 * BLOCK
    disk.close(fd)


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
