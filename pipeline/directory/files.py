"""WAL files, segments and rings as bytes: heads, batches, records, rows. Which group's log they make up is `groups`.

Invariant: everything is opened for reading only; `replay` is the one that a start uses, and it writes nothing. Called
by `service.check.process`.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from logyard.engine.disk.door import Disk
from logyard.engine.entry import Entry
from logyard.engine.log.meta_rows import RingRun, runs_above
from logyard.engine.log.record import BLOCK, DATA_START, HEADER_MAGIC, FileHead, decode_frame
from logyard.engine.log.replay_result import Current
from logyard.engine.log.ring import FOLDER, RingReader, ring_name
from logyard.engine.log.ring import uid_of as ring_uid
from logyard.engine.log.segment import HEAD_BYTES, SegmentReader
from logyard.engine.log.wal_files import SPARE, TEMPORARY, wal_name
from logyard.engine.log.wal_scan import FileScan, Lost, read_heads
from logyard.engine.recovery.inspect import Facts, Wal, image_of
from logyard.protocol.errors import Corrupt, LogyardError, WrongIdentity

from .report import Report, lacks, some

SEGMENT = ".seg"
OPEN_SEGMENTS = 64
CHUNK_ENTRIES = 1024
CHUNK_BYTES = 1 << 24


def wal_path(number: int) -> str:
    """Return the path of a WAL file, relative to the data directory."""
    return f"wal/{wal_name(number)}"


def segment_path(number: int) -> str:
    """Return the path of a segment, relative to the data directory."""
    return f"segments/{number:016x}{SEGMENT}"


def ring_path(uid: int) -> str:
    """Return the path of a system group's ring, relative to the data directory."""
    return f"{FOLDER}/{ring_name(uid)}"


def check_wal(directory: Path, facts: Facts, report: Report, shapes: bool = True) -> Wal:
    """Replay what has no segment yet and report what is damaged; with `shapes`, look at the shape of what has one."""
    wal = Wal()
    with report.guarded("wal", path="wal"):
        wal.read(str(directory / "wal"), facts)
    result = wal.result
    report.count("wal_files", len(wal.sizes))
    report.count("wal_entries", sum(len(sealed.entries) for sealed in result.sealed))
    if result.current is not None:
        report.count("wal_entries", len(result.current.entries))
    for one in result.damage:
        text = f"at byte {one.offset}: {one.reason}"
        if one.uid:
            report.damage("wal", text, path=wal_path(one.file), group=facts.name(one.uid))
            continue
        names = sorted(map(facts.name, wal.suspects(facts)))
        whose = f"; it may have held records of {some(names)}" if names else "; no group lost anything by it"
        report.damage("wal", text + whose, path=wal_path(one.file))
    for one in result.healed:
        report.healed("wal", f"at byte {one.offset}: {one.reason}", path=wal_path(one.file))
    if shapes:
        spares = _spares(directory / "wal")
        with report.guarded("wal", path="wal"):
            _shapes(Disk(), directory / "wal", wal, facts, report)
            if result.current is not None:
                longest = max([*wal.sizes.values(), *spares.values()])
                _end(Disk(), directory / "wal", result.current, wal.sizes[result.current.head.epoch], longest, report)
        _leftovers(directory / "wal", wal.sizes, spares, facts, report)
    return wal


def _shapes(disk: Disk, folder: Path, wal: Wal, facts: Facts, report: Report) -> None:
    """Count the batches; of files whose metadata is in segments, say what is broken and costs nothing."""
    sizes, epochs = wal.sizes, list(wal.sizes)
    heads = read_heads(disk, str(folder), epochs)
    for position, epoch in enumerate(epochs):
        report.progress("wal", position, len(epochs))
        head, copies, _ = heads[epoch]
        home = facts.wal_files.get(epoch)
        if home is not None and sizes[epoch] < home:
            text = f"it has {sizes[epoch]} bytes, its batches end at {home}: it was cut"
            report.damage("wal", text, path=wal_path(epoch))
        if epoch <= facts.flushed and copies < 2:
            text = f"{2 - copies} of 2 copies of its head are damaged; its segment has the metadata"
            report.healed("wal", text, path=wal_path(epoch))
        if head is None:
            continue
        following = heads[epochs[position + 1]].head if position + 1 < len(epochs) else None
        if following is not None and following.previous != epoch:
            following = None
        _batches(disk, folder, head, following, epoch <= facts.flushed, report)


