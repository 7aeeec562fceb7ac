"""The client protocol, sans-IO: frames, their bodies, and the buffers between them and a socket.

A frame is a fixed header (length of the rest, type, flags, request) and a body. Both ends begin with HELLO. A length is
compared with the limit of its type before a byte is allocated for it. Used by `session` (and so by both clients) and by
`service.door.server`; `docs/wire-client.md` describes the bytes.
"""

from __future__ import annotations

import mmap
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgpack

from .frame import FRAME_BYTES_MAX, Buffer

VERSION = 1
HEADER = struct.Struct("<IBBHQ")
"""length of the rest, type, flags, reserved, request."""
HEADER_BYTES = HEADER.size

HELLO = 1
APPEND = 2
REPLIES = 3
CALL = 4
RESULT = 5
ERROR = 6
DATA = 7
PUSH = 8

REPLY_MODE = 3
"""The bits of an APPEND's flags that say when it is answered."""
REPLY_CONSENSUS = 0
REPLY_APPEND = 1
"""When the leader has it on disk: with where (index, term)."""
REPLY_NONE = 2
"""Never."""
REPLY_MODES = (REPLY_CONSENSUS, REPLY_APPEND, REPLY_NONE)
LOW_PRIORITY = 4
"""A flag of an APPEND: it waits until no other command of its group does."""
KIND_SHIFT = 3
KINDS = ("", "log", "kv", "queue")
"""The kind of group that an APPEND is for, by number, in the four bits of its flags from `KIND_SHIFT` on; 0: whichever.
Only for servers whose HELLO says `KNOWS_KINDS`: others close the connection over a flag that they do not know."""
KIND_FLAGS = 15 << KIND_SHIFT
KNOWS_KINDS = 1
"""Of a HELLO's features: a node's."""
JOINS = 2
"""A client's: it comes to join, and asks for nothing else."""

UID = struct.Struct("<Q")
PLACE = struct.Struct("<QQ")
"""index, term: the answer to an APPEND with the mode REPLY_APPEND."""
ITEM = struct.Struct("<QBI")
"""request, status (0: the machine's reply, 1: an error), length: one item of a REPLIES frame; the bytes follow it."""
REPLY = struct.Struct("<QI")
"""first offset, records: what the append log answers."""
LENGTH = struct.Struct("<I")

HELLO_BYTES_MAX = 4096
"""Nobody is known yet: a HELLO to a server may not cost more than this."""
ANSWER_HELLO_BYTES_MAX = 64 << 10
CALL_BYTES_MAX = 256 << 10
"""msgpack grows up to 64 times as objects: a call is bounded before it is unpacked."""
REPLIES_BYTES = 1 << 20
"""A REPLIES frame is closed when it has grown beyond this."""
RESULT_BYTES_MAX = 64 << 20
DATA_BYTES_MAX = 2 * FRAME_BYTES_MAX
PUSH_BYTES_MAX = FRAME_BYTES_MAX + (1 << 20)
"""A message, or delivered records with their bodies."""
DEDICATED = 64 << 10
"""A frame of this many bytes or more is received into memory of its own, without a copy."""
MAP = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
LAZY = 4 << 20
"""A frame of so many bytes gets memory that is none before it is written."""
RECEIVE_BYTES = 128 << 10
BEGINNING = 4096
"""What is received at first where a large frame is likely."""
IOV_MAX = 1024

HELLO_LIMITS = (0, HELLO_BYTES_MAX)
CLIENT_LIMITS = (
    0, ANSWER_HELLO_BYTES_MAX, 0, RESULT_BYTES_MAX, 0, RESULT_BYTES_MAX, ANSWER_HELLO_BYTES_MAX, DATA_BYTES_MAX,
    PUSH_BYTES_MAX,
)  # fmt: skip
"""What a client accepts from a server: the longest body of each type, 0 for a type that may not come."""


def server_limits(frame_bytes_max: int = FRAME_BYTES_MAX) -> tuple[int, ...]:
    """Return what a server accepts after the HELLO."""
    return (0, 0, frame_bytes_max, 0, CALL_BYTES_MAX)


class ProtocolError(Exception):
    """The other end sent bytes that are no frame; the connection they came on is closed, and nothing else."""


class Received(NamedTuple):
    """One frame: `body` is a copy of its own (bytes), or for a large one the memory it was received into."""

    type: int
    flags: int
    request: int
    body: bytes | memoryview


def _plain(value: object) -> object:
    """Return sets and odd objects of a status report as something msgpack knows."""
    return sorted(value, key=str) if isinstance(value, (set, frozenset)) else str(value)


def pack(value: object) -> bytes:
    """Return msgpack bytes of plain values."""
    packed: bytes = msgpack.packb(value, use_bin_type=True, default=_plain)
    return packed


def unpack(data: Buffer, *, strict: bool = False) -> Any:
    """Return the plain values of msgpack bytes; raise `ProtocolError`. `strict` bounds the containers of a stranger's
    bytes."""
    try:
        if strict:
            return msgpack.unpackb(data, raw=False, max_array_len=65536, max_map_len=1024, max_ext_len=0)
        return msgpack.unpackb(data, raw=False, strict_map_key=False, max_ext_len=0)
    except (ValueError, msgpack.UnpackException, RecursionError, TypeError) as error:
        raise ProtocolError(f"a body is not msgpack: {error}") from None


