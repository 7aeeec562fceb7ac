"""Record blocks: what a read of an append log returns, and the records in them.

A block is a slice of one entry: a fixed header, a table of (head, body) lengths, the heads and then the bodies, each
in record order. A block without bodies keeps the table, so sizes are known. Blocks are decoded as they are iterated:
a page of a thousand records costs nothing until someone looks. `encode_block` is called by the server's read path.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .compression import WHOLE_BYTES_MAX, Encoding, inflate_whole, parse
from .errors import BadRequest
from .frame import ABSENT, ENVELOPE_BYTES, MARK, Buffer

BLOCK = struct.Struct("<QIIQQqIIQ")
"""first offset, records, flags, index, term, timestamp (ms since 1970), table bytes, heads bytes, bodies bytes."""
BLOCK_BYTES = BLOCK.size
BODIES = 1
"""Block flag: the bodies are there."""
LONG = 2
"""Block flag: one record, whose payload came in pieces. Its row says `ABSENT`; instead of the bodies come its size
(u64) and, with `BODIES`, its bytes."""
LEFT_OUT = 4
"""Block flag: the payload was asked for and does not fit into the answer."""
ENCODED = 8
"""Block flag: the length of a head may have `MARK` set: its record's payload is encoded (`compression`)."""
SIZE = struct.Struct("<Q")


class BlockError(ValueError):
    """Block bytes that do not add up; `session` turns it into a protocol error."""


class Block(NamedTuple):
    """A block's header and where its parts lie in `data` (byte positions)."""

    first: int
    records: int
    flags: int
    raft_index: int
    term: int
    timestamp: int
    data: memoryview
    table_at: int
    heads_at: int
    bodies_at: int
    end: int


class Record:
    """One record. `metadata` is a copy; `payload` copies on access, `view` does not.

    `size` is the body's length in bytes even where bodies were left away; `payload` is None for a record without one
    and for a read without bodies. `timestamp` is the leader's log time in milliseconds since 1970. `left_out`: the
    payload was asked for and is too long for a poll's answer; `payload` raises then, `Log.body_pieces` streams it.
    A compressed payload is inflated when it is first looked at; `size` is always that of the original, `stored` of what
    is kept of it, `encoding` None unless they differ.
    """

    __slots__ = (
        "offset", "metadata", "size", "index", "term", "timestamp", "left_out", "stored", "encoding", "_view", "_packed"
    )  # fmt: skip

    def __init__(
        self,
        offset: int,
        metadata: bytes,
        size: int,
        index: int,
        term: int,
        timestamp: int,
        view: memoryview | None,
        left_out: bool = False,
        encoding: Encoding | None = None,
    ) -> None:
        self.offset = offset
        self.metadata = metadata
        self.size = self.stored = size
        self.encoding = encoding
        self.index = index
        self.term = term
        self.timestamp = timestamp
        self.left_out = left_out
        self._packed = encoding is not None and view is not None
        if encoding is not None:
            self.size = encoding.size
            if view is not None and self.size > WHOLE_BYTES_MAX:
                # Few bytes came along for very many: nobody asked for those at once.
                view, self._packed, self.left_out = None, False, True
        self._view = view

    @property
    def view(self) -> memoryview | None:
        """The body without a copy, or None where there is none or it did not come along. Raises `Corrupt`."""
        if self._packed and self._view is not None and self.encoding is not None:
            self._view, self._packed = memoryview(inflate_whole(self.encoding, self._view)), False
        return self._view

    @property
    def payload(self) -> bytes | None:
        """The body as bytes, or None. Raises `BadRequest` for one that is too long to come along: never None."""
        if self.left_out:
            raise BadRequest(
                f"the payload of record {self.offset} has {self.size} bytes and did not come with the page: "
                "read it with read_body or body_pieces, or ask for a larger page"
            )
        view = self.view
        return None if view is None else bytes(view)

    def fill(self, payload: Buffer) -> None:
        """Give a record the payload that was left out."""
        assert len(payload) == self.size
        self.show(memoryview(payload))

    def show(self, view: memoryview | None) -> None:
        """Let this stand for the payload that was left out: all of it, its beginning, or nothing."""
        self._view, self._packed, self.left_out = view, False, False

    def __repr__(self) -> str:
        return f"Record({self.offset} at {self.index}@{self.term}, metadata={len(self.metadata)}, size={self.size})"


