"""Fenced producers of an append log: what the sinks of a stream processor have written, batch by batch.

A sink writes a batch as one *epoch*, in *lanes* (its tasks) whose frames are numbered from 1 on, each with a hash of
its contents. Invariant: of one (incarnation, epoch, lane, number) at most one frame is in the log, a lane's frames
stand in the order of their numbers, and nothing of an epoch is appended after it was closed: by a frame of a later
one, or by `EPOCH_DONE`. So a batch that is written again is in the log once, one that was cut elsewhere the second time
is refused instead of lost, and a writer of an earlier run is fenced. The older form (`producers`) knows neither epochs
nor contents and keeps its answers. Part of `machines.log` from version 3 on. Kafka: KIP-98's producer epochs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from logyard.engine.machine import Reject
from logyard.protocol.frame import NO_OFFSET, Epoch

from .command import APPEND_REPLY

PRODUCERS_MAX = 1024
"""Of one log."""
LANES_MAX = 65_536
"""Of all open epochs of one log: a snapshot's share of each is some 6 bytes."""
HASHES_MAX = 4096
"""Frames of open epochs whose hashes a log remembers; older ones count as written, and are counted."""
IDLE_MS = 7 * 24 * 3_600_000
"""A producer that was silent for so long goes when its place is needed, in an open epoch as well."""


class FencedProducer:
    """One sink. `lanes`: frames written, by lane of the open epoch."""

    __slots__ = ("incarnation", "epoch", "open", "stamp", "lanes")

    def __init__(self, incarnation: int, epoch: int, stamp: int) -> None:
        self.incarnation = incarnation
        self.epoch = epoch
        self.open = True
        self.stamp = stamp
        self.lanes: dict[int, int] = {}


