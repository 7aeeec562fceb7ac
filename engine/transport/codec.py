"""Raft messages as frames: one frame for a peer and turn, whatever number of groups it serves.

A section is three tables, so that thousands of small messages decode in one `iter_unpack`: message rows, entry rows,
and the entries' metadata back to back. The body is the entries' payload bytes, gathered from their buffers and, at the
receiver, sliced and never copied. Lengths are checked against each other before anything is built.
Called by `peers` and `memory`. Unit hashes are the receiving host's business (`entry.verify_bodies`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from logyard.protocol.errors import BadRequest, Corrupt

from ..entry import ENTRY, ENTRY_BYTES, UNIT, UNIT_BYTES, Entry, parse_entry
from ..raft.messages import APPEND, PREVOTE, SNAPSHOT, TERMS_REPLY, Message
from ..types import Buffer
from .frame import HEADER_BYTES, MESSAGES, encode_header, gather

SECTION = struct.Struct("<II")
"""messages, entries."""
MESSAGE = struct.Struct("<BBHIQQQQQQQQ")
"""kind, flags, reserved (0), entries, uid, term, index, log term, commit, context, first, last."""
MESSAGE_BYTES = MESSAGE.size
ENTRY_ROW = struct.Struct("<IIQQ")
"""data bytes, flags, tombstone (release index d, 0 none), body bytes that follow (0 with a tombstone)."""
ENTRY_ROW_BYTES = ENTRY_ROW.size
REJECT = 1
TOMBSTONE = 1
KINDS = frozenset(range(PREVOTE, TERMS_REPLY + 1)) - {SNAPSHOT}
FLAGS = frozenset((0, REJECT))
NO_BODY = memoryview(b"")


def encode_messages(messages: Sequence[Message], limit: int) -> Iterator[list[Buffer]]:
    """Yield frames (each a list of buffers for one gather-write) of `messages`, in order, at most `limit` bytes each.

    A message is never split: one that is larger than `limit` goes through in a frame of its own. Entries whose payload
    left memory must have been read back (or carry a tombstone) before they come here.
    """
    heads: list[bytes] = []
    rows: list[bytes] = []
    data: list[bytes] = []
    bodies: list[Buffer] = []
    size = body_bytes = 0
    for m in messages:
        entries = m.entries
        if not entries:
            assert m.kind != APPEND or not m.first or m.last < m.first, "an append's entries are read before it is sent"
            if size + MESSAGE_BYTES > limit and heads:
                yield _frame(heads, rows, data, bodies, body_bytes)
                heads, rows, data, bodies = [], [], [], []
                size = body_bytes = 0
            size += MESSAGE_BYTES
            heads.append(_row(m, 0))
            continue
        own = MESSAGE_BYTES
        own_body = 0
        for entry in entries:
            own += ENTRY_ROW_BYTES + len(entry.data)
            if not entry.tombstone:
                own_body += entry.body_bytes
        own += own_body
        if size + own > limit and heads:
            yield _frame(heads, rows, data, bodies, body_bytes)
            heads, rows, data, bodies = [], [], [], []
            size = body_bytes = 0
        size += own
        body_bytes += own_body
        heads.append(_row(m, len(entries)))
        for entry in entries:
            data.append(entry.data)
            if entry.tombstone:
                rows.append(ENTRY_ROW.pack(len(entry.data), TOMBSTONE, entry.tombstone, 0))
                continue
            rows.append(ENTRY_ROW.pack(len(entry.data), 0, 0, entry.body_bytes))
            if entry.body_bytes:
                assert entry.bodies is not None, "payload bytes are read back before an entry is sent"
                bodies += entry.bodies
    if heads:
        yield _frame(heads, rows, data, bodies, body_bytes)


def _row(m: Message, entries: int) -> bytes:
    assert m.kind != SNAPSHOT, "a word between a core and its own host"
    return MESSAGE.pack(
        m.kind, m.reject, 0, entries, m.uid, m.term, m.index, m.log_term, m.commit, m.context, m.first, m.last
    )


def _frame(
    heads: list[bytes], rows: list[bytes], data: list[bytes], bodies: list[Buffer], body_bytes: int
) -> list[Buffer]:
    """Return one frame: the section joined with its header, then the bodies."""
    section = b"".join((SECTION.pack(len(heads), len(rows)), *heads, *rows, *data))
    found: list[Buffer] = [encode_header(MESSAGES, len(heads), section, body_bytes) + section]
    if body_bytes:
        found += gather(bodies)
        assert sum(map(len, found)) == HEADER_BYTES + len(section) + body_bytes, "an entry's body_bytes are its bodies'"
    return found


def check_messages(section: Buffer, body_bytes: int, count: int) -> tuple[int, int]:
    """Bounds-check a section before memory is taken for its body; return (messages, entries). Raises `BadRequest`."""
    size = len(section)
    if size < SECTION.size:
        raise BadRequest(f"a message section of {size} bytes is too short")
    messages, entries = SECTION.unpack_from(section)
    data_at = SECTION.size + messages * MESSAGE_BYTES + entries * ENTRY_ROW_BYTES
    if not messages or messages != count or data_at > size:
        raise BadRequest(f"{messages} messages and {entries} entries do not fit a section of {size} bytes")
    if not entries:
        if data_at != size or body_bytes:
            raise BadRequest("a section without entries has bytes left over")
        return messages, 0
    data = body = 0
    for length, _, _, own in ENTRY_ROW.iter_unpack(section[data_at - entries * ENTRY_ROW_BYTES : data_at]):
        data += length
        body += own
    if data_at + data != size or body != body_bytes:
        raise BadRequest("a frame's entries do not add up to its section and body")
    return messages, entries


def decode_messages(section: Buffer, body: memoryview, sender: int, to: int) -> list[Message]:
    """Return the messages of a frame that `sender` sent `to` this node.

    `section` may be reused by the caller afterwards; `body` is kept: the entries' bodies are slices of it. Raises
    `BadRequest` or `Corrupt` (a damaged or lying peer: close that connection).
    """
    view = memoryview(section)
    (count,) = struct.unpack_from("<I", view) if len(view) >= SECTION.size else (0,)
    messages, entries = check_messages(view, len(body), count)
    end = SECTION.size + messages * MESSAGE_BYTES
    table = view[SECTION.size : end]
    # One look at a column instead of a test per row.
    if not KINDS.issuperset(bytes(table[::MESSAGE_BYTES])) or not FLAGS.issuperset(bytes(table[1::MESSAGE_BYTES])):
        raise BadRequest("a frame has messages of unknown kind or flags")
    if not entries:
        found = []
        for kind, flags, _, n, uid, term, index, log_term, commit, context, first, last in MESSAGE.iter_unpack(table):
            if n or (kind == APPEND and last >= first > 0):
                raise BadRequest("a message names entries that are not in its frame")
            own: list[Entry] | None = [] if kind == APPEND else None
            reject = flags == REJECT
            found.append(
                Message(kind, uid, to, sender, term, index, log_term, commit, context, reject, own, first, last)
            )
        return found
    return _decode_entries(view, table, body, entries, sender, to)


def _decode_entries(
    view: memoryview, table: memoryview, body: memoryview, entries: int, sender: int, to: int
) -> list[Message]:
    """Return the messages of a frame in the general case, in which some carry entries. All totals were checked; each
    message's share was not."""
    rows_at = SECTION.size + len(table)
    data_at = rows_at + entries * ENTRY_ROW_BYTES
    rows = ENTRY_ROW.iter_unpack(view[rows_at:data_at])
    body_at = used = 0
    found: list[Message] = []
    for kind, flags, _, n, uid, term, index, log_term, commit, context, first, last in MESSAGE.iter_unpack(table):
        own: list[Entry] | None = [] if kind == APPEND else None
        used += n
        low = log_term
        if used > entries or (n and kind != APPEND) or (kind == APPEND and first and last - first + 1 != n):
            raise BadRequest("a message's entries do not add up")
        for number in range(first, first + n):
            length, entry_flags, tombstone, size = next(rows)
            entry = parse_entry(bytes(view[data_at : data_at + length]), "peer entry")
            data_at += length
            if entry.index != number or entry_flags not in (0, TOMBSTONE):
                raise BadRequest(f"entry {entry.index} with flags {entry_flags} came where {number} belongs")
            if not low <= entry.term <= term:
                raise BadRequest(f"entry {number} of term {entry.term} in a message of term {term}, after term {low}")
            low = entry.term
            if entry_flags:
                if not tombstone or size:
                    raise BadRequest("a tombstone without its release index, or with a body")
                entry.tombstone = tombstone
            elif size != entry.body_bytes or tombstone:
                raise Corrupt("peer entry", body_at, f"{entry.body_bytes} body bytes", size)
            elif size:
                entry.bodies = _slice(entry.data, body, body_at, size)
                body_at += size
            own.append(entry)  # type: ignore[union-attr]  # n is 0 unless it is an append
        reject = flags == REJECT
        found.append(Message(kind, uid, to, sender, term, index, log_term, commit, context, reject, own, first, last))
    if used != entries:
        raise BadRequest("a frame has entries that belong to no message")
    return found


def _slice(data: bytes, body: memoryview, at: int, size: int) -> tuple[memoryview, ...]:
    """Return the units of one entry as slices of `body`; `Corrupt` unless the directory adds up to `size`."""
    units = ENTRY.unpack_from(data)[3]
    if units == 1 and UNIT.unpack_from(data, ENTRY_BYTES)[1] == size:
        return (body[at : at + size],)
    lengths = [row[1] for row in UNIT.iter_unpack(data[ENTRY_BYTES : ENTRY_BYTES + units * UNIT_BYTES])]
    if sum(lengths) != size:
        raise Corrupt("peer entry", at, f"units of {size} bytes", sum(lengths))
    parts = []
    for length in lengths:
        parts.append(body[at : at + length])
        at += length
    return tuple(parts)
