"""Idempotent producers of an append log: which sequences each has written, whatever became of its sessions.

A session's window protects a command while its client lives; a producer's number and its sequences outlive the client,
so a program that starts anew and sends its last records again appends nothing twice. Invariant: a sequence of a known
producer is appended at most once. Sequences rise, with gaps or without; those under way, which are no more than a
`WINDOW` from the lowest to the highest, may come in any order. Part of `machines.log` from version 2 on.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

from logyard.engine.machine import Reject
from logyard.protocol.frame import NO_OFFSET, NOT_KNOWN

from .command import APPEND_REPLY

WINDOW = 64
"""Appends of a producer that are remembered one by one. Of what comes below them a log does not know whether it was
written, and says so; clients keep what is under way within a window (`client.numbering`), so that it was."""
PRODUCERS_MAX = 1024
"""Of one log: a snapshot's share of each is about 1 KiB."""
IDLE_MS = 7 * 24 * 3_600_000
"""A producer that was silent for so long goes when its place is needed."""


class Producer:
    """`written`: (sequence, first offset, records) of its last appends, by sequence."""

    __slots__ = ("written", "stamp")

    def __init__(self, stamp: int) -> None:
        self.written: list[tuple[int, int, int]] = []
        self.stamp = stamp

    @property
    def last(self) -> int:
        """The highest sequence; 0: none."""
        return self.written[-1][0] if self.written else 0


class Producers:
    """The producers of one log."""

    __slots__ = ("by_number",)

    def __init__(self) -> None:
        self.by_number: dict[int, Producer] = {}

    def known(self, number: int, sequence: int, now: int) -> bytes | Reject | None:
        """Return None for a frame that is to be appended; else the answer to it."""
        if not number or not sequence:
            return Reject("bad_request", "producers and their sequences are numbers from 1 up")
        producer = self.by_number.get(number)
        if producer is None:
            return None if self._has_room(now) else Reject("too_many_producers", f"the log has {PRODUCERS_MAX} of them")
        written = producer.written
        at = bisect_left(written, (sequence,))
        if at < len(written) and written[at][0] == sequence:
            producer.stamp = now
            return APPEND_REPLY.pack(*written[at][1:])
        if at == 0 and len(written) >= WINDOW:
            producer.stamp = now
            return APPEND_REPLY.pack(NO_OFFSET, NOT_KNOWN)
        return None

    def keep(self, number: int, sequence: int, first: int, records: int, now: int) -> None:
        """Keep a frame that was appended."""
        producer = self.by_number.get(number)
        if producer is None:
            producer = self.by_number[number] = Producer(now)
        producer.stamp = now
        insort(producer.written, (sequence, first, records))
        del producer.written[:-WINDOW]

    def inherit(self, packed: Sequence[Any]) -> None:
        """Take what producers wrote to another log as written to this one: a window grows to hold both, until it
        shrinks, with the next append at the latest."""
        for number, stamp, written in packed:
            producer = self.by_number.setdefault(number, Producer(stamp))
            producer.stamp = max(producer.stamp, stamp)
            had = {sequence for sequence, _, _ in producer.written}
            # They lie elsewhere: no offset of this log can be told for them.
            producer.written += [(sequence, NO_OFFSET, 0) for sequence, _, _ in written if sequence not in had]
            producer.written.sort()

    def shrink(self) -> None:
        """Keep a window of each producer."""
        for producer in self.by_number.values():
            del producer.written[:-WINDOW]

    def last(self, number: int) -> int:
        """Return a producer's highest sequence; 0 for one that is not known."""
        producer = self.by_number.get(number)
        return 0 if producer is None else producer.last

    def _has_room(self, now: int) -> bool:
        if len(self.by_number) >= PRODUCERS_MAX:
            for number in [number for number, one in self.by_number.items() if now - one.stamp > IDLE_MS]:
                del self.by_number[number]
        return len(self.by_number) < PRODUCERS_MAX

    def pack(self) -> list[Any]:
        """Return the producers for a snapshot."""
        return [[number, one.stamp, one.written] for number, one in self.by_number.items()]

    @classmethod
    def unpack(cls, packed: Sequence[Any]) -> Producers:
        """Return the producers that `pack` gave."""
        found = cls()
        for number, stamp, written in packed:
            one = found.by_number[number] = Producer(stamp)
            one.written = [(sequence, first, records) for sequence, first, records in written]
        return found
