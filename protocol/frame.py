"""A command frame: the records of one group that travel, and lie in the log, as a client made them.

A frame carries `count` records: a fixed head, the applied command region, the payload region::

    frame   = FRAME | commands | pack | large bodies
    pack    = count x (head length u32, body length u32) | record heads | bodies below LARGE
    commands= one command for all records (UNIFORM), else count x u32 lengths | command bytes

Sans-IO. Invariant: what does not add up, or is above a limit, is refused before any of it is kept. Built by clients
(`Frame`, `encode_parts`), checked by servers (`check_frame`), and never encoded again (law 6). docs/wire-client.md.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from .errors import BadRequest

Buffer: TypeAlias = bytes | bytearray | memoryview

FRAME = struct.Struct("<BBHIIIQQQ")
"""version, flags, large bodies, records, command bytes, pack bytes, large bytes, session, first sequence."""
FRAME_BYTES = FRAME.size
FRAME_SESSION = struct.Struct("<QQ")
"""session, sequence: the end of a frame's head."""
FRAME_SESSION_AT = FRAME_BYTES - FRAME_SESSION.size
FRAME_VERSION = 1
UNIFORM = 1
SYSTEM = 2
"""A frame's flag: its one command is the engine's own (sessions, timers, versions ...), no client's or machine's."""
PIECE = 4
"""A frame's flag: its one body is a piece of a large payload, or it has none and gives the upload up (`PIECED`)."""
BINDS = 8
"""A frame's flag: its one record's payload is the upload that the beginning of its command names (`PIECED`)."""
MARKED = 16
"""A frame's flag: a head whose length has `MARK` set begins with an envelope, and its record's payload is encoded by
the client (docs/wire-client.md). No server ever decodes it."""
MARK = 1 << 31
"""In the length of a head: it begins with an envelope."""
ENVELOPE = struct.Struct("<BIQ")
"""encoding (1: zstd), bytes of a chunk of the original, bytes of the original: before the metadata."""
ENVELOPE_BYTES = ENVELOPE.size
PIECED = struct.Struct("<QQ")
"""upload (the client's number for it within its session), and a piece's byte offset, or the payload's size in a frame
that binds. It stands before the machine's command."""
LENGTHS = struct.Struct("<II")
"""A record's row in the table of its pack: head length, body length."""
PIECE_BYTES_MAX = (1 << 20) - 4096
"""A piece with its table and its head fits into an entry of `entry_bytes_max` as it is by default: nobody else's
command waits behind more."""
PAYLOAD_BYTES_MAX = 4 << 30
"""The largest payload. Fixed, as all that decides about a committed entry: every member must come to the same."""
LARGE = 4096
"""A body of this many bytes or more travels behind the pack, is a unit (and later a row) of its own; smaller ones share
their frame's pack."""
ABSENT = 0xFFFFFFFF
"""As a body length: this record has no payload at all."""
FRAME_BYTES_MAX = 64 << 20
"""A whole frame, unless the server's HELLO says otherwise."""
RECORD_BYTES_MAX = FRAME_BYTES_MAX - (128 << 10)
"""One record's body: a frame also holds its head, up to 64 KiB of metadata, and the rest of a batch's table."""

APPEND_COMMAND = b"\x01"
APPEND_AT = struct.Struct("<BQ")
APPEND_AT_CODE = 3
PRODUCE = struct.Struct("<BQQ")
PRODUCE_CODE = 5
NO_OFFSET = (1 << 64) - 1
"""As the first offset of an append's reply: a producer's records, it is not known where."""
NOT_KNOWN = (1 << 32) - 1
"""As the number of records beside `NO_OFFSET`: nor is it known whether they are in the log. Otherwise they are."""
EPOCH_APPEND = struct.Struct("<BQQQIQ16s")
"""EPOCH_APPEND_CODE, an `Epoch`, lane, the frame's number in it from 1 on, a hash of what it brings."""
EPOCH_APPEND_CODE = 8
EPOCH_DONE = struct.Struct("<BQQQ")
"""EPOCH_DONE_CODE, an `Epoch`."""
EPOCH_DONE_CODE = 9
MANY_RECORDS = 65536
"""Records of one atomic append: they travel as one frame. A node takes `entry_records_max` of them, which are 16,384
unless it was set otherwise."""
HEAD_BYTES_MAX = 64 << 10
KEY_BYTES_MAX = 1024
RECORD_OVERHEAD = 8
"""A record's share of the table."""
KEYED = b"\x06"
KEYED_REMOVAL = b"\x07"
"""Before a key: the command of a keyed log's record, with and without a payload."""
LOG_KNOWS = "the append log knows append and truncate, in version 2 producers and retention"
"""What an append log says to a command that it does not know, as one that was created without keys does to a key."""
SIZED = 0x10
"""A command that begins so, a queue's publication, ends with the sizes of its messages (docs/wire-client.md)."""
EACH = 1
"""Its third byte: there is a size of each message, and not one for all."""


