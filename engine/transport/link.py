"""One lane to one peer: a bounded queue, a sender task, and the loop that receives what the other side dialled.

The side that dialled sends; the side that accepted receives; so a connection has one writer and one reader. A frame is
queued whole or dropped whole, and a drop always ends in a reset of the link, after which Raft probes: nothing waits for
a message that will never come. Called by `peers`; this file and `listener` are the only doors to sockets (law 12).
"""

from __future__ import annotations

import ipaddress
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, Self

import trio

from logyard.protocol.errors import BadRequest, Outdated, Refused, WrongIdentity

from ..types import Buffer
from .codec import NO_BODY, SECTION, check_messages
from .config import TransportConfig
from .frame import (
    CHALLENGE,
    CONTROL,
    GREETINGS,
    HEADER_BYTES,
    HELLO,
    MESSAGES,
    OUTDATED,
    PROVED,
    REFUSED,
    Header,
    Hello,
    check_section,
    decode_hello,
    encode_hello,
    parse_header,
)
from .proof import Exchange, ask, check_answer, encode_challenge
from .reactor import Reads, receive_each

Address = tuple[str, int]
Write = Callable[[Sequence[Buffer]], int]
"""A gather-write that never waits: bytes taken, or BlockingIOError. After a short one, the rest comes first."""
Deliver = Callable[[Header, memoryview, memoryview], None]
IOV_MAX = 1024
BEGINNING = 4096
"""What is read at first where a large frame is likely: the rest of it goes into memory of its own, uncopied."""
SEND_BYTES = 4 << 20
"""One gather-write of the sender task takes at most about this many bytes, so that it never builds endless lists."""


