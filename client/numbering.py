"""The number of a producer, and the sequences of what it appends. Sans-IO; used by the producers of both faces."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

from logyard.protocol.errors import BadRequest
from logyard.protocol.frame import Buffer, Epoch, produce_command, view_of
from logyard.protocol.topics import SLOTS

NUMBER_MAX = (1 << 63) - 1
LANE_MAX = (1 << 32) - 1
LENGTHS = struct.Struct("<Iq")
"""Of a record's metadata and payload; -1: it has none."""


def content_hash(records: Iterable[tuple[Buffer, Buffer | None]]) -> bytes:
    """Return the 128-bit xxh3 of records as they are given, before any compression: alike for the same records only."""
    # Loaded here: who writes no epochs needs msgpack alone.
    from xxhash import xxh3_128

    found = xxh3_128()
    for head, body in records:
        body_bytes = -1 if body is None else memoryview(body).nbytes
        found.update(LENGTHS.pack(memoryview(head).nbytes, body_bytes))
        found.update(head)
        if body is not None:
            found.update(body)
    return found.digest()


def slot_of(key: Buffer) -> int:
    """Return the slot of a topic's key: the lowest 14 bits of its xxh3-64."""
    # Loaded here, as above.
    from xxhash import xxh3_64_intdigest

    try:
        return xxh3_64_intdigest(key) & SLOTS - 1
    except TypeError:
        view_of("a key", key)
        raise


def producer_number(name: int | str) -> int:
    """Return a producer's number: as given, or made of its name."""
    if isinstance(name, str):
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") & NUMBER_MAX or 1
    if not 0 < name <= NUMBER_MAX:
        raise BadRequest("a producer is a text or a number from 1 up")
    return name


def epoch_of(producer: int | str, incarnation: int, epoch: int) -> Epoch:
    """Return the epoch of a fenced producer. Raises `BadRequest`."""
    if not (0 < incarnation <= NUMBER_MAX and 0 <= epoch <= NUMBER_MAX):
        raise BadRequest("an incarnation is a number from 1 up, an epoch one from 0 up")
    return Epoch(producer_number(producer), incarnation, epoch)


class Numbering:
    """`last` is the highest sequence that was given or is known to be written."""

    __slots__ = ("number", "last")

    def __init__(self, number: int, last: int) -> None:
        self.number = number
        self.last = last

    def command(self, sequence: int | None) -> bytes:
        """Return the command of an append with that sequence, or with the next one."""
        chosen = self.last + 1 if sequence is None else sequence
        if not 0 < chosen <= NUMBER_MAX:
            raise BadRequest("a sequence is a number from 1 up")
        self.last = max(self.last, chosen)
        return produce_command(self.number, chosen)
