"""The append log: dense offsets over the records of committed frames; truncation from the front.

State is `start`, `end` and sparse anchors (offset, index): one at least every 1,024 entries or 256 KiB, so it stays
small for any log; and the few frames that a session's guard kept from it.
A record's head and body are payload: apply sees only how many records a frame carries. A lookup starts at an anchor and
counts the records of append frames from there (`machines.log.locate`). Applied by `engine.host.applier`.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

import msgpack

from logyard.engine.errors import OutOfRange
from logyard.engine.machine import (
    Applied,
    Batch,
    Context,
    Effect,
    Frame,
    PayloadRange,
    PayloadRef,
    Position,
    Reject,
    Release,
    Sections,
)

from .command import APPEND, APPEND_REPLY, TRUNCATE, TRUNCATE_COMMAND, TRUNCATE_REPLY, expected_offset

ANCHOR_ENTRIES = 1024
ANCHOR_BYTES = 256 * 1024


class Slice(NamedTuple):
    """A run of records inside one frame: `ordinal` is the first one's number in its entry, `skip` its number in the
    frame."""

    offset: int
    frame: int
    ordinal: int
    skip: int
    records: int


class Long(NamedTuple):
    """The payload of one record that came in pieces: `size` in bytes; `runs` of pieces in the order of their bytes, as
    (index of the first, bytes of each, pieces): one an entry, at ordinal 0."""

    size: int
    runs: tuple[tuple[int, int, int], ...]

    @property
    def first(self) -> int:
        """The lowest index of a piece."""
        return min(index for index, _, _ in self.runs)


class AppendLog:
    """A log of records with dense offsets. Offsets start at 0, or at the `start` it is made with, and are never reused.

    Commands: see `machines.command`. Replies: APPEND, APPEND_AT -> (first offset, records); TRUNCATE -> (start).
    APPEND_AT is for logs made with a `start`: that is part of a group's definition, so all members agree on it, and
    one that does not know the command does not know the argument either (decision 0014).
    """

    __slots__ = (
        "start", "end", "start_position", "anchors", "entries_since", "bytes_since", "last_index", "holes",
        "long", "placed", "_ahead", "_behind",
    )  # fmt: skip
    version = 1

    def __init__(self, start: int | None = None) -> None:
        self.placed = start is not None
        self.start = start or 0
        self.end = self.start
        self.start_position = Position(0, 0)
        self.anchors: list[tuple[int, int]] = []
        self.entries_since = 0
        self.bytes_since = 0
        self.last_index = 0
        # Frames that are in the log and not in the state (duplicates, refusals), whose payloads are released: (index,
        # first ordinal, records; 0: the whole entry).
        self.holes: list[tuple[int, int, int]] = []
        # Payloads that came in pieces, by offset. Pieces lie before their record: `_ahead` is a heap of (first piece,
        # offset) of those behind the start, `_behind` holds the records some of whose pieces lie before it.
        self.long: dict[int, Long] = {}
        self._ahead: list[tuple[int, int]] = []
        self._behind: set[int] = set()

    def apply_batch(self, context: Context, frames: Sequence[Frame]) -> Batch:
        """One entry: every frame gets a reply; a truncation releases what lies before it."""
        replies: list[bytes | Reject] = []
        effects: list[Effect] = []
        size = 0
        first = self.end
        for frame in frames:
            if frame.commands == APPEND or (self.placed and expected_offset(frame.commands) == self.end):
                replies.append(APPEND_REPLY.pack(self.end, frame.records))
                if frame.pieces:
                    self._keep(self.end, frame)
                self.end += frame.records
                size += frame.pack_bytes + frame.large_bytes
            else:
                reply = self._other(context.index, frame, frames, effects)
                replies.append(reply)
                if isinstance(reply, Reject):
                    self._hole(context, frame.first, frame.records)
        if context.skipped:
            for ordinal, records in context.skipped:
                self._hole(context, ordinal, records)
        if self.end != first:
            self._anchor(context.index, first, size)
        self.last_index = context.index
        return Batch(replies, effects)

    def apply(self, context: Context, command: bytes, refs: tuple[PayloadRef, ...]) -> Applied:
        """One command at a time: `apply_batch` is what the engine calls."""
        frame = Frame(1, 0, 1, len(command), 0, 0, 0, 0, command)
        batch = self.apply_batch(context, (frame,))
        reply = batch.replies[0]
        if isinstance(reply, Reject):
            raise reply
        return Applied(reply, batch.effects)

    def _hole(self, context: Context, ordinal: int, records: int) -> None:
        insort(self.holes, (context.index, ordinal, 0 if records == context.records else records))

    def _anchor(self, index: int, offset: int, size: int) -> None:
        # The anchor stands before the entry, so a lookup never has to go back.
        if not self.anchors or self.entries_since >= ANCHOR_ENTRIES or self.bytes_since >= ANCHOR_BYTES:
            self.anchors.append((offset, index))
            self.entries_since = 0
            self.bytes_since = 0
        self.entries_since += 1
        self.bytes_since += size

    def _keep(self, offset: int, frame: Frame) -> None:
        """A record whose payload came in pieces. It gets an anchor of its own: the way to it leads past all of them."""
        self.long[offset] = found = Long(frame.extent, _runs(frame.pieces))
        heapq.heappush(self._ahead, (found.first, offset))
        self.bytes_since = max(self.bytes_since, ANCHOR_BYTES)

    def _cut(self, offset: int, position: Position, frames: Sequence[Frame], effects: list[Effect]) -> None:
        """Release what lies before `position`, but for pieces of records that stay; and pieces of records that go,
        although they lie before the old start."""
        while self._ahead and self._ahead[0][0] < position.index:
            self._behind.add(heapq.heappop(self._ahead)[1])
        kept: list[tuple[int, int, int]] = []
        for at in sorted(self._behind):
            if at < offset:
                self._behind.discard(at)
                effects += (
                    Release(Position(first, 0), Position(first + count, 0)) for first, _, count in self.long[at].runs
                )
            else:
                kept += self.long[at].runs
        for frame in frames:
            # A record of this very entry that was not reached yet.
            kept += _runs(frame.pieces)
        for at in list(takewhile(lambda at: at < offset, self.long)):
            del self.long[at]
        first = self.start_position
        for index, _, count in sorted(kept):
            if position <= (index, 0):
                break
            if first < (index, 0):
                effects.append(Release(first, Position(index, 0)))
            first = max(first, Position(index + count, 0))
        if first < position:
            effects.append(Release(first, position))

    def _other(self, at: int, frame: Frame, frames: Sequence[Frame], effects: list[Effect]) -> bytes | Reject:
        command = frame.commands
        expected = expected_offset(command)
        if self.placed and expected is not None:
            return Reject("out_of_range", f"can't append at {expected}: the log ends at {self.end}")
        if (
            not frame.uniform
            or not command
            or command[0] != TRUNCATE
            or len(command) != TRUNCATE_COMMAND.size
            or frame.pieces
        ):
            return Reject("bad_request", "the append log knows append and truncate only")
        _, offset, index, ordinal = TRUNCATE_COMMAND.unpack(command)
        if offset > self.end:
            return Reject("out_of_range", f"can't truncate before {offset}: the log ends at {self.end}")
        if offset > self.start:
            position = Position(index, ordinal)
            if position < self.start_position:
                return Reject("bad_request", f"position {tuple(position)} lies before the start of the log")
            if position > Position(at, 0):
                # Records that are not written yet would be released with the others, and lost when they come.
                return Reject("bad_request", f"position {tuple(position)} lies behind entry {at}, which names it")
            self._cut(offset, position, frames, effects)
            self.start, self.start_position = offset, position
            keep = max(0, bisect_right(self.anchors, (offset, index)) - 1)
            del self.anchors[:keep]
            del self.holes[: bisect_left(self.holes, (*position, 0))]
        return TRUNCATE_REPLY.pack(self.start)

    def snapshot(self) -> Sections:
        """One section, a few bytes plus 2 numbers an anchor."""
        state = (self.start, self.end, tuple(self.start_position), self.anchors, self.entries_since, self.bytes_since)
        return {"log": msgpack.packb((*state, self.last_index, self.holes, list(self.long.items())))}

    def restore(self, sections: Sections) -> None:
        """Replace the state."""
        start, end, position, anchors, entries, size, last, *rest = msgpack.unpackb(sections["log"])
        self.start, self.end, self.start_position = start, end, Position(*position)
        self.anchors = [(offset, index) for offset, index in anchors]
        self.entries_since, self.bytes_since, self.last_index = entries, size, last
        # A snapshot of the first release has none.
        self.holes = [(index, ordinal, records) for index, ordinal, records in rest[0]] if rest else []
        self.long = {at: Long(total, tuple(map(tuple, runs))) for at, (total, runs) in rest[1]} if rest[1:] else {}
        behind = position[0]
        self._behind = {at for at, one in self.long.items() if one.first < behind}
        self._ahead = [(one.first, at) for at, one in self.long.items() if at not in self._behind]
        heapq.heapify(self._ahead)

    def live_refs(self) -> Iterator[PayloadRange]:
        """Everything from the start on. (A truncation's own empty pack counts as live until the start passes it.)"""
        first, end = self.start_position, Position(self.last_index + 1, 0)
        for index, ordinal, records in self.holes:
            if Position(index, ordinal) > first:
                yield PayloadRange(first, Position(index, ordinal))
            first = max(first, Position(index, ordinal + records) if records else Position(index + 1, 0))
        yield PayloadRange(first, max(first, end))
        for at in self._behind:
            for piece, _, count in self.long[at].runs:
                yield PayloadRange(Position(piece, 0), Position(piece + count, 0))

    def holes_of(self, index: int) -> Collection[int]:
        """The first ordinals of the frames of entry `index` that were not applied."""
        if not self.holes:
            return ()
        low, high = bisect_left(self.holes, (index, 0, 0)), bisect_left(self.holes, (index + 1, 0, 0))
        return {ordinal for _, ordinal, _ in self.holes[low:high]}

    def query(self, request: bytes) -> bytes:
        """``["bounds"]`` -> ``[start, end]``, ``["anchors"]`` -> how many there are; msgpack. Raises `Reject`."""
        try:
            asked = msgpack.unpackb(request)
        except (ValueError, msgpack.UnpackException):
            asked = None
        if asked == ["bounds"]:
            answer: bytes = msgpack.packb((self.start, self.end))
        elif asked == ["anchors"]:
            answer = msgpack.packb(len(self.anchors))
        else:
            raise Reject("bad_request", "the append log answers bounds and anchors")
        return answer

    def anchor(self, offset: int) -> tuple[int, Position]:
        """The (offset, position) from which to count towards `offset`. Raises `OutOfRange`."""
        if not self.start <= offset < self.end:
            raise OutOfRange(
                f"offset {offset} is outside of {self.start}..{self.end - 1}"
                if self.end > self.start
                else f"offset {offset} is outside of an empty log that goes on at {self.end}",
                start=self.start,
                end=self.end,
            )
        found = bisect_right(self.anchors, offset, key=_offset) - 1
        # What lies before the start may be gone already, so an anchor below it is no place to count from.
        if found < 0 or self.anchors[found][0] <= self.start:
            return self.start, self.start_position
        return self.anchors[found][0], Position(self.anchors[found][1], 0)


def _runs(pieces: Sequence[PayloadRef]) -> tuple[tuple[int, int, int], ...]:
    """Pieces in entries that follow one another, of one size, as runs."""
    found: list[tuple[int, int, int]] = []
    for piece in pieces:
        first, size, count = found[-1] if found else (0, 0, 0)
        if count and piece.index == first + count and piece.size == size:
            found[-1] = (first, size, count + 1)
        else:
            found.append((piece.index, piece.size, 1))
    return tuple(found)


def _offset(anchor: tuple[int, int]) -> int:
    return anchor[0]


def slices(
    frames: Iterable[Frame], offset: int, ordinal_from: int = 0, holes: Collection[int] = ()
) -> tuple[list[Slice], int]:
    """The append records of one entry from ordinal `ordinal_from` on, the first of which has `offset`; and the offset
    after them. `holes` are the first ordinals of frames that were not applied."""
    found: list[Slice] = []
    ordinal = 0
    for number, frame in enumerate(frames):
        skip = max(0, ordinal_from - ordinal)
        command = frame.commands
        appends = command == APPEND or expected_offset(command) is not None
        if appends and skip < frame.records and ordinal not in holes:
            found.append(Slice(offset, number, ordinal + skip, skip, frame.records - skip))
            offset += frame.records - skip
        ordinal += frame.records
    return found, offset
