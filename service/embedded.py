"""logyard inside your own process: `open_system` gives the engine of the daemon with the verbs of the clients, without
sockets.

One directory, one node, groups of one member. The verbs are the clients' own source (`client._async`) over another
`Caller`: a call is handled in this process as the daemon handles one that came over the network, a command goes
straight to the engine. Everything acknowledged is durable.
"""

from __future__ import annotations

import random
import sys
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import trio

from logyard.client._async.admin import AdminVerbs
from logyard.client._async.consumer import TopicVerbs
from logyard.client._async.frames import FramedKV, FramedLog, FramedMachine, FramedQueue
from logyard.client.admin import Call, T
from logyard.client.background import background
from logyard.client.board import Standing, standings
from logyard.client.first_of import first_of
from logyard.client.kv import Watches
from logyard.client.lane import Window
from logyard.client.log import SESSION_TTL_S, close_call
from logyard.client.messages import Session, open_session
from logyard.client.queue import Consumes
from logyard.client.runtime_trio import TrioRuntime
from logyard.client.sequences import Ticket
from logyard.client.session import Pushed, Retry
from logyard.client.upload_aio import upload
from logyard.engine.config import SystemConfig
from logyard.engine.machine import Machine
from logyard.engine.ports import NoPeers
from logyard.engine.replica.leadership import wait
from logyard.engine.replica.member import Member
from logyard.engine.types import Buffer
from logyard.machines.log import AppendLog
from logyard.machines.registry import create_machine
from logyard.protocol import wire
from logyard.protocol.errors import BadRequest, Busy, LogyardError, NotLeader, Unknown, UnknownGroup
from logyard.protocol.frame import Frame
from logyard.protocol.pending import DROP, PendingReply
from logyard.protocol.records import Page
from logyard.protocol.verbs import VERBS

from .door.dispatch import Data, SystemPort, serve_call, taken
from .log.reader import append_log
from .node import Node, build_system

MACHINES: dict[type, str] = {AppendLog: "log"}
TIMEOUT_S = 30.0
WINDOW_BYTES = 64 << 20
"""What uploads hold at most."""
END_S = 5.0
"""To close a session."""
LATE_S = 0.01
"""A command may be waited for so much longer than it was said."""


