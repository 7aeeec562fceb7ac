"""An idempotent producer of an append log. Made by `Log.producer`; see `client.producer`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from logyard.protocol.frame import Buffer

from ..numbering import Numbering


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


class Producer(Numbering):
    """A producer of one log."""

    __slots__ = ("_log",)

    def __init__(self, log: Appends, number: int, last: int) -> None:
        super().__init__(number, last)
        self._log = log

    async def append(self, metadata: Buffer, payload: Buffer | None = None, *, sequence: int | None = None) -> range:
        """Append one record, as `append_many` does."""
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
