"""The pipeline of one log: records gathered into frames, frames under way, frames to be sent again.

Sans-IO like `session`: `aio` asks a lane what to send and tells it what came back. Invariants: the frames of a lane
leave in the order in which their records were given, and what is sent again leaves before anything new; a batch is
finished exactly once; the bytes of everything unfinished are in the client's window. With a session each frame has a
number for good, so that it may be sent again and is applied once.
"""

from __future__ import annotations

import random
from bisect import insort
from collections.abc import Callable, Iterable
from typing import Any

from logyard.protocol import wire
from logyard.protocol.errors import Busy, LogyardError, NoSpace, NotLeader, Unknown, error_of
from logyard.protocol.frame import APPEND_COMMAND, Buffer, Frame, renumbered
from logyard.protocol.pending import PendingReply

from .fork import HERE, elsewhere
from .log import NOT_TOLD, appended
from .sequences import OUT_OF_WINDOW, RENEW, Sequences, Ticket, expired, final
from .session import backoff, outcome

BATCH_BYTES = 512 << 10
"""A batch is closed at this size: two of them fill the entry that the leader makes."""
FEW_RECORDS = 16
FEW_BYTES = (1 << 20) + (32 << 10)
"""A batch of fewer records grows on up to this size, an entry's: more bytes share what a frame costs by itself."""
BATCH_RECORDS = 4096
UNNUMBERED: Ticket = (Sequences(0), 0)
"""Of a frame that belongs to no session."""
SHARED_S = 0.25
"""Records that may wait for times that differ by less share a frame, and so its deadline: these are looked at a few
times a second."""
GRACE_S = 0.25
"""A frame under way at its deadline may still be answered: a late refusal says more than an unknown outcome."""


class Batch(Frame):
    """A frame on its way through a lane: one object for all its records.

    `pending` is the reply that all of them wait for, as `decode` reads it. `flags` are those of the APPEND. `ticket`:
    its session, and its number there. `trouble`: what stands in its way; `ambiguous`: it may have been applied.
    """

    __slots__ = ("lane", "serial", "deadline", "frame", "pending", "ambiguous", "trouble", "flags", "ticket")

    def __init__(self, lane: Lane, serial: int, deadline: float, flags: int = 0, command: bytes = b"") -> None:
        super().__init__(None, command)
        self.lane = lane
        self.serial = serial
        self.deadline = deadline
        self.flags = flags
        self.ticket: Ticket | None = None
        self.frame: list[Buffer] | None = None
        self.pending: PendingReply[Any] = PendingReply()
        self.ambiguous = False
        self.trouble: LogyardError | None = None

    def __lt__(self, other: Batch) -> bool:
        return self.serial < other.serial

    def encoded(self) -> list[Buffer]:
        """Return the frame's buffers; encoded once, kept until answered."""
        if self.frame is None:
            numbers, sequence = self.ticket or UNNUMBERED
            self.frame = self.encode(numbers.session, sequence)
            # Joined by now: holding the pieces as well would double the memory.
            self.heads, self.small, self.large = [], [], []
        return self.frame

    async def wait(self) -> Any:
        """Wait for what came of it."""
        assert self.lane.event is not None
        return await self.pending.wait(self.lane.event)

    @property
    def mode(self) -> int:
        """When it is answered: one of the wire's modes."""
        return self.flags & wire.REPLY_MODE

    def number(self, numbers: Sequences) -> None:
        """Give it the next number of a session."""
        _, sequence = self.ticket = numbers, numbers.next()
        if self.frame is not None:
            # It had another one, under which it can't have been applied.
            self.frame = renumbered(self.frame, numbers.session, sequence)

    def unnumber(self) -> None:
        """Give its number back: it can't have been applied under that."""
        if self.ticket is not None:
            numbers, sequence = self.ticket
            numbers.done(sequence)
            self.ticket = None

    def doubt(self) -> None:
        """Note that it may have been applied."""
        self.ambiguous = True

    def hold_up(self, trouble: LogyardError) -> None:
        """Note what stands in its way."""
        self.trouble = trouble

    def decode(self, data: Buffer) -> Any:
        """Return what the machine's reply says. Raises a `LogyardError`."""
        return appended(self.lane.name, self.flags, data)

    def reply(self, request: int, status: int, data: Buffer) -> None:
        """Take the server's reply to this frame."""
        self.lane.answered(self, status, data)

    def cut(self, error: LogyardError) -> None:
        """Take note that the connection ended before the answer came."""
        self.lane.cut(self, error)

    def finish(self, error: LogyardError | None, value: Any = None) -> None:
        """Finish, and tell whoever waits."""
        self.frame = None
        if self.ticket is not None:
            numbers, sequence = self.ticket
            numbers.done(sequence)
        if error is None:
            self.pending.set(value)
        else:
            self.pending.fail(error)


