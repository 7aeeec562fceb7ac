"""What a migration copies out of a sealed WAL file, as plain data, and the reader of it: the same in a thread of the
node and in the writer process.

Invariant: the main process alone says what lives, when it builds the source; what dies later is marked dead when the
job's report is adopted. Metadata comes from the file's segment, payload bytes from the file. Built by
`log.compactor`, read by the payload store's jobs.
"""

from __future__ import annotations

import errno
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from logyard.protocol.errors import Corrupt

from ..disk.door import ALIGNMENT, HUGE_PAGE, Disk, is_short, unreadable
from ..entry import Unit, units_of
from ..ports import SourceEntry
from .segment import SegmentReader
from .wal_files import wal_name

Units: TypeAlias = Sequence[Unit]

READ_BYTES = 4 * 1024 * 1024
"""Metadata of entries that are looked at together."""
WINDOW_BYTES = HUGE_PAGE - 2 * ALIGNMENT
"""Of an entry's payload so much is read at once: with the ends of its pages it fills a huge page."""
DIRECT_BYTES = 256 * 1024
"""From here on a window is read around the page cache: at 1 MiB that takes a quarter of the processor time,
and leaves the cache to what is read again; at 64 KiB it takes more (docs/decisions/0046)."""
HOLE_BYTES = 64 * 1024
"""So much that is dead is read with what lives around it: it costs no more than another call."""

Span = tuple[int, int, int, int]
"""(first index, first ordinal, end index, end ordinal): what lives, without the end."""


class LiveGroup(NamedTuple):
    """Entries `first` to `last` of a group are the log's content, committed; of their records those in `live` live.
    A group may come several times, rising."""

    uid: int
    first: int
    last: int
    live: tuple[Span, ...]


class FileSource(NamedTuple):
    """WAL file `file` of `directory` and the segment of its metadata; `groups` rise in uid, their spans too."""

    segment: str
    directory: str
    file: int
    groups: tuple[LiveGroup, ...]

    @property
    def ranges(self) -> list[tuple[int, int, int]]:
        """(uid, first, last) of each group."""
        return [group[:3] for group in self.groups]

    def pack(self) -> list[object]:
        """Return nested lists, for the way to another process."""
        groups = [[*group[:3], [list(span) for span in group.live]] for group in self.groups]
        return [self.segment, self.directory, self.file, groups]

    @classmethod
    def unpack(cls, plain: Sequence[Any]) -> FileSource:
        """Return what `pack` was given."""
        segment, directory, file, groups = plain
        found = (LiveGroup(uid, first, last, tuple(map(tuple, live))) for uid, first, last, live in groups)
        return cls(segment, directory, file, tuple(found))


class FileReader:
    """Reads a `FileSource`; one thread at a time. Close it. Payload is read by windows: few calls, not one a unit."""

    __slots__ = ("_disk", "_path", "_segment", "_fd", "_direct", "_live", "_page", "_at", "_held")

    def __init__(self, disk: Disk, source: FileSource) -> None:
        self._disk = disk
        self._path = os.path.join(source.directory, wal_name(source.file))
        self._live: dict[int, list[Span]] = {}
        for group in source.groups:
            self._live.setdefault(group.uid, []).extend(group.live)
        try:
            self._segment = SegmentReader(disk, source.segment, source.file)
        except OSError as error:
            raise unreadable(source.segment, 0, "a segment", error) from error
        self._fd = self._direct = -1
        # What was read last, and where it begins.
        self._at, self._held = 0, memoryview(b"")
        try:
            self._fd = disk.open_file(self._path)
            self._direct = disk.open_direct_reads(self._path)
            self._page = disk.direct_memory(HUGE_PAGE)
        except OSError as error:
            self.close()
            raise unreadable(self._path, 0, "a WAL file", error) from error

    def close(self) -> None:
        """Give both files back."""
        self._segment.close()
        for fd in (self._fd, self._direct):
            if fd >= 0:
                self._disk.close(fd)

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, uid: int, first: int, last: int) -> Iterator[SourceEntry]:
        """Yield the entries first..last of a group of which something lives; what their `read` returns stays as it is
        until the next read. Raises `Corrupt`."""
        spans = self._live[uid]
        ends = [span[2:] for span in spans]
        while first <= last:
            entries = self._segment.entries(uid, first, last, READ_BYTES)
            if not entries:
                return
            for entry in entries:
                if not entry.body_bytes or entry.tombstone:
                    continue
                units = units_of(entry.data)
                live = _live_units(entry.index, units, spans, ends)
                if not live:
                    continue

                def read(
                    offset: int, length: int, base: int = entry.offset, units: Units = units, live: set[int] = live
                ) -> memoryview:
                    return self._payload(base, offset, length, units, live)

                yield SourceEntry(uid, entry.index, entry.term, entry.data, live, read)
            first = entries[-1].index + 1

    def _payload(self, base: int, offset: int, length: int, units: Sequence[Unit], live: set[int]) -> memoryview:
        """Return bytes of the payload that begins at `base` in the file."""
        at = base + offset - self._at
        if at < 0 or at + length > len(self._held):
            self._load(base + offset, length, base + window_end(units, live, offset))
            at = 0
        found = self._held[at : at + length]
        if len(found) != length:
            raise Corrupt(self._path, base + offset, f"{length} bytes", len(found))
        return found

    def _load(self, begin: int, length: int, end: int) -> None:
        """Read so many bytes, and what lies behind them up to `end`, if that can be read; fewer where the file ends."""
        self._at, self._held = begin, memoryview(b"")
        size = max(length, end - begin)
        try:
            self._held = self._read_window(begin, size)
        except OSError as error:
            if size == length or is_short(error):
                raise unreadable(self._path, begin, f"{length} readable bytes", error) from error
            # What can't be read may be dead, or the next unit, which says so itself.
            self._load(begin, length, begin)

    def _read_window(self, begin: int, length: int) -> memoryview:
        if self._direct >= 0 and DIRECT_BYTES <= length <= WINDOW_BYTES:
            skipped = begin % ALIGNMENT
            size = -(-(skipped + length) // ALIGNMENT) * ALIGNMENT
            try:
                found = self._disk.direct_read(self._direct, self._page[:size], begin - skipped)
                return self._page[skipped : min(skipped + length, found)]
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # A file system that opens files for such reads, and then wants other sizes of them.
                direct, self._direct = self._direct, -1
                self._disk.close(direct)
        return memoryview(self._disk.read(self._fd, length, begin))


def window_end(units: Sequence[Unit], live: set[int], begin: int) -> int:
    """Return how far to read an entry's payload from `begin` on: whole units of `live` that lie close together, as many
    as `WINDOW_BYTES` take; `begin` where not even one does."""
    end = begin
    for unit in units:
        stop = unit.offset + unit.length
        if stop > begin and unit.number in live:
            if stop - begin > WINDOW_BYTES or unit.offset - end > HOLE_BYTES:
                break
            end = stop
    return end


def _live_units(index: int, units: Sequence[Unit], live: Sequence[Span], ends: Sequence[tuple[int, int]]) -> set[int]:
    """Return the numbers of the units of which a record lives: as a group's liveness says it, from its spans."""
    found = set()
    for unit in units:
        start, stop = (index, unit.first_ordinal), (index, unit.first_ordinal + max(unit.records, 1))
        at = bisect_right(ends, start)
        if at < len(live) and live[at][:2] < stop:
            found.add(unit.number)
    return found