class EmbeddedSystem(AdminVerbs, TopicVerbs):
    """A node of this process, with the verbs of a client's yard. `find` gives a group's member, or raises
    `UnknownGroup`; `consistent` the same, once a read of it may be answered. `timeout` (seconds) bounds each verb that
    is not given its own."""

    def __init__(
        self,
        node: SystemPort,
        find: Callable[[str], Member],
        consistent: Callable[[str, str], Awaitable[Member]],
        machines: Mapping[str, type[Machine]],
        nursery: trio.Nursery,
        timeout: float,
    ) -> None:
        self.node = node
        self.find = find
        self._consistent = consistent
        self.runtime = TrioRuntime()
        self.chance = random.Random()
        self.timeout = timeout
        self.exactly_once = True
        self.closed = False
        self.sessions = Sessions(self)
        self.patience = Patience(timeout)
        # The calls under way.
        self._asking: set[trio.CancelScope] = set()
        self._freed = trio.lowlevel.ParkingLot()
        self.window = Window(WINDOW_BYTES, self._give_back)
        self._nursery = nursery
        self._kinds = {**MACHINES, **{kind: name for name, kind in machines.items()}}
        self._kvs: dict[str, KV] = {}

    # Handles.

    def log(self, name: str) -> EmbeddedLog:
        """Return the append log `name`; nothing is asked until it is used."""
        return EmbeddedLog(self, _named(name))

    def kv(self, name: str) -> KV:
        """Return the KV group `name`; nothing is asked until it is used."""
        found = self._kvs.get(name)
        if found is None:
            found = self._kvs[name] = KV(self, _named(name))
        return found

    def queue(self, name: str) -> Queue:
        """Return the queue `name`; nothing is asked until it is used."""
        return Queue(self, _named(name))

    def machine(self, name: str) -> EmbeddedMachine:
        """Return the group `name`, whatever its machine, one's own too; nothing is asked until it is used."""
        return EmbeddedMachine(self, _named(name))

    async def open_session(self, name: str, *, kind: str = "") -> Session:
        """Open a session of the group `name`, for any machine, for what it sends: see `client.messages`. `kind`: the
        machine that it must be, else `WrongKind` is raised."""
        return await open_session(self, name, Session, kind)

    # Beside the clients' verbs.

    async def start_group(self, name: str, machine: Machine) -> EmbeddedLog:
        """Return the group `name`, created when it is new, once it is led. `machine` says its kind. Raises
        `GroupExists` for another kind."""
        kind = self._kinds.get(type(machine))
        if kind is None:
            raise LogyardError(f"{type(machine).__name__} is not a machine that logyard knows by name")
        await self.create(name, machine=kind, **_arguments(machine))
        member = self.find(name)
        with trio.fail_after(10):
            await wait(member, lambda: member.raft.leader == self.node.node_id)
            # What an earlier run acknowledged is applied when a read of this term is.
            await self._consistent(name, "linearizable")
        return EmbeddedLog(self, name)

    async def delete_group(self, name: str) -> None:
        """Delete a group and everything in it: `delete`."""
        await self.delete(name)

    def groups(self) -> list[dict[str, Any]]:
        """Return a row a group, as `list` does, without waiting."""
        return self.node.group_page("", sys.maxsize)

    def leaderboard(self) -> list[Standing]:
        """Tell who leads what, since when, from this node's tables: no group is asked, whatever state it is in."""
        return standings(self.node.board("", sys.maxsize))

    # What the handles need: see `client.yards` and `client._async.frames`.

    def clock(self) -> float:
        """Return the time, in seconds."""
        return trio.current_time()

    async def nodes(self) -> list[int]:
        """Return this node's number: there are no others."""
        return [self.node.node_id]

    def compresses(self, name: str) -> bool | None:
        """Return what a log's option says about compression; None for a group that is not here."""
        try:
            return self.find(name).spec.arguments.get("compress") == "zstd"
        except UnknownGroup:
            return None

    def spawn(self, task: Callable[[], Awaitable[None]]) -> None:
        """Run a task until the system is closed; not at all when it is."""
        if not self.closed:
            self._nursery.start_soon(task)

    def background(self, task: Callable[[], Any]) -> None:
        """Run a task until it or the system ends."""
        self.spawn(task)

    async def pause(self, seconds: float) -> None:
        """Wait."""
        await trio.sleep(seconds)

    def event(self) -> trio.Event:
        """Make what a task can wait for."""
        return trio.Event()

    async def wait_for(self, event: trio.Event, seconds: float) -> None:
        """Wait until it is set, so long at most."""
        with self.runtime.scope(self.runtime.now() + seconds):
            await event.wait()

    async def to_its_end(self, task: Callable[[], Awaitable[None]], seconds: float) -> None:
        """Do something although the caller is cancelled, for so long."""
        with self.runtime.scope(self.runtime.now() + seconds, shield=True):
            await task()

    async def first_of(self, polls: Sequence[Callable[[float], Any]], wait: float) -> tuple[int, Page] | None:
        """Ask all at once; see `client.first_of`."""
        return await first_of(self.runtime, polls, wait)

    def _give_back(self) -> None:
        self._freed.unpark_all()

    async def freed(self) -> None:
        """Wait until some upload gives back what it held."""
        await self._freed.park()

    async def run(self, call: Call[T], timeout: float | None = None, pushed: Pushed | None = None) -> T:
        """Ask, again where that is allowed, until answered or out of time. Raises a `LogyardError`."""
        retry = Retry(self.clock() + (self.timeout if timeout is None else timeout), self.chance, call.pinned)
        said: LogyardError | None = None
        while True:
            try:
                with trio.CancelScope(deadline=retry.deadline) as scope:
                    self._asking.add(scope)
                    try:
                        return call.decode(await self._answer(call, pushed))
                    finally:
                        self._asking.discard(scope)
                raise left(call.method) if self.closed else Unknown(f"{call.method}: no answer in time")
            except LogyardError as error:
                if call.idempotent and isinstance(error, Unknown) and said is not None:
                    # Out of time over asking again: what was answered before says more.
                    raise said from None
                said, delay = error, self._delay(retry, error)
            await trio.sleep(delay)

    async def listen(self, call: Call[Any], retry: Retry, pushed: Pushed) -> None:
        """Ask once, for as long as the answer takes, which only says why it is over: raises that."""
        try:
            await self._answer(call, pushed)
        except LogyardError as error:
            if isinstance(error, Busy | NotLeader):
                raise
            # There is nobody else to be asked.
            raise type(error).told(str(error), error.details, code=error.code, retry="never") from None
        raise LogyardError(f"{call.method} ended", retry="elsewhere")

    async def append(
        self, name: str, frame: Frame, timeout: float | None = None, flags: int = 0
    ) -> tuple[bytes, Ticket | None]:
        """Have a frame applied; return the machine's reply. There is no connection to lose, so a session has nothing to
        do."""
        return await self._commit(name, frame.encode(), timeout, flags), None

    async def command(self, name: str, frame: list[Buffer], timeout: float | None = None) -> bytes:
        """Have a frame applied that has a session's number; return the machine's reply."""
        return await self._commit(name, frame, timeout, 0)

    async def _commit(self, name: str, frame: Sequence[Buffer], timeout: float | None, flags: int) -> bytes:
        node, retry, kind = self.node, None, wire.kind_of(flags)
        mode, low = flags & wire.REPLY_MODE, bool(flags & wire.LOW_PRIORITY)
        whole = memoryview(frame[0] if len(frame) == 1 else b"".join(frame))
        deadline = self.clock() + (self.timeout if timeout is None else timeout)
        while True:
            self._check()
            try:
                member = self.find(name)
                if kind and member.spec.machine != kind:
                    node.require_kind(member.uid, kind)
                if mode == wire.REPLY_NONE:
                    node.submit(member.uid, whole, DROP, 0, low=low)
                    return b""
                pending: PendingReply[bytes] = PendingReply()
                node.submit(member.uid, whole, pending, 0, early=mode == wire.REPLY_APPEND, low=low)
                if timeout is None and retry is None:
                    return await self.patience.wait(pending, deadline, name)
                with trio.CancelScope(deadline=deadline):
                    return await self.patience.wait(pending, deadline, name)
                raise late(name)
            except LogyardError as error:
                retry = retry or Retry(deadline, self.chance, False)
                delay = self._delay(retry, error)
            await trio.sleep(delay)

    async def _answer(self, call: Call[Any], pushed: Pushed | None) -> Any:
        """Return what a client would have got."""
        self._check()
        node = self.node
        if call.pinned and call.nodes[0] != node.node_id:
            raise LogyardError(f"there is no node {call.nodes[0]} in a process of its own")
        # As they travel: what is checked and what is decoded has the types that it has on the wire.
        arguments = wire.unpack(wire.pack(call.arguments))
        if call.kind:
            node.require_kind(call.group or arguments["name"], call.kind)
        if call.method == "cluster":
            return {"cluster": node.cluster_id, "node": node.node_id, "nodes": {}}
        if call.method == "session_listen":
            name, session = taken(node, VERBS[call.method], arguments)
            return await node.listen(name, session, SessionPushes(pushed or _dropped))
        if call.method == "kv_watch":
            name, stream, add, local = taken(node, VERBS[call.method], arguments)
            return await node.kv.listen(name, stream, add, local, WatchPushes(pushed or _dropped))
        value = await serve_call(node, call.method, arguments)
        if isinstance(value, Data):
            return wire.unpack(wire.pack(value.header)), memoryview(b"".join(value.parts))
        return wire.unpack(wire.pack(value))

    def _end(self) -> None:
        """Take nothing more, and tell who waits that no answer comes: the node stops."""
        self.closed = True
        self.patience.close()
        for scope in self._asking:
            scope.cancel()

    def _check(self) -> None:
        if self.closed:
            raise LogyardError("the system is closed")

    def _delay(self, retry: Retry, error: LogyardError) -> float:
        """Return the seconds until the next try; raise the error when there is none: no other node could do it, and on
        a full disk it is this very program that can make room."""
        if not isinstance(error, Busy | NotLeader):
            raise error
        return retry.after(error, False, self.clock())


