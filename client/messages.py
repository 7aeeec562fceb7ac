"""An explicit session of an asynchronous client: exactly-once commands to any machine, and what it sends to it.

Invariants: messages come in the order in which the leader sent them, each at most once; more than `BUFFER_BYTES` are
never kept for a reader that is slow: what comes on top of that is dropped and counted. The session follows its group's
leader. Made by `aio.Yard.open_session`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeAlias, TypeVar

from logyard.protocol.errors import BadRequest, LogyardError, Unknown, WrongKind
from logyard.protocol.frame import Buffer, CommandFrame
from logyard.protocol.wire import ProtocolError

from .admin import call_leader
from .log import open_call
from .sequences import OUT_OF_WINDOW, Sequences, expired, final, new_number
from .yards import Yard

BUFFER_BYTES = 8 << 20
"""What is kept for `messages`; one message alone may be larger."""
OVERHEAD = 64
"""What a message counts beside its bytes: empty ones are bounded, too."""


class Message(NamedTuple):
    """What a machine sent (`Send`). `index`: the entry that led to it."""

    index: int  # type: ignore[assignment]  # tuple.index is not missed
    data: bytes


class Delivered(NamedTuple):
    """Records that a machine delivered (`Deliver`): (index, ordinal, metadata, payload or None) of each."""

    index: int  # type: ignore[assignment]  # tuple.index is not missed
    tag: bytes
    records: list[tuple[int, int, bytes, bytes | None]]


Received: TypeAlias = Message | Delivered


def decode_push(header: Any, data: memoryview) -> Received | None:
    """Return what a PUSH carries, None for a sign of life; raise `ProtocolError`."""
    try:
        kind, index = header["kind"], header["index"]
        if kind == "message":
            return Message(index, bytes(data))
        if kind != "records":
            return None
        records: list[tuple[int, int, bytes, bytes | None]] = []
        at = 0
        for of_index, ordinal, head, body in header["records"]:
            end = at + head + max(body, 0)
            if head < 0 or end > len(data):
                raise ProtocolError("a push is cut short")
            records.append((of_index, ordinal, bytes(data[at : at + head]), None))
            if body >= 0:
                records[-1] = (of_index, ordinal, records[-1][2], bytes(data[at + head : end]))
            at = end
        return Delivered(index, header["tag"], records)
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"a push can't be read: {error!r}") from None


class Session:
    """See the module; `close` or the end of an ``async with`` closes it. `id`: what the machine knows it by.
    `dropped`: what this end had no room for; `lost`: what the
    node dropped, since it or this session moved last, for a connection that was too slow."""

    __slots__ = (
        "id", "name", "dropped", "lost", "failure", "closed", "_network", "_numbers", "_kept", "_bytes", "_lot",
        "_scope", "_room",
    )  # fmt: skip

    def __init__(self, network: Yard, name: str, number: int) -> None:
        self.id = number
        self.name = name
        self.dropped = 0
        self.lost = 0
        self.failure: LogyardError | None = None
        self.closed = False
        self._network = network
        self._numbers = Sequences(number)
        self._kept: deque[tuple[int, Received]] = deque()
        self._bytes = 0
        self._lot = network.runtime.lot()
        self._room = network.runtime.lot()
        self._scope = network.runtime.scope()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._network.runtime.scope(shield=True), suppress(LogyardError):
            await self.close()

    async def command(
        self, command: bytes, payload: Buffer | None = None, *, metadata: Buffer = b"", timeout: float | None = None
    ) -> bytes:
        """Return the machine's reply to a command with one record, which is applied exactly once; at most 64 of a
        session are under way. Raises what the machine refused it with, `BadRequest` for what is no bytes,
        `SessionExpired`, or `Unknown` after `timeout` seconds. 64 that were given up before a node saw them end the
        session."""
        frame = CommandFrame(command, metadata, payload)
        numbers = self._numbers
        while not numbers.room:
            await self._room.park()
        sequence = numbers.next()
        try:
            return await self._network.command(self.name, frame.encode(self.id, sequence), timeout)
        except LogyardError as error:
            if error.code == OUT_OF_WINDOW:
                # Nor can a later one be applied. Those given up are not sent again: who looked may have redone them.
                error = expired(self.name, error.code)
                self._abandon(error)
            raise final(self.name, error) from None
        finally:
            numbers.done(sequence)
            self._room.unpark_all()

    async def messages(self) -> AsyncIterator[Received]:
        """Yield what comes, until the session is closed. Raises `SessionExpired`, `UnknownGroup` ... when it ended
        otherwise, after what had come before."""
        while True:
            while self._kept:
                size, received = self._kept.popleft()
                self._bytes -= size
                yield received
            if self.closed:
                return
            if self.failure is not None:
                raise self.failure.again()
            await self._lot.park()

    async def close(self) -> None:
        """End it; nothing comes any more. Raises what stands in the way of telling the group, which is told later."""
        if not self.closed:
            self._end()
            await self._network.sessions.end(self.name, self.id)

    def _end(self) -> None:
        self.closed = True
        self._network.sessions.held.pop(self.id, None)
        self._scope.cancel()
        self._lot.unpark_all()

    async def listen(self) -> None:
        """Listen at whoever leads, until the session ends: a task."""
        call = call_leader("session_listen", self.name, session=self.id)
        over: LogyardError = Unknown("the client was closed")
        try:
            with self._scope:
                await self._network.run(call, float("inf"), self._pushed)
        except LogyardError as error:
            over = error
        finally:
            if not self.closed:
                self._fail(over)

    def _fail(self, error: LogyardError) -> None:
        """Note why nothing comes any more; wake who waits for it."""
        self.failure = self.failure or error
        self._network.sessions.held.pop(self.id, None)
        self._lot.unpark_all()

    def _abandon(self, error: LogyardError) -> None:
        """End a session that is of no more use: what it holds goes back now, not after its time to live."""
        if self.failure is None and not self.closed:
            self._fail(error)
            self._network.spawn(self._give_back)

    async def _give_back(self) -> None:
        with suppress(LogyardError):
            await self._network.sessions.end(self.name, self.id)

    def _pushed(self, header: Any, data: memoryview) -> None:
        received = decode_push(header, data)
        self.lost = header.get("dropped", 0)
        if received is None or self.closed:
            return
        size = len(data) + OVERHEAD
        if self._bytes and self._bytes + size > BUFFER_BYTES:
            self.dropped += 1
            return
        self._bytes += size
        self._kept.append((size, received))
        self._lot.unpark_all()


S = TypeVar("S", bound=Session)


async def open_session(network: Yard, name: str, make: Callable[[Yard, str, int], S], kind: str = "") -> S:
    """Begin one, and listen. `make`: Session, or a kind of it; `kind`: what the group must be, "" for any."""
    keeper = network.sessions
    session = make(network, name, new_number())
    keeper.held[session.id] = name
    try:
        await network.run(open_call(name, session.id, session.id, int(keeper.ttl * 1000), kind))
    except (BadRequest, WrongKind):
        # Nothing was proposed.
        keeper.held.pop(session.id, None)
        raise
    except BaseException:
        # It may have begun all the same.
        with network.runtime.scope(shield=True), suppress(LogyardError):
            await keeper.end(name, session.id)
        raise
    if network.closed:
        # Nobody would listen, nor say that it is over.
        keeper.held.pop(session.id, None)
        raise LogyardError("the client is closed")
    network.spawn(session.listen)
    return session