def view_of(what: str, data: Buffer) -> memoryview:
    """Return the bytes of a buffer; raise `BadRequest` for what is none, text among it."""
    try:
        return memoryview(data).cast("B")
    except TypeError as error:
        why = f": {error}" if isinstance(data, memoryview) else f" is bytes, not {type(data).__name__}"
        raise BadRequest(what + why) from None


class Marked(bytes):
    """Metadata with an envelope in front of it: the payload beside it is encoded."""


def append_command(at: int | None) -> bytes:
    """Return the command that appends; with `at`, only if the log ends there (logs made with a `start`). Raises
    `BadRequest` for what is no offset."""
    if at is None:
        return APPEND_COMMAND
    if not 0 <= at < 1 << 64:
        raise BadRequest(f"an offset is a number from 0 up, not {at}")
    return APPEND_AT.pack(APPEND_AT_CODE, at)


def produce_command(producer: int, sequence: int) -> bytes:
    """Return the command that appends, unless this producer wrote that sequence before."""
    return PRODUCE.pack(PRODUCE_CODE, producer, sequence)


class Epoch(NamedTuple):
    """One batch of a fenced producer. A higher incarnation, and within one a higher epoch, fences those before it.

    `incarnation`: log time (ms since 1970) at which the producer was founded or reset, as its own log stamped it."""

    producer: int
    incarnation: int
    epoch: int


def epoch_append_command(epoch: Epoch, lane: int, number: int, content: bytes) -> bytes:
    """Return the command that appends frame `number` of a lane, whose contents have that hash of 16 bytes."""
    return EPOCH_APPEND.pack(EPOCH_APPEND_CODE, *epoch, lane, number, content)


def epoch_done_command(epoch: Epoch) -> bytes:
    """Return the command that closes an epoch."""
    return EPOCH_DONE.pack(EPOCH_DONE_CODE, *epoch)


class Frame:
    """Records that share one command: append's, unless another `command` is given. `size` counts its bytes. `at`: the
    offset that the first one must get. `commands`: one of each record instead, where it has a key."""

    __slots__ = ("table", "heads", "small", "large", "size", "marked", "command", "commands")

    def __init__(self, at: int | None = None, command: bytes = b"") -> None:
        if type(command) is not bytes:
            command = view_of("a command", command).tobytes()
        self.command = command or append_command(at)
        self.commands: list[bytes] | None = None
        self.table: list[int] = []
        self.heads: list[bytes] = []
        self.small: list[Buffer] = []
        self.large: list[Buffer] = []
        self.size = 0
        self.marked = False

    @property
    def count(self) -> int:
        """Return the number of records in it."""
        return len(self.table) // 2

    def put(self, head: Buffer, body: Buffer | None) -> int:
        """Add a record; return the bytes it costs. Raises `BadRequest` before anything is changed.

        Bodies of `LARGE` bytes or more are kept by reference: they must not change until they are acknowledged.
        """
        mark = 0
        if type(head) is not bytes:
            mark = MARK if isinstance(head, Marked) else 0
            head = view_of("metadata", head).tobytes()
        length = len(head)
        if length > HEAD_BYTES_MAX + (ENVELOPE_BYTES if mark else 0):
            raise BadRequest(f"metadata of {length} bytes is above its limit of {HEAD_BYTES_MAX}")
        if body is None:
            size = ABSENT
            cost = length + RECORD_OVERHEAD
        else:
            if type(body) is not bytes:
                body = view_of("a payload", body)
            size = len(body)
            if size < LARGE:
                self.small.append(body if type(body) is bytes else bytes(body))
            elif size <= RECORD_BYTES_MAX:
                self.large.append(body)
            else:
                raise BadRequest(f"a payload of {size} bytes is above its limit of {RECORD_BYTES_MAX}")
            cost = length + size + RECORD_OVERHEAD
        self.heads.append(head)
        if mark:
            self.marked = True
            length |= mark
        self.table += (length, size)
        self.size += cost
        return cost

    def put_many(
        self, records: Iterable[tuple[Buffer, Buffer | None]], keys: Iterable[bytes] | None = None
    ) -> None:  # fmt: skip
        """Add records that are appended together or not at all; raise `BadRequest` when they can't be.
        `keys`: of each, for a keyed log."""
        if keys is None:
            for head, body in records:
                self.put(head, body)
        else:
            self.commands = []
            records, keys = list(records), list(keys)
            if len(records) != len(keys):
                raise BadRequest(
                    f"each record has a key of its own: there are {len(records)} records, {len(keys)} keys"
                )
            for (head, body), key in zip(records, keys, strict=True):
                if not 0 < len(key) <= KEY_BYTES_MAX:
                    raise BadRequest(f"a key has 1 to {KEY_BYTES_MAX} bytes, not {len(key)}")
                if isinstance(key, str):
                    raise BadRequest("a key is bytes, not str")
                self.put(head, body)
                self.commands.append((KEYED_REMOVAL if body is None else KEYED) + key)
        if not 0 < self.count <= MANY_RECORDS or self.size > RECORD_BYTES_MAX + HEAD_BYTES_MAX:
            raise BadRequest(
                f"an append takes 1 to {MANY_RECORDS} records of together {RECORD_BYTES_MAX} bytes at most,"
                f" not {self.count} of {self.size}"
            )

    def encode(self, session: int = 0, sequence: int = 0) -> list[Buffer]:
        """Return the frame's buffers."""
        region, flags = self._region(), UNIFORM
        if self.commands is not None:
            lengths = struct.pack(f"<{len(self.commands)}I", *map(len, self.commands))
            region, flags = b"".join((lengths, *self.commands)), 0
        return encode_parts(
            self.table, self.heads, self.small, self.large, region,
            flags=flags | MARKED if self.marked else flags, session=session, sequence=sequence,
        )  # fmt: skip

    def _region(self) -> bytes:
        """Return the command, with what it has to say about each record."""
        command = self.command
        if command[0] != SIZED:
            return command
        heads, bodies = set(self.table[::2]), set(self.table[1::2])
        if len(heads) == len(bodies) == 1:
            return command + struct.pack("<I", heads.pop() + _body(bodies.pop()))
        sizes = [head + _body(body) for head, body in zip(self.table[::2], self.table[1::2], strict=True)]
        return b"".join((command[:2], bytes((command[2] | EACH,)), command[3:], struct.pack(f"<{len(sizes)}I", *sizes)))


