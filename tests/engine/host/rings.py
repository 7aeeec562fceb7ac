"""A system group for tests: its machine keeps its commands and no payloads, so its log lies in a ring."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack
import trio

from logyard.engine.log.ring import RingReader, ring_name
from logyard.engine.machine import Applied, Context, Machine, PayloadRange, PayloadRef, Position, Release, Sections
from logyard.machines.registry import create_machine
from logyard.protocol.errors import Busy
from logyard.protocol.frame import encode_frame

from .cluster import PATIENCE, Cluster, cluster

NAME = "_notes"
SLOTS = 16
"""The least that a ring may have; other tests have more, so that no snapshot comes by itself."""


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
    return Notes() if name == "notes" else create_machine(name, arguments)


def notes(c: Cluster, number: int, name: str = NAME) -> list[bytes]:
    found: list[bytes] = c.log(number, name).notes
    return found


async def note_once(c: Cluster, number: int, command: bytes, name: str = NAME, reserved: bool = False) -> None:
    """A command to a leader, as one entry. Raises what refuses it."""
    frame = memoryview(b"".join(encode_frame([(b"", None)], command=command)))
    await c.nodes[number].commit(c.member(number, name), [frame], reserved=reserved)


async def note(c: Cluster, number: int, *commands: bytes, name: str = NAME) -> None:
    """Commands, one after the other; who is told to wait does."""
    with trio.fail_after(PATIENCE):
        for command in commands:
            while True:
                try:
                    await note_once(c, number, command, name)
                    break
                except Busy as error:
                    await trio.sleep(error.retry_after)


def ring_path(c: Cluster, number: int, uid: int) -> Path:
    return c.path / f"node-{number}" / "rings" / ring_name(uid)


def ring_of(c: Cluster, number: int, name: str = NAME) -> RingReader:
    return c.system(number).storage.rings.reader(c.member(number, name).uid)


def said(first: int, last: int) -> list[bytes]:
    return [b"note %d" % number for number in range(first, last + 1)]


@asynccontextmanager
async def noted(path: Path, count: int = 3, **limits: Any) -> AsyncIterator[Cluster]:
    """A cluster whose one group is a system group."""
    limits = {"ring_slots": 64, **limits}
    async with cluster(path, count, machines=machines, group="", **limits) as c:
        while not all(len(node.system.live) == count for node in c.nodes.values()):
            await trio.sleep(0.001)
        await c.create(NAME, machine="notes")
        yield c
