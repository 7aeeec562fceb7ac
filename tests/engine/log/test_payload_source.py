"""What a migration reads: spans of what lives say the same as a group's liveness; damage is a typed error."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logyard.engine.disk.door import Disk
from logyard.engine.entry import Unit
from logyard.engine.log import payload_source
from logyard.engine.log.payload_source import (
    DIRECT_BYTES,
    HOLE_BYTES,
    WINDOW_BYTES,
    FileReader,
    FileSource,
    LiveGroup,
    _live_units,
    window_end,
)
from logyard.engine.log.wal_files import wal_name
from logyard.payloads.liveness import Liveness
from logyard.protocol.errors import Busy, Corrupt

positions = st.tuples(st.integers(1, 5), st.integers(0, 6))
releases = st.lists(st.tuples(positions, positions).map(lambda pair: (min(pair), max(pair))), max_size=10)


@given(releases, st.integers(1, 5), st.lists(st.integers(0, 3), min_size=1, max_size=5))
def test_spans_say_what_the_liveness_says(
    calls: list[tuple[tuple[int, int], tuple[int, int]]], index: int, sizes: list[int]
) -> None:
    liveness = Liveness()
    for first, end in calls:
        liveness.release(first, end)
    units, at = [], 0
    for number, records in enumerate(sizes):
        units.append(Unit(number, b"", 1, at, records, 0))
        at += max(records, 1)
    spans = liveness.live_within((1, 0), (6, 0))
    live = [(low.index, low.ordinal, high.index, high.ordinal) for low, high in spans]
    found = _live_units(index, units, live, [span[2:] for span in live])
    assert found == liveness.live_units(index, [(unit.number, unit.first_ordinal, unit.records) for unit in units])


def test_a_source_travels() -> None:
    source = FileSource("s", "w", 7, (LiveGroup(1, 2, 9, ((2, 0, 4, 1), (5, 0, 10, 0))), LiveGroup(2**63, 1, 1, ())))
    assert FileSource.unpack(msgpack.unpackb(msgpack.packb(source.pack()))) == source
    assert source.ranges == [(1, 2, 9), (2**63, 1, 1)]


def test_missing_files_are_damage_and_leave_nothing_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Corrupt):
        FileReader(Disk(), FileSource(str(tmp_path / "none.seg"), str(tmp_path), 1, ()))
    assert len(os.listdir("/proc/self/fd")) == before


KIB = 1024


def directory(lengths: list[int]) -> list[Unit]:
    """Units one after the other, a record each."""
    found, offset = [], 0
    for number, length in enumerate(lengths):
        found.append(Unit(number, b"", length, number, 1, offset))
        offset += length
    return found


class Reads(Disk):
    """Counts reads as (around the cache, offset, bytes); `direct` False: the file system has no direct ones."""

    def __init__(self, direct: bool = True) -> None:
        super().__init__()
        self.direct = direct
        self.reads: list[tuple[bool, int, int]] = []
        self.error = 0

    def open_direct_reads(self, path: str) -> int:
        return super().open_direct_reads(path) if self.direct else -1

    def _do(self, *read: Any) -> None:
        self.reads.append(read)
        if self.error:
            raise OSError(self.error, os.strerror(self.error))

    def direct_read(self, fd: int, memory: memoryview, offset: int) -> int:
        self._do(True, offset, len(memory))
        return super().direct_read(fd, memory, offset)

    def read(self, fd: int, length: int, offset: int) -> bytes:
        self._do(False, offset, length)
        return super().read(fd, length, offset)


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[FileReader, bytes]]:
    """Makes a reader of a WAL file of so many random bytes, without a segment."""
    monkeypatch.setattr(payload_source, "SegmentReader", lambda *_: BytesIO())

    def make(disk: Disk, size: int) -> tuple[FileReader, bytes]:
        data = random.Random(size).randbytes(size)
        (tmp_path / wal_name(1)).write_bytes(data)
        return FileReader(disk, FileSource("", str(tmp_path), 1, ())), data

    return make


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_every_unit_reads_back_whatever_lives_and_however_large(
    reader: Callable[..., tuple[FileReader, bytes]], direct: bool, seed: int
) -> None:
    chance = random.Random(seed)
    sizes = [0, 1, 5000, HOLE_BYTES, HOLE_BYTES + 1, 3 * HOLE_BYTES, DIRECT_BYTES, WINDOW_BYTES - 7, WINDOW_BYTES + 1]
    units = directory([chance.choice(sizes) for _ in range(12)])
    live = {unit.number for unit in units if chance.random() < 0.7}
    base = chance.randrange(10_000)
    disk = Reads(direct)
    total = units[-1].offset + units[-1].length
    with reader(disk, base + total + 1)[0] as found:
        data = Path(found._path).read_bytes()
        for unit in units:
            if unit.number in live:
                step = chance.choice([unit.length or 1, 1 << 20])
                for at in range(0, unit.length or 1, step):
                    length = min(step, unit.length - at)
                    begin = base + unit.offset + at
                    part = found._payload(base, unit.offset + at, length, units, live)
                    assert part == data[begin : begin + length]
    wanted = sum(unit.length for unit in units if unit.number in live)
    read = sum(length for _, _, length in disk.reads)
    assert read <= wanted + len(disk.reads) * 2 * 4096 + len(units) * HOLE_BYTES
    assert direct or not any(around for around, _, _ in disk.reads)


def test_units_side_by_side_come_with_one_read_around_the_cache(
    reader: Callable[..., tuple[FileReader, bytes]],
) -> None:
    units = directory([64 * KIB] * 40)
    live = set(range(40))
    disk = Reads()
    found, data = reader(disk, 8 << 20)
    for unit in units:
        part = found._payload(5000, unit.offset, unit.length, units, live)
        assert part == data[5000 + unit.offset : 5000 + unit.offset + unit.length]
    found.close()
    assert [around for around, _, _ in disk.reads] == [True, True], "31 units fit a window, then the other nine"
    # Few that live among many that are dead are read alone.
    disk.reads.clear()
    found, data = reader(disk, 8 << 20)
    for number in (0, 10, 20):
        found._payload(5000, units[number].offset, 64 * KIB, units, {0, 10, 20})
    found.close()
    assert [length for _, _, length in disk.reads] == [64 * KIB] * 3


@given(st.lists(st.integers(0, 3 * HOLE_BYTES), min_size=1, max_size=40), st.data())
def test_a_window_ends_with_a_unit_that_lives(lengths: list[int], data: st.DataObject) -> None:
    units = directory(lengths)
    live = data.draw(st.sets(st.integers(0, len(units) - 1), min_size=1))
    unit = units[data.draw(st.sampled_from(sorted(live)))]
    begin = unit.offset + data.draw(st.integers(0, unit.length))
    end = window_end(units, live, begin)
    assert begin <= end <= begin + WINDOW_BYTES
    assert end == begin or end in {one.offset + one.length for one in units if one.number in live}
    assert end >= unit.offset + unit.length, "at least what was asked for"


@pytest.mark.parametrize("size", [KIB, 2 * DIRECT_BYTES])
def test_what_the_file_lacks_or_the_disk_can_not_read_is_damage(
    reader: Callable[..., tuple[FileReader, bytes]], size: int
) -> None:
    units = directory([size, size])
    disk = Reads()
    found, data = reader(disk, 2 * size - 1)
    with found:
        assert found._payload(0, 0, size, units, {0, 1}) == data[:size], "what is there is read"
        with pytest.raises(Corrupt):
            found._payload(0, size, size, units, {0, 1})
    found, _ = reader(disk, 2 * size)
    with found:
        disk.error = errno.EIO
        with pytest.raises(Corrupt, match="readable bytes"):
            found._payload(0, 0, size, units, {0, 1})
        disk.error = 0
        assert len(found._payload(0, 0, size, units, {0, 1})) == size


class BadSector(Reads):
    """Can't read one byte, or all that is read directly."""

    bad = -1
    code = errno.EIO

    def _do(self, around: bool, offset: int, length: int) -> None:
        super()._do(around, offset, length)
        if offset <= self.bad < offset + length or (around and self.code == errno.EINVAL):
            raise OSError(self.code, os.strerror(self.code))


