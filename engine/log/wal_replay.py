"""Replay of the WAL: what every group had made durable, judged by law 8, at the cost of its metadata.

Invariant: a record reaches the sink only if its checksum holds at its place and, for an entry, if it continues what
the sink has of its group. Only the last batch of the last file can be torn, and then it is cut, unseen by the sink;
everything else that does not verify is damage and is reported. Replay writes nothing, so a second run finds the same.
Called once, before `Wal.open`.

Of a group that is damaged nothing is delivered behind its first damage but hard states and floors: what came before is
a state that its log once had. A *cut* says that the host took note of all damage of a group up to some batch: records
of it up to there are left out, those behind the damage or, `whole`, all of them, and later ones follow on what is left.

A damaged batch whose two directories are unreadable could have held any group's records. Each later directory row
names the batch that held its group's newest record before, so a group is *cleared* of that suspicion by its next row,
or convicted by it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from xxhash import xxh3_64_digest, xxh3_64_intdigest

from logyard.protocol.errors import Corrupt, WrongIdentity

from ..disk.door import Disk
from ..entry import Entry, parse_entry
from .record import (
    BATCH_BYTES,
    BLOCK,
    CHECK_BYTES,
    ENTRY_RECORD,
    FLOOR_RECORD,
    FORMAT,
    HARD,
    HARD_STATE_RECORD,
    PIECE_RECORD,
    RECORD,
    RECORD_BYTES,
    ROW,
    ROW_BYTES,
    TRUNCATE_RECORD,
    BatchFrame,
    FileHead,
    check_directory,
)
from .replay_result import Current, Cut, Damage, ReplayResult
from .wal_files import Sealed, wal_epochs, wal_name
from .wal_scan import FileScan, Lost, read_heads

__all__ = ["Current", "Cut", "Damage", "ReplayResult", "Sink", "replay", "replay_file"]


class Sink(Protocol):
    """Who takes what replay finds, in the order it was written."""

    def hard_state(self, uid: int, term: int, vote: int, commit: int) -> None:
        """Take the group's hard state."""
        ...

    def entry(self, uid: int, entry: Entry) -> None:
        """Take an entry; it voids the group's older ones from its index on. `bodies` is None when there is a
        payload."""
        ...

    def truncate(self, uid: int, from_index: int) -> None:
        """Void entries from `from_index` on; the next one has that index, also when it lies ahead of the last."""
        ...

    def floor(self, uid: int, p: int) -> None:
        """Take the group's payload floor."""
        ...


def replay(
    disk: Disk, directory: str, sink: Sink, flushed_through: int = 0, cuts: Mapping[int, Cut] = MappingProxyType({})
) -> ReplayResult:
    """Read every WAL file above `flushed_through`, oldest first, into `sink`.

    Files up to `flushed_through` have their metadata in segments and stay only as homes of payloads; above it, a
    missing file between two others is damage. `cuts` by uid. Raises `WrongIdentity` for a newer format, before the
    sink has seen anything.
    """
    result = ReplayResult()
    try:
        names = disk.list_directory(directory)
    except FileNotFoundError:
        return result
    epochs = wal_epochs(names)
    heads = read_heads(disk, directory, epochs)
    for epoch, found in heads.items():
        if found.format > FORMAT:
            raise WrongIdentity(f"WAL file {epoch} has format {found.format}, newer than {FORMAT}; use a newer logyard")
    files = [(epoch, heads[epoch].head, heads[epoch].copies) for epoch in epochs]
    _Replay(disk, directory, sink, result, cuts).run(files, flushed_through)
    return result


def replay_file(disk: Disk, directory: str, epoch: int) -> list[tuple[int, Entry]]:
    """Return the intact entries of a sealed file, in write order, for the segment writer. Raises `Corrupt` without a
    head."""
    head = read_heads(disk, directory, [epoch])[epoch].head
    if head is None:
        raise Corrupt(wal_name(epoch), 0, "a file's head", "none of two copies")
    result = ReplayResult()
    _Replay(disk, directory, _Nobody(), result).replay_sealed(head)
    return result.sealed[0].entries


