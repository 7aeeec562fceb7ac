"""Finding the batches of one WAL file: heads, the chain of headers, and what lies where the chain is broken.

Invariant: a batch is looked for only where the one before it ends; where no header stands there, any valid header
behind proves that batches are lost (batch n+1 is never written before n is durable), and none proves that the log
ends. Called by `wal_replay` alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import NamedTuple

from xxhash import xxh3_64_digest, xxh3_64_intdigest

from logyard.protocol.errors import Corrupt

from ..disk.door import Disk
from ..entry import parse_entry, split_bodies, verify_bodies
from .record import (
    BATCH_BYTES,
    BLOCK,
    CHECK_BYTES,
    DATA_START,
    ENTRY_RECORD,
    HEADER_MAGIC,
    RECORD,
    RECORD_BYTES,
    ROW_BYTES,
    TRAILER_MAGIC,
    BatchFrame,
    FileHead,
    check_directory,
    decode_file_head,
    decode_frame,
    format_of,
)
from .wal_files import wal_name

WINDOW = 64 * 1024
"""Bytes read at once: many small batches, or the metadata of a big one, without the payloads behind it."""
SWEEP = 1 << 20
"""Bytes read at once when looking for headers behind a break."""


class Heads(NamedTuple):
    """What the two copies of a file's head say. `copies` counts the intact ones."""

    head: FileHead | None
    copies: int
    format: int


class Lost(NamedTuple):
    """Batches `first` to `through` have no header. They lie from `start` on; `frames` were found by their trailers."""

    first: int
    through: int
    start: int
    frames: list[BatchFrame]


def read_heads(disk: Disk, directory: str, epochs: Sequence[int]) -> dict[int, Heads]:
    """Return the heads of all files. A head that names another epoch than the file's name is none."""
    found: dict[int, Heads] = {}
    for epoch in epochs:
        fd = disk.open_file(os.path.join(directory, wal_name(epoch)))
        try:
            blocks = [_read(disk, fd, BLOCK, at, None) for at in (0, BLOCK)]
        finally:
            disk.close(fd)
        heads = [head for block in blocks if (head := decode_file_head(block)) is not None and head.epoch == epoch]
        found[epoch] = Heads(heads[0] if heads else None, len(heads), max(map(format_of, blocks)))
    return found


def _read(disk: Disk, fd: int, length: int, offset: int, unreadable: set[int] | None) -> bytes:
    """Read; blocks the disk can't give are zeros, which no checksum takes, and are noted."""
    try:
        return disk.read(fd, length, offset)
    except OSError:
        parts = []
        for at in range(offset - offset % BLOCK, offset + length, BLOCK):
            try:
                block = disk.read(fd, BLOCK, at)
            except OSError:
                block = bytes(BLOCK)
                if unreadable is not None:
                    unreadable.add(at)
            parts.append(block)
        joined = b"".join(parts)
        return joined[offset % BLOCK : offset % BLOCK + length]