class Stream(Protocol):
    """What the loops here use of a connection: trio's socket has it, and so has a TLS connection of the host's."""

    def recv_into(self, buffer: memoryview, /) -> Awaitable[int]:
        """Return bytes received; 0 at the end."""
        ...

    def recv(self, limit: int, /) -> Awaitable[bytes]:
        """Return at most `limit` bytes; none at the end."""
        ...

    def send(self, data: bytes, /) -> Awaitable[int]:
        """Return bytes sent."""
        ...

    def sendmsg(self, buffers: Sequence[Buffer], /) -> Awaitable[int]:
        """Return bytes sent, of all buffers in order."""
        ...

    def close(self) -> None:
        """Close it; whoever waits on it gets an error."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *found: Any) -> None: ...


class Guard(Protocol):
    """TLS for the lanes, given by the host. Both raise OSError or a `LogyardError` that says what is wrong.

    The function beside the stream raises `WrongIdentity` unless the other side's certificate is that node's.
    """

    async def dial(
        self, sock: trio.socket.SocketType, raw: socket.socket
    ) -> tuple[Stream, Write, Callable[[str, int], None]]:
        """Return a connected socket, secured; and its gather-write that never waits."""
        ...

    async def accept(self, sock: trio.socket.SocketType) -> tuple[Stream, Callable[[str, int], None]]:
        """Return an accepted socket, secured."""
        ...


class Link:
    """The sending end of one lane. It outlives its connections: the queue is emptied whenever one ends.

    `on_drained` is called when there is room again after a drop. Counters are in frames and bytes.
    """

    __slots__ = (
        "lane", "connected", "lossy", "queued", "dropped", "sent_bytes", "error",
        "_limit", "_queue", "_write", "_scope", "_lot", "_busy", "_on_drained",
    )  # fmt: skip

    def __init__(self, lane: int, limit: int, on_drained: Callable[[], None]) -> None:
        self.lane = lane
        self.connected = False
        self.lossy = False
        self.queued = 0
        self.dropped = 0
        self.sent_bytes = 0
        self.error = ""
        self._limit = limit
        self._queue: deque[Buffer] = deque()
        self._write: Write | None = None
        self._scope: trio.CancelScope | None = None
        self._lot = trio.lowlevel.ParkingLot()
        self._busy = False
        self._on_drained = on_drained

    def send(self, frame: Sequence[Buffer]) -> bool:
        """Queue one frame, or drop it whole: without a connection, or above the lane's limit. Never waits.

        An idle lane is written at once, in the caller's turn: waking the sender costs more than the write does.
        """
        size = sum(map(len, frame))
        write = self._write
        if write is None or self.lossy or (self.queued and self.queued + size > self._limit):
            self.dropped += 1
            if write is not None and not self.lossy:
                self._overflow()
            return False
        self.sent_bytes += size
        if self._busy:
            self._queue += frame
            self.queued += size
            return True
        try:
            sent = write(frame[:IOV_MAX])
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            # The sender task meets the same error, and it is the one that ends the connection.
            sent = 0
        if sent < size:
            self._queue += _rest(frame, sent)
            self.queued = size - sent
            self._busy = True
            self._lot.unpark()
        return True

    def drop(self) -> None:
        """Count a frame that was not worth encoding."""
        self.dropped += 1

    def reset(self, reason: str) -> None:
        """End the present connection; the owner dials again."""
        if self._scope is not None:
            self.error = reason
            self._scope.cancel()

    def _overflow(self) -> None:
        if self.lane == CONTROL:
            # Replies are lost, and only the other side can ask for them again: it has to see the reset, too.
            self.reset("control queue is full: the peer does not read")
        else:
            self.lossy = True

    async def run(self, sock: Stream, write: Write, attached: Callable[[], None]) -> None:
        """Send on `sock` until the connection ends, and close it. `write` is its write that never waits, used while
        `sock` is not being written to; `attached()`: it may send now."""
        with sock:
            try:
                async with trio.open_nursery() as nursery:
                    self._scope = nursery.cancel_scope
                    self._write = write
                    self.connected = True
                    self.error = ""
                    attached()
                    nursery.start_soon(self._send_loop, sock)
                    nursery.start_soon(self._watch, sock)
            finally:
                self.connected = self.lossy = self._busy = False
                self._write = self._scope = None
                self._queue.clear()
                self.queued = 0

    async def _send_loop(self, sock: Stream) -> None:
        try:
            while True:
                while not self._queue:
                    self._busy = False
                    await self._lot.park()
                batch: Sequence[Buffer] = self._take()
                total = sum(map(len, batch))
                while True:
                    sent = await sock.sendmsg(batch)
                    self.queued -= sent
                    total -= sent
                    if self.lossy and self.queued <= self._limit // 2:
                        self.lossy = False
                        self._on_drained()
                    if not total:
                        break
                    batch = _rest(batch, sent)
        except (OSError, trio.ClosedResourceError) as error:
            self.reset(str(error))

    def _take(self) -> list[Buffer]:
        """Return the next buffers for one gather-write."""
        queue = self._queue
        batch: list[Buffer] = []
        size = 0
        while queue and len(batch) < IOV_MAX and size < SEND_BYTES:
            buffer = queue.popleft()
            batch.append(buffer)
            size += len(buffer)
        return batch

    async def _watch(self, sock: Stream) -> None:
        """End the connection at once when anything arrives, the end above all: the other side never sends here."""
        try:
            data = await sock.recv(1)
            self.reset("the peer broke the protocol" if data else "closed by the peer")
        except (OSError, trio.ClosedResourceError) as error:
            self.reset(str(error))


def _rest(buffers: Sequence[Buffer], sent: int) -> list[Buffer]:
    """Return what is left of `buffers` after `sent` bytes."""
    for number, buffer in enumerate(buffers):
        size = len(buffer)
        if sent < size:
            rest = list(buffers[number:])
            if sent:
                rest[0] = memoryview(buffer)[sent:]
            return rest
        sent -= size
    return []


def require_loopback(host: str) -> None:
    """Refuse any address but a loopback one: without TLS peers speak in the clear."""
    try:
        safe = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        safe = False
    if not safe:
        raise Refused(
            f"peer address {host}: without TLS ([tls] ca, certificate, key) only loopback addresses are allowed"
        )


def family(host: str) -> socket.AddressFamily:
    """Return the family to dial or listen with. A name is looked up within the handshake's time, as an IPv4 address."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def prepare(sock: socket.socket | trio.socket.SocketType, config: TransportConfig) -> None:
    """Set the options of every peer connection: no Nagle, and an end to half-open ones."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    half = max(1, config.dead_peer_ms // 2000)
    keep_alive(sock, half, max(1, config.dead_peer_ms // 4000), 2, config.dead_peer_ms)


def keep_alive(
    sock: socket.socket | trio.socket.SocketType, idle_s: int, interval_s: int, count: int, unanswered_ms: int
) -> None:
    """Have the kernel ask a peer that is silent for `idle_s` whether it is there, `count` times, and end the connection
    without an answer; as when what is sent is not acknowledged for `unanswered_ms`, meanwhile it does not ask."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    _set(sock, "TCP_KEEPIDLE", idle_s)
    _set(sock, "TCP_KEEPINTVL", interval_s)
    _set(sock, "TCP_KEEPCNT", count)
    _set(sock, "TCP_USER_TIMEOUT", unanswered_ms)


def _set(sock: socket.socket | trio.socket.SocketType, name: str, value: int) -> None:
    # Not every system has all of them.
    option = getattr(socket, name, None)
    if option is not None:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


