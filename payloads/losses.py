"""Which entries' payloads were lost with a home, until they are back.

Invariant: what was lost is named here until the caller says that all that lives of it is here again. Shared by `store`,
which loses, and the host, which brings back; any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

Stretch = tuple[int, int, int]
"""(uid, first, last) entry."""


class Losses:
    """Stretches, in the order in which they were lost."""

    __slots__ = ("_lock", "_lost")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lost: list[Stretch] = []

    def all(self) -> list[Stretch]:
        """Everything that is lost; may overlap."""
        with self._lock:
            return list(self._lost)

    def add(self, stretches: Iterable[Stretch]) -> None:
        """These are lost."""
        with self._lock:
            self._lost += stretches

    def regained(self, uid: int, first: int, last: int) -> None:
        """Nothing of these entries is lost any more."""
        with self._lock:
            kept: list[Stretch] = []
            for owner, low, high in self._lost:
                if owner != uid or high < first or low > last:
                    kept.append((owner, low, high))
                    continue
                kept += [(uid, low, first - 1)] if low < first else []
                kept += [(uid, last + 1, high)] if high > last else []
            self._lost = kept
