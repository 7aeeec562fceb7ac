"""Which watches an event is for, and how far each watch is: pure, no trio.

Watches that stand at the same revision share a track; the one that is furthest behind is moved, and joins the next
when it has come so far. So thousands of watches that resume after a leader change are a few passes over the history.
Used by `watch`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from logyard.machines.kv.command import FROM_KEY, KEYS_ONLY
from logyard.machines.kv.history import KEY, VALUE, Event, Events, Version
from logyard.machines.kv.range import ROW_BYTES, Row, row

PREVIOUS = 1
NO_PUT = 32
NO_DELETE = 64
PARTS = 128
"""Its client joins the parts of a long revision; one that does not gets it whole, or not at all."""
ROWS_MAX = 4096
"""Events of one push, unless one revision alone has more."""
PUSH_BYTES = 1 << 20
"""As much, with the bytes of their values."""
PART_BYTES = 4 << 20
"""Rows of one revision in one push: a longer one goes in parts."""
PART_EVENTS = 65_536
"""Events that are looked at in one turn, unless one revision has more and can't be cut, whoever watches them."""
NUMBER_BYTES = 5
"""A watch's share of a row that it sees."""


class Watch(NamedTuple):
    """A range of keys; `flags`: PREVIOUS, KEYS_ONLY (no values), NO_PUT, NO_DELETE, PARTS."""

    number: int
    key: bytes
    end: bytes
    flags: int


def prefix_end(prefix: bytes) -> bytes:
    """Return the end of the range of all keys that begin with `prefix`."""
    cut = prefix.rstrip(b"\xff")
    return cut[:-1] + bytes([cut[-1] + 1]) if cut else FROM_KEY


class Track:
    """Watches at one revision, `at`, found by key."""

    __slots__ = ("at", "watches", "_exact", "_prefixes", "_lengths", "_ranges")

    def __init__(self, at: int = 0) -> None:
        self.at = at
        self.watches: dict[int, Watch] = {}
        self._exact: dict[bytes, dict[int, Watch]] = {}
        self._prefixes: dict[bytes, dict[int, Watch]] = {}
        self._lengths: dict[int, int] = {}
        self._ranges: dict[int, Watch] = {}

    def move(self, to: int) -> None:
        """Move it to another revision."""
        self.at = to

    def add(self, watch: Watch) -> None:
        """Add another watch."""
        self.watches[watch.number] = watch
        if not watch.end:
            self._exact.setdefault(watch.key, {})[watch.number] = watch
        elif watch.end == prefix_end(watch.key):
            if watch.key not in self._prefixes:
                self._prefixes[watch.key] = {}
                self._lengths[len(watch.key)] = self._lengths.get(len(watch.key), 0) + 1
            self._prefixes[watch.key][watch.number] = watch
        else:
            self._ranges[watch.number] = watch

    def remove(self, number: int) -> None:
        """Remove a watch that is on this track."""
        watch = self.watches.pop(number)
        if self._ranges.pop(number, None) is not None:
            return
        table = self._exact if not watch.end else self._prefixes
        del table[watch.key][number]
        if not table[watch.key]:
            del table[watch.key]
            if watch.end:
                self._lengths[len(watch.key)] -= 1
                if not self._lengths[len(watch.key)]:
                    del self._lengths[len(watch.key)]

    def joins(self) -> bool:
        """Return whether all of them join the parts of a revision."""
        return all(watch.flags & PARTS for watch in self.watches.values())

    def matching(self, key: bytes) -> Iterator[Watch]:
        """Yield the watches that a key is in the range of."""
        if key in self._exact:
            yield from self._exact[key].values()
        for length in self._lengths:
            found = self._prefixes.get(key[:length])
            if found and len(key) >= length:
                yield from found.values()
        for watch in self._ranges.values():
            if watch.key <= key and (watch.end == FROM_KEY or key < watch.end):
                yield watch


class Found(NamedTuple):
    """What to push: for each revision with events ``[revision, [[watches, row or key of a deletion, previous row or
    nil], ...]]``; the payloads of values that are wanted, and `next`, the revision to go on with, from event `rest` on:
    if that is not 0, this is a part of it."""

    revisions: list[Any]
    payloads: dict[tuple[int, int], int]
    next: int
    rest: int = 0


