"""What happened, by revision: the KV machine's events since the last compaction.

Revisions are dense, so an event is found by arithmetic. Invariants: what is in here never changes, so that `capture`
copies one list of chunks and is written by another thread while the machine goes on; a chunk begins at the same
revisions in every history, restored or not, so that members which are equal write equal sections. Used by `state`, and
read by whoever follows the state (`service.kv.watch`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple, TypeAlias

from .command import Value

Version: TypeAlias = tuple[bytes, int, int, int, int, int, Value]
"""One version of a key: key, mod revision, number within that revision, create revision, version, lease, value. A
plain tuple of plain values: the garbage collector does not have to walk over millions of them."""
KEY: Final = 0
MOD: Final = 1
SUB: Final = 2
CREATE: Final = 3
VERSION: Final = 4
LEASE: Final = 5
VALUE: Final = 6

Event: TypeAlias = tuple[Version, Version | None]
"""A version and the one that it took the place of (which may be a deletion)."""
Events: TypeAlias = tuple[Event, ...]
"""All events of one revision, in order."""

FIRST_REVISION = 1
"""Of an empty state; the first change makes the next one (as in etcd)."""
CHUNK_BITS = 10
CHUNK = 1 << CHUNK_BITS
EVENT_BYTES = 256
"""What an event costs in memory beside key and value, roughly."""


def value_bytes(version: Version | None) -> int:
    """Return bytes of a version's value, wherever it lies."""
    value = None if version is None else version[VALUE]
    if value is None:
        return 0
    return len(value) if type(value) is bytes else value[2]


def event_bytes(event: Event) -> int:
    """Return what dropping an event gives back: its share of memory and the value that nobody can read any more."""
    version, before = event
    value = None if before is None else before[VALUE]
    if type(value) is bytes:
        return EVENT_BYTES + len(version[KEY]) + len(value)
    return EVENT_BYTES + len(version[KEY]) + value_bytes(before)


class Captured(NamedTuple):
    """A history as it was: `chunks` begin at revision `base`, those below `first` are dropped."""

    base: int
    first: int
    chunks: tuple[list[Events], ...]

    def revisions(self) -> Iterator[Events]:
        """Yield the events of each revision, in order."""
        for _, events in self.parts():
            yield from events

    def parts(self) -> Iterator[tuple[int, list[Events]]]:
        """Yield the same in parts that stay as they are while nothing is dropped: (first revision, the events of
        each)."""
        for number, chunk in enumerate(self.chunks):
            base = self.base + (number << CHUNK_BITS)
            skip = max(0, self.first - base)
            if skip < len(chunk):
                yield base + skip, chunk[skip:]


class History:
    """Events of revisions `first` up to, but without, `end`."""

    __slots__ = ("first", "end", "size", "_base", "_chunks")

    def __init__(self, first: int) -> None:
        self.first = first
        self.end = first
        # Bytes by `event_bytes`.
        self.size = 0
        # What is missing of its first chunk is dropped.
        dropped = (first - FIRST_REVISION - 1) & (CHUNK - 1)
        self._base = first - dropped
        self._chunks: list[list[Events]] = [[()] * dropped] if dropped else []

    def append(self, events: Events) -> None:
        """Append the events of revision `end`."""
        end = self.end
        if not (end - self._base) & (CHUNK - 1):
            self._chunks.append([])
        self._chunks[-1].append(events)
        self.end = end + 1
        for event in events:
            self.size += event_bytes(event)

    def at(self, revision: int) -> Events:
        """Return the events of one revision."""
        number = revision - self._base
        return self._chunks[number >> CHUNK_BITS][number & (CHUNK - 1)]

    def drop(self) -> Events:
        """Forget revision `first`; return what its events were."""
        events = self.at(self.first)
        self.first += 1
        for event in events:
            self.size -= event_bytes(event)
        if self.first - self._base == CHUNK:
            del self._chunks[0]
            self._base += CHUNK
        return events

    def capture(self) -> Captured:
        """Return the history as it is now: later changes do not show."""
        if not self._chunks:
            return Captured(self.first, self.first, ())
        return Captured(self._base, self.first, (*self._chunks[:-1], list(self._chunks[-1])))