def encode_block(
    first: int,
    index: int,
    term: int,
    timestamp: int,
    table: Sequence[int],
    heads: Sequence[Buffer],
    bodies: Sequence[Buffer] | None,
    encoded: bool = False,
) -> list[Buffer]:
    """Return the buffers of one block. `table` is flat: head length, body length (or `ABSENT`) of each record.

    `heads` may be one contiguous buffer of all heads or one a record; likewise `bodies`, in record order and without
    the absent ones; None leaves them away. Bodies are passed through, never joined.
    """
    count = len(table) // 2
    heads_bytes = sum(map(len, heads))
    bodies_bytes = 0 if bodies is None else sum(map(len, bodies))
    assert len(table) == 2 * count and _heads(table, encoded) == heads_bytes, "the heads are those of the table"
    assert bodies is None or sum(size for size in table[1::2] if size != ABSENT) == bodies_bytes, "and so the bodies"
    head = BLOCK.pack(
        first, count, (0 if bodies is None else BODIES) | (ENCODED if encoded else 0), index, term, timestamp,
        8 * count, heads_bytes, bodies_bytes,
    )  # fmt: skip
    return [b"".join((head, struct.pack(f"<{2 * count}I", *table), *heads)), *(bodies or ())]


def _heads(table: Sequence[int], encoded: bool) -> int:
    return sum([length & ~MARK for length in table[::2]]) if encoded else sum(table[::2])


def encode_long(
    offset: int,
    index: int,
    term: int,
    timestamp: int,
    head: Buffer,
    size: int,
    body: Sequence[Buffer] | None,
    left_out: bool,
    encoded: bool = False,
) -> list[Buffer]:
    """Return the buffers of the block of one record whose payload of `size` bytes came in pieces: with its bytes, or
    without."""
    flags = LONG | (LEFT_OUT if left_out else 0) | (0 if body is None else BODIES) | (ENCODED if encoded else 0)
    row = struct.pack("<2I", len(head) | (MARK if encoded else 0), ABSENT)
    rest = SIZE.size + sum(map(len, body or ()))
    header = BLOCK.pack(offset, 1, flags, index, term, timestamp, 8, len(head), rest)
    return [b"".join((header, row, head, SIZE.pack(size))), *(body or ())]


def split_blocks(data: Buffer) -> list[Block]:
    """Return the blocks in `data`; raise `BlockError` when lengths do not add up, before anything is decoded."""
    view = memoryview(data)
    at, size = 0, len(view)
    found: list[Block] = []
    while at < size:
        if size - at < BLOCK_BYTES:
            raise BlockError("a record block is cut short")
        first, count, flags, index, term, timestamp, table, heads, bodies = BLOCK.unpack_from(view, at)
        table_at = at + BLOCK_BYTES
        heads_at = table_at + table
        bodies_at = heads_at + heads
        at = bodies_at + bodies
        if at > size or table != 8 * count or not count:
            raise BlockError("a record block's lengths do not add up")
        lengths = struct.unpack_from(f"<{2 * count}I", view, table_at)
        present = sum(length for length in lengths[1::2] if length != ABSENT)
        if flags & LONG:
            if count != 1 or bodies < SIZE.size:
                raise BlockError("the block of a long record does not add up")
            whole: int = SIZE.unpack_from(view, bodies_at)[0]
            present, with_size = (whole, SIZE.size) if flags & BODIES else (0, SIZE.size)
        else:
            present, with_size = present if flags & BODIES else 0, 0
        if _heads(lengths, bool(flags & ENCODED)) != heads or present + with_size != bodies:
            raise BlockError("a record block's table does not add up")
        found.append(Block(first, count, flags, index, term, timestamp, view, table_at, heads_at, bodies_at, at))
    return found


