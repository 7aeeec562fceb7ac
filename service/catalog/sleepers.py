"""Sleeping groups that the catalogue concerns: not known to it, never seen, or no longer members here.

Who sleeps says nothing, so this node looks through its own rows: through all of them once, and again with each leader
of the catalogue; after that, every `SCAN_S`, through those that it leads or that nobody leads. What is found is woken,
and then reports itself, or hears that it is no member any more, as every group that is awake. One that was never used
has nobody to report it: its definition is what there is to say. Invariant: a look takes `ROWS_MAX` rows and wakes
`WOKEN_MAX` groups at most. Called by the keeper.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple, Protocol

from logyard.engine.quiesce.quiesced_table import LED, Row
from logyard.engine.types import Spec
from logyard.machines.catalog.logs import LIVE, Log, Logs

from .steps import ITEMS, Steps

SCAN_S = 60.0
ROWS_MAX = 2000
WOKEN_MAX = 64
WOKEN_AT_ONCE = 8
"""Each is read and built, some 0.3 ms; those that are woken together share a turn of the engine."""


class Rows(Protocol):
    """Sleeping groups: `engine.quiesce.quiesced_table.QuiescedTable`."""

    def rows(self, where: str = "1", *values: int) -> Iterator[tuple[int, Row]]:
        """Yield (uid, row) of those for which an expression holds; they may change meanwhile."""
        ...

    def leader_of(self, uid: int) -> int:
        """Return whom a group sleeps under, 0 for nobody. Raises KeyError."""
        ...

    def led_here(self) -> list[int]:
        """Return the groups that this node leads."""
        ...


class Groups(NamedTuple):
    """This node's groups."""

    asleep: Rows
    wake: Callable[[int], object]
    spec: Callable[[int], Spec | None]
    """A group's definition; wakes nobody."""


class Sleepers:
    """One node's."""

    def __init__(self, node_id: int, groups: Groups) -> None:
        self._node_id = node_id
        self._groups = groups
        self._rows: Iterator[tuple[int, Row]] | None = None
        self._scan_at = 0.0
        self._whole = True

    def begin(self) -> None:
        """Look through all of them again: another leader of the catalogue may know less than was told."""
        self._rows, self._scan_at, self._whole = None, 0.0, True

    def look(self, logs: Logs) -> Steps[list[Spec]]:
        """Wake what has something to say; return the definitions of groups that nobody knows, and nobody ever used."""
        if self._rows is None:
            if time.monotonic() < self._scan_at:
                return []
            self._rows = self._begun()
        told: list[Spec] = []
        woken = seen = 0
        for uid, row in islice(self._rows, ROWS_MAX):
            seen += 1
            known = logs.of_uid(uid)
            if known is None and not row.last:
                spec = self._groups.spec(uid)
                if spec is not None:
                    told.append(spec)
            elif self._concerns(known, row):
                self._groups.wake(uid)
                woken += 1
                if woken >= WOKEN_MAX:
                    return told
                if woken % WOKEN_AT_ONCE == 0:
                    yield
            if seen % ITEMS == 0:
                yield
        if seen < ROWS_MAX:
            self._rows, self._whole, self._scan_at = None, False, time.monotonic() + SCAN_S
        return told

    def _begun(self) -> Iterator[tuple[int, Row]]:
        rows = self._groups.asleep.rows
        return rows() if self._whole else rows(f"(leader = ? OR leader = 0) AND {LED}", self._node_id)

    def _concerns(self, known: Log | None, row: Row) -> bool:
        """Return whether a group is to be awake: this node leads it, or nobody does, and the catalogue has to hear of
        it; or it is no member any more, which those that are will tell it."""
        if known is not None and known.state == LIVE and known.seen and self._node_id not in known.nodes():
            return True
        unseen = known is None or (not known.seen and row.last > 0)
        return unseen and row.leader in (0, self._node_id)

    def led(self) -> list[int]:
        """Return the groups that sleep under this node."""
        return self._groups.asleep.led_here()

    def rouse(self, uid: int) -> None:
        """Wake a group that is to be moved, if this node leads it or nobody does."""
        try:
            leader = self._groups.asleep.leader_of(uid)
        except KeyError:
            return
        if leader in (0, self._node_id):
            self._groups.wake(uid)