async def dial(
    address: Address,
    hello: Hello,
    config: TransportConfig,
    meet: Callable[[Hello], None],
    guard: Guard | None = None,
    key: bytes = b"",
) -> tuple[Stream, Write]:
    """Connect and shake hands; `meet(theirs)` may still refuse. Returns the connection and its write that never waits.

    `key`: the secret that both sides prove to know; without it and without `guard` nobody proves anything.
    Raises OSError, trio.TooSlowError, or `Refused`/`WrongIdentity`/`BadRequest`/`Corrupt`; `Outdated` only when a peer
    that proved itself says so.
    """
    host, port = address
    if guard is None:
        require_loopback(host)
    raw = socket.socket(family(host), socket.SOCK_STREAM)
    sock = trio.socket.from_stdlib_socket(raw)
    stream: Stream = sock
    write: Write = raw.sendmsg
    try:
        prepare(raw, config)
        with trio.fail_after(config.handshake_timeout_ms / 1000):
            try:
                await sock.connect((host, port))
            except ValueError as error:
                # Names come from others: one that can't be looked up is a peer that is not there.
                raise OSError(f"{host!r} is no name of a host: {error}") from None
            if guard is not None:
                stream, write, require = await guard.dial(sock, raw)
                require(hello.cluster, hello.expected)
            if key and guard is None:
                theirs = await _introduce(stream, hello, config, key)
            else:
                await send_exactly(stream, encode_hello(hello))
                theirs = read_answer(*await read_greeting(stream, hello.lane, config), hello, proved=guard is not None)
        if (theirs.cluster, theirs.node) != (hello.cluster, hello.expected):
            raise WrongIdentity(
                f"{host}:{port} is node {theirs.node} of cluster {theirs.cluster!r}, "
                f"not node {hello.expected} of {hello.cluster!r}"
            )
        meet(theirs)
    except BaseException:
        sock.close()
        raise
    return stream, write


async def _introduce(stream: Stream, hello: Hello, config: TransportConfig, key: bytes) -> Hello:
    """Exchange hellos with whoever proves to know the secret; nothing is said of this node before that."""
    first = ask(hello.cluster, hello.node, hello.expected, hello.lane)
    await send_exactly(stream, encode_challenge(first))
    kind, second = await read_greeting(stream, hello.lane, config)
    if kind != CHALLENGE:
        read_answer(kind, second, hello, proved=False)
        raise WrongIdentity("the peer does not prove itself: it is of an older release, or somebody else")
    check_answer(key, first, second)
    exchange = Exchange(key, first, second, dialled=True)
    await send_exactly(stream, exchange.seal(HELLO, encode_hello(hello)[HEADER_BYTES:]))
    kind, section = await read_greeting(stream, hello.lane, config)
    if kind != PROVED:
        return read_answer(kind, section, hello, proved=False)
    return read_answer(*exchange.open(section), hello, proved=True)


def read_answer(kind: int, section: Buffer, own: Hello, *, proved: bool) -> Hello:
    """Return a listener's HELLO, or its REFUSED as an exception: `Outdated` only where it proved to be that peer."""
    if kind == HELLO:
        return decode_hello(section)._replace(proved=proved)
    if kind != REFUSED:
        raise BadRequest(f"a frame of type {kind} where a hello was due")
    reason = bytes(section[1:]).decode(errors="replace")
    if proved and section[:1] == bytes((OUTDATED,)):
        raise Outdated(own.node, reason)
    raise WrongIdentity(f"the peer refused{'' if proved else ', without proof'}: {reason}")


async def read_greeting(sock: Stream, lane: int, config: TransportConfig) -> tuple[int, bytes]:
    """Return type and section of a frame of the handshake, at most about a kilobyte, and read not a byte after it."""
    head = await read_exactly(sock, bytearray(HEADER_BYTES))
    header = parse_header(head, lane, config)
    if header.type not in GREETINGS:
        raise BadRequest(f"a connection opened with a frame of type {header.type}, not a hello")
    section = bytes(await read_exactly(sock, bytearray(header.section)))
    check_section(header, section)
    return header.type, section


async def read_exactly(sock: Reads, into: bytearray, at: int = 0) -> bytearray:
    """Fill `into` from `at` on; a connection that ends first is a ConnectionResetError."""
    with memoryview(into) as view:
        while at < len(into):
            count = await sock.recv_into(view[at:])
            if not count:
                raise ConnectionResetError(f"closed by the peer after {at} of {len(into)} bytes")
            at += count
    return into


