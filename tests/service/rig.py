"""What the parts of a node's face are built on in their tests: one group with a real machine, whose log is a list."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from logyard.engine.entry import frames_of
from logyard.engine.machine import Context, PayloadRange
from logyard.engine.replica.member import Member
from logyard.engine.replica.reader import Located, Wanted
from logyard.engine.types import Buffer
from logyard.machines.log.command import APPEND
from logyard.protocol.frame import encode_frame
from tests.engine.replica.doubles import TERM, UID, Entries, Living, member_of


class Dying(Living):
    """Payloads, of which those up to an entry are released."""

    released = 0

    def is_dead_range(self, first: tuple[int, int], end: tuple[int, int]) -> bool:
        return end[0] <= self.released

    def live_units(self, index: int, units: Sequence[tuple[int, int, int]]) -> set[int]:
        return {number for number, _, _ in units if index > self.released}

    def live_within(self, first: tuple[int, int], end: tuple[int, int]) -> list[PayloadRange]:
        return []


class Group:
    """A replica that leads. Of the entries in `lost` nothing is found here, of those in `absent` nobody has
    anything."""

    def __init__(self, machine: Any, name: str = "a") -> None:
        self.member, self.core = member_of(machine)
        self.member.liveness = self.liveness = Dying()  # type: ignore[assignment]
        self.name = name
        self.machine = machine
        self.entries = Entries()
        self.lost: set[int] = set()
        self.absent: set[int] = set()
        self.fetched: list[tuple[int, int]] = []
        self.damaged: list[Exception] = []

    def apply(self, *frames: memoryview, stamp: int = 5) -> int:
        """Have an entry committed and applied; returns its index."""
        index = self.entries.add_frames(*frames, stamp=stamp)
        context = Context(UID, index, TERM, stamp, 1)
        self.machine.apply_batch(context, frames_of(self.entries.entries[-1].data))
        self.core.on_applied(index)
        self.member.wake()
        return index

    def append(self, *records: bytes, stamp: int = 5) -> int:
        """An entry of one frame of an append log."""
        frame = encode_frame([(b"m", record) for record in records], command=APPEND)
        return self.apply(memoryview(b"".join(frame)), stamp=stamp)

    def find(self, name: str, uid: int = 0) -> Member:
        assert name == self.name
        return self.member

    # Where payloads are read; `stretch` asks a peer.

    def payload_entries(self, member: Member, first: int, last: int) -> Iterator[Located]:
        for entry in self.entries.entries[max(first, 1) - 1 : last]:
            if entry.index not in self.lost:
                yield Located(entry.index, entry.term, entry.data, entry, None)

    async def read(self, member: Member, wanted: Sequence[Wanted]) -> list[Buffer]:
        found: list[Buffer] = []
        for want in wanted:
            assert want.located.entry is not None and want.located.entry.bodies is not None
            found.append(memoryview(want.located.entry.bodies[want.unit.number])[want.start : want.stop])
        return found

    async def stretch(self, member: Member, first: int, last: int) -> int:
        self.fetched.append((first, last))
        came = {index for index in self.lost - self.absent if first <= index <= last}
        self.lost -= came
        return len(came)

    def found(self, member: Member, error: Exception) -> None:
        self.damaged.append(error)
