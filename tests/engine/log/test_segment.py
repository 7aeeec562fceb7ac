"""Segments: what goes in comes out, by group and in order; damage costs the entry it hits; jobs may run twice."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgpack
import pytest

from logyard.engine.disk.door import Disk
from logyard.engine.disk.faulty import FaultyDisk
from logyard.engine.entry import Entry
from logyard.engine.log.record import BLOCK
from logyard.engine.log.segment import HEAD_BYTES, ROW_BYTES, SegmentReader, write_segment
from logyard.engine.log.segment_job import (
    SegmentJob,
    SegmentWritten,
    build_segment_job,
    pack_info,
    run_segment_job,
    unpack_info,
)
from logyard.engine.log.wal import Sealed, Wal, WalConfig, WalItem
from logyard.engine.log.wal_files import wal_name
from logyard.protocol.errors import Corrupt, WrongIdentity

from .model import command, commands, open_wal

Rows = list[tuple[int, Entry]]


def rows() -> Rows:
    found: Rows = [(8, entry) for entry in commands(8, 5, 7)]
    found += [(7, entry) for entry in commands(7, 1, 3, term=1) + commands(7, 4, 200, term=3)]
    found += [(9, command(9, index)) for index in (2, 5, 9)]
    found[0][1].file, found[0][1].offset = 3, 12345
    tombstone = command(8, 8, bodies=[b"t"], tombstone=3)
    return [*found, (8, tombstone)]


def as_tuple(entry: Entry) -> tuple[object, ...]:
    return entry.index, entry.term, entry.kind, entry.data, entry.file, entry.offset, entry.tombstone, entry.body_bytes


def write(tmp_path: Path, what: Rows) -> SegmentReader:
    info = write_segment(Disk(), str(tmp_path / "5.segment"), 5, what)
    reader = SegmentReader(Disk(), str(tmp_path / "5.segment"))
    assert reader.id == info.id == 5 and info.bytes == os.path.getsize(reader.path)
    assert reader.runs == info.runs
    return reader


def test_entries_come_back_by_group_and_range(tmp_path: Path) -> None:
    what = rows()
    reader = write(tmp_path, what)
    assert reader.runs == {7: (1, 200), 8: (5, 8), 9: (2, 9)}
    assert reader.verify() == [] and not reader.damaged
    for uid in (7, 8, 9):
        expected = sorted((entry for owner, entry in what if owner == uid), key=lambda entry: entry.index)
        assert [as_tuple(entry) for entry in reader.entries(uid, 1, 1000)] == [as_tuple(entry) for entry in expected]
    assert [entry.index for entry in reader.entries(7, 60, 140)] == list(range(60, 141))
    assert [entry.index for entry in reader.entries(9, 3, 8)] == [5]
    assert [entry.index for entry in reader.entries(9, 5, 9)] == [5, 9]
    assert reader.entries(7, 201, 300) == reader.entries(66, 1, 9) == reader.entries(8, 1, 4) == []
    assert reader.terms(7) == [(1, 1), (4, 3)] and reader.terms(66) == []
    assert reader.entries(8, 8, 8)[0].bodies is None and reader.entries(8, 8, 8)[0].tombstone == 3
    reader.close()


def test_one_entry_is_read_alone(tmp_path: Path) -> None:
    class Counting(Disk):
        read_bytes = 0

        def read(self, fd: int, length: int, offset: int) -> bytes:
            self.read_bytes += length
            return super().read(fd, length, offset)

    write(tmp_path, [(7, entry) for entry in commands(7, 1, 500)]).close()
    disk = Counting()
    reader = SegmentReader(disk, str(tmp_path / "5.segment"))
    for low, high in ((1, 1), (250, 250), (499, 500), (500, 900)):
        disk.read_bytes = 0
        found = reader.entries(7, low, high)
        assert [entry.index for entry in found] == list(range(low, min(high, 500) + 1))
        assert disk.read_bytes == sum(ROW_BYTES + len(entry.data) for entry in found)
    reader.close()


def test_a_byte_limit_always_gives_one_entry(tmp_path: Path) -> None:
    reader = write(tmp_path, rows())
    size = reader.entries(7, 1, 1)[0].size
    assert len(reader.entries(7, 1, 200, max_bytes=1)) == 1
    assert len(reader.entries(7, 1, 200, max_bytes=3 * size)) == 3
    reader.close()


def test_pitfall_51_more_entries_than_any_index_page(tmp_path: Path) -> None:
    reader = write(tmp_path, [(uid, entry) for uid in (1, 2, 3) for entry in commands(uid, 1, 2500)])
    assert [entry.index for entry in reader.entries(2, 1, 2500)] == list(range(1, 2501))
    reader.close()


def test_an_empty_segment(tmp_path: Path) -> None:
    reader = write(tmp_path, [])
    assert reader.runs == {} and reader.verify() == []
    reader.close()


def test_pitfall_54_every_flipped_byte_of_a_segment(tmp_path: Path) -> None:
    """Wrong entries are never returned; whole ones are, and what is missing is an error, not an empty answer."""
    what: Rows = [(7, entry) for entry in commands(7, 1, 3)] + [(8, entry) for entry in commands(8, 4, 5)]
    write(tmp_path, what).close()
    path = tmp_path / "5.segment"
    image = path.read_bytes()
    expected = {(uid, entry.index): entry.data for uid, entry in what}
    fd = os.open(path, os.O_RDWR)
    noticed = 0
    for at in range(len(image)):
        if HEAD_BYTES <= at < BLOCK and at % 64:
            continue
        os.pwrite(fd, bytes([image[at] ^ 0x10]), at)
        reader = SegmentReader(Disk(), str(path))
        damage = reader.verify()
        lost = 0
        for uid, low, high in ((7, 1, 3), (8, 4, 5)):
            for index in range(low, high + 1):
                try:
                    found = reader.entries(uid, index, index)
                except Corrupt:
                    lost += 1
                    continue
                if not found:
                    lost += 1
                for entry in found:
                    assert entry.data == expected[uid, entry.index] and entry.index == index
        assert lost <= 1, f"byte {at} costs {lost} entries"
        assert damage or not lost
        noticed += bool(damage)
        reader.close()
        os.pwrite(fd, image[at : at + 1], at)
    os.close(fd)
    assert noticed > 500


def test_a_hole_in_a_damaged_index_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, [(7, entry) for entry in commands(7, 1, 5)]).close()
    path = tmp_path / "5.segment"
    image = bytearray(path.read_bytes())
    index = sum(len(entry.data) for entry in commands(7, 1, 5)) + BLOCK
    image[index + 2 * ROW_BYTES + 9] ^= 1
    path.write_bytes(image)
    reader = SegmentReader(Disk(), str(path))
    assert reader.damaged
    assert [entry.index for entry in reader.entries(7, 1, 2)] == [1, 2]
    assert [entry.index for entry in reader.entries(7, 4, 5)] == [4, 5]
    with pytest.raises(Corrupt):
        reader.entries(7, 1, 5)
    reader.close()


@pytest.mark.parametrize("row", [0, 4])
def test_an_edge_of_a_damaged_index_is_missed_as_well(tmp_path: Path, row: int) -> None:
    write(tmp_path, [(7, entry) for entry in commands(7, 1, 5)]).close()
    path = tmp_path / "5.segment"
    image = bytearray(path.read_bytes())
    image[sum(len(entry.data) for entry in commands(7, 1, 5)) + BLOCK + row * ROW_BYTES + 9] ^= 1
    path.write_bytes(image)
    reader, seen, at = SegmentReader(Disk(), str(path)), [], 1
    with pytest.raises(Corrupt, match=f"entry {row + 1} of"):
        while found := reader.entries(7, at, 5):
            seen += found
            at = found[-1].index + 1
    assert [entry.index for entry in seen] == list(range(1, row + 1))
    with pytest.raises(Corrupt):
        reader.entries(8, 1, 5)
    reader.close()
    # What is in no segment is not missed.
    reader = SegmentReader(Disk(), str(path), elsewhere=lambda uid, index: (uid, index) == (7, row + 1))
    assert [entry.index for entry in reader.entries(7, 1, 5)] == [one for one in range(1, 6) if one != row + 1]
    assert reader.entries(7, row + 1, row + 1) == []
    reader.close()


def test_without_head_and_foot_it_is_no_segment(tmp_path: Path) -> None:
    write(tmp_path, rows()).close()
    path = tmp_path / "5.segment"
    image = path.read_bytes()
    for broken in (image[:-1], image[:BLOCK], image[:10], b"", bytes(len(image))):
        path.write_bytes(bytes(HEAD_BYTES) + broken[HEAD_BYTES:])
        with pytest.raises(Corrupt):
            SegmentReader(Disk(), str(path))


def test_a_truncated_segment_fails_entry_by_entry(tmp_path: Path) -> None:
    what = rows()
    write(tmp_path, what).close()
    path = tmp_path / "5.segment"
    path.write_bytes(path.read_bytes()[:-HEAD_BYTES])
    reader = SegmentReader(Disk(), str(path))
    assert reader.damaged and len(reader.entries(7, 1, 200)) == 200
    # Each row is whole, and something is wrong all the same: nobody may take the file for a good one.
    (damage,) = reader.verify()
    assert (damage.uid, damage.entry) == (0, 0) and "index" in damage.reason
    reader.close()


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    from xxhash import xxh3_64_digest

    write(tmp_path, rows()).close()
    path = tmp_path / "5.segment"
    image = path.read_bytes()
    fixed = bytearray(image[: HEAD_BYTES - 8])
    fixed[4] = 2
    path.write_bytes(bytes(fixed) + xxh3_64_digest(bytes(fixed)) + image[HEAD_BYTES:])
    with pytest.raises(WrongIdentity):
        SegmentReader(Disk(), str(path))


@pytest.mark.parametrize("call", ["create", "write", "sync_file", "rename"])
def test_a_failed_segment_leaves_nothing_under_its_name(tmp_path: Path, call: str) -> None:
    disk = FaultyDisk()
    disk.fail(call, 1, errno.ENOSPC)
    with pytest.raises(OSError):
        write_segment(disk, str(tmp_path / "5.segment"), 5, rows())
    assert not (tmp_path / "5.segment").exists()
    write_segment(disk, str(tmp_path / "5.segment"), 5, rows())
    assert [name for name in os.listdir(tmp_path)] == ["5.segment"]


def sealed_file(tmp_path: Path) -> tuple[Wal, Sealed]:
    wal, _, _ = open_wal(Disk(), str(tmp_path / "wal"), WalConfig(file_bytes=256 * 1024))
    wal.write([WalItem(7, commands(7, 1, 5)), WalItem(8, [command(8, 1, bodies=[b"home" * 100])])])
    wal.write([WalItem(7, commands(7, 4, 6, term=2), truncate=4), WalItem(9, commands(9, 1, 3))])
    wal.write([WalItem(8, [command(8, 2, bodies=[b"away" * 2000])])])
    wal.write([WalItem(8, [command(8, 3, bodies=[b"d"], tombstone=9)])])
    sealed = wal.roll()
    assert sealed is not None
    return wal, sealed


def content(uid: int, index: int, term: int) -> bool:
    """Group 9 was deleted; group 7 has a snapshot at 2; the rest is as written."""
    return uid == 8 or (uid == 7 and index > 2 and term == (2 if index >= 4 else 1))


def job_of(tmp_path: Path, sealed: Sealed) -> SegmentJob:
    return build_segment_job(
        sealed, content, segment=1, path=str(tmp_path / "1.segment"), directory=str(tmp_path / "wal")
    )


def test_pitfall_43_53_a_deleted_group_and_old_content_are_left_behind(tmp_path: Path) -> None:
    wal, sealed = sealed_file(tmp_path)
    info = run_segment_job(Disk(), job_of(tmp_path, sealed), sealed.entries).info
    assert info.runs == {7: (3, 6), 8: (1, 3)}
    assert info.terms == {7: [(3, 1), (4, 2)], 8: [(1, 1)]}
    reader = SegmentReader(Disk(), str(tmp_path / "1.segment"))
    assert [entry.term for entry in reader.entries(7, 1, 9)] == [1, 2, 2, 2]
    for entry in reader.entries(8, 1, 2):
        assert wal.read_payload(entry.file, entry.offset, 4) in (b"home", b"away") or entry.body_bytes > 400
        assert len(wal.read_payload(entry.file, entry.offset, entry.body_bytes)) == entry.body_bytes
    reader.close()
    wal.close()


def test_pitfall_46_what_an_overwrite_voids_is_left_behind_whoever_is_asked(tmp_path: Path) -> None:
    written = [(7, entry) for entry in [*commands(7, 1, 6, term=1), *commands(7, 3, 4, term=2)]]
    sealed = Sealed(1, 1, 0, [*written, (8, command(8, 5))])
    job = build_segment_job(
        sealed, lambda uid, index, term: True, segment=1, path=str(tmp_path / "1"), directory=str(tmp_path)
    )
    assert [tuple(run) for run in job.runs] == [(7, 1, 2, 1), (7, 3, 4, 2), (8, 5, 5, 1)]
    assert run_segment_job(Disk(), job, sealed.entries).info.runs == {7: (1, 4), 8: (5, 5)}


def test_another_process_writes_the_same_bytes_from_the_file_alone(tmp_path: Path) -> None:
    wal, sealed = sealed_file(tmp_path)
    wal.close()
    job = job_of(tmp_path, sealed)
    here = run_segment_job(Disk(), job, sealed.entries)
    bytes_here = (tmp_path / "1.segment").read_bytes()
    job = SegmentJob.unpack(msgpack.unpackb(msgpack.packb(job.pack())))
    there = run_segment_job(Disk(), job)
    assert unpack_info(msgpack.unpackb(msgpack.packb(pack_info(there.info)))) == here.info
    assert SegmentWritten.unpack(msgpack.unpackb(msgpack.packb(there.pack()))) == here
    assert (tmp_path / "1.segment").read_bytes() == bytes_here
    again = run_segment_job(Disk(), job)
    assert again == here and (tmp_path / "1.segment").read_bytes() == bytes_here


def test_a_job_whose_file_is_damaged_says_so(tmp_path: Path) -> None:
    wal, sealed = sealed_file(tmp_path)
    wal.close()
    path = tmp_path / "wal" / wal_name(1)
    image = bytearray(path.read_bytes())
    at = image.index(b"put 5@2")
    image[at] ^= 1
    path.write_bytes(image)
    with pytest.raises(Corrupt, match="entry 5"):
        run_segment_job(Disk(), job_of(tmp_path, sealed))
    assert not (tmp_path / "1.segment").exists()


def test_pitfall_50_the_segment_and_its_name_are_durable_when_the_job_returns(tmp_path: Path) -> None:
    wal, sealed = sealed_file(tmp_path)
    wal.close()
    disk = FaultyDisk()
    run_segment_job(disk, job_of(tmp_path, sealed), sealed.entries)
    names = [call.name for call in disk.calls]
    assert names.index("write") < names.index("sync_file") < names.index("rename") < names.index("sync_directory")
    assert names[-2:] == ["sync_directory", "sync_file"]
