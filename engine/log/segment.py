"""Segment files: the metadata of one sealed WAL file's entries, for all groups, sorted by (uid, index).

Invariant: a segment is published whole (temporary, sync, rename, directory sync) and never changed. Each row of the
index carries one checksum over itself and the entry it points to, seeded with the segment's number, so damage costs
the entry it hits; the index as a whole is checked once, when it is opened. Reads use `pread`, not a mapping: a page
the disk can't read must stop one group, and a mapped one would kill the process. Called by `segment_job`, and by
the host for entries below its memtables.

Layout: head block | entries' metadata | index rows | groups | foot (the head's fields again).
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from xxhash import xxh3_64_digest, xxh3_64_intdigest

from logyard.protocol.errors import Corrupt, WrongIdentity

from ..disk.door import Disk, unreadable
from ..entry import Entry, parse_entry
from ..types import Buffer
from .record import BLOCK

MAGIC = b"LYSG"
FORMAT = 1
HEAD = struct.Struct("<4sHHQQQQQ")
"""magic, format, 0, segment, rows, groups, offset of the index, checksum over index and groups; own checksum."""
ROW = struct.Struct("<QQQQQQQQIBBH")
"""uid, index, term, data offset, payload file, its offset, its bytes, tombstone, data bytes, kind, 0, 0; checksum."""
GROUP = struct.Struct("<QQQQQ")
"""uid, first index, last index, number of its first row, rows."""
CHECK_BYTES = 8
HEAD_BYTES = HEAD.size + CHECK_BYTES
ROW_BYTES = ROW.size + CHECK_BYTES

Terms = list[tuple[int, int]]
"""(first index, term) of each run of entries of one term, in order."""


class SegmentInfo(NamedTuple):
    """What a written segment holds; msgpack-able. `runs`: uid -> (first, last); indexes in between may be missing."""

    id: int
    runs: dict[int, tuple[int, int]]
    terms: dict[int, Terms]
    bytes: int


class Group(NamedTuple):
    """One group's rows in the index."""

    first: int
    last: int
    row: int
    rows: int


class SegmentDamage(NamedTuple):
    """Bytes of a segment that do not verify; `uid` and `entry` (its index) are 0 where the row can't be trusted."""

    uid: int
    entry: int
    offset: int
    reason: str


def _head_bytes(fields: Sequence[int]) -> bytes:
    fixed = HEAD.pack(MAGIC, FORMAT, 0, *fields)
    return fixed + xxh3_64_digest(fixed)


def write_segment(disk: Disk, path: str, number: int, rows: Iterable[tuple[int, Entry]]) -> SegmentInfo:
    """Write segment `number` at `path` from (uid, entry) pairs, in any order, each (uid, index) once. Durable on
    return.

    Writing it twice gives the same bytes. `OSError` passes; the file is then not there, or is the old one.
    """
    ordered = sorted(rows, key=_place)
    contents: list[Buffer] = []
    index: list[bytes] = []
    groups: list[tuple[int, int, int, int, int]] = []
    terms: dict[int, Terms] = {}
    offset = BLOCK
    current = first = last = start = 0
    for position, (uid, entry) in enumerate(ordered):
        if uid != current:
            if position > start:
                groups.append((current, first, last, start, position - start))
            current, first, last, start = uid, entry.index, 0, position
            terms[uid] = []
        assert entry.index > last, f"entry {entry.index} of group {uid:016x} is there twice"
        last = entry.index
        runs = terms[uid]
        if not runs or runs[-1][1] != entry.term:
            runs.append((entry.index, entry.term))
        data = entry.data
        held = entry.body_bytes if entry.file else 0
        row = ROW.pack(
            uid, entry.index, entry.term, offset, entry.file, entry.offset, held, entry.tombstone, len(data),
            entry.kind, 0, 0,
        )  # fmt: skip
        index.append(row + xxh3_64_digest(row, xxh3_64_intdigest(data, number)))
        contents.append(data)
        offset += len(data)
    if ordered:
        groups.append((current, first, last, start, len(ordered) - start))
    region = b"".join(index) + b"".join(GROUP.pack(*group) for group in groups)
    head = _head_bytes((number, len(ordered), len(groups), offset, xxh3_64_intdigest(region, number)))
    size = disk.write_file(path, [head.ljust(BLOCK, b"\0"), *contents, region, head])
    return SegmentInfo(number, {uid: (low, high) for uid, low, high, _, _ in groups}, terms, size)


def _place(row: tuple[int, Entry]) -> tuple[int, int]:
    return row[0], row[1].index