def collect(track: Track, revisions: Iterable[tuple[int, Events]], start: int, skip: int = 0) -> Found:
    """Return events for the watches of a track, of revisions from `start` on: as many as fit into a push, at least
    one, or a part of that. `skip`: events of the first one that were shown already; its next part is returned."""
    found: list[Any] = []
    payloads: dict[tuple[int, int], int] = {}
    rows, size, looked, following = 0, 0, 0, start
    for revision, events in revisions:
        if rows >= ROWS_MAX or size >= PUSH_BYTES or looked >= PART_EVENTS:
            break
        looked += len(events)
        named: dict[tuple[int, int], int] = {}
        shown, length, end = _part(track, events, skip, named)
        if skip or end < len(events):
            # In parts, which travel alone.
            if found:
                break
            whole = end == len(events)
            return Found([[revision, shown]], named, revision + whole, 0 if whole else end)
        if shown:
            found.append([revision, shown])
            payloads |= named
            rows += sum(len(one[0]) for one in shown)
            size += length + sum(named.values())
        following = revision + 1
    return Found(found, payloads, following)


def _part(
    track: Track, events: Events, skip: int, payloads: dict[tuple[int, int], int]
) -> tuple[list[list[Any]], int, int]:
    """Return what is shown of a revision from event `skip` on, how long that is, and the event to go on with."""
    shown: list[list[Any]] = []
    size, whole = 0, False
    for at in range(skip, len(events)):
        if (size >= PART_BYTES or at - skip >= PART_EVENTS) and not whole:
            if track.joins():
                return shown, size, at
            whole = True
        one = _shown(track, events[at], payloads)
        if one is not None:
            shown.append(one)
            size += NUMBER_BYTES * len(one[0]) + _length(one[1]) + (0 if one[2] is None else _length(one[2]))
    return shown, size, len(events)


def _length(row: Row) -> int:
    return ROW_BYTES + len(row[0]) + (len(row[5]) if type(row[5]) is bytes else 0)


def _shown(track: Track, event: Event, payloads: dict[tuple[int, int], int]) -> list[Any] | None:
    version, before = event
    unwanted = NO_DELETE if version[VALUE] is None else NO_PUT
    watches = [watch for watch in track.matching(version[KEY]) if not watch.flags & unwanted]
    if not watches:
        return None
    values = any(not watch.flags & KEYS_ONLY for watch in watches)
    was = before if before is not None and before[VALUE] is not None else None
    previous = was if any(watch.flags & PREVIOUS for watch in watches) else None
    for one in (version, previous) if values else ():
        _name(one, payloads)
    flags = 0 if values else KEYS_ONLY
    shown = row(version, flags) if version[VALUE] is not None else (version[KEY], 0, version[1], 0, 0, None)
    return [[watch.number for watch in watches], shown, None if previous is None else row(previous, flags)]


def _name(version: Version | None, payloads: dict[tuple[int, int], int]) -> None:
    value = None if version is None else version[VALUE]
    if type(value) is tuple:
        payloads[value[:2]] = value[2]


class Tracks:
    """All watches of one listener, on tracks by their revision, none of which is empty. `place`: on which one a watch
    is."""

    __slots__ = ("tracks", "place")

    def __init__(self) -> None:
        self.tracks: dict[int, Track] = {}
        self.place: dict[int, Track] = {}

    def add(self, watch: Watch, revision: int) -> None:
        """Add a watch whose next events are those of `revision`."""
        self.remove(watch.number)
        track = self.tracks.get(revision)
        if track is None:
            track = self.tracks[revision] = Track(revision)
        track.add(watch)
        self.place[watch.number] = track

    def remove(self, number: int) -> None:
        """Forget a watch, if it is there."""
        track = self.place.pop(number, None)
        if track is not None:
            track.remove(number)
            if not track.watches:
                del self.tracks[track.at]

    def drop(self, revision: int) -> list[int]:
        """Forget the watches at a revision."""
        numbers = list(self.tracks.pop(revision).watches)
        for number in numbers:
            del self.place[number]
        return numbers

    def lowest(self) -> int | None:
        """Return where the watches that are furthest behind stand."""
        return min(self.tracks, default=None)

    def above(self, revision: int) -> int | None:
        """Return where the next ones stand."""
        return min((at for at in self.tracks if at > revision), default=None)

    def move(self, revision: int, to: int) -> None:
        """Move the track at `revision`, which has come up to `to`; it joins the one that stands there."""
        track = self.tracks.pop(revision)
        track.move(to)
        there = self.tracks.setdefault(to, track)
        if there is not track:
            for number, watch in track.watches.items():
                there.add(watch)
                self.place[number] = there