class CommandFrame(Frame):
    """One command of any machine, with one record. Raises `BadRequest` for what is no bytes, or too many."""

    __slots__ = ()

    def __init__(self, command: bytes, metadata: Buffer, payload: Buffer | None) -> None:
        super().__init__(None, command)
        if not command:
            # It is this machine's own, too, and not an append's.
            self.command = b""
        self.put(metadata, payload)

    def _region(self) -> bytes:
        # As it was given: what it begins with has no meaning but its machine's.
        return self.command


def _body(size: int) -> int:
    return 0 if size == ABSENT else size


def encode_frame(
    records: Sequence[tuple[bytes, Buffer | None]],
    *,
    command: bytes | None = None,
    commands: Sequence[bytes] | None = None,
    session: int = 0,
    sequence: int = 0,
) -> list[Buffer]:
    """Return the buffers of one command frame, from (head, body or None) records.

    Give one `command` for all records or one of `commands` each.
    """
    if command is None:
        assert commands is not None and len(commands) == len(records), "each record has a command"
        region = struct.pack(f"<{len(commands)}I", *map(len, commands)) + b"".join(commands)
    else:
        region = command
    table: list[int] = []
    for head, body in records:
        table += (len(head), ABSENT if body is None else len(body))
    small = [body for _, body in records if body is not None and len(body) < LARGE]
    large = [body for _, body in records if body is not None and len(body) >= LARGE]
    heads = [head for head, _ in records]
    flags = 0 if command is None else UNIFORM
    return encode_parts(table, heads, small, large, region, flags=flags, session=session, sequence=sequence)


def encode_parts(
    table: Sequence[int],
    heads: Sequence[bytes],
    small: Sequence[Buffer],
    large: Sequence[Buffer],
    region: bytes,
    *,
    flags: int = UNIFORM,
    session: int = 0,
    sequence: int = 0,
) -> list[Buffer]:
    """Return the buffers of one command frame from its gathered parts: what a pipeline collects while records come in.

    `table` is flat: head length, body length (`ABSENT`: none) of each record; `small` are the bodies below `LARGE`;
    `region` is the command region, for UNIFORM the one command.
    """
    pack = (struct.pack(f"<{2 * len(heads)}I", *table), *heads, *small)
    return encode_pack(len(heads), pack, large, region, flags=flags, session=session, sequence=sequence)


def encode_pack(
    count: int,
    pack: Sequence[Buffer],
    large: Sequence[Buffer],
    region: bytes,
    *,
    flags: int = UNIFORM,
    session: int = 0,
    sequence: int = 0,
) -> list[Buffer]:
    """Return the buffers of one command frame from the parts of its pack, as they follow one another in it."""
    packed, large_bytes = sum(map(len, pack)), sum(map(len, large))
    head = FRAME.pack(FRAME_VERSION, flags, len(large), count, len(region), packed, large_bytes, session, sequence)
    return [b"".join((head, region, *pack)), *large]


