"""What a migration copies out of a sealed WAL file, as plain data, and the reader of it: the same in a thread of the
node and in the writer process.

Invariant: the main process alone says what lives, when it builds the source; what dies later is marked dead when the
job's report is adopted. Metadata comes from the file's segment, payload bytes from the file. Built by
`log.compactor`, read by the payload store's jobs.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from logyard.protocol.errors import Corrupt

from ..disk.door import Disk, unreadable
from ..entry import Unit, units_of
from ..ports import SourceEntry
from .segment import SegmentReader
from .wal_files import wal_name

READ_BYTES = 4 * 1024 * 1024

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
    """Reads a `FileSource`; one thread at a time. Close it."""

    __slots__ = ("_disk", "_path", "_segment", "_fd", "_live")

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
        try:
            self._fd = disk.open_file(self._path)
        except OSError as error:
            self._segment.close()
            raise unreadable(self._path, 0, "a WAL file", error) from error

    def close(self) -> None:
        """Give both files back."""
        self._segment.close()
        self._disk.close(self._fd)

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, uid: int, first: int, last: int) -> Iterator[SourceEntry]:
        """Yield the entries first..last of a group of which something lives. Raises `Corrupt`."""
        spans = self._live[uid]
        ends = [span[2:] for span in spans]
        while first <= last:
            entries = self._segment.entries(uid, first, last, READ_BYTES)
            if not entries:
                return
            for entry in entries:
                if not entry.body_bytes or entry.tombstone:
                    continue
                live = _live_units(entry.index, units_of(entry.data), spans, ends)
                if not live:
                    continue

                def read(offset: int, length: int, base: int = entry.offset) -> bytes:
                    return self._payload(base + offset, length)

                yield SourceEntry(uid, entry.index, entry.term, entry.data, live, read)
            first = entries[-1].index + 1

    def _payload(self, offset: int, length: int) -> bytes:
        try:
            found = self._disk.read(self._fd, length, offset)
        except OSError as error:
            raise unreadable(self._path, offset, f"{length} readable bytes", error) from error
        if len(found) != length:
            raise Corrupt(self._path, offset, f"{length} bytes", len(found))
        return found


def _live_units(index: int, units: Sequence[Unit], live: Sequence[Span], ends: Sequence[tuple[int, int]]) -> set[int]:
    """Return the numbers of the units of which a record lives: as a group's liveness says it, from its spans."""
    found = set()
    for unit in units:
        start, stop = (index, unit.first_ordinal), (index, unit.first_ordinal + max(unit.records, 1))
        at = bisect_right(ends, start)
        if at < len(live) and live[at][:2] < stop:
            found.add(unit.number)
    return found
