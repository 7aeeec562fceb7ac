"""The streaming paths of the gateway: a request's messages as they come, an answer of JSON messages, one a chunk.

A stream ends when its client goes, when the gateway stops (cleanly, with the last chunk), or with an error as its last
message. Used by `app` for watch and keepalive.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import trio
from starlette.types import Receive, Scope, Send

from logyard.service.daemon import leaves

from . import leases
from .gateway import Gateway
from .watching import Watching
from .words import (
    UNKNOWN,
    GatewayError,
    Message,
    NotJson,
    Schema,
    behind_space,
    first_value,
    malformed,
    packed,
    too_long,
)

NAMES = {2: "Unknown", 3: "InvalidArgument", 5: "NotFound", 8: "ResourceExhausted", 9: "FailedPrecondition",
         11: "OutOfRange", 12: "Unimplemented", 14: "Unavailable"}  # fmt: skip

DRAINED_BYTES = 64 << 20
DRAINED_S = 10.0
"""Of a body that is refused so much is read, so that its client reads the answer instead of a reset."""
REREAD = 64
REREAD_BYTES = 4 << 20
"""A message that is not complete is looked at again when more of it comes: a client may make work of so many times what
it sends, and so much besides."""


class Gone(Exception):
    """The client closed its connection."""


class Messages:
    """Messages out of the pieces of a body. `take` makes room for what is kept. As with etcd, what is no message is
    refused as the first one, and ends the request (`over`), but not the answer, behind others."""

    __slots__ = ("over", "_text", "_limit", "_schema", "_take", "_read", "_received", "_found")

    def __init__(self, limit: int, schema: Schema, take: Callable[[int], None]) -> None:
        self.over = False
        self._text = bytearray()
        self._limit = limit
        self._schema = schema
        self._take = take
        # Bytes that were looked at, some of them again and again, and those that came; messages that were read.
        self._read = self._received = self._found = 0

    def feed(self, data: bytes, last: bool) -> list[Message]:
        """Return the messages that are complete now. Raises `GatewayError` for what is none, or too long."""
        if len(self._text) + len(data) > self._limit:
            raise too_long(len(self._text) + len(data), self._limit)
        self._take(len(data))
        self._text += data
        self._received += len(data)
        # Nothing else ends a message.
        if not last and b"}" not in data and self._text[:1] == b"{":
            return []
        self._read += len(self._text)
        if self._read > REREAD_BYTES + REREAD * self._received:
            raise malformed("a message in too many pieces")
        found: list[Message] = []
        # What is no UTF-8, or not yet, is kept as it is.
        text = self._text.decode("utf-8", "surrogateescape")
        at = behind_space(text)
        try:
            while at < len(text):
                value, at = first_value(text, at)
                found.append(self._schema.read(value))
                at = behind_space(text, at)
        except GatewayError as error:
            if last or not isinstance(error, NotJson) or not error.begun:
                if not found and not self._found:
                    raise GatewayError(UNKNOWN, error.message) from None
                self.over, at = True, len(text)
        self._found += len(found)
        kept = text[at:].encode("utf-8", "surrogateescape")
        self._take(len(kept) - len(self._text))
        self._text = bytearray(kept)
        return found


class Response:
    """The chunks of a response; it begins with the first one, and what fails before that is answered with a status."""

    __slots__ = ("_send", "begun", "_lock")

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False
        self._lock = trio.Lock()

    async def result(self, fields: dict[str, Any]) -> None:
        """Send one message."""
        await self.chunk(packed({"result": fields}) + b"\n")

    async def chunk(self, data: bytes) -> None:
        """Send one chunk: whole messages, each by one task at a time. Who is cancelled, as a watch is, has sent all of
        it or nothing: others go on behind it."""
        async with self._lock:
            with trio.CancelScope(shield=True):
                await self.begin(200, ())
                await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def begin(self, status: int, headers: tuple[tuple[bytes, bytes], ...]) -> None:
        """Send the head, once."""
        if not self.begun:
            self.begun = True
            head = [(b"content-type", b"application/json"), *headers]
            await self._send({"type": "http.response.start", "status": status, "headers": head})

    async def end(self) -> None:
        """Send the last chunk."""
        await self.begin(200, ())
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def fail(self, error: GatewayError) -> None:
        """Say why it is over."""
        if self.begun:
            said = {"grpc_code": error.code, "http_code": error.status, "message": error.message,
                    "http_status": NAMES.get(error.code, "Unknown")}  # fmt: skip
            await self.chunk(packed({"error": said}) + b"\n")
            await self.end()
            return
        length = (b"content-length", str(len(error.body)).encode())
        await self.begin(error.status, (length, (b"connection", b"close")))
        await self._send({"type": "http.response.body", "body": error.body, "more_body": False})


Asked = trio.MemoryReceiveChannel[Message]
Streaming = Callable[[Gateway, Asked, Response], Awaitable[None]]


async def keepalive(gateway: Gateway, asked: Asked, answer: Response) -> None:
    """Answer each message; ends with the request."""
    async for one in asked:
        await answer.result(await leases.keepalive(gateway, one))


async def watch(gateway: Gateway, asked: Asked, answer: Response) -> None:
    """Serve watches that come and go with the messages; goes on when the request has ended, as etcd's does."""
    async with trio.open_nursery() as nursery:
        watching = Watching(gateway, answer.chunk, nursery)
        try:
            async for one in asked:
                await watching.take(one)
            await trio.sleep_forever()
        finally:
            watching.close()


