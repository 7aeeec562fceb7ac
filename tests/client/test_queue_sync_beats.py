"""A blocking consumer's signs of life, beside nodes that do not answer."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, cast

import pytest

from logyard.client.queue_sync import Consumer
from logyard.client.session import Pushed, Routes
from logyard.client.sync import Yard
from logyard.protocol import wire
from logyard.protocol.errors import LogyardError

DELIVERY: Mapping[str, Any] = {
    "kind": "records", "dropped": 0, "index": 1, "records": [[1, 0, 0, 5]],
    "tag": wire.pack([0, 1, 2, [[1, 1, 1, 1, 0, 0, 0, 0]]]),
}  # fmt: skip


class Cluster:
    """Its first sign of life is never answered, and a message comes while that is waited for."""

    session_ttl = 0.03

    def __init__(self) -> None:
        self.beating = threading.Event()
        self.over = threading.Event()

    def begin_session(self, name: str, kind: str = "") -> int:
        return 1

    def end_session(self, name: str, session: int) -> None:
        self.over.set()

    def beat(self, client: int) -> None:
        self.beating.set()
        self.over.wait(60.0)

    def listen(self, name: str, session: int, pushed: Pushed, held: object) -> None:
        self.beating.wait(60.0)
        pushed(DELIVERY, memoryview(b"hello"))
        self.over.wait(60.0)
        raise LogyardError("it is over")


def test_a_node_that_does_not_answer_keeps_no_message_from_being_received() -> None:
    consumer = Consumer(cast(Any, Cluster()), "q", 1, 1)
    consumer.start()
    try:
        message = consumer.get(20.0)
        assert message is not None and message.body == b"hello"
    finally:
        consumer.close()
    consumer._beating.join(20.0)
    assert not consumer._beating.is_alive()


def test_nodes_that_do_not_answer_leave_time_for_the_next_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    yard = Yard(["a:1"], session_ttl=60.0)
    yard._routes = Routes(["a:1"])
    yard._routes.told({node: f"n{node}:1" for node in range(1, 6)})
    monkeypatch.setattr(Yard, "run", lambda self, call, timeout: waits.append(timeout))
    yard.beat(7)
    assert len(waits) == 5 and sum(waits) <= 20.0 + 1e-9
