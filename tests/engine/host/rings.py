"""Running nodes with a system group whose log lies in a ring."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from logyard.engine.log.ring import RingReader, ring_name
from logyard.protocol.errors import Busy
from logyard.protocol.frame import encode_frame
from tests.notes import KIND, NAME, machines

from .cluster import PATIENCE, Cluster, cluster

WIDE = 64
"""Slots, so that no snapshot comes by itself."""


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
    limits = {"ring_slots": WIDE, **limits}
    async with cluster(path, count, machines=machines, group="", **limits) as c:
        while not all(len(node.system.live) == count for node in c.nodes.values()):
            await trio.sleep(0.001)
        await c.create(NAME, machine=KIND)
        yield c
