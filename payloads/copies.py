"""Exact counters of every physical copy: what lives of one group in one run of one generation.

Invariant: a generation's live bytes are the sum over its copies; a copy that is dead as a whole is forgotten, and
what is in no copy (rows of an abandoned job, say) is dead. Sizes come from the generations' ledgers through a
bounded cache. Called by `store`, under its lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from logyard.protocol.errors import PayloadCorrupt

from .catalog import Catalog
from .ledger import Columns, Ledger, Marks

Owner = tuple[int, int, int]
"""(generation, run, uid): the name of a copy."""
Place = tuple[int, int]
"""(index, unit)."""
END = (1 << 64) - 1
"""Above every index."""


class Copies:
    """Marks and live bytes by copy."""

    __slots__ = ("_catalog", "_slots_max", "_marks", "_live", "_ledgers", "_damaged", "_slots")

    def __init__(self, catalog: Catalog, slots_max: int) -> None:
        self._catalog = catalog
        self._slots_max = slots_max
        self._marks: dict[Owner, Marks] = {}
        self._live: dict[int, int] = {}
        self._ledgers: OrderedDict[tuple[int, int], dict[int, Ledger]] = OrderedDict()
        # Runs whose ledger does not verify: read once, and not in each release again.
        self._damaged: dict[tuple[int, int], PayloadCorrupt] = {}
        self._slots = 0

    def live(self, generation: int) -> int:
        """Return the live bytes of a generation."""
        return self._live.get(generation, 0)

    @property
    def live_bytes(self) -> int:
        """Live bytes of all generations."""
        return sum(self._live.values())

    def marks(self, owner: Owner) -> Marks | None:
        """Return a copy's marks, or None when it is dead as a whole or was never adopted."""
        return self._marks.get(owner)

    def of_generation(self, generation: int) -> list[tuple[Owner, Marks]]:
        """Return the copies in a generation of which something lives."""
        return [(owner, marks) for owner, marks in self._marks.items() if owner[0] == generation]

    def restore(self, owner: Owner, marks: Marks) -> None:
        """Restore the marks from a checkpoint."""
        self._marks[owner] = marks
        self._live[owner[0]] = self._live.get(owner[0], 0) + marks.live

    def ledger(self, owner: Owner) -> Ledger | None:
        """Return a copy's sizes; None when its run has no rows of that group. Raises `GenerationFailed`,
        `PayloadCorrupt`."""
        generation, run, uid = owner
        found = self._ledgers.get((generation, run))
        if found is None:
            if (generation, run) in self._damaged:
                # As it was raised before it would keep the frames of every release.
                raise self._damaged[generation, run].with_traceback(None)
            try:
                columns = self._catalog.get(generation).columns(run)
            except PayloadCorrupt as error:
                self._damaged[generation, run] = error.with_traceback(None)
                raise
            found = dict(columns.ledgers())
            self._ledgers[generation, run] = found
            self._slots += columns.slots
            while self._slots > self._slots_max and len(self._ledgers) > 1:
                _, oldest = self._ledgers.popitem(last=False)
                self._slots -= sum(map(len, oldest.values()))
        else:
            self._ledgers.move_to_end((generation, run))
        return found.get(uid)

    def reread(self, generation: int, run: int) -> None:
        """Forget the cached sizes of a run that was written to."""
        self._damaged.pop((generation, run), None)
        found = self._ledgers.pop((generation, run), None)
        if found is not None:
            self._slots -= sum(map(len, found.values()))

    def adopt(self, owner: Owner, ranges: Iterable[tuple[int, int]]) -> bool:
        """Adopt a copy: the rows of these index ranges (rising) live from now on; everything else in it is dead. False:
        it has no rows."""
        ledger = self.ledger(owner)
        if ledger is None:
            return False
        assert owner not in self._marks
        marks = Marks(ledger.total)
        edge = 0
        for first, last in ranges:
            marks.mark(ledger, (edge, 0), (first, 0))
            edge = last + 1
        marks.mark(ledger, (edge, 0), (END, 0))
        self.restore(owner, marks)
        return True

    def mark(self, owner: Owner, first: Place, end: Place) -> int:
        """Mark units from `first` up to, but without, `end` as dead in this copy; return the bytes that died now."""
        marks = self._marks.get(owner)
        if marks is None or first >= end:
            return 0
        ledger = self.ledger(owner)
        if ledger is None:
            return 0
        died = marks.mark(ledger, first, end)
        self._live[owner[0]] -= died
        return died

    def is_empty(self, owner: Owner) -> bool:
        """Return whether nothing of a copy lives (not even a unit of no bytes)."""
        marks = self._marks.get(owner)
        return marks is None or (not marks.live and marks.all_dead(0, len(self.ledger(owner) or ())))

    def forget(self, owner: Owner) -> int:
        """Forget a copy, which is dead as a whole; return what lived until now."""
        marks = self._marks.pop(owner, None)
        if marks is None:
            return 0
        self._live[owner[0]] -= marks.live
        return marks.live

    def recount(self, generation: int, runs: dict[int, Columns]) -> int:
        """Return the live bytes of a generation, from slots that a full scan found: equal to `live`, or a counter is
        wrong."""
        live = 0
        for run, columns in runs.items():
            for uid, ledger in columns.ledgers():
                marks = self._marks.get((generation, run, uid))
                if marks is not None:
                    live += sum(ledger.size(slot) for slot in marks.live_slots(len(ledger)))
        return live

    def drop(self, generation: int) -> None:
        """Drop a generation that is gone."""
        for owner, _ in self.of_generation(generation):
            self.forget(owner)
        self._live.pop(generation, None)
        for found, run in [key for key in (*self._ledgers, *self._damaged) if key[0] == generation]:
            self.reread(found, run)
