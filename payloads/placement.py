"""Which copy is whose home, and what of it lives: homes and counters, kept in step.

Invariants: what lives in a copy has its home there; a copy that is nobody's home lives not at all. What had its home in
a generation that is gone or failing is lost, and stays so over restarts, until it is stored anew or dies, or until a
generation that only could not be opened is opened again. Called by `store`, under its lock.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from contextlib import suppress

from logyard.protocol.errors import GenerationFailed, PayloadCorrupt

from . import checkpoints
from .catalog import Catalog
from .copies import END, Copies, Owner, Place
from .homes import Home, HomeTable, without
from .ledger import Marks

NOWHERE = 0
"""As a generation's number: none has it."""


class Placement:
    """Homes of all groups over the copies in all generations. `fail` is told of a generation that cannot be read.
    `lost` are lost stretches by group, as homes nowhere."""

    __slots__ = ("homes", "copies", "lost", "newest", "newest_run", "_away", "_fail")

    def __init__(self, catalog: Catalog, ledger_slots: int, fail: Callable[[int, Exception], None]) -> None:
        self.homes = HomeTable()
        self.copies = Copies(catalog, ledger_slots)
        self.lost: dict[int, list[Home]] = {}
        # Of what is lost, by group, what was at home in a generation that is there and couldn't be opened: homes, and
        # the marks of their copies. The next process may be able to.
        self._away: dict[int, tuple[list[Home], dict[tuple[int, int], Marks]]] = {}
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
        if uid in self._away:
            homes, marks = self._away.pop(uid)
            if homes := without(homes, first, last):
                self._away[uid] = (homes, marks)
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
                if died:
                    self.homes.touch(uid)
                    freed[owner[0]] = freed.get(owner[0], 0) + died
                    if self.copies.is_empty(owner):
                        emptied.add(owner)
            except PayloadCorrupt:
                continue
            except GenerationFailed as error:
                self._fail(home.generation, error)
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
        away, then = self._away.get(uid, ((), {}))
        for home in away:
            lost = without(lost, home.first, home.last)
        owners = dict.fromkeys((home.generation, home.run) for home in away)
        found += [(*owner, then[owner]) for owner in owners if owner in then]
        # For whoever reads the row as for others there is no entry 0.
        notes = [Home(0, 0, NOWHERE, generation) for generation in sorted({home.generation for home in away})]
        return checkpoints.encode(uid, sorted([*homes, *lost, *away, *notes]), found)

    def restore(
        self, saved: bytes | Iterable[tuple[bytes, bytes]], present: Container[int], failed: Container[int]
    ) -> None:
        """Take a checkpoint; homes in generations that are not `present` are lost. Of those that `failed` to open the
        next checkpoint says what this one does, less what was found or died by then."""
        rows = checkpoints.split(saved) if isinstance(saved, bytes) else saved
        poorer: list[tuple[int, Home]] = []
        returned: list[tuple[int, list[Home]]] = []
        for key, body in rows:
            uid, homes, marks = checkpoints.decode(key, body)
            notes = {home.run for home in homes if home.generation == NOWHERE} - {NOWHERE}
            poorer += [(uid, home) for home in homes if home.generation not in present and home.last]
            here = [home for home in homes if home.generation in present]
            self.homes.put(uid, here)
            if again := [home for home in here if home.generation in notes]:
                returned.append((uid, again))
            if away := [home for home in homes if home.generation in failed]:
                self._away[uid] = (away, {(number, run): found for number, run, found in marks if number in failed})
            for generation, run, found in marks:
                self.note(generation, run)
                if generation in present:
                    self.copies.restore((generation, run, uid), found)
        self.homes.take_dirty()
        for uid, again in returned:
            self._return(uid, again)
        # The next checkpoint names the lost generations no more, but what was in them.
        self.lose(poorer)

    def _return(self, uid: int, homes: Iterable[Home]) -> None:
        """Mark, in copies that could not be opened for a while, what was found elsewhere or died in that time: what is
        not at home there any more. As in `mark`, what can't be told lives on."""
        self.homes.touch(uid)
        edges: dict[Owner, int] = {}
        for home in [*homes, *(Home(END, END, *copy) for copy in {home[2:] for home in homes})]:
            owner = (home.generation, home.run, uid)
            with suppress(GenerationFailed, PayloadCorrupt):
                self.copies.mark(owner, (edges.get(owner, 0), 0), (home.first, 0))
            edges[owner] = home.last + 1