def _batches(disk: Disk, wal: Path, head: FileHead, following: FileHead | None, flushed: bool, report: Report) -> None:
    end, next_batch = (following.previous_end, following.first_batch) if following else (0, 0)
    with FileScan(disk, str(wal), head) as scan:
        for one in scan.walk(end, next_batch):
            if not isinstance(one, Lost):
                report.count("wal_batches")
            elif flushed:
                text = (
                    f"at byte {one.start}: batches {one.first} to {one.through} have no header; "
                    "their metadata is in the segment"
                )
                report.healed("wal", text, path=wal_path(head.epoch))


def _end(disk: Disk, wal: Path, current: Current, size: int, longest: int, report: Report) -> None:
    """Say what is wrong where the last batches lie: the file was cut, or the last batch is torn. `longest`: bytes of
    the longest file of the WAL."""
    head, tail = current.head, current.tail
    path = wal_path(head.epoch)
    fd = disk.open_file(str(wal / wal_name(head.epoch)))
    try:
        block = disk.read(fd, BLOCK, tail)
    finally:
        disk.close(fd)
    if why := _cut(block, current, size):
        report.damage("wal", f"it has {size} bytes, {why}: it was cut, and what lay behind them is lost", path=path)
    elif block[:4] == HEADER_MAGIC and block[8:16] == head.epoch.to_bytes(8, "little"):
        # Other bytes there are those of an earlier use.
        text = f"at byte {tail}: the last batch is torn; nothing in it was acknowledged, and it is cut off"
        report.warning("torn_batch", text, path=path)
    elif size <= tail and size < longest:
        text = f"it is full with {size} bytes, another file of the WAL has {longest}: it was made smaller, or was cut"
        report.warning("short_file", text, path=path)


def _cut(block: bytes, current: Current, size: int) -> str:
    """Return by what the file of the last batches is known to have been longer, "" where it may not have been. `block`
    begins where they end. A file gets all its bytes before its name; a batch lies within them, and only an empty one
    takes the last block."""
    tail = current.tail
    frame = decode_frame(block, 0, HEADER_MAGIC, current.head, tail)
    if frame is not None and frame.start == tail and frame.end > size:
        return f"its batch at byte {tail} ends at {frame.end}"
    if size % BLOCK or size < DATA_START + 2 * BLOCK:
        return "which no file is made with"
    return "and a batch with records takes its last block" if size <= tail and not current.idle else ""


def _spares(folder: Path) -> dict[str, int]:
    """Return the bytes of each spare file."""
    names = os.listdir(folder) if folder.is_dir() else []
    return {name: (folder / name).stat().st_size for name in names if name.endswith(SPARE)}


def _leftovers(folder: Path, sizes: dict[int, int], spares: dict[str, int], facts: Facts, report: Report) -> None:
    """Report files that the next start recycles or removes. A spare that is longer than all files in use is what the
    next ones will be, or one in use was cut."""
    for name in Disk().list_directory(str(folder)) if folder.is_dir() else []:
        if name.endswith(TEMPORARY):
            report.orphan(f"wal/{name}", "a file that was being made when the process ended")
        elif sizes and name in spares and spares[name] not in sizes.values() and spares[name] < max(sizes.values()):
            report.orphan(f"wal/{name}", "a spare file of another size than the files in use")
    for number in sizes:
        if number <= facts.flushed and number not in facts.wal_files:
            report.orphan(wal_path(number), "nobody's home any more, and not recycled yet")


