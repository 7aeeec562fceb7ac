"""The keys of the KV machine: what there is now, what there was, and how one revision follows another.

Invariants: a revision is what one transaction changed, each key at most once, and it is written by `commit` or not at
all; `live` and `gone` are the keys of `keys` by whether their newest version is a deletion; a payload dies with the
last version that names it, when nobody can read that any more. Metadata only. Used by `kv`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

import immutables
from sortedcontainers import SortedList

from .budget import Budget
from .command import FROM_KEY, Refusal, Value
from .history import CREATE, FIRST_REVISION, KEY, LEASE, MOD, SUB, VALUE, VERSION, Event, History, Version
from .leases import Leases


class State:
    """See the module. `released` collects (index, ordinal) of payloads that nobody can name any more."""

    __slots__ = (
        "revision", "compacted", "keys", "live", "gone", "history", "leases", "released", "_events",
    )  # fmt: skip

    def __init__(self) -> None:
        self.revision = FIRST_REVISION
        # Reads below it are refused; what lies below is dropped soon, not necessarily at once.
        self.compacted = 0
        self.keys: immutables.Map[bytes, Version] = immutables.Map()
        self.live: SortedList[bytes] = SortedList()
        self.gone: SortedList[bytes] = SortedList()
        self.history = History(FIRST_REVISION + 1)
        self.leases = Leases()
        self.released: list[tuple[int, int]] = []
        self._events: list[Event] = []

    # Changes: of one revision, until `commit`, or `abandon`.

    def put(self, key: bytes, value: Value, lease: int) -> Version | None:
        """Put a new version of a key; return the one before, if there was one."""
        before = self.keys.get(key)
        revision = self.revision + 1
        if before is None or before[VALUE] is None:
            self.live.add(key)
            if before is not None:
                self.gone.remove(key)
            self._change((key, revision, len(self._events), revision, 1, lease, value), before)
            previous = None
        else:
            if before[LEASE] and before[LEASE] != lease:
                self.leases.detach(before[LEASE], key)
            self._change((key, revision, len(self._events), before[CREATE], before[VERSION] + 1, lease, value), before)
            previous = before
        if lease:
            self.leases.attach(lease, key)
        return previous

    def put_alone(self, key: bytes, value: bytes) -> None:
        """Put a new version, without a lease, as a revision of its own: `put` and `commit`, in one step where the key
        is there without a lease, which is most of what comes."""
        keys = self.keys
        before = keys.get(key)
        if before is None or before[LEASE] or before[VALUE] is None:
            self.put(key, value, 0)
            self.commit()
            return
        revision = self.revision = self.revision + 1
        version = (key, revision, 0, before[CREATE], before[VERSION] + 1, 0, value)
        self.keys = keys.set(key, version)
        self.history.append(((version, before),))

    def delete(self, key: bytes) -> Version | None:
        """Delete one key; return what it was, if it was there."""
        before = self.keys.get(key)
        if before is None or before[VALUE] is None:
            return None
        if before[LEASE]:
            self.leases.detach(before[LEASE], key)
        self.live.remove(key)
        self.gone.add(key)
        self._change((key, self.revision + 1, len(self._events), 0, 0, 0, None), before)
        return before

    def _change(self, version: Version, before: Version | None) -> None:
        self._events.append((version, before))
        self.keys = self.keys.set(version[KEY], version)

    def abandon(self) -> int:
        """Undo what was changed and is not committed; return how many changes that were."""
        changes = len(self._events)
        for version, before in reversed(self._events):
            key = version[KEY]
            was_there = before is not None and before[VALUE] is not None
            if version[VALUE] is None:
                self.gone.remove(key)
                self.live.add(key)
            else:
                if version[LEASE]:
                    self.leases.detach(version[LEASE], key)
                if not was_there:
                    self.live.remove(key)
                    if before is not None:
                        self.gone.add(key)
            if before is not None:
                self.keys = self.keys.set(key, before)
                if was_there and before[LEASE]:
                    self.leases.attach(before[LEASE], key)
            else:
                self.keys = self.keys.delete(key)
        self._events = []
        return changes

    def commit(self) -> None:
        """Commit what was changed as one revision; nothing, if nothing was."""
        if self._events:
            self.history.append(tuple(self._events))
            self._events = []
            self.revision += 1

    @property
    def changing(self) -> bool:
        """Whether something was changed that is not committed."""
        return bool(self._events)

    # Reading.

    def selected(self, key: bytes, end: bytes) -> list[bytes]:
        """Return the keys there are now of a range, in order."""
        if not end:
            found = self.keys.get(key)
            return [] if found is None or found[VALUE] is None else [key]
        return list(self.walk(key, end))

    def walk(self, key: bytes, end: bytes, reverse: bool = False) -> Iterator[bytes]:
        """Yield the same, lazily, for a real range."""
        last = None if end == FROM_KEY else end
        found: Iterator[bytes] = self.live.irange(key, last, (True, False), reverse)
        return found

    def count(self, key: bytes, end: bytes) -> int:
        """Return how many there are now."""
        if not end:
            return len(self.selected(key, end))
        return _between(self.live, key, end)

    def check_revision(self, revision: int) -> None:
        """Raise `Refusal` for a revision that is compacted, or not there yet."""
        if revision > self.revision:
            raise Refusal("future_revision", f"revision {revision} is to come: this is {self.revision}")
        if revision and revision < self.compacted:
            raise self.too_old(revision)

    def too_old(self, revision: int) -> Refusal:
        """Return what is said of a revision that can't be read any more."""
        message = f"revision {revision} is gone: the history is compacted up to {self.compacted}"
        return Refusal("compacted", message, compacted=self.compacted)

    def at(self, key: bytes, revision: int, budget: Budget) -> Version | None:
        """Return a key as of a revision that is not compacted; None if it was not there. A step is a version. Raises
        `Refusal`."""
        version = self.keys.get(key)
        while version is not None and version[MOD] > revision:
            budget.walk()
            events = self._events if version[MOD] > self.revision else self.history.at(version[MOD])
            version = events[version[SUB]][1]
        return None if version is None or version[VALUE] is None else version

    def ever(self, key: bytes, end: bytes) -> Iterable[bytes]:
        """Return all keys of a range that any readable revision has, in order."""
        if not end:
            return [key]
        last = None if end == FROM_KEY else end
        there = list(self.live.irange(key, last, (True, False)))
        gone = list(self.gone.irange(key, last, (True, False)))
        return sorted(there + gone) if gone else there

    def walk_ever(self, key: bytes, end: bytes, reverse: bool = False) -> Iterator[bytes]:
        """Yield the same, lazily, for a real range."""
        last = None if end == FROM_KEY else end
        return heapq.merge(
            self.live.irange(key, last, (True, False), reverse),
            self.gone.irange(key, last, (True, False), reverse),
            reverse=reverse,
        )

    def count_ever(self, key: bytes, end: bytes) -> int:
        """Return how many those are."""
        return _between(self.live, key, end) + _between(self.gone, key, end) if end else 1

    # History.

    def compact(self, revision: int) -> None:
        """Refuse reads below `revision` from now on. Raises `Refusal`."""
        if revision > self.revision:
            self.check_revision(revision)
        if revision <= self.compacted:
            raise self.too_old(revision)
        self.compacted = revision

    @property
    def purgeable(self) -> bool:
        """There is history left that nobody can read."""
        return self.history.first <= self.compacted

    def purge(self, revisions: int) -> None:
        """Drop at most so many revisions that are compacted."""
        history, keys = self.history, self.keys
        for _ in range(min(revisions, self.compacted - history.first + 1)):
            for version, before in history.drop():
                if before is not None:
                    self._release(before[VALUE], version[VALUE])
                key = version[KEY]
                if version[VALUE] is None and keys[key][MOD] == version[MOD]:
                    keys = keys.delete(key)
                    self.gone.remove(key)
        self.keys = keys

    def _release(self, value: Value, after: Value) -> None:
        if type(value) is tuple and value is not after and (type(after) is not tuple or value[:2] != after[:2]):
            self.released.append(value[:2])

    def shrink(self, revisions: int, size: int, work: int) -> None:
        """Compact by itself what is beyond `revisions` or `size` bytes of history: at most `work` revisions of it."""
        history = self.history
        least = self.revision - revisions
        while work and history.first < history.end and (history.first <= least or history.size > size):
            self.compacted = max(self.compacted, history.first)
            self.purge(1)
            work -= 1

    def payloads(self) -> Iterator[tuple[int, int]]:
        """Return the payloads of every version that can be read."""
        return payloads(self.keys, self.history.capture().revisions())


def _between(keys: SortedList[bytes], key: bytes, end: bytes) -> int:
    """Return how many keys are in a range that is not of one key."""
    low: int = keys.bisect_left(key)
    high: int = len(keys) if end == FROM_KEY else keys.bisect_left(end)
    return max(0, high - low)


def payloads(keys: immutables.Map[bytes, Version], revisions: Iterable[tuple[Event, ...]]) -> Iterator[tuple[int, int]]:
    """Yield (index, ordinal) of the payloads of all versions of a state; some twice."""
    for version in keys.values():
        if type(version[VALUE]) is tuple:
            yield version[VALUE][:2]
    for events in revisions:
        for _, before in events:
            if before is not None and type(before[VALUE]) is tuple:
                yield before[VALUE][:2]
