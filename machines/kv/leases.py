"""Leases of the KV machine: keys that go when nobody keeps them alive, by log time.

Invariants: the next wake-up follows from the replicated rows alone, never from the order of the heap, so every member
sets the same timer, also after a restore; a lease never ends before its time, and a leader change gives it all of it
again (who keeps it alive could not be heard meanwhile). Used by `kv`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import NamedTuple

import immutables

from .command import LEASE_MS_MAX, NUMBER_MAX, Refusal

LEASES_MAX = 1_000_000
LEASE_MS_MIN = 100
STALE_MAX = 64
"""Places in the heap of leases that are gone, at most, beside as many as there are leases."""


class Lease(NamedTuple):
    """`ttl` and times in milliseconds. `wake`: when it is looked at; it may have been kept alive since."""

    ttl: int
    deadline: int
    wake: int


class Leases:
    """Rows by number, and who is attached."""

    __slots__ = ("rows", "next", "attached", "_heap")

    def __init__(self) -> None:
        self.rows: immutables.Map[int, Lease] = immutables.Map()
        # The number of the next lease whose client names none: never one that was used before.
        self.next = 1
        self.attached: dict[int, set[bytes]] = {}
        self._heap: list[tuple[int, int]] = []

    def grant(self, ttl: int, lease: int, now: int) -> int:
        """Grant a lease; return its number. Raises `Refusal`."""
        if lease in self.rows:
            raise Refusal("lease_exists", f"lease {lease} is there already", lease=lease)
        if ttl > LEASE_MS_MAX:
            raise Refusal("bad_request", f"a lease lasts at most {LEASE_MS_MAX} ms")
        if len(self.rows) >= LEASES_MAX:
            raise Refusal("too_many_leases", f"there are {LEASES_MAX} leases")
        while not lease:
            if self.next not in self.rows:
                lease = self.next
            self.next += 1
        if self.next <= lease < NUMBER_MAX >> 1:
            self.next = lease + 1
        ttl = max(ttl, LEASE_MS_MIN)
        self._put(lease, Lease(ttl, now + ttl, now + ttl))
        return lease

    def _put(self, lease: int, row: Lease) -> None:
        self.rows = self.rows.set(lease, row)
        heapq.heappush(self._heap, (row.wake, lease))
        if len(self._heap) > STALE_MAX + 2 * len(self.rows):
            # Leases that were revoked long before their time.
            self._build()

    def _build(self) -> None:
        self._heap = [(row.wake, lease) for lease, row in self.rows.items()]
        heapq.heapify(self._heap)

    def check(self, lease: int) -> Lease:
        """Return the row of a lease; raise `Refusal` when there is none."""
        row = self.rows.get(lease)
        if row is None:
            raise Refusal("lease_not_found", f"there is no lease {lease}", lease=lease)
        return row

    def keep(self, lease: int, now: int) -> int:
        """Begin its time anew; return how much that is."""
        row = self.check(lease)
        self.rows = self.rows.set(lease, row._replace(deadline=now + row.ttl))
        return row.ttl

    def end(self, lease: int) -> list[bytes]:
        """Forget a lease; return the keys that go with it, in order."""
        self.rows = self.rows.delete(lease)
        return sorted(self.attached.pop(lease, ()))

    def attach(self, lease: int, key: bytes) -> None:
        """Bind a key to a lease, with which it goes."""
        keys = self.attached.get(lease)
        if keys is None:
            keys = self.attached[lease] = set()
        keys.add(key)

    def detach(self, lease: int, key: bytes) -> None:
        """Free a key of its lease."""
        keys = self.attached.get(lease)
        if keys is not None:
            keys.discard(key)
            if not keys:
                del self.attached[lease]

    def extend(self, now: int) -> None:
        """Give every lease all of its time again: somebody else leads."""
        rows = self.rows.mutate()
        for lease, row in self.rows.items():
            rows[lease] = row._replace(deadline=max(row.deadline, now + row.ttl))
        self.rows = rows.finish()

    def due(self) -> int | None:
        """Return when to look at them next."""
        heap = self._heap
        while heap:
            wake, lease = heap[0]
            row = self.rows.get(lease)
            if row is not None and row.wake == wake:
                return wake
            heapq.heappop(heap)
        return None

    def over(self, now: int) -> list[int]:
        """Return the leases whose time is over, in order; those that were kept alive are looked at again later."""
        # One that was revoked and granted again, to be looked at when the one before it was, is in the heap twice.
        ended: dict[int, None] = {}
        while (due := self.due()) is not None and due <= now:
            _, lease = heapq.heappop(self._heap)
            row = self.rows[lease]
            if row.deadline > now:
                self._put(lease, row._replace(wake=row.deadline))
            else:
                ended[lease] = None
        return list(ended)

    def restore(self, rows: Iterable[tuple[int, Lease]], following: int) -> None:
        """Replace everything; keys are attached by whoever restores them."""
        self.rows = immutables.Map(rows)
        self.next = following
        self.attached = {}
        self._build()