def records_of(block: Block) -> Iterator[Record]:
    """Yield the records of one block, in order."""
    view = block.data
    lengths = struct.unpack_from(f"<{2 * block.records}I", view, block.table_at)
    head_at, body_at = block.heads_at, block.bodies_at
    body: memoryview | None
    with_bodies = block.flags & BODIES
    if block.flags & LONG:
        size = SIZE.unpack_from(view, body_at)[0]
        body = view[body_at + SIZE.size : block.end] if with_bodies else None
        left_out = bool(block.flags & LEFT_OUT)
        head = bytes(view[head_at:body_at])
        encoding = parse(head) if lengths[0] & MARK and block.flags & ENCODED else None
        head = head[ENVELOPE_BYTES:] if encoding else head
        place = (block.first, head, size, block.raft_index, block.term, block.timestamp)
        yield Record(*place, body, left_out, encoding)
        return
    if block.flags & ENCODED:
        yield from _encoded_records(block, lengths)
        return
    for number in range(block.records):
        head, size = lengths[2 * number], lengths[2 * number + 1]
        metadata = bytes(view[head_at : head_at + head])
        head_at += head
        body = None
        if size == ABSENT:
            size = 0
        elif with_bodies:
            body = view[body_at : body_at + size]
            body_at += size
        yield Record(block.first + number, metadata, size, block.raft_index, block.term, block.timestamp, body)


def _encoded_records(block: Block, lengths: Sequence[int]) -> Iterator[Record]:
    """Yield records as the loop in `records_of` does, of a block some of whose records' payloads are encoded."""
    view, head_at, body_at = block.data, block.heads_at, block.bodies_at
    for number in range(block.records):
        length, size = lengths[2 * number], lengths[2 * number + 1]
        end = head_at + (length & ~MARK)
        head, head_at = bytes(view[head_at:end]), end
        encoding = parse(head) if length & MARK else None
        head = head[ENVELOPE_BYTES:] if encoding else head
        body = None
        if size == ABSENT:
            size = 0
        elif block.flags & BODIES:
            body = view[body_at : body_at + size]
            body_at += size
        place = (block.first + number, head, size, block.raft_index, block.term, block.timestamp)
        yield Record(*place, body, False, encoding)


class Page:
    """The answer to one poll: its records (decoded as they are iterated), the log's bounds and who answered.

    `start` and `end` are the log's first offset and its next free one when `node` answered. `len(page)` is the number
    of records, `page.asked` the offset asked for (of a poll by time: the first one of then), `page.next` the one to go
    on from. `page.joined`: the epoch since which a topic's partition has slots that were others'; 0: of none.
    `page.uid`: of the log that answered; 0: its node did not say.
    """

    __slots__ = ("blocks", "start", "end", "node", "asked", "next", "joined", "uid", "_count", "_stop")

    def __init__(
        self, data: Buffer, start: int, end: int, node: int, asked: int, limit: int, joined: int = 0, uid: int = 0
    ) -> None:  # fmt: skip
        self.blocks = split_blocks(data)
        self.start = start
        self.end = end
        self.node = node
        self.asked = asked
        self.joined = joined
        self.uid = uid
        present = 0
        last = end if asked < 0 else asked
        for block in self.blocks:
            skipped = max(0, asked - block.first)
            present += max(0, block.records - skipped)
            last = block.first + block.records
        # A server may answer with whole entries: what lies before the offset asked for or beyond the count is skipped.
        self._count = min(present, limit)
        self.next = last - (present - self._count)
        self._stop = self.next

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Record]:
        for block in self.blocks:
            for record in records_of(block):
                if self.asked <= record.offset < self._stop:
                    yield record

    @property
    def records(self) -> list[Record]:
        """All records of the page, decoded now."""
        return list(self)

    def __repr__(self) -> str:
        return f"Page({self._count} records up to {self.next}, log {self.start}..{self.end}, node {self.node})"