async def _read(receive: Receive, parser: Messages, into: trio.MemorySendChannel[Message]) -> None:
    """Read the messages of a request, then nothing until its client goes: a task. Raises `GatewayError`, `Gone`."""
    last = False
    while not last and not parser.over:
        event = await receive()
        if event["type"] == "http.disconnect":
            raise Gone
        last = not event.get("more_body", False)
        try:
            found = parser.feed(event.get("body", b""), last)
        except GatewayError:
            if not last:
                await drain(receive)
            raise
        for one in found:
            await into.send(one)
    # Not when it fails: what reads would end as if all was well.
    into.close()
    while (await receive())["type"] != "http.disconnect":
        pass
    raise Gone


async def drain(receive: Receive) -> None:
    """Read what is left of a body, up to so much."""
    left = DRAINED_BYTES
    with trio.move_on_after(DRAINED_S):
        while left > 0:
            event = await receive()
            if event["type"] != "http.request" or not event.get("more_body"):
                return
            left -= len(event.get("body", b""))


class Stream:
    """An ASGI application for one streaming path."""

    __slots__ = ("gateway", "handler", "schema", "failure")

    def __init__(
        self, gateway: Gateway, handler: Streaming, schema: Schema, failure: Callable[[Exception], GatewayError]
    ) -> None:
        self.gateway = gateway
        self.handler = handler
        self.schema = schema
        self.failure = failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one stream."""
        answer = Response(send)
        error = None
        try:
            with self.gateway.under_way() as take:
                await self._run(receive, answer, take)
        except Exception as found:
            error = next((one for one in leaves(found) if isinstance(one, Gone)), leaves(found)[0])
        if error is None:
            await answer.end()
        elif isinstance(error, Exception) and not isinstance(error, Gone):
            await answer.fail(self.failure(error))

    async def _run(self, receive: Receive, answer: Response, take: Callable[[int], None]) -> None:
        parser = Messages(self.gateway.limits.body_bytes, self.schema, take)
        async with trio.open_nursery() as nursery:
            into, asked = trio.open_memory_channel[Message](0)
            nursery.start_soon(self._stop, nursery.cancel_scope)
            nursery.start_soon(_read, receive, parser, into)
            await self.handler(self.gateway, asked, answer)
            nursery.cancel_scope.cancel()

    async def _stop(self, scope: trio.CancelScope) -> None:
        await self.gateway.stopping.wait()
        scope.cancel()