@pytest.mark.parametrize("size", [10 * KIB, 700 * KIB])
def test_what_is_dead_may_be_unreadable(reader: Callable[..., tuple[FileReader, bytes]], size: int) -> None:
    units = directory([size, 32 * KIB, size])
    disk = BadSector()
    found, data = reader(disk, 2 * size + 32 * KIB)
    with found:
        disk.bad = size + 20_000
        for unit in (units[0], units[2]):
            part = found._payload(0, unit.offset, unit.length, units, {0, 2})
            assert part == data[unit.offset : unit.offset + unit.length]
        # What lives and can't be read is damage, and takes nothing else with it.
        disk.bad = units[2].offset + 5
        found._at, found._held = 0, memoryview(b"")
        assert found._payload(0, 0, size, units, {0, 2}) == data[:size]
        with pytest.raises(Corrupt):
            found._payload(0, units[2].offset, size, units, {0, 2})


def test_want_of_memory_is_no_damage(reader: Callable[..., tuple[FileReader, bytes]]) -> None:
    units = directory([700 * KIB, 700 * KIB])
    disk = BadSector()
    found, _ = reader(disk, 1400 * KIB)
    with found:
        disk.bad, disk.code = 5, errno.ENOMEM
        with pytest.raises(Busy):
            found._payload(0, 0, 700 * KIB, units, {0, 1})


def test_a_file_system_that_refuses_direct_reads_late_is_read_through_the_cache(
    reader: Callable[..., tuple[FileReader, bytes]],
) -> None:
    units = directory([700 * KIB] * 4)
    disk = BadSector()
    found, data = reader(disk, 2800 * KIB)
    disk.code = errno.EINVAL
    with found:
        for unit in units:
            part = found._payload(0, unit.offset, unit.length, units, {0, 1, 2, 3})
            assert part == data[unit.offset : unit.offset + unit.length]
    assert [around for around, _, _ in disk.reads] == [True, False, False], "asked once"


def test_a_reader_without_memory_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(Disk):
        def direct_memory(self, size: int) -> memoryview:
            raise OSError(errno.ENOMEM, "no")

    segment = BytesIO()
    monkeypatch.setattr(payload_source, "SegmentReader", lambda *_: segment)
    (tmp_path / wal_name(1)).write_bytes(b"x")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Busy):
        FileReader(Full(), FileSource("", str(tmp_path), 1, ()))
    assert len(os.listdir("/proc/self/fd")) == before and segment.closed


def test_a_wal_file_that_can_not_be_read_directly_for_want_of_descriptors_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Short(Disk):
        def open_direct_reads(self, path: str) -> int:
            raise OSError(errno.EIO, "no")

    monkeypatch.setattr(payload_source, "SegmentReader", lambda *_: BytesIO())
    (tmp_path / wal_name(1)).write_bytes(b"x")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Corrupt):
        FileReader(Short(), FileSource("", str(tmp_path), 1, ()))
    assert len(os.listdir("/proc/self/fd")) == before