class Segments:
    """The segments of a directory, some of them open, and its `rings`. `bad` are the (segment, uid, index) found
    damaged by `verify`; segment 0 is a ring."""

    def __init__(self, directory: Path, report: Report) -> None:
        self._directory = directory
        self._report = report
        self._disk = Disk()
        self._open: OrderedDict[int, SegmentReader | None] = OrderedDict()
        self.bad: set[tuple[int, int, int]] = set()
        self.numbers: list[int] = []
        self.rings = Rings(directory, report)
        folder = directory / "segments"
        for name in sorted(os.listdir(folder)) if folder.is_dir() else []:
            stem = name.removesuffix(SEGMENT)
            if name != stem and len(stem) == 16 and not stem.strip("0123456789abcdef"):
                self.numbers.append(int(stem, 16))
            elif name.endswith(".tmp"):
                report.orphan(f"segments/{name}", "a file that was being made when the process ended")
            else:
                report.warning("unknown_file", "this is no segment's name", path=f"segments/{name}")

    def reader(self, number: int) -> SegmentReader | None:
        """Return an open segment; None when it is not there or has no index. The first try reports why."""
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        reader = None
        if number in self.numbers:
            with self._report.guarded("segment", path=segment_path(number)):
                opened = SegmentReader(self._disk, str(self._directory / segment_path(number)))
                if opened.id != number:
                    opened.close()
                    raise Corrupt(segment_path(number), 0, f"segment {number}", opened.id)
                reader = opened
        self._open[number] = reader
        if len(self._open) > OPEN_SEGMENTS:
            _, oldest = self._open.popitem(last=False)
            if oldest is not None:
                oldest.close()
        return reader

    def close(self) -> None:
        """Close all of them."""
        for reader in self._open.values():
            if reader is not None:
                reader.close()
        self._open.clear()
        self.rings.close()

    def verify(self, users: dict[int, dict[int, list[tuple[int, int]]]], facts: Facts) -> None:
        """Check every byte that has a checksum. `users`: segment -> uid -> (first, last) that its log needs."""
        report = self._report
        for position, number in enumerate(self.numbers):
            report.progress("segments", position, len(self.numbers))
            path = segment_path(number)
            needed = users.get(number, {})
            if not needed and number not in facts.wal_files:
                report.orphan(path, "no log needs it, and no WAL file")
            reader = self.reader(number)
            if reader is None:
                continue
            report.count("segments")
            report.count("segment_entries", sum(group.rows for group in reader.groups.values()))
            with report.guarded("segment", path=path):
                self._head_and_foot(path)
                for one in reader.verify():
                    text = f"at byte {one.offset}: {one.reason}"
                    if not one.uid and not one.entry and reader.damaged and "index's" in one.reason:
                        report.healed("segment", text + "; its rows verify one by one", path=path)
                        continue
                    self.bad.add((number, one.uid, one.entry))
                    if one.uid and not any(first <= one.entry <= last for first, last in needed.get(one.uid, ())):
                        text += f" (entry {one.entry}, which its group does not need any more)"
                        report.warning("segment", text, path=path, group=facts.name(one.uid))
                    elif one.uid:
                        text += f" (entry {one.entry})"
                        report.damage("segment", text, path=path, group=facts.name(one.uid))
                    else:
                        text += f"; it may be an entry of {some(sorted(map(facts.name, needed)))}"
                        report.damage("segment", text, path=path)

    def _head_and_foot(self, path: str) -> None:
        with open(self._directory / path, "rb") as file:
            head = file.read(HEAD_BYTES)
            file.seek(-HEAD_BYTES, os.SEEK_END)
            at = file.tell()
            foot = file.read(HEAD_BYTES)
        if head != foot:
            self._report.healed("segment", f"its head (at byte 0) and its foot (at byte {at}) differ", path=path)

    def entries(self, number: int, uid: int, first: int, last: int) -> Iterator[Entry | int]:
        """Yield the group's entries in one segment; the bare index where one is damaged or missing."""
        reader = self.reader(number)
        if reader is None:
            yield from range(first, last + 1)
            return
        at = first
        while at <= last:
            high = min(last, at + CHUNK_ENTRIES - 1)
            try:
                chunk = reader.entries(uid, at, high, CHUNK_BYTES)
            except (LogyardError, AssertionError, OSError, ValueError) as error:
                if lacks(error):
                    raise
                chunk, high = self._one(reader, uid, at), at
            for entry in chunk:
                yield from range(at, entry.index)
                yield entry
                at = entry.index + 1
            if not chunk or chunk[-1].index >= high:
                yield from range(at, high + 1)
                at = max(at, high + 1)

    def _one(self, reader: SegmentReader, uid: int, index: int) -> list[Entry]:
        try:
            return reader.entries(uid, index, index)
        except (LogyardError, AssertionError, OSError, ValueError) as error:
            if lacks(error):
                raise
            return []