class FencedProducers:
    """The fenced producers of one log. `forgotten`: log time (ms) of the last one that had to go. `unverified`: frames
    that came again so late that nobody remembers what they were."""

    __slots__ = ("by_number", "hashes", "lanes", "forgotten", "unverified")

    def __init__(self) -> None:
        self.by_number: dict[int, FencedProducer] = {}
        # (producer, lane, number) of the newest frames of open epochs: (hash, first offset, records), oldest first.
        self.hashes: dict[tuple[int, int, int], tuple[bytes, int, int]] = {}
        self.lanes = 0
        self.forgotten = 0
        self.unverified = 0

    def judge(self, epoch: Epoch, lane: int, number: int, content: bytes, now: int) -> bytes | Reject | None:
        """Return None for a frame that is to be appended; else the answer to it."""
        refused = self._refused(epoch, now)
        if refused is not None:
            return refused
        if not number:
            return Reject("bad_request", "the frames of a lane are numbered from 1 on")
        one = self.by_number.get(epoch.producer)
        same = one is not None and (one.incarnation, one.epoch) == (epoch.incarnation, epoch.epoch)
        written = one.lanes.get(lane, 0) if one is not None and same else 0
        if number <= written:
            assert one is not None
            one.stamp = now
            known = self.hashes.get((epoch.producer, lane, number))
            if known is None:
                self.unverified += 1
                return APPEND_REPLY.pack(NO_OFFSET, 0)
            if known[0] == content:
                return APPEND_REPLY.pack(*known[1:])
            return Reject(
                "sequence_differs",
                f"frame {number} of lane {lane} in epoch {epoch.epoch} was written with other contents: {known[2]} "
                f"records from offset {known[1]}",
            )
        if number > written + 1:
            return Reject(
                "sequence_gap",
                f"frame {number} of lane {lane} in epoch {epoch.epoch} comes before frame {written + 1} was written",
            )
        kept = self.lanes - (0 if one is None or same else len(one.lanes))
        if not written and kept >= LANES_MAX:
            return Reject("too_many_lanes", f"the open epochs of this log have {LANES_MAX} lanes")
        return None

    def keep(
        self, epoch: Epoch, lane: int, number: int, content: bytes, first: int, records: int, now: int
    ) -> None:  # fmt: skip
        """Store that a frame was appended."""
        one = self._enter(epoch, now)
        if lane not in one.lanes:
            self.lanes += 1
        one.lanes[lane] = number
        self.hashes[epoch.producer, lane, number] = content, first, records
        if len(self.hashes) > HASHES_MAX:
            del self.hashes[next(iter(self.hashes))]

    def close(self, epoch: Epoch, now: int) -> Reject | None:
        """Take no more frames of an epoch, nor of any before it."""
        refused = self._refused(epoch, now)
        if refused is not None:
            one = self.by_number.get(epoch.producer)
            closed = one is not None and (one.incarnation, one.epoch) == (epoch.incarnation, epoch.epoch)
            return None if closed else refused
        one = self._enter(epoch, now)
        one.open = False
        self._drop_lanes(epoch.producer, one)
        return None

    def state(self, number: int) -> tuple[int, int, bool] | None:
        """Return a producer's incarnation, its epoch, and whether that is open; None for one that is not known."""
        one = self.by_number.get(number)
        return None if one is None else (one.incarnation, one.epoch, one.open)

    def _refused(self, epoch: Epoch, now: int) -> Reject | None:
        if not epoch.producer or not epoch.incarnation:
            return Reject("bad_request", "producers and their incarnations are numbers from 1 up")
        one = self.by_number.get(epoch.producer)
        if one is None:
            if epoch.incarnation <= self.forgotten:
                return Reject(
                    "producer_forgotten",
                    f"the log does not know producer {epoch.producer} (any more): one that was idle had to go after "
                    "this one had begun, so it may have been this one",
                )
            if self._has_room(now):
                return None
            return Reject("too_many_producers", f"the log has {PRODUCERS_MAX} of them")
        begun, asked = (one.incarnation, one.epoch), (epoch.incarnation, epoch.epoch)
        if asked < begun or (asked == begun and not one.open):
            return Reject(
                "fenced",
                f"producer {epoch.producer} is past epoch {epoch.epoch}: it is at {one.epoch}"
                + ("" if epoch.incarnation == one.incarnation else " of another incarnation")
                + ("" if one.open else ", which is done"),
            )
        return None

    def _enter(self, epoch: Epoch, now: int) -> FencedProducer:
        one = self.by_number.get(epoch.producer)
        if one is None:
            one = self.by_number[epoch.producer] = FencedProducer(epoch.incarnation, epoch.epoch, now)
        elif (one.incarnation, one.epoch) != (epoch.incarnation, epoch.epoch):
            self._drop_lanes(epoch.producer, one)
            one.incarnation, one.epoch, one.open = epoch.incarnation, epoch.epoch, True
        one.stamp = now
        return one

    def _drop_lanes(self, number: int, one: FencedProducer) -> None:
        if one.lanes:
            self.lanes -= len(one.lanes)
            one.lanes.clear()
            self.hashes = {key: kept for key, kept in self.hashes.items() if key[0] != number}

    def _has_room(self, now: int) -> bool:
        if len(self.by_number) >= PRODUCERS_MAX:
            for number, one in list(self.by_number.items()):
                if now - one.stamp > IDLE_MS:
                    self._drop_lanes(number, one)
                    del self.by_number[number]
                    self.forgotten = now
        return len(self.by_number) < PRODUCERS_MAX

    def pack(self) -> list[Any]:
        """Return it for a snapshot."""
        producers = [
            [number, one.incarnation, one.epoch, one.open, one.stamp, list(one.lanes.items())]
            for number, one in self.by_number.items()
        ]
        hashes = [[*key, *kept] for key, kept in self.hashes.items()]
        return [producers, hashes, self.forgotten, self.unverified]

    @classmethod
    def unpack(cls, packed: Sequence[Any]) -> FencedProducers:
        """Return it as it was packed."""
        found = cls()
        producers, hashes, found.forgotten, found.unverified = packed
        for number, incarnation, epoch, is_open, stamp, lanes in producers:
            one = found.by_number[number] = FencedProducer(incarnation, epoch, stamp)
            one.open = is_open
            one.lanes = {lane: count for lane, count in lanes}
            found.lanes += len(one.lanes)
        found.hashes = {
            (producer, lane, number): (content, first, records)
            for producer, lane, number, content, first, records in hashes
        }
        return found