async def send_exactly(sock: Stream, data: bytes) -> None:
    """Send all of `data`."""
    at = 0
    while at < len(data):
        at += await sock.send(data[at:])


async def receive(sock: Stream, lane: int, config: TransportConfig, deliver: Deliver) -> None:
    """Give every frame to `deliver(header, section, body)` until the connection ends.

    `section` is valid only during the call; `body` may be kept. A bad frame raises `Corrupt` or `BadRequest`, an end
    within a frame ConnectionResetError.
    """
    frames = Frames(lane, config, deliver)
    await receive_each(sock, frames.buffer, frames.received)


class Frames:
    """What arrives on a lane: `buffer` is where to receive, `received` delivers the frames that came of it.

    Small frames are read many at a time into one reused buffer and their bodies copied out once; a large frame gets
    memory of exactly its size and no copy but that of its first bytes: behind a large one, only the beginning of the
    next is read at first.
    """

    __slots__ = (
        "_lane", "_config", "_deliver", "_view", "_start", "_end", "_most", "_large", "_header", "_section", "_into",
        "_filled",
    )  # fmt: skip

    def __init__(self, lane: int, config: TransportConfig, deliver: Deliver) -> None:
        self._lane = lane
        self._config = config
        self._deliver = deliver
        self._view = memoryview(bytearray(config.receive_bytes))
        self._start = self._end = 0
        self._most = len(self._view)
        self._large = config.receive_bytes // 2
        # Of a large frame that is being received: its header, its section once that is there, and what is filled now.
        self._header: Header | None = None
        self._section: bytearray | None = None
        self._into: bytearray | None = None
        self._filled = 0

    def buffer(self) -> memoryview:
        """Return where the next bytes go; never empty."""
        if self._into is not None:
            return memoryview(self._into)[self._filled :]
        return self._view[self._end : self._end + self._most]

    def received(self, count: int) -> bool:
        """Deliver what so many more bytes completed; return False when they are the end. Raises what `receive`
        does."""
        if self._into is not None:
            if not count:
                raise ConnectionResetError(f"closed by the peer after {self._filled} of {len(self._into)} bytes")
            self._filled += count
            self._fill_large(b"")
            return True
        if not count:
            if self._end:
                raise ConnectionResetError(f"closed by the peer within a frame, after {self._end} bytes")
            return False
        self._end += count
        self._most = len(self._view)
        self._take()
        return True

    def _take(self) -> None:
        """Deliver the frames that are complete in the shared buffer, and make room behind what is left."""
        view, lane, config = self._view, self._lane, self._config
        start, end = self._start, self._end
        while end - start >= HEADER_BYTES:
            at = start + HEADER_BYTES
            header = parse_header(view[start:at], lane, config)
            middle = at + header.section
            stop = middle + header.body
            if stop <= end:
                section = view[at:middle]
                check_section(header, section)
                if header.type == MESSAGES:
                    _check_count(header, section)
                body = memoryview(bytes(view[middle:stop])) if header.body else NO_BODY
                start = stop
                self._deliver(header, section, body)
            elif stop - start > self._large:
                self._header = header
                self._into, self._filled = bytearray(header.section), 0
                self._most = BEGINNING
                self._start = self._end = 0
                self._fill_large(view[at:end])
                return
            else:
                break
        if start == end:
            start = end = 0
        elif start:
            # At most half of the buffer moves, and only when a frame straddles two reads.
            view[: end - start] = bytes(view[start:end])
            start, end = 0, end - start
        self._start, self._end = start, end

    def _fill_large(self, begun: Buffer) -> None:
        """Go on with a frame that does not fit the shared buffer, section before body; `begun` is what of it is there
        already."""
        header, into = self._header, self._into
        assert header is not None and into is not None
        have = min(len(begun), len(into) - self._filled)
        into[self._filled : self._filled + have] = begun[:have]
        self._filled += have
        if self._filled < len(into):
            return
        if self._section is None:
            check_section(header, into)
            if header.type == MESSAGES:
                _check_count(header, into)
                check_messages(memoryview(into), header.body, header.messages)
            self._section = into
            self._into, self._filled = bytearray(header.body), 0
            self._fill_large(begun[have:])
            return
        section, self._header, self._section, self._into = self._section, None, None, None
        self._deliver(header, memoryview(section), memoryview(into))


def _check_count(header: Header, section: Buffer) -> None:
    """Refuse a frame of messages that does not bring as many as its header claims: that count chose the size limit."""
    count = SECTION.unpack_from(section)[0] if len(section) >= SECTION.size else 0
    if count != header.messages:
        raise BadRequest(f"a frame claims {header.messages} messages and brings {count}")
