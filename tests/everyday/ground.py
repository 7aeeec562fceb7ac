"""The ground of the matrix: one cluster of three real engines with sockets for a situation, and every face on it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from logyard.client import log
from logyard.client.aio import Yard, connect
from logyard.client.lane import Batch, Lane
from logyard.engine.config import SystemConfig
from logyard.engine.log import space
from logyard.engine.log.space import Space
from logyard.engine.machine import Machine
from logyard.engine.replica.delivery import Delivery
from logyard.engine.replica.sessions import EXPIRE
from logyard.machines.log import AppendLog
from logyard.machines.registry import create_machine
from logyard.protocol.errors import LogyardError, NoSpace
from logyard.service.embedded import EmbeddedSystem, open_system
from tests.engine.host.cluster import SMALL, Cluster, cluster, until
from tests.inside import engine_of
from tests.service.test_exactly_once import Doors

from .arguments import ANSWER_S, SEEDED
from .faces import FACES, HELD, EmbeddedFace, Face

KINDS = ("log", "kv", "queue")
SLEEP_MS = 150
NODES = (1, 2, 3)
LEASE = 5
"""Of each KV group; the number behind it is one, too."""


class Own(AppendLog):
    """A machine of one's own, which does what a log does."""


def machines(name: str, arguments: dict[str, Any]) -> Machine:
    """Make a group's machine."""
    return Own() if name == "own" else create_machine(name, arguments)


async def unchanged(*_: Any) -> None:
    """Stands for a look at a disk that stays full."""


def told_at_once(lane: Lane, batch: Batch, error: LogyardError) -> None:
    """Stands for `Lane._again` of a client whose patience ends with the first refusal for want of room, and not by a
    clock, which on a busy machine may be faster than the answer."""
    if isinstance(error, NoSpace):
        lane._finish(batch, lane._overdue(batch, error))
    else:
        AGAIN(lane, batch, error)


AGAIN = Lane._again


async def seed(yard: Yard | EmbeddedSystem, name: str, kind: str) -> None:
    """Put something into a group."""
    if kind in ("log", "own"):
        await yard.log(name).append_many([(b"seed", b"body")] * SEEDED)
    elif name == "members":
        return
    elif kind == "kv":
        group = yard.kv(name)
        for lease in (LEASE, LEASE + 1):
            await group.grant(3600, lease=lease)
        await group.put(b"key", b"value", lease=LEASE)
    else:
        await yard.queue(name).publish_many([(b"seed", b"body")] * (2 * HELD))


class Ground:
    """`faces` by name; `groups`: (name, kind, members) of all."""

    def __init__(
        self, run: Cluster, doors: Doors, admin: Yard, faces: dict[str, Any], patch: pytest.MonkeyPatch
    ) -> None:
        self.run = run
        self.doors = doors
        self.admin = admin
        self.faces = faces
        self.patch = patch
        self.groups = [
            group
            for name in faces
            for group in (*((f"{kind}-{name}", kind, NODES) for kind in KINDS), (f"spare-{name}", "log", NODES[:2]))
        ] + [("members", "kv", NODES), *([("own-cli", "own", NODES)] if "cli" in faces else [])]

    async def create(self) -> None:
        """All groups, with something in each."""
        for name, kind, members in self.groups:
            await self.admin.create(name, machine=kind, members=list(members))
        # A majority is enough for a creation, and a node that is busy learns of it later.
        await until(lambda: all(self._has(node, name) for name, _, members in self.groups for node in members))
        async with trio.open_nursery() as nursery:
            for name, kind, _ in self.groups:
                nursery.start_soon(seed, self.admin, name, kind)

    def _has(self, number: int, name: str) -> bool:
        system = self.run.system(number)
        return system.has(system.names.get(name, 0))

    # Situations; each is what `table.SITUATIONS` says.

    async def expired(self) -> None:
        for name, *_ in self.groups:
            leader = await self.run.leader(name)
            member = self.run.member(leader, name)
            if member.sessions is not None and member.sessions.by_id:
                await self.run.system(leader).replicas.commands.commit(member, EXPIRE, *member.sessions.by_id)
        await self.over()

    async def over(self) -> None:
        """Until every client knows that what it held is over: before, it may be told so or not by a verb that asks
        nobody."""
        await until(lambda: all(face.is_over() for face in self.faces.values()), "the clients' sessions are over")

    async def asleep(self) -> None:
        systems = [node.system for node in self.run.nodes.values()]
        await until(
            lambda: not any(system.members for system in systems),
            lambda: f"all groups sleep: {[[one.spec.name for one in system.members.values()] for system in systems]}",
        )

    async def leader(self) -> None:
        for name, _, members in self.groups:
            leader = await self.run.leader(name)
            await self.run.lead(next(node for node in members if node != leader), name)

    async def restarted(self) -> None:
        for number in NODES:
            await self.doors.crash(number)
        for number in NODES:
            await self.doors.start(number)

    async def cut(self) -> None:
        for number in NODES:
            await self.doors.cut(number)

    async def anew(self) -> None:
        # Nobody looks after a listener while its group is not there: it would be told that there is none.
        deliveries = [self.run.system(number).replicas.delivery for number in NODES]
        made = trio.Event()
        self.patch.setattr(Delivery, "stirred", lambda *_: made.wait())
        for delivery in deliveries:
            for uid in list(delivery._lots):
                delivery.stir(uid)
        for name, *_ in self.groups:
            await self.admin.delete(name)
        await until(lambda: not any(self.run.system(number).names for number in NODES), "all are gone")
        await self.create()
        self.patch.undo()
        made.set()
        await self.over()

    async def full(self) -> None:
        # What an engine does as its disk fills is tried with the engine: here every write is refused from now on.
        self.patch.setattr(Space, "takes", lambda *_: False)
        self.patch.setattr(Space, "look", unchanged)
        # Room is promised for later than any client waits, so that it says at once that it was refused.
        self.patch.setattr(space, "RETRY_S", 3600.0)
        self.patch.setattr(Lane, "_again", told_at_once)
        for number in NODES:
            self.run.system(number).storage.space.full = True

    async def happen(self, situation: str) -> None:
        """Bring a situation about; those that are of arguments alone need nothing."""
        change = getattr(self, situation, None)
        if change is not None:
            await change()


