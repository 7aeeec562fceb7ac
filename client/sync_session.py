"""One log's session in the blocking client: opened by the first who needs it, shared by all threads.

Invariant: a frame keeps its number until it is answered, and at most a window of them is under way; a session of no
more use is replaced by the first who hears of it. No heartbeat of its own: a node takes frames for signs of life, and
a session that was idle for its time to live is replaced before anything is sent in it. Used by `sync`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic

from logyard.protocol.errors import Busy

from .sequences import OUT_OF_WINDOW, Sequences, Ticket


class SyncSession:
    """`begin(stale, deadline)` closes a session (0: none) and opens another, whose number it returns; it may block.
    `ttl`: seconds that a session lives without a sign of life."""

    __slots__ = ("_begin", "_ttl", "_used", "_lock", "_changed", "_numbers", "_opening", "_stale")

    def __init__(self, begin: Callable[[int, float], int], ttl: float) -> None:
        self._begin = begin
        self._ttl = ttl
        self._used = monotonic()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._numbers: Sequences | None = None
        self._opening = False
        self._stale = 0

    def take(self, deadline: float) -> Ticket:
        """Take a number for a frame; wait for room in the window. Raises `Busy` when there is none in time, and what
        stands in the way of a session."""
        with self._lock:
            self._look()
            while True:
                if self._numbers is None and not self._opening:
                    self._opening = True
                    break
                if self._numbers is not None and self._numbers.room:
                    return self._numbers, self._numbers.next()
                left = deadline - monotonic()
                if left <= 0 or not self._changed.wait(min(left, threading.TIMEOUT_MAX)):
                    raise Busy.told("the session's window is full", {"cause": "session window", "retry_after": 0.01})
            stale = self._stale
        session = 0
        try:
            session = self._begin(stale, deadline)
        finally:
            with self._lock:
                self._opening = False
                if session:
                    self._numbers, self._stale = Sequences(session), 0
                self._changed.notify_all()
        return self.take(deadline)

    def _look(self) -> None:
        """Let go of a session that has ended by itself, or is about to, with nothing under way in it."""
        now, numbers = monotonic(), self._numbers
        if numbers is not None and not numbers.open and now - self._used > self._ttl:
            self._numbers, self._stale = None, numbers.session
        self._used = now

    def done(self, ticket: Ticket) -> None:
        """Take note that a frame is finished, whatever came of it."""
        with self._lock:
            ticket[0].done(ticket[1])
            self._used = monotonic()
            self._changed.notify_all()

    def renew(self, ticket: Ticket, code: object) -> None:
        """Renew the session of a ticket, which is of no more use, as the `code` of a refusal says."""
        with self._lock:
            if self._numbers is ticket[0]:
                self._numbers = None
                if code == OUT_OF_WINDOW:
                    # It must not take effect later in a session that moved on.
                    self._stale = ticket[0].session

    def close(self) -> int:
        """Return the session to be closed; 0 when there is none, or something is under way in it."""
        with self._lock:
            numbers, self._numbers = self._numbers, None
            return numbers.session if numbers is not None and not numbers.open else 0