class SegmentReader:
    """An open segment, `number` unless that is 0. The constructor reads the index's groups; rows and entries are read
    when they are asked for.

    Raises `Corrupt` when neither head nor foot verify, or it is another segment, `WrongIdentity` for a newer format.
    When the index does not verify as a whole, `damaged` is set, every row is checked by its own checksum at each read,
    and the runs come from the rows that hold. `elsewhere(uid, index)`: an entry is in no segment, so its row is not
    missed.
    """

    __slots__ = ("id", "path", "groups", "damaged", "_disk", "_fd", "_rows", "_index", "_good", "_elsewhere")

    def __init__(
        self, disk: Disk, path: str, number: int = 0, elsewhere: Callable[[int, int], bool] | None = None
    ) -> None:
        self._disk = disk
        self._elsewhere = elsewhere
        self.path = path
        self._fd = disk.open_file(path)
        try:
            size = disk.size(self._fd)
            fields = self._fields(size)
            self.id, self._rows, groups, self._index, check = fields
            if number not in (0, self.id):
                raise Corrupt(path, 0, f"segment {number}", self.id)
            self.groups: dict[int, Group] = {}
            self._good: list[tuple[int, int, int]] | None = None
            region = self._read(self._index, size - HEAD_BYTES - self._index)
            self.damaged = xxh3_64_intdigest(region, self.id) != check
            if self.damaged:
                self._rebuild()
            else:
                for uid, first, last, row, rows in GROUP.iter_unpack(region[self._rows * ROW_BYTES :]):
                    self.groups[uid] = Group(first, last, row, rows)
                assert len(self.groups) == groups
        except BaseException:
            disk.close(self._fd)
            raise

    def _fields(self, size: int) -> tuple[int, int, int, int, int]:
        for offset in (0, size - HEAD_BYTES):
            block = self._read(offset, HEAD_BYTES) if offset >= 0 else b""
            if len(block) < HEAD_BYTES or xxh3_64_digest(block[: HEAD.size]) != block[HEAD.size :]:
                continue
            magic, number, _, *fields = HEAD.unpack(block[: HEAD.size])
            if magic == MAGIC and number > FORMAT:
                raise WrongIdentity(f"{self.path} has format {number}, newer than {FORMAT}; use a newer logyard")
            if magic == MAGIC and fields[3] <= size - HEAD_BYTES:
                segment, rows, groups, index, check = fields
                return segment, rows, groups, index, check
        raise Corrupt(self.path, 0, "a segment's head or foot", "neither")

    def _rebuild(self) -> None:
        """Rebuild an index that is damaged somewhere: keep the rows that verify, in memory, and derive the groups from
        them."""
        good: list[tuple[int, int, int]] = []
        for number in range(self._rows):
            row = self._read(self._index + number * ROW_BYTES, ROW_BYTES)
            if len(row) == ROW_BYTES and self._row_holds(row):
                uid, index = struct.unpack_from("<QQ", row)
                good.append((uid, index, number))
        self._good = good
        for position, (uid, index, _) in enumerate(good):
            before = self.groups.get(uid) or Group(index, index, position, 0)
            self.groups[uid] = before._replace(last=index, rows=before.rows + 1)

    def _row_holds(self, row: bytes) -> bool:
        fields = ROW.unpack_from(row)
        if fields[3] + fields[8] > self._index:
            return False
        data = self._read(fields[3], fields[8])
        return xxh3_64_digest(row[: ROW.size], xxh3_64_intdigest(data, self.id)) == row[ROW.size :]

    def _read(self, offset: int, length: int) -> bytes:
        try:
            return self._disk.read(self._fd, length, offset)
        except OSError as error:
            raise unreadable(self.path, offset, f"{length} readable bytes", error) from error

    def close(self) -> None:
        """Close the file."""
        self._disk.close(self._fd)

    @property
    def runs(self) -> dict[int, tuple[int, int]]:
        """uid -> (first, last)."""
        return {uid: (group.first, group.last) for uid, group in self.groups.items()}

    def _row(self, number: int) -> bytes:
        if self._good is not None:
            number = self._good[number][2]
        return self._read(self._index + number * ROW_BYTES, ROW_BYTES)

    def _table(self, start: int, count: int) -> Iterator[bytes]:
        """Yield rows `start` to `start + count`, read at once while the index is whole."""
        if self._good is not None:
            for number in range(start, start + count):
                yield self._row(number)
            return
        table = self._read(self._index + start * ROW_BYTES, count * ROW_BYTES)
        for at in range(0, len(table), ROW_BYTES):
            yield table[at : at + ROW_BYTES]

    def _find(self, group: Group, index: int) -> int:
        """Return the group's first row with an index of at least `index`."""
        if group.last - group.first + 1 == group.rows:
            return group.row + max(0, index - group.first)
        positions = range(group.row, group.row + group.rows)
        return group.row + bisect_left(positions, index, key=lambda number: int(ROW.unpack_from(self._row(number))[1]))

    def entries(self, uid: int, low: int, high: int, max_bytes: int = 1 << 62) -> list[Entry]:
        """Return the group's entries from `low` to `high`, both included, up to `max_bytes` of metadata and payload, at
        least one.

        `bodies` is None where there is a payload; `file` and `offset` say where it lay when the segment was written.
        Raises `Corrupt` for a damaged one; those before it can be had with a lower `high`. Of a `damaged` segment, ask
        within a run: one that has no row is damage, too, behind the last one only when it is asked for first.
        """
        group = self.groups.get(uid)
        if group is None or low > group.last or high < group.first:
            if self.damaged:
                self._miss(uid, low, high + 1)
            return []
        start = self._find(group, low)
        # An index has one row: who asks for one entry reads no others.
        end = min(group.row + group.rows, start + high - low + 1)
        found: list[Entry] = []
        taken = 0
        # In a whole index a missing row was never there; in a damaged one it may be the damage.
        expected = low if self.damaged else 0
        # Rows are read in steps: a caller with a byte limit takes few of a long range.
        step = 64
        while start < end:
            rows = list(self._table(start, min(step, end - start)))
            start += len(rows)
            step = 1024
            base = int(ROW.unpack_from(rows[0])[3])
            final = ROW.unpack_from(rows[-1])
            span = int(final[3] + final[8]) - base
            block = self._read(base, span) if 0 < span <= len(rows) * BLOCK else b""
            for row in rows:
                # The row holds: by the index's checksum, or by its own when the index was rebuilt.
                if ROW.unpack_from(row)[1] > high:
                    start = end
                    break
                entry = self._entry(uid, row, block, base)
                if expected:
                    self._miss(uid, expected, entry.index)
                    expected = entry.index + 1
                taken += entry.size
                if found and taken > max_bytes:
                    return found
                found.append(entry)
        if expected and not found:
            self._miss(uid, expected, high + 1)
        return found

    def _miss(self, uid: int, first: int, end: int) -> None:
        """Raise `Corrupt` for the first entry from `first` up to, but without, `end` that this file should have."""
        for index in range(first, end):
            if self._elsewhere is None or not self._elsewhere(uid, index):
                raise Corrupt(self.path, self._index, f"entry {index} of group {uid:016x}", "no row of it")

    def _entry(self, uid: int, row: bytes, block: bytes, base: int) -> Entry:
        owner, index, term, offset, file, at, _, tombstone, length, *_ = ROW.unpack_from(row)
        begin = offset - base
        data = block[begin : begin + length] if 0 <= begin <= len(block) - length else self._read(offset, length)
        got = xxh3_64_digest(row[: ROW.size], xxh3_64_intdigest(data, self.id))
        if owner != uid or got != row[ROW.size :]:
            raise Corrupt(self.path, offset, row[ROW.size :].hex(), got.hex())
        entry = parse_entry(data, self.path)
        assert entry.index == index and entry.term == term
        entry.file, entry.offset, entry.tombstone = file, at, tombstone
        return entry

    def terms(self, uid: int) -> Terms:
        """Return (first index, term) of the group's runs, from the index alone."""
        group = self.groups.get(uid)
        found: Terms = []
        if group is None:
            return found
        for row in self._table(group.row, group.rows):
            _, index, term, *_ = ROW.unpack_from(row)
            if not found or found[-1][1] != term:
                found.append((index, term))
        return found

    @property
    def rows(self) -> int:
        """Rows of its index."""
        return self._rows

    def verify(self) -> list[SegmentDamage]:
        """Read and check everything; what is returned is to be fetched from a peer."""
        found = self.verify_rows(0, self._rows)
        if self.damaged and not found:
            found.append(SegmentDamage(0, 0, self._index + self._rows * ROW_BYTES, "the index's checksum is wrong"))
        return found

    def verify_rows(self, start: int, stop: int) -> list[SegmentDamage]:
        """Check rows `start` to `stop`, and the entries that they point to."""
        found: list[SegmentDamage] = []
        for number in range(start, min(stop, self._rows)):
            at = self._index + number * ROW_BYTES
            row = self._read(at, ROW_BYTES)
            # Of a file that was cut short the index may have no rest.
            if len(row) < ROW_BYTES or not self._row_holds(row):
                trusted = not self.damaged
                uid, index = struct.unpack_from("<QQ", row) if trusted else (0, 0)
                found.append(SegmentDamage(uid, index, at, "an entry or its row does not match its checksum"))
        return found

    def contents(self) -> list[tuple[int, Entry]]:
        """Return (uid, entry) of everything, as `write_segment` takes it. Raises `Corrupt`."""
        found = []
        for uid, group in self.groups.items():
            low = group.first
            while low <= group.last and (entries := self.entries(uid, low, group.last, 1 << 24)):
                found += [(uid, entry) for entry in entries]
                low = entries[-1].index + 1
        if len(found) != self._rows:
            raise Corrupt(self.path, self._index, f"{self._rows} entries", len(found))
        return found
