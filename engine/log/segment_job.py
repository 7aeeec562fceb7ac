"""Turns sealed WAL files into segments, and writes what they have of system groups to rings. Plain data in, plain data
out, so that it runs in a thread or in another process.

Invariant: the main process alone decides what is valid, and what a ring takes (at the time the job is built); a job run
twice, or again after a crash, writes the same. What a ring does not take, for whatever reason, lies in the segment. The
sealed file stays as it is: it remains the home of its entries' payloads. Called by the host after a roll.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol

from logyard.protocol.errors import Corrupt

from ..disk.door import Disk
from ..entry import Entry
from .meta_rows import RingRun
from .ring import Geometry, make_ring, write_slots
from .segment import SegmentInfo, Terms, write_segment
from .wal_files import Sealed
from .wal_replay import replay_file


class ValidRun(NamedTuple):
    """Entries `first` to `last` of a group, all of `term`, were the log's content when the job was built."""

    uid: int
    first: int
    last: int
    term: int


class RingJob(NamedTuple):
    """Write these runs to the ring of a system group, which is to be made first if `make`."""

    uid: int
    path: str
    slots: int
    slot_bytes: int
    make: bool
    runs: tuple[RingRun, ...]

    def pack(self) -> list[object]:
        """Return nested lists."""
        return [*self[:-1], [list(run) for run in self.runs]]

    @classmethod
    def unpack(cls, plain: Sequence[Any]) -> RingJob:
        """Return what `pack` was given."""
        uid, path, slots, slot_bytes, make, runs = plain
        return cls(uid, path, slots, slot_bytes, make, tuple(RingRun(*run) for run in runs))


class SegmentJob(NamedTuple):
    """Write segment `segment` at `path` from WAL file `file` in `directory`, and what `rings` say. Tuples of plain
    values: msgpack-able."""

    segment: int
    path: str
    directory: str
    file: int
    epoch: int
    length: int
    runs: tuple[ValidRun, ...]
    rings: tuple[RingJob, ...] = ()

    def pack(self) -> list[object]:
        """Return nested lists, for the way to another process."""
        return [*self[:-2], [list(run) for run in self.runs], [ring.pack() for ring in self.rings]]

    @classmethod
    def unpack(cls, plain: Sequence[object]) -> SegmentJob:
        """Return what `pack` was given."""
        segment, path, directory, file, epoch, length, runs, rings = plain
        assert isinstance(runs, (list, tuple)) and isinstance(path, str) and isinstance(directory, str)
        assert isinstance(segment, int) and isinstance(file, int) and isinstance(epoch, int) and isinstance(length, int)
        assert isinstance(rings, (list, tuple))
        valid = tuple(ValidRun(*run) for run in runs)
        return cls(segment, path, directory, file, epoch, length, valid, tuple(map(RingJob.unpack, rings)))


class SegmentWritten(NamedTuple):
    """A segment that is durable, the payload bytes that its WAL file holds of each group in it, and why a group's ring
    could not be written: then all is in the segment."""

    info: SegmentInfo
    sizes: dict[int, int]
    failed: dict[int, str]

    def pack(self) -> list[object]:
        """Return nested lists: maps with number keys are refused by careful decoders."""
        return [pack_info(self.info), list(self.sizes.items()), list(self.failed.items())]

    @classmethod
    def unpack(cls, plain: Sequence[object]) -> SegmentWritten:
        """Return what `pack` was given."""
        info, sizes, failed = plain
        assert isinstance(info, (list, tuple)) and isinstance(sizes, (list, tuple))
        assert isinstance(failed, (list, tuple))
        return cls(unpack_info(info), dict(sizes), dict(failed))


class SegmentRunner(Protocol):
    """Whoever runs segment jobs: a thread, or the writer process. Idempotent, durable on return."""

    async def __call__(self, job: SegmentJob, entries: Sequence[tuple[int, Entry]]) -> SegmentWritten:
        """Run a job; `entries` are the file's, for who has no need to read them again. Raises `Corrupt`, `OSError`."""
        ...


Latest = dict[int, list[Entry]]
"""By uid, what a file's writes leave standing, with rising indexes."""


def latest_entries(entries: Sequence[tuple[int, Entry]]) -> Latest:
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
    sealed: Sealed,
    valid: Callable[[int, int, int], bool],
    *,
    segment: int,
    path: str,
    directory: str,
    latest: Mapping[int, Sequence[Entry]] | None = None,
    rings: Sequence[RingJob] = (),
) -> SegmentJob:
    """Decide what of `sealed` is to be kept: `valid(uid, index, term)` is asked once for each last write, those in
    `latest` if that is known already. What `rings` take is not in the segment.

    Deleted groups, truncated entries and entries below a snapshot are simply not valid.
    """
    latest = latest_entries(sealed.entries) if latest is None else latest
    taken = {ring.uid: [(run.first, run.last) for run in ring.runs] for ring in rings}
    runs: list[ValidRun] = []
    for uid in sorted(latest):
        first = last = term = 0
        in_ring = taken.get(uid, ())
        for entry in latest[uid]:
            index = entry.index
            if not valid(uid, index, entry.term) or any(low <= index <= high for low, high in in_ring):
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
    return SegmentJob(segment, path, directory, sealed.file, sealed.epoch, sealed.length, tuple(runs), tuple(rings))


def run_segment_job(disk: Disk, job: SegmentJob, entries: Sequence[tuple[int, Entry]] | None = None) -> SegmentWritten:
    """Write the job's rings and its segment; durable on return. Without `entries` (another process) they are read from
    the WAL file. A ring that can't be written costs nobody else anything: its runs lie in the segment then.

    Raises `Corrupt` when the file no longer holds an entry the job names: then memory, or a peer, has to give it.
    """
    if entries is None:
        entries = replay_file(disk, job.directory, job.file)
    latest = latest_entries(entries)
    failed: dict[int, str] = {}
    runs = list(job.runs)
    for ring in job.rings:
        valid = [ValidRun(ring.uid, *run) for run in ring.runs]
        try:
            _write_ring(disk, ring, [entry for run in valid for entry in _entries(latest, run, job.file)])
        except OSError as error:
            failed[ring.uid] = f"{ring.path}: {error}"
            runs += valid
    rows: list[tuple[int, Entry]] = []
    sizes: dict[int, int] = {}
    for run in runs:
        found = _entries(latest, run, job.file)
        rows += [(run.uid, entry) for entry in found]
        sizes[run.uid] = sizes.get(run.uid, 0) + sum(entry.body_bytes for entry in found if entry.file)
    return SegmentWritten(write_segment(disk, job.path, job.segment, rows), sizes, failed)


def _write_ring(disk: Disk, ring: RingJob, entries: Sequence[Entry]) -> None:
    geometry = Geometry(ring.slots, ring.slot_bytes)
    if ring.make:
        disk.make_directory(os.path.dirname(ring.path))
        make_ring(disk, ring.path, ring.uid, geometry)
    write_slots(disk, ring.path, ring.uid, geometry, entries)


def _entries(latest: Mapping[int, Sequence[Entry]], run: ValidRun, file: int) -> Sequence[Entry]:
    """Return the entries of a run. Raises `Corrupt` where the file has others, or none."""
    uid, first, last, term = run
    group = latest.get(uid, ())
    at = bisect_left(group, first, key=_index)
    found = group[at : at + last - first + 1]
    for index, entry in zip_longest(range(first, last + 1), found):
        if entry is None or entry.index != index or entry.term != term:
            raise Corrupt(f"WAL file {file}", 0, f"entry {index} of group {uid:016x}", entry)
    return found


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
