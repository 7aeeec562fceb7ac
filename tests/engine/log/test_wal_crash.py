"""Crashes of the WAL (law 8, fault D2): every prefix, sectors that did not arrive, stale bytes of an earlier use.

The expected states come from the model fed with the same items: what is recovered is always the state after some whole
batch, never less than what was acknowledged.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

from logyard.engine.disk.door import Disk
from logyard.engine.disk.faulty import FaultyDisk
from logyard.engine.log.record import BLOCK, DATA_START
from logyard.engine.log.wal import WalConfig, WalItem
from logyard.engine.log.wal_files import wal_name

from .model import Memory, command, commands, open_wal, recover

CONFIG = WalConfig(file_bytes=DATA_START + 8 * BLOCK, batch_bytes=16 * 1024)
State = dict[int, tuple[Any, ...]]
Batches = list[list[WalItem]]


def batches() -> Batches:
    return [
        [WalItem(7, commands(7, 1, 2), (1, 2, 0)), WalItem(8, [command(8, 1, bodies=[b"x" * 60, b"y" * 4100])])],
        [
            WalItem(7, floor=1),
            WalItem(7, [command(7, 3, tombstone=1)], (1, 2, 2), truncate=3),
            WalItem(9, hard_state=(4, 3, 0)),
        ],
        [WalItem(7, commands(7, 3, 4, term=2), truncate=3), WalItem(8, [command(8, 2, bodies=[b"z" * 900])])],
    ]


def write_all(directory: str, what: Batches) -> tuple[list[State], list[int]]:
    """Write the batches into a fresh WAL; return the state and the file offset after none, one, two, ... of them."""
    wal, _, _ = open_wal(Disk(), directory, CONFIG)
    model = Memory()
    states, ends = [model.state()], [wal._tail]
    for batch in what:
        wal.write(batch)
        model.take(batch)
        states.append(model.state())
        ends.append(wal._tail)
    wal.close()
    return states, ends


def test_every_prefix_recovers_to_whole_batches(tmp_path: Path) -> None:
    states, ends = write_all(str(tmp_path), batches())
    path = tmp_path / wal_name(1)
    image = path.read_bytes()
    disk = Disk()
    # From the back to the front: each step zeroes one more byte of the same file.
    fd = os.open(path, os.O_RDWR)
    try:
        for cut in range(ends[-1] - 1, DATA_START - 1, -1):
            if image[cut] == 0:
                continue
            os.pwrite(fd, b"\0", cut)
            memory, result = recover(disk, str(tmp_path))
            whole = sum(end <= cut for end in ends) - 1
            assert memory.state() == states[whole], cut
            assert not result.damage and result.current is not None and result.current.tail == ends[whole]
    finally:
        os.close(fd)


def test_what_was_cut_never_comes_back(tmp_path: Path) -> None:
    """The first batch of a new life lies over the torn one's header: not even the missing bytes would revive it."""
    states, ends = write_all(str(tmp_path), batches())
    path = tmp_path / wal_name(1)
    image = path.read_bytes()
    for missing in range(ends[2], ends[3], 512):
        torn = bytearray(image)
        torn[missing : missing + 512] = bytes(512)
        path.write_bytes(torn)
        wal, memory, result = open_wal(Disk(), str(tmp_path), CONFIG)
        if memory.state() == states[3]:
            wal.close()
            continue
        assert memory.state() == states[2]
        assert (wal.next_batch, wal._tail) == (4, ends[2] + BLOCK)
        wal.write([WalItem(8, [command(8, 2, term=5)])])
        end = wal._tail
        wal.close()
        # The missing sector arrives late, which can't happen, and still changes nothing but what was written since.
        after = bytearray(path.read_bytes())
        if missing >= end:
            after[missing : missing + 512] = image[missing : missing + 512]
            path.write_bytes(after)
        memory, result = recover(Disk(), str(tmp_path))
        assert not result.damage and memory.log[8][2][0] == 5 and memory.log[7] == states[2][7][1]


