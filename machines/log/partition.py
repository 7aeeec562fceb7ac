"""An append log as a topic's partition: which layout of slots it goes by, and what an older one routed is refused.

Invariants: a record that was routed by an earlier epoch than that of the fence is not appended behind the fence; a
fence stands at one offset for good, whoever asks again; a log takes keyed records only when it is open, and that comes
when all logs that its slots came from are fenced and it knows what their producers wrote. So a slot's records lie, in
their order, in the old log before its fence and in the new one after. Part of `machines.log` from version 4 on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack

from logyard.engine.machine import Reject
from logyard.protocol.errors import BadRequest
from logyard.protocol.topics import (
    FENCE,
    FENCED,
    INHERIT,
    INHERIT_CODE,
    OPEN,
    OPEN_CODE,
    PARTITION_CODES,
    PARTITION_OPENING,
    STALE_PARTITIONS,
    unpack_layout,
)

from .producers import Producers

SIZES = {INHERIT_CODE: INHERIT.size}


class PartitionFence:
    """`topic` 0: this log is no partition (yet). `offset`: where it was fenced last; `layout`: as it was packed."""

    __slots__ = ("topic", "number", "epoch", "layout", "offset")

    def __init__(self) -> None:
        self.topic = 0
        self.number = 0
        self.epoch = 0
        self.layout = b""
        self.offset = 0

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
        return None

    @staticmethod
    def takes(command: bytes) -> bool:
        """Return whether a command is for `apply`."""
        return len(command) >= SIZES.get(command[0], FENCE.size) and command[0] in PARTITION_CODES

    def apply(self, command: bytes, end: int, producers: Producers | None) -> bytes | Reject:
        """Fence, open, or learn what others' producers wrote."""
        assert producers is not None
        try:
            if command[0] == INHERIT_CODE:
                return self._inherit(INHERIT.unpack_from(command)[1], command[INHERIT.size :], producers)
            code, topic, epoch, number = FENCE.unpack_from(command)
            layout = command[FENCE.size :]
            unpack_layout(layout)
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
            self.epoch, self.layout, self.offset = epoch, layout, end
        return FENCED.pack(self.offset)

    def _open(self, topic: int, epoch: int, number: int, layout: bytes, end: int) -> bytes | Reject:
        if not self.topic:
            if end or not topic:
                return Reject("refused", "this log has records of its own: a topic's partition begins empty")
            self.topic, self.number, self.epoch, self.layout, self.offset = topic, number, epoch, layout, end
        return FENCED.pack(self.offset)

    def _inherit(self, topic: int, packed: bytes, producers: Producers) -> bytes | Reject:
        if self.topic == topic:
            # It was opened meanwhile, by somebody who had inherited all.
            return FENCED.pack(self.offset)
        if self.topic:
            return Reject("refused", f"this log is partition {self.number} of topic {self.topic}")
        try:
            rows = [
                (int(number), int(stamp), [(int(sequence), 0, 0) for sequence, *_ in written])
                for number, stamp, written in msgpack.unpackb(packed)
            ]
        except (ValueError, TypeError, msgpack.UnpackException):
            return Reject("bad_request", "producers are a list of (number, stamp, written)")
        producers.inherit(rows)
        return FENCED.pack(0)

    def told(self) -> list[Any] | None:
        """Return [topic, number, epoch, layout, offset of the fence]; None for a log that is no partition."""
        return [self.topic, self.number, self.epoch, self.layout, self.offset] if self.topic else None

    def pack(self) -> list[Any]:
        """Return it for a snapshot."""
        return [self.topic, self.number, self.epoch, self.layout, self.offset]

    @classmethod
    def unpack(cls, packed: Sequence[Any]) -> PartitionFence:
        """Return it as it was packed."""
        found = cls()
        found.topic, found.number, found.epoch, found.layout, found.offset = packed
        return found


assert OPEN.size == FENCE.size
