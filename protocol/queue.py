"""A queue's commands and deliveries, sans-IO: what both faces send, and what they make of what comes.

Invariant of an `Inbox`: each delivery tag is given out once and in order, however often its message comes; a gap means
that a delivery was lost, and everything from there on is asked for again. Used by `queue` and `queue_sync`; the machine
has the same commands in `machines/queue/command.py`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from . import wire
from .errors import BadRequest, LogyardError
from .frame import SIZED
from .wire import ProtocolError

PUBLISH = struct.Struct("<BBBBQQQQ")
AT = 2
ATTACH = struct.Struct("<BIBhIIQ")
AUTO, DEAD = 1, 2
DETACH = struct.Struct("<BI")
CREDIT = struct.Struct("<BIII")
SETTLE = struct.Struct("<BIB")
ACK, REQUEUE, REJECT = 0, 1, 2
EXTEND = struct.Struct("<BI")
RANGE = struct.Struct("<QQ")
COUNT = struct.Struct("<QI")
RESEND = struct.Struct("<BIQ")
CANCEL = 0x17
PURGE = struct.Struct("<BB")
READY, DELAYED, DEAD_LETTERS = 1, 2, 4

PRIORITIES = {"normal": 0, "high": 1}
CONSUMER = 1
"""The number of the one consumer that a session has here."""
PREFETCH = 256
PREFETCH_BYTES = 4 << 20
CREDIT_MAX = 65_535
CREDIT_BYTES_MAX = 8 << 20
RANGES_MAX = 4096
REASONS = ("", "rejected", "delivery_limit", "expired", "max_length")
MS_MAX = (1 << 62) - 1


def milliseconds(seconds: float | None, what: str, least: int = 1) -> int:
    """Return a time of the caller's in ms; 0 for None. Raises `BadRequest`."""
    if seconds is None:
        return 0
    # Infinite ones, and those that are no numbers, can't be rounded.
    found = round(seconds * 1000) if abs(seconds) < MS_MAX else -1
    if not least <= found <= MS_MAX:
        raise BadRequest(f"{what} is a time in seconds, at least {least / 1000}, not {seconds!r}")
    return found


def time_to_live(seconds: float | None) -> float:
    """Return a session's, in seconds. Raises `BadRequest`, also for None."""
    return milliseconds(math.inf if seconds is None else seconds, "session_ttl") / 1000


def publish_command(
    priority: str = "normal",
    ttl: float | None = None,
    delay: float | None = None,
    at: float | None = None,
    publisher: int = 0,
    sequence: int = 0,
) -> bytes:
    """Return a publication, but for the sizes that `frame.Frame` puts behind it. Times in seconds; `at` since 1970."""
    if priority not in PRIORITIES:
        raise BadRequest(f"priority is one of {', '.join(PRIORITIES)}, not {priority!r}")
    if delay is not None and at is not None:
        raise BadRequest("a message has a delay or a time, not both")
    if not 0 <= publisher < 1 << 64 or not 0 <= sequence <= MS_MAX or bool(publisher) != bool(sequence):
        raise BadRequest("a publisher has a number, and its messages have sequences from 1 on")
    due = milliseconds(at, "at") if at is not None else milliseconds(delay, "delay", 0)
    flags = AT if at is not None else 0
    live = milliseconds(ttl, "ttl")
    return PUBLISH.pack(SIZED, PRIORITIES[priority], flags, 0, live, due, publisher, sequence)


PLAIN = publish_command()
"""A publication without options."""


def attach_command(
    prefetch: int, prefetch_bytes: int, priority: int, lease: float | None, dead: bool, auto: bool
) -> bytes:
    """Begin to consume. Raises `BadRequest`."""
    if not 0 <= prefetch <= CREDIT_MAX or not 0 < prefetch_bytes <= CREDIT_BYTES_MAX or (auto and not prefetch):
        raise BadRequest(f"prefetch is up to {CREDIT_MAX} messages and {CREDIT_BYTES_MAX} bytes")
    if not -(1 << 15) <= priority < 1 << 15:
        raise BadRequest("a consumer's priority is a number of 16 bits")
    flags = (AUTO if auto else 0) | (DEAD if dead else 0)
    return ATTACH.pack(0x11, CONSUMER, flags, priority, prefetch, prefetch_bytes, milliseconds(lease, "lease"))


