"""Layout of a WAL file: head blocks, batches, record headers. Pure functions over bytes;
docs/internals/files-on-disk.md has the tables.

Invariant: nothing in a file parses at another position, in another file, or in another use of the same space. Every
checksum is seeded with the file's `salt` plus the position of what it covers; the salt is drawn anew each time a file
comes into use, so not even bytes a client chose can look like a batch. Called by `wal` (encoding) and `wal_replay`
(decoding).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from xxhash import xxh3_64_digest, xxh3_64_intdigest

from ..disk.door import JOIN_BELOW
from ..entry import Entry
from ..types import Buffer

BLOCK = 4096
"""Batches start and end at multiples of this many bytes: no write touches a page that an acknowledged batch lies in."""
WHOLE_BYTES = 2 * BLOCK
"""A batch of so many bytes is one buffer, payloads too: what a few records are costs less to copy than to pass on."""
DATA_START = 2 * BLOCK
"""The first batch: two copies of the file head come before it."""

FILE_MAGIC = b"LYWF"
HEADER_MAGIC = b"LYWB"
TRAILER_MAGIC = b"LYWT"
FORMAT = 1

FILE = struct.Struct("<4sHHQQQQQ")
"""magic, format, 0, epoch, salt, previous file's epoch, where that one's batches end, number of the first batch."""
BATCH = struct.Struct("<4sHHQQQIIQQQQ")
"""magic, format, 0, epoch, number, start, rows, records, bytes of metadata, payload and all, directory checksum."""
ROW = struct.Struct("<QQQII")
"""uid, number of the batch that held this group's records before, first index (0: none), offset, count of records."""
RECORD = struct.Struct("<BBHIQQQQ")
"""kind, 0, 0, content bytes, uid, value, payload bytes, payload offset in the file. A checksum stands before it."""
HARD = struct.Struct("<QQQ")
"""Content of a hard state: term, vote, commit."""

CHECK_BYTES = 8
FILE_BYTES = FILE.size + CHECK_BYTES
BATCH_BYTES = BATCH.size + CHECK_BYTES
ROW_BYTES = ROW.size
RECORD_BYTES = RECORD.size + CHECK_BYTES

ENTRY_RECORD = 1
"""An entry: content is `entry.data`, value the tombstone's release index d (0: the payload bytes are in this batch)."""
HARD_STATE_RECORD = 2
TRUNCATE_RECORD = 3
"""Entries from `value` on are void."""
FLOOR_RECORD = 4
"""The payload floor P is `value` (law 4)."""
PIECE_RECORD = 5
"""Reserved for pieces of payloads above 1 MiB."""

HardState: TypeAlias = tuple[int, int, int]
"""(term, vote, commit)"""


class WalItem:
    """What one group wants durable in the next batch. A new item wants nothing; the caller sets what it needs.

    `hard_state` is (term, vote, commit) or None. `truncate` voids the entries from that index on before `entries`
    count, and may jump ahead (a snapshot was installed); 0 means none. `entries` are contiguous. `floor` is the
    payload floor, 0: unchanged. `token` is the caller's.
    """

    __slots__ = ("uid", "hard_state", "entries", "truncate", "floor", "token")

    def __init__(
        self,
        uid: int,
        entries: Sequence[Entry] = (),
        hard_state: HardState | None = None,
        truncate: int = 0,
        floor: int = 0,
        token: object = None,
    ) -> None:
        self.uid = uid
        self.entries = entries
        self.hard_state = hard_state
        self.truncate = truncate
        self.floor = floor
        # The host's own business, which it reads back without asking.
        self.token: object = token

    def belong(self, token: object) -> None:
        """Take what the caller reads back when it is durable."""
        self.token = token

    def keep_rest(self, entries: Sequence[Entry]) -> None:
        """Want only these last entries of it: all that comes before them is durable."""
        self.entries = entries
        self.truncate, self.floor, self.hard_state = 0, 0, None


Run: TypeAlias = tuple[WalItem, Sequence[Entry], bool, int]
"""The records of one item in one batch: item, entries, whether the item's own records (hard state, ...) come along, and
the number of the batch that held the group's newest record before. A plain tuple: one is made per item and batch."""


