"""Which watches an event is for, and how far each watch is: pure, no trio.

Watches that stand at the same revision share a track; the one that is furthest behind is moved, and joins the next
when it has come so far. So thousands of watches that resume after a leader change are a few passes over the history.
Used by `watch`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from logyard.machines.kv.command import FROM_KEY, KEYS_ONLY
from logyard.machines.kv.history import KEY, VALUE, Event, Version, value_bytes
from logyard.machines.kv.range import ROW_BYTES, row

PREVIOUS = 1
NO_PUT = 32
NO_DELETE = 64
ROWS_MAX = 4096
"""Events of one push, unless one revision alone has more."""
PUSH_BYTES = 1 << 20
"""As much, with the bytes of their values."""


class Watch(NamedTuple):
    """A range of keys; `flags`: PREVIOUS, KEYS_ONLY (no values), NO_PUT, NO_DELETE."""

    number: int
    key: bytes
    end: bytes
    flags: int


def prefix_end(prefix: bytes) -> bytes:
    """Return the end of the range of all keys that begin with `prefix`."""
    cut = prefix.rstrip(b"\xff")
    return cut[:-1] + bytes([cut[-1] + 1]) if cut else FROM_KEY


class Track:
    """Watches at one revision, found by key."""

    __slots__ = ("watches", "_exact", "_prefixes", "_lengths", "_ranges")

    def __init__(self) -> None:
        self.watches: dict[int, Watch] = {}
        self._exact: dict[bytes, dict[int, Watch]] = {}
        self._prefixes: dict[bytes, dict[int, Watch]] = {}
        self._lengths: dict[int, int] = {}
        self._ranges: dict[int, Watch] = {}

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
    nil], ...]]``; the payloads of values that are wanted, and `next`, the revision to go on with."""

    revisions: list[Any]
    payloads: dict[tuple[int, int], int]
    next: int


def collect(track: Track, revisions: Iterable[tuple[int, tuple[Event, ...]]], start: int) -> Found:
    """Return events for the watches of a track, of revisions from `start` on: as many as fit into a push, at least
    one."""
    found: list[Any] = []
    payloads: dict[tuple[int, int], int] = {}
    rows, size, following = 0, 0, start
    for revision, events in revisions:
        if rows >= ROWS_MAX or size >= PUSH_BYTES:
            break
        shown = [one for event in events if (one := _shown(track, event, payloads)) is not None]
        if shown:
            found.append([revision, shown])
            rows += sum(len(one[0]) for one in shown)
            size += sum(ROW_BYTES + value_bytes(event[0]) for event in events)
        following = revision + 1
    return Found(found, payloads, following)


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
    """All watches of one listener. `place`: on which track a watch is."""

    __slots__ = ("tracks", "place")

    def __init__(self) -> None:
        self.tracks: dict[int, Track] = {}
        self.place: dict[int, Track] = {}

    def add(self, watch: Watch, revision: int) -> None:
        """Add a watch whose next events are those of `revision`."""
        self.remove(watch.number)
        track = self.tracks.get(revision)
        if track is None:
            track = self.tracks[revision] = Track()
        track.add(watch)
        self.place[watch.number] = track

    def remove(self, number: int) -> None:
        """Forget a watch, if it is there."""
        track = self.place.pop(number, None)
        if track is not None:
            track.remove(number)

    def drop(self, revision: int) -> list[int]:
        """Forget the watches at a revision."""
        numbers = list(self.tracks.pop(revision).watches)
        for number in numbers:
            del self.place[number]
        return numbers

    def lowest(self) -> int | None:
        """Return where the watches that are furthest behind stand."""
        while self.tracks:
            revision = min(self.tracks)
            if self.tracks[revision].watches:
                return revision
            del self.tracks[revision]
        return None

    def above(self, revision: int) -> int | None:
        """Return where the next ones stand."""
        return min((at for at in self.tracks if at > revision), default=None)

    def move(self, revision: int, to: int) -> None:
        """Move the track at `revision`, which has come up to `to`; it joins the one that stands there."""
        track = self.tracks.pop(revision)
        there = self.tracks.setdefault(to, track)
        if there is not track:
            for number, watch in track.watches.items():
                there.add(watch)
                self.place[number] = there
