"""Rot in the WAL (law 8, faults D7 and D10): every flipped byte is harmless, healed, cut with the last batch or said.

Nothing wrong is ever delivered, and no group is taken for whole that is not.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from logyard.engine.disk.door import Disk
from logyard.engine.log.record import (
    BATCH_BYTES,
    BLOCK,
    DATA_START,
    FileHead,
    decode_file_head,
    encode_file_head,
)
from logyard.engine.log.wal import Wal, WalConfig, WalItem
from logyard.engine.log.wal_files import wal_name
from logyard.engine.log.wal_replay import Cut, ReplayResult, replay
from logyard.protocol.errors import WrongIdentity

from .model import Memory, command, commands, open_wal, recover
from .test_wal_crash import CONFIG, batches, write_all

UIDS = (7, 8, 9)


def suspects(result: ReplayResult) -> set[int]:
    """The groups that the host would send into repair."""
    named = {damage.uid for damage in result.damage}
    return (set(UIDS) - result.cleared) | named if 0 in named else named


def check_delivery(memory: Memory, authentic: set[tuple[int, int, int, bytes]]) -> None:
    for uid, entry in memory.found:
        assert (uid, entry.index, entry.term, entry.data) in authentic


@pytest.mark.parametrize("mask", [0x01, 0xFF])
@pytest.mark.parametrize("sealed", [False, True])
def test_every_flipped_byte_is_noticed_or_harmless(tmp_path: Path, mask: int, sealed: bool) -> None:
    what = batches()
    states, ends = write_all(str(tmp_path), what)
    if sealed:
        wal, _, _ = open_wal(Disk(), str(tmp_path), CONFIG)
        ends.append(wal._tail)
        wal.close()
    authentic = {
        (item.uid, entry.index, entry.term, entry.data) for batch in what for item in batch for entry in item.entries
    }
    path = tmp_path / wal_name(1)
    image = path.read_bytes()
    disk = Disk()
    fd = os.open(path, os.O_RDWR)
    noticed = 0
    # Padding and payload bytes are covered by their own tests; a stride over long runs of equal bytes keeps this short.
    positions = [at for at in range(ends[-1]) if image[at] or at % 16 == 0]
    for at in positions:
        os.pwrite(fd, bytes([image[at] ^ mask]), at)
        memory, result = recover(disk, str(tmp_path))
        os.pwrite(fd, image[at : at + 1], at)
        check_delivery(memory, authentic)
        if result.damage:
            noticed += 1
            hurt = suspects(result)
            assert hurt
            for uid in UIDS:
                assert uid in hurt or memory.group(uid) == states[3][uid], (at, uid)
        elif not sealed and ends[2] <= at < ends[3]:
            assert memory.state() in (states[2], states[3]), at
        else:
            assert memory.state() == states[3], at
    os.close(fd)
    assert noticed > 100


def damaged(tmp_path: Path, *positions: int) -> None:
    path = tmp_path / wal_name(1)
    image = bytearray(path.read_bytes())
    for at in positions:
        image[at] ^= 0x40
    path.write_bytes(image)


def test_a_bad_record_names_its_group_and_only_that(tmp_path: Path) -> None:
    states, _ = write_all(str(tmp_path), batches())
    # Entry 1 of group 7, behind its hard state: entry 2 comes in the same run and is not delivered either.
    damaged(tmp_path, DATA_START + BATCH_BYTES + 2 * 32 + 100)
    memory, result = recover(Disk(), str(tmp_path))
    assert {damage.uid for damage in result.damage} == {7}
    assert memory.group(8) == states[3][8] and memory.group(9) == states[3][9]
    assert 7 not in result.last_index and 7 not in memory.log, "nothing behind the damage"
    assert memory.hard[7] == (1, 2, 2)


def test_a_lost_header_is_healed_by_the_trailer(tmp_path: Path) -> None:
    states, ends = write_all(str(tmp_path), batches())
    for block in (ends[0], ends[1]):
        damaged(tmp_path, block + 5)
    memory, result = recover(Disk(), str(tmp_path))
    assert memory.state() == states[3] and not result.damage and len(result.healed) == 2


def test_a_batch_without_header_and_trailer_suspects_who_has_no_later_word(tmp_path: Path) -> None:
    """Group 7 has a later row that steps over the hole, group 8 one that comes out of it, group 9 none."""
    disk = Disk()
    wal, _, _ = open_wal(disk, str(tmp_path), CONFIG)
    wal.write([WalItem(uid, [command(uid, 1)]) for uid in UIDS])
    hole = wal._tail
    wal.write([WalItem(8, [command(8, 2)])])
    wal.write([WalItem(7, [command(7, 2)]), WalItem(8, [command(8, 3)])])
    wal.close()
    path = tmp_path / wal_name(1)
    image = bytearray(path.read_bytes())
    image[hole : hole + BLOCK] = bytes(BLOCK)
    path.write_bytes(image)
    memory, result = recover(disk, str(tmp_path))
    assert {damage.uid for damage in result.damage} == {0, 8}
    assert result.cleared == {7}
    assert sorted(memory.log[7]) == [1, 2] and sorted(memory.log[8]) == [1]
    # The suspicion outlives a restart: nothing that is written later clears group 9 or convicts a new group.
    wal, _, _ = open_wal(disk, str(tmp_path), CONFIG)
    wal.write([WalItem(9, [command(9, 2)]), WalItem(7, [command(7, 3)])])
    wal.close()
    _, result = recover(disk, str(tmp_path))
    assert result.cleared == {7} and {damage.uid for damage in result.damage} >= {0, 8, 9}


def test_both_directories_damaged_but_every_record_whole(tmp_path: Path) -> None:
    states, ends = write_all(str(tmp_path), batches())
    damaged(tmp_path, ends[0] + BATCH_BYTES + 3, ends[1] - BATCH_BYTES - 3)
    memory, result = recover(Disk(), str(tmp_path))
    assert memory.state() == states[3] and not result.damage and result.healed


def test_both_directories_and_a_record_damaged(tmp_path: Path) -> None:
    _, ends = write_all(str(tmp_path), batches())
    damaged(tmp_path, ends[0] + BATCH_BYTES + 3, ends[1] - BATCH_BYTES - 3, ends[0] + BATCH_BYTES + 80)
    _, result = recover(Disk(), str(tmp_path))
    assert {damage.uid for damage in result.damage} >= {0}
    assert suspects(result) >= {7, 8}


def test_damage_before_the_tail_is_never_cut(tmp_path: Path) -> None:
    """D7: bytes behind the damage stay, and the next life writes behind them."""
    _, ends = write_all(str(tmp_path), batches())
    path = tmp_path / wal_name(1)
    image = bytearray(path.read_bytes())
    image[ends[0] : ends[1]] = bytes(ends[1] - ends[0])
    path.write_bytes(image)
    wal, _, result = open_wal(Disk(), str(tmp_path), CONFIG)
    assert result.damage[0].uid == 0 and result.damage[0].offset == ends[0]
    assert wal._tail == ends[3] + BLOCK
    assert path.read_bytes()[: ends[3]] == bytes(image[: ends[3]])
    wal.close()


def test_the_end_of_a_sealed_file_is_missed(tmp_path: Path) -> None:
    """The last batch of a file that is not the last one can't be torn, whatever it looks like."""
    disk = Disk()
    wal, _, _ = open_wal(disk, str(tmp_path), CONFIG)
    wal.write([WalItem(7, [command(7, 1)])])
    at = wal._tail
    wal.write([WalItem(7, [command(7, 2)])])
    wal.roll()
    wal.write([WalItem(8, [command(8, 1)])])
    wal.close()
    path = tmp_path / wal_name(1)
    image = bytearray(path.read_bytes())
    image[at : at + BLOCK] = bytes(BLOCK)
    path.write_bytes(image)
    _, result = recover(disk, str(tmp_path))
    assert [damage.uid for damage in result.damage] == [0] and 7 not in result.cleared


