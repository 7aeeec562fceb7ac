"""Recent payload bytes, shared by all groups and bounded in bytes: what followers, readers and migration mostly ask for.

First in, first out. Bytes that are not in the WAL yet are never let go (the WAL still has to write them); everything older is read
from its file. Called by `scheduler` and `inbound`.
"""

from __future__ import annotations

from collections import deque

from ..entry import Entry


class PayloadCache:
    """Bounds the payload bytes that entries keep in memory."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0
        self._entries: deque[Entry] = deque()

    def keep(self, entry: Entry) -> None:
        """Remember an entry that came in with its bodies; the oldest stable ones give theirs up."""
        if not entry.body_bytes:
            return
        self._entries.append(entry)
        self.bytes += entry.body_bytes
        entries = self._entries
        while self.bytes > self.bytes_max and entries[0].file:
            old = entries.popleft()
            self.bytes -= old.body_bytes
            old.bodies = None
