"""The blocking consumer of a queue, alone: what it gathered is settled, or it is told that it was not."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest

from logyard.client.queue_sync import Consumer, Queue
from logyard.protocol import queue as qw
from logyard.protocol.errors import LogyardError, NotLeader, SessionExpired, Unknown
from logyard.protocol.queue import Message, NotHeld

SETTLE = 0x14


class Yard:
    """A cluster that takes every command but those that settle from the `limit`th one on."""

    session_ttl = 60.0
    timeout = 5.0

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.settled = 0
        self.ended = threading.Event()

    def begin_session(self, name: str, kind: str = "") -> int:
        return 7

    def end_session(self, name: str, session: int) -> None:
        self.ended.set()

    def beat(self, client: int) -> None:
        """Nobody asks."""

    def listen(self, name: str, session: int, pushed: Any, held: Any) -> None:
        self.ended.wait()

    def command(self, name: str, frame: list[Any], timeout: float | None = None, flags: int = 0) -> bytes:
        data = b"".join(frame)
        if bytes((SETTLE, qw.CONSUMER, 0, 0, 0)) in data:
            if self.settled >= self.limit:
                raise Unknown("a test")
            self.settled += 1
        return qw.COUNT.pack(1, 0)


def message(tag: int) -> Message:
    return Message(tag, tag, b"", b"", 0, 0, "")


@pytest.mark.parametrize("limit", [0, 1])
def test_what_could_not_be_settled_is_not_forgotten(limit: int) -> None:
    yard: Any = Yard(limit)
    with pytest.raises(LogyardError, match="a test"), Queue(yard, "q").consume() as consumer:
        consumer.ack(message(1))
        consumer.nack(message(2))
        with pytest.raises(Unknown):
            consumer.flush()
        consumer.flush()
    assert yard.settled == limit and yard.ended.is_set()


@pytest.mark.parametrize("wait", [math.inf, 1e300, threading.TIMEOUT_MAX])
def test_who_waits_for_ever_is_ended_by_the_consumers_end(wait: float) -> None:
    yard: Any = Yard(9)
    with Queue(yard, "q").consume() as consumer:
        closing = threading.Timer(0.1, consumer.close)
        closing.start()
        assert consumer.get(wait) is None
        closing.join()


class Late(Yard):
    """A cluster that answers what settles when another thread waits for that, or goes on without: it found nothing."""

    def __init__(self) -> None:
        super().__init__(0)
        self.asked = threading.Event()
        self.stirred = threading.Event()
        self.log: list[str] = []

    def command(self, name: str, frame: list[Any], timeout: float | None = None, flags: int = 0) -> bytes:
        data = b"".join(frame)
        if bytes((SETTLE, qw.CONSUMER, 0, 0, 0)) in data:
            self.asked.set()
            assert self.stirred.wait(20.0)
            self.log.append("settled")
        elif qw.detach_command() in data:
            self.stirred.set()
            self.log.append("detached")
        return qw.COUNT.pack(0, 0)

    def settle_elsewhere(self, consumer: Consumer) -> threading.Thread:
        """Settle a message here, and have another thread tell it; return when that waits for the answer."""
        consumer._changed = Watched(self.stirred)
        consumer.ack(message(1))
        thread = threading.Thread(target=consumer.get, args=(0.0,))
        thread.start()
        assert self.asked.wait(20.0)
        return thread


class Watched(threading.Condition):
    """A condition that says when somebody waits for it."""

    def __init__(self, stirred: threading.Event) -> None:
        super().__init__()
        self.stirred = stirred

    def wait(self, timeout: float | None = None) -> bool:
        self.stirred.set()
        return super().wait(timeout)


def test_a_flush_waits_for_what_another_thread_tells() -> None:
    yard: Any = Late()
    consumer = Consumer(yard, "q", 256, 1 << 20)
    thread = yard.settle_elsewhere(consumer)
    try:
        with pytest.raises(NotHeld):
            consumer.flush()
        assert yard.log == ["settled"]
    finally:
        yard.stirred.set()
        thread.join(20.0)


def test_leaving_waits_for_what_another_thread_tells() -> None:
    yard: Any = Late()
    with pytest.raises(NotHeld), Queue(yard, "q").consume() as consumer:
        thread = yard.settle_elsewhere(consumer)
    thread.join(20.0)
    assert yard.log == ["settled", "detached"]


def test_what_is_acknowledged_while_another_thread_waits_for_a_message_leaves() -> None:
    yard: Any = Late()
    consumer = Consumer(yard, "q", 256, 1 << 20)
    consumer._changed = Watched(yard.stirred)
    thread = threading.Thread(target=consumer.get, args=(None,))
    thread.start()
    try:
        assert yard.stirred.wait(20.0)
        consumer.ack(message(1))
        assert yard.asked.wait(20.0)
    finally:
        consumer.close()
        thread.join(20.0)


class Gone(Yard):
    """A cluster in which sessions end by themselves."""

    def listen(self, name: str, session: int, pushed: Any, held: Any) -> None:
        raise SessionExpired("a test")


def test_leaving_a_consumer_that_ended_tells_what_was_settled_in_vain() -> None:
    yard: Any = Gone(9)
    with Queue(yard, "q").consume() as consumer:
        consumer._thread.join(20.0)
    with pytest.raises(SessionExpired, match="a test"), Queue(yard, "q").consume() as consumer:
        consumer._thread.join(20.0)
        consumer.ack(message(1))
    with pytest.raises(ZeroDivisionError), Queue(yard, "q").consume() as consumer:
        consumer._thread.join(20.0)
        consumer.ack(message(1))
        raise ZeroDivisionError
    assert not yard.settled


def test_what_an_interrupt_kept_from_being_settled_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> bytes:
        raise KeyboardInterrupt

    yard: Any = Yard(9)
    consumer = Consumer(yard, "q", 256, 1 << 20)
    consumer.ack(message(1))
    with monkeypatch.context() as patch:
        patch.setattr(yard, "command", interrupted)
        with pytest.raises(KeyboardInterrupt):
            consumer.flush()
    with pytest.raises(Unknown, match="interrupted"):
        consumer.flush()


def test_what_was_lost_is_asked_for_until_somebody_hears_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bytes] = []

    def away(name: str, frame: list[Any], timeout: float | None = None, flags: int = 0) -> bytes:
        asked.append(b"".join(frame))
        if len(asked) < 3:
            raise NotLeader.told("a test")
        return qw.COUNT.pack(0, 0)

    yard: Any = Yard(0)
    monkeypatch.setattr(yard, "command", away)
    consumer = Consumer(yard, "q", 4, 1 << 20)
    consumer._pushed({"kind": "alive", "index": 0, "dropped": 1}, memoryview(b""))
    for _ in range(2):
        with pytest.raises(NotLeader):
            consumer.get(0.0)
    assert consumer.get(0.0) is None and consumer.get(0.0) is None
    assert len(asked) == 3 and all(qw.resend_command(1) in one for one in asked)
