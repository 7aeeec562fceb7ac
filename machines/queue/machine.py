"""The queue as a machine: messages wait, are delivered to consumers on credit, and are gone when they are settled.

State is ids, places, sizes, counts and due times of *runs* of messages (`runs`); bodies are payloads that go from
their home to the consumer's socket by a `Deliver` effect. What is delivered stays in the state until it is settled, so
that a lost delivery is made again (`on_listen`, RESEND). docs/machines/queue.md is the table of what it does when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import msgpack

from logyard.engine.machine import (
    Append,
    Applied,
    Batch,
    Context,
    Effect,
    End,
    Frame,
    PayloadRange,
    PayloadRef,
    Reject,
    Sections,
    Timer,
)

from . import command as wire
from .command import malformed, parse_publish, parse_ranges
from .consumers import Consumer, deliveries
from .options import QueueOptions
from .runs import Run
from .snapshot import SECTION, Frozen, decode, freeze
from .state import TIMER, QueueState

WRITTEN_AT_ONCE = 1000
"""Runs of a state that is written on the loop: a millisecond's work, less than handing it to a thread is worth."""
CONSUMERS_MAX = 10_000


class Queue:
    """One queue with its dead letters. Commands: see `machines.queue.command`."""

    __slots__ = ("options", "state")
    version = 3
    """From version 2 on log time can jump (`jumped`). From version 3 on consumers get all that there is room for at
    once, and priorities take turns by what went out."""
    exclusive = True
    """It releases whole entries: payloads of another machine in its group would go with them."""

    def __init__(self, options: QueueOptions | None = None) -> None:
        self.options = options or QueueOptions()
        self.state = QueueState(self.options)

    # What the engine calls

    def apply_batch(self, context: Context, frames: Sequence[Frame]) -> Batch:
        """Apply one entry: every frame in its order, then what waits is handed out."""
        state = self.state
        state.begin(context)
        replies: list[bytes | Reject] = []
        gone: list[tuple[int, int]] = []
        for frame in frames:
            try:
                if state.ended:
                    raise Reject("queue_expired", "the queue was not used for its whole time to live, and has ended")
                if frame.pieces or not frame.uniform or not frame.commands:
                    raise malformed("one command for a whole frame, whose payloads travel in one piece, is needed")
                kind = frame.commands[0]
                if kind == wire.PUBLISH:
                    replies.append(self._publish(context, frame, gone))
                    continue
                handler = HANDLERS.get(kind)
                if handler is None:
                    raise malformed(f"it begins with {kind:#x}")
                replies.append(handler(self, frame))
            except Reject as reject:
                replies.append(reject)
                continue
            # Nobody needs the payload of a command that is no message.
            if gone and gone[-1][1] == frame.first:
                gone[-1] = (gone[-1][0], frame.first + frame.records)
            else:
                gone.append((frame.first, frame.first + frame.records))
        return Batch(replies, self._finish(context, gone))

    def apply(self, context: Context, command: bytes, refs: tuple[PayloadRef, ...]) -> Applied:
        """Apply a follow-up of its own, TOUCH: it is the entry's log time that counts; or the host's JUMP."""
        if command[:1] == bytes((wire.JUMP,)) and context.version > 1 and len(command) == wire.JUMP_COMMAND.size:
            # First: nothing is over by the entry's own time that is not over by the one before it.
            self.state.prolong(wire.JUMP_COMMAND.unpack(command)[1])
            self.state.begin(context)
            self.state.effects.append(Timer(TIMER, self.state.timer))
        elif command == wire.TOUCH_COMMAND:
            self.state.begin(context)
        else:
            raise malformed("a queue's commands come in frames")
        return Applied(_counted(0), self._finish(context))

    def on_timer(self, context: Context, name: str) -> Applied:
        """Do what is due."""
        state = self.state
        state.begin(context)
        if state.timer is not None and state.timer > context.timestamp:
            state.effects.append(Timer(TIMER, state.timer))
        return Applied(b"", self._finish(context))

    def on_session_end(self, context: Context, session: int) -> Applied:
        """Take back what the consumers of a client that is gone held, as deliveries that failed."""
        state = self.state
        state.begin(context)
        for consumer in [one for one in state.consumers.values() if one.key[0] == session]:
            state.detach(consumer, counted=True)
        return Applied(b"", self._finish(context))

    def has_terms(self) -> bool:
        """Return whether a lease, a delay or a time to live is running, the queue's own too."""
        return self.state.has_terms()

    def jumped(self, ms: int) -> bytes:
        """Return the command, from version 2 on, for an entry in which log time jumps ahead by `ms`. All terms go
        on."""
        return wire.JUMP_COMMAND.pack(wire.JUMP, ms)

    def _finish(self, context: Context, own: Iterable[tuple[int, int]] | None = None) -> list[Effect]:
        state = self.state
        state.dispatch()
        if state.keep_length():
            # Somebody may wait for those that are dead letters now.
            state.dispatch()
        if own is not None:
            state.commands(context, own)
        effects = state.finish()
        if state.ended:
            effects.append(End())
        return effects

    def on_role(self, role: str) -> Sequence[Effect]:
        """Return what a new leader has to do: an ended queue has to go; one that nobody ever used counts its time from
        now."""
        state = self.state
        if role != "leader":
            return ()
        if state.ended:
            return (End(),)
        never_used = self.options.expires_ms and not state.unused_since and not state.consumers
        return (Append(wire.TOUCH_COMMAND),) if never_used else ()

    def on_listen(self, session: int) -> Sequence[Effect]:
        """Return everything that the consumers of a client hold once more: it listens anew."""
        return [
            effect
            for consumer in self.state.consumers.values()
            if consumer.key[0] == session
            for effect in deliveries(consumer, consumer.held, 1)
        ]

    def snapshot(self) -> Sections:
        """Return one section."""
        return freeze(self.state).sections()

    def freeze(self) -> Frozen | None:
        """Return a view of the state that later commands do not change; None where there is little to write."""
        return freeze(self.state) if self.state.size > WRITTEN_AT_ONCE else None

    def restore(self, sections: Sections) -> None:
        """Replace the state."""
        self.state = decode(self.options, sections[SECTION])

    def live_refs(self) -> Iterator[PayloadRange]:
        """Return the bodies of all messages that are not settled, dropped or expired."""
        return (run.payloads for run in self.state.runs())

    def overview(self) -> dict[str, Any]:
        """Return numbers of messages and bytes by where they are, what was counted, and the consumers."""
        state = self.state
        consumers = state.consumers.values()
        return {
            "ready": state.ready,
            "ready_bytes": state.ready_bytes,
            "unacked": sum(one.messages for one in consumers),
            "unacked_bytes": sum(one.bytes for one in consumers),
            "delayed": len(state.delayed),
            "delayed_bytes": state.delayed_bytes,
            "dead": state.dead.messages,
            "dead_bytes": state.dead.bytes,
            "consumers": len(consumers),
            "publishers": len(state.publishers),
            **state.counts,
        }

    def query(self, request: bytes) -> bytes:
        """Answer, in msgpack: ``["stats"]`` -> `overview`; ``["consumers"]`` -> rows ``[session, consumer, priority,
        messages held, bytes held, credit, dead, active]``. Raises `Reject`."""
        try:
            asked = msgpack.unpackb(request)
        except (ValueError, msgpack.UnpackException):
            asked = None
        state = self.state
        if asked == ["stats"]:
            answer: bytes = msgpack.packb(self.overview())
        elif asked == ["consumers"]:
            single = self.options.single_active
            answer = msgpack.packb(
                [
                    (*one.key, one.priority, one.messages, one.bytes, one.credit, one.dead,
                     one.dead or not single or one.key == state.active)
                    for one in state.consumers.values()
                ]
            )  # fmt: skip
        else:
            raise Reject("bad_request", "a queue answers stats and consumers")
        return answer

    # Commands

    def _publish(self, context: Context, frame: Frame, gone: list[tuple[int, int]]) -> bytes:
        state, options, records = self.state, self.options, frame.records
        total = frame.pack_bytes + frame.large_bytes - 8 * records
        wanted = parse_publish(frame.commands, records, total)
        first = state.next_number
        run = Run(
            first, first, records, context.index, frame.first, wanted.size, wanted.sizes, stamp=state.now,
            priority=wanted.priority, views=state.views,
        )  # fmt: skip
        old = state.repeated(wanted.publisher, wanted.sequence, records) if wanted.publisher else 0
        if old:
            total -= run.cut(old).bytes
            run.number = run.id = first
        count = run.count
        due = wanted.due if wanted.at or not wanted.due else state.now + wanted.due
        if count:
            self._admit(count, total, due > state.now)
        if wanted.publisher:
            state.remember(wanted.publisher, wanted.sequence + records - 1)
        if old:
            state.counts["duplicates"] += old
            gone.append((frame.first, frame.first + old))
            if not count:
                return wire.PUBLISH_REPLY.pack(0, 0)
        ttl = min(wanted.ttl_ms or options.ttl_ms, options.ttl_ms or wanted.ttl_ms)
        if due > state.now:
            state.delay(run, due, ttl, wanted.at and context.version > 1)
        else:
            state.publish(run, state.now + ttl if ttl else 0)
        return wire.PUBLISH_REPLY.pack(first, count)

    def _admit(self, records: int, total: int, later: bool) -> None:
        """Raise `Reject` when there is no room for so many messages and bytes."""
        state, options = self.state, self.options
        if later:
            if options.delayed_max and len(state.delayed) + records > options.delayed_max:
                raise Reject("queue_full", f"{len(state.delayed)} messages wait for their time: no room for {records}")
            return
        if options.overflow != "reject":
            return
        for _ in range(2):
            full = options.max_length and state.ready + records > options.max_length
            if not full and not (options.max_bytes and state.ready_bytes + total > options.max_bytes):
                return
            # Earlier frames of this entry may be on their way to consumers.
            state.dispatch()
        raise Reject("queue_full", f"{state.ready} messages of {state.ready_bytes} bytes wait: no room for {records}")

    def _attach(self, frame: Frame) -> bytes:
        _, number, flags, priority, credit, size, lease = _unpack(wire.ATTACH_COMMAND, frame)
        if not frame.session:
            raise Reject("bad_request", "a consumer belongs to a session")
        if flags & ~(wire.AUTO | wire.DEAD) or lease >= 1 << 62:
            raise malformed("an option of a consumer is out of its range")
        state = self.state
        consumer = state.consumers.get((frame.session, number))
        if consumer is None:
            if len(state.consumers) >= CONSUMERS_MAX:
                raise Reject("queue_full", f"a queue has at most {CONSUMERS_MAX} consumers")
            consumer = state.admit((frame.session, number), bool(flags & wire.DEAD))
        elif consumer.dead != bool(flags & wire.DEAD):
            raise Reject("bad_request", "a consumer can't turn to the dead letters, or from them")
        consumer.auto, consumer.priority, consumer.lease_ms = bool(flags & wire.AUTO), priority, lease
        consumer.credit, consumer.credit_bytes = _credit(credit, size)
        state.attach(consumer)
        return _counted(0)

    def _detach(self, frame: Frame) -> bytes:
        _, number = _unpack(wire.DETACH_COMMAND, frame)
        consumer = self.state.consumers.get((frame.session, number))
        if consumer is not None:
            self.state.detach(consumer, counted=False)
        return _counted(0)

    def _flow(self, frame: Frame) -> bytes:
        _, number, credit, size = _unpack(wire.CREDIT_COMMAND, frame)
        consumer = self._consumer(frame, number)
        if not consumer.auto:
            credit = min(consumer.credit + credit, wire.CREDIT_MAX)
        consumer.credit, consumer.credit_bytes = _credit(credit, size)
        return _counted(0)

    def _settle(self, frame: Frame) -> bytes:
        if len(frame.commands) < wire.SETTLE_HEAD.size:
            raise malformed("it is cut short")
        _, number, what = wire.SETTLE_HEAD.unpack_from(frame.commands)
        ranges = parse_ranges(frame.commands, wire.SETTLE_HEAD.size)
        consumer, state = self._consumer(frame, number), self.state
        if what > wire.REJECT:
            raise malformed(f"messages are not settled by {what}")
        held = consumer.drop(ranges)
        count = sum(one.run.count for one in held)
        if what == wire.ACK:
            state.settle(held)
        elif what == wire.REJECT:
            state.reject(consumer, held)
        else:
            state.counts["requeued"] += count
            state.give_back(consumer, held, counted=True)
        return _counted(count)

    def _extend(self, frame: Frame) -> bytes:
        if len(frame.commands) < wire.EXTEND_HEAD.size:
            raise malformed("it is cut short")
        _, number = wire.EXTEND_HEAD.unpack_from(frame.commands)
        ranges = parse_ranges(frame.commands, wire.EXTEND_HEAD.size)
        consumer = self._consumer(frame, number)
        deadline = self.state.deadline(consumer)
        count = consumer.extend(ranges, deadline)
        if count:
            self.state.at(deadline)
        return _counted(count)

    def _resend(self, frame: Frame) -> bytes:
        _, number, tag = _unpack(wire.RESEND_COMMAND, frame)
        consumer = self._consumer(frame, number)
        return _counted(self.state.resend(consumer, tag))

    def _cancel(self, frame: Frame) -> bytes:
        ids = frame.commands[wire.CANCEL_HEAD.size :]
        if not ids or len(ids) % wire.ID.size:
            raise malformed("ids are needed")
        return _counted(self.state.cancel(number for (number,) in wire.ID.iter_unpack(ids)))

    def _purge(self, frame: Frame) -> bytes:
        _, which = _unpack(wire.PURGE_COMMAND, frame)
        if not which or which & ~(wire.READY | wire.DELAYED | wire.DEAD_LETTERS):
            raise malformed("what is to be purged?")
        state = self.state
        count = state.purge(bool(which & wire.READY), bool(which & wire.DELAYED), bool(which & wire.DEAD_LETTERS))
        state.counts["purged"] += count
        return _counted(count)

    def _touch(self, frame: Frame) -> bytes:
        return _counted(0)

    def _consumer(self, frame: Frame, number: int) -> Consumer:
        consumer = self.state.consumers.get((frame.session, number))
        if consumer is None:
            raise Reject("no_consumer", f"session {frame.session:016x} has no consumer {number} here")
        return consumer


Handler: TypeAlias = Callable[[Queue, Frame], bytes]
HANDLERS: Mapping[int, Handler] = MappingProxyType(
    {
        wire.ATTACH: Queue._attach,
        wire.DETACH: Queue._detach,
        wire.CREDIT: Queue._flow,
        wire.SETTLE: Queue._settle,
        wire.EXTEND: Queue._extend,
        wire.RESEND: Queue._resend,
        wire.CANCEL: Queue._cancel,
        wire.PURGE: Queue._purge,
        wire.TOUCH: Queue._touch,
    }
)


def _unpack(shape: Any, frame: Frame) -> tuple[Any, ...]:
    if len(frame.commands) != shape.size:
        raise malformed(f"{len(frame.commands)} bytes are not its {shape.size}")
    found: tuple[Any, ...] = shape.unpack(frame.commands)
    return found


def _credit(messages: int, size: int) -> tuple[int, int]:
    return min(messages, wire.CREDIT_MAX), min(max(size, 1), wire.CREDIT_BYTES_MAX)


def _counted(count: int) -> bytes:
    return wire.COUNT_REPLY.pack(count, 0)
