"""An append log as a topic's partition: which layout of slots it goes by, and what an older one routed is refused.

Invariants: a record that was routed by an earlier epoch than that of the fence is not appended behind the fence; a
fence stands at one offset for good, whoever asks again; a log takes keyed records only when it is open, and that comes
when all logs that its slots came from are fenced and it knows what their producers wrote. So a slot's records lie, in
their order, in the old log before its fence and in the new one after. Part of `machines.log` from version 4 on.

From version 5 on a log takes records of its own epoch only, so that one that gets slots of partitions which end takes
none of theirs before its fence; one that the layout does not name has ended, and takes nothing at all. From version 6
on it keeps one window of what a producer wrote to all logs that its slots came from: with one below another, what the
higher one had forgotten was new to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack

from logyard.engine.machine import Reject
from logyard.protocol.errors import BadRequest
from logyard.protocol.topics import (
    ADOPT,
    ADOPT_CODE,
    FENCE,
    FENCED,
    INHERIT,
    INHERIT_CODE,
    OPEN,
    OPEN_CODE,
    PARTITION_CODES,
    PARTITION_OPENING,
    STALE_PARTITIONS,
    Layout,
    moved_slots,
    unpack_layout,
)

from ..numbers import whole
from .producers import Producers

SIZES = {INHERIT_CODE: INHERIT.size, ADOPT_CODE: ADOPT.size}


class PartitionFence:
    """`topic` 0: this log is no partition (yet). `offset`: where it was fenced last; `layout`: as it was packed;
    `joined`: the epoch since which it has slots that it had not before, None below version 5; `ended`: it has none;
    `bounded`: in version 6."""

    __slots__ = ("topic", "number", "epoch", "layout", "offset", "joined", "ended", "bounded")

    def __init__(self) -> None:
        self.topic = 0
        self.number = 0
        self.epoch = 0
        self.layout = b""
        self.offset = 0
        self.joined: int | None = None
        self.ended = False
        self.bounded = False

    def know_ends(self) -> None:
        """Go on as in version 5."""
        self.joined = self.joined or 0

    def know_bounds(self, producers: Producers) -> None:
        """Go on as in version 6."""
        self.bounded = True
        producers.shrink()

    def refusal(self, topic: int, epoch: int) -> Reject | None:
        """Return why a record of that topic that was routed by that epoch is not appended."""
        if not self.topic:
            return Reject(PARTITION_OPENING, "this log does not take a topic's records yet: try again")
        if topic != self.topic:
            return Reject(STALE_PARTITIONS, f"this log is of topic {self.topic} now, not of {topic}")
        if epoch < self.epoch:
            return Reject(
                STALE_PARTITIONS,
                f"the record was routed by epoch {epoch} of the topic's partitions, it is {self.epoch} now: the query "
                '["partition"] of this log has the layout',
            )
        if self.joined is None:
            return None
        if self.ended:
            return Reject(STALE_PARTITIONS, f"partition {self.number} of topic {self.topic} has ended: look it up")
        if epoch > self.epoch:
            return Reject(PARTITION_OPENING, f"this log was not told of epoch {epoch} of the topic's partitions yet")
        return None

    def end(self) -> Reject:
        """Return why a log whose partition has ended takes no record at all."""
        return Reject("refused", f"this log was partition {self.number} of topic {self.topic}, which has ended")

    def takes(self, command: bytes) -> bool:
        """Return whether a command is for `apply`."""
        if command[0] == ADOPT_CODE and self.joined is None:
            return False
        return len(command) >= SIZES.get(command[0], FENCE.size) and command[0] in PARTITION_CODES

    def apply(self, command: bytes, end: int, producers: Producers | None) -> bytes | Reject:
        """Fence, open, or learn what others' producers wrote."""
        assert producers is not None
        try:
            if command[0] == INHERIT_CODE:
                return self._inherit(INHERIT.unpack_from(command)[1], command[INHERIT.size :], producers)
            if command[0] == ADOPT_CODE:
                _, topic, epoch = ADOPT.unpack_from(command)
                return self._adopt(topic, epoch, command[ADOPT.size :], producers)
            code, topic, epoch, number = FENCE.unpack_from(command)
            layout = command[FENCE.size :]
            after = unpack_layout(layout)
        except BadRequest as error:
            return Reject(error.code, str(error))
        if self.topic and (topic, number) != (self.topic, self.number):
            return Reject("refused", f"this log is partition {self.number} of topic {self.topic}")
        if code == OPEN_CODE:
            return self._open(topic, epoch, number, layout, end)
        if not self.topic:
            return Reject(PARTITION_OPENING, "this log is no topic's partition yet")
        if epoch < self.epoch:
            return Reject(STALE_PARTITIONS, f"this log is at epoch {self.epoch} already")
        if epoch > self.epoch:
            if self.joined is not None:
                self._turn(epoch, after)
            self.epoch, self.layout, self.offset = epoch, layout, end
        return FENCED.pack(self.offset)

    def _turn(self, epoch: int, after: Layout) -> None:
        """Note what another layout makes of this log: it may have slots of others then, or none any more."""
        self.ended = all(owner != self.number for _, owner in after)
        if any(target == self.number for _, target in moved_slots(unpack_layout(self.layout), after)):
            self.joined = epoch

    def _open(self, topic: int, epoch: int, number: int, layout: bytes, end: int) -> bytes | Reject:
        if not self.topic:
            if end or not topic:
                return Reject("refused", "this log has records of its own: a topic's partition begins empty")
            self.topic, self.number, self.epoch, self.layout, self.offset = topic, number, epoch, layout, end
            if self.joined is not None:
                self.joined = epoch
        return FENCED.pack(self.offset)

    def _adopt(self, topic: int, epoch: int, packed: bytes, producers: Producers) -> bytes | Reject:
        """Learn what producers wrote to partitions that end at an epoch; later it is known already."""
        if topic != self.topic:
            return Reject("refused", f"this log is of topic {self.topic}, not of {topic}")
        if epoch <= self.epoch:
            return FENCED.pack(self.offset)
        rows = _rows_of(packed)
        if rows is None:
            return Reject("bad_request", "producers are a list of (number, stamp, written)")
        producers.inherit(rows)
        if self.bounded:
            producers.shrink()
        return FENCED.pack(0)

    def _inherit(self, topic: int, packed: bytes, producers: Producers) -> bytes | Reject:
        if self.topic == topic:
            # It was opened meanwhile, by somebody who had inherited all.
            return FENCED.pack(self.offset)
        if self.topic:
            return Reject("refused", f"this log is partition {self.number} of topic {self.topic}")
        rows = _rows_of(packed)
        if rows is None:
            return Reject("bad_request", "producers are a list of (number, stamp, written)")
        producers.inherit(rows)
        if self.bounded:
            producers.shrink()
        return FENCED.pack(0)

    def told(self) -> list[Any] | None:
        """Return [topic, number, epoch, layout, offset of the fence]; None for a log that is no partition."""
        return [self.topic, self.number, self.epoch, self.layout, self.offset] if self.topic else None

    def pack(self) -> list[Any]:
        """Return it for a snapshot."""
        more = [] if self.joined is None else [self.joined, self.ended]
        if self.bounded:
            more.append(True)
        return [self.topic, self.number, self.epoch, self.layout, self.offset, *more]

    @classmethod
    def unpack(cls, packed: Sequence[Any]) -> PartitionFence:
        """Return it as it was packed."""
        found = cls()
        found.topic, found.number, found.epoch, found.layout, found.offset, *more = packed
        if more:
            found.joined, found.ended, *more = more
        found.bounded = bool(more)
        return found


def _rows_of(packed: bytes) -> list[Any] | None:
    """Return producers as `inherit` takes them; None for what is none."""
    try:
        return [
            (whole(number), whole(stamp), [(whole(sequence), 0, 0) for sequence, *_ in written])
            for number, stamp, written in msgpack.unpackb(packed)
        ]
    except (ValueError, TypeError, msgpack.UnpackException):
        return None


assert OPEN.size == FENCE.size
