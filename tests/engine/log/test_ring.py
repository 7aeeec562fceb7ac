"""The ring file by itself: what of a slot counts, and what is junk however well it verifies."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest

from logyard.engine.disk.door import Disk
from logyard.engine.disk.faulty import FaultyDisk
from logyard.engine.entry import COMMANDS, Entry, build_plain
from logyard.engine.log import ring
from logyard.engine.log.record import BLOCK
from logyard.engine.log.ring import HEADER_BYTES, Geometry, RingReader, make_ring, write_heads, write_slots
from logyard.protocol.errors import Busy, Corrupt, WrongIdentity

UID = 0x1234567890ABCDEF
SHAPE = Geometry(16, BLOCK)
SECTOR = 512


def entry(index: int, term: int = 1, size: int = 100, tombstone: int = 0) -> Entry:
    made = build_plain(index, term, COMMANDS, 5, random.Random(f"{index} {term}").randbytes(size))
    made.tombstone = tombstone
    return made


def ring_at(path: Path, *entries: Entry, uid: int = UID, shape: Geometry = SHAPE) -> str:
    name = str(path)
    make_ring(Disk(), name, uid, shape)
    write_slots(Disk(), name, uid, shape, entries)
    return name


def spoil(path: str, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def outcome(path: str, index: int, term: int = 1, uid: int = UID) -> str:
    """whole, torn (one header of the two) or what is wrong."""
    reader = RingReader(Disk(), path, uid)
    try:
        found = reader.find(index, term)
        assert (found.entry.index, found.entry.term) == (index, term) and found.entry.data == entry(index, term).data
        return "whole" if found.whole else "torn"
    except Corrupt as error:
        return str(error)
    finally:
        reader.close()


def test_what_is_written_is_read(tmp_path: Path) -> None:
    entries = [entry(index, 1 if index < 20 else 3, 100 * index, index if index == 7 else 0) for index in range(5, 21)]
    path = ring_at(tmp_path / "ring", *entries)
    reader = RingReader(Disk(), path, UID)
    found = [*reader.entries(5, 19, 1), *reader.entries(20, 20, 3)]
    assert [(one.data, one.tombstone) for one in found] == [(one.data, one.tombstone) for one in entries]
    assert len(reader.entries(5, 19, 1, 1)) == 1 and len(reader.entries(5, 19, 1, 1200)) == 2
    seen = reader.verify(5, 19, 1)
    assert not seen.torn and not seen.bad and reader.heads == 2
    assert os.path.getsize(path) == SHAPE.size and not os.path.exists(path + ".tmp")
    reader.close()


def test_a_torn_header_costs_nothing_and_a_torn_body_one_entry(tmp_path: Path) -> None:
    path = ring_at(tmp_path / "ring", *(entry(index) for index in range(1, 8)))
    # The sector has the headers of seven of them.
    spoil(path, SHAPE.header_at(1) // SECTOR * SECTOR, bytes(SECTOR))
    assert {outcome(path, index) for index in range(1, 8)} == {"torn"}
    spoil(path, SHAPE.copy_at(7), b"\xff" * HEADER_BYTES)
    assert "no header of it" in outcome(path, 7)
    spoil(path, SHAPE.slot_at(3), b"\xff")
    assert "other bytes than the 148 that it names" in outcome(path, 3)
    assert {outcome(path, index) for index in (1, 2, 4, 5, 6)} == {"torn"}


def test_headers_are_written_anew_from_the_other_copy(tmp_path: Path) -> None:
    path = ring_at(tmp_path / "ring", *(entry(index) for index in range(1, 17)))
    good = Path(path).read_bytes()
    spoil(path, 0, bytes(BLOCK))
    spoil(path, SHAPE.header_at(5), bytes(HEADER_BYTES))
    spoil(path, SHAPE.copy_at(6), b"\xff" * HEADER_BYTES)
    reader = RingReader(Disk(), path, UID)
    seen = reader.verify(1, 16, 1)
    assert reader.heads == 1 and [one.index for one in seen.torn] == [5, 6] and not seen.bad
    write_heads(Disk(), path, UID, SHAPE, seen.torn)
    assert Path(path).read_bytes() == good
    reader.close()


def test_a_slot_counts_only_for_the_index_and_the_term_that_a_run_names(tmp_path: Path) -> None:
    path = ring_at(tmp_path / "ring", *(entry(index) for index in range(8, 12)))
    # Another leader overwrote 10; what is left of 11 is as good as ever.
    write_slots(Disk(), path, UID, SHAPE, [entry(10, 2)])
    assert outcome(path, 10, 2) == outcome(path, 11) == "whole"
    assert "entry 10 of term 1" in outcome(path, 10, 1) and "entry 11 of term 2" in outcome(path, 11, 2)
    # The next turn of the ring takes the place of what was there, and of nothing else.
    write_slots(Disk(), path, UID, SHAPE, [entry(24)])
    assert "entry 8 of term 1" in outcome(path, 8) and outcome(path, 24) == outcome(path, 9) == "whole"


def test_bytes_of_another_place_file_or_group_are_junk(tmp_path: Path) -> None:
    path = ring_at(tmp_path / "ring", entry(1), entry(2))
    whole = Path(path).read_bytes()
    # All of entry 1, in the slot that is entry 1's in a ring of another shape.
    wide = Geometry(256, BLOCK)
    elsewhere = ring_at(tmp_path / "wide", shape=wide)
    spoil(elsewhere, wide.header_at(1), whole[SHAPE.header_at(1) :][:HEADER_BYTES])
    spoil(elsewhere, wide.slot_at(1), whole[SHAPE.slot_at(1) :][:BLOCK])
    assert wide.slot_at(1) != SHAPE.slot_at(1) and "other bytes than" in outcome(elsewhere, 1)
    # And where entry 2 belongs.
    spoil(path, SHAPE.header_at(2), whole[SHAPE.header_at(1) :][:HEADER_BYTES])
    spoil(path, SHAPE.slot_at(2), whole[SHAPE.slot_at(1) :][:BLOCK])
    assert "no header of it" in outcome(path, 2) and outcome(path, 1) == "whole"
    # The same file under the name of another incarnation, and its slots in that one's own file.
    with pytest.raises(Corrupt, match="a head of the ring of group"):
        RingReader(Disk(), path, UID + 1)
    again = ring_at(tmp_path / "again", uid=UID + 1)
    spoil(again, 2 * BLOCK, whole[2 * BLOCK :])
    assert "no header of it" in outcome(again, 1, uid=UID + 1)


def test_every_flipped_bit_of_a_slot_is_noticed_or_costs_nothing(tmp_path: Path) -> None:
    path = ring_at(tmp_path / "ring", entry(1))
    good = Path(path).read_bytes()
    length = len(entry(1).data)
    places = [
        *range(SHAPE.header_at(1), SHAPE.header_at(1) + HEADER_BYTES),
        *range(SHAPE.slot_at(1), SHAPE.slot_at(1) + length),
        *range(SHAPE.copy_at(1), SHAPE.copy_at(1) + HEADER_BYTES),
    ]
    for at in places:
        spoil(path, at, bytes([good[at] ^ 1 << at % 8]))
        said = outcome(path, 1)
        assert said != "whole", f"nobody notices byte {at}"
        assert (said != "torn") == (SHAPE.slot_at(1) <= at < SHAPE.slot_at(1) + length)
        spoil(path, at, good[at : at + 1])


def test_a_newer_format_is_refused_and_no_head_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as newer:
        newer.setattr(ring, "FORMAT", 2)
        path = ring_at(tmp_path / "ring", entry(1))
    with pytest.raises(WrongIdentity, match="format 2, newer than 1"):
        RingReader(Disk(), path, UID)
    path = ring_at(tmp_path / "ring", entry(1))
    spoil(path, 0, bytes(BLOCK))
    assert outcome(path, 1) == "whole"
    spoil(path, BLOCK, bytes(BLOCK))
    with pytest.raises(Corrupt):
        RingReader(Disk(), path, UID)
    os.truncate(path, 10)
    with pytest.raises(Corrupt):
        RingReader(Disk(), path, UID)


class Unreadable(Disk):
    """Of which some bytes can't be read."""

    __slots__ = ("places", "error")

    def __init__(self) -> None:
        super().__init__()
        self.places: set[int] = set()
        self.error = errno.EIO

    def read(self, fd: int, length: int, offset: int) -> bytes:
        if offset in self.places:
            raise OSError(self.error, os.strerror(self.error))
        return super().read(fd, length, offset)