def detach_command() -> bytes:
    """End."""
    return DETACH.pack(0x12, CONSUMER)


def credit_command(messages: int, size: int) -> bytes:
    """Return the command that gives more credit."""
    if not 0 <= messages <= CREDIT_MAX:
        raise BadRequest(f"credit is up to {CREDIT_MAX} messages")
    return CREDIT.pack(0x13, CONSUMER, messages, size)


def settle_command(what: int, ranges: Iterable[tuple[int, int]]) -> bytes:
    """Settle messages by rising ranges of tags."""
    return SETTLE.pack(0x14, CONSUMER, what) + b"".join(RANGE.pack(*one) for one in ranges)


def settle_commands(what: int, tags: Iterable[tuple[int, int]]) -> Iterator[tuple[bytes, int]]:
    """Settle messages by ranges of tags, in any order: as few commands as possible, each with how many it means."""
    merged = merge(tags)
    for at in range(0, len(merged), RANGES_MAX):
        part = merged[at : at + RANGES_MAX]
        yield settle_command(what, part), sum([last - first + 1 for first, last in part])


def extend_commands(tags: Iterable[tuple[int, int]]) -> Iterator[bytes]:
    """Return the commands with which the leases of these messages begin anew: as few as possible."""
    merged = merge(tags)
    for at in range(0, len(merged), RANGES_MAX):
        yield EXTEND.pack(0x15, CONSUMER) + b"".join(RANGE.pack(*one) for one in merged[at : at + RANGES_MAX])


def resend_command(tag: int) -> bytes:
    """Return the command that has everything from that tag on sent once more."""
    return RESEND.pack(0x16, CONSUMER, tag)


def cancel_command(ids: Sequence[int]) -> bytes:
    """Take delayed messages back."""
    if not ids or not all(0 < number < 1 << 64 for number in ids):
        raise BadRequest("the ids of one or more messages are needed")
    return bytes((CANCEL,)) + struct.pack(f"<{len(ids)}Q", *ids)


def purge_command(ready: bool, delayed: bool, dead: bool) -> bytes:
    """Drop what waits."""
    return PURGE.pack(0x18, READY * ready | DELAYED * delayed | DEAD_LETTERS * dead)


def count_of(reply: bytes) -> int:
    """Return how many messages a command meant and found."""
    found: int = COUNT.unpack(reply)[0]
    return found


def stats_of(reply: bytes) -> dict[str, Any]:
    """Return the answer to `STATS`."""
    found: dict[str, Any] = wire.unpack(reply)
    return found


STATS = wire.pack(["stats"])


