"""Producers of an append log, made by `Log.producer` and `Log.epoch`; see `client.producer`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from logyard.protocol.errors import BadRequest, Busy, LogyardError
from logyard.protocol.frame import Buffer, Epoch, epoch_append_command, produce_command

from ..log import FORGOTTEN
from ..numbering import LANE_MAX, NUMBER_MAX, WINDOW, Numbering, Turn, content_hash
from .caller import Caller

LOOK_S = 1.0
"""Who waits for its turn looks again after so long: see `Numbering.must_wait`."""


class Appends(Protocol):
    """A log that takes a producer's appends."""

    yard: Caller

    async def append_many(
        self,
        records: Iterable[tuple[Buffer, Buffer | None]],
        *,
        timeout: float | None = None,
        command: bytes = b"",
    ) -> range:
        """Append records with that command."""


async def wait_for_turn(yard: Caller, numbers: Numbering, turn: Turn, deadline: float) -> bool:
    """Wait until a sequence may be sent; return whether it had to. Raises `Busy`."""
    waited = False
    if turn.named:
        # Tasks that begin together do not begin in the order of their sequences.
        await yard.pause(0)
    while (event := numbers.must_wait(turn, yard.clock(), yard.event)) is not None:
        left = deadline - yard.clock()
        if left <= 0:
            raise Busy.told(
                f"sequence {turn.sequence} was not sent: one that comes {WINDOW} or more before it is not written yet, "
                "or one that an earlier run of its producer wrote is sent again",
                {"cause": "producer window", "retry_after": LOOK_S},
            )
        waited = True
        await yard.wait_for(event, min(left, LOOK_S))
    return waited


class Producer(Numbering):
    """A producer of one log."""

    __slots__ = ("_log",)

    def __init__(self, log: Appends, number: int, last: int) -> None:
        super().__init__(number, last)
        self._log = log

    async def append(self, metadata: Buffer, payload: Buffer | None = None, *, sequence: int | None = None) -> range:
        """Append one record, as `append_many` does."""
        return await self.append_many([(metadata, payload)], sequence=sequence)

    async def append_many(
        self,
        records: Iterable[tuple[Buffer, Buffer | None]],
        *,
        sequence: int | None = None,
        timeout: float | None = None,
    ) -> range:
        """Append records together, unless this producer wrote that sequence (default: the next one) before; return
        their offsets, either way. Empty when they are in the log since so long ago that it does not know where.

        A sequence waits while one that comes 64 before it is not written. Raises a `LogyardError` of code
        `sequence_forgotten` when it comes behind 64 later ones all the same, as one that failed and was sent again too
        late: whether the records are in the log is not known then.
        """
        yard, turn = self._log.yard, self.begin(sequence)
        try:
            deadline = yard.clock() + (yard.timeout if timeout is None else timeout)
            if await wait_for_turn(yard, self, turn, deadline):
                timeout = max(0.001, deadline - yard.clock())
            command = produce_command(self.number, turn.sequence)
            try:
                found = await self._log.append_many(records, timeout=timeout, command=command)
            except LogyardError as error:
                if error.code != FORGOTTEN or not turn.trusted:
                    raise
                found = range(0)
        except BaseException as error:
            self.end(turn, yard.clock(), error)
            raise
        self.end(turn, yard.clock())
        return found


class EpochWriter:
    """A writer of one lane of a fenced producer's epoch. `last`: the highest number of a frame that was given."""

    __slots__ = ("epoch", "lane", "last", "_log")

    def __init__(self, log: Appends, epoch: Epoch, lane: int) -> None:
        if not 0 <= lane <= LANE_MAX:
            raise BadRequest(f"a lane is a number from 0 to {LANE_MAX}")
        self._log = log
        self.epoch = epoch
        self.lane = lane
        self.last = 0

    async def append(self, metadata: Buffer, payload: Buffer | None = None, *, number: int | None = None) -> range:
        """Append one record, as `append_many` does; a payload above 1 MiB travels in pieces."""
        return await self.append_many([(metadata, payload)], number=number)

    async def append_many(
        self,
        records: Iterable[tuple[Buffer, Buffer | None]],
        *,
        number: int | None = None,
        timeout: float | None = None,
    ) -> range:
        """Append records together as frame `number` of the lane (default: the next one), unless that was written;
        return their offsets, either way. Empty when it was so long ago that the log does not know where, nor what it
        was.

        Raises a `LogyardError` of code `sequence_differs` when that frame was written with other contents, `fenced`
        when the epoch is past, `sequence_gap` when the frame before it is not written (yet: give it again behind that
        one), `producer_forgotten`, `too_many_lanes`, `too_many_producers`.
        """
        given = list(records)
        chosen = self.last + 1 if number is None else number
        if not 0 < chosen <= NUMBER_MAX:
            raise BadRequest("frames of a lane are numbered from 1 up")
        self.last = max(self.last, chosen)
        command = epoch_append_command(self.epoch, self.lane, chosen, content_hash(given))
        return await self._log.append_many(given, timeout=timeout, command=command)
