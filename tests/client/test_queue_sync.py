"""The blocking consumer of a queue, alone: what it gathered is settled, or it is told that it was not."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from logyard.client.queue_sync import Queue
from logyard.protocol import queue as qw
from logyard.protocol.errors import LogyardError, Unknown
from logyard.protocol.queue import Message

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
