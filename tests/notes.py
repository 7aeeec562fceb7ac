"""A machine for system groups in tests: it keeps its commands and no payloads, so its log lies in a ring."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgpack

from logyard.engine.machine import Applied, Context, Machine, PayloadRange, PayloadRef, Position, Release, Sections
from logyard.machines.registry import create_machine

KIND, NAME = "notes", "_notes"
SLOTS = 16
"""The least that a ring may have."""


class Notes:
    """Remembers every command."""

    version = 1

    def __init__(self) -> None:
        self.notes: list[bytes] = []

    def apply(self, context: Context, command: bytes, refs: tuple[PayloadRef, ...]) -> Applied:
        self.notes.append(command)
        released = [Release(Position(ref.index, ref.ordinal), Position(ref.index, ref.ordinal + 1)) for ref in refs]
        return Applied(b"", released)

    def snapshot(self) -> Sections:
        return {"notes": msgpack.packb(self.notes)}

    def restore(self, sections: Sections) -> None:
        self.notes = msgpack.unpackb(sections["notes"])

    def live_refs(self) -> Iterable[PayloadRange]:
        return ()


def machines(name: str, arguments: dict[str, Any]) -> Machine:
    """As the registry makes them, and this one."""
    return Notes() if name == KIND else create_machine(name, arguments)
