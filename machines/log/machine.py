"""The append log: dense offsets over the records of committed frames; truncation from the front.

State is `start`, `end` and sparse anchors (offset, index): one at least every 1,024 entries or 256 KiB, so it stays
small for any log; and the few frames that a session's guard kept from it. From version 2 on also what is kept and for
how long (`retention`), and producers (`producers`); from version 3 on fenced producers (`fenced`); from version 4 on it
may be a topic's partition (`partition`), from version 5 on one that ends, in version 6 with bounds on what it inherits.
A log is brought to a version when somebody asks for what it has.
A record's head and body are payload: apply sees only how many records a frame carries. A lookup starts at an anchor and
counts the records of append frames from there (`AppendLog.locate`). Applied by `engine.replica.applier`.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterator, Sequence
from itertools import takewhile

import msgpack

from logyard.engine.machine import (
    Applied,
    Batch,
    Context,
    Effect,
    Frame,
    PayloadRange,
    PayloadRef,
    Position,
    Reject,
    Release,
    Sections,
    Timer,
)
from logyard.protocol.errors import OutOfRange
from logyard.protocol.frame import LOG_KNOWS

from .command import (
    APPEND,
    APPEND_REPLY,
    RETAIN,
    RETAIN_COMMAND,
    TRUNCATE,
    TRUNCATE_COMMAND,
    TRUNCATE_REPLY,
    epoch_append_of,
    epoch_done_of,
    expected_offset,
    is_append,
    produced_by,
    routed_by,
)
from .fenced import FencedProducers
from .keyed import KEYS_MAX, Keys, keys_of
from .partition import PartitionFence
from .producers import Producers
from .retention import AGE_MS_MAX, AGE_MS_MIN, TIMER, Policy, Retention
from .slices import Long, payload_of, runs_of

ANCHOR_ENTRIES = 1024
ANCHOR_BYTES = 256 * 1024


class AppendLog:
    """A log of records with dense offsets. Offsets start at 0, or at the `start` it is made with, and are never reused.

    Commands: see `machines.log.command`. Replies: appends -> (first offset, records); TRUNCATE, RETAIN -> (start).
    APPEND_AT is for logs made with a `start`: that is part of a group's definition, so all members agree on it, and
    one that does not know the command does not know the argument either (decision 0014).
    """

    __slots__ = (
        "start", "end", "start_position", "anchors", "entries_since", "bytes_since", "last_index", "holes",
        "long", "placed", "keys", "stage", "retention", "producers", "fenced", "partition", "guarded", "_ahead",
        "_behind",
    )  # fmt: skip
    version = 6
    upgrade_on_demand = True
    wall_time = True
    """Its times are ages of records: nothing is granted for a length of time."""
    exclusive = True
    """Its truncations release ranges: payloads of another machine in its group would go with them."""

    def __init__(self, start: int | None = None, keyed: bool = False, stage: bool = False) -> None:
        self.placed = start is not None
        # Of a keyed log (part of its definition, as the start is): which records live.
        self.keys = Keys() if keyed else None
        # Of a sink's stage: its records go by `truncate` alone, when what they wait for has happened.
        self.stage = stage
        self.start = start or 0
        self.end = self.start
        self.start_position = Position(0, 0)
        self.anchors: list[tuple[int, int]] = []
        self.entries_since = 0
        self.bytes_since = 0
        self.last_index = 0
        # Frames that are in the log and not in the state (duplicates, refusals), whose payloads are released: (index,
        # first ordinal, records; 0: the whole entry).
        self.holes: list[tuple[int, int, int]] = []
        # Payloads that came in pieces, by offset. Pieces lie before their record: `_ahead` is a heap of (first piece,
        # offset) of those behind the start, `_behind` holds the records some of whose pieces lie before it.
        self.long: dict[int, Long] = {}
        self._ahead: list[tuple[int, int]] = []
        self._behind: set[int] = set()
        # None in version 1.
        self.retention: Retention | None = None
        self.producers: Producers | None = None
        # None below version 3.
        self.fenced: FencedProducers | None = None
        # None below version 4.
        self.partition: PartitionFence | None = None
        # A plain append is not just appended: it needs a key, or nothing is taken any more.
        self.guarded = keyed

    def upgrade(self, from_version: int, to_version: int) -> None:
        """Bring the state to a version. 2: limits on what is kept (none yet), and producers; 3: fenced producers;
        4: it may be a topic's partition (it is none yet); 5: one that may end, or get slots of those that do; 6: with a
        window of what producers wrote, wherever that was."""
        if from_version < 2:
            self.retention, self.producers = Retention(len(self.anchors)), Producers()
        if from_version < 3 <= to_version:
            self.fenced = FencedProducers()
        if from_version < 4 <= to_version:
            self.partition = PartitionFence()
        if to_version > 4 and self.partition is not None:
            self.partition.know_ends()
        if to_version > 5 and self.partition is not None and self.producers is not None:
            self.partition.know_bounds(self.producers)

    def apply_batch(self, context: Context, frames: Sequence[Frame]) -> Batch:
        """Apply one entry: every frame gets a reply; a truncation releases what lies before it."""
        replies: list[bytes | Reject] = []
        effects: list[Effect] = []
        size = long = 0
        first = self.end
        for frame in frames:
            if frame.commands != APPEND or self.guarded:
                reply = self._other(context, frame, frames, effects)
                if reply is not None:
                    replies.append(reply)
                    continue
            replies.append(APPEND_REPLY.pack(self.end, frame.records))
            if frame.pieces:
                self._keep(self.end, frame)
                long += frame.extent
            self.end += frame.records
            size += frame.pack_bytes + frame.large_bytes
        if context.skipped:
            for ordinal, records in context.skipped:
                self._hole(context, ordinal, records)
        if self.end != first:
            self._anchor(context, first, size, long)
        if self.keys is not None and self.keys.removals:
            for dead in self.keys.outlived(context.timestamp, self.end - 1):
                self._died(*dead, effects)
        self.last_index = context.index
        if self.retention is not None and self.retention.policy:
            self._trim(context, frames, effects)
        return Batch(replies, effects)

    def apply(self, context: Context, command: bytes, refs: tuple[PayloadRef, ...]) -> Applied:
        """Apply one command at a time: `apply_batch` is what the engine calls."""
        frame = Frame(1, 0, 1, len(command), 0, 0, 0, 0, command)
        batch = self.apply_batch(context, (frame,))
        reply = batch.replies[0]
        if isinstance(reply, Reject):
            raise reply
        return Applied(reply, batch.effects)

    def _hole(self, context: Context, ordinal: int, records: int) -> None:
        insort(self.holes, (context.index, ordinal, 0 if records == context.records else records))

    def _anchor(self, context: Context, offset: int, size: int, long: int) -> None:
        # The anchor stands before the entry, so a lookup never has to go back.
        kept, anchors = self.retention, self.anchors
        if (
            not anchors
            or self.entries_since >= ANCHOR_ENTRIES
            or self.bytes_since >= ANCHOR_BYTES
            or (kept is not None and kept.is_full(context.timestamp, offset - anchors[-1][0], self.bytes_since))
        ):
            anchors.append((offset, context.index))
            self.entries_since = 0
            self.bytes_since = 0
            if kept is not None:
                kept.mark(context.timestamp)
        self.entries_since += 1
        self.bytes_since += size
        if kept is not None:
            kept.add(context.timestamp, size + long)

    def _trim(self, context: Context, frames: Sequence[Frame], effects: list[Effect]) -> None:
        """Drop what no limit covers; a timer sees to what will only grow old."""
        kept = self.retention
        assert kept is not None
        now = context.timestamp
        kept.learn(now)
        if kept.all_outlived(now):
            self._start_at(self.end, Position(context.index, 0), frames, effects)
        else:
            number = kept.outlived(self.anchors, self.end, now)
            if number:
                offset, index = self.anchors[number]
                self._start_at(offset, Position(index, 0), frames, effects)
        if not kept.due and kept.set_timer(now, self.start == self.end):
            effects.append(Timer(TIMER, kept.due))

    def on_timer(self, context: Context, name: str) -> Applied:
        """Drop what has grown too old."""
        effects: list[Effect] = []
        if self.retention is not None:
            self.retention.stop_timer()
            self._trim(context, (), effects)
        return Applied(b"", effects)

    def _keep(self, offset: int, frame: Frame) -> None:
        """Keep a record whose payload came in pieces. It gets an anchor of its own: the way to it leads past all of
        them."""
        self.long[offset] = found = Long(frame.extent, runs_of(frame.pieces))
        heapq.heappush(self._ahead, (found.first, offset))
        self.bytes_since = max(self.bytes_since, ANCHOR_BYTES)

    def _start_at(self, offset: int, position: Position, frames: Sequence[Frame], effects: list[Effect]) -> None:
        """Drop every record before `offset`, which lies at `position`; unless the log starts there or later."""
        if offset <= self.start:
            return
        self._cut(offset, position, frames, effects)
        self.start, self.start_position = offset, position
        if self.keys is not None:
            self.keys.cut(offset)
        passed = max(0, bisect_right(self.anchors, (offset, position.index)) - 1)
        del self.anchors[:passed]
        if self.retention is not None:
            self.retention.drop_marks(passed)
        del self.holes[: bisect_left(self.holes, (*position, 0))]

    def _cut(self, offset: int, position: Position, frames: Sequence[Frame], effects: list[Effect]) -> None:
        """Release what lies before `position`, but for pieces of records that stay; and pieces of records that go,
        although they lie before the old start."""
        while self._ahead and self._ahead[0][0] < position.index:
            at = heapq.heappop(self._ahead)[1]
            if at in self.long:
                self._behind.add(at)
        kept: list[tuple[int, int, int]] = []
        for at in sorted(self._behind):
            if at < offset:
                self._behind.discard(at)
                effects += (
                    Release(Position(first, 0), Position(first + count, 0)) for first, _, count in self.long[at].runs
                )
            else:
                kept += self.long[at].runs
        for frame in frames:
            # A record of this very entry that was not reached yet.
            kept += runs_of(frame.pieces)
        for at in list(takewhile(lambda at: at < offset, self.long)):
            del self.long[at]
        first = self.start_position
        for index, _, count in sorted(kept):
            if position <= (index, 0):
                break
            if first < (index, 0):
                effects.append(Release(first, Position(index, 0)))
            first = max(first, Position(index + count, 0))
        if first < position:
            effects.append(Release(first, position))

    def _other(
        self, context: Context, frame: Frame, frames: Sequence[Frame], effects: list[Effect]
    ) -> bytes | Reject | None:
        """Return the answer to a frame that is no plain append; None for one whose records get the next offsets."""
        command = frame.commands
        reply: bytes | Reject | None
        if self.keys is not None and (named := keys_of(frame)) is not None:
            if self.keys.has_room(key for key, _ in named):
                self._put(context, frame, named, effects)
                return None
            reply = Reject("too_many_keys", f"a keyed log has {KEYS_MAX} keys at most")
        elif self.keys is not None and is_append(command):
            reply = Reject("bad_request", "each record of this log needs a key, and it has no producers")
        elif self.partition is not None and self.partition.ended and is_append(command) and not routed_by(command):
            reply = self.partition.end()
        elif self.placed and (expected := expected_offset(command)) is not None:
            if expected == self.end:
                return None
            reply = Reject("out_of_range", f"can't append at {expected}: the log ends at {self.end}")
        elif not frame.uniform or not command or (frame.pieces and not is_append(command)):
            reply = _unknown()
        elif self.partition is not None and (routed := routed_by(command)) is not None:
            reply = self.partition.refusal(*routed[:2]) or self._produced(context, frame, routed[2], effects)
            if reply is None:
                return None
        elif self.partition is not None and self.partition.takes(command):
            reply = self.partition.apply(command, self.end, self.producers)
            self.guarded = self.keys is not None or self.partition.ended
        elif self.producers is not None and (producer := produced_by(command)) is not None:
            reply = self._produced(context, frame, producer, effects)
            if reply is None:
                return None
        elif self.fenced is not None and (fenced := epoch_append_of(command)) is not None:
            number = fenced[0].producer
            if self.producers is not None and number in self.producers.by_number:
                reply = _other_form(number)
            else:
                reply = self.fenced.judge(*fenced, context.timestamp)
            if reply is None:
                self.fenced.keep(*fenced, self.end, frame.records, context.timestamp)
                return None
            self._known(context, frame, reply, effects)
        elif self.fenced is not None and (done := epoch_done_of(command)) is not None:
            reply = self.fenced.close(done, context.timestamp) or TRUNCATE_REPLY.pack(self.start)
        elif self.retention is not None and len(command) == RETAIN_COMMAND.size and command[0] == RETAIN:
            reply = self._retain(Policy(*RETAIN_COMMAND.unpack(command)[1:]), effects)
        elif len(command) == TRUNCATE_COMMAND.size and command[0] == TRUNCATE:
            _, offset, index, ordinal = TRUNCATE_COMMAND.unpack(command)
            reply = self._truncate(context.index, offset, Position(index, ordinal), frames, effects)
        else:
            reply = _unknown()
        if isinstance(reply, Reject):
            self._hole(context, frame.first, frame.records)
        return reply

    def _produced(
        self, context: Context, frame: Frame, producer: tuple[int, int] | None, effects: list[Effect]
    ) -> bytes | Reject | None:
        """Return the answer to a producer's frame; None for one that is to be appended."""
        assert self.producers is not None
        if producer is None:
            return None
        if self.fenced is not None and producer[0] in self.fenced.by_number:
            return _other_form(producer[0])
        reply = self.producers.known(*producer, context.timestamp)
        if reply is None:
            self.producers.keep(*producer, self.end, frame.records, context.timestamp)
            return None
        self._known(context, frame, reply, effects)
        return reply

    def _known(self, context: Context, frame: Frame, reply: bytes | Reject, effects: list[Effect]) -> None:
        """Give up the bytes of a frame that is in the log already. (Those of refused frames the engine releases.)"""
        if not isinstance(reply, Reject):
            effects += payload_of(context, frame)
            self._hole(context, frame.first, frame.records)
            for first, _, count in runs_of(frame.pieces):
                for index in range(first, first + count):
                    insort(self.holes, (index, 0, 0))

    def _put(
        self, context: Context, frame: Frame, named: Sequence[tuple[bytes, bool]], effects: list[Effect]
    ) -> None:  # fmt: skip
        """Put the records of a keyed append in the places of those with the same keys."""
        assert self.keys is not None
        for number, (key, removed) in enumerate(named):
            position = Position(context.index, frame.first + number)
            old = self.keys.put(key, self.end + number, position, context.timestamp if removed else None)
            if old is not None:
                self._died(*old, effects)

    def _died(self, offset: int, position: Position, effects: list[Effect]) -> None:
        """Release a keyed record's payload, which is nobody's now."""
        effects.append(Release(position, Position(position.index, position.ordinal + 1)))
        long = self.long.pop(offset, None)
        if long is not None:
            self._behind.discard(offset)
            effects += (Release(Position(first, 0), Position(first + count, 0)) for first, _, count in long.runs)

    def _truncate(
        self, at: int, offset: int, position: Position, frames: Sequence[Frame], effects: list[Effect]
    ) -> bytes | Reject:
        if offset > self.end:
            return Reject("out_of_range", f"can't truncate before {offset}: the log ends at {self.end}")
        if offset > self.start:
            if position < self.start_position:
                return Reject("bad_request", f"position {tuple(position)} lies before the start of the log")
            if position > Position(at, 0):
                # Records that are not written yet would be released with the others, and lost when they come.
                return Reject("bad_request", f"position {tuple(position)} lies behind entry {at}, which names it")
            self._start_at(offset, position, frames, effects)
        return TRUNCATE_REPLY.pack(self.start)

    def _retain(self, policy: Policy, effects: list[Effect]) -> bytes | Reject:
        kept = self.retention
        assert kept is not None
        if self.stage:
            return Reject("refused", "this log is a sink's stage: nothing but the sink takes records out of it")
        if policy.ms and not AGE_MS_MIN <= policy.ms <= AGE_MS_MAX:
            return Reject("bad_request", f"records are kept for {AGE_MS_MIN} to {AGE_MS_MAX} ms, not for {policy.ms}")
        kept.limit(policy)
        if kept.due:
            # It is set anew when this entry is applied, if it is still of use.
            kept.stop_timer()
            effects.append(Timer(TIMER, None))
        return TRUNCATE_REPLY.pack(self.start)

    def snapshot(self) -> Sections:
        """Return one section, a few bytes plus 2 numbers an anchor (4 from version 2 on), and what producers wrote."""
        state = (self.start, self.end, tuple(self.start_position), self.anchors, self.entries_since, self.bytes_since)
        more: tuple[object, ...] = ()
        if self.retention is not None and self.producers is not None:
            more = (self.retention.pack(), self.producers.pack())
        if self.keys is not None or self.fenced is not None:
            more = (*(more or (None, None)), self.keys.pack() if self.keys is not None else None)
        if self.fenced is not None:
            more = (*more, self.fenced.pack())
        if self.partition is not None:
            more = (*more, self.partition.pack())
        return {"log": msgpack.packb((*state, self.last_index, self.holes, list(self.long.items()), *more))}

    def restore(self, sections: Sections) -> None:
        """Replace the state."""
        start, end, position, anchors, entries, size, last, *rest = msgpack.unpackb(sections["log"])
        self.start, self.end, self.start_position = start, end, Position(*position)
        self.anchors = [(offset, index) for offset, index in anchors]
        self.entries_since, self.bytes_since, self.last_index = entries, size, last
        # A snapshot of the first release has none.
        self.holes = [(index, ordinal, records) for index, ordinal, records in rest[0]] if rest else []
        self.long = {at: Long(total, tuple(map(tuple, runs))) for at, (total, runs) in rest[1]} if rest[1:] else {}
        # And one of version 1 has neither of these.
        self.retention = Retention.unpack(rest[2]) if rest[2:] and rest[2] is not None else None
        self.producers = Producers.unpack(rest[3]) if rest[3:] and rest[3] is not None else None
        self.keys = Keys.unpack(rest[4]) if rest[4:] and rest[4] is not None else None
        self.fenced = FencedProducers.unpack(rest[5]) if rest[5:] else None
        self.partition = PartitionFence.unpack(rest[6]) if rest[6:] else None
        self.guarded = self.keys is not None or (self.partition is not None and self.partition.ended)
        behind = position[0]
        self._behind = {at for at, one in self.long.items() if one.first < behind}
        self._ahead = [(one.first, at) for at, one in self.long.items() if at not in self._behind]
        heapq.heapify(self._ahead)

    def log_bounds(self) -> tuple[int, int]:
        """Return the first offset and the next one."""
        return self.start, self.end

    def live_refs(self) -> Iterator[PayloadRange]:
        """Yield everything from the start on. (A truncation's own empty pack counts as live until the start passes
        it.)"""
        if self.keys is not None:
            yield from self.keys.live_refs()
            for one in self.long.values():
                for piece, _, count in one.runs:
                    yield PayloadRange(Position(piece, 0), Position(piece + count, 0))
            return
        first, end = self.start_position, Position(self.last_index + 1, 0)
        for index, ordinal, records in self.holes:
            if Position(index, ordinal) > first:
                yield PayloadRange(first, Position(index, ordinal))
            first = max(first, Position(index, ordinal + records) if records else Position(index + 1, 0))
        yield PayloadRange(first, max(first, end))
        for at in self._behind:
            for piece, _, count in self.long[at].runs:
                yield PayloadRange(Position(piece, 0), Position(piece + count, 0))

    def holes_of(self, index: int) -> Collection[int]:
        """Return the first ordinals of the frames of entry `index` that were not applied."""
        if not self.holes:
            return ()
        low, high = bisect_left(self.holes, (index, 0, 0)), bisect_left(self.holes, (index + 1, 0, 0))
        return {ordinal for _, ordinal, _ in self.holes[low:high]}

    def query(self, request: bytes) -> bytes:
        """Answer in msgpack: ``["bounds"]`` -> ``[start, end]``, ``["anchors"]`` -> their number, ``["retention"]`` ->
        ``[ms, bytes, records]``, ``["producer", number]`` -> its highest sequence, ``["epoch", number]`` -> a fenced
        producer's ``[incarnation, epoch, open]`` or None, ``["unverified"]`` -> frames of those that came again too
        late to be compared, ``["partition"]`` -> ``[topic, number, epoch, layout, offset]`` of a topic's partition or
        None, ``["producers"]`` -> what all producers wrote. Raises `Reject`."""
        try:
            asked = msgpack.unpackb(request)
        except (ValueError, msgpack.UnpackException):
            asked = None
        answer: object
        match asked:
            case ["bounds"]:
                answer = (self.start, self.end)
            case ["anchors"]:
                answer = len(self.anchors)
            case ["retention"]:
                answer = tuple(self.retention.policy if self.retention is not None else Policy())
            case ["producer", int(number)]:
                answer = self.producers.last(number) if self.producers is not None else 0
            case ["epoch", int(number)]:
                answer = self.fenced.state(number) if self.fenced is not None else None
            case ["unverified"]:
                answer = self.fenced.unverified if self.fenced is not None else 0
            case ["partition"]:
                answer = self.partition.told() if self.partition is not None else None
            case ["producers"]:
                answer = self.producers.pack() if self.producers is not None else []
            case _:
                known = "bounds, anchors, retention, producer, epoch, unverified, partition and producers"
                raise Reject("bad_request", f"the append log answers {known}")
        packed: bytes = msgpack.packb(answer)
        return packed

    def anchor(self, offset: int) -> tuple[int, Position]:
        """Return the (offset, position) from which to count towards `offset`. Raises `OutOfRange`."""
        if not self.start <= offset < self.end:
            raise OutOfRange(
                f"offset {offset} is outside of {self.start}..{self.end - 1}"
                if self.end > self.start
                else f"offset {offset} is outside of an empty log that goes on at {self.end}",
                start=self.start,
                end=self.end,
            )
        found = bisect_right(self.anchors, offset, key=_offset) - 1
        # What lies before the start may be gone already, so an anchor below it is no place to count from.
        if found < 0 or self.anchors[found][0] <= self.start:
            return self.start, self.start_position
        return self.anchors[found][0], Position(self.anchors[found][1], 0)


def _unknown() -> Reject:
    return Reject("bad_request", LOG_KNOWS)


def _other_form(number: int) -> Reject:
    return Reject("bad_request", f"producer {number} of this log writes in the other form (with epochs, or without)")


def _offset(anchor: tuple[int, int]) -> int:
    return anchor[0]
