"""Bytes on users' disks: today's code writes the golden files exactly, and reads them."""

from __future__ import annotations

from pathlib import Path

import msgpack
import xxhash

from logyard.engine.disk.door import Disk
from logyard.engine.entry import NOOP
from logyard.engine.log.manifest_files import ManifestFiles
from logyard.engine.log.record import BLOCK
from logyard.engine.log.ring import Geometry, RingReader
from logyard.engine.log.segment import SegmentReader
from logyard.engine.log.wal_files import wal_name
from logyard.engine.snapshot.format import decode
from logyard.engine.transfer.chunks import Intent
from logyard.payloads import checkpoints
from logyard.payloads.liveness import decode_live_set
from tests.engine.log.model import recover

from .regenerate import (
    HERE,
    MAIL,
    MANIFEST,
    ORDERS,
    RING,
    ROWS,
    SEGMENT,
    WAL,
    entries,
    homes_row,
    intent_row,
    manifest_bytes,
    ring_bytes,
    segment_bytes,
    snapshot_bytes,
    wal_bytes,
)  # fmt: skip


def test_the_wal_is_written_byte_for_byte() -> None:
    assert wal_bytes() == WAL.read_bytes()


def test_the_segment_is_written_byte_for_byte() -> None:
    assert segment_bytes() == SEGMENT.read_bytes()


def test_an_old_wal_is_read(tmp_path: Path) -> None:
    (tmp_path / wal_name(1)).write_bytes(WAL.read_bytes())
    memory, result = recover(Disk(), str(tmp_path))
    made = entries()
    assert not result.damage and not result.healed
    assert memory.hard == {ORDERS: (1, 2, 1)} and memory.floors == {MAIL: 12}
    names = ("configuration", "commands", "dead")
    assert [entry.data for _, entry in memory.found] == [made[name].data for name in names]
    commands = memory.found[1][1]
    body = b"".join(made["commands"].bodies or ())
    assert WAL.read_bytes()[commands.offset : commands.offset + commands.body_bytes] == body
    assert result.last_batch == {ORDERS: 1, MAIL: 1} and result.next_batch == 3


def test_an_old_segment_is_read(tmp_path: Path) -> None:
    reader = SegmentReader(Disk(), str(SEGMENT))
    made = entries()
    assert reader.id == 3 and reader.runs == {ORDERS: (1, 2), MAIL: (9, 9)} and reader.verify() == []
    assert [entry.data for entry in reader.entries(ORDERS, 1, 2)] == [made["configuration"].data, made["commands"].data]
    dead = reader.entries(MAIL, 9, 9)[0]
    assert (dead.tombstone, dead.file, dead.bodies) == (12, 0, None)
    reader.close()


def test_the_ring_is_written_byte_for_byte_and_read() -> None:
    assert ring_bytes() == RING.read_bytes()
    reader = RingReader(Disk(), str(RING), MAIL)
    assert (reader.heads, reader.geometry) == (2, Geometry(2, BLOCK))
    first, dead = reader.find(8, 3), reader.find(9, 3)
    assert first.whole and dead.whole and first.entry.kind == NOOP
    made = entries()["dead"]
    assert (dead.entry.data, dead.entry.tombstone, dead.entry.bodies, dead.entry.file) == (made.data, 12, None, 0)
    reader.close()


def test_files_from_before_sessions_are_read(tmp_path: Path) -> None:
    """Their entries differ in one byte: the flag by which apply knows that it has to look at sessions."""

    def without_flag(data: bytes) -> bytes:
        return data[:1] + b"\0" + data[2:]

    (tmp_path / wal_name(1)).write_bytes((HERE / "wal-1-sessionless.bin").read_bytes())
    memory, result = recover(Disk(), str(tmp_path))
    made = entries()
    assert not result.damage and not result.healed
    assert [entry.data for _, entry in memory.found] == [without_flag(one.data) for one in made.values()]
    reader = SegmentReader(Disk(), str(HERE / "segment-1-sessionless.bin"))
    assert reader.verify() == []
    found = [*reader.entries(ORDERS, 1, 2), *reader.entries(MAIL, 9, 9)]
    assert [entry.data for entry in found] == [without_flag(one.data) for one in made.values()]
    reader.close()


def test_rows_are_written_byte_for_byte() -> None:
    assert [snapshot_bytes(1 << 62), snapshot_bytes(1000), intent_row(), homes_row()] == msgpack.unpackb(
        ROWS.read_bytes()
    )


def test_the_file_of_a_snapshot_is_written_byte_for_byte_and_read(tmp_path: Path) -> None:
    assert manifest_bytes() == MANIFEST.read_bytes()
    files = ManifestFiles(Disk(), str(tmp_path))
    Path(files.path(ORDERS)).write_bytes(MANIFEST.read_bytes())
    files.scan()
    assert files.uids == {ORDERS}
    row = files.load(ORDERS)
    assert (row.uid, row.index, row.term) == (ORDERS, 7, 3) and decode(row.data, ORDERS).sections


def test_old_rows_are_read() -> None:
    inline, chunked, intent, homes = msgpack.unpackb(ROWS.read_bytes())
    whole = bytes(range(256)) * 8
    chunks = {xxhash.xxh3_128_digest(whole): whole}
    assert (inline[4], chunked[4]) == (1, 2)
    for data in (inline, chunked):
        snapshot = decode(data, ORDERS, chunks.get)
        assert (snapshot.index, snapshot.term, snapshot.release) == (9, 2, 7)
        assert snapshot.sections == {"state": b"small", "large": whole}
        live = decode_live_set(snapshot.live).ranges()
        assert live == [((3, 1), (5, 0)), ((6, 0), (10, 0))]
    found = Intent.unpack(intent)
    assert (found.index, found.term, found.release, found.chunks) == (50, 2, 60, (b"c" * 16,))
    assert found.covered == [(1, 40), (43, 44)]
    uid, there, [(generation, run, marks)] = checkpoints.decode(checkpoints.key(ORDERS), homes)
    assert (uid, generation, run, marks.live, marks.prefix, list(marks.dead or ())) == (ORDERS, 1, 7, 1000, 2, [5])
    assert there == [(1, 4, 1, 7), (5, 6, 0, 0), (9, 12, 1, 7)]