@asynccontextmanager
async def ground(path: Path, situation: str, names: frozenset[str]) -> AsyncIterator[Ground]:
    """The faces of those names, in a situation."""
    size = situation if situation in ("largest", "empty") else "usual"
    limits: dict[str, Any] = {"hibernate_after_ms": SLEEP_MS} if situation == "asleep" else {}
    async with AsyncExitStack() as stack:
        run = await stack.enter_async_context(cluster(path, 3, group="", machines=machines, **limits))
        nursery = await stack.enter_async_context(trio.open_nursery())
        stack.callback(nursery.cancel_scope.cancel)
        doors = Doors(run, nursery)
        for number in run.ids:
            await doors.open(number)
        await until(lambda: all(len(one.system.live) == 3 for one in run.nodes.values()), "all are live")
        servers = list(doors.addresses.values())
        async with connect(servers) as admin:
            faces: dict[str, Face] = {}
            for kind in FACES:
                face = kind(servers, size, situation == "kind")
                if face.face in names:
                    faces[face.face] = face
            found = Ground(run, doors, admin, faces, stack.enter_context(pytest.MonkeyPatch.context()))
            found.patch.setattr(log, "ANSWER_S", ANSWER_S)
            await found.create()
            async with AsyncExitStack() as opened:
                for one in faces.values():
                    await one.open(opened)
                if situation not in ("first", "kind"):
                    async with trio.open_nursery() as warming:
                        for one in faces.values():
                            # A group that is watched does not sleep.
                            warming.start_soon(one.warm, situation == "asleep")
                await found.happen(situation)
                yield found


EMBEDDED_SITUATIONS = ("first", "asleep", "restarted", "anew", "full", "largest", "empty", "kind")
"""Those that a process with a system of its own may be in: it has no connections and no other leader."""


@asynccontextmanager
async def embedded_face(path: Path, situation: str) -> AsyncIterator[EmbeddedFace]:
    """A system of this process, in a situation."""
    size = situation if situation in ("largest", "empty") else "usual"
    face = EmbeddedFace([], size, situation == "kind")
    config = SystemConfig(**{**SMALL, "hibernate_after_ms": SLEEP_MS if situation == "asleep" else 0})
    names = {**{f"{kind}-{face.name}": kind for kind in KINDS}, face.spare: "log", face.another: "log"}

    async def begin(system: EmbeddedSystem) -> None:
        for name, kind in names.items():
            await system.create(name, machine=kind)
            await seed(system, name, kind)

    async with AsyncExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(log, "ANSWER_S", ANSWER_S)
        if situation == "restarted":
            async with open_system(path, config) as system:
                await begin(system)
        face.stack = stack
        face.yard = system = await stack.enter_async_context(open_system(path, config))
        engine = engine_of(system)
        if situation != "restarted":
            await begin(system)
        if situation not in ("first", "restarted", "kind"):
            await face.warm(situation == "asleep")
        if situation == "asleep":
            await until(lambda: not engine.members, "all groups sleep")
        elif situation == "anew":
            for name in names:
                await system.delete(name)
            await until(face.is_over, "its sessions are over")
            await begin(system)
        elif situation == "full":
            patch.setattr(Space, "takes", lambda *_: False)
            patch.setattr(Space, "look", unchanged)
            engine.storage.space.full = True
        yield face
