"""The ring file of one system group: slots of fixed size, each with one entry's metadata, in place of segments.

Invariant: what is read of a slot is the entry of the (uid, index, term) that was asked for, verified, or `Corrupt`: who
asks has the term from a run of the group's checkpoint, and without one nothing in a slot counts. Checksums are seeded
with uid and position, so bytes of another place, file or group never verify. Slots are whole blocks; headers share
blocks, so each is at the end of its slot, too, and one of the two is enough. Written by `segment_job`; read through
`ring_files`, by scrubs and by who looks into a stopped directory (docs/decisions/0042).

Layout: head block twice | headers | slots. A slot: data | zeros | its header again.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from xxhash import xxh3_64_digest, xxh3_64_intdigest

from logyard.protocol.errors import Corrupt, WrongIdentity

from ..disk.door import Disk, unreadable
from ..entry import Entry, parse_entry
from .record import BLOCK, DATA_START

FOLDER = "rings"
SUFFIX = ".ring"
MAGIC = b"LYRG"
FORMAT = 1
HEAD = struct.Struct("<4sHHQII")
"""magic, format, 0, uid, slots, bytes of a slot; own checksum."""
SLOT_MAGIC = b"LYRS"
HEADER = struct.Struct("<4sIQQQQQQ")
"""magic, data bytes, uid, index, term, tombstone, hash of the data, 0; own checksum."""
CHECK_BYTES = 8
HEAD_BYTES = HEAD.size + CHECK_BYTES
HEADER_BYTES = HEADER.size + CHECK_BYTES
"""A power of two: no header lies in two sectors."""
_PLACE = struct.Struct("<QQ")


class Geometry(NamedTuple):
    """How many slots a ring has, and their bytes, a multiple of a block's."""

    slots: int
    slot_bytes: int

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._first_slot + self.slots * self.slot_bytes

    @property
    def data_bytes_max(self) -> int:
        """What a slot holds of an entry."""
        return self.slot_bytes - HEADER_BYTES

    @property
    def _first_slot(self) -> int:
        return DATA_START + -(-self.slots * HEADER_BYTES // BLOCK) * BLOCK

    def header_at(self, index: int) -> int:
        """Return where the header of an entry is."""
        return DATA_START + index % self.slots * HEADER_BYTES

    def slot_at(self, index: int) -> int:
        """Return where its slot begins."""
        return self._first_slot + index % self.slots * self.slot_bytes

    def copy_at(self, index: int) -> int:
        """Return where the second copy of its header is."""
        return self.slot_at(index) + self.data_bytes_max


class Header(NamedTuple):
    """What a header says. `check`: xxh3 of the data, seeded with uid and place."""

    length: int
    uid: int
    index: int  # type: ignore[assignment]  # tuple.index is not missed
    term: int
    tombstone: int
    check: int

    def pack(self, position: int) -> bytes:
        """Return its bytes, for one place."""
        fixed = HEADER.pack(SLOT_MAGIC, *self, 0)
        return fixed + xxh3_64_digest(fixed, _seed(self.uid, position))


class Found(NamedTuple):
    """An entry, and whether both copies of its header say so."""

    entry: Entry
    whole: bool


class Verified(NamedTuple):
    """Of some slots: entries of which one copy of the header is bad, and what is wrong with others, by index."""

    torn: list[Entry]
    bad: dict[int, Corrupt]


def ring_name(uid: int) -> str:
    """Return the name of a group's ring in its directory."""
    return f"{uid:016x}{SUFFIX}"


def uid_of(name: str) -> int:
    """Return the group that a file of this name is of; 0: it is not one of ours."""
    stem = name.removesuffix(SUFFIX)
    return int(stem, 16) if name != stem and len(stem) == 16 and not stem.strip("0123456789abcdef") else 0


def _seed(uid: int, position: int) -> int:
    return int(xxh3_64_intdigest(_PLACE.pack(uid, position)))


def parse_header(raw: bytes, uid: int, position: int) -> Header | None:
    """Return the header that stands at a place of a group's ring; None for anything else."""
    if len(raw) != HEADER_BYTES or raw[:4] != SLOT_MAGIC:
        return None
    if xxh3_64_digest(raw[: HEADER.size], _seed(uid, position)) != raw[HEADER.size :]:
        return None
    found = Header(*HEADER.unpack_from(raw)[1:-1])
    return found if found.uid == uid else None


def _header_of(uid: int, geometry: Geometry, entry: Entry) -> Header:
    check = xxh3_64_intdigest(entry.data, _seed(uid, geometry.slot_at(entry.index)))
    return Header(len(entry.data), uid, entry.index, entry.term, entry.tombstone, check)


def head_bytes(uid: int, geometry: Geometry) -> bytes:
    """Return the head of a ring, a block."""
    fixed = HEAD.pack(MAGIC, FORMAT, 0, uid, *geometry)
    return (fixed + xxh3_64_digest(fixed)).ljust(BLOCK, b"\0")


def parse_head(raw: bytes, path: str) -> tuple[int, Geometry] | None:
    """Return the uid and the geometry that one copy of a head says; None for anything else. Raises `WrongIdentity` for
    a newer format."""
    if len(raw) < HEAD_BYTES or xxh3_64_digest(raw[: HEAD.size]) != raw[HEAD.size : HEAD_BYTES]:
        return None
    magic, number, _, uid, slots, slot_bytes = HEAD.unpack_from(raw)
    if magic == MAGIC and number > FORMAT:
        raise WrongIdentity(f"{path} has format {number}, newer than {FORMAT}; use a newer logyard")
    if magic != MAGIC or not slots or not slot_bytes or slot_bytes % BLOCK:
        return None
    return uid, Geometry(slots, slot_bytes)


def make_ring(disk: Disk, path: str, uid: int, geometry: Geometry) -> None:
    """Make a ring with nothing in it, its space reserved; durable on return. `OSError` passes: what was there is."""
    temporary = path + ".tmp"
    disk.unlink(temporary)
    fd = disk.create(temporary)
    try:
        disk.preallocate(fd, geometry.size, False)
        head = head_bytes(uid, geometry)
        disk.gather_write(fd, [head, head], 0)
    except OSError:
        disk.unlink(temporary)
        raise
    finally:
        disk.close(fd)
    disk.publish(temporary, path)


def write_slots(disk: Disk, path: str, uid: int, geometry: Geometry, entries: Iterable[Entry]) -> int:
    """Write entries, whose data fits, to their slots; durable on return, which is the bytes written. Slots of other
    entries are as they were, but what stands in the blocks of their headers is written again. `OSError` passes:
    nobody knows then what these slots hold."""
    written = 0
    fd = disk.open_file(path, write=True)
    try:
        run: list[bytes] = []
        start = 0
        for entry in entries:
            data = entry.data
            assert len(data) <= geometry.data_bytes_max, f"entry {entry.index} has {len(data)} bytes"
            header = _header_of(uid, geometry, entry)
            zeros, copy = bytes(geometry.data_bytes_max - len(data)), header.pack(geometry.copy_at(entry.index))
            written += disk.gather_write(fd, [data, zeros, copy], geometry.slot_at(entry.index))
            place = geometry.header_at(entry.index)
            if run and place != start + len(run) * HEADER_BYTES:
                written += disk.gather_write(fd, run, start)
                run = []
            if not run:
                start = place
            run.append(header.pack(place))
        if run:
            written += disk.gather_write(fd, run, start)
        disk.datasync(fd)
    finally:
        disk.close(fd)
    return written


class RingReader:
    """An open ring. The constructor reads the heads only. Raises `Corrupt` when neither is one of this group's,
    `WrongIdentity` for a newer format; `OSError` passes."""

    __slots__ = ("uid", "path", "geometry", "heads", "_disk", "_fd")

    def __init__(self, disk: Disk, path: str, uid: int) -> None:
        self.uid = uid
        self.path = path
        self._disk = disk
        self._fd = disk.open_file(path)
        try:
            good = [one for one in map(self._head, (0, BLOCK)) if one is not None and one[0] == uid]
            if not good:
                raise Corrupt(path, 0, f"a head of the ring of group {uid:016x}", "neither")
            self.geometry = good[0][1]
            # How many of the two copies of the head are good.
            self.heads = len(good)
        except BaseException:
            disk.close(self._fd)
            raise

    def _head(self, offset: int) -> tuple[int, Geometry] | None:
        try:
            return parse_head(self._read(offset, HEAD_BYTES), self.path)
        except Corrupt:
            return None

    def close(self) -> None:
        """Close the file."""
        self._disk.close(self._fd)

    def forget_pages(self) -> None:
        """Have what is read next read from the disk."""
        self._disk.forget_pages(self._fd, 0, 0)

    def _read(self, offset: int, length: int) -> bytes:
        try:
            return self._disk.read(self._fd, length, offset)
        except OSError as error:
            raise unreadable(self.path, offset, f"{length} readable bytes", error) from error

    def _header(self, position: int, index: int, term: int) -> Header | None:
        """Return the header of an entry, if that is what stands at a place."""
        try:
            header = parse_header(self._read(position, HEADER_BYTES), self.uid, position)
        except Corrupt:
            return None
        fits = header is not None and (header.index, header.term) == (index, term)
        return header if fits and header is not None and header.length <= self.geometry.data_bytes_max else None

    def find(self, index: int, term: int) -> Found:
        """Return an entry that a run names. Raises `Corrupt` where it is not in its slot, whole."""
        geometry = self.geometry
        at = geometry.slot_at(index)
        copies = [self._header(place, index, term) for place in (geometry.header_at(index), geometry.copy_at(index))]
        for header in copies:
            if header is None:
                continue
            data = self._read(at, header.length)
            if xxh3_64_intdigest(data, _seed(self.uid, at)) != header.check:
                continue
            entry = parse_entry(data, self.path)
            assert (entry.index, entry.term) == (index, term), "a header of another entry's bytes"
            entry.tombstone = header.tombstone
            return Found(entry, copies == [header, header])
        known = next((header for header in copies if header is not None), None)
        if known is None:
            got = "no header of it"
        else:
            got = f"a header, and other bytes than the {known.length} that it names"
        raise Corrupt(self.path, at, f"entry {index} of term {term} of group {self.uid:016x}", got)

    def entries(self, first: int, last: int, term: int, bytes_max: int = 1 << 62) -> list[Entry]:
        """Return entries `first` to `last` of a run, up to `bytes_max` of metadata, at least one. Raises `Corrupt`."""
        found: list[Entry] = []
        taken = 0
        for index in range(first, last + 1):
            entry = self.find(index, term).entry
            taken += len(entry.data)
            if found and taken > bytes_max:
                break
            found.append(entry)
        return found

    def verify(self, first: int, last: int, term: int) -> Verified:
        """Read and check the slots of a run, every byte that has a checksum."""
        seen = Verified([], {})
        for index in range(first, last + 1):
            try:
                found = self.find(index, term)
            except Corrupt as error:
                seen.bad[index] = error
                continue
            if not found.whole:
                seen.torn.append(found.entry)
        return seen


def write_heads(disk: Disk, path: str, uid: int, geometry: Geometry, entries: Sequence[Entry] = ()) -> None:
    """Write the head's copies again, and the headers of entries in both places; durable on return. For a scrub that
    found some of them damaged; `OSError` passes."""
    fd = disk.open_file(path, write=True)
    try:
        head = head_bytes(uid, geometry)
        disk.gather_write(fd, [head, head], 0)
        for entry in entries:
            header = _header_of(uid, geometry, entry)
            for place in (geometry.header_at(entry.index), geometry.copy_at(entry.index)):
                disk.gather_write(fd, [header.pack(place)], place)
        disk.datasync(fd)
    finally:
        disk.close(fd)