class FileHead(NamedTuple):
    """A WAL file's identity. `previous` is the epoch of the file before it and `previous_end` where its batches end."""

    epoch: int
    salt: int
    previous: int
    previous_end: int
    first_batch: int


class BatchFrame(NamedTuple):
    """A batch's lengths, from its header or its trailer."""

    number: int
    start: int
    rows: int
    records: int
    metadata: int
    payload: int
    total: int
    directory_check: int

    @property
    def end(self) -> int:
        """Where the next batch starts."""
        return self.start + self.total


class Encoded(NamedTuple):
    """A batch ready for `Disk.gather_write`. `placed` says where each entry's payload bytes lie in the file."""

    buffers: list[Buffer]
    placed: list[tuple[Entry, int]]
    total: int


def draw_salt() -> int:
    """Draw 62 random bits: a position can be added without leaving 64."""
    return int.from_bytes(os.urandom(8), "little") >> 2


def encode_file_head(head: FileHead) -> bytes:
    """Return one copy of the head, a block long."""
    fixed = FILE.pack(FILE_MAGIC, FORMAT, 0, *head)
    return (fixed + xxh3_64_digest(fixed)).ljust(BLOCK, b"\0")


def decode_file_head(block: bytes) -> FileHead | None:
    """Return the head, or None when the copy is damaged. The caller compares `epoch` with the file's name."""
    if len(block) < FILE_BYTES or xxh3_64_digest(block[: FILE.size]) != block[FILE.size : FILE_BYTES]:
        return None
    magic, _, _, *fields = FILE.unpack_from(block)
    return FileHead(*fields) if magic == FILE_MAGIC else None


def format_of(block: bytes) -> int:
    """Return the format number of an intact head copy, 0 otherwise."""
    if decode_file_head(block) is None:
        return 0
    number: int = FILE.unpack_from(block)[1]
    return number


def batch_bytes(metadata: int, payload: int, rows: int) -> int:
    """Return the bytes of a whole batch, in blocks: `metadata` counts header, directory and records; the trailer comes
    on top."""
    return (metadata + payload + rows * ROW_BYTES + BATCH_BYTES + BLOCK - 1) // BLOCK * BLOCK


def metadata_bytes(rows: int, records: int, contents: int) -> int:
    """Return the bytes of header, directory and records, for records whose contents sum to `contents` bytes."""
    return BATCH_BYTES + rows * ROW_BYTES + records * RECORD_BYTES + contents


def _frame_bytes(magic: bytes, epoch: int, frame: tuple[int, ...], salt: int, position: int) -> bytes:
    """Return a `BatchFrame` in bytes, at a position in the file."""
    fixed = BATCH.pack(magic, FORMAT, 0, epoch, *frame)
    return fixed + xxh3_64_digest(fixed, salt + position)


def decode_frame(block: bytes, at: int, magic: bytes, head: FileHead, position: int) -> BatchFrame | None:
    """Return the frame at `at` in `block`, which is `position` in the file; None when it isn't one of this use of the
    file."""
    if block[at : at + 4] != magic or len(block) < at + BATCH_BYTES:
        return None
    fixed = block[at : at + BATCH.size]
    if xxh3_64_digest(fixed, head.salt + position) != block[at + BATCH.size : at + BATCH_BYTES]:
        return None
    _, number_format, _, epoch, *fields = BATCH.unpack(fixed)
    frame = BatchFrame(*fields)
    if number_format != FORMAT or epoch != head.epoch or frame.start < DATA_START or frame.total < BLOCK:
        return None
    return frame


def check_directory(directory: bytes, head: FileHead, frame: BatchFrame) -> bool:
    """Return True when these are the directory's bytes, as header and trailer both hold them."""
    return (
        len(directory) == frame.rows * ROW_BYTES
        and xxh3_64_intdigest(directory, head.salt + frame.start) == frame.directory_check
    )


