"""The commands of the append log, as bytes: written by clients and the host, read by `machines.log`.

An append frame is uniform: one command byte stands for all of its records, so apply costs nothing per record. A
truncation names the record
by offset *and* by position: the leader looks the position up before it proposes, so that the machine needs no index
of its own.
"""

from __future__ import annotations

import struct

from logyard.payloads.reference import Position

APPEND = b"\x01"
TRUNCATE = 2
APPEND_AT = 3
RETAIN = 4
PRODUCE = 5
KEYED = 6
KEYED_REMOVAL = 7
"""The rest of these two is the key; one command a record."""
APPEND_REPLY = struct.Struct("<QI")
"""First offset, records."""
APPEND_AT_COMMAND = struct.Struct("<BQ")
"""APPEND_AT, the offset that the frame's first record must get."""
TRUNCATE_COMMAND = struct.Struct("<BQQI")
"""TRUNCATE, offset, index, ordinal."""
TRUNCATE_REPLY = struct.Struct("<Q")
"""The log's start afterwards."""
RETAIN_COMMAND = struct.Struct("<BQQQ")
"""RETAIN, milliseconds, bytes, records; 0 is no limit. Its reply is a `TRUNCATE_REPLY`."""
PRODUCE_COMMAND = struct.Struct("<BQQ")
"""PRODUCE, a producer's number, the sequence it gave the frame."""
NO_OFFSET = (1 << 64) - 1
"""As the first offset of an append's reply: these records are in the log since long ago, it is not known where."""


def append_at_command(offset: int) -> bytes:
    """Append, if the log ends at `offset`; else it is refused."""
    return APPEND_AT_COMMAND.pack(APPEND_AT, offset)


def expected_offset(command: bytes) -> int | None:
    """Return the offset that a conditional append names; None for every other command."""
    if len(command) != APPEND_AT_COMMAND.size or command[0] != APPEND_AT:
        return None
    offset: int = APPEND_AT_COMMAND.unpack(command)[1]
    return offset


def retain_command(ms: int, size: int, records: int) -> bytes:
    """Keep what is younger than `ms`, and at least the newest `size` bytes and `records`; 0 is no limit."""
    return RETAIN_COMMAND.pack(RETAIN, ms, size, records)


def produce_command(producer: int, sequence: int) -> bytes:
    """Append, unless this producer gave another frame the same sequence."""
    return PRODUCE_COMMAND.pack(PRODUCE, producer, sequence)


def produced_by(command: bytes) -> tuple[int, int] | None:
    """Return the producer and the sequence of a producer's append; None for every other command."""
    if len(command) != PRODUCE_COMMAND.size or command[0] != PRODUCE:
        return None
    _, producer, sequence = PRODUCE_COMMAND.unpack(command)
    return producer, sequence


def is_append(command: bytes) -> bool:
    """Return whether a frame's records get offsets, unless the machine refuses it."""
    return command == APPEND or expected_offset(command) is not None or produced_by(command) is not None


def truncate_command(offset: int, position: Position) -> bytes:
    """Drop every record before `offset`, which lies at `position`."""
    return TRUNCATE_COMMAND.pack(TRUNCATE, offset, position.index, position.ordinal)
