"""Recent payload bytes, shared by all groups and bounded in bytes: what followers, readers and migration mostly ask
for.

First in, first out. Bytes that are not in the WAL yet are not let go, for the WAL still has to write them; what stays
unwritten for long
(a duplicate that no log took, an entry overwritten on its way) is nobody's any more and leaves the books. Everything
older is read
from its file. Called by `ready_loop` and `inbound`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from ..entry import Entry

UNWRITTEN_SECONDS = 10.0
ENTRY_BYTES = 3 << 10
"""What an entry costs beside its payload: it, its metadata, views of both, and the buffers that they lie in."""
ENTRIES_MIN = 4096
"""So many small entries are kept whatever the bound is."""
LOOKS = 4


class PayloadCache:
    """Bounds the payload bytes that entries keep in memory. `bytes` counts those in its books."""

    def __init__(self, bytes_max: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0
        # With what entries cost beside their payloads: many small ones would take a multiple of the bound.
        self._whole_max = max(bytes_max, ENTRIES_MIN * ENTRY_BYTES)
        self._clock = clock
        # Whether a turn is under way, and what came in since the last look.
        self._held = False
        self._came = 0
        self._entries: deque[Entry] = deque()
        # Entries that were due while they were not written, with the time by which they must be.
        self._unwritten: deque[tuple[float, Entry]] = deque()

    def keep(self, entry: Entry) -> None:
        """Remember an entry that came in with its bodies; the oldest stable ones give theirs up."""
        if not entry.body_bytes:
            return
        self._entries.append(entry)
        self.bytes += entry.body_bytes
        self._came += 1
        if not self._held and self._is_full():
            self._shrink()

    def hold(self) -> None:
        """Hold what is in memory now, as a turn begins: it may be part of a message that it sends."""
        self._held = True

    def release(self) -> None:
        """Release what the turn held: its messages left."""
        self._held = False
        if self._is_full():
            self._shrink()

    def shrink_by(self, size: int) -> int:
        """Let the oldest `size` bytes go, or as much of that as is written; return the bytes that left the books."""
        before, limit = self.bytes, self.bytes_max
        self.bytes_max = max(0, min(limit, before - size))
        self._shrink()
        self.bytes_max = limit
        return before - self.bytes

    def _is_full(self) -> bool:
        return self.bytes > self.bytes_max or self.bytes + ENTRY_BYTES * len(self._entries) > self._whole_max

    def _shrink(self) -> None:
        now = self._clock()
        unwritten, entries = self._unwritten, self._entries
        # In rotation, for one that is never written must not hold up those behind it; more are looked at than come in.
        looks, self._came = LOOKS * max(1, self._came), 0
        for _ in range(min(looks, len(unwritten))):
            due, old = unwritten.popleft()
            if old.file or due < now:
                self._drop(old)
            else:
                unwritten.append((due, old))
        while entries and self._is_full():
            old = entries.popleft()
            if old.file:
                self._drop(old)
            else:
                unwritten.append((now + UNWRITTEN_SECONDS, old))

    def _drop(self, entry: Entry) -> None:
        self.bytes -= entry.body_bytes
        if entry.file:
            entry.let_go()