class Patience:
    """The commands that are waited for no longer than `timeout` seconds: one task ends them all. A scope with a
    deadline for each would be a seventh of an append."""

    __slots__ = ("_timeout", "_waiting")

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        # When each is given up, and its group. None comes that is given up before those that are here.
        self._waiting: dict[PendingReply[bytes], tuple[float, str]] = {}

    async def wait(self, pending: PendingReply[bytes], deadline: float, name: str) -> bytes:
        """Wait for a reply that was asked for just now. Raises what it failed with, or `Unknown`."""
        self._waiting[pending] = deadline, name
        try:
            return await pending.wait(trio.Event)
        finally:
            del self._waiting[pending]

    def close(self) -> None:
        """End all that is waited for: nobody will answer it."""
        for pending, (_, name) in self._waiting.items():
            pending.fail(left(name))

    async def end(self) -> None:
        """End what is waited for in vain, as long as the system runs: a task."""
        while True:
            now = trio.current_time()
            following = now + self._timeout
            for pending, (deadline, name) in list(self._waiting.items()):
                if deadline <= now:
                    pending.fail(late(name))
                else:
                    following = min(following, deadline)
            await trio.sleep_until(max(following, now + LATE_S))


class Sessions:
    """The sessions that were opened here: each has a client number of its own, and lives as long as it is held."""

    def __init__(self, system: EmbeddedSystem) -> None:
        self.held: dict[int, str] = {}
        self.ttl = SESSION_TTL_S
        self._system = system

    async def end(self, name: str, session: int) -> None:
        """Close one. Raises what stands in the way: it ends by itself then."""
        self.held.pop(session, None)
        await self._system.run(close_call(name, session), END_S)

    async def beat(self) -> None:
        """Say that they are alive, three times within a time-to-live, as long as the system runs."""
        while True:
            await trio.sleep(self.ttl / 3)
            for session in list(self.held):
                with suppress(LogyardError):
                    self._system.node.heartbeat(session)


