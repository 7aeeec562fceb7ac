"""A queue's state and what happens to a message in it: waits, is handed out, comes back, expires, is dropped.

Invariants: a message is in exactly one place (delayed, a shelf, a consumer, the dead letters) until its body is
released; `timer` is at or before whatever is due first; everything here depends on the commands and log time alone, so
members, replays and restored snapshots agree. Driven by `machines.queue`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from logyard.engine.machine import Context, Deliver, Effect, Monitor, Position, Release, Timer

from .command import CREDIT_MAX
from .consumers import Consumer, Held, deliveries
from .options import QueueOptions
from .runs import DROPPED, EXPIRED, LIMIT, REJECTED, STALE_MAX, Run, Shelf, Views

TIMER = "due"
LEASE_STEP_MS = 100
"""Leases end at multiples of this, so that a timer ends many at once."""
UNLIMITED = 1 << 62
PUBLISHERS_MAX = 10_000
"""Publishers whose sequence is remembered; the one that was silent longest goes first."""
COUNTS = (
    "published", "duplicates", "delivered", "acknowledged", "requeued", "returned", "expired", "dropped",
    "dead_lettered", "cancelled", "purged",
)  # fmt: skip
"""What is counted from the queue's beginning on."""


class Delayed(NamedTuple):
    """One message that is due at `due` and lives for `ttl_ms` from then on (0: for good). `at`: that is a time of the
    wall clock, no length (known from version 2 on)."""

    due: int
    ttl_ms: int
    run: Run
    at: bool = False


