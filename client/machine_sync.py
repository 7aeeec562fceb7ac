"""A group of any machine in the blocking client. Made by `sync.Yard.machine`."""

from __future__ import annotations

from logyard.protocol.frame import Buffer, Frame

from ._sync.machine import MachineVerbs
from .sync_session import Appends


class CommandFrame(Frame):
    """One command with one record."""

    __slots__ = ()

    def __init__(self, command: bytes, metadata: Buffer, payload: Buffer | None) -> None:
        super().__init__()
        self.command = command
        self.put(metadata, payload)

    def _region(self) -> bytes:
        # As it was given: what it begins with has no meaning but its machine's.
        return self.command


class Machine(MachineVerbs):
    """The group `name`, whatever its machine; nothing is asked until it is used."""

    __slots__ = ()

    yard: Appends

    def __init__(self, yard: Appends, name: str) -> None:
        self.yard = yard
        self.name = name

    def _send(self, command: bytes, metadata: Buffer, payload: Buffer | None, timeout: float | None) -> bytes:
        reply, _ = self.yard.append(self.name, CommandFrame(command, metadata, payload), timeout)
        return reply
