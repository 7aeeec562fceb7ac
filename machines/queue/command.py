"""The commands of the queue, as bytes: written by clients (`client/queue_wire.py` has the same), read by
`machines.queue`.

A publishing frame is uniform: one command stands for all of its messages and brings their sizes along, because the
machine never sees a body. Every number is little-endian; docs/machines/queue.md says what the commands do.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from logyard.engine.machine import Reject

PUBLISH = 0x10
ATTACH = 0x11
DETACH = 0x12
CREDIT = 0x13
SETTLE = 0x14
EXTEND = 0x15
RESEND = 0x16
CANCEL = 0x17
PURGE = 0x18
TOUCH = 0x19
JUMP = 0x1A

PUBLISH_COMMAND = struct.Struct("<BBBBQQQQ")
"""PUBLISH, priority (0, 1), flags, 0, time to live in ms (0: none), delay in ms or due time in ms since 1970 (0: now),
publisher (0: none), its sequence for the first message. Behind it u32 sizes: one for all, or one of each (EACH)."""
EACH = 1
AT = 2
"""Flags: a size of each message; the delay is a time."""
PUBLISH_REPLY = struct.Struct("<QI")
"""The first message's id, how many were taken: 0 of a repetition."""
ATTACH_COMMAND = struct.Struct("<BIBhIIQ")
"""ATTACH, consumer, flags, priority, credit in messages, credit in bytes, lease in ms (0: the queue's)."""
AUTO = 1
DEAD = 2
"""Flags: what is settled gives its credit back; from the dead letters."""
DETACH_COMMAND = struct.Struct("<BI")
CREDIT_COMMAND = struct.Struct("<BIII")
"""CREDIT, consumer, messages, bytes."""
SETTLE_HEAD = struct.Struct("<BIB")
"""SETTLE, consumer, what (ACK, REQUEUE, REJECT); ranges behind it."""
ACK = 0
REQUEUE = 1
REJECT = 2
EXTEND_HEAD = struct.Struct("<BI")
RANGE = struct.Struct("<QQ")
"""First and last delivery tag."""
COUNT_REPLY = struct.Struct("<QI")
"""Messages that a command meant and found; 0."""
RESEND_COMMAND = struct.Struct("<BIQ")
"""RESEND, consumer, from which delivery tag on."""
CANCEL_HEAD = struct.Struct("<B")
ID = struct.Struct("<Q")
PURGE_COMMAND = struct.Struct("<BB")
"""PURGE, which: any of READY, DELAYED, DEAD_LETTERS."""
READY = 1
DELAYED = 2
DEAD_LETTERS = 4
TOUCH_COMMAND = bytes((TOUCH,))
JUMP_COMMAND = struct.Struct("<BQ")
"""JUMP, by how many ms; the host's own. From version 2 on: log time caught up with the wall clock in this entry."""

CREDIT_MAX = 65_535
CREDIT_BYTES_MAX = 8 << 20
"""What is under way to one consumer: less than what waits for a session at most (`delivery_queue_bytes`)."""
RANGES_MAX = 4096


class Publish(NamedTuple):
    """A publishing frame's command. `size` is every message's, or `sizes` has a packed u32 for each."""

    priority: int
    ttl_ms: int
    due: int
    at: bool
    publisher: int
    sequence: int
    size: int
    sizes: bytes


def malformed(what: str) -> Reject:
    """Return the refusal of bytes that are no command."""
    return Reject("bad_request", f"not a queue's command: {what}")


def parse_publish(command: bytes, records: int, total: int) -> Publish:
    """Return the command of a frame with `records` messages of together `total` bytes, heads and bodies. Raises
    `Reject`."""
    head = PUBLISH_COMMAND.size
    if len(command) < head + 4:
        raise malformed("a publication is cut short")
    _, priority, flags, _, ttl, due, publisher, sequence = PUBLISH_COMMAND.unpack_from(command)
    if priority > 1 or flags & ~(EACH | AT) or max(ttl, due) >= 1 << 62 or sequence >= 1 << 62:
        raise malformed("an option of a publication is out of its range")
    sizes = command[head:]
    if not flags & EACH:
        size = int.from_bytes(sizes, "little")
        if len(sizes) != 4 or size * records != total:
            raise malformed(f"{records} messages of {size} bytes are not {total} bytes")
        return Publish(priority, ttl, due, bool(flags & AT), publisher, sequence, size, b"")
    if len(sizes) != 4 * records or sum(struct.unpack(f"<{records}I", sizes)) != total:
        raise malformed(f"the sizes of {records} messages do not add up to {total} bytes")
    return Publish(priority, ttl, due, bool(flags & AT), publisher, sequence, 0, sizes)


def parse_ranges(command: bytes, start: int) -> list[tuple[int, int]]:
    """Return the tag ranges at the end of a command: rising, none overlapping. Raises `Reject`."""
    length = len(command) - start
    if length <= 0 or length % RANGE.size or length > RANGES_MAX * RANGE.size:
        raise malformed(f"1 to {RANGES_MAX} ranges of delivery tags are needed")
    ranges = list(RANGE.iter_unpack(command[start:]))
    last = 0
    for first, end in ranges:
        if not last < first <= end:
            raise malformed("ranges of delivery tags rise and do not overlap")
        last = end
    return ranges
