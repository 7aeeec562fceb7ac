"""One append log of the blocking client: its verbs are in `_sync.log`, here is how appends leave: each in a frame of
its own.

Usable from any thread. Made by `sync.Yard.log`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import BinaryIO, cast

from logyard.protocol import wire
from logyard.protocol.errors import LogyardError
from logyard.protocol.frame import Buffer, Frame

from ._sync.log import LogVerbs
from .sequences import Sequences
from .sync_session import Appends
from .upload_sync import read_file, upload

FOR_LOG = wire.for_kind("log")


class Done:
    """What came of a frame: see `_sync.caller.Done`."""

    __slots__ = ("first", "given", "place", "numbers", "sequence")

    def __init__(self) -> None:
        self.first = -1
        self.given = 0
        self.place = (0, 0)
        self.numbers: Sequences | None = None
        self.sequence = 0


class Log(LogVerbs):
    """One append log, blocking."""

    __slots__ = ()

    yard: Appends

    def __init__(self, yard: Appends, name: str) -> None:
        self.yard = yard
        self.name = name

    def _send(
        self, metadata: Buffer, payload: Buffer | None, timeout: float | None, flags: int
    ) -> tuple[Done, int]:  # fmt: skip
        frame = Frame()
        frame.put(metadata, payload)
        return self._ask(frame, timeout, flags), 0

    def _send_many(
        self,
        records: Iterable[tuple[Buffer, Buffer | None]],
        timeout: float | None,
        flags: int,
        command: bytes,
        keys: Iterable[bytes] | None,
        at: int | None,
    ) -> Done:
        frame = Frame(at, command)
        frame.put_many(records, keys)
        return self._ask(frame, timeout, flags)

    def _ask(self, frame: Frame, timeout: float | None, flags: int) -> Done:
        reply, ticket = self.yard.append(self.name, frame, timeout, flags | FOR_LOG)
        done = Done()
        mode = flags & wire.REPLY_MODE
        if mode == wire.REPLY_APPEND:
            done.place = wire.PLACE.unpack(reply)
        elif mode != wire.REPLY_NONE:
            if len(reply) != wire.REPLY.size:
                raise LogyardError(f"{self.name}: the machine's answer is not an append log's")
            done.first, done.given = wire.REPLY.unpack(reply)
        if ticket is not None:
            done.numbers, done.sequence = ticket
        return done

    def _upload(
        self,
        metadata: Buffer,
        source: Iterable[Buffer] | BinaryIO | memoryview,
        size: int | None,
        timeout: float | None,
        compress: bool,
        at: int | None,
    ) -> int:
        if isinstance(source, memoryview):
            buffers: Iterable[Buffer] = (source,)
        else:
            buffers = read_file(cast(BinaryIO, source)) if hasattr(source, "read") else source
        return upload(self.yard, self.name, metadata, buffers, size, timeout, compress, at)
