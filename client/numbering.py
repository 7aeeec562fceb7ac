"""The number of a producer, and the sequences of what it appends: which may be under way together. Sans-IO; used by the
producers of both faces."""

from __future__ import annotations

import hashlib
import struct
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import Protocol, TypeVar, cast

from logyard.protocol.errors import BadRequest, LogyardError, SessionExpired
from logyard.protocol.frame import Buffer, Epoch, view_of
from logyard.protocol.topics import SLOTS

E = TypeVar("E", bound="Event")
NUMBER_MAX = (1 << 63) - 1
LANE_MAX = (1 << 32) - 1
LENGTHS = struct.Struct("<Iq")
"""Of a record's metadata and payload; -1: it has none."""
WINDOW = 64
"""Sequences from the lowest that is not finished up to the highest that is sent: as many a log remembers."""
HOLD_S = 5.0
"""So long a sequence that failed counts as not finished: it may be sent again."""
REMEMBERED = 4096
"""Sequences of which a producer knows that they were answered."""


def content_hash(records: Iterable[tuple[Buffer, Buffer | None]]) -> bytes:
    """Return the 128-bit xxh3 of records as they are given, before any compression: alike for the same records only."""
    # Loaded here: who writes no epochs needs msgpack alone.
    from xxhash import xxh3_128

    found = xxh3_128()
    for head, body in records:
        body_bytes = -1 if body is None else memoryview(body).nbytes
        found.update(LENGTHS.pack(memoryview(head).nbytes, body_bytes))
        found.update(head)
        if body is not None:
            found.update(body)
    return found.digest()


def slot_of(key: Buffer) -> int:
    """Return the slot of a topic's key: the lowest 14 bits of its xxh3-64."""
    # Loaded here, as above.
    from xxhash import xxh3_64_intdigest

    try:
        return xxh3_64_intdigest(key) & SLOTS - 1
    except TypeError:
        view_of("a key", key)
        raise


def producer_number(name: int | str) -> int:
    """Return a producer's number: as given, or made of its name."""
    if isinstance(name, str):
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") & NUMBER_MAX or 1
    if not 0 < name <= NUMBER_MAX:
        raise BadRequest("a producer is a text or a number from 1 up")
    return name


def epoch_of(producer: int | str, incarnation: int, epoch: int) -> Epoch:
    """Return the epoch of a fenced producer. Raises `BadRequest`."""
    if not (0 < incarnation <= NUMBER_MAX and 0 <= epoch <= NUMBER_MAX):
        raise BadRequest("an incarnation is a number from 1 up, an epoch one from 0 up")
    return Epoch(producer_number(producer), incarnation, epoch)


class Event(Protocol):
    """What a task or a thread waits for."""

    def set(self) -> None:
        """Wake who waits."""


class Turn:
    """One send of a sequence. `named`: its caller chose the sequence, and so can send it again; `trusted`: if the log
    does not know any more whether it has it, it has."""

    __slots__ = ("sequence", "named", "trusted", "_event")

    def __init__(self, sequence: int, named: bool, trusted: bool) -> None:
        self.sequence = sequence
        self.named = named
        self.trusted = trusted
        self._event: Event | None = None

    @property
    def waits(self) -> bool:
        """Whether somebody will be woken."""
        return self._event is not None

    def event(self, make: Callable[[], E]) -> E:
        """Return what is set when it is to look whether it may go."""
        if self._event is None:
            self._event = make()
        return cast(E, self._event)

    def wake(self) -> None:
        """Set that; if it may not go after all, it waits for another one."""
        if self._event is not None:
            self._event.set()
            self._event = None


class Numbering:
    """The sequences of a producer. `last` is the highest one that was given or is known to be written.

    A log remembers a window of what a producer wrote, and can't tell a lower sequence that it never had from one that
    it had long ago. Invariant: while sequences are given rising, none is sent that is a window above one which is not
    finished, so no log writes a window of higher ones before it. Then whatever left the window was written, also for a
    later run of the program: what an earlier run may have left open is sent before anything new. For any thread.
    """

    __slots__ = (
        "number", "last", "_before", "_is_past", "_lock", "_given", "_sending", "_held", "_waiting", "_serial",
        "_written",
    )  # fmt: skip

    def __init__(self, number: int, last: int) -> None:
        self.number = number
        self.last = last
        # The highest one that an earlier run wrote; whether this one has sent anything above it.
        self._before = last
        self._is_past = False
        self._lock = threading.Lock()
        # Rising, from the lowest that is not finished on; how often each is being sent; until when one that failed
        # holds others up.
        self._given: list[int] = []
        self._sending: dict[int, int] = {}
        self._held: dict[int, float] = {}
        # A heap.
        self._waiting: list[tuple[int, int, Turn]] = []
        self._serial = 0
        # The newest that were answered.
        self._written: dict[int, None] = {}

    def begin(self, sequence: int | None) -> Turn:
        """Give a sequence, or the next one; `end` it, whatever comes of it. Raises `BadRequest`."""
        with self._lock:
            chosen = self.last + 1 if sequence is None else sequence
            if not 0 < chosen <= NUMBER_MAX:
                raise BadRequest("a sequence is a number from 1 up")
            is_old = chosen <= self._before and not self._is_past
            turn = Turn(chosen, sequence is not None, is_old or chosen in self._written)
            self.last = max(self.last, chosen)
            at = bisect_left(self._given, chosen)
            if self._given[at : at + 1] != [chosen]:
                self._given.insert(at, chosen)
            self._sending[chosen] = self._sending.get(chosen, 0) + 1
            return turn

    def must_wait(self, turn: Turn, now: float, event: Callable[[], E]) -> E | None:
        """Return what will be set when a sequence may be sent; None: it may be now. Look again every second: nobody is
        told that one which failed is not waited for any longer."""
        with self._lock:
            self._wake(now)
            if self._may_go(turn.sequence):
                self._is_past |= turn.sequence > self._before
                return None
            if not turn.waits:
                self._serial += 1
                heappush(self._waiting, (turn.sequence, self._serial, turn))
            return turn.event(event)

    def end(self, turn: Turn, now: float, error: BaseException | None = None) -> None:
        """Take note of what came of it: it was written, or failed with an error."""
        sequence = turn.sequence
        with self._lock:
            self._sending[sequence] -= 1
            if not self._sending[sequence]:
                del self._sending[sequence]
            if error is None:
                self._held.pop(sequence, None)
                self._written[sequence] = None
                if len(self._written) > REMEMBERED:
                    del self._written[next(iter(self._written))]
            elif sequence not in self._written:
                if turn.named and _comes_again(error):
                    self._held[sequence] = now + HOLD_S
                else:
                    self._held.pop(sequence, None)
            self._wake(now)

    def _may_go(self, sequence: int) -> bool:
        given = self._given
        if given and sequence > self._before >= given[0]:
            return False
        return bisect_left(given, sequence) < WINDOW

    def _wake(self, now: float) -> None:
        """Forget what is finished, and wake those that may go."""
        given, waiting = self._given, self._waiting
        while given and given[0] not in self._sending and self._held.get(given[0], 0.0) <= now:
            self._held.pop(given.pop(0), None)
        while waiting and self._may_go(waiting[0][0]):
            heappop(waiting)[2].wake()


def _comes_again(error: BaseException) -> bool:
    """Return whether who was told that will perhaps send the same once more."""
    if isinstance(error, LogyardError):
        return error.retry != "never" or isinstance(error, SessionExpired)
    # Cancelled, or interrupted.
    return not isinstance(error, Exception)
