"""The commands of the append log, as bytes: written by clients and the host, read by `machines.log`.

An append frame is uniform: one command byte stands for all of its records, so apply costs nothing per record. A
truncation names the record
by offset *and* by position: the leader looks the position up before it proposes, so that the machine needs no index
of its own.
"""

from __future__ import annotations

import struct

from logyard.payloads.reference import Position
from logyard.protocol.frame import (
    APPEND_AT,
    APPEND_AT_CODE,
    APPEND_COMMAND,
    EPOCH_APPEND,
    EPOCH_APPEND_CODE,
    EPOCH_DONE,
    EPOCH_DONE_CODE,
    PRODUCE,
    PRODUCE_CODE,
    Epoch,
)
from logyard.protocol.topics import KEYED_APPEND, KEYED_APPEND_CODE, KEYED_PRODUCE, KEYED_PRODUCE_CODE

APPEND = APPEND_COMMAND
TRUNCATE = 2
RETAIN = 4
KEYED = 6
KEYED_REMOVAL = 7
"""The rest of these two is the key; one command a record. Codes 3, 5, 8 and 9 are `protocol.frame`'s, 10 to 15
`protocol.topics`'."""
APPEND_REPLY = struct.Struct("<QI")
"""First offset, records."""
TRUNCATE_COMMAND = struct.Struct("<BQQI")
"""TRUNCATE, offset, index, ordinal."""
TRUNCATE_REPLY = struct.Struct("<Q")
"""The log's start afterwards."""
RETAIN_COMMAND = struct.Struct("<BQQQ")
"""RETAIN, milliseconds, bytes, records; 0 is no limit. Its reply is a `TRUNCATE_REPLY`."""


def expected_offset(command: bytes) -> int | None:
    """Return the offset that a conditional append names; None for every other command."""
    if len(command) != APPEND_AT.size or command[0] != APPEND_AT_CODE:
        return None
    offset: int = APPEND_AT.unpack(command)[1]
    return offset


def retain_command(ms: int, size: int, records: int) -> bytes:
    """Keep what is younger than `ms`, and at least the newest `size` bytes and `records`; 0 is no limit."""
    return RETAIN_COMMAND.pack(RETAIN, ms, size, records)


def produced_by(command: bytes) -> tuple[int, int] | None:
    """Return the producer and the sequence of a producer's append; None for every other command."""
    if len(command) != PRODUCE.size or command[0] != PRODUCE_CODE:
        return None
    _, producer, sequence = PRODUCE.unpack(command)
    return producer, sequence


def epoch_append_of(command: bytes) -> tuple[Epoch, int, int, bytes] | None:
    """Return the epoch, the lane, the number and the hash of a fenced append; None for every other command."""
    if len(command) != EPOCH_APPEND.size or command[0] != EPOCH_APPEND_CODE:
        return None
    _, producer, incarnation, epoch, lane, number, content = EPOCH_APPEND.unpack(command)
    return Epoch(producer, incarnation, epoch), lane, number, content


def epoch_done_of(command: bytes) -> Epoch | None:
    """Return the epoch that a command closes; None for every other command."""
    if len(command) != EPOCH_DONE.size or command[0] != EPOCH_DONE_CODE:
        return None
    return Epoch(*EPOCH_DONE.unpack(command)[1:])


def routed_by(command: bytes) -> tuple[int, int, tuple[int, int] | None] | None:
    """Return the topic's id and the epoch of the layout by which its records were routed, and their producer with its
    sequence, if they have one; None for every other command."""
    if len(command) == KEYED_APPEND.size and command[0] == KEYED_APPEND_CODE:
        _, topic, epoch = KEYED_APPEND.unpack(command)
        return topic, epoch, None
    if len(command) == KEYED_PRODUCE.size and command[0] == KEYED_PRODUCE_CODE:
        _, topic, epoch, producer, sequence = KEYED_PRODUCE.unpack(command)
        return topic, epoch, (producer, sequence)
    return None


def is_append(command: bytes) -> bool:
    """Return whether a frame's records get offsets, unless the machine refuses it."""
    return (
        command == APPEND
        or expected_offset(command) is not None
        or produced_by(command) is not None
        or epoch_append_of(command) is not None
        or routed_by(command) is not None
    )


def truncate_command(offset: int, position: Position) -> bytes:
    """Drop every record before `offset`, which lies at `position`."""
    return TRUNCATE_COMMAND.pack(TRUNCATE, offset, position.index, position.ordinal)
