"""Keyed logs: of all records with the same key only the newest stays, with its offset; the others are released at once.

So a reader from the start sees the last value of every key, and offsets still say what came before what. A record
without payload takes its key away; it stays itself for a day, so that followers hear of it. State: every live record,
by entry. Invariant: the last record of a log lives, so a reader that has come to the end knows that it has.
Part of `machines.log` for logs that were created with `compact`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Any

from logyard.engine.machine import Frame, PayloadRange, Position

from .command import KEYED, KEYED_REMOVAL
from .slices import Slice

KEYS_MAX = 250_000
"""Of one log: a snapshot of so many takes a tenth of a second of the loop."""
KEY_BYTES_MAX = 1024
REMOVAL_MS = 24 * 3_600_000


def keys_of(frame: Frame) -> list[tuple[bytes, bool]] | None:
    """Return the (key, whether it is taken away) of each record of a keyed append; None for any other frame."""
    found = []
    for command in frame.split_commands():
        if not 1 < len(command) <= KEY_BYTES_MAX + 1 or command[0] not in (KEYED, KEYED_REMOVAL):
            return None
        found.append((command[1:], command[0] == KEYED_REMOVAL))
    return found


class Keys:
    """`newest`: by key, where its record lies (index, ordinal). `entries`: by index, the live records of an entry: by
    ordinal (offset, key). `removals`: keys that were taken away, with log time (ms), oldest first."""

    __slots__ = ("newest", "entries", "removals")

    def __init__(self) -> None:
        self.newest: dict[bytes, tuple[int, int]] = {}
        self.entries: dict[int, dict[int, tuple[int, bytes]]] = {}
        self.removals: dict[bytes, int] = {}

    def has_room(self, keys: Iterable[bytes]) -> bool:
        """Return whether these can be taken."""
        return len(self.newest) + len({key for key in keys if key not in self.newest}) <= KEYS_MAX

    def put(self, key: bytes, offset: int, position: Position, removed: int | None) -> tuple[int, Position] | None:
        """Put a key's new record; return (offset, position) of the one that it takes the place of. `removed`: when it
        was taken away, if it was."""
        old = self._drop(key)
        self.newest[key] = position.index, position.ordinal
        self.entries.setdefault(position.index, {})[position.ordinal] = (offset, key)
        if removed is not None:
            self.removals[key] = removed
        return old

    def outlived(self, now: int, last: int) -> Iterator[tuple[int, Position]]:
        """Take out removals that are a day old, but for the record at offset `last`; return where they were."""
        # Asked at each entry: only those that are due are walked.
        due = takewhile(lambda one: now - one[1] > REMOVAL_MS, self.removals.items())
        for key in [key for key, _ in due]:
            index, ordinal = self.newest[key]
            if self.entries[index][ordinal][0] != last and (found := self._drop(key)) is not None:
                yield found

    def cut(self, start: int) -> None:
        """Drop what lies below `start`, where the log begins now."""
        for live in list(self.entries.values()):
            gone = [(offset, key) for offset, key in live.values() if offset < start]
            if not gone:
                return
            for _, key in gone:
                self._drop(key)

    def _drop(self, key: bytes) -> tuple[int, Position] | None:
        place = self.newest.pop(key, None)
        if place is None:
            return None
        self.removals.pop(key, None)
        index, ordinal = place
        live = self.entries[index]
        offset, _ = live.pop(ordinal)
        if not live:
            del self.entries[index]
        return offset, Position(index, ordinal)

    def slices(self, index: int, frames: Sequence[Frame]) -> list[Slice]:
        """Return the live records of an entry, as runs within its frames."""
        live = self.entries.get(index)
        if live is None:
            return []
        found: list[Slice] = []
        for number, frame in enumerate(frames):
            for ordinal in range(frame.first, frame.first + frame.records):
                if ordinal not in live:
                    continue
                offset = live[ordinal][0]
                last = found[-1] if found else None
                if last is not None and last.frame == number and last.ordinal + last.records == ordinal:
                    found[-1] = last._replace(records=last.records + 1)
                else:
                    found.append(Slice(offset, number, ordinal, ordinal - frame.first, 1))
        return found

    def lives_between(self, first: int, last: int) -> bool:
        """Return whether any record of entries `first` to `last` lives."""
        if last - first < len(self.entries):
            return any(index in self.entries for index in range(first, last + 1))
        return any(first <= index <= last for index in self.entries)

    def live_refs(self) -> Iterator[PayloadRange]:
        """Yield every live record."""
        for index, live in self.entries.items():
            first = end = -1
            for ordinal in sorted(live):
                if ordinal != end:
                    if first >= 0:
                        yield PayloadRange(Position(index, first), Position(index, end))
                    first = ordinal
                end = ordinal + 1
            yield PayloadRange(Position(index, first), Position(index, end))

    def pack(self) -> list[Any]:
        """Return the keys for a snapshot."""
        entries = [
            [index, [[ordinal, *one] for ordinal, one in sorted(live.items())]]
            for index, live in sorted(self.entries.items())
        ]
        return [entries, list(self.removals.items())]

    @classmethod
    def unpack(cls, packed: Sequence[Any]) -> Keys:
        """Return the keys that `pack` gave."""
        found = cls()
        for index, live in packed[0]:
            found.entries[index] = {ordinal: (offset, key) for ordinal, offset, key in live}
            found.newest.update((key, (index, ordinal)) for ordinal, _, key in live)
        found.removals = {key: stamp for key, stamp in packed[1]}
        return found