class FileScan:
    """One open file. `tail` is where its batches end, once `walk` has ended; `leftover` says that bytes stand there."""

    __slots__ = ("head", "tail", "leftover", "unreadable", "_disk", "_path", "_fd", "_size", "_window", "_base")

    def __init__(self, disk: Disk, directory: str, head: FileHead) -> None:
        self.head = head
        self.tail = DATA_START
        self.leftover = False
        self.unreadable: set[int] = set()
        self._disk = disk
        self._path = os.path.join(directory, wal_name(head.epoch))
        self._fd = -1
        self._size = 0
        self._window = b""
        self._base = 0

    def __enter__(self) -> FileScan:
        self._fd = self._disk.open_file(self._path)
        self._size = self._disk.size(self._fd)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._disk.close(self._fd)

    def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes at `offset`; fewer at the end of the file."""
        at = offset - self._base
        if at >= 0 and at + length <= len(self._window):
            return self._window[at : at + length]
        if length >= WINDOW:
            return _read(self._disk, self._fd, length, offset, self.unreadable)
        # Behind a payload that was skipped lies one batch's metadata, then probably the next payload: it is not read.
        skipped = offset > self._base + len(self._window) > 0
        size = -(-length // BLOCK) * BLOCK if skipped else WINDOW
        self._window = _read(self._disk, self._fd, size, offset, self.unreadable)
        self._base = offset
        return self._window[:length]

    def cut(self, tail: int) -> None:
        """Let the file end before what was found last."""
        self.tail = tail

    def header(self, position: int) -> BatchFrame | None:
        """Return the batch that starts at `position`, by its header. The window stays: a peek ahead does not read
        payloads."""
        at = position - self._base
        if 0 <= at <= len(self._window) - BATCH_BYTES:
            block = self._window[at : at + BATCH_BYTES]
        else:
            block = _read(self._disk, self._fd, BATCH_BYTES, position, self.unreadable)
        frame = decode_frame(block, 0, HEADER_MAGIC, self.head, position)
        return frame if frame is not None and frame.start == position and frame.end <= self._size else None

    def trailer(self, end: int) -> BatchFrame | None:
        """Return the batch that ends at `end`, by its trailer."""
        position = end - BATCH_BYTES
        block = _read(self._disk, self._fd, BATCH_BYTES, position, self.unreadable)
        frame = decode_frame(block, 0, TRAILER_MAGIC, self.head, position)
        return frame if frame is not None and frame.end == end else None

    def walk(self, end: int, next_batch: int = 0) -> Iterator[BatchFrame | Lost]:
        """Yield batches in order. `end` and `next_batch` come from the next file's head; 0: there is none, find the
        tail."""
        limit = end or self._size
        position, number = DATA_START, self.head.first_batch
        while position < limit:
            frame = self.header(position)
            if frame is None or frame.number < number or frame.end > limit:
                frame = self._sweep(position + BLOCK, limit, number)
                if frame is None:
                    if end:
                        yield self._lost(position, end, number, max(number, next_batch - 1))
                        position = end
                    elif position in self.unreadable and (last := self._by_trailer(position, number)) is not None:
                        yield Lost(number, number, position, [last])
                        position = last.end
                    break
            if frame.start != position or frame.number != number:
                yield self._lost(position, frame.start, number, frame.number - 1)
            yield frame
            position, number = frame.end, frame.number + 1
        self.tail = position
        self.leftover = position < self._size and any(self.read(position, BLOCK))

    def _sweep(self, position: int, limit: int, number: int) -> BatchFrame | None:
        """Return the first valid header from `position` on that a later batch may have."""
        while position < limit:
            chunk = _read(self._disk, self._fd, min(SWEEP, limit - position), position, self.unreadable)
            if not chunk:
                return None
            at = chunk.find(HEADER_MAGIC)
            while at >= 0:
                if at % BLOCK == 0:
                    frame = self.header(position + at)
                    if frame is not None and frame.number > number and frame.end <= limit:
                        return frame
                at = chunk.find(HEADER_MAGIC, at + 1)
            position += len(chunk)
        return None

    def _lost(self, start: int, stop: int, first: int, through: int) -> Lost:
        """Look for trailers from the back: the last lost batch ends where the next one starts."""
        frames: list[BatchFrame] = []
        at, below = stop, through + 1
        while at > start:
            frame = self.trailer(at)
            if frame is not None and frame.start >= start and first <= frame.number < below:
                frames.append(frame)
                at, below = frame.start, frame.number
            else:
                at -= BLOCK
        return Lost(first, through, start, frames[::-1])

    def _by_trailer(self, start: int, number: int) -> BatchFrame | None:
        """Return the last batch, whose header the disk can't read."""
        for end in range(start + 2 * BLOCK, self._size + 1, BLOCK):
            frame = self.trailer(end)
            if frame is not None and frame.start == start and frame.number == number:
                return frame
        return None

    def is_readable(self, frame: BatchFrame) -> bool:
        """Return whether the disk gave all blocks of a batch that were asked for."""
        return not any(frame.start <= at < frame.end for at in self.unreadable)

    def whole(self, frame: BatchFrame) -> bool:
        """Return whether the very last batch counts: only if every byte that matters is there, payloads included (law
        8)."""
        if self.trailer(frame.end) != frame:
            return False
        metadata = self.read(frame.start, frame.metadata)
        size = frame.rows * ROW_BYTES
        directory = metadata[BATCH_BYTES : BATCH_BYTES + size]
        if not check_directory(directory, self.head, frame):
            return False
        if self.read(frame.end - BATCH_BYTES - size, size) != directory:
            return False
        at = BATCH_BYTES + size
        for _ in range(frame.records):
            fixed = metadata[at + CHECK_BYTES : at + RECORD_BYTES]
            if len(fixed) < RECORD.size:
                return False
            kind, _, _, length, uid, _, payload, offset = RECORD.unpack(fixed)
            data = metadata[at + RECORD_BYTES : at + RECORD_BYTES + length]
            seed = xxh3_64_intdigest(data, self.head.salt + frame.start + at)
            if xxh3_64_digest(fixed, seed) != metadata[at : at + CHECK_BYTES]:
                return False
            if kind == ENTRY_RECORD and payload and not self._payload_whole(uid, data, offset, payload):
                return False
            at += RECORD_BYTES + length
        return at == frame.metadata

    def _payload_whole(self, uid: int, data: bytes, offset: int, length: int) -> bool:
        entry = parse_entry(data)
        entry.bodies = split_bodies(data, memoryview(self.read(offset, length)))
        try:
            verify_bodies(uid, entry)
        except Corrupt:
            return False
        return True
