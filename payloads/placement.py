"""Which copy is whose home, and what of it lives: homes and counters, kept in step.

Invariants: what lives in a copy has its home there; a copy that is nobody's home lives not at all. What had its home in
a generation that is gone or failing is lost, and stays so over restarts, until it is stored anew or dies. Called by
`store`, under its lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from logyard.protocol.errors import GenerationFailed, PayloadCorrupt

from . import checkpoints
from .catalog import Catalog
from .copies import END, Copies, Owner, Place
from .homes import Home, HomeTable, without

NOWHERE = 0
"""As a generation's number: none has it."""


class Placement:
    """Homes of all groups over the copies in all generations. `fail` is told of a generation that cannot be read.
    `lost` are lost stretches by group, as homes nowhere."""

    __slots__ = ("homes", "copies", "lost", "newest", "newest_run", "_fail")

    def __init__(self, catalog: Catalog, ledger_slots: int, fail: Callable[[int, Exception], None]) -> None:
        self.homes = HomeTable()
        self.copies = Copies(catalog, ledger_slots)
        self.lost: dict[int, list[Home]] = {}
        self.newest = self.newest_run = 0
        self._fail = fail

    def lose(self, gone: Iterable[tuple[int, Home]]) -> None:
        """Count (uid, home) of what can't be read any more as lost."""
        for uid, home in gone:
            left = without(self.lost.get(uid, ()), home.first, home.last)
            self.lost[uid] = sorted([*left, Home(home.first, home.last, NOWHERE, NOWHERE)])
            self.homes.touch(uid)

    def found(self, uid: int, first: int, last: int) -> None:
        """Count these as lost no more: stored anew, or dead."""
        before = self.lost.get(uid)
        if before is None or first > last:
            return
        left = without(before, first, last)
        if left:
            self.lost[uid] = left
        else:
            del self.lost[uid]
        if left != before:
            self.homes.touch(uid)

    def mark(self, uid: int, first: Place, end: Place, only: Owner | None = None) -> dict[int, int]:
        """Mark in every home that overlaps, or in those of one copy only. What dies where the sizes can't be read lives
        on: that costs space alone."""
        freed: dict[int, int] = {}
        emptied: set[Owner] = set()
        if first >= end:
            return freed
        if only is None:
            self.found(uid, first[0] + (first[1] > 0), end[0] - 1)
        for home in self.homes.overlapping(uid, first[0], end[0]):
            owner = (home.generation, home.run, uid)
            if only is not None and owner != only:
                continue
            try:
                died = self.copies.mark(owner, max(first, (home.first, 0)), min(end, (home.last + 1, 0)))
                if died and self.copies.is_empty(owner):
                    emptied.add(owner)
            except PayloadCorrupt:
                continue
            except GenerationFailed as error:
                self._fail(home.generation, error)
                continue
            if died:
                self.homes.touch(uid)
                freed[owner[0]] = freed.get(owner[0], 0) + died
        for owner in emptied:
            self.copies.forget(owner)
            self.homes.cut(uid, 0, END, owner[:2])
        return freed

    def is_home(self, uid: int, first: int, last: int) -> bool:
        """Return whether any of these entries has a home."""
        return bool(self.homes.overlapping(uid, first, last))

    def truncate(self, uid: int, from_index: int) -> dict[int, int]:
        """End the homes of a group's entries from here on; return the bytes freed by generation."""
        freed = self.mark(uid, (from_index, 0), (END, 0))
        self.homes.cut(uid, from_index, END)
        return freed

    def delete(self, uid: int) -> dict[int, int]:
        """End the homes of a group, at no cost per entry; return the bytes freed by generation."""
        freed: dict[int, int] = {}
        for owner in {(home.generation, home.run, uid) for home in self.homes.of(uid)}:
            freed[owner[0]] = freed.get(owner[0], 0) + self.copies.forget(owner)
        self.found(uid, 0, END)
        self.homes.put(uid, ())
        return freed

    def leave(self, generation: int) -> list[tuple[int, Home]]:
        """End all homes in a generation; return what was at home there."""
        gone = self.homes.leave(generation)
        for owner, _ in self.copies.of_generation(generation):
            self.copies.forget(owner)
        return gone

    def renew(self, generation: int, run: int) -> None:
        """Forget what is remembered of this run's sizes, as a job wrote to it. Once a run, not once a group: a run's
        sizes are one read."""
        self.copies.reread(generation, run)

    def adopt(self, owner: Owner, ranges: list[tuple[int, int]]) -> None:
        """Make a fresh copy the home of these index ranges (rising), if it has any rows. `renew` its run first."""
        self.note(owner[0], owner[1])
        if self.copies.adopt(owner, ranges):
            for first, last in ranges:
                self.overlay(owner[2], Home(first, last, owner[0], owner[1]))

    def overlay(self, uid: int, new: Home) -> None:
        """Count older copies of the same indexes as dead: a fresh one takes over."""
        owner = (new.generation, new.run, uid)
        for other in {(home.generation, home.run, uid) for home in self.homes.of(uid)} - {owner}:
            self.mark(uid, (new.first, 0), (new.last + 1, 0), other)
        self.homes.add(uid, new)
        self.found(uid, new.first, new.last)

    def note(self, generation: int, run: int) -> None:
        """Note these numbers as used: never again."""
        self.newest = max(self.newest, generation)
        self.newest_run = max(self.newest_run, run)

    # Checkpoints

    def changes(self) -> list[tuple[bytes, bytes | None]]:
        """Return a row for each group that changed since the last call."""
        return [(checkpoints.key(uid), self._row(uid)) for uid in self.homes.take_dirty()]

    def checkpoint(self) -> bytes:
        """Return the rows of all groups."""
        rows = [(checkpoints.key(uid), self._row(uid)) for uid in sorted({*self.homes.groups(), *self.lost})]
        return checkpoints.join([(key, body) for key, body in rows if body is not None])

    def _row(self, uid: int) -> bytes | None:
        homes, lost = self.homes.of(uid), self.lost.get(uid, [])
        if not homes and not lost:
            return None
        owners = dict.fromkeys((home.generation, home.run) for home in homes)
        found = [(*owner, marks) for owner in owners if (marks := self.copies.marks((*owner, uid))) is not None]
        return checkpoints.encode(uid, sorted([*homes, *lost]), found)

    def restore(self, saved: bytes | Iterable[tuple[bytes, bytes]], present: set[int]) -> None:
        """Take a checkpoint; homes in generations that are not `present` are lost."""
        rows = checkpoints.split(saved) if isinstance(saved, bytes) else saved
        poorer: list[tuple[int, Home]] = []
        for key, body in rows:
            uid, homes, marks = checkpoints.decode(key, body)
            poorer += [(uid, home) for home in homes if home.generation not in present]
            self.homes.put(uid, [home for home in homes if home.generation in present])
            for generation, run, found in marks:
                self.note(generation, run)
                if generation in present:
                    self.copies.restore((generation, run, uid), found)
        self.homes.take_dirty()
        # The next checkpoint names the lost generations no more, but what was in them.
        self.lose(poorer)
