"""The bytes in which the host's meta store keeps what the payload store knows of a group: homes, dead slots, live
bytes.

Invariant: a row proves itself (xxh3-128 over key and body), so a damaged one is an error and never an empty group.
Called by `store`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from logyard.protocol.errors import PayloadCorrupt

from . import layout
from .homes import Home as Home
from .ledger import Marks

_COUNTS = struct.Struct("<II")
_HOME = struct.Struct("<QQQQ")
_MARK = struct.Struct("<QQI")
_PART = struct.Struct("<II")


def key(uid: int) -> bytes:
    """Return a group's row."""
    return b"payloads/" + uid.to_bytes(8, "big")


def encode(uid: int, homes: Sequence[Home], marks: Sequence[tuple[int, int, Marks]]) -> bytes:
    """Return homes, and (generation, run, marks) of each copy they name, as one value."""
    parts = [_COUNTS.pack(len(homes), len(marks))]
    parts += [_HOME.pack(*home) for home in homes]
    for generation, run, found in marks:
        body = found.encode()
        parts += (_MARK.pack(generation, run, len(body)), body)
    return layout.wrap(key(uid), b"".join(parts))


def decode(row: bytes, value: bytes) -> tuple[int, list[Home], list[tuple[int, int, Marks]]]:
    """Return what `encode` wrote. Raises `PayloadCorrupt`."""
    uid = int.from_bytes(row[-8:], "big")
    body = value[layout.HASH_BYTES :]
    want, got = value[: layout.HASH_BYTES], layout.row_hash(row, body)
    if row != key(uid) or want != got:
        raise PayloadCorrupt("checkpoint", f"the row of group {uid:016x}", want.hex(), got.hex(), uid)
    home_count, mark_count = _COUNTS.unpack_from(body)
    at = _COUNTS.size
    homes: list[Home] = []
    for _ in range(home_count):
        homes.append(Home(*_HOME.unpack_from(body, at)))
        at += _HOME.size
    marks: list[tuple[int, int, Marks]] = []
    for _ in range(mark_count):
        generation, run, size = _MARK.unpack_from(body, at)
        at += _MARK.size
        marks.append((generation, run, Marks.decode(body[at : at + size])))
        at += size
    return uid, homes, marks


def join(rows: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return rows as one value."""
    parts: list[bytes] = []
    for row, value in rows:
        parts += (_PART.pack(len(row), len(value)), row, value)
    return layout.wrap(b"payloads", b"".join(parts))


def split(saved: bytes) -> list[tuple[bytes, bytes]]:
    """Return what `join` wrote; an empty or damaged value is an error. Raises `PayloadCorrupt`."""
    body = saved[layout.HASH_BYTES :]
    want, got = saved[: layout.HASH_BYTES], layout.row_hash(b"payloads", body)
    if want != got:
        raise PayloadCorrupt("checkpoint", "all of it", want.hex(), got.hex())
    rows: list[tuple[bytes, bytes]] = []
    at = 0
    while at < len(body):
        key_bytes, value_bytes = _PART.unpack_from(body, at)
        at += _PART.size
        rows.append((body[at : at + key_bytes], body[at + key_bytes : at + key_bytes + value_bytes]))
        at += key_bytes + value_bytes
    return rows
