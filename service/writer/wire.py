"""Messages between a node and its writer process: a fixed head, a msgpack header, raw bytes.

Invariant: both lengths are checked before anything is allocated for them; the other end is always asked for exactly the
bytes that were announced. Called by `writer` (blocking) and `writer_process` (trio).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgpack

from logyard.engine.types import Buffer
from logyard.protocol.errors import LogyardError

HEAD = struct.Struct("<4sIQ")
"""magic, bytes of the header, bytes after it."""
MAGIC = b"LYw1"
HEADER_BYTES_MAX = 64 << 20
"""A job with more to say is not sent (`fits`)."""
BODY_BYTES_MAX = 2 << 30
"""Payloads that came with a snapshot: one answer of a peer, in memory on both sides."""
READ_BYTES = 1 << 20


class Message(NamedTuple):
    """`header` is a list of plain values, its first a text; `body` all raw bytes that follow it."""

    header: list[Any]
    body: memoryview


class WireBroken(LogyardError):
    """The other end speaks nonsense: it is no writer of this version."""


def encode(header: Sequence[object], body_bytes: int = 0) -> bytes:
    """Return head and header of a message whose body follows. Raises `WireBroken` for what is too long."""
    packed: bytes = msgpack.packb(header)
    if len(packed) > HEADER_BYTES_MAX or body_bytes > BODY_BYTES_MAX:
        raise WireBroken(f"a message of {len(packed)} + {body_bytes} bytes is too long")
    return HEAD.pack(MAGIC, len(packed), body_bytes) + packed


def decode_head(head: bytes) -> tuple[int, int]:
    """Return (bytes of the header, bytes of the body). Raises `WireBroken`."""
    magic, header_bytes, body_bytes = HEAD.unpack(head)
    if magic != MAGIC or header_bytes > HEADER_BYTES_MAX or body_bytes > BODY_BYTES_MAX:
        raise WireBroken(f"not a message of a writer: {head.hex()}")
    return header_bytes, body_bytes


def decode_header(packed: bytes) -> list[Any]:
    """Return a header. Raises `WireBroken`."""
    try:
        header = msgpack.unpackb(packed)
    except ValueError as error:
        raise WireBroken(f"not a header of a writer: {error}") from error
    if not isinstance(header, list) or not header or not isinstance(header[0], str):
        raise WireBroken("not a header of a writer: no list that begins with a text")
    return header


def receive(fd: int) -> Message | None:
    """Return the next message, or None when the other end is gone, also in the middle of one. BLOCKING."""
    head = _read(fd, HEAD.size)
    if len(head) < HEAD.size:
        return None
    header_bytes, body_bytes = decode_head(head)
    packed, body = _read(fd, header_bytes), _read(fd, body_bytes)
    if len(packed) < header_bytes or len(body) < body_bytes:
        return None
    return Message(decode_header(packed), memoryview(body))


def send(fd: int, data: Buffer) -> None:
    """Send all of it. BLOCKING. Raises `BrokenPipeError`."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _read(fd: int, length: int) -> bytes:
    found = bytearray()
    while len(found) < length and (more := os.read(fd, min(READ_BYTES, length - len(found)))):
        found += more
    return bytes(found)