def renumbered(frame: Sequence[Buffer], session: int, sequence: int) -> list[Buffer]:
    """Return a command frame's buffers under another session and sequence."""
    first = bytes(frame[0])
    end = FRAME_SESSION_AT + FRAME_SESSION.size
    return [first[:FRAME_SESSION_AT] + FRAME_SESSION.pack(session, sequence) + first[end:], *frame[1:]]


def table_of(pack: Buffer, records: int) -> tuple[int, ...]:
    """Return the (head length, body length) pairs of a pack, flat."""
    return struct.unpack_from(f"<{2 * records}I", pack)


def check_frame(frame: memoryview) -> tuple[int, int, int, int, int]:
    """Check the bounds of a whole frame; return (records, end of the heads, end of the pack, large bodies, session).

    Raises `BadRequest` for anything that does not add up, before any of it is kept.
    """
    size = len(frame)
    if size < FRAME_BYTES:
        raise BadRequest(f"a frame of {size} bytes is shorter than its {FRAME_BYTES}-byte head")
    version, flags, large, records, command_bytes, pack_bytes, large_bytes, session, _ = FRAME.unpack_from(frame)
    if version != FRAME_VERSION:
        raise BadRequest(f"frame version {version} is not {FRAME_VERSION}; update the client")
    if flags & ~UNIFORM:
        _check_pieced(flags, records, command_bytes, session)
    pack_at = FRAME_BYTES + command_bytes
    pack_end = pack_at + pack_bytes
    if not records or pack_end + large_bytes != size or pack_bytes < 8 * records:
        raise BadRequest("a frame's lengths do not add up to its size")
    table = struct.unpack_from(f"<{2 * records}I", frame, pack_at)
    if flags & MARKED:
        table = _unmarked(table, flags)
    lengths = table[1::2]
    if large or max(lengths) >= LARGE:
        small = 0
        big = found = 0
        for length in lengths:
            if length < LARGE:
                small += length
            elif length != ABSENT:
                big += length
                found += 1
        if big != large_bytes or found != large:
            raise BadRequest("a frame's large bodies do not add up")
    else:
        small = sum(lengths)
        if large_bytes:
            raise BadRequest("a frame's large bodies do not add up")
    if 8 * records + sum(table[::2]) + small != pack_bytes:
        raise BadRequest("a frame's pack does not add up")
    if not flags & UNIFORM:
        if command_bytes < 4 * records:
            raise BadRequest("a frame's commands do not add up")
        if 4 * records + sum(struct.unpack_from(f"<{records}I", frame, FRAME_BYTES)) != command_bytes:
            raise BadRequest("a frame's commands do not add up")
    if flags & PIECE and (table[0] or not (table[1] == ABSENT or 0 < table[1] <= PIECE_BYTES_MAX)):
        raise BadRequest(f"a piece has no metadata and 1 to {PIECE_BYTES_MAX} bytes, or none to give its upload up")
    if flags & BINDS and table[1] != ABSENT:
        raise BadRequest("the payload of a record that binds an upload is that upload, and nothing else")
    return records, pack_at, pack_end, large, session


def piece_of(frame: memoryview) -> tuple[int, int]:
    """Return (upload, bytes of the body) of a piece that `check_frame` let pass; 0 bytes give the upload up."""
    upload, _ = PIECED.unpack_from(frame, FRAME_BYTES)
    _, size = LENGTHS.unpack_from(frame, FRAME_BYTES + PIECED.size)
    return upload, 0 if size == ABSENT else size


def _check_pieced(flags: int, records: int, command_bytes: int, session: int) -> None:
    """Check flags that a client's frame has only with one record, one command and a session."""
    if flags not in (MARKED, UNIFORM | MARKED, UNIFORM | PIECE, UNIFORM | BINDS, UNIFORM | BINDS | MARKED):
        raise BadRequest(f"a client's frame has no flags {flags & ~UNIFORM:#x}")
    if not flags & (PIECE | BINDS):
        return
    if records != 1 or command_bytes < PIECED.size or (flags & PIECE and command_bytes != PIECED.size) or not session:
        raise BadRequest("a frame of an upload has one record, belongs to a session and names its upload")


def _unmarked(table: tuple[int, ...], flags: int) -> tuple[int, ...]:
    """Return a frame's table with plain head lengths."""
    for head, body in zip(table[::2], table[1::2], strict=True):
        if head & MARK and (head & ~MARK < ENVELOPE_BYTES or (body == ABSENT) != bool(flags & BINDS)):
            raise BadRequest("an encoded payload has an envelope of 13 bytes and a body")
    return tuple(length if number % 2 else length & ~MARK for number, length in enumerate(table))


def heads_bytes(table: Sequence[int], marked: bool) -> int:
    """Count the bytes of the heads in (a part of) a pack's table."""
    return sum([length & ~MARK for length in table[::2]]) if marked else sum(table[::2])