class Rings:
    """The rings of system groups in a directory."""

    def __init__(self, directory: Path, report: Report) -> None:
        self._directory = directory
        self._report = report
        self._disk = Disk()
        self._open: dict[int, RingReader | None] = {}
        self.uids: list[int] = []
        folder = directory / FOLDER
        for name in sorted(os.listdir(folder)) if folder.is_dir() else []:
            if uid := ring_uid(name):
                self.uids.append(uid)
            elif name.endswith(".tmp"):
                report.orphan(f"{FOLDER}/{name}", "a file that was being made when the process ended")
            else:
                report.warning("unknown_file", "this is no ring's name", path=f"{FOLDER}/{name}")

    def reader(self, uid: int) -> RingReader | None:
        """Return a group's ring, open; None when it is not there or has no head. The first try reports why."""
        if uid not in self._open:
            self._open[uid] = None
            with self._report.guarded("ring", path=ring_path(uid), group=f"{uid:016x}"):
                self._open[uid] = RingReader(self._disk, str(self._directory / ring_path(uid)), uid)
        return self._open[uid]

    def close(self) -> None:
        """Close all of them."""
        for reader in self._open.values():
            if reader is not None:
                reader.close()
        self._open.clear()

    def verify(self, needed: dict[int, list[RingRun]], facts: Facts, bad: set[tuple[int, int, int]]) -> None:
        """Check every slot that a log needs, by uid; what is bad goes to `bad`."""
        report = self._report
        for uid in sorted({*self.uids, *needed}):
            path, name = ring_path(uid), facts.name(uid)
            if uid not in facts.groups or uid in facts.deleted:
                report.orphan(path, "there is no such group here")
                continue
            runs = needed.get(uid)
            if not runs:
                self._look_at_spare(uid, name)
                continue
            reader = self.reader(uid)
            if reader is None:
                continue
            report.count("rings")
            if reader.heads < 2:
                report.healed("ring", "one of 2 copies of its head is damaged", path=path, group=name)
            for first, last, term in runs:
                with report.guarded("ring", path=path, group=name):
                    seen = reader.verify(first, last, term)
                    report.count("ring_entries", last - first + 1 - len(seen.bad))
                    for entry in seen.torn:
                        text = f"one of 2 headers of entry {entry.index} is damaged"
                        report.healed("ring", text, path=path, group=name)
                    for index, error in seen.bad.items():
                        bad.add((0, uid, index))
                        report.damage("ring", f"entry {index}: {error}", path=path, group=name)

    def _look_at_spare(self, uid: int, name: str) -> None:
        """Look at a ring of which the log needs nothing: one that can't be used is made anew by a start. Raises
        `WrongIdentity` for a newer format."""
        path = ring_path(uid)
        if uid not in self.uids:
            return
        try:
            RingReader(self._disk, str(self._directory / path), uid).close()
        except WrongIdentity:
            raise
        except (LogyardError, OSError) as error:
            if lacks(error):
                raise
            text = f"it can't be read, and the log needs nothing of it: it is made anew ({error})"
            self._report.warning("ring", text, path=path, group=name)
            return
        self._report.count("rings")

    def entries(self, uid: int, first: int, last: int, term: int) -> Iterator[Entry | int]:
        """Yield a group's entries in its ring; the bare index where one is damaged or missing."""
        reader = self.reader(uid)
        for index in range(first, last + 1):
            try:
                yield index if reader is None else reader.find(index, term).entry
            except (LogyardError, AssertionError, OSError, ValueError) as error:
                if lacks(error):
                    raise
                yield index


def rings_of(facts: Facts, wal: Wal) -> dict[int, list[RingRun]]:
    """Return what logs need of rings, as a start would have it: nothing that the WAL overwrote, or that lies below the
    log, and of groups that need nothing, nothing."""
    found: dict[int, list[RingRun]] = {}
    for uid, state in facts.states.items():
        if state.extra.get("ring") and uid in facts.groups:
            image = image_of(uid, facts, wal)
            if runs := runs_above(image.ring, image.log.snapshot_index):
                found[uid] = runs
    return found


def users_of(facts: Facts, wal: Wal) -> dict[int, dict[int, list[tuple[int, int]]]]:
    """Return segment -> uid -> (first, last) of each run that a log needs, as a start would have it: what the WAL
    overwrote, or what lies before an installed snapshot, is needed of no checkpoint that still names it."""
    users: dict[int, dict[int, list[tuple[int, int]]]] = {}
    for uid, state in facts.states.items():
        runs = image_of(uid, facts, wal).runs if uid in facts.groups else state.runs
        for first, last, segment in runs:
            users.setdefault(segment, {}).setdefault(uid, []).append((first, last))
    return users
