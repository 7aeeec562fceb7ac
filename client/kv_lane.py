"""The pipeline of one KV group: the operations of a turn share a frame, each with its own payloads and its own reply.

Everything about order, sessions and sending again is the lane's. Used by `kv`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import msgpack

from logyard.protocol.errors import LogyardError
from logyard.protocol.frame import UNIFORM, Buffer, encode_parts

from .fork import HERE, elsewhere
from .lane import BATCH_BYTES, BATCH_RECORDS, FEW_BYTES, FEW_RECORDS, SHARED_S, Batch, Lane

COMMAND_OVERHEAD = 4


class KvBatch(Batch):
    """Operations of one frame: the first record of each has its command, further ones are its other payloads."""

    __slots__ = ("alone", "commands", "operations", "_replies")

    def __init__(self, lane: Lane, serial: int, deadline: float, alone: bool = False) -> None:
        super().__init__(lane, serial, deadline)
        # No other operation joins it.
        self.alone = alone
        self.commands: list[bytes] = []
        self.operations = 0
        self._replies: list[Any] | None = None

    def put_operation(self, command: bytes, bodies: Sequence[Buffer]) -> int:
        """Add an operation; return the bytes that it costs. Raises `BadRequest` before anything is changed."""
        cost = self.put(b"", bodies[0] if bodies else None)
        self.commands.append(command)
        for body in bodies[1:]:
            cost += self.put(b"", body)
            self.commands.append(b"")
        extra = len(command) + COMMAND_OVERHEAD * max(1, len(bodies))
        self.size += extra
        self.operations += 1
        return cost + extra

    def encode(self, session: int = 0, sequence: int = 0) -> list[Buffer]:
        """Return the frame's buffers."""
        if self.operations == 1:
            return encode_parts(
                self.table, self.heads, self.small, self.large, self.commands[0], flags=UNIFORM, session=session,
                sequence=sequence,
            )  # fmt: skip
        lengths = struct.pack(f"<{len(self.commands)}I", *map(len, self.commands))
        region = b"".join((lengths, *self.commands))
        return encode_parts(
            self.table, self.heads, self.small, self.large, region, flags=0, session=session, sequence=sequence
        )

    def decode(self, data: Buffer) -> bytes:
        """Return the replies of all its operations, packed."""
        return bytes(data)

    def answer(self, position: int, packed: bytes) -> Any:
        """Return the reply of one operation, unpacked, out of those of all."""
        if self._replies is None:
            unpacker = msgpack.Unpacker(max_buffer_size=len(packed) + 1)
            unpacker.feed(packed)
            self._replies = list(unpacker)
            if len(self._replies) != self.operations:
                raise LogyardError(f"{self.lane.name}: {self.operations} operations got {len(self._replies)} replies")
        return self._replies[position]


class KvLane(Lane):
    """See the module."""

    __slots__ = ()
    kind = "kv"

    def add_operation(
        self, command: bytes, bodies: Sequence[Buffer], timeout: float, alone: bool = False
    ) -> tuple[KvBatch, int]:
        """Put an operation into the open batch, or `alone` into one of its own; return the batch and its number
        there."""
        if self.pid != HERE.pid:
            raise elsewhere(self.pid)
        batch = self.open
        size = len(command) + sum(map(len, bodies))
        if (
            not isinstance(batch, KvBatch)
            or alone
            or batch.alone
            or not (timeout == self._open_for or -SHARED_S < timeout - self._open_for < SHARED_S)
            or (batch.size >= BATCH_BYTES and (len(batch.heads) >= FEW_RECORDS or batch.size + size > FEW_BYTES))
            or len(batch.heads) + len(bodies) >= BATCH_RECORDS
            or size >= BATCH_BYTES
        ):
            self.close()
            self._serial += 1
            batch = KvBatch(self, self._serial, self.clock() + timeout, alone)
            self.open, self._open_for = batch, timeout
        number = batch.operations
        self.window.hold(batch.put_operation(command, bodies))
        return batch, number
