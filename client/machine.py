"""A group of any machine in the asynchronous client: a command is a frame of its lane. Made by `aio.Yard.machine`."""

from __future__ import annotations

from logyard.protocol.frame import Buffer

from ._async.machine import MachineVerbs
from .lane import Batch, Lane
from .messages import Session, open_session
from .network import Network


class MachineBatch(Batch):
    """One command; what the machine said is taken as it came."""

    __slots__ = ()

    def __init__(self, lane: Lane, serial: int, deadline: float, flags: int, command: bytes) -> None:
        super().__init__(lane, serial, deadline, flags, command)
        if not command:
            # It is this machine's own, too, and not an append's.
            self.command = b""

    def _region(self) -> bytes:
        # As it was given: what it begins with has no meaning but its machine's.
        return self.command

    def decode(self, data: Buffer) -> bytes:
        """Return the machine's reply."""
        return bytes(data)


class MachineLane(Lane):
    """The pipeline of one group of any machine."""

    __slots__ = ()
    kind = ""

    def _begin(self, timeout: float, flags: int, command: bytes) -> Batch:
        self.close()
        self._serial += 1
        return MachineBatch(self, self._serial, self.clock() + timeout, flags, command)


class Machine(MachineVerbs):
    """The group `name`, whatever its machine; nothing is asked until it is used."""

    __slots__ = ("lane",)

    yard: Network

    def __init__(self, yard: Network, name: str) -> None:
        self.yard = yard
        self.name = name
        self.lane = yard.lane(name, MachineLane)

    async def open_session(self) -> Session:
        """Open a session of the group, for what the machine sends to it."""
        return await open_session(self.yard, self.name, Session)

    async def _send(self, command: bytes, metadata: Buffer, payload: Buffer | None, timeout: float | None) -> bytes:
        yard, lane = self.yard, self.lane
        if yard.closed or yard.window.used >= yard.window.limit:
            await yard.room()
        batch = lane.add_many([(metadata, payload)], yard.timeout if timeout is None else timeout, 0, command)
        yard.kick(lane)
        reply: bytes = await batch.pending.wait(yard.runtime.event)
        return reply
