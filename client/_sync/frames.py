# Made from client/_async/frames.py by `python -m logyard.client._async.generate`: change that file.
"""Handles of a face whose every command is a frame of its own: nothing is gathered. What the blocking client and an
embedded system have; `aio` and its like send by lanes instead.

The faces add what is by hand: uploads, watches, consumers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import msgpack

from logyard.protocol import wire
from logyard.protocol.errors import LogyardError
from logyard.protocol.frame import Buffer, CommandFrame, Frame
from logyard.protocol.kv import Bodies, bodies_of

from ..admin import plain
from ..kv_requests import Command, check_consistency, fetch_call
from ..log import Appended, appended
from ..sequences import Ticket
from .caller import Caller
from .kv import KVVerbs
from .log import LogVerbs
from .machine import MachineVerbs
from .queue import QueueVerbs

FOR_LOG, FOR_KV, FOR_QUEUE = map(wire.for_kind, ("log", "kv", "queue"))


class Appends(Caller, Protocol):
    """A yard that takes frames."""

    def append(
        self, name: str, frame: Frame, timeout: float | None = None, flags: int = 0
    ) -> tuple[bytes, Ticket | None]:
        """Send a frame for a group's leader, in its session; return the machine's reply, and the frame's place in
        that."""

    def command(self, name: str, frame: list[Buffer], timeout: float | None = None) -> bytes:
        """Send a frame that has a session's number, or none; return the machine's reply."""


class FramedLog(LogVerbs):
    """An append log."""

    __slots__ = ()

    yard: Appends

    def _send(
        self, metadata: Buffer, payload: Buffer | None, timeout: float | None, flags: int, command: bytes
    ) -> tuple[Appended, int, Ticket | None]:
        frame = Frame(None, command)
        frame.put(metadata, payload)
        reply, ticket = self.yard.append(self.name, frame, timeout, flags | FOR_LOG)
        return appended(self.name, flags, reply), 0, ticket

    def _send_many(
        self,
        records: Iterable[tuple[Buffer, Buffer | None]],
        timeout: float | None,
        flags: int,
        command: bytes,
        keys: Iterable[bytes] | None,
        at: int | None,
    ) -> tuple[Appended, Ticket | None]:
        frame = Frame(at, command)
        frame.put_many(records, keys)
        reply, ticket = self.yard.append(self.name, frame, timeout, flags | FOR_LOG)
        return appended(self.name, flags, reply), ticket


class FramedKV(KVVerbs):
    """A KV group."""

    __slots__ = ()

    yard: Appends

    def _command(self, command: Command, timeout: float) -> Any:
        frame = Frame()
        frame.command = command.data
        for body in command.bodies or (None,):
            frame.put(b"", body)
        reply, _ = self.yard.append(self.name, frame, timeout, FOR_KV)
        return msgpack.unpackb(reply)

    def ask(
        self, data: bytes, timeout: float, consistency: str = "linearizable", node: int | None = None
    ) -> tuple[bytes, Bodies]:
        """Ask one question; return its packed answer, and payloads, those that it names among them."""
        call = fetch_call(self.name, [data], check_consistency(consistency), node, plain)
        header, found = self.yard.run(call, timeout)
        if not header["answers"]:
            raise LogyardError("a question got no answer")
        return header["answers"][0], bodies_of(header["places"], found)


class FramedQueue(QueueVerbs):
    """A queue."""

    __slots__ = ()

    yard: Appends

    def _send(
        self, metadata: Buffer, body: Buffer | None, command: bytes, timeout: float | None
    ) -> int:  # fmt: skip
        return (self._send_many([(metadata, body)], command, timeout))[0]

    def _send_many(
        self, messages: Iterable[tuple[Buffer, Buffer | None]], command: bytes, timeout: float | None
    ) -> tuple[int, int]:
        frame = Frame(None, command)
        frame.put_many(messages)
        reply, _ = self.yard.append(self.name, frame, timeout, FOR_QUEUE)
        found = appended(self.name, 0, reply, "a queue's")
        return found.first, found.given


class FramedMachine(MachineVerbs):
    """A group of any machine."""

    __slots__ = ()

    yard: Appends

    def _send(self, command: bytes, metadata: Buffer, payload: Buffer | None, timeout: float | None) -> bytes:
        reply, _ = self.yard.append(self.name, CommandFrame(command, metadata, payload), timeout)
        return reply