@pytest.mark.parametrize("before", ["zeros", "stale"])
def test_any_subset_of_the_last_batchs_sectors(tmp_path: Path, before: str) -> None:
    """D2: the un-synced batch arrives in part, over zeros or over the bytes of an earlier use of the space."""
    disk = Disk()
    directory = str(tmp_path)
    wal, _, _ = open_wal(disk, directory, CONFIG)
    if before == "stale":
        # The same shapes as below, so that old headers stand exactly where new ones are expected.
        for index in range(1, 4):
            wal.write([WalItem(7, [command(7, index, term=66, bodies=[b"o" * 9000])])])
            wal.roll()
            wal.recycle(wal.current - 1)
    model = Memory()
    index = 4 if before == "stale" else 1
    wal.write([WalItem(7, [command(7, index, term=67, bodies=[b"o" * 100])])])
    model.take([WalItem(7, [command(7, index, term=67, bodies=[b"o" * 100])])])
    path = tmp_path / wal_name(wal.current)
    old = path.read_bytes()
    start = wal._tail
    items = [WalItem(7, [command(7, index + 1, term=67, bodies=[b"n" * 9000])]), WalItem(8, [command(8, 1)])]
    without = model.state()
    wal.write(items)
    model.take(items)
    end = wal._tail
    epoch = wal.current
    wal.close()
    new = path.read_bytes()
    sectors = range(start, end, 512)
    differing = {at for at in sectors if old[at : at + 512] != new[at : at + 512]}
    draw = random.Random(42)
    subsets = [set(sectors) - {at} for at in sectors] + [{at} for at in sectors]
    subsets += [{at for at in sectors if draw.random() < 0.9} for _ in range(100)]
    for arrived in subsets:
        image = bytearray(old)
        for at in arrived:
            image[at : at + 512] = new[at : at + 512]
        path.write_bytes(image)
        memory, result = recover(disk, directory, epoch - 1)
        assert not result.damage
        assert memory.state() == (model.state() if differing <= arrived else without)


def test_a_torn_sector(tmp_path: Path) -> None:
    """Half of a sector arrived: any split point within the last batch's first and last sectors."""
    states, ends = write_all(str(tmp_path), batches())
    path = tmp_path / wal_name(1)
    image = path.read_bytes()
    for base in (ends[2], ends[3] - 512):
        for split in range(0, 512, 3):
            torn = bytearray(image)
            torn[base + split : base + 512] = b"\xaa" * (512 - split)
            path.write_bytes(torn)
            memory, result = recover(Disk(), str(tmp_path))
            assert memory.state() == states[2] and not result.damage


def test_pitfall_44_stale_batches_of_a_recycled_file_are_never_read(tmp_path: Path) -> None:
    """The recycled file is full of whole batches of its earlier use, each at a place where a new one may start."""
    disk = Disk()
    directory = str(tmp_path)
    wal, _, _ = open_wal(disk, directory, CONFIG)
    index = 0
    for _ in range(6):
        index += 1
        wal.write([WalItem(7, [command(7, index, term=9)]), WalItem(99, [command(99, index, term=9)])])
    stale = (tmp_path / wal_name(1)).read_bytes()
    wal.roll()
    wal.recycle(1)
    index += 1
    wal.write([WalItem(7, [command(7, index)])])
    wal.roll()
    for _ in range(3):
        index += 1
        wal.write([WalItem(7, [command(7, index)])])
        current = tmp_path / wal_name(wal.current)
        assert current.read_bytes()[wal._tail : -BLOCK] == stale[wal._tail : -BLOCK]
        memory, result = recover(disk, directory, wal.current - 1)
        assert not result.damage and 99 not in memory.log
        assert sorted(memory.log[7]) == list(range(8, index + 1))
    wal.close()


def test_bytes_of_a_client_never_pass_for_a_batch(tmp_path: Path) -> None:
    """A payload that is a copy of the WAL itself, torn so that the copy stands where the next header is looked for."""
    disk = Disk()
    wal, _, _ = open_wal(disk, str(tmp_path), CONFIG)
    wal.write([WalItem(66, [command(66, 1, term=6)])])
    batch = (tmp_path / wal_name(1)).read_bytes()[DATA_START : DATA_START + BLOCK]
    wal.write([WalItem(7, [command(7, 1, bodies=[batch * 4])])])
    wal.close()
    path = tmp_path / wal_name(1)
    image = bytearray(path.read_bytes())
    # Moved to every block boundary of the file, and the torn batch's own header is gone.
    for at in range(DATA_START + BLOCK, len(image), BLOCK):
        image[at : at + BLOCK] = batch
    path.write_bytes(image)
    memory, result = recover(disk, str(tmp_path))
    assert list(memory.log) == [66] and len(memory.log[66]) == 1 and not result.damage


def test_batches_of_another_wal_never_pass_for_this_ones(tmp_path: Path) -> None:
    """Same epoch, same number, same place, whole in itself: only the file's salt tells them apart."""
    disk = Disk()
    for name, uid in (("one", 7), ("two", 66)):
        wal, _, _ = open_wal(disk, str(tmp_path / name), CONFIG)
        for index in (1, 2):
            wal.write([WalItem(uid, [command(uid, index)])])
        wal.close()
    path = tmp_path / "one" / wal_name(1)
    image = bytearray(path.read_bytes())
    second = slice(DATA_START + BLOCK, DATA_START + 2 * BLOCK)
    image[second] = (tmp_path / "two" / wal_name(1)).read_bytes()[second]
    path.write_bytes(image)
    memory, result = recover(disk, str(tmp_path / "one"))
    assert list(memory.log) == [7] and sorted(memory.log[7]) == [1] and not result.damage
    assert result.current is not None and result.current.torn


