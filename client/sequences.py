"""The numbers of one session's frames, and when there is room for the next one.

Invariant: no frame is numbered more than a window above the lowest one that is not finished, so a node that remembers
a window of replies can answer any that is asked for again. Sans-IO; used by `lane` and by `sync_session`.
"""

from __future__ import annotations

import random
from typing import TypeAlias

from logyard.protocol.errors import LogyardError, SessionExpired, Unknown

WINDOW = 64
"""Frames of a session under way: the nodes keep as many replies (engine.replica.sessions)."""
NUMBER_BITS = 63
EXPIRED = "session_expired"
OUT_OF_WINDOW = "sequence_out_of_window"
STALE = "stale_sequence"
NOT_KEPT = "reply_not_kept"
RENEW = (EXPIRED, OUT_OF_WINDOW)
"""Committed refusals after which a session is of no more use. The frame was not applied by what was refused."""


def new_number() -> int:
    """Return a session's or a client's number: nobody else draws it."""
    return random.SystemRandom().getrandbits(NUMBER_BITS) | 1


class Sequences:
    """One session: `last` is the highest number given, `open` are those not finished."""

    __slots__ = ("session", "last", "open")

    def __init__(self, session: int) -> None:
        self.session = session
        self.last = 0
        self.open: set[int] = set()

    @property
    def room(self) -> bool:
        """Another frame may be numbered."""
        return not self.open or self.last + 1 - min(self.open) < WINDOW

    def next(self) -> int:
        """Return the number of another frame."""
        assert self.room
        self.last += 1
        self.open.add(self.last)
        return self.last

    def done(self, sequence: int) -> None:
        """Take note that a frame is finished, whatever came of it."""
        self.open.discard(sequence)


STRUCK = "refusal"
"""In the details of a `SessionExpired`: the code with which a session refused a frame that may have been applied."""


def expired(name: str, refusal: str = EXPIRED) -> SessionExpired:
    """Return what becomes of a frame that was perhaps applied before its session ended."""
    return SessionExpired(
        f"{name}: the session ended while this was under way: it may or may not have happened; look, then do it again",
        **{STRUCK: refusal},
    )


def final(name: str, error: LogyardError) -> LogyardError:
    """Return a refusal as its caller shall see it: what lost its answer is no failure."""
    if error.code == STALE:
        return Unknown(f"{name}: it was applied or refused long ago, and its answer is not kept any more")
    if error.code == NOT_KEPT:
        # Of all that shared its frame, so of none is known what came of it.
        return Unknown(f"{name}: {error.message}: it may have been refused by its machine; look, then do it again")
    return error


Ticket: TypeAlias = tuple[Sequences, int]
"""A session and the number of a frame in it."""