def test_what_the_disk_can_not_read_is_damage_and_a_want_of_memory_is_none(tmp_path: Path) -> None:
    path = ring_at(tmp_path / "ring", entry(1))
    disk = Unreadable()
    disk.places = {0, SHAPE.header_at(1)}
    reader = RingReader(disk, path, UID)
    assert reader.heads == 1 and not reader.find(1, 1).whole
    disk.places = {SHAPE.slot_at(1)}
    with pytest.raises(Corrupt, match="readable bytes"):
        reader.find(1, 1)
    disk.error = errno.ENOMEM
    with pytest.raises(Busy):
        reader.find(1, 1)
    disk.places = {SHAPE.header_at(1)}
    with pytest.raises(Busy):
        reader.find(1, 1)
    reader.close()


def test_slots_are_durable_when_they_are_told_and_a_failed_sync_is_told(tmp_path: Path) -> None:
    path = ring_at(tmp_path / "ring")
    disk = FaultyDisk()
    write_slots(disk, path, UID, SHAPE, [entry(1), entry(2)])
    names = [call.name for call in disk.calls]
    assert names.count("datasync") == 1 and names[-1] == "datasync", "one sync, behind all writes"
    disk.fail("datasync", 1, errno.EIO)
    with pytest.raises(OSError, match="injected"):
        write_slots(disk, path, UID, SHAPE, [entry(3)])


def test_a_ring_that_can_not_be_made_leaves_nothing(tmp_path: Path) -> None:
    disk = FaultyDisk()
    for step in ("create", "preallocate", "write"):
        disk.fail(step, 1, errno.ENOSPC)
        with pytest.raises(OSError, match="injected"):
            make_ring(disk, str(tmp_path / "ring"), UID, SHAPE)
        assert not list(tmp_path.iterdir())