def encode(kind: int, request: int, *parts: Buffer) -> list[Buffer]:
    """Return the buffers of one frame; parts are not joined."""
    return [HEADER.pack(sum(map(len, parts)), kind, 0, 0, request), *parts]


def for_kind(kind: str) -> int:
    """Return the flags of an APPEND for groups of a kind; none for a kind without a number."""
    return KINDS.index(kind) << KIND_SHIFT if kind in KINDS else 0


def kind_of(flags: int) -> str:
    """Return the kind that an APPEND with these flags is for. Raises `ProtocolError`."""
    number = flags >> KIND_SHIFT
    if number >= len(KINDS):
        raise ProtocolError(f"no kind of group has the number {number}")
    return KINDS[number]


class Hello(NamedTuple):
    """Who is there: its cluster, its node (0: a client), the client addresses of all nodes, its longest frame, and what
    it knows beside the first protocol."""

    cluster: object
    node: int
    clients: dict[int, str]
    frame_bytes_max: int
    features: int = 0


def encode_hello(
    cluster: object = None,
    node: int = 0,
    clients: Iterable[tuple[int, str]] = (),
    frame_bytes_max: int = 0,
    features: int = 0,
) -> bytes:
    """Return a HELLO: version, cluster, node, the client addresses as (node, "host:port"), the longest APPEND frame,
    features (left out where there are none)."""
    value = [VERSION, cluster, node, [list(pair) for pair in clients], frame_bytes_max, features]
    if not features:
        value.pop()
    return b"".join(encode(HELLO, 0, pack(value)))


def decode_hello(body: Buffer) -> Hello:
    """Return what a HELLO says; raise `ProtocolError`, also for another version."""
    value = unpack(body, strict=True)
    if not isinstance(value, list) or len(value) < 5 or value[0] != VERSION:
        raise ProtocolError(f"a HELLO of protocol version {VERSION} was expected")
    _, cluster, node, clients, longest, *more = value
    features = more[0] if more and type(more[0]) is int else 0
    if not isinstance(node, int) or not isinstance(clients, list) or not isinstance(longest, int):
        raise ProtocolError("a HELLO names a node, a list of addresses and a length")
    found: dict[int, str] = {}
    for pair in clients:
        if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], int) or not isinstance(pair[1], str):
            raise ProtocolError("a HELLO's addresses are pairs of node and address")
        found[pair[0]] = pair[1]
    return Hello(cluster, node, found, longest, features)


def encode_call(request: int, method: str, arguments: dict[str, object]) -> bytes:
    """Return a CALL: a method and its arguments by name."""
    return b"".join(encode(CALL, request, pack([method, arguments])))


def decode_call(body: Buffer) -> tuple[str, dict[str, Any]]:
    """Return (method, arguments) of a CALL; raise `ProtocolError`."""
    value = unpack(body, strict=True)
    if isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], dict):
        return value[0], value[1]
    raise ProtocolError("a CALL is a method and a map of arguments")


def encode_result(request: int, value: object) -> bytes:
    """Return a RESULT: a plain value."""
    return b"".join(encode(RESULT, request, pack(value)))


def encode_error(request: int, error: bytes) -> bytes:
    """Return an ERROR: an error already packed as ``{code, message, retry, details}``."""
    return b"".join(encode(ERROR, request, error))


def encode_data(request: int, header: object, parts: Sequence[Buffer]) -> list[Buffer]:
    """Return a DATA: a plain header and raw bytes, which are not joined."""
    packed = pack(header)
    return encode(DATA, request, LENGTH.pack(len(packed)) + packed, *parts)


def encode_push(request: int, header: object, parts: Sequence[Buffer]) -> list[Buffer]:
    """Return a PUSH: as DATA, but it answers nothing: `request` is the call that listens, and stays open."""
    packed = pack(header)
    return encode(PUSH, request, LENGTH.pack(len(packed)) + packed, *parts)


def decode_data(body: Buffer) -> tuple[Any, memoryview]:
    """Return (header, raw bytes) of DATA or PUSH; raise `ProtocolError`."""
    view = memoryview(body)
    if len(view) < LENGTH.size:
        raise ProtocolError("a DATA frame is cut short")
    end = LENGTH.size + LENGTH.unpack_from(view)[0]
    if end > len(view):
        raise ProtocolError("a DATA frame's header is longer than the frame")
    return unpack(view[LENGTH.size : end]), view[end:]


def encode_replies(items: Sequence[tuple[int, int, Buffer]]) -> list[Buffer]:
    """Return REPLIES frames for (request, status, bytes) items: one, unless they are very large together."""
    frames: list[Buffer] = []
    parts: list[Buffer] = []
    size = 0
    for request, status, data in items:
        length = len(data)
        if size and size + length > REPLIES_BYTES:
            frames.append(b"".join((HEADER.pack(size, REPLIES, 0, 0, 0), *parts)))
            parts, size = [], 0
        parts.append(ITEM.pack(request, status, length))
        parts.append(data)
        size += ITEM.size + length
    frames.append(b"".join((HEADER.pack(size, REPLIES, 0, 0, 0), *parts)))
    return frames