class Window:
    """Bytes that all lanes of one client hold, and their bound; `freed` is called when some are given back."""

    __slots__ = ("limit", "used", "freed")

    def __init__(self, limit: int, freed: Callable[[], None]) -> None:
        self.limit = limit
        self.used = 0
        self.freed = freed

    def hold(self, size: int) -> None:
        """Count bytes that are held."""
        self.used += size

    def give_back(self, size: int) -> None:
        """Count bytes that are held no more, and tell who waits for room."""
        self.used -= size
        self.freed()


class Lane:
    """The pipeline of one log: an open batch, batches to be sent, batches under way. `kind`: what its group must be.

    After a refusal nothing is sent until all frames under way are answered, so that refused ones keep their order.
    `leader` 0 means that a route is needed; `kick` tells the face that there is something to do.
    """

    __slots__ = (
        "name", "uid", "leader", "open", "queue", "sent", "held_until", "recovering", "failures", "retry", "window",
        "dirty", "chance", "clock", "kick", "_serial", "link", "exactly_once", "numbers", "opening", "stale",
        "for_kind", "trouble", "event", "_open_for", "pid",
    )  # fmt: skip
    kind = "log"

    def __init__(
        self,
        name: str,
        window: Window,
        clock: Callable[[], float],
        kick: Callable[[Lane], None],
        chance: random.Random,
        retry: bool = True,
        exactly_once: bool = False,
        event: Callable[[], Any] | None = None,
    ) -> None:
        self.name = name
        # The process that it is of.
        self.pid = HERE.pid
        # Makes what waits for a frame's reply.
        self.event = event
        self.for_kind = wire.for_kind(self.kind)
        self.exactly_once = exactly_once
        # The open session; the number of the one being opened; the one that has to be closed before another is opened.
        self.numbers: Sequences | None = None
        self.opening = 0
        self.stale = 0
        self.uid = 0
        self.leader = 0
        self.open: Batch | None = None
        # For how many seconds its first record may wait.
        self._open_for = 0.0
        self.queue: list[Batch] = []
        self.sent: dict[int, Batch] = {}
        self.held_until = 0.0
        # Why it is held, or was last refused: what waits behind that knows no other reason.
        self.trouble: LogyardError | None = None
        self.recovering = False
        self.failures = 0
        self.retry = retry
        self.window = window
        self.dirty = False
        self.chance = chance
        self.clock = clock
        self.kick = kick
        self._serial = 0
        self.link: Any = None

    @property
    def waiting(self) -> bool:
        """There is something to send."""
        return bool(self.queue) or self.open is not None

    @property
    def needs_session(self) -> bool:
        """A session must be open before what waits can be sent."""
        if not self.exactly_once or self.numbers is not None:
            return False
        return (self.open is not None and not self.open.mode) or any(not batch.mode for batch in self.queue)

    def add(
        self, head: Buffer, body: Buffer | None, timeout: float, flags: int = 0, command: bytes = APPEND_COMMAND
    ) -> tuple[Batch, int]:
        """Put one record into the open batch; return the batch and the record's number in it."""
        if self.pid != HERE.pid:
            raise elsewhere(self.pid)
        batch = self.open
        size = 0 if body is None else len(body)
        if (
            batch is None
            or not (timeout == self._open_for or -SHARED_S < timeout - self._open_for < SHARED_S)
            or batch.flags != flags
            or batch.command != command
            or (batch.size >= BATCH_BYTES and (len(batch.heads) >= FEW_RECORDS or batch.size + size > FEW_BYTES))
            or len(batch.heads) >= BATCH_RECORDS
            or size >= BATCH_BYTES
        ):
            batch = self.open = self._begin(timeout, flags, command)
            self._open_for = timeout
        number = len(batch.heads)
        self.window.hold(batch.put(head, body))
        return batch, number

    def add_many(
        self,
        records: Iterable[tuple[Buffer, Buffer | None]],
        timeout: float,
        flags: int = 0,
        command: bytes = b"",
        keys: Iterable[bytes] | None = None,
    ) -> Batch:
        """Put records into one frame of their own, so that they are appended together or not at all. `command`: another
        one than append's. `keys`: of each record, for a keyed log."""
        if self.pid != HERE.pid:
            raise elsewhere(self.pid)
        batch = self._begin(timeout, flags, command)
        batch.put_many(records, keys)
        return self._enqueue(batch)

    def _begin(self, timeout: float, flags: int, command: bytes) -> Batch:
        # The open batch goes first: serials and the queue are in the order in which records were given.
        self.close()
        self._serial += 1
        return Batch(self, self._serial, self.clock() + timeout, flags, command)

    def _enqueue(self, batch: Batch) -> Batch:
        self.queue.append(batch)
        self.window.hold(batch.size)
        return batch

    def close(self) -> None:
        """Close the open batch: no further record joins it."""
        if self.open is not None:
            if self.open.table:
                self.queue.append(self.open)
            self.open = None

    def take(self, now: float) -> list[Batch]:
        """Return the batches to send now, oldest first; they count as under way."""
        if now < self.held_until or (self.recovering and self.sent):
            return []
        self.recovering = False
        self.close()
        queue, self.queue = self.queue, []
        taken: list[Batch] = []
        for at, batch in enumerate(queue):
            if self.exactly_once and not batch.mode and not self._numbered(batch):
                # No session, or no room in its window: what comes later waits as well.
                self.queue = queue[at:] + self.queue
                break
            if not batch.pending.done:
                self.sent[batch.serial] = batch
                taken.append(batch)
        return taken

    def _numbered(self, batch: Batch) -> bool:
        """Return whether a batch has its number, or has got it now, or is finished because it can't have another
        one."""
        numbers = self.numbers
        if batch.ticket is not None:
            if batch.ticket[0] is numbers:
                return True
            if batch.ambiguous:
                self._finish(batch, expired(self.name))
                return True
        if numbers is None or not numbers.room:
            return False
        batch.number(numbers)
        return True

    def blind(self, batch: Batch) -> None:
        """Finish a batch that is never answered, as it was sent: that is all there is to know."""
        if not batch.pending.done:
            del self.sent[batch.serial]
            self._finish(batch, None, NOT_TOLD)

    def answered(self, batch: Batch, status: int, data: Buffer) -> None:
        """Take the answer to a batch under way."""
        if batch.pending.done:
            return
        if status:
            error = error_of(wire.unpack(data))
            del self.sent[batch.serial]
            self._refused(batch, error)
        else:
            del self.sent[batch.serial]
            self.failures, self.trouble = 0, None
            try:
                value = batch.decode(data)
            except LogyardError as error:
                self._finish(batch, error)
            else:
                self._finish(batch, None, value)
        if self.waiting:
            self.kick(self)

    def cut(self, batch: Batch, error: LogyardError) -> None:
        """Take note that the connection ended under a batch: its outcome is unknown, and it is sent again unless told
        otherwise."""
        if batch.pending.done:
            return
        del self.sent[batch.serial]
        batch.doubt()
        self.leader = 0
        # Without a number it would be applied twice.
        if self.retry and not batch.mode:
            self._again(batch, error)
        else:
            self._finish(batch, Unknown(f"{self.name}: the connection ended before the answer: {error}"))
        if self.waiting:
            self.kick(self)

    def _refused(self, batch: Batch, error: LogyardError) -> None:
        if isinstance(error, Unknown):
            batch.doubt()
        if batch.ticket is not None and error.code in RENEW:
            self._renew(batch, batch.ticket[0], error)
            return
        refused, error = error, final(self.name, error)
        again = self.retry and not batch.mode
        # What lost its answer gets none by being sent again, and without a number it would be applied twice.
        if error is not refused or error.retry == "never" or (isinstance(error, Unknown) and not again):
            self._finish(batch, outcome(error, batch.ambiguous, self.name))
            return
        if isinstance(error, NotLeader):
            self.leader = error.leader
        elif error.retry == "elsewhere":
            self.leader = 0
        self._again(batch, error)

    def _renew(self, batch: Batch, numbers: Sequences, error: LogyardError) -> None:
        """Move a frame that can't have been applied to another session: its own is of no more use."""
        if self.numbers is numbers:
            self.numbers = None
            if error.code == OUT_OF_WINDOW:
                # It must not take effect later in a session that moved on.
                self.stale = numbers.session
        if batch.ambiguous:
            self._finish(batch, expired(self.name))
            return
        batch.unnumber()
        self.close()
        insort(self.queue, batch)
        # Those under way will be refused as well: nothing overtakes them.
        self.recovering = True

    def _again(self, batch: Batch, error: LogyardError) -> None:
        now = self.clock()
        if now >= batch.deadline:
            self._finish(batch, self._overdue(batch, error))
            return
        self.trouble = error
        batch.hold_up(error)
        self.close()
        insort(self.queue, batch)
        if not self.recovering:
            # One failure a round, however many frames it struck; the first redirection is followed at once.
            self.failures += 1
            if isinstance(error, Busy | NoSpace):
                self.held_until = now + max(error.retry_after, 0.001) * (0.75 + self.chance.random() / 2)
            elif not (isinstance(error, NotLeader) and error.leader and self.failures == 1):
                self.held_until = now + backoff(self.failures - 1, self.chance)
        self.recovering = True

    def expire(self, now: float) -> None:
        """Fail what is past its deadline: with what last stood in its way, or as `Unknown` if it may have happened."""
        # What comes later has a deadline of its own.
        self.close()
        late = [batch for batch in self.queue if batch.deadline <= now]
        # Before anybody hears of it, who may send anew at once.
        self.queue = [batch for batch in self.queue if batch.deadline > now]
        for batch in late:
            self._finish(batch, self._overdue(batch, batch.trouble))
        lost = [batch for batch in self.sent.values() if batch.deadline + GRACE_S <= now]
        for batch in lost:
            del self.sent[batch.serial]
            batch.doubt()
            self._finish(batch, self._overdue(batch, batch.trouble))
        if (late or lost) and self.waiting:
            # It may have waited for the answers to those, or for their numbers.
            self.kick(self)

    def _overdue(self, batch: Batch, trouble: LogyardError | None) -> LogyardError:
        trouble = trouble or self.trouble
        found = trouble.again() if trouble is not None else NotLeader.told(f"{self.name}: no leader was found in time")
        return outcome(found, batch.ambiguous, self.name)

    def open_session(self, number: int) -> None:
        """Take note that a session of that number is being opened."""
        self.opening = number

    def opened_session(self, numbers: Sequences | None) -> None:
        """Take the session that was opened; None: it was not."""
        self.opening = 0
        if numbers is not None:
            self.numbers = numbers

    def closed_stale(self) -> None:
        """Take note that the session of before is closed."""
        self.stale = 0

    def routed(self, uid: int, leader: int) -> None:
        """Take what was found of the group."""
        self.uid, self.leader = uid, leader

    def reached(self, link: Any) -> None:
        """Take the connection to the group's leader."""
        self.link = link

    def mark(self) -> None:
        """Note that it is in a list of those that are looked at soon, or are being located."""
        self.dirty = True

    def unmark(self) -> None:
        """Note that it is in none of them any more."""
        self.dirty = False

    def give_up(self, error: LogyardError) -> None:
        """Fail what waits, and whatever fails from now on."""
        self.retry = False
        self.fail(error)

    def troubled(self, error: LogyardError) -> None:
        """Note what stands in the way of everything that waits: said when its time is over."""
        self.close()
        for batch in self.queue:
            batch.hold_up(error)

    def fail(self, error: LogyardError) -> None:
        """Fail what waits to be sent (the group does not exist, the client is closing)."""
        self.close()
        waiting, self.queue = self.queue, []
        for batch in waiting:
            self._finish(batch, outcome(error.again(), batch.ambiguous, self.name))

    def _finish(self, batch: Batch, error: LogyardError | None, value: Any = None) -> None:
        self.window.give_back(batch.size)
        batch.finish(error, value)
