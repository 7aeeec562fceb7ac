"""Where an append log's records lie: runs of records in frames, runs of pieces of long payloads, what a frame brought.

Pure functions of entries. Used by `log`, by the readers of `service` and by `pipeline.directory`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from logyard.engine.machine import Context, Frame, PayloadRef, Position, Release

from .command import is_append


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


def runs_of(pieces: Sequence[PayloadRef]) -> tuple[tuple[int, int, int], ...]:
    """Return pieces in entries that follow one another, of one size, as runs."""
    found: list[tuple[int, int, int]] = []
    for piece in pieces:
        first, size, count = found[-1] if found else (0, 0, 0)
        if count and piece.index == first + count and piece.size == size:
            found[-1] = (first, size, count + 1)
        else:
            found.append((piece.index, piece.size, 1))
    return tuple(found)


def payload_of(context: Context, frame: Frame) -> Iterator[Release]:
    """Yield what a frame brought, dead at its own index."""
    if frame.records == context.records:
        yield Release(Position(context.index, 0), Position(context.index + 1, 0))
    else:
        yield Release(Position(context.index, frame.first), Position(context.index, frame.first + frame.records))
    for first, _, count in runs_of(frame.pieces):
        yield Release(Position(first, 0), Position(first + count, 0))


def slices(
    frames: Iterable[Frame], offset: int, ordinal_from: int = 0, holes: Collection[int] = ()
) -> tuple[list[Slice], int]:
    """Return the append records of one entry from ordinal `ordinal_from` on, the first of which has `offset`; and the
    offset after them. `holes` are the first ordinals of frames that were not applied."""
    found: list[Slice] = []
    ordinal = 0
    for number, frame in enumerate(frames):
        skip = max(0, ordinal_from - ordinal)
        command = frame.commands
        if is_append(command) and skip < frame.records and ordinal not in holes:
            found.append(Slice(offset, number, ordinal + skip, skip, frame.records - skip))
            offset += frame.records - skip
        ordinal += frame.records
    return found, offset
