"""Where each group's entries are: disjoint ranges of indexes, each in one copy (a run of one generation).

Invariant: a group's homes are rising and disjoint, so that an index has at most one; whoever changes a group is
noted for the next checkpoint. Called by `store`, under its lock.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple


class Home(NamedTuple):
    """Where a group's entries first to last are: key prefix (run, uid) of one generation."""

    first: int
    last: int
    generation: int
    run: int


class HomeTable:
    """Homes by group."""

    __slots__ = ("_groups", "_dirty")

    def __init__(self) -> None:
        self._groups: dict[int, list[Home]] = {}
        self._dirty: set[int] = set()

    def __len__(self) -> int:
        return len(self._groups)

    def groups(self) -> list[int]:
        """Return every group that has a home, rising."""
        return sorted(self._groups)

    def of(self, uid: int) -> list[Home]:
        """Return a group's homes; not to be changed."""
        return self._groups.get(uid, [])

    def find(self, uid: int, index: int) -> Home | None:
        """Return the home of an entry."""
        homes = self._groups.get(uid)
        if homes:
            at = bisect_right(homes, index, key=_first) - 1
            if at >= 0 and homes[at].last >= index:
                return homes[at]
        return None

    def overlapping(self, uid: int, first: int, last: int) -> list[Home]:
        """Return the homes that hold any of these indexes."""
        homes = self._groups.get(uid, [])
        at = max(bisect_right(homes, first, key=_first) - 1, 0)
        end = bisect_right(homes, last, at, key=_first)
        return [home for home in homes[at:end] if home.last >= first]

    def in_generation(self, generation: int) -> list[tuple[int, Home]]:
        """Return (uid, home) of everything in one generation."""
        return [(uid, home) for uid, homes in self._groups.items() for home in homes if home.generation == generation]

    def generations(self) -> set[int]:
        """Return every generation that is somebody's home."""
        return {home.generation for homes in self._groups.values() for home in homes}

    def put(self, uid: int, homes: Iterable[Home]) -> None:
        """Replace a group's homes."""
        self._dirty.add(uid)
        kept = sorted(homes)
        if kept:
            self._groups[uid] = kept
        else:
            self._groups.pop(uid, None)

    def add(self, uid: int, home: Home) -> None:
        """Add a home, which takes over from those it overlaps."""
        self.put(uid, [*without(self.of(uid), home.first, home.last), home])

    def cut(self, uid: int, first: int, last: int, copy: tuple[int, int] | None = None) -> None:
        """Cut these indexes from their homes; with `copy` = (generation, run), from those in that copy."""
        kept: list[Home] = []
        for home in self.of(uid):
            kept += without([home], first, last) if copy is None or home[2:] == copy else [home]
        self.put(uid, kept)

    def leave(self, generation: int) -> list[tuple[int, Home]]:
        """End all homes in a generation; return what was at home there."""
        gone = self.in_generation(generation)
        for uid in {uid for uid, _ in gone}:
            self.put(uid, [home for home in self.of(uid) if home.generation != generation])
        return gone

    def touch(self, uid: int) -> None:
        """Take note that a group's marks changed."""
        self._dirty.add(uid)

    def take_dirty(self) -> list[int]:
        """Return the groups that changed since the last call, rising."""
        dirty, self._dirty = self._dirty, set()
        return sorted(dirty)


def without(homes: Iterable[Home], first: int, last: int) -> list[Home]:
    """Return the homes less the indexes first to last."""
    kept: list[Home] = []
    for home in homes:
        if home.last < first or home.first > last:
            kept.append(home)
            continue
        if home.first < first:
            kept.append(home._replace(last=first - 1))
        if home.last > last:
            kept.append(home._replace(first=last + 1))
    return kept


def _first(home: Home) -> int:
    return home.first