def test_the_end_of_a_sealed_file_is_healed_by_its_trailer(tmp_path: Path) -> None:
    """The next file's head says where the batches of this one end, so that the last trailer can be found."""
    disk = Disk()
    wal, _, _ = open_wal(disk, str(tmp_path), CONFIG)
    wal.write([WalItem(7, [command(7, 1)])])
    at = wal._tail
    wal.write([WalItem(7, [command(7, 2)])])
    wal.roll()
    wal.close()
    damaged(tmp_path, at + 9)
    memory, result = recover(disk, str(tmp_path))
    assert sorted(memory.log[7]) == [1, 2] and not result.damage and len(result.healed) == 1


@pytest.mark.parametrize("copies", [1, 2])
def test_the_head_of_a_file(tmp_path: Path, copies: int) -> None:
    disk = Disk()
    wal, _, _ = open_wal(disk, str(tmp_path), CONFIG)
    wal.write([WalItem(7, [command(7, 1)])])
    wal.roll()
    wal.write([WalItem(7, [command(7, 2)])])
    wal.roll()
    wal.write([WalItem(7, [command(7, 3)]), WalItem(8, [command(8, 1)])])
    wal.close()
    path = tmp_path / wal_name(2)
    image = bytearray(path.read_bytes())
    for at in (0, BLOCK)[:copies]:
        image[at + 17] ^= 4
    path.write_bytes(image)
    memory, result = recover(disk, str(tmp_path))
    if copies == 1:
        assert sorted(memory.log[7]) == [1, 2, 3] and not result.damage and result.healed
        return
    assert sorted(memory.log[7]) == [1]
    assert 0 in {damage.uid for damage in result.damage} and 7 not in result.cleared
    assert result.cleared == {8}