class SessionPushes:
    """The sink of a session that is listened to: see `SessionSink`."""

    def __init__(self, pushed: Pushed) -> None:
        self._pushed = pushed
        self._dropped = 0

    def push(self, uid: int, session: int, header: Mapping[str, Any], body: Sequence[Buffer]) -> bool:
        """Give what the machine sent to who listens."""
        self._pushed(wire.unpack(wire.pack({**header, "dropped": self._dropped})), memoryview(b"".join(body)))
        return True

    async def room(self, size: int) -> None:
        """Do nothing: whoever reads has it all at once."""

    def missed(self) -> None:
        """Count what was lost; the next push says so."""
        self._dropped += 1


class WatchPushes:
    """The sink of a stream of watches: see `WatchSink`. Whoever reads bounds what is kept."""

    def __init__(self, pushed: Pushed) -> None:
        self._pushed = pushed

    def push(self, header: Mapping[str, Any], parts: Sequence[Buffer]) -> None:
        """Give what changed to who watches."""
        self._pushed(wire.unpack(wire.pack(header)), memoryview(b"".join(parts)))

    async def room(self, size: int) -> None:
        """Let the readers have a turn."""
        await trio.lowlevel.checkpoint()


class EmbeddedLog(FramedLog):
    """The append log `name` of this process: whatever has that name now, awake or not, as with the clients' handles.
    What `start_group` gave for a machine of one's own takes `command` and `query`."""

    yard: EmbeddedSystem

    def __init__(self, yard: EmbeddedSystem, name: str) -> None:
        self.yard = yard
        self.name = name

    async def command(self, command: bytes, payload: Buffer | None = None, *, metadata: bytes = b"") -> bytes:
        """Have a command with one record applied, by whatever machine: `EmbeddedMachine.command`."""
        return await self.yard.machine(self.name).command(command, payload, metadata=metadata)

    def bounds(self) -> tuple[int, int]:
        """Return (start, end) as `latest` does, without waiting."""
        machine = append_log(self.yard.find(self.name))
        return machine.start, machine.end

    async def _upload(
        self,
        metadata: Buffer,
        source: AsyncIterable[Buffer] | BinaryIO | memoryview,
        size: int | None,
        timeout: float | None,
        compress: bool,
        command: bytes,
    ) -> int:
        return await upload(self.yard, self.name, metadata, source, size, timeout, compress, command)


