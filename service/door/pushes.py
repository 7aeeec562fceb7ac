"""What a node sends without being asked: the client of a session listens on the leader's node while its call lasts.

Invariants: at most one connection listens to a session, the newest; a connection that does not take what it is sent
loses pushes (counted), never this node's memory or another client's time. `Listening` is made by `node`, a `Listener`
for each such call.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, Protocol

from logyard.engine.replica.delivery import Delivery, SessionSink
from logyard.engine.replica.member import Member
from logyard.engine.replica.submit import check_leader
from logyard.protocol import wire
from logyard.protocol.errors import LogyardError, Refused, SessionExpired, UnknownGroup
from logyard.protocol.frame import Buffer
from logyard.protocol.verbs import VERBS

from .dispatch import SystemPort, taken

ALIVE_S = 1.0
"""So often a listener is looked after, and told that the node lives: its client takes silence for a hung node."""
WAITING_BYTES_MAX = 8 << 20
"""Pushes are dropped while so much waits for a connection; one push alone may be larger."""
PUSH_OVERHEAD = 64 << 10
"""What a push of records may be beside them: rows of what it holds, and where."""


class Sending(Protocol):
    """What a listening call needs of its connection."""

    @property
    def unsent(self) -> int:
        """Bytes that wait to be sent."""

    async def drained(self, size: int) -> None:
        """Wait until at most `size` bytes wait to be sent."""

    def queue(self, frame: list[Buffer]) -> None:
        """Send a frame, when its turn comes."""


class Pushing(NamedTuple):
    """A call that listens: its request, and the connection that it is on."""

    request: int
    connection: Sending


class Listener:
    """The sink of one listening call, on its connection."""

    __slots__ = ("request", "dropped", "_connection")

    def __init__(self, request: int, connection: Sending) -> None:
        self.request = request
        self.dropped = 0
        self._connection = connection

    def push(self, uid: int, session: int, header: Mapping[str, Any], body: Sequence[Buffer]) -> bool:
        """See `SessionSink`."""
        frame = wire.encode_push(self.request, {**header, "dropped": self.dropped}, body)
        size, waiting = sum(map(len, frame)), self._connection.unsent
        if size - wire.HEADER_BYTES > wire.PUSH_BYTES_MAX or (waiting and waiting + size > WAITING_BYTES_MAX):
            if header["kind"] != ALIVE:
                self.dropped += 1
                return False
            return True
        self._connection.queue(frame)
        return True

    async def room(self, size: int) -> None:
        """See `SessionSink`: of what was asked for by reference nothing is dropped that can wait."""
        await self._connection.drained(max(0, WAITING_BYTES_MAX - size - PUSH_OVERHEAD))

    def missed(self) -> None:
        """See `SessionSink`: the next push says so."""
        self.dropped += 1


class Watching:
    """The sink of a call that listens to watches: it waits for room instead of losing what there is none for."""

    __slots__ = ("_pushing",)

    def __init__(self, pushing: Pushing) -> None:
        self._pushing = pushing

    def push(self, header: Mapping[str, Any], parts: Sequence[Buffer]) -> None:
        """See `WatchSink`. Raises `LogyardError` for what no client takes: it would cut its connection, and with it all
        other calls."""
        frame = wire.encode_push(self._pushing.request, header, parts)
        size = sum(map(len, frame)) - wire.HEADER_BYTES
        if size > wire.PUSH_BYTES_MAX:
            message = f"{size} bytes of events are more than a client takes that does not join parts of a revision"
            raise LogyardError(message, code="too_large")
        self._pushing.connection.queue(frame)

    async def room(self, size: int) -> None:
        """See `WatchSink`."""
        await self._pushing.connection.drained(size)


ALIVE = "alive"


class Groups(NamedTuple):
    """This node's groups."""

    node_id: int
    members: Mapping[int, Member]
    """Those that are awake."""
    find: Callable[[str], Member]
    """A group's member, woken. Raises `UnknownGroup`."""
    has: Callable[[int], bool]
    """Whether a group is here, awake or not."""


class Listening:
    """The calls that listen to sessions. `began(member, session)` hears of each, once its session is known here."""

    def __init__(self, groups: Groups, delivery: Delivery, began: Callable[[Member, int], object]) -> None:
        self._groups = groups
        self._delivery = delivery
        self._began = began

    async def listen(self, name: str, session: int, sink: SessionSink) -> NoReturn:
        """Let `sink` have what the group's machine sends to a session, until it raises why that is over: `NotLeader`,
        `SessionExpired`, `Refused` (another connection listens now), `UnknownGroup`, `GroupStopped`."""
        groups, delivery = self._groups, self._delivery
        member: Member | None = groups.find(name)
        assert member is not None
        uid, told = member.uid, False
        check_leader(member)
        delivery.sinks[session] = sink
        try:
            while True:
                if not groups.has(uid):
                    raise UnknownGroup(f"no group {name!r} on node {groups.node_id}", name=name)
                # A group that sleeps is left alone: what there is to send wakes it.
                member = groups.members.get(uid)
                if member is not None:
                    check_leader(member)
                    if member.leading:
                        if member.sessions is None or session not in member.sessions.by_id:
                            raise SessionExpired(
                                f"{name}: session {session:016x} has ended, its client was silent for its time to live "
                                "or closed it: what it held went back; open another one (consume again)"
                            )
                        if not told:
                            told = True
                            self._began(member, session)
                sink.push(uid, session, {"kind": ALIVE, "index": 0}, ())
                await delivery.stirred(uid, ALIVE_S)
                if delivery.sinks.get(session) is not sink:
                    raise Refused(f"{name}: another connection listens to session {session:016x} now")
        finally:
            if delivery.sinks.get(session) is sink:
                del delivery.sinks[session]


async def _listen(system: SystemPort, arguments: Mapping[str, Any], pushing: Pushing) -> object:
    name, session = taken(system, VERBS["session_listen"], arguments)
    return await system.listen(name, session, Listener(pushing.request, pushing.connection))


async def _watch(system: SystemPort, arguments: Mapping[str, Any], pushing: Pushing) -> object:
    name, stream, add, local = taken(system, VERBS["kv_watch"], arguments)
    call = system.kv.listen(name, stream, add, local, Watching(pushing))
    # They become watches: what they were read from is not kept beside those.
    del arguments, add
    return await call


LISTENING: Mapping[str, Callable[[SystemPort, Mapping[str, Any], Pushing], Awaitable[object]]] = MappingProxyType(
    {"session_listen": _listen, "kv_watch": _watch}
)
"""The verbs that have a sink of their own: they last, and push."""