def test_the_newest_files_head_is_lost(tmp_path: Path) -> None:
    disk = Disk()
    wal, _, _ = open_wal(disk, str(tmp_path), CONFIG)
    wal.write([WalItem(7, [command(7, 1)])])
    wal.close()
    path = tmp_path / wal_name(1)
    path.write_bytes(bytes(2 * BLOCK) + path.read_bytes()[2 * BLOCK :])
    wal, memory, result = open_wal(disk, str(tmp_path), CONFIG)
    assert result.damage and not memory.log and wal.current == 2 and wal.next_batch > 9
    wal.write([WalItem(8, [command(8, 1)])])
    wal.close()
    memory, result = recover(disk, str(tmp_path))
    assert sorted(memory.log) == [8] and 0 in {damage.uid for damage in result.damage}


def test_a_missing_file_between_two_others(tmp_path: Path) -> None:
    disk = Disk()
    wal, _, _ = open_wal(disk, str(tmp_path), CONFIG)
    for index in range(1, 4):
        wal.write([WalItem(7, [command(7, index)])])
        wal.roll()
    wal.close()
    (tmp_path / wal_name(2)).unlink()
    _, result = recover(disk, str(tmp_path))
    assert 0 in {damage.uid for damage in result.damage} and not result.cleared
    (tmp_path / wal_name(1)).unlink()
    _, result = recover(disk, str(tmp_path), flushed_through=2)
    assert not result.damage


def test_a_misdirected_write_is_seen(tmp_path: Path) -> None:
    """D10: whole, valid blocks in the wrong place of the same file."""
    disk = Disk()
    wal, _, _ = open_wal(disk, str(tmp_path), CONFIG)
    for index in range(1, 5):
        wal.write([WalItem(7, [command(7, index)])])
    wal.seal()
    wal.close()
    path = tmp_path / wal_name(1)
    image = bytearray(path.read_bytes())
    one, two = DATA_START, DATA_START + BLOCK
    image[two : two + BLOCK] = image[one : one + BLOCK]
    path.write_bytes(image)
    memory, result = recover(disk, str(tmp_path))
    assert result.damage and sorted(memory.log[7]) == [1] and 7 not in result.cleared


def test_a_payload_of_an_earlier_batch_is_not_read_at_replay(tmp_path: Path) -> None:
    """Its own hash finds the rot when it is read; a restart costs metadata only (law 5)."""
    disk = Disk()
    wal, _, _ = open_wal(disk, str(tmp_path), CONFIG)
    entry = command(7, 1, bodies=[b"p" * 6000])
    wal.write([WalItem(7, [entry])])
    wal.seal()
    wal.close()
    damaged(tmp_path, entry.offset + 4000)
    memory, result = recover(disk, str(tmp_path))
    assert sorted(memory.log[7]) == [1] and not result.damage


class UnreadableDisk(Disk):
    """A disk that has lost one block."""

    __slots__ = ("block",)

    def __init__(self, block: int) -> None:
        super().__init__()
        self.block = block

    def read(self, fd: int, length: int, offset: int) -> bytes:
        if offset < self.block + BLOCK and offset + length > self.block:
            raise OSError(errno.EIO, "unreadable")
        return super().read(fd, length, offset)


@pytest.mark.parametrize("batch", [0, 1, 2])
def test_a_block_the_disk_cannot_read_is_damage(tmp_path: Path, batch: int) -> None:
    """Also in the last batch: a torn write leaves old bytes or new ones, not an error."""
    _, ends = write_all(str(tmp_path), [[WalItem(uid, [command(uid, 1)])] for uid in UIDS])
    disk = UnreadableDisk(ends[batch])
    memory, result = recover(disk, str(tmp_path))
    assert result.damage and UIDS[batch] in suspects(result)
    assert UIDS[batch] not in memory.log


