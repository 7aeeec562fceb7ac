"""A client's topics in the simulator: the product's own `client._async.topics`, driven one answer at a time.

The client is no process that can die by a fault: one that does is one that is driven no further (`Client.die`). It asks
one node after the other, the leader first, until it is answered. Used by `stories`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from typing import Any, NamedTuple

from logyard.client._async.admin import AdminVerbs
from logyard.client._async.topics import Sent, Topic
from logyard.client.admin import Call, T
from logyard.client.log import Bounds, appended, latest_call, offsets_of, poll_call, query_call, retain_call
from logyard.protocol import wire
from logyard.protocol.errors import LogyardError, Unknown
from logyard.protocol.frame import Buffer, encode_frame
from logyard.protocol.topics import Topic as Row
from logyard.protocol.topics import opened_envelope
from logyard.service.door.dispatch import Data, serve_call
from logyard.service.node import Node

from .yard import Yard

PATIENCE_S = 4.0
"""A node that has not answered by then is asked no more."""
PAUSE_S = 0.3
PASSING = frozenset({"not_leader", "busy", "unknown", "group_stopped", "wal_failed", "unreachable"})
"""What another node, or the same one later, may answer otherwise."""


class Step(NamedTuple):
    """What a client waits for: an answer of a node, or some time."""

    node: int = 0
    make: Callable[[Node], Coroutine[Any, Any, Any]] | None = None
    seconds: float = 0.0

    def __await__(self) -> Generator[Step, Any, Any]:
        return (yield self)


class Client:
    """Drives a coroutine of a `SimYard`. `done`, with a `result`, or `refused`; neither while it is under way."""

    def __init__(self, yard: Yard, work: Coroutine[Any, Any, Any]) -> None:
        self.done = False
        self.result: Any = None
        self.refused: LogyardError | None = None
        self._yard = yard
        self._work = work
        self._steps = 0
        self._dead = False
        yard.loop.soon(None, self._go, 0, None, None)

    @property
    def over(self) -> bool:
        """Whether nothing more comes of it."""
        return self.done or self.refused is not None or self._dead

    def die(self) -> None:
        """Stop where it is."""
        self._dead = True

    def _go(self, step: int, value: Any, error: BaseException | None) -> None:
        if step != self._steps or self.over:
            return
        self._steps += 1
        try:
            wanted = self._work.throw(error) if error is not None else self._work.send(value)
        except StopIteration as over:
            self.done, self.result = True, over.value
            return
        except LogyardError as refusal:
            self.refused = refusal
            return
        self._take(wanted, self._steps)

    def _take(self, wanted: Step, step: int) -> None:
        loop = self._yard.loop
        if wanted.make is None:
            loop.at(loop.now + wanted.seconds, None, self._go, step, None, None)
            return
        node, make = self._yard.nodes.get(wanted.node), wanted.make
        if node is None:
            loop.at(loop.now + PAUSE_S, None, self._go, step, None, Unknown(f"node {wanted.node} is down"))
            return

        async def call(node: Node = node) -> Any:
            return await make(node)

        def answered(result: Any, error: BaseException | None) -> None:
            if error is not None and not isinstance(error, LogyardError):
                self._yard.bug("a client's call", error)
            loop.soon(None, self._go, step, result, error)

        self._yard.spawn(wanted.node, call(), "a client's call", answered)
        loop.at(loop.now + PATIENCE_S, None, self._go, step, None, Unknown(f"node {wanted.node} does not answer"))


class Flag:
    """What clients wait for."""

    is_set = False

    def set(self) -> None:
        """Let who waits go on."""
        self.is_set = True


class SimLog:
    """A log, as topics use it."""

    def __init__(self, yard: SimYard, name: str) -> None:
        self.yard = yard
        self.name = name

    async def append_many(
        self, records: Sequence[tuple[bytes, Buffer | None]], *, command: bytes, **more: Any
    ) -> range:
        """Append one record that its producer may send again."""
        frame = encode_frame(records, command=command)
        reply = await self.yard.ask(self.name, lambda node: node.commit(node.system.member(self.name), frame))
        found = appended(self.name, 0, reply)
        return offsets_of(found.first, found.given)

    async def latest(self) -> Bounds:
        """Return its bounds."""
        return await self.yard.run(latest_call(self.name, None, None))

    async def query(self, request: bytes, *, consistency: str | None = None, **more: Any) -> bytes:
        """Ask its machine."""
        return await self.yard.run(query_call(self.name, request, None, consistency or "linearizable", 0))

    async def retain(self, *, age: float = 0.0, bytes: int = 0, records: int = 0) -> None:
        """Limit what it keeps."""
        await self.yard.run(retain_call(self.name, age, bytes, records))


class SimMachine(SimLog):
    """A group of any machine."""

    async def command(self, command: bytes) -> bytes:
        """Have a command applied."""
        reply: bytes = await self.yard.ask(self.name, lambda node: node.command(node.system.member(self.name), command))
        return reply


class SimYard(AdminVerbs):
    """What topics need of a yard."""

    timeout = 60.0
    exactly_once = False

    def __init__(self, yard: Yard) -> None:
        self._yard = yard

    def topic(self, name: str) -> Topic:
        """Return a topic."""
        return Topic(self, name)  # type: ignore[arg-type]

    def log(self, name: str) -> SimLog:
        """Return a log."""
        return SimLog(self, name)

    def machine(self, name: str) -> SimMachine:
        """Return a group."""
        return SimMachine(self, name)

    def clock(self) -> float:
        """Return the time."""
        return self._yard.loop.now

    async def nodes(self) -> list[int]:
        """Return all nodes."""
        return sorted(self._yard.hosts)

    async def pause(self, seconds: float) -> None:
        """Wait."""
        await Step(seconds=seconds)

    def event(self) -> Flag:
        """Make what a client can wait for."""
        return Flag()

    async def wait_for(self, event: Flag, seconds: float) -> None:
        """Wait until it is set, so long at most."""
        until = self.clock() + seconds
        while not event.is_set and self.clock() < until:
            await self.pause(PAUSE_S)

    async def run(self, call: Call[T], timeout: float | None = None) -> T:
        """Ask until it is answered."""
        name = call.group or str(call.arguments.get("name", ""))
        arguments = wire.unpack(wire.pack(call.arguments))

        async def served(node: Node) -> Any:
            value = await serve_call(node, call.method, arguments)
            if isinstance(value, Data):
                return wire.unpack(wire.pack(value.header)), memoryview(b"".join(value.parts))
            return wire.unpack(wire.pack(value))

        return call.decode(await self.ask(name, served, call.nodes if call.pinned else ()))

    async def ask(self, name: str, make: Callable[[Node], Coroutine[Any, Any, Any]], only: Sequence[int] = ()) -> Any:
        """Ask nodes, the leader of `name` first, until one answers what no other would answer otherwise."""
        unknown: set[int] = set()
        while True:
            for number in only or self._in_turn(name):
                try:
                    return await Step(number, make)
                except LogyardError as error:
                    if error.code == "unknown_group":
                        # All of them have to say so.
                        unknown.add(number)
                        if only or unknown >= set(self._yard.hosts):
                            raise
                    elif error.code not in PASSING:
                        raise
                await self.pause(PAUSE_S)

    def _in_turn(self, name: str) -> Iterable[int]:
        first = self._yard.leader(name) if name else 0
        return sorted(self._yard.hosts, key=lambda number: number != first)


async def sends(topic: Topic, keys: Sequence[bytes], rounds: int, sent: dict[tuple[bytes, int], Sent]) -> None:
    """Send numbers of keys by one producer, which sends again what it does not know of."""
    producer = await topic.producer("p")
    for number in range(1, rounds + 1):
        for at, key in enumerate(keys):
            sequence = len(keys) * (number - 1) + at + 1
            while True:
                try:
                    found = await producer.send(key, b"%d" % number, None, sequence=sequence)
                    break
                except LogyardError as error:
                    if error.code not in PASSING:
                        raise
                    await topic.yard.pause(PAUSE_S)
            sent[key, number] = found
        await topic.yard.pause(PAUSE_S)


async def grown(topic: Topic, count: int) -> Row:
    """Add partitions, as soon as all nodes have let the logs go that had their names."""
    while True:
        try:
            return await topic.grow(count)
        except LogyardError as error:
            if error.code != "refused":
                raise
        await topic.yard.pause(1.0)


async def records_of(yard: SimYard, name: str) -> dict[int, list[tuple[int, bytes, int]]]:
    """Return (offset, key, number) of each record, by partition."""
    found: dict[int, list[tuple[int, bytes, int]]] = {}
    for one in (await yard.topic(name).describe()).readable:
        rows = found[one.number] = []
        end = (await yard.log(one.log).latest()).end
        while len(rows) < end:
            page = await yard.run(poll_call(one.log, len(rows), 100, 1 << 20, 0.0, None, False, None))
            for record in page:
                key, number = opened_envelope(record.metadata)
                rows.append((record.offset, bytes(key or b""), int(bytes(number))))
    return found


__all__ = ["Client", "SimYard", "grown", "records_of", "sends"]