def decode_replies(body: Buffer) -> list[tuple[int, int, Buffer]]:
    """Return the (request, status, bytes) items of a REPLIES frame; raise `ProtocolError`."""
    found: list[tuple[int, int, Buffer]] = []
    at, size, head = 0, len(body), ITEM.size
    while at < size:
        if size - at < head:
            raise ProtocolError("a REPLIES item is cut short")
        request, status, length = ITEM.unpack_from(body, at)
        at += head
        end = at + length
        if end > size:
            raise ProtocolError("a REPLIES item is longer than its frame")
        found.append((request, status, body[at:end]))
        at = end
    return found


class Outgoing:
    """Buffers on their way to a socket: `window` is what to gather-send next, `sent` says how much went."""

    __slots__ = ("_buffers", "size")

    def __init__(self) -> None:
        self._buffers: deque[Buffer] = deque()
        self.size = 0

    def push(self, buffers: Iterable[Buffer]) -> None:
        """Add buffers; they must not change until they are sent."""
        for buffer in buffers:
            if length := len(buffer):
                self._buffers.append(buffer)
                self.size += length

    def window(self) -> list[Buffer]:
        """Return up to `IOV_MAX` buffers, in order."""
        if len(self._buffers) <= IOV_MAX:
            return list(self._buffers)
        return [self._buffers[number] for number in range(IOV_MAX)]

    def sent(self, count: int) -> None:
        """Drop `count` bytes, which the socket took."""
        buffers = self._buffers
        left = count
        while left:
            first = buffers.popleft()
            if len(first) > left:
                buffers.appendleft(memoryview(first)[left:])
                break
            left -= len(first)
        # At last: a thread that is interrupted here has something unsent.
        self.size -= count


class Receiver:
    """Bytes from a socket to frames: `buffer` is where to receive, `received` what came of it.

    Small frames share one buffer and are copied out of it once; a frame of `DEDICATED` bytes or more gets memory of
    its own, allocated only when `buffer` is called: `wanted` says how much, so a caller may wait for its budget.
    """

    __slots__ = ("limits", "_view", "_start", "_end", "_large", "_filled", "_head", "_begin", "wanted")

    def __init__(self, limits: Sequence[int], size: int = RECEIVE_BYTES) -> None:
        self.limits = limits
        self._view = memoryview(bytearray(size))
        self._start = 0
        self._end = 0
        self._large: memoryview | None = None
        self._filled = 0
        self._head = (0, 0, 0)
        # The last frame was large, and so may the next one be: only its beginning goes into the shared buffer.
        self._begin = False
        self.wanted = 0

    @property
    def filled(self) -> int:
        """Bytes there of the frame that has begun."""
        return self._filled if self._large is not None else self._end - self._start

    @property
    def partial(self) -> bool:
        """A frame has begun and is not complete."""
        return self._end > self._start or self._large is not None or self.wanted > 0

    def buffer(self) -> memoryview:
        """Return where the next bytes go; never empty."""
        if self._large is not None:
            return self._large[self._filled :]
        held = self._end - self._start
        if self.wanted:
            # Of a very large one, memory is taken as its bytes arrive.
            self._large = memoryview(bytearray(self.wanted) if self.wanted < LAZY else mmap.mmap(-1, self.wanted, MAP))
            self._large[:held] = self._view[self._start : self._end]
            self._filled = held
            self._start = self._end = self.wanted = 0
            return self._large[held:]
        if not held:
            self._start = self._end = 0
        elif len(self._view) - self._start < HEADER_BYTES + DEDICATED or self._end == len(self._view):
            # A frame that shares the buffer must fit behind its start.
            self._view[:held] = self._view[self._start : self._end]
            self._start, self._end = 0, held
        if self._begin:
            self._begin = False
            return self._view[self._end : self._end + BEGINNING]
        return self._view[self._end :]

    def received(self, count: int) -> list[Received]:
        """Return the frames that `count` more bytes completed; raise `ProtocolError` for what is none."""
        if self._large is not None:
            self._filled += count
            if self._filled < len(self._large):
                return []
            found = [Received(*self._head, self._large)]
            self._large = None
            self._begin = True
            return found
        self._end += count
        found = []
        view, at, end = self._view, self._start, self._end
        while end - at >= HEADER_BYTES:
            length, kind, flags, reserved, request = HEADER.unpack_from(view, at)
            limit = self.limits[kind] if kind < len(self.limits) else 0
            if not limit or reserved:
                raise ProtocolError(f"a frame of type {kind} may not come here")
            if length > limit:
                raise ProtocolError(f"a frame of {length} bytes is above its limit of {limit}")
            body = at + HEADER_BYTES
            if body + length > end:
                if length >= DEDICATED:
                    self._head = (kind, flags, request)
                    self.wanted = length
                    at = body
                break
            found.append(Received(kind, flags, request, bytes(view[body : body + length])))
            at = body + length
        self._start = at
        return found