@pytest.mark.parametrize("block", range(6))
def test_no_block_of_the_last_batch_that_the_disk_cannot_read_makes_it_a_torn_one(tmp_path: Path, block: int) -> None:
    """What was acknowledged is delivered or said to be lost; and it is not written over, for it may be read again."""
    big = command(8, 1, bodies=[b"p" * 18_000])
    _, ends = write_all(str(tmp_path), [[WalItem(7, [command(7, 1)])], [WalItem(8, [big])]])
    assert ends[2] - ends[1] == 5 * BLOCK
    wal, memory, result = open_wal(UnreadableDisk(ends[1] + block * BLOCK), str(tmp_path), CONFIG)
    assert 8 in memory.log or 8 in suspects(result)
    wal.write([WalItem(9, [command(9, 1)])])
    wal.close()
    memory, result = recover(Disk(), str(tmp_path))
    assert memory.log.keys() == {7, 8, 9} and not result.damage


def test_a_newer_format_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    write_all(str(tmp_path), batches())
    path = tmp_path / wal_name(1)
    image = bytearray(path.read_bytes())
    head = decode_file_head(bytes(image[:BLOCK]))
    assert head == FileHead(1, head.salt if head else 0, 0, 0, 1)
    from xxhash import xxh3_64_digest

    fixed = bytearray(encode_file_head(head)[:48])
    fixed[4] = 2
    block = (bytes(fixed) + xxh3_64_digest(bytes(fixed))).ljust(BLOCK, b"\0")
    path.write_bytes(block + block + bytes(image[2 * BLOCK :]))
    before = path.read_bytes()
    memory = Memory()
    with pytest.raises(WrongIdentity, match="format 2"):
        open_wal(Disk(), str(tmp_path), CONFIG)
    assert path.read_bytes() == before and not memory.found


def test_a_big_hole_costs_no_memory(tmp_path: Path) -> None:
    """A megabyte of zeros in the middle of a file: the next header is found behind it."""
    config = WalConfig(file_bytes=4 << 20)
    wal, _, _ = open_wal(Disk(), str(tmp_path), config)
    for index in range(1, 400):
        wal.write([WalItem(7, commands(7, index, index))])
    wal.close()
    path = tmp_path / wal_name(1)
    image = bytearray(path.read_bytes())
    image[DATA_START + BLOCK : DATA_START + 300 * BLOCK] = bytes(299 * BLOCK)
    path.write_bytes(image)
    memory, result = recover(Disk(), str(tmp_path))
    assert sorted(memory.log[7]) == [1] and {damage.uid for damage in result.damage} == {0, 7}


def test_a_cut_leaves_out_what_is_behind_known_damage_and_goes_on_with_what_came_later(tmp_path: Path) -> None:
    """The host took note of group 7's damage after the first life; group 8 is untouched by it."""
    disk = Disk()
    wal, _, _ = open_wal(disk, str(tmp_path), CONFIG)
    wal.write([WalItem(7, [command(7, 1)])])
    bad = wal._tail
    wal.write([WalItem(7, [command(7, 2)])])
    wal.write([WalItem(7, [command(7, 3)], hard_state=(4, 2, 0)), WalItem(8, [command(8, 1)])])
    through = wal.next_batch - 1
    wal.close()
    damaged(tmp_path, bad + BATCH_BYTES + 32 + 60)
    memory, result = recover(disk, str(tmp_path))
    assert {one.uid for one in result.damage} == {7} and 7 in result.sure and sorted(memory.log[7]) == [1]
    assert memory.hard[7] == (4, 2, 0) and result.spoiled == {1}
    cuts = {7: Cut(through, False)}
    wal = Wal(disk, str(tmp_path), CONFIG)
    wal.adopt(replay(disk, str(tmp_path), Memory(), 0, cuts))
    wal.open()
    wal.write([WalItem(7, [command(7, 2, 4), command(7, 3, 4)])])
    wal.close()
    for _ in range(2):
        memory = Memory()
        result = replay(disk, str(tmp_path), memory, 0, cuts)
        assert not result.damage and 7 in result.cleared and result.last_index[7] == 3
        assert {index: found[0] for index, found in memory.log[7].items()} == {1: 1, 2: 4, 3: 4}
    memory = Memory()
    replay(disk, str(tmp_path), memory, 0, {7: Cut(through, True)})
    assert sorted(memory.log[7]) == [2, 3], "whole: nothing of before is its log"
    # Without the host's word it is damage still.
    _, result = recover(disk, str(tmp_path))
    assert {one.uid for one in result.damage} == {7}