def test_a_torn_batch_behind_a_seal_is_overwritten_too(tmp_path: Path) -> None:
    disk = Disk()
    wal, _, _ = open_wal(disk, str(tmp_path), CONFIG)
    wal.write([WalItem(7, [command(7, 1)])])
    wal.seal()
    start = wal._tail
    wal.write([WalItem(7, [command(7, 2)])])
    wal.close()
    path = tmp_path / wal_name(1)
    image = bytearray(path.read_bytes())
    last = image[start + BLOCK - 1]
    image[start + BLOCK - 1] ^= 1
    path.write_bytes(image)
    wal, _, _ = open_wal(disk, str(tmp_path), CONFIG)
    wal.close()
    image = bytearray(path.read_bytes())
    image[start + BLOCK - 1] = last
    path.write_bytes(image)
    memory, _ = recover(disk, str(tmp_path))
    assert sorted(memory.log[7]) == [1]


def test_pitfall_48_replay_writes_nothing_and_says_the_same_twice(tmp_path: Path) -> None:
    _, ends = write_all(str(tmp_path), batches())
    path = tmp_path / wal_name(1)
    torn = bytearray(path.read_bytes())
    torn[ends[3] - 700] ^= 1
    torn[ends[3] - 20] ^= 1
    path.write_bytes(torn)
    before = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    first, one = recover(Disk(), str(tmp_path))
    second, two = recover(Disk(), str(tmp_path))
    assert first.state() == second.state() and one.last_index == two.last_index and one.last_batch == two.last_batch
    assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == before


def test_crashes_around_a_roll(tmp_path: Path) -> None:
    """Whatever name operations of a roll are lost, the next life starts and has everything."""
    disk = Disk()
    directory = str(tmp_path)
    wal, _, _ = open_wal(disk, directory, CONFIG)
    wal.write([WalItem(7, commands(7, 1, 2))])
    wal.roll()
    wal.close()
    # The rename of the new file did not arrive: it is a spare with a head.
    os.rename(tmp_path / wal_name(2), tmp_path / "new-7.spare")
    (tmp_path / "new-8.spare.tmp").write_bytes(b"half")
    wal, memory, result = open_wal(disk, directory, CONFIG)
    assert sorted(memory.log[7]) == [1, 2] and not result.damage and wal.current == 1
    wal.roll()
    wal.write([WalItem(7, [command(7, 3)])])
    wal.close()
    assert not (tmp_path / "new-8.spare.tmp").exists()
    # An empty newest file: its existence proves that the batches before it are whole.
    wal, memory, _ = open_wal(disk, directory, CONFIG)
    wal.roll()
    wal.close()
    path = tmp_path / wal_name(2)
    image = bytearray(path.read_bytes())
    image[DATA_START + 80 + 20] ^= 1
    path.write_bytes(image)
    _, result = recover(disk, directory)
    assert result.healed or result.damage


def test_a_restart_after_every_batch(tmp_path: Path) -> None:
    """Many lives: numbers, chains and rolls go on across them; a crash between open and the first write is one more."""
    disk, model = Disk(), Memory()
    for index in range(1, 25):
        wal, memory, result = open_wal(disk, str(tmp_path), CONFIG)
        assert memory.state() == model.state() and not result.damage
        if index % 5 == 0:
            wal.close()
            continue
        items = [WalItem(7, [command(7, len(model.log.get(7, {})) + 1, bodies=[b"l" * 3000])])]
        assert not getattr(wal.write(items), "gaps", [])
        model.take(items)
        if index % 3 == 0:
            wal.seal()
        wal.close()


def test_files_that_are_flushed_are_not_replayed(tmp_path: Path) -> None:
    disk = Disk()
    wal, _, _ = open_wal(disk, str(tmp_path), CONFIG)
    homes = []
    for index in range(1, 4):
        entry = command(7, index, bodies=[b"h" * 50])
        wal.write([WalItem(7, [entry])])
        wal.roll()
        homes.append(entry)
    wal.close()
    wal, memory, result = open_wal(disk, str(tmp_path), CONFIG, flushed_through=2)
    assert sorted(memory.log[7]) == [3] and [one.file for one in result.sealed] == [3]
    assert wal.read_payload(1, homes[0].offset, 10) == (homes[0].bodies or (b"",))[0][:10]
    wal.close()
    # Even the newest one: a new file follows, and numbers rise.
    wal, memory, result = open_wal(disk, str(tmp_path), CONFIG, flushed_through=4)
    assert not memory.log and wal.current == 5 and wal.next_batch >= 4
    wal.close()


ONE_BATCH = WalConfig(file_bytes=256 * 1024, batch_bytes=64 * 1024)


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
        start = wal._tail
        large = command(7, 4, bodies=[b"t" * 3 * BLOCK, b"u" * BLOCK])
        torn = [WalItem(7, [large], (2, 2, 3)), WalItem(8, commands(8, 1, 9))]
        wal.write(torn)
        end = wal._tail
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