class KV(FramedKV, Watches):
    """The KV group `name` of this process."""

    yard: EmbeddedSystem


class Queue(FramedQueue, Consumes):
    """The queue `name` of this process."""

    yard: EmbeddedSystem

    def __init__(self, yard: EmbeddedSystem, name: str) -> None:
        self.yard = yard
        self.name = name


class EmbeddedMachine(FramedMachine):
    """The group `name` of this process, whatever its machine."""

    yard: EmbeddedSystem

    def __init__(self, yard: EmbeddedSystem, name: str) -> None:
        self.yard = yard
        self.name = name

    async def open_session(self) -> Session:
        """Open a session of the group, for what the machine sends to it."""
        return await self.yard.open_session(self.name)


def late(name: str) -> Unknown:
    """Return what becomes of a command that was given up."""
    return Unknown(f"{name}: not acknowledged in time, and not known whether it happened")


def left(name: str) -> Unknown:
    """Return what becomes of what is under way when the system is left."""
    return Unknown(f"{name}: the system was closed before the answer, and it is not known whether it happened")


def _named(name: str) -> str:
    if not name:
        raise BadRequest("a group has a name")
    return name


def _dropped(header: Any, data: memoryview) -> None:
    """Drop what nobody listens to."""


def _arguments(machine: Machine) -> dict[str, Any]:
    """Return what defines an append log beside its kind."""
    return {"compact": "key"} if isinstance(machine, AppendLog) and machine.keys is not None else {}


@asynccontextmanager
async def open_system(
    path: str | Path,
    config: SystemConfig | None = None,
    machines: Mapping[str, type[Machine]] | None = None,
    *,
    timeout: float = TIMEOUT_S,
) -> AsyncIterator[EmbeddedSystem]:
    """Open (or create) a directory as a node of its own. `machines`: your own kinds by name, each made with the
    arguments that its group was created with (none by `start_group`); a name is for good. `timeout` (seconds) bounds
    every verb that is not given its own. Raises `DirectoryInUse`, `WrongIdentity`, `Corrupt`, RuntimeError outside of
    trio; what the block raises comes as it is. What other tasks have under way when it is left ends with `Unknown`."""
    if not trio.lowlevel.in_trio_task():
        raise RuntimeError("open_system runs under trio (trio.run); clients run under asyncio as well, see connect")
    own = dict(machines or {})

    def made(name: str, arguments: dict[str, Any]) -> Machine:
        return own[name](**arguments) if name in own else create_machine(name, arguments)

    system = build_system(Path(path), 1, "embedded", config or SystemConfig(), machines=made)
    await system.open()
    try:
        async with background(trio.open_nursery(), trio.Cancelled) as nursery:
            await nursery.start(system.run, NoPeers())
            node = Node(system)
            found = EmbeddedSystem(node, system.member, node.consistent, own, nursery, timeout)
            nursery.start_soon(found.sessions.beat)
            nursery.start_soon(found.patience.end)
            try:
                yield found
            finally:
                found._end()
    finally:
        system.part()
        system.close()
