"""Clients of a queue: one publishes, one consumes.

Total: every confirmed message is delivered, or still there, or a dead letter; nothing is delivered that nobody
published, or with other bytes; an id is one message's. Deliveries come at least once: what is not settled when a leader
or a consumer goes is delivered again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from logyard.machines.queue.command import PUBLISH_REPLY
from logyard.protocol import queue as qw
from logyard.protocol import wire
from logyard.protocol.errors import LogyardError
from logyard.protocol.frame import encode_frame

from .clients import Client, Frame, Group, Workload

PREFETCH = 64
REQUEUE = 1
REQUEUED = 0.04
REJECTED = 0.02
LISTEN_S = 0.8
"""Until a consumer whose listening ended tries again."""
RESEND_S = 3.0
"""A consumer that hears nothing for so long asks for what it holds once more."""


class QueueGroup(Group):
    """`confirmed`: id -> tag as answered; `sent`: tags of all messages; `delivered`: id -> tag."""

    machine = "queue"

    def __init__(self, work: Workload, name: str) -> None:
        super().__init__(work, name)
        self.reset()
        Publisher(work, self)
        for _ in range(work.more.choice((2, 3)) if "consumers" in work.features else 1):
            Consumer(work, self)

    def reset(self) -> None:
        self.confirmed: dict[int, int] = {}
        self.missing: dict[int, int] = {}
        self.sent: set[int] = set()
        self.delivered: dict[int, int] = {}
        self.newest = 0
        # Ids of messages whose settling was answered.
        self.settled: set[int] = set()

    def lacks(self, machine: Any) -> str:
        following = machine.state.next_number
        return f"ids up to {following - 1} of {self.newest}" if following <= self.newest else ""

    def took(self, number: int, body: bytes | None) -> None:
        """A delivery."""
        fault = self.work.fault
        tag = int((body or b"0;")[:20].partition(b";")[0])
        if tag not in self.sent or body != self.work.body(tag):
            fault(f"{self.name}: message {number} was delivered as {tag}, with bytes that nobody published")
        known = self.delivered.setdefault(number, tag)
        if known != tag or self.confirmed.get(number, tag) != tag:
            fault(f"{self.name}: message {number} was delivered as {tag}, it is {self.confirmed.get(number, known)}")
        self.missing.pop(number, None)

    def confirm(self, number: int, tag: int) -> None:
        """A publication was answered."""
        if self.confirmed.setdefault(number, tag) != tag or self.delivered.get(number, tag) != tag:
            self.work.fault(f"{self.name}: id {number} was given to {self.confirmed[number]} and {tag}")
        if number not in self.delivered:
            self.missing[number] = tag
        self.newest = max(self.newest, number)
        self.work.acknowledged += 1

    def settle(self, ids: Sequence[int], count: int, final: bool) -> None:
        """So many of these were settled, as answered: what a consumer holds nobody takes from it, and what is gone
        is gone."""
        if count != len(ids):
            self.work.fault(f"{self.name}: settling {len(ids)} messages was answered with {count}, {min(ids)} first")
        if final:
            again = self.settled.intersection(ids)
            if again:
                self.work.fault(f"{self.name}: message {min(again)} was settled twice")
            self.settled.update(ids)

    def pending(self) -> list[str]:
        if self.missing and self.created:
            return [f"{self.name}: {len(self.missing)} confirmed messages are not delivered, {min(self.missing)} first"]
        return []


class Publisher(Client):
    """Frames of messages; `what` is their tags."""

    group: QueueGroup

    def say(self, burst: int) -> int:
        work = self.work
        count = max(1, burst)
        self.sequence += 1
        first = work.invent(count)
        tags = range(first, first + count)
        self.group.sent.update(tags)
        bodies = [work.body(tag) for tag in tags]
        # With a size of each message behind it.
        command = qw.PLAIN[:2] + b"\1" + qw.PLAIN[3:] + b"".join(len(body).to_bytes(4, "little") for body in bodies)
        records = [(b"", body) for body in bodies]
        work.operations += count
        data = encode_frame(records, command=command, session=self.session, sequence=self.sequence)
        self.put(tags, b"".join(data))
        return count

    def answered(self, frame: Frame, data: bytes) -> None:
        first, count = PUBLISH_REPLY.unpack(data)
        if count != len(frame.what):
            self.work.fault(f"{self.group.name}: {len(frame.what)} messages were published as {count}")
        for number, tag in enumerate(frame.what, first):
            self.group.confirm(number, tag)


class Consumer(Client):
    """Listens where its group is led, and settles what it gets; `what` of a settling frame: how, and whose ids."""

    group: QueueGroup
    talks = False

    def __init__(self, workload: Workload, group: Group) -> None:
        super().__init__(workload, group)
        self.inbox = qw.Inbox()
        self.listening = 0
        self.heard = 0.0
        self.dropped = 0
        # Delivery tags that are not settled yet, with their messages, by what becomes of them.
        self.todo: dict[int, list[tuple[int, int]]] = {}
        # The frame that attaches it, and those that it sent before that was answered: they may come first.
        self.attaching = 0
        self.early: set[int] = set()
        workload.loop.at(0.0, None, self.go)

    def talk(self, begun: int) -> None:
        """It goes on by itself, also while nobody publishes."""

    def go(self) -> None:
        """Once in a while: a session, somebody to listen to, deliveries that got lost."""
        work = self.work
        work.loop.at(work.loop.now + LISTEN_S * work.draw.uniform(0.7, 1.3), None, self.go)
        if not self.group.created:
            return
        if not self.session:
            self.open()
        elif not self.listening:
            self._listen()
        elif self.inbox.lost or (self.group.missing and work.loop.now - self.heard > RESEND_S):
            self.inbox.lost = False
            self.heard = work.loop.now
            self._command(qw.resend_command(self.inbox.next))
            if self.todo and not self.full:
                # What came while all its frames were under way, and was the last that it has credit for.
                self._settle()

    def began(self) -> None:
        self.inbox, self.dropped, self.todo = qw.Inbox(), 0, {}
        self.attaching, self.early = self.sequence + 1, set()
        self._command(qw.attach_command(PREFETCH, 1 << 20, 0, None, False, True))

    def _command(self, command: bytes, what: tuple[int, list[int]] | None = None) -> None:
        if self.session:
            self.sequence += 1
            records = [(b"", None)]
            data = encode_frame(records, command=command, session=self.session, sequence=self.sequence)
            if self.attaching in self.pending:
                self.early.add(self.sequence)
            self.put(what, b"".join(data))

    def _refused(self, frame: Frame, error: LogyardError) -> None:
        if error.code == "no_consumer" and frame.sequence in self.early:
            del self.pending[frame.sequence]
            if frame.timer is not None:
                frame.timer.cancel()
            return
        super()._refused(frame, error)

    def _listen(self) -> None:
        work, session = self.work, self.session
        number = work.leader_of(self.group)
        host = work.cluster.hosts.get(number)
        if host is None or not host.ready or host.life is None or host.life.paused_until > work.loop.now:
            return
        self.listening = number
        life = host.life

        def done(result: Any, error: BaseException | None) -> None:
            if error is not None and not isinstance(error, LogyardError):
                work.cluster.on_bug(f"listening to {self.group.name}", error)
            self.listening = 0
            if error is not None and getattr(error, "code", "") == "session_expired" and session == self.session:
                self.forget()

        def look() -> None:
            # A node that died says nothing.
            if self.listening == number and host.life is not life:
                self.listening = 0
            elif self.listening == number:
                work.loop.at(work.loop.now + 0.5, None, look)

        look()
        work.cluster.spawn(number, work.cluster.node(number).listen(self.group.name, session, self), "listen", done)

    # The sink

    def push(self, uid: int, session: int, header: Mapping[str, Any], body: Sequence[Any]) -> bool:
        """See `SessionSink`: taken apart by the client's own code."""
        if session != self.session or uid != self.group.uid:
            return True
        data = memoryview(b"".join(body))
        plain = wire.unpack(wire.pack({**header, "dropped": self.dropped}))
        self.work.loop.soon(None, self._took, session, plain, data)
        return True

    async def room(self, size: int) -> None:
        """See `SessionSink`."""

    def missed(self) -> None:
        """See `SessionSink`."""
        self.dropped += 1

    def _took(self, session: int, header: Mapping[str, Any], data: memoryview) -> None:
        if session != self.session:
            return
        messages = self.inbox.pushed(header, data)
        draw = self.work.draw
        for message in messages:
            self.heard = self.work.loop.now
            self.group.took(message.id, message.body)
            dice = draw.random()
            what = 1 if dice < REQUEUED else 2 if dice < REQUEUED + REJECTED else 0
            self.todo.setdefault(what, []).append((message.tag, message.id))
        if messages and not self.full:
            self._settle()

    def _settle(self) -> None:
        todo, self.todo = self.todo, {}
        for what, held in todo.items():
            # Fewer than a command may have ranges.
            ((command, _),) = qw.settle_commands(what, [(tag, tag) for tag, _ in held])
            self._command(command, (what, [number for _, number in held]))

    def answered(self, frame: Frame, data: bytes) -> None:
        if frame.what is not None:
            what, ids = frame.what
            self.group.settle(ids, qw.count_of(data), what != REQUEUE)
        self.heard = self.work.loop.now
