"""What a client of the JSON gateway can make it hold and do is bounded by what it sends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import trio
from starlette.requests import Request

from logyard.client import kv_requests
from logyard.protocol.errors import Busy
from logyard.service.etcd import app, streams
from logyard.service.etcd.app import Call, answer
from logyard.service.etcd.gateway import Gateway
from logyard.service.etcd.streams import Messages, Response, Stream
from logyard.service.etcd.words import GatewayError, Message, Schema, packed


def gateway() -> Any:
    return Gateway(SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]


def anything(name: str, found: Any) -> Any:
    """A field of any kind."""
    return found


ANY = Schema(a=anything, b=anything, key=anything, n=anything, deep=anything)


def ignored(size: int) -> None:
    """Any number of bytes is welcome."""


class Body:
    """An ASGI `receive` that gives some pieces, and then nothing but that the client has gone."""

    def __init__(self, *pieces: bytes, whole: bool = True) -> None:
        self.waiting = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
        self.waiting[-1]["more_body"] = not whole

    async def __call__(self) -> Any:
        return self.waiting.pop(0) if self.waiting else {"type": "http.disconnect"}


def test_a_message_in_pieces_that_never_ends_is_given_up() -> None:
    parser = Messages(1 << 20, ANY, ignored)
    assert parser.feed(b'{"a":"' + b"x" * 500_000, False) == []
    with pytest.raises(GatewayError, match="pieces"):
        for _ in range(10_000):
            assert parser.feed(b"}", False) == []
    assert parser._read < 2 * (streams.REREAD_BYTES + streams.REREAD * parser._received)


@pytest.mark.parametrize("size", [1, 7, 4096])
def test_a_message_in_pieces_is_read(size: int) -> None:
    wanted = [{"key": "}" * 3, "n": number, "deep": {"a": [{}, {}]}} for number in range(40)]
    data = b" \n".join(packed(one) for one in wanted) + b"\n"
    parser = Messages(1 << 20, ANY, ignored)
    found = [one for at in range(0, len(data), size) for one in parser.feed(data[at : at + size], False)]
    assert [one.fields for one in found + parser.feed(b"", True)] == wanted


async def test_the_bytes_of_a_body_are_held_until_its_call_is_over() -> None:
    found = gateway()
    held = []

    async def call(gateway: Any, asked: Message) -> dict[str, Any]:
        held.append(gateway._bytes)
        return {}

    request = Request({"type": "http", "headers": []}, Body(b'{"a":', b'"b"}', b""))
    assert (await answer(found, Call(ANY, call), request)).status_code == 200
    assert held == [9] and found._bytes == 0


async def test_what_streams_keep_of_messages_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    found = gateway()
    held: list[int] = []
    sent: list[Any] = []

    async def handler(gateway: Any, asked: Any, answer: Any) -> None:
        assert [one.fields async for one in asked] == [{"a": 1}, {"b": 2}]

    async def send(message: Any) -> None:
        sent.append(message)

    body = Body(b'{"a":', b'1}\n{"b"', b":2}")

    async def receive() -> Any:
        held.append(found._bytes)
        return await body()

    stream = Stream(found, handler, ANY, app.failure)
    await stream({}, receive, send)
    assert held == [0, 5, 4, 0] and found._bytes == 0
    monkeypatch.setattr("logyard.service.etcd.gateway.BODIES_BYTES_MAX", 100)
    await stream({}, Body(b'{"a":"' + b"x" * 60, b"x" * 60, whole=False), send)
    assert [one["status"] for one in sent if "status" in one] == [429] and found._bytes == 0


@pytest.mark.parametrize("steps", range(5))
async def test_who_is_cancelled_has_sent_its_chunk_or_nothing(steps: int) -> None:
    """Behind a head that was never sent, or half a chunk, what others of the stream say would be no answer."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        if sent and isinstance(sent[-1], str):
            raise AssertionError("behind half a message")
        sent.append("half")
        await trio.lowlevel.checkpoint()
        sent[-1] = message

    found = Response(send)
    scope = trio.CancelScope()

    async def cancelled() -> None:
        with scope:
            await found.chunk(b"first")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(cancelled)
        for _ in range(steps):
            await trio.lowlevel.checkpoint()
        scope.cancel()
        await found.chunk(b"second")
    assert [one["type"] for one in sent][:1] == ["http.response.start"] and "half" not in sent
    bodies = [one["body"] for one in sent[1:]]
    assert bodies in ([b"first", b"second"], [b"second"])


async def test_a_write_that_was_done_is_no_failure_for_want_of_the_term() -> None:
    class Done:
        same_leader = False
        term = 0

        async def run(self, steps: Any, *how: Any) -> float:
            if steps.__name__ == "status":
                raise Busy("a test", 0.1)
            return 5.0

    asked = Gateway(Done(), SimpleNamespace())  # type: ignore[arg-type]
    assert await asked.run(kv_requests.keep(1)) == 5.0
