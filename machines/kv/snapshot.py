"""The KV machine's state as sections: captured at once, written whenever somebody asks for the bytes.

A captured state is persistent maps and lists that do not change any more, so writing a million keys needs no pause of
the machine. Layout: ``kv`` holds the numbers and leases, ``kv.keys/...`` every version that is not in the history (the
newest of keys that did not change since the compaction), ``kv.log/...`` the events, in order; a version that an event
took the place of is written only where it is not in the history itself. Used by `kv`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from zlib import crc32

import immutables
import msgpack
from sortedcontainers import SortedList

from .history import KEY, LEASE, MOD, SUB, VALUE, Captured, Event, History, Version
from .leases import Lease
from .state import State, payloads

NUMBERS, KEYS, LOG = "kv", "kv.keys", "kv.log"
BUCKET = 2048
"""Keys of one section, about: its bytes are those of the last time if none of them changed, and sorting so few stops
nobody."""


class Frozen(NamedTuple):
    """A state as it was. `numbers`: revision, compacted, next lease, what else the machine keeps."""

    numbers: tuple[Any, ...]
    keys: immutables.Map[bytes, Version]
    leases: immutables.Map[int, Lease]
    history: Captured

    def sections(self) -> dict[str, bytes]:
        """Return all sections, by name."""
        found = {NUMBERS: self._numbers()}
        for number, bucket in enumerate(self._buckets()):
            found[f"{KEYS}/{number:06d}"] = msgpack.packb(sorted(bucket))
        first = self.history.first
        for base, revisions in self.history.parts():
            rows = [[(version, _reference(before, first)) for version, before in events] for events in revisions]
            found[f"{LOG}/{base:020d}"] = msgpack.packb(rows)
        return found

    def payloads(self) -> Iterator[tuple[int, int]]:
        """Yield (index, ordinal) of every payload that it names."""
        return payloads(self.keys, self.history.revisions())

    def _numbers(self) -> bytes:
        leases = [(lease, *row) for lease, row in sorted(self.leases.items())]
        packed: bytes = msgpack.packb((*self.numbers, self.history.first, leases))
        return packed

    def _buckets(self) -> list[list[Version]]:
        """Return the keys that did not change since the compaction, spread by a sum that is the same everywhere."""
        first, mask = self.history.first, (1 << max(0, (len(self.keys) // BUCKET).bit_length())) - 1
        buckets: list[list[Version]] = [[] for _ in range(mask + 1)]
        for key, version in self.keys.items():
            if version[MOD] < first:
                buckets[crc32(key) & mask].append(version)
        return buckets


def _reference(before: Version | None, first: int) -> Any:
    """Return how an event names the version that it took the place of: by its place in the history where it has one."""
    if before is None:
        return None
    return (before[MOD], before[SUB]) if before[MOD] >= first else before


def _rows(sections: Mapping[str, bytes], kind: str) -> Iterator[Any]:
    for name in sorted(sections):
        if name.startswith(kind + "/"):
            yield from msgpack.unpackb(sections[name])


def freeze(state: State, more: tuple[Any, ...]) -> Frozen:
    """Return the state as it is; O(1) in keys."""
    numbers = (state.revision, state.compacted, state.leases.next, more)
    return Frozen(numbers, state.keys, state.leases.rows, state.history.capture())


def _version(found: Any) -> Version:
    key, mod, sub, create, number, lease, value = found
    return key, mod, sub, create, number, lease, tuple(value) if type(value) is list else value


def thaw(sections: Mapping[str, bytes]) -> tuple[State, tuple[Any, ...]]:
    """Return a state of its own from sections, and what else the machine kept."""
    state = State()
    state.revision, state.compacted, following, more, first, leases = msgpack.unpackb(sections[NUMBERS])
    keys: dict[bytes, Version] = {found[KEY]: _version(found) for found in _rows(sections, KEYS)}
    history = state.history = History(first)
    for rows in _rows(sections, LOG):
        events: list[Event] = []
        for found, reference in rows:
            version = _version(found)
            before: Version | None = None
            if reference is not None:
                before = history.at(reference[0])[reference[1]][0] if len(reference) == 2 else _version(reference)
            events.append((version, before))
            keys[version[KEY]] = version
        history.append(tuple(events))
    state.keys = immutables.Map(keys)
    state.live = SortedList(key for key, version in keys.items() if version[VALUE] is not None)
    state.gone = SortedList(key for key, version in keys.items() if version[VALUE] is None)
    state.leases.restore(((number, Lease(*row)) for number, *row in leases), following)
    for key, version in keys.items():
        if version[LEASE]:
            state.leases.attach(version[LEASE], key)
    return state, tuple(more)
