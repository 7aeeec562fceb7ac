"""A queue, message by message: what docs/machines/queue.md says, told a second time as plainly as possible.

The model does not foresee who gets what. It takes the machine's deliveries as observations and checks them: order,
credit, priorities, one holder a message, nobody waits for what is there.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack

from logyard.engine.machine import (
    Batch,
    Context,
    Deliver,
    Effect,
    Frame,
    Monitor,
    PayloadRange,
    Reject,
    Release,
    Sections,
    Timer,
)
from logyard.machines.queue import Queue
from logyard.machines.queue import command as qc
from logyard.machines.queue.options import QueueOptions
from logyard.machines.queue.snapshot import Frozen, freeze
from logyard.payloads.liveness import Liveness
from logyard.protocol.frame import UNIFORM

VIEWS = 4
Place = tuple[int, int]
Key = tuple[int, int]


def publish(
    sizes: Sequence[int],
    *,
    priority: int = 0,
    ttl: int = 0,
    delay: int = 0,
    at: bool = False,
    publisher: int = 0,
    sequence: int = 0,
) -> Frame:
    """A publishing frame of messages with these sizes."""
    each = len(set(sizes)) > 1
    flags = (qc.EACH if each else 0) | (qc.AT if at else 0)
    command = qc.PUBLISH_COMMAND.pack(qc.PUBLISH, priority, flags, 0, ttl, delay, publisher, sequence)
    command += struct.pack(f"<{len(sizes)}I", *sizes) if each else struct.pack("<I", sizes[0])
    return frame_of(command, len(sizes), sum(sizes))


def frame_of(command: bytes, records: int = 1, size: int = 0, session: int = 0) -> Frame:
    return Frame(UNIFORM, 0, records, len(command), size + 8 * records, 0, session, 0, command)


def attach(
    key: Key,
    *,
    credit: int = 100,
    size: int = 1 << 20,
    priority: int = 0,
    lease: int = 0,
    auto: bool = True,
    dead: bool = False,
) -> Frame:
    flags = (qc.AUTO if auto else 0) | (qc.DEAD if dead else 0)
    command = qc.ATTACH_COMMAND.pack(qc.ATTACH, key[1], flags, priority, credit, size, lease)
    return frame_of(command, session=key[0])


def detach(key: Key) -> Frame:
    return frame_of(qc.DETACH_COMMAND.pack(qc.DETACH, key[1]), session=key[0])


def credit(key: Key, messages: int, size: int = 1 << 20) -> Frame:
    return frame_of(qc.CREDIT_COMMAND.pack(qc.CREDIT, key[1], messages, size), session=key[0])


def settle(key: Key, what: int, *ranges: tuple[int, int]) -> Frame:
    command = qc.SETTLE_HEAD.pack(qc.SETTLE, key[1], what) + b"".join(qc.RANGE.pack(*one) for one in ranges)
    return frame_of(command, session=key[0])


def extend(key: Key, *ranges: tuple[int, int]) -> Frame:
    command = qc.EXTEND_HEAD.pack(qc.EXTEND, key[1]) + b"".join(qc.RANGE.pack(*one) for one in ranges)
    return frame_of(command, session=key[0])


def resend(key: Key, tag: int) -> Frame:
    return frame_of(qc.RESEND_COMMAND.pack(qc.RESEND, key[1], tag), session=key[0])


def cancel(*ids: int) -> Frame:
    return frame_of(bytes((qc.CANCEL,)) + struct.pack(f"<{len(ids)}Q", *ids))


def purge(which: int) -> Frame:
    return frame_of(qc.PURGE_COMMAND.pack(qc.PURGE, which))


@dataclass
class Letter:
    """One message: `where` is ready, delayed, held or dead."""

    place: Place
    id: int
    size: int
    priority: int
    ttl: int = 0
    where: str = "ready"
    number: int = 0
    expires: int = 0
    due: int = 0
    deliveries: int = 0
    reason: str = ""


@dataclass
class Reader:
    """One consumer."""

    auto: bool
    dead: bool
    priority: int
    credit: int
    size: int
    lease: int
    next_tag: int = 1
    held: dict[int, tuple[Letter, int]] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(letter.size for letter, _ in self.held.values())

    @property
    def room(self) -> int:
        if self.held and self.bytes > self.size:
            return 0
        return max(0, self.credit - len(self.held)) if self.auto else self.credit

    def fits(self, letter: Letter) -> bool:
        return not self.held or self.bytes + letter.size <= self.size


class Model:
    """See the module."""

    def __init__(self, options: QueueOptions) -> None:
        self.options = options
        self.letters: dict[Place, Letter] = {}
        self.readers: dict[Key, Reader] = {}
        self.publishers: dict[int, int] = {}
        self.next = self.next_dead = 1
        self.now = 0

    def at(self, where: str) -> list[Letter]:
        """In order."""
        return sorted((one for one in self.letters.values() if one.where == where), key=lambda one: one.number)

    def tick(self, now: int) -> None:
        """What is due by then."""
        self.now = now
        for one in sorted(self.at("delayed"), key=lambda one: (one.due, one.id)):
            if one.due <= now:
                self._ready(one, one.due + one.ttl if one.ttl else 0)
        late = [one for one in self.at("ready") if one.expires and one.expires <= now]
        for one in sorted(late, key=lambda one: (one.expires, one.priority, one.number)):
            self._bury(one, "expired")
        for key in self.readers:
            self._back(key, [tag for tag, (_, until) in self.readers[key].held.items() if until <= now])

    def _ready(self, letter: Letter, expires: int) -> None:
        letter.where, letter.number, letter.expires = "ready", self.next, expires
        self.next += 1

    def _bury(self, letter: Letter, reason: str) -> None:
        if not self.options.dead_letters:
            del self.letters[letter.place]
            return
        letter.where, letter.reason, letter.number, letter.expires = "dead", reason, self.next_dead, 0
        self.next_dead += 1
        dead = self.at("dead")
        if self.options.dead_max_length and len(dead) > self.options.dead_max_length:
            del self.letters[dead[0].place]

    def _back(self, key: Key, tags: Iterable[int], counted: bool = True) -> None:
        reader = self.readers[key]
        for tag in sorted(tags):
            letter, _ = reader.held.pop(tag)
            letter.deliveries += counted
            if reader.dead:
                letter.where = "dead"
            elif self.options.delivery_limit and letter.deliveries >= self.options.delivery_limit:
                self._bury(letter, "delivery_limit")
            elif letter.expires and letter.expires <= self.now:
                self._bury(letter, "expired")
            else:
                letter.where = "ready"

    def leave(self, session: int) -> None:
        """A session ends."""
        for key in [key for key in self.readers if key[0] == session]:
            self.leave_one(key, True)

    def leave_one(self, key: Key, counted: bool) -> None:
        self._back(key, list(self.readers[key].held), counted)
        del self.readers[key]

    def command(self, index: int, frame: Frame) -> bytes | str:
        """The reply, or a refusal's code."""
        kind, data = frame.commands[0], frame.commands
        if kind == qc.PUBLISH:
            return self._publish(index, frame)
        if kind == qc.ATTACH:
            _, number, flags, priority, messages, size, lease = qc.ATTACH_COMMAND.unpack(data)
            auto, dead = bool(flags & qc.AUTO), bool(flags & qc.DEAD)
            old = self.readers.get((frame.session, number))
            if old is not None and old.dead != dead:
                return "bad_request"
            reader = old or Reader(auto, dead, priority, messages, size, lease)
            reader.auto, reader.priority, reader.credit, reader.size, reader.lease = (
                auto,
                priority,
                messages,
                size,
                lease,
            )
            self.readers[(frame.session, number)] = reader
            return qc.COUNT_REPLY.pack(0, 0)
        if kind == qc.CANCEL:
            wanted = {number for (number,) in qc.ID.iter_unpack(data[1:])}
            return self._gone([one for one in self.at("delayed") if one.id in wanted])
        if kind == qc.PURGE:
            kinds = [name for bit, name in ((1, "ready"), (2, "delayed"), (4, "dead")) if data[1] & bit]
            return self._gone([one for one in self.letters.values() if one.where in kinds])
        key = (frame.session, int.from_bytes(data[1:5], "little"))
        if key not in self.readers:
            return qc.COUNT_REPLY.pack(0, 0) if kind == qc.DETACH else "no_consumer"
        return self._consumer(kind, key, data)

    def _consumer(self, kind: int, key: Key, data: bytes) -> bytes:
        reader = self.readers[key]
        if kind == qc.DETACH:
            self.leave_one(key, False)
            return qc.COUNT_REPLY.pack(0, 0)
        if kind == qc.CREDIT:
            _, _, messages, reader.size = qc.CREDIT_COMMAND.unpack(data)
            reader.credit = messages if reader.auto else reader.credit + messages
            return qc.COUNT_REPLY.pack(0, 0)
        if kind == qc.RESEND:
            return b"any"
        head = qc.SETTLE_HEAD.size if kind == qc.SETTLE else qc.EXTEND_HEAD.size
        ranges = list(qc.RANGE.iter_unpack(data[head:]))
        tags = sorted(tag for tag in reader.held if any(first <= tag <= last for first, last in ranges))
        if kind == qc.EXTEND:
            for tag in tags:
                reader.held[tag] = (reader.held[tag][0], self.deadline(reader))
        elif data[5] == qc.REQUEUE:
            self._back(key, tags)
        else:
            for tag in tags:
                letter, _ = reader.held.pop(tag)
                if data[5] == qc.ACK or reader.dead:
                    del self.letters[letter.place]
                else:
                    self._bury(letter, "rejected")
        return qc.COUNT_REPLY.pack(len(tags), 0)

    def deadline(self, reader: Reader) -> int:
        return -(-(self.now + (reader.lease or self.options.lease_ms)) // 100) * 100

    def _gone(self, letters: Sequence[Letter]) -> bytes:
        for one in letters:
            del self.letters[one.place]
        return qc.COUNT_REPLY.pack(len(letters), 0)

    def _publish(self, index: int, frame: Frame) -> bytes | str:
        _, priority, flags, _, ttl, delay, publisher, sequence = qc.PUBLISH_COMMAND.unpack_from(frame.commands)
        tail = frame.commands[qc.PUBLISH_COMMAND.size :]
        sizes = [number for (number,) in struct.iter_unpack("<I", tail)]
        sizes = sizes if flags & qc.EACH else sizes * frame.records
        old = max(0, min(len(sizes), self.publishers.get(publisher, 0) + 1 - sequence)) if publisher else 0
        due = delay if flags & qc.AT or not delay else self.now + delay
        taken = list(enumerate(sizes))[old:]
        options = self.options
        if taken and due > self.now:
            if options.delayed_max and len(self.at("delayed")) + len(taken) > options.delayed_max:
                return "queue_full"
        elif taken and options.overflow == "reject":
            ready = self.at("ready")
            if options.max_length and len(ready) + len(taken) > options.max_length:
                return "queue_full"
            if (
                options.max_bytes
                and sum(one.size for one in ready) + sum(size for _, size in taken) > options.max_bytes
            ):
                return "queue_full"
        if publisher:
            self.publishers[publisher] = max(self.publishers.get(publisher, 0), sequence + len(sizes) - 1)
        if not taken:
            return qc.PUBLISH_REPLY.pack(0, 0)
        life = min([one for one in (ttl, options.ttl_ms) if one], default=0)
        first = self.next
        for number, size in taken:
            place = (index, frame.first + number)
            letter = self.letters[place] = Letter(place, self.next, size, priority, life)
            if due > self.now:
                letter.where, letter.due = "delayed", due
                self.next += 1
            else:
                self._ready(letter, self.now + life if life else 0)
        return qc.PUBLISH_REPLY.pack(first, len(taken))

    def deliver(self, effects: Iterable[Effect]) -> None:
        """Take the machine's deliveries, and check them."""
        got: list[tuple[Key, Letter]] = []
        for effect in effects:
            if not isinstance(effect, Deliver):
                continue
            number, first, end, rows = msgpack.unpackb(effect.tag)
            reader = self.readers[(effect.session, number)]
            assert first <= end == (rows[-1][0] + rows[-1][1] if rows and rows[-1][0] >= reader.next_tag else end)
            assert len(effect.refs) == len(rows)
            for (tag, count, id_, index, ordinal, deliveries, _, reason), ref in zip(rows, effect.refs, strict=True):
                assert isinstance(ref, PayloadRange)
                assert ref == ((index, ordinal), (index, ordinal + count))
                for step in range(count):
                    letter = self.letters[(index, ordinal + step)]
                    waiting = self.at("dead" if reader.dead else "ready")
                    if tag + step >= reader.next_tag and letter is not next(
                        (one for one in waiting if reader.dead or one.priority == letter.priority), None
                    ):
                        # What was before it, or it, was too much.
                        self.keep_length()
                    assert (letter.id, letter.deliveries) == (id_ + step, deliveries)
                    assert (letter.reason or "") == ("", "rejected", "delivery_limit", "expired", "max_length")[reason]
                    if tag + step < reader.next_tag:
                        assert reader.held[tag + step][0] is letter, "sent again to who holds it"
                        continue
                    self._take(reader, tag + step, letter)
                    got.append(((effect.session, number), letter))
        self.check(got)

    def _take(self, reader: Reader, tag: int, letter: Letter) -> None:
        assert tag == reader.next_tag and letter.where == ("dead" if reader.dead else "ready")
        assert reader.room > 0 and reader.fits(letter), "within its credit"
        letter.where = "held"
        reader.held[tag] = (letter, self.deadline(reader))
        reader.next_tag += 1
        if not reader.auto:
            reader.credit -= 1

    def check(self, got: Sequence[tuple[Key, Letter]] = ()) -> None:
        """Check who got what, and that nobody waits who need not."""
        living = [one for one in self.readers.values() if not one.dead]
        single = self.options.single_active
        if single:
            assert sum(bool(one.held) for one in living) <= 1, "one consumer at a time"
        for where in ("ready", "dead"):
            readers = [one for one in self.readers.values() if one.dead == (where == "dead")]
            for priority in (0, 1) if where == "ready" else (None,):
                waiting = [one for one in self.at(where) if priority in (None, one.priority)]
                went = [one for key, one in got if self.readers[key] in readers and priority in (None, one.priority)]
                if waiting and went:
                    assert max(one.number for one in went) < waiting[0].number, "first in, first out"
            fronts = [
                next(one for one in self.at(where) if one.priority == priority)
                for priority in {one.priority for one in self.at(where)}
            ]
            if where == "dead":
                fronts = self.at(where)[:1]
            able = [one for one in readers if fronts and one.room and all(one.fits(front) for front in fronts)]
            if not (single and where == "ready" and len(readers) > 1):
                assert not able, "who has room waits for nothing that is there"

    def keep_length(self) -> None:
        """After an entry."""
        options = self.options
        if options.overflow != "drop_head":
            return
        while (ready := self.at("ready")) and (
            (options.max_length and len(ready) > options.max_length)
            or (options.max_bytes and sum(one.size for one in ready) > options.max_bytes)
        ):
            self._bury(min(ready, key=lambda one: (one.priority, one.number)), "max_length")

    def counts(self) -> dict[str, int]:
        """Of messages and bytes, as `overview` has them."""
        found: dict[str, int] = {}
        for where, name in (("ready", "ready"), ("held", "unacked"), ("delayed", "delayed"), ("dead", "dead")):
            letters = self.at(where)
            found |= {name: len(letters), f"{name}_bytes": sum(one.size for one in letters)}
        return found


class Bench:
    """A machine, its model, and what the engine does for it: timers and the live set. `other` is restored from a
    snapshot before every entry and has to do the same. `views` of the last few states say what those were, whatever has
    happened since."""

    def __init__(self, options: QueueOptions) -> None:
        self.machine, self.other, self.model = Queue(options), Queue(options), Model(options)
        self.live = Liveness()
        self.index = 0
        self.now = 1_000_000
        self.timer: int | None = None
        self.monitored: set[int] = set()
        self.records: dict[int, int] = {}
        self.views: deque[tuple[Frozen, Sections, list[PayloadRange]]] = deque(maxlen=VIEWS)

    def apply(self, *frames: Frame, gap: int = 0) -> list[bytes | str]:
        """One entry; replies, with refusals as their codes."""
        self.index += 1 + gap
        first, shown = 0, []
        for frame in frames:
            shown.append(frame._replace(first=first))
            first += frame.records
        context = Context(1, self.index, 1, self.now, Queue.version, first)
        self.records[self.index] = first
        self._renew()
        batch = self.machine.apply_batch(context, shown)
        assert comparable(batch) == comparable(self.other.apply_batch(context, shown))
        self.model.tick(self.now)
        expected = [self.model.command(self.index, frame) for frame in shown]
        replies = [reply.code if isinstance(reply, Reject) else reply for reply in batch.replies]
        for frame, reply in zip(shown, batch.replies, strict=True):
            if isinstance(reply, Reject):
                self.live.release((self.index, frame.first), (self.index, frame.first + frame.records))
        assert replies == [
            reply if wanted == b"any" else wanted for reply, wanted in zip(replies, expected, strict=True)
        ]
        self._done(batch.effects)
        return replies

    def ring(self) -> None:
        """The engine's timer, when it is due."""
        if self.timer is not None and self.timer <= self.now:
            self.timer = None
            self._outside(lambda machine, context: machine.on_timer(context, "due"))

    def end_session(self, session: int) -> None:
        """A session ends."""
        if session in self.monitored:
            self.monitored.discard(session)
            self._outside(lambda machine, context: machine.on_session_end(context, session), session)

    def _outside(self, call: Any, session: int = 0) -> None:
        self.index += 1
        context = Context(1, self.index, 1, self.now, Queue.version, 1)
        self._renew()
        applied = call(self.machine, context)
        assert applied == call(self.other, context)
        self.model.tick(self.now)
        if session:
            self.model.leave(session)
        self._done(applied.effects)

    def _renew(self) -> None:
        self.other = Queue(self.machine.options)
        written = self.machine.snapshot()
        self.other.restore(written)
        self.views.append((freeze(self.machine.state), written, sorted(self.machine.live_refs())))

    def _done(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Release):
                assert effect.first < effect.end <= (self.index + 1, 0)
                self.live.release(effect.first, effect.end)
            elif isinstance(effect, Timer):
                self.timer = effect.due_ms
            elif isinstance(effect, Monitor):
                self.monitored.add(effect.session)
        self.model.deliver(effects)
        self.model.keep_length()
        self.model.check()
        assert self.machine.snapshot() == self.other.snapshot()
        for view, written, needed in self.views:
            assert view.sections() == written and sorted(view.payloads()) == needed
        assert len(self.machine.state.views.open) <= VIEWS + 2, "those that ended are forgotten"
        shown = self.machine.overview()
        assert {key: shown[key] for key in self.model.counts()} == self.model.counts()
        assert places(self.machine.live_refs(), self.records) == set(self.model.letters)
        last = self.machine.state.last_index
        assert places(self.live.live_ranges(last), self.records) == set(self.model.letters), (
            "what is released is what is not needed"
        )
        due = [one.expires for one in self.model.at("ready") if one.expires]
        due += [one.due for one in self.model.at("delayed")]
        due += [until for reader in self.model.readers.values() for _, until in reader.held.values()]
        assert not due or (self.timer is not None and self.timer <= min(due)), "a timer rings for what is due"


def comparable(batch: Batch) -> tuple[list[object], list[Effect]]:
    """Refusals are exceptions, which are never equal: compared by what they say."""
    said: list[object] = [
        (reply.code, reply.message) if isinstance(reply, Reject) else reply for reply in batch.replies
    ]
    return said, list(batch.effects)


def places(ranges: Iterable[PayloadRange], records: Mapping[int, int]) -> set[Place]:
    """Single positions of ranges, by how many records entries have."""
    found = set()
    for first, end in ranges:
        for index in range(first.index, end.index + 1):
            start = first.ordinal if index == first.index else 0
            stop = end.ordinal if index == end.index else records.get(index, 0)
            found |= {(index, ordinal) for ordinal in range(start, min(stop, records.get(index, 0)))}
    return found
