"""A queue, blocking: the same as `queue`, from threads.

A consumer has two threads of its own: one receives what comes, one says that the client lives, for a node that does not
answer shall keep nothing from being received. Acknowledgements are gathered: they leave when there is no further
message, when half of what may be held is settled, at `flush` and when the consumer ends. Safe to share among threads.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from logyard.protocol import queue as qw
from logyard.protocol.errors import LogyardError, Unknown
from logyard.protocol.frame import CommandFrame
from logyard.protocol.queue import Message

from ._sync.frames import Appends, FramedQueue
from .fork import HERE, elsewhere
from .sequences import OUT_OF_WINDOW, Sequences, expired, final
from .session import Pushed
from .sync_link import Connection

__all__ = ["Consumer", "Message", "Queue"]


class Listens(Appends, Protocol):
    """A yard that has sessions of their own for consumers, and hears what comes for one."""

    @property
    def session_ttl(self) -> float:
        """Seconds that a session lives without a sign of life."""

    def begin_session(self, name: str, kind: str = "") -> int:
        """Open a session; return its number."""

    def end_session(self, name: str, session: int) -> None:
        """Close a session."""

    def beat(self, client: int) -> None:
        """Tell every node that a client lives."""

    def listen(
        self,
        name: str,
        session: int,
        pushed: Pushed,
        held: Callable[[Connection | None], object],
    ) -> None:
        """Take what a session is sent until it is over: raises why."""


class Queue(FramedQueue):
    """The queue `name`; nothing is asked until it is used. Make one with `yard.create(name, machine="queue", ...)`."""

    __slots__ = ()

    yard: Listens

    def __init__(self, yard: Listens, name: str) -> None:
        self.yard = yard
        self.name = name

    @contextmanager
    def consume(
        self,
        *,
        prefetch: int = qw.PREFETCH,
        prefetch_bytes: int = qw.PREFETCH_BYTES,
        priority: int = 0,
        lease: float | None = None,
        dead: bool = False,
        auto: bool = True,
    ) -> Iterator[Consumer]:
        """Consume: ``with queue.consume() as messages: for message in messages: ...``; options as
        `queue.Queue.consume`."""
        command = qw.attach_command(prefetch, prefetch_bytes, priority, lease, dead, auto)
        consumer = Consumer(self.yard, self.name, prefetch, prefetch_bytes)
        try:
            consumer.command(command)
            consumer.start()
            yield consumer
            if consumer.failure is None and not consumer.closed:
                consumer.send()
                consumer.command(qw.detach_command())
                consumer.told()
            elif consumer.failure is not None and consumer._known < consumer._given:
                raise consumer.failure.again()
        finally:
            consumer.close()


class Consumer:
    """What `Queue.consume` gives; see `queue.Consumer`. `failure`: why it ended by itself."""

    __slots__ = (
        "yard", "name", "session", "failure", "closed", "credit_bytes", "_prefetch", "_numbers", "_inbox", "_messages",
        "_settles", "_count", "_given", "_known", "_sending", "_changed", "_connection", "_thread", "_beating", "_over",
        "_pid",
    )  # fmt: skip

    def __init__(self, yard: Listens, name: str, prefetch: int, credit_bytes: int) -> None:
        self.yard = yard
        self.name = name
        self.session = yard.begin_session(name, "queue")
        self.failure: LogyardError | None = None
        self.closed = False
        self._pid = HERE.pid
        self.credit_bytes = credit_bytes
        self._prefetch = prefetch
        self._numbers = Sequences(self.session)
        self._inbox = qw.Inbox()
        self._messages: deque[Message] = deque()
        self._settles = qw.Settles()
        self._count = 0
        # How often something was settled here, and up to where a quorum knows of it; one thread at a time tells it.
        self._given = self._known = 0
        self._sending = False
        self._changed = threading.Condition()
        self._connection: Connection | None = None
        self._thread = threading.Thread(target=self._listen, name=f"logyard consumer {name}", daemon=True)
        self._over = threading.Event()
        self._beating = threading.Thread(target=self._beats, name=f"logyard consumer {name} alive", daemon=True)

    def start(self) -> None:
        """Begin to receive."""
        self._beating.start()
        self._thread.start()

    def __iter__(self) -> Iterator[Message]:
        """Yield messages, as long as the consumer lasts. Raises `SessionExpired` ... when it ended by itself."""
        while (message := self.get(None)) is not None:
            yield message

    def get(self, wait: float | None) -> Message | None:
        """Return the next message; None when none comes within `wait` seconds (None: for ever), or the consumer is
        closed."""
        self._is_here()
        deadline = None if wait is None else time.monotonic() + wait
        while True:
            with self._changed:
                if self._messages:
                    return self._messages.popleft()
                self._check()
                if self.closed:
                    return None
                lost, idle = self._inbox.lost, not self._settles
                if idle and not lost:
                    left = None if deadline is None else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        return None
                    self._changed.wait(None if left is None else min(left, threading.TIMEOUT_MAX))
                    continue
                again = self._inbox.resend() if lost else b""
            if again:
                try:
                    self.command(again)
                except BaseException:
                    with self._changed:
                        self._inbox.unheard()
                        self._changed.notify_all()
                    raise
            if not idle:
                self.send()

    def ack(self, message: Message, *, multiple: bool = False) -> None:
        """Settle a message, which is done with, or everything up to it. It is gathered, as `nack` and `reject` are:
        `flush` sends it, and says whether the message was still this consumer's; leaving says it at the latest."""
        self._settle(qw.ACK, message, multiple)

    def nack(self, message: Message, *, multiple: bool = False, requeue: bool = True) -> None:
        """Put a message back to its place in the queue, as a delivery that failed; without `requeue` it becomes a dead
        letter."""
        self._settle(qw.REQUEUE if requeue else qw.REJECT, message, multiple)

    def reject(self, message: Message) -> None:
        """Make a message a dead letter."""
        self.nack(message, requeue=False)

    def extend(self, *messages: Message) -> int:
        """Begin their leases anew; return how many of them are still this consumer's."""
        commands = qw.extend_commands((one.tag, one.tag) for one in messages)
        return sum([qw.count_of(self.command(command)) for command in commands])

    def credit(self, messages: int) -> None:
        """Let so many more messages (with `auto`: so many at most at a time) come."""
        self.command(qw.credit_command(messages, self.credit_bytes))

    def flush(self) -> int:
        """Wait until everything that was settled so far is known to a quorum; return how many messages that were since
        the last `flush`. Raises `NotHeld` when some were not this consumer's any more, and what stands in the way."""
        self.send()
        return self.told()

    def told(self) -> int:
        """Return how many messages were settled since this was asked last, as far as is known. Raises `NotHeld`."""
        with self._changed:
            return self._settles.told(self.name)

    def send(self) -> None:
        """Wait until everything that was gathered so far is known to a quorum. Raises what stands in the way."""
        self._is_here()
        with self._changed:
            given = self._given
            while self._sending and self._known < given and self.failure is None:
                self._changed.wait()
            self._check()
            if self._known >= given:
                return
            self._sending, given = True, self._given
            commands, self._count = self._settles.take(), 0
        try:
            for command, wanted in commands:
                reply = self.command(command)
                with self._changed:
                    self._settles.answered(reply, wanted)
            self._known = given
        except BaseException as error:
            # Nobody knows what was settled, and it is gathered no more: what is held goes back with the session.
            unknown = error if isinstance(error, LogyardError) else Unknown(f"{self.name}: settling was interrupted")
            self.failure = self.failure or unknown
            raise
        finally:
            with self._changed:
                self._sending = False
                self._changed.notify_all()

    def _settle(self, what: int, message: Message, multiple: bool) -> None:
        self._is_here()
        with self._changed:
            if not self._settles:
                # Who waits for a message tells it, as there is none.
                self._changed.notify_all()
            self._settles.add(what, message.tag, multiple)
            self._count += 1
            self._given += 1
            full = multiple or 2 * self._count >= self._prefetch
        if full:
            self.send()

    def _is_here(self) -> None:
        if self._pid != HERE.pid:
            raise elsewhere(self._pid)

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure.again()

    def command(self, command: bytes) -> bytes:
        """Send one command of this consumer's session, exactly once; return its reply. Raises `BadRequest` for what is
        no bytes."""
        self._is_here()
        frame = CommandFrame(command, b"", None)
        with self._changed:
            while not self._numbers.room:
                self._changed.wait()
            sequence = self._numbers.next()
        try:
            return self.yard.command(self.name, frame.encode(self.session, sequence))
        except LogyardError as error:
            if error.code == OUT_OF_WINDOW:
                # No later one can be applied either: see `messages.Session.command`.
                error = expired(self.name, error.code)
                self._abandon(error)
            raise final(self.name, error) from None
        finally:
            with self._changed:
                self._numbers.done(sequence)
                self._changed.notify_all()

    def _abandon(self, error: LogyardError) -> None:
        """End a session that is of no more use: what it holds goes back now, not after its time to live."""
        with self._changed:
            self.failure = self.failure or error
            self._over.set()
            self._changed.notify_all()
        self.yard.end_session(self.name, self.session)

    def close(self) -> None:
        """End it; what it holds goes back to the queue. In the child of a fork nothing happens: it is the parent's."""
        if self._pid != HERE.pid:
            self.closed = True
            return
        with self._changed:
            if self.closed:
                return
            self.closed = True
            self._over.set()
            self._changed.notify_all()
            connection = self._connection
        if connection is not None:
            connection.interrupt()
        self.yard.end_session(self.name, self.session)

    # Its threads

    def _listen(self) -> None:
        try:
            self.yard.listen(self.name, self.session, self._pushed, self._held)
        except LogyardError as error:
            with self._changed:
                self.failure = None if self.closed else self.failure or error
                self._changed.notify_all()
        finally:
            self._over.set()

    def _held(self, connection: Connection | None) -> None:
        with self._changed:
            self._connection = connection
            if self.closed:
                raise LogyardError(f"{self.name}: the consumer is closed")

    def _beats(self) -> None:
        while not self._over.wait(self.yard.session_ttl / 3):
            self.yard.beat(self.session)

    def _pushed(self, header: Mapping[str, Any], data: memoryview) -> None:
        with self._changed:
            messages = self._inbox.pushed(header, data)
            if messages or self._inbox.lost:
                self._messages += messages
                self._changed.notify_all()
