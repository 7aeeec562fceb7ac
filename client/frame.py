"""A command frame in the making: its table, heads and bodies, as the client protocol has them (docs/wire-client.md).

Sans-IO. Invariant: a record that is refused changes nothing. Used by `lane` (batches), the blocking log and queue.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from logyard.protocol.errors import BadRequest

from . import wire
from .compression import ENVELOPE_BYTES, MARK, Marked
from .wire import LARGE, MARKED, UNIFORM, Buffer

APPEND_COMMAND = b"\x01"
APPEND_AT = struct.Struct("<BQ")
APPEND_AT_CODE = 3
PRODUCE = struct.Struct("<BQQ")
PRODUCE_CODE = 5
MANY_RECORDS = 65536
"""Records of one atomic append: they travel as one frame."""
HEAD_BYTES_MAX = 64 << 10
KEY_BYTES_MAX = 1024
RECORD_OVERHEAD = 8
"""A record's share of the table."""
KEYED = b"\x06"
KEYED_REMOVAL = b"\x07"
"""Before a key: the command of a keyed log's record, with and without a payload."""
SIZED = 0x10
"""A command that begins so, a queue's publication, ends with the sizes of its messages (docs/wire-client.md)."""
EACH = 1
"""Its third byte: there is a size of each message, and not one for all."""


def append_command(at: int | None) -> bytes:
    """Append; with `at`, only if the log ends there (logs made with a `start`)."""
    return APPEND_COMMAND if at is None else APPEND_AT.pack(APPEND_AT_CODE, at)


def produce_command(producer: int, sequence: int) -> bytes:
    """Append, unless this producer wrote that sequence before."""
    return PRODUCE.pack(PRODUCE_CODE, producer, sequence)


class Frame:
    """Records that share one command: append's, unless another `command` is given. `size` counts its bytes. `at`: the
    offset that the first one must get. `commands`: one of each record instead, where it has a key."""

    __slots__ = ("table", "heads", "small", "large", "size", "marked", "command", "commands")

    def __init__(self, at: int | None = None, command: bytes = b"") -> None:
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
        """Records in it."""
        return len(self.table) // 2

    def put(self, head: Buffer, body: Buffer | None) -> int:
        """Add a record; returns the bytes it costs. Raises `BadRequest` or TypeError before anything is changed.

        Bodies of `LARGE` bytes or more are kept by reference: they must not change until they are acknowledged.
        """
        mark = 0
        if type(head) is not bytes:
            mark = MARK if isinstance(head, Marked) else 0
            head = memoryview(head).tobytes()
        length = len(head)
        if length > HEAD_BYTES_MAX + (ENVELOPE_BYTES if mark else 0):
            raise BadRequest(f"metadata of {length} bytes is above its limit of {HEAD_BYTES_MAX}")
        if body is None:
            size = wire.ABSENT
            cost = length + RECORD_OVERHEAD
        else:
            if type(body) is not bytes:
                body = memoryview(body).cast("B")
            size = len(body)
            if size < LARGE:
                self.small.append(body if type(body) is bytes else bytes(body))
            elif size <= wire.RECORD_BYTES_MAX:
                self.large.append(body)
            else:
                raise BadRequest(f"a payload of {size} bytes is above its limit of {wire.RECORD_BYTES_MAX}")
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
        """Add records that are appended together or not at all; raises `BadRequest` when they are too many for that.
        `keys`: of each, for a keyed log."""
        if keys is None:
            for head, body in records:
                self.put(head, body)
        else:
            self.commands = []
            for (head, body), key in zip(records, keys, strict=True):
                if not 0 < len(key) <= KEY_BYTES_MAX:
                    raise BadRequest(f"a key has 1 to {KEY_BYTES_MAX} bytes, not {len(key)}")
                self.put(head, body)
                self.commands.append((KEYED_REMOVAL if body is None else KEYED) + key)
        if not 0 < self.count <= MANY_RECORDS or self.size > wire.RECORD_BYTES_MAX + HEAD_BYTES_MAX:
            raise BadRequest(
                f"an append takes 1 to {MANY_RECORDS} records of together {wire.RECORD_BYTES_MAX} bytes at most,"
                f" not {self.count} of {self.size}"
            )

    def encode(self, session: int = 0, sequence: int = 0) -> list[Buffer]:
        """The frame's buffers."""
        region, flags = self._region(), UNIFORM
        if self.commands is not None:
            lengths = struct.pack(f"<{len(self.commands)}I", *map(len, self.commands))
            region, flags = b"".join((lengths, *self.commands)), 0
        return wire.encode_parts(
            self.table, self.heads, self.small, self.large, region,
            flags=flags | MARKED if self.marked else flags, session=session, sequence=sequence,
        )  # fmt: skip

    def _region(self) -> bytes:
        """The command, with what it has to say about each record."""
        command = self.command
        if command[0] != SIZED:
            return command
        heads, bodies = set(self.table[::2]), set(self.table[1::2])
        if len(heads) == len(bodies) == 1:
            return command + struct.pack("<I", heads.pop() + _body(bodies.pop()))
        sizes = [head + _body(body) for head, body in zip(self.table[::2], self.table[1::2], strict=True)]
        return b"".join((command[:2], bytes((command[2] | EACH,)), command[3:], struct.pack(f"<{len(sizes)}I", *sizes)))


def _body(size: int) -> int:
    return 0 if size == wire.ABSENT else size