def encode_batch(
    head: FileHead, number: int, start: int, runs: Sequence[Run], metadata: int, payload: int, records: int
) -> Encoded:
    """Lay out one batch: header, directory, records, payload bytes, padding, directory again, trailer.

    `metadata`, `payload` and `records` are the exact sums over `runs`. No payload byte is copied here.
    """
    salt = head.salt
    rows: list[int] = []
    parts: list[Buffer] = [b"", b""]
    bodies: list[Buffer] = []
    placed: list[tuple[Entry, int]] = []
    at = start + BATCH_BYTES + len(runs) * ROW_BYTES
    payload_at = start + metadata
    pack, overhead = RECORD.pack, RECORD_BYTES
    for item, entries, first, previous in runs:
        uid = item.uid
        begin = at
        count = len(entries)
        if first and (item.truncate or item.floor or item.hard_state is not None):
            own = _own_records(item, salt, at)
            count += len(own)
            for record in own:
                parts.append(record)
                at += len(record)
        for entry in entries:
            data = entry.data
            size = len(data)
            tombstone = entry.tombstone
            body = 0 if tombstone else entry.body_bytes
            fixed = pack(ENTRY_RECORD, 0, 0, size, uid, tombstone, body, payload_at if body else 0)
            # The content's checksum seeds the header's: one checksum over both, and neither is copied for it.
            parts += (xxh3_64_digest(fixed, xxh3_64_intdigest(data, salt + at)), fixed, data)
            at += overhead + size
            if body:
                assert entry.bodies is not None, f"entry {entry.index} of group {uid:016x} comes without its payload"
                bodies += entry.bodies
                placed.append((entry, payload_at))
                payload_at += body
        rows += (uid, previous, entries[0].index if entries else 0, begin - start | count << 32)
    assert at == start + metadata and payload_at == start + metadata + payload, "a batch was measured wrongly"
    directory = struct.pack(f"<{len(rows)}Q", *rows)
    total = batch_bytes(metadata, payload, len(runs))
    check = xxh3_64_intdigest(directory, salt + start)
    frame = (number, start, len(runs), records, metadata, payload, total, check)
    parts[0] = _frame_bytes(HEADER_MAGIC, head.epoch, frame, salt, start)
    parts[1] = directory
    tail = (
        bytes(total - metadata - payload - len(directory) - BATCH_BYTES), directory,
        _frame_bytes(TRAILER_MAGIC, head.epoch, frame, salt, start + total - BATCH_BYTES),
    )  # fmt: skip
    assert sum(map(len, bodies)) == payload, "an entry's body_bytes is not the sum of its bodies"
    # Small records are joined here, at C speed; big ones go by reference, and `gather_write` joins what is between
    # them. A whole batch that is small is one buffer.
    if total <= WHOLE_BYTES:
        return Encoded([b"".join((*parts, *bodies, *tail))], placed, total)
    metadata_buffers = parts if metadata > records * JOIN_BELOW else [b"".join(parts)]
    return Encoded([*metadata_buffers, *bodies, b"".join(tail)], placed, total)


def own_sizes(item: WalItem) -> tuple[int, int]:
    """Return (records, content bytes) of an item besides its entries."""
    records = contents = 0
    if item.hard_state is not None:
        records, contents = 1, HARD.size
    if item.truncate:
        records += 1
    if item.floor:
        records += 1
    return records, contents


def _own_records(item: WalItem, salt: int, at: int) -> list[bytes]:
    """Return hard state, floor, truncation, in this order: a tombstone's floor is never behind the entry that brings
    it."""
    wanted: list[tuple[int, int, bytes]] = []
    if item.hard_state is not None:
        wanted.append((HARD_STATE_RECORD, 0, HARD.pack(*item.hard_state)))
    if item.floor:
        wanted.append((FLOOR_RECORD, item.floor, b""))
    if item.truncate:
        wanted.append((TRUNCATE_RECORD, item.truncate, b""))
    found: list[bytes] = []
    for kind, value, content in wanted:
        fixed = RECORD.pack(kind, 0, 0, len(content), item.uid, value, 0, 0)
        record = xxh3_64_digest(fixed, xxh3_64_intdigest(content, salt + at)) + fixed + content
        found.append(record)
        at += len(record)
    return found
