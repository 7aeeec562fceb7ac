"""Large payloads in pieces, sans-IO: how a payload is cut, the frames of its pieces, and what may be under way.

Each upload has a session of its own: a piece or the record that binds them is stored once, however often it is sent,
and whatever was stored ends with the session if the upload does not come to its end. Invariant: one piece is under way;
two are a quarter faster, and everybody else's appends wait behind both of them (decision 0005). Driven by
`upload_aio` and `upload_sync`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

from logyard.protocol.compression import SMALLEST, envelope, index_of, shrink
from logyard.protocol.errors import BadRequest, LogyardError, UnknownGroup
from logyard.protocol.frame import (
    ABSENT,
    APPEND_COMMAND,
    BINDS,
    HEAD_BYTES_MAX,
    LARGE,
    MARK,
    MARKED,
    PAYLOAD_BYTES_MAX,
    PIECE,
    PIECE_BYTES_MAX,
    PIECED,
    UNIFORM,
    Buffer,
    encode_parts,
    view_of,
)

from .admin import Call
from .log import appended, close_call, open_call

WHOLE_BYTES = 1 << 20
"""A payload up to this size travels whole, with its record."""
TTL_MS = 600_000
"""How long the pieces of a client that died are kept; also how long a stream may pause. Less where a node says so."""
CLOSE_S = 5.0
"""For the end of the session, which nobody has to wait for longer: it would end by itself."""


def check_size(size: int) -> int:
    """Raise `BadRequest` for a payload that is too large."""
    if size > PAYLOAD_BYTES_MAX:
        raise BadRequest(f"a payload of {size} bytes is above its limit of {PAYLOAD_BYTES_MAX}")
    return size


def cut(payload: Buffer) -> Iterator[memoryview]:
    """Yield a payload's pieces, as views: nothing is copied."""
    view = memoryview(payload).cast("B")
    for at in range(0, len(view), PIECE_BYTES_MAX):
        yield view[at : at + PIECE_BYTES_MAX]


class Cutter:
    """Turns buffers of any size into pieces of the right one: large buffers are sliced, small ones gathered."""

    __slots__ = ("_held", "size")

    def __init__(self) -> None:
        self._held = bytearray()
        self.size = 0

    def feed(self, data: Buffer) -> Iterator[Buffer]:
        """Yield the pieces that are full now. Only the last one may be under way when this is over, and is a copy where
        the buffer could change: who gave it may use it again for what comes next. Raises `BadRequest`."""
        view = view_of("a payload", data)
        self.size = check_size(self.size + len(view))
        while len(self._held) + len(view) >= PIECE_BYTES_MAX:
            taken = PIECE_BYTES_MAX - len(self._held)
            if self._held:
                self._held += view[:taken]
                whole, self._held = self._held, bytearray()
                yield whole
            else:
                piece, last = view[:taken], len(view) - taken < PIECE_BYTES_MAX
                yield bytes(piece) if last and not view.readonly else piece
            view = view[taken:]
        self._held += view

    def rest(self) -> Iterator[Buffer]:
        """Yield the last piece, if it is not empty."""
        if self._held:
            yield self._held


