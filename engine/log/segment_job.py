"""Turns sealed WAL files into segments. Plain data in, plain data out, so that it runs in a thread or in another
process.

Invariant: the main process alone decides what is valid (at the time the job is built); a job run twice, or again after
a crash, writes the same segment. The sealed file stays as it is: it remains the home of its entries' payloads. Called
by the host after a roll.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from logyard.protocol.errors import Corrupt

from ..disk.door import Disk
from ..entry import Entry
from .segment import SegmentInfo, Terms, write_segment
from .wal_files import Sealed
from .wal_replay import replay_file


class ValidRun(NamedTuple):
    """Entries `first` to `last` of a group, all of `term`, were the log's content when the job was built."""

    uid: int
    first: int
    last: int
    term: int


class SegmentJob(NamedTuple):
    """Write segment `segment` at `path` from WAL file `file` in `directory`. Tuples of plain values: msgpack-able."""

    segment: int
    path: str
    directory: str
    file: int
    epoch: int
    length: int
    runs: tuple[ValidRun, ...]

    def pack(self) -> list[object]:
        """Return nested lists, for the way to another process."""
        return [*self[:-1], [list(run) for run in self.runs]]

    @classmethod
    def unpack(cls, plain: Sequence[object]) -> SegmentJob:
        """Return what `pack` was given."""
        segment, path, directory, file, epoch, length, runs = plain
        assert isinstance(runs, (list, tuple)) and isinstance(path, str) and isinstance(directory, str)
        assert isinstance(segment, int) and isinstance(file, int) and isinstance(epoch, int) and isinstance(length, int)
        return cls(segment, path, directory, file, epoch, length, tuple(ValidRun(*run) for run in runs))


class SegmentWritten(NamedTuple):
    """A segment that is durable, and the payload bytes that its WAL file holds of each group in it."""

    info: SegmentInfo
    sizes: dict[int, int]

    def pack(self) -> list[object]:
        """Return nested lists: maps with number keys are refused by careful decoders."""
        return [pack_info(self.info), list(self.sizes.items())]

    @classmethod
    def unpack(cls, plain: Sequence[object]) -> SegmentWritten:
        """Return what `pack` was given."""
        info, sizes = plain
        assert isinstance(info, (list, tuple)) and isinstance(sizes, (list, tuple))
        return cls(unpack_info(info), dict(sizes))


class SegmentRunner(Protocol):
    """Whoever runs segment jobs: a thread, or the writer process. Idempotent, durable on return."""

    async def __call__(self, job: SegmentJob, entries: Sequence[tuple[int, Entry]]) -> SegmentWritten:
        """Run a job; `entries` are the file's, for who has no need to read them again. Raises `Corrupt`, `OSError`."""
        ...


def latest_entries(entries: Sequence[tuple[int, Entry]]) -> dict[int, list[Entry]]:
    """Return by uid, with rising indexes, what the file's writes leave standing: an entry voids its group's older ones
    from its index on.

    Truncations that no entry followed are not in the list: `valid` of `build_segment_job` knows them.
    """
    found: dict[int, list[Entry]] = {}
    for uid, entry in entries:
        group = found.get(uid)
        if group is None:
            found[uid] = [entry]
            continue
        index = entry.index
        while group and group[-1].index >= index:
            group.pop()
        group.append(entry)
    return found


def build_segment_job(
    sealed: Sealed, valid: Callable[[int, int, int], bool], *, segment: int, path: str, directory: str
) -> SegmentJob:
    """Decide what of `sealed` is to be kept: `valid(uid, index, term)` is asked once for each last write.

    Deleted groups, truncated entries and entries below a snapshot are simply not valid.
    """
    latest = latest_entries(sealed.entries)
    runs: list[ValidRun] = []
    for uid in sorted(latest):
        first = last = term = 0
        for entry in latest[uid]:
            index = entry.index
            if not valid(uid, index, entry.term):
                continue
            if index == last + 1 and entry.term == term:
                last = index
                continue
            if first:
                runs.append(ValidRun(uid, first, last, term))
            first = last = index
            term = entry.term
        if first:
            runs.append(ValidRun(uid, first, last, term))
    return SegmentJob(segment, path, directory, sealed.file, sealed.epoch, sealed.length, tuple(runs))


def run_segment_job(disk: Disk, job: SegmentJob, entries: Sequence[tuple[int, Entry]] | None = None) -> SegmentWritten:
    """Write the job's segment; durable on return. Without `entries` (another process) they are read from the WAL file.

    Raises `Corrupt` when the file no longer holds an entry the job names: then memory, or a peer, has to give it.
    """
    if entries is None:
        entries = replay_file(disk, job.directory, job.file)
    latest = latest_entries(entries)
    rows: list[tuple[int, Entry]] = []
    sizes: dict[int, int] = {}
    for uid, first, last, term in job.runs:
        size = 0
        group = latest.get(uid, [])
        at = bisect_left(group, first, key=_index)
        for index in range(first, last + 1):
            entry = group[at] if at < len(group) else None
            at += 1
            if entry is None or entry.index != index or entry.term != term:
                raise Corrupt(f"WAL file {job.file}", 0, f"entry {index} of group {uid:016x}", entry)
            rows.append((uid, entry))
            if entry.file:
                size += entry.body_bytes
        sizes[uid] = sizes.get(uid, 0) + size
    return SegmentWritten(write_segment(disk, job.path, job.segment, rows), sizes)


def _index(entry: Entry) -> int:
    return entry.index


def pack_info(info: SegmentInfo) -> list[object]:
    """Return a segment's description as nested lists: maps with number keys are refused by careful decoders."""
    return [info.id, [[uid, *run, info.terms[uid]] for uid, run in info.runs.items()], info.bytes]


def unpack_info(plain: Sequence[object]) -> SegmentInfo:
    """Return what `pack_info` was given."""
    number, groups, size = plain
    assert isinstance(number, int) and isinstance(size, int) and isinstance(groups, (list, tuple))
    terms: dict[int, Terms] = {uid: [(index, term) for index, term in runs] for uid, _, _, runs in groups}
    return SegmentInfo(number, {uid: (first, last) for uid, first, last, _ in groups}, terms, size)
