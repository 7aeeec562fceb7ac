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
APPEND_REPLY = struct.Struct("<QI")
"""First offset, records."""
APPEND_AT_COMMAND = struct.Struct("<BQ")
"""APPEND_AT, the offset that the frame's first record must get."""
TRUNCATE_COMMAND = struct.Struct("<BQQI")
"""TRUNCATE, offset, index, ordinal."""
TRUNCATE_REPLY = struct.Struct("<Q")
"""The log's start afterwards."""


def append_at_command(offset: int) -> bytes:
    """Append, if the log ends at `offset`; else it is refused."""
    return APPEND_AT_COMMAND.pack(APPEND_AT, offset)


def expected_offset(command: bytes) -> int | None:
    """The offset that a conditional append names; None for every other command."""
    if len(command) != APPEND_AT_COMMAND.size or command[0] != APPEND_AT:
        return None
    offset: int = APPEND_AT_COMMAND.unpack(command)[1]
    return offset


def truncate_command(offset: int, position: Position) -> bytes:
    """Drop every record before `offset`, which lies at `position`."""
    return TRUNCATE_COMMAND.pack(TRUNCATE, offset, position.index, position.ordinal)