class Upload:
    """One upload: its session, and the numbers of its frames."""

    __slots__ = (
        "name", "session", "client", "size", "original", "under_way", "compress", "_sequence", "_head", "_lengths",
        "_command", "_ttl_ms",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        metadata: Buffer,
        chance: random.Random,
        compress: bool = False,
        command: bytes = APPEND_COMMAND,
    ) -> None:
        self._command = view_of("a command", command).tobytes()
        self._head = view_of("metadata", metadata).tobytes()
        if len(self._head) > HEAD_BYTES_MAX:
            raise BadRequest(f"metadata of {len(self._head)} bytes is above its limit of {HEAD_BYTES_MAX}")
        self.name = name
        self.session = chance.getrandbits(62) | 1
        self.client = chance.getrandbits(62) | 1
        # Stored bytes so far, and those of the source.
        self.size = 0
        self.original = 0
        self._ttl_ms = TTL_MS
        # The first piece decides whether it pays.
        self.compress = compress
        self._lengths: list[int] = []
        self.under_way = False
        self._sequence = 0

    def open_call(self) -> Call[object]:
        """Begin the session."""
        return open_call(self.name, self.session, self.client, self._ttl_ms, "log")

    def shorten(self, refusal: BadRequest) -> bool:
        """Take the longest time to live that a node allows, by its refusal; return False when that says none."""
        most = refusal.details.get("ttl_ms_max")
        if not isinstance(most, int) or not 0 < most < self._ttl_ms:
            return False
        self._ttl_ms = most
        return True

    def close_call(self) -> Call[object]:
        """End it, with every piece that is not bound."""
        return close_call(self.name, self.session)

    def stored(self, data: Buffer) -> Buffer:
        """Return what is stored of a piece of the source."""
        found = shrink(data) if self.compress and len(data) >= SMALLEST else data
        if not self.original and found is data:
            self.compress = False
        self.original += len(data)
        if self.compress:
            self._lengths.append(len(found))
        return found

    def index(self) -> Iterator[Buffer]:
        """Yield the last pieces, behind those of the source: where the compressed ones end."""
        yield from cut(index_of(self._lengths))

    def piece(self, data: Buffer) -> list[Buffer]:
        """Return the next piece's frame; it is under way until `done`."""
        assert 0 < len(data) <= PIECE_BYTES_MAX and not self.under_way
        region = PIECED.pack(1, self.size)
        self.size = check_size(self.size + len(data))
        self._sequence += 1
        self.under_way = True
        small, large = ([data], []) if len(data) < LARGE else ([], [data])
        return self._frame([0, len(data)], b"", small, large, region, PIECE)

    def done(self) -> None:
        """Take note that the piece is stored."""
        self.under_way = False

    def bind(self) -> list[Buffer]:
        """Return the record's frame, once all pieces are stored: the record takes its place when this is sent."""
        assert not self.under_way
        self._sequence += 1
        if not self.size:
            # There are no pieces, so no upload has begun: an empty payload is a small one.
            return self._frame([len(self._head), 0], self._head, [b""], [], self._command, 0)
        region = PIECED.pack(1, self.size) + self._command
        if not self.compress or not self.original:
            return self._frame([len(self._head), ABSENT], self._head, [], [], region, BINDS)
        head = envelope(self._head, self.original)
        return self._frame([len(head) | MARK, ABSENT], head, [], [], region, BINDS | MARKED)

    def _frame(
        self, table: list[int], head: bytes, small: list[Buffer], large: list[Buffer], region: bytes, flag: int
    ) -> list[Buffer]:
        flags = UNIFORM | flag
        session, sequence = self.session, self._sequence
        return encode_parts(table, [head], small, large, region, flags=flags, session=session, sequence=sequence)

    def offset_of(self, reply: Buffer) -> int:
        """Return the record's offset, from the answer to `bind`. Raises a `LogyardError`."""
        return appended(self.name, 0, reply).first


def may_be_open(refusal: LogyardError) -> bool:
    """Return whether the session may have begun although asking for that ended so: out of time, or after a cut."""
    return refusal.retry != "never" and not isinstance(refusal, UnknownGroup)


def check_total(size: int | None, found: int) -> None:
    """Raise `BadRequest` when a stream is not as long as was said."""
    if size is not None and size != found:
        raise BadRequest(f"the stream had {found} bytes and not {size}")


def pieces_of(source: Iterable[Buffer], cutter: Cutter) -> Iterator[Buffer]:
    """Yield the pieces of an iterable of buffers."""
    for data in source:
        yield from cutter.feed(data)
    yield from cutter.rest()


def stored_of(pieces: Iterable[Buffer], one: Upload) -> Iterator[Buffer]:
    """Yield what is stored of them."""
    yield from map(one.stored, pieces)
    yield from one.index()