class QueueState:
    """See the module. `effects` collects what the entry under way asks for, `now` is its log time."""

    def __init__(self, options: QueueOptions) -> None:
        self.options = options
        self.views = Views()
        self.shelves = (Shelf(), Shelf())
        self.dead = Shelf()
        self.delayed: dict[int, Delayed] = {}
        self.delayed_bytes = 0
        # How many of the delayed wait for a length of time.
        self.delays = 0
        self.consumers: dict[tuple[int, int], Consumer] = {}
        self.publishers: dict[int, int] = {}
        self.counts = dict.fromkeys(COUNTS, 0)
        self.next_number = self.next_dead = 1
        self.next_serial = 1
        self.turn = 0
        # The serial of who got something last, of the queue and of its dead letters.
        self.served = [0, 0]
        self.active: tuple[int, int] | None = None
        self.unused_since = 0
        self.ended = False
        self.timer: int | None = None
        # The last entry that brought commands, and how many messages that are still needed came with each entry.
        self.last_index = 0
        self.entries: dict[int, int] = {}
        self.now = self.index = 0
        self.version = 1
        self.effects: list[Effect] = []
        # What the entry under way sends again, by consumer.
        self._resent: dict[tuple[int, int], list[Deliver]] = {}
        self._due: list[tuple[int, int]] = []
        self._expiries: list[tuple[int, int, Run]] = []
        self._expiry = 0

    # Entries

    def begin(self, context: Context) -> None:
        """Begin an entry: what is due by its log time happens before it."""
        now = context.timestamp
        self.now, self.index, self.version, self.effects = now, context.index, context.version, []
        self._resent.clear()
        if self.options.expires_ms and not self.unused_since and not self.consumers:
            self.unused_since = now
            self.at(now + self.options.expires_ms)
        if self.timer is not None and now >= self.timer:
            self._ring()

    def commands(self, context: Context, own: Iterable[tuple[int, int]]) -> None:
        """End an entry with commands. Nobody needs what lies between it and the one before (entries of the engine's),
        nor the `own` ordinals (first, end) of its commands that are no messages; whole entries are released as such, so
        that the live set stays small."""
        index = context.index
        if index > self.last_index + 1:
            self._release(Position(self.last_index + 1, 0), Position(index, 0))
        self.last_index = index
        if index not in self.entries:
            self._release(Position(index, 0), Position(index + 1, 0))
            return
        for first, end in own:
            self._release(Position(index, first), Position(index, end))

    def finish(self) -> list[Effect]:
        """Hand over what the entry under way asks for."""
        effects, self.effects = self.effects, []
        return effects

    def _release(self, first: Position, end: Position) -> None:
        last = self.effects[-1] if self.effects else None
        if isinstance(last, Release) and last.end == first:
            self.effects[-1] = Release(last.first, end)
        else:
            self.effects.append(Release(first, end))

    # Time

    def at(self, due: int) -> None:
        """Set the timer: something is due then."""
        if self.timer is None or due < self.timer:
            self.timer = due
            self.effects.append(Timer(TIMER, due))

    def _ring(self) -> None:
        """Do all that is due: delayed messages first, then what expires, then leases, then the queue itself."""
        now = self.now
        due: list[int] = []
        while self._due and self._due[0][0] <= now:
            due.append(heapq.heappop(self._due)[1])
        for number in due:
            if number in self.delayed:
                when, ttl, run, at = self.delayed.pop(number)
                self.delayed_bytes -= run.bytes
                self.delays -= not at
                self._enqueue(run, when + ttl if ttl else 0)
        self._expire()
        for consumer in self.consumers.values():
            self.give_back(consumer, consumer.drop_late(now), counted=True)
        if self.unused_since and now >= self.unused_since + self.options.expires_ms and not self.consumers:
            self.end()
        self.timer = self._next()
        self.effects.append(Timer(TIMER, self.timer))

    def _next(self) -> int | None:
        """Return when something is due next, exactly."""
        while self._due and self._due[0][1] not in self.delayed:
            heapq.heappop(self._due)
        while self._expiries and not _expires(self._expiries[0]):
            heapq.heappop(self._expiries)
        found = [heap[0][0] for heap in (self._due, self._expiries) if heap]
        found += [held.deadline for consumer in self.consumers.values() for held in consumer.held]
        if self.unused_since and not self.ended:
            found.append(self.unused_since + self.options.expires_ms)
        return min(found, default=None)

    def has_terms(self) -> bool:
        """Return whether anything was granted for a length of time that is not over."""
        if self.delays or (self.unused_since and not self.ended) or any(map(_expires, self._expiries)):
            return True
        return any(consumer.held for consumer in self.consumers.values())

    def prolong(self, ms: int) -> None:
        """Prolong whatever was granted for a length of time, as log time jumps ahead by so much: it has as much left as
        before."""
        for number, one in self.delayed.items():
            if not one.at:
                self.delayed[number] = one._replace(due=one.due + ms)
        for shelf in self.shelves:
            for run in shelf:
                run.prolong(ms)
        for consumer in self.consumers.values():
            consumer.prolong(ms)
        if self.unused_since:
            self.unused_since += ms
        self._due = [(one.due, number) for number, one in self.delayed.items()]
        heapq.heapify(self._due)
        self._expect()
        self.timer = self._next()

    def deadline(self, consumer: Consumer) -> int:
        """Return when what it gets now has to be settled."""
        due = self.now + (consumer.lease_ms or self.options.lease_ms)
        return -(-due // LEASE_STEP_MS) * LEASE_STEP_MS

    def _expire(self) -> None:
        late: list[Run] = []
        while self._expiries and self._expiries[0][0] <= self.now:
            entry = heapq.heappop(self._expiries)
            if _expires(entry):
                late.append(self.shelves[entry[2].priority].empty(entry[2]))
        # The heap knows the numbers of when the runs came: what was cut since then has others.
        late.sort(key=lambda run: (run.expires, run.priority, run.number))
        for run in late:
            self.counts["expired"] += run.count
            self.bury(run, EXPIRED)

    # Coming in

    def publish(self, run: Run, expires: int) -> None:
        """Publish messages that are ready at once."""
        self.take_in(run)
        self._enqueue(run, expires)

    def take_in(self, run: Run) -> None:
        """Count messages of the entry under way, which are here from now on."""
        self.counts["published"] += run.count
        self.entries[run.index] = self.entries.get(run.index, 0) + run.count

    def delay(self, run: Run, due: int, ttl_ms: int, at: bool = False) -> None:
        """Keep messages for later, each of which can be cancelled by its id. `at`: when that is does not move."""
        self.take_in(run)
        # Their ids are numbers of the queue's order, which they enter when they are due.
        self.next_number += run.count
        self.delays += 0 if at else run.count
        while run.count:
            one = run.cut(1)
            self.delayed[one.id] = Delayed(due, ttl_ms, one, at)
            self.delayed_bytes += one.bytes
            heapq.heappush(self._due, (due, one.id))
        if len(self._due) > 2 * len(self.delayed) + STALE_MAX:
            self._due = [(one.due, number) for number, one in self.delayed.items()]
            heapq.heapify(self._due)
        self.at(due)

    def cancel(self, ids: Iterable[int]) -> int:
        """Take delayed messages back; return how many were there."""
        count = 0
        for number in ids:
            found = self.delayed.pop(number, None)
            if found is not None:
                self.delayed_bytes -= found.run.bytes
                self.delays -= not found.at
                self.release(found.run)
                count += 1
        self.counts["cancelled"] += count
        return count

    def _enqueue(self, run: Run, expires: int) -> None:
        run.enter(self.next_number, expires)
        self.next_number += run.count
        if self.shelves[run.priority].put(run):
            self._watch(run)

    def _watch(self, run: Run) -> None:
        """Watch a run on a shelf that may expire there."""
        if not run.expires:
            return
        self._expiry += 1
        heapq.heappush(self._expiries, (run.expires, self._expiry, run))
        if len(self._expiries) > STALE_MAX + 2 * sum(shelf.runs for shelf in self.shelves):
            self._expect()
        self.at(run.expires)

    @property
    def ready(self) -> int:
        """Messages that wait for a consumer."""
        return self.shelves[0].messages + self.shelves[1].messages

    @property
    def ready_bytes(self) -> int:
        """Of them."""
        return self.shelves[0].bytes + self.shelves[1].bytes

    # Going out

    def release(self, run: Run) -> None:
        """Release a run, whose bodies are needed no more."""
        index = run.index
        left = self.entries[index] - run.count
        if left:
            self.entries[index] = left
        else:
            del self.entries[index]
            if index != self.index:
                self._release(Position(index, 0), Position(index + 1, 0))
                return
        # Of the entry under way there may be more to come.
        self._release(*run.payloads)

    def bury(self, run: Run, reason: int) -> None:
        """Bury a message that nobody shall get any more: as a dead letter, or it is gone."""
        if not self.options.dead_letters:
            self.release(run)
            return
        self.counts["dead_lettered"] += run.count
        run.enter(self.next_dead, 0, reason)
        self.next_dead += run.count
        self.dead.put(run)
        over = self.dead.messages - self.options.dead_max_length
        if self.options.dead_max_length and over > 0:
            self.counts["dropped"] += over
            for gone in self.dead.take(over, UNLIMITED, True):
                self.release(gone)

    def keep_length(self) -> bool:
        """Drop the oldest messages, those of normal priority first, until the queue's bounds are kept; return whether
        any were dropped."""
        options = self.options
        if options.overflow != "drop_head" or not (options.max_length or options.max_bytes):
            return False
        before = self.counts["dropped"]
        for shelf in self.shelves:
            over = self.ready - (options.max_length or UNLIMITED)
            if over > 0:
                self._drop(shelf.take(over, UNLIMITED, True))
            while shelf.messages and self.ready_bytes > (options.max_bytes or UNLIMITED):
                self._drop(shelf.take(CREDIT_MAX, self.ready_bytes - options.max_bytes, True))
        return self.counts["dropped"] != before

    def _drop(self, runs: Iterable[Run]) -> None:
        for run in runs:
            self.counts["dropped"] += run.count
            self.bury(run, DROPPED)

    def settle(self, held: list[Held]) -> None:
        """Settle what a consumer held: it is done for good."""
        for one in held:
            self.counts["acknowledged"] += one.run.count
            self.release(one.run)

    def reject(self, consumer: Consumer, held: list[Held]) -> None:
        """Bury what a consumer held: it is not to be delivered again."""
        for one in held:
            if consumer.dead:
                self.counts["dropped"] += one.run.count
                self.release(one.run)
            else:
                self.bury(one.run, REJECTED)

    def give_back(self, consumer: Consumer, held: Iterable[Held], *, counted: bool) -> None:
        """Put what a consumer held back to where it was. `counted`: it was a delivery that failed."""
        limit = self.options.delivery_limit
        for _, run, _ in held:
            self.counts["returned"] += run.count
            if counted:
                run.fail()
            if consumer.dead:
                self.dead.put_back(run)
            elif limit and run.deliveries >= limit:
                self.bury(run, LIMIT)
            elif run.expires and run.expires <= self.now:
                self.counts["expired"] += run.count
                self.bury(run, EXPIRED)
            else:
                self.shelves[run.priority].put_back(run)
                self._watch(run)

    # Who gets what

    def admit(self, key: tuple[int, int], dead: bool) -> Consumer:
        """Return a new consumer, whose session is watched from now on."""
        consumer = Consumer(key, self.next_serial, dead=dead)
        self.next_serial += 1
        self.effects.append(Monitor(key[0]))
        return consumer

    def attach(self, consumer: Consumer) -> None:
        """Attach a consumer that begins, or changes what it is."""
        self.consumers[consumer.key] = consumer
        self.unused_since = 0

    def detach(self, consumer: Consumer, *, counted: bool) -> None:
        """End a consumer; what it holds goes back, and what was to be sent to it again is not."""
        del self.consumers[consumer.key]
        for again in self._resent.pop(consumer.key, ()):
            self.effects.remove(again)
        if self.active == consumer.key:
            self.active = None
        self.give_back(consumer, consumer.drop_all(), counted=counted)
        if not self.consumers and self.options.expires_ms:
            self.unused_since = self.now
            self.at(self.now + self.options.expires_ms)

    def dispatch(self) -> None:
        """Hand out what waits, as far as there is credit for it."""
        if self.ready and not self.ended:
            self._deal(self._candidates(), False)
        if self.dead.messages and not self.ended:
            self._deal([one for one in self.consumers.values() if one.dead], True)

    def resend(self, consumer: Consumer, tag: int) -> int:
        """Deliver what it holds from `tag` on once more, and a bit more where a run began before it; return how many
        messages that are."""
        lost = [held for held in consumer.held if held.tag + held.run.count > tag]
        again = list(deliveries(consumer, lost, tag))
        self._resent.setdefault(consumer.key, []).extend(again)
        self.effects += again
        return sum(held.run.count for held in lost)

    def _candidates(self) -> list[Consumer]:
        living = [one for one in self.consumers.values() if not one.dead]
        if not self.options.single_active or not living:
            return living
        first = min(living, key=lambda one: (-one.priority, one.serial))
        active = self.consumers.get(self.active) if self.active is not None else None
        if active is None:
            active = first
        elif first.priority > active.priority:
            # It gets nothing more, and gives way when it has settled what it holds.
            if active.held:
                return []
            active = first
        self.active = active.key
        return [active]

    def _deal(self, consumers: list[Consumer], dead: bool) -> None:
        given: dict[tuple[int, int], list[Held]] = {}
        # Who had no room for what was next then may have some for what is next now.
        while self._deal_once(consumers, dead, given) and self.version > 2:
            pass
        for key, held in given.items():
            self.counts["delivered"] += sum(one.run.count for one in held)
            self.at(held[0].deadline)
            self.effects += deliveries(self.consumers[key], held, held[0].tag)

    def _deal_once(self, consumers: list[Consumer], dead: bool, given: dict[tuple[int, int], list[Held]]) -> bool:
        """Hand out what waits, to those of the highest priority first; return whether there is reason to go on."""
        went = left_out = False
        for priority in sorted({one.priority for one in consumers}, reverse=True):
            equals = [one for one in consumers if one.priority == priority]
            equals.sort(key=lambda one: (one.serial <= self.served[dead], one.serial))
            while (waiting := self.dead.messages if dead else self.ready) and equals:
                equals = [one for one in equals if one.room(self.version)]
                share = max(1, waiting // len(equals)) if equals else 0
                # Who has no room for the next message, large as it is, gets nothing more in this round.
                fed = [one for one in equals if self._give(one, share, dead, given)]
                went = went or bool(fed)
                left_out = left_out or len(fed) < len(equals)
                equals = fed
        return went and left_out

    def _give(self, consumer: Consumer, share: int, dead: bool, given: dict[tuple[int, int], list[Held]]) -> bool:
        """Give a consumer up to `share` messages; return False when it got none."""
        runs = self._take(consumer, share, dead)
        if runs:
            deadline = self.deadline(consumer)
            given.setdefault(consumer.key, []).extend(consumer.hold(run, deadline) for run in runs)
            self.served[dead] = consumer.serial
        return bool(runs)

    def _take(self, consumer: Consumer, share: int, dead: bool) -> list[Run]:
        most = min(share, consumer.room(self.version))
        room = max(0, consumer.credit_bytes - consumer.bytes)
        nothing = not consumer.messages
        if dead:
            return self.dead.take(most, room, nothing)
        low, high = self.shelves
        if not high.messages or not low.messages:
            return (high if high.messages else low).take(most, room, nothing)
        # Of three messages that go out while both kinds wait, one is a normal one.
        normal = (self.turn + most) // 3 - self.turn // 3
        found: list[Run] = []
        for shelf, count in ((high, most - normal), (low, normal), (high, most), (low, most)):
            left = most - sum(run.count for run in found)
            runs = shelf.take(min(count, left), room, nothing and not found)
            room -= sum(run.bytes for run in runs)
            found += runs
        self.turn = (self.turn + (sum(run.count for run in found) if self.version > 2 else most)) % 3
        return found

    # The end

    def purge(self, ready: bool, delayed: bool, dead: bool) -> int:
        """Drop what waits; return how many messages that were."""
        gone: list[Run] = []
        for shelf in (*(self.shelves if ready else ()), *((self.dead,) if dead else ())):
            gone += shelf.take(UNLIMITED, UNLIMITED, True)
        if delayed:
            gone += (one.run for one in self.delayed.values())
            self.delayed, self.delayed_bytes, self.delays = {}, 0, 0
        for run in gone:
            self.release(run)
        return sum(run.count for run in gone)

    def end(self) -> None:
        """End the queue, with all that is in it: nobody used it for so long."""
        self.ended = True
        self.purge(True, True, True)

    def restored(self) -> None:
        """Build what follows from the rest of the state."""
        for run in self.runs():
            self.entries[run.index] = self.entries.get(run.index, 0) + run.count
        self.delays = sum(not one.at for one in self.delayed.values())
        self._due = [(one.due, number) for number, one in self.delayed.items()]
        heapq.heapify(self._due)
        self._expect()

    def _expect(self) -> None:
        waiting = (run for shelf in self.shelves for run in shelf if run.expires)
        self._expiries = [(run.expires, number, run) for number, run in enumerate(waiting)]
        self._expiry = len(self._expiries)
        heapq.heapify(self._expiries)

    @property
    def size(self) -> int:
        """How many runs and publishers there are, about."""
        shelves = sum(shelf.runs for shelf in (*self.shelves, self.dead))
        return (
            shelves + len(self.delayed) + len(self.publishers) + sum(len(one.held) for one in self.consumers.values())
        )

    def runs(self) -> Iterator[Run]:
        """Yield all messages, wherever they are."""
        for shelf in (*self.shelves, self.dead):
            yield from shelf
        yield from (one.run for one in self.delayed.values())
        yield from (held.run for consumer in self.consumers.values() for held in consumer.held)

    def repeated(self, publisher: int, sequence: int, records: int) -> int:
        """Return how many of a publisher's messages from `sequence` on were taken before."""
        return min(records, max(0, self.publishers.get(publisher, 0) + 1 - sequence))

    def remember(self, publisher: int, last: int) -> None:
        """Remember that a publisher's messages were taken up to this sequence."""
        self.publishers[publisher] = max(last, self.publishers.pop(publisher, 0))
        if len(self.publishers) > PUBLISHERS_MAX:
            del self.publishers[next(iter(self.publishers))]


def _expires(entry: tuple[int, int, Run]) -> bool:
    """Return whether a run still waits, and is to expire when this entry of the heap says so."""
    run = entry[2]
    return run.waits and run.count > 0 and run.expires == entry[0]