def merge(tags: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges in order, joined where they touch."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(tags):
        if merged and first <= merged[-1][1] + 1:
            if last > merged[-1][1]:
                merged[-1] = (merged[-1][0], last)
        else:
            merged.append((first, last))
    return merged


class Message:
    """A message as its consumer has it. `tag` names this delivery, `id` the message; `deliveries` failed before, it was
    published at `timestamp` (ms of log time); `reason`: why it is a dead letter."""

    __slots__ = ("tag", "id", "metadata", "body", "deliveries", "timestamp", "reason")

    def __init__(
        self, tag: int, id: int, metadata: bytes, body: bytes | None, deliveries: int, timestamp: int, reason: str
    ) -> None:
        self.tag = tag
        self.id = id
        self.metadata = metadata
        self.body = body
        self.deliveries = deliveries
        self.timestamp = timestamp
        self.reason = reason

    def __repr__(self) -> str:
        size = None if self.body is None else len(self.body)
        return f"Message(tag={self.tag}, id={self.id}, body={size} bytes, deliveries={self.deliveries})"


class NotHeld(LogyardError):
    """Messages that were settled were not their consumer's any more: they were settled before, or their lease or the
    consumer's session ended, and they come again. `settled` were, `missed` were not."""

    code = "not_held"

    @property
    def settled(self) -> int:
        """How many were settled."""
        return int(self._number("settled"))

    @property
    def missed(self) -> int:
        """How many were not."""
        return int(self._number("missed"))


def check_held(name: str, settled: int, missed: int) -> int:
    """Return how many messages were settled. Raises `NotHeld` if some were not this consumer's any more."""
    if missed:
        raise NotHeld(
            f"{name}: {missed} of {settled + missed} messages were not this consumer's any more when they were settled "
            "(twice, or after their lease, and then they come again): extend leases, or consume with longer ones",
            settled=settled,
            missed=missed,
        )
    return settled


class Settles:
    """What is to be settled, gathered, and how much of what was told the queue has found.

    The queue answers a command with a number of messages, so those up to a tag (`multiple`) go apart from the single
    ones: of these exactly as many must be found as there are tags, of those one at least.
    """

    __slots__ = ("_tags", "_settled", "_missed")

    def __init__(self) -> None:
        self._tags: dict[tuple[int, bool], list[int]] = {}
        self._settled = self._missed = 0

    def __bool__(self) -> bool:
        return bool(self._tags)

    def add(self, what: int, tag: int, multiple: bool) -> None:
        """Settle a message, or all up to it."""
        self._tags.setdefault((what, multiple), []).append(tag)

    def take(self) -> list[tuple[bytes, int]]:
        """Return the commands for all of it, each with how many messages it must find."""
        tags, self._tags = self._tags, {}
        commands: list[tuple[bytes, int]] = []
        for (what, multiple), some in tags.items():
            if multiple:
                continue
            upto = max(tags.get((what, True), (0,)))
            commands += settle_commands(what, [(tag, tag) for tag in some if tag > upto])
        for (what, multiple), some in tags.items():
            if multiple:
                commands.append((settle_command(what, [(1, max(some))]), 1))
        return commands

    def answered(self, reply: bytes, wanted: int) -> None:
        """Take the queue's answer to a command of `take`."""
        count = count_of(reply)
        self._settled += count
        self._missed += max(0, wanted - count)

    def told(self, name: str) -> int:
        """Return how many messages were settled since this was asked last. Raises `NotHeld` if not all were."""
        settled, missed, self._settled, self._missed = self._settled, self._missed, 0, 0
        return check_held(name, settled, missed)


class Inbox:
    """Deliveries to messages. `next`: the tag that has to come now; `lost`: something has to be sent again."""

    __slots__ = ("next", "lost", "_dropped")

    def __init__(self) -> None:
        self.next = 1
        self.lost = False
        self._dropped = 0

    def resend(self) -> bytes:
        """Return the command that asks for what was lost, and forget that it was."""
        self.lost = False
        return resend_command(self.next)

    def unheard(self) -> None:
        """Take note that what `resend` asked for is not known to come: it has to be asked for again."""
        self.lost = True

    def pushed(self, header: Mapping[str, Any], data: memoryview) -> list[Message]:
        """Return the messages of a PUSH that are new. Raises `ProtocolError`."""
        try:
            dropped = header["dropped"]
            if dropped > self._dropped:
                self.lost = True
            self._dropped = dropped
            if header["kind"] != "records":
                return []
            _, first, end, rows = wire.unpack(header["tag"])
            if first > self.next:
                self.lost = True
                return []
            found = self._messages(rows, header["records"], data)
            self.next = max(self.next, end)
            return found
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ProtocolError(f"a delivery can't be read: {error!r}") from None

    def _messages(
        self, rows: Sequence[Sequence[int]], records: Sequence[Sequence[int]], data: memoryview
    ) -> list[Message]:
        found: list[Message] = []
        place = at = 0
        following = self.next
        for tag, count, number, index, ordinal, deliveries, stamp, reason in rows:
            for step in range(count):
                if place == len(records) or records[place][:2] != [index, ordinal + step]:
                    # Settled by somebody else meanwhile: its lease was over.
                    continue
                _, _, head, body = records[place]
                place += 1
                start = at
                at += head + max(body, 0)
                if head < 0 or at > len(data):
                    raise ProtocolError("a delivery is cut short")
                if tag + step < following:
                    continue
                content = bytes(data[start + head : at]) if body >= 0 else None
                metadata = bytes(data[start : start + head]) if head else b""
                found.append(Message(tag + step, number + step, metadata, content, deliveries, stamp, REASONS[reason]))
        return found