class _Nobody:
    """A sink for `replay_file`, which needs the list only."""

    def hard_state(self, uid: int, term: int, vote: int, commit: int) -> None: ...

    def entry(self, uid: int, entry: Entry) -> None: ...

    def truncate(self, uid: int, from_index: int) -> None: ...

    def floor(self, uid: int, p: int) -> None: ...


class _Replay:
    """One run over the files."""

    __slots__ = (
        "disk", "directory", "sink", "result", "cuts", "chain", "batch", "hurt", "shut", "holes", "entries", "scan",
        "number",
    )  # fmt: skip

    def __init__(
        self,
        disk: Disk,
        directory: str,
        sink: Sink,
        result: ReplayResult,
        cuts: Mapping[int, Cut] = MappingProxyType({}),
    ) -> None:
        self.disk = disk
        self.directory = directory
        self.sink = sink
        self.result = result
        # Per group: last index delivered, number of the batch of the newest row.
        self.chain: dict[int, int] = {}
        self.batch: dict[int, int] = {}
        self.cuts = cuts
        # Groups that are damaged for certain; and those of which no entries are taken at present.
        self.hurt: set[int] = set()
        self.shut: set[int] = {uid for uid, cut in cuts.items() if cut.whole}
        self.number = 0
        # Ranges of batch numbers, both ends included, that nobody can attribute, and the mark of each one's damage.
        self.holes: list[tuple[int, int, int]] = []
        self.entries: list[tuple[int, Entry]] = []
        self.scan: FileScan

    def run(self, files: Sequence[tuple[int, FileHead | None, int]], flushed_through: int) -> None:
        """Replay `files` = (epoch, head, intact copies of it), oldest first."""
        result = self.result
        # Number of the next batch, 0: any. It is known once a file was replayed.
        expected = 0
        before = flushed_through
        for position, (epoch, head, copies) in enumerate(files):
            following = files[position + 1][1] if position + 1 < len(files) else None
            if following is not None and following.previous != epoch:
                following = None
            last = position == len(files) - 1
            result.begin_file(epoch)
            if epoch <= flushed_through:
                if last and head is not None:
                    self._flushed(epoch, head)
                continue
            if before and epoch != before + 1:
                self._unknown(epoch - 1, 0, "a WAL file is missing")
            before = epoch
            if head is None:
                self._unknown(epoch, 0, "both copies of the file's head are damaged")
                if last:
                    # As many numbers as it can have used are skipped.
                    lost = self._blocks(epoch)
                    self._hole(max(expected, 1), expected + lost)
                    expected += lost + 1
                    result.go_on(expected)
                continue
            if copies == 1:
                result.healed.append(Damage(0, epoch, 0, "one copy of the file's head is damaged"))
            if expected and head.first_batch > expected:
                self._unknown(epoch - 1, 0, f"batches {expected} to {head.first_batch - 1} are missing")
                self._hole(expected, head.first_batch - 1)
            expected = self._file(head, following, last)
        self._conclude()

    def replay_sealed(self, head: FileHead) -> None:
        """Replay one file whose last batch is known to be durable."""
        self._file(head, None, False)

    def _flushed(self, epoch: int, head: FileHead) -> None:
        """Walk the newest file, which is flushed, too, only to learn where it ends and the number of the next batch."""
        number = head.first_batch
        with FileScan(self.disk, self.directory, head) as scan:
            for found in scan.walk(0):
                number = (found.number if isinstance(found, BatchFrame) else found.through) + 1
        self.result.follow(epoch, scan.tail, number)

    def _blocks(self, epoch: int) -> int:
        """Return the most batches a file can hold."""
        fd = self.disk.open_file(os.path.join(self.directory, wal_name(epoch)))
        try:
            return self.disk.size(fd) // BLOCK
        finally:
            self.disk.close(fd)

    def _file(self, head: FileHead, following: FileHead | None, last: bool) -> int:
        """Replay one file; return the number of the batch after its last one."""
        result = self.result
        number = head.first_batch
        self.number = number
        result.begin_batches(number)
        self.entries = []
        idle, torn = True, False
        end, next_batch = (following.previous_end, following.first_batch) if following else (0, 0)
        with FileScan(self.disk, self.directory, head) as scan:
            self.scan = scan
            for found, final in _mark_last(scan.walk(end, next_batch), last):
                if isinstance(found, Lost):
                    self._salvage(found)
                    number = found.through + 1
                elif final and not scan.whole(found) and scan.is_readable(found):
                    # A torn write leaves old bytes or new ones, not an error.
                    scan.cut(found.start)
                    torn = True
                else:
                    self._batch(found)
                    number = found.number + 1
                    idle = found.rows == 0
            if last:
                if scan.tail in scan.unreadable:
                    self._unknown(head.epoch, scan.tail, "the disk can't read this block")
                result.continue_in(Current(head, scan.tail, self.entries, idle, torn or scan.leftover))
            else:
                result.sealed.append(Sealed(head.epoch, head.epoch, scan.tail, self.entries))
        result.go_on(number)
        return number

    def _conclude(self) -> None:
        result = self.result
        for uid in self.hurt:
            self.chain.pop(uid, None)
        # Damage without a hole has no number: then nobody is cleared.
        newest = max((through for _, through, _ in self.holes), default=result.next_batch - 1)
        result.conclude(self.chain, self.batch, self.hurt, newest, self.cuts)

    # Damage

    def _hurt(self, uid: int, offset: int, reason: str) -> None:
        self.shut.add(uid)
        self.result.spoiled.add(self.scan.head.epoch)
        damage = Damage(uid, self.scan.head.epoch, offset, reason)
        if self._is_known(uid, self.number, damage.mark):
            return
        self.result.damage.append(damage)
        self.result.sure.discard(uid)
        self.hurt.add(uid)

    def _through(self, uid: int) -> int:
        cut = self.cuts.get(uid)
        return cut.through if cut is not None else 0

    def _is_known(self, uid: int, batch: int, mark: int) -> bool:
        cut = self.cuts.get(uid)
        return cut is not None and cut.covers(batch, mark)

    def _unknown(self, epoch: int, offset: int, reason: str) -> None:
        self.result.damage.append(Damage(0, epoch, offset, reason))
        self.result.sure.clear()

    def _salvage(self, lost: Lost) -> None:
        """Salvage a region without readable headers: trailers tell what they can, the rest is nobody's."""
        epoch = self.scan.head.epoch
        expected = lost.first
        for frame in lost.frames:
            if frame.number > expected:
                self._missing(expected, frame.number - 1, lost.start)
            self.result.healed.append(Damage(0, epoch, frame.start, "the header is damaged; the trailer is not"))
            self._batch(frame)
            expected = frame.number + 1
        if expected <= lost.through:
            self._missing(expected, lost.through, lost.start)

    def _missing(self, first: int, through: int, offset: int) -> None:
        self._unknown(self.scan.head.epoch, offset, f"batches {first} to {through} have neither header nor trailer")
        self._hole(first, through)

    def _hole(self, first: int, through: int) -> None:
        """Note that the damage noted last is of these batches."""
        self.holes.append((first, through, self.result.damage[-1].mark))

    # Batches

    def _directory(self, frame: BatchFrame, metadata: bytes) -> bytes | None:
        """Return the directory, from the header or from the trailer."""
        head = self.scan.head
        size = frame.rows * ROW_BYTES
        directory = metadata[BATCH_BYTES : BATCH_BYTES + size]
        if check_directory(directory, head, frame):
            return directory
        self.result.healed.append(Damage(0, head.epoch, frame.start, "the directory of the header is damaged"))
        directory = self.scan.read(frame.end - BATCH_BYTES - size, size)
        return directory if check_directory(directory, head, frame) else None

    def _batch(self, frame: BatchFrame) -> None:
        """Deliver a batch that is not the last one: metadata is checked, payload bytes are not read."""
        self.number = frame.number
        if self.shut:
            self.shut = self.hurt | {uid for uid in self.shut if self._through(uid) >= frame.number}
        metadata = self.scan.read(frame.start, frame.metadata)
        directory = self._directory(frame, metadata)
        if directory is None:
            # Every record names its group itself, so nothing is lost as long as all of them verify.
            at = BATCH_BYTES + frame.rows * ROW_BYTES
            if not self._records(frame, metadata, 0, at, frame.records):
                self._unknown(self.scan.head.epoch, frame.start, "both directories and a record of a batch are damaged")
                self._hole(frame.number, frame.number)
            return
        for uid, previous, _, offset, records in ROW.iter_unpack(directory):
            self._row(uid, previous, frame)
            self._records(frame, metadata, uid, offset, records)

    def _row(self, uid: int, previous: int, frame: BatchFrame) -> None:
        """Check whether the group's row steps over a hole, or comes out of one."""
        for first, through, mark in self.holes:
            if first <= previous <= through and uid not in self.hurt:
                if not self._is_known(uid, previous, mark):
                    self._hurt(uid, frame.start, f"batch {previous} held records of this group and is lost")
                elif frame.number <= self._through(uid):
                    # What follows was left out when that was met first, and is again.
                    self.shut.add(uid)
                    self.result.spoiled.add(self.scan.head.epoch)
        self.batch[uid] = frame.number

    def _records(self, frame: BatchFrame, metadata: bytes, uid: int, at: int, count: int) -> bool:
        """Check and deliver `count` records from offset `at` of the batch; stop at the first bad one, whose length is
        not known.

        `uid` 0: of any groups. False when there was a bad one. This is the hot loop of a restart: locals only.
        """
        start = frame.start
        base = self.scan.head.salt + start
        epoch = self.scan.head.epoch
        sink, chain, keep, shut, sure = self.sink, self.chain, self.entries, self.shut, self.result.sure
        unpack = RECORD.unpack_from
        for _ in range(count):
            body = at + RECORD_BYTES
            fixed = metadata[at + CHECK_BYTES : body]
            if len(fixed) < RECORD.size:
                return self._bad_record(uid, start + at, "a record is cut off")
            kind, _, _, length, owner, value, payload, offset = unpack(fixed)
            data = metadata[body : body + length]
            if xxh3_64_digest(fixed, xxh3_64_intdigest(data, base + at)) != metadata[at : at + CHECK_BYTES]:
                return self._bad_record(uid, start + at, "a record's checksum is wrong")
            if uid and owner != uid:
                return self._bad_record(uid, start + at, f"a record of group {owner:016x} in this group's run")
            if kind == ENTRY_RECORD:
                try:
                    entry = parse_entry(data)
                except Corrupt as error:
                    return self._bad_record(owner, start + at, str(error))
                last = chain.get(owner)
                index = entry.index
                if shut and owner in shut:
                    self.result.spoiled.add(epoch)
                elif last is None or index <= last + 1:
                    if payload:
                        entry.file = epoch
                        entry.offset = offset
                    entry.tombstone = value
                    chain[owner] = index
                    keep.append((owner, entry))
                    sink.entry(owner, entry)
                else:
                    self._hurt(owner, start + at, f"entry {index} does not continue {last}")
            elif kind == HARD_STATE_RECORD:
                sure.add(owner)
                sink.hard_state(owner, *HARD.unpack(data))
            elif kind == TRUNCATE_RECORD:
                if shut and owner in shut:
                    at = body + length
                    continue
                chain[owner] = value - 1
                sink.truncate(owner, value)
            elif kind == FLOOR_RECORD:
                sink.floor(owner, value)
            elif kind != PIECE_RECORD:
                return self._bad_record(owner, start + at, f"record kind {kind} is unknown")
            at = body + length
        return True

    def _bad_record(self, uid: int, offset: int, reason: str) -> bool:
        if uid:
            self._hurt(uid, offset, reason)
        return False


def _mark_last(walked: Iterator[BatchFrame | Lost], last: bool) -> Iterator[tuple[BatchFrame | Lost, bool]]:
    """Pair each finding with whether it is the last one of the last file: it is known only when the walk has ended."""
    pending: BatchFrame | Lost | None = None
    for found in walked:
        if pending is not None:
            yield pending, False
        pending = found
    if pending is not None:
        yield pending, last
