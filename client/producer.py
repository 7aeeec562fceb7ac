"""Idempotent producers of an append log: their numbers, and the appends of both clients.

What a producer sent under a sequence is in the log once, however often it is sent, also by a program that was started
anew and whose sessions ended. A program keeps a name of its own, numbers what it sends by something that it can tell
again (a line number, a database's log position), and after a restart sends everything above `last`, or all of it again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from logyard.protocol.errors import BadRequest

from .frame import produce_command
from .records import Buffer

if TYPE_CHECKING:
    from .sync_log import Log as SyncLog


class Appends(Protocol):
    """A log that takes a producer's appends."""

    async def append_many(
        self,
        records: Iterable[tuple[Buffer, Buffer | None]],
        *,
        timeout: float | None = None,
        command: bytes = b"",
    ) -> range:
        """Append records with that command."""


NUMBER_MAX = (1 << 63) - 1


def producer_number(name: int | str) -> int:
    """A producer's number: as given, or made of its name."""
    if isinstance(name, str):
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") & NUMBER_MAX or 1
    if not 0 < name <= NUMBER_MAX:
        raise BadRequest("a producer is a text or a number from 1 up")
    return name


class Numbering:
    """`last` is the highest sequence that was given or is known to be written."""

    __slots__ = ("number", "last")

    def __init__(self, number: int, last: int) -> None:
        self.number = number
        self.last = last

    def command(self, sequence: int | None) -> bytes:
        """The command of an append with that sequence, or with the next one."""
        chosen = self.last + 1 if sequence is None else sequence
        if not 0 < chosen <= NUMBER_MAX:
            raise BadRequest("a sequence is a number from 1 up")
        self.last = max(self.last, chosen)
        return produce_command(self.number, chosen)


class Producer(Numbering):
    """A producer of one log, asynchronous. Made by `Log.producer`."""

    __slots__ = ("_log",)

    def __init__(self, log: Appends, number: int, last: int) -> None:
        super().__init__(number, last)
        self._log = log

    async def append(self, metadata: Buffer, payload: Buffer | None = None, *, sequence: int | None = None) -> range:
        """`append_many` of one record."""
        return await self.append_many([(metadata, payload)], sequence=sequence)

    async def append_many(
        self,
        records: Iterable[tuple[Buffer, Buffer | None]],
        *,
        sequence: int | None = None,
        timeout: float | None = None,
    ) -> range:
        """Append records together, unless this producer wrote that sequence before; their offsets, either way. Empty
        when they are in the log since so long ago that it does not know where."""
        return await self._log.append_many(records, timeout=timeout, command=self.command(sequence))


class SyncProducer(Numbering):
    """A producer of one log, blocking. Made by `Log.producer`."""

    __slots__ = ("_log",)

    def __init__(self, log: SyncLog, number: int, last: int) -> None:
        super().__init__(number, last)
        self._log = log

    def append(self, metadata: Buffer, payload: Buffer | None = None, *, sequence: int | None = None) -> range:
        """`append_many` of one record."""
        return self.append_many([(metadata, payload)], sequence=sequence)

    def append_many(
        self,
        records: Iterable[tuple[Buffer, Buffer | None]],
        *,
        sequence: int | None = None,
        timeout: float | None = None,
    ) -> range:
        """As `Producer.append_many`."""
        return self._log.append_many(records, timeout=timeout, command=self.command(sequence))
