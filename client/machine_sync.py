"""A group of any machine in the blocking client. Made by `sync.Yard.machine`."""

from __future__ import annotations

from ._sync.frames import Appends, FramedMachine


class Machine(FramedMachine):
    """The group `name`, whatever its machine; nothing is asked until it is used."""

    __slots__ = ()

    def __init__(self, yard: Appends, name: str) -> None:
        self.yard = yard
        self.name = name
