"""To a client's session: messages of the machine, and payloads from their home to its connection (law 5).

Invariant: in order within a session, at most once, and never more than `delivery_queue_bytes` waiting for a session:
what is beyond that, or was released, is dropped. One task a session while something waits. Called by `effects`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import trio

from ..entry import ABSENT, LARGE, MARK, Unit, table_of, units_of
from ..errors import LogyardError
from ..machine import Deliver, PayloadRef, Send
from ..types import Buffer
from .member import Member
from .reader import Located, Wanted

if TYPE_CHECKING:
    from .system import System

log = logging.getLogger(__name__)


class SessionSink(Protocol):
    """The connection of a session's client, registered in `Delivery.sinks` under the session while it lasts."""

    def push(self, uid: int, session: int, header: Mapping[str, Any], body: Sequence[Buffer]) -> object:
        """Something for the client, without having been asked; never blocks. False: dropped.

        `header`: kind "message" or "records", index, and for records tag and rows ``[index, ordinal, head bytes, body
        bytes or -1]``; `body` is the message, or heads and bodies in turn.
        """
        ...


class _Item(NamedTuple):
    member: Member
    header: dict[str, Any]
    size: int
    body: Sequence[Buffer]
    found: Sequence[_Found] = ()
    homes: Sequence[tuple[str, int]] = ()
    """What is pinned from now until it was read."""


class _Found(NamedTuple):
    """One record: its place in its pack, and its large body if it has one."""

    ref: PayloadRef
    located: Located
    pack: Unit
    large: Unit | None


class Delivery:
    """What is under way to sessions. `sinks`: by session, of the connections to this node."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.sinks: dict[int, SessionSink] = {}
        self.dropped = 0
        self._queues: dict[int, deque[_Item]] = {}
        self._waiting: dict[int, int] = {}
        self._lots: dict[int, trio.lowlevel.ParkingLot] = {}

    def stir(self, uid: int) -> None:
        """A group's leader or sessions changed: who listens there looks again."""
        lot = self._lots.pop(uid, None)
        if lot is not None:
            lot.unpark_all()

    async def stirred(self, uid: int, patience_s: float) -> None:
        """Until `stir`, or for so many seconds."""
        lot = self._lots.setdefault(uid, trio.lowlevel.ParkingLot())
        try:
            with trio.move_on_after(patience_s):
                await lot.park()
        finally:
            if not lot and self._lots.get(uid) is lot:
                del self._lots[uid]

    def _give(
        self, sink: SessionSink, uid: int, session: int, header: Mapping[str, Any], body: Sequence[Buffer]
    ) -> None:
        if sink.push(uid, session, header, body) is False:
            self.dropped += 1

    def send(self, member: Member, index: int, effect: Send) -> None:
        """A message: at once, unless something of the same session waits."""
        sink = self.sinks.get(effect.session)
        if sink is None:
            return
        header = {"kind": "message", "index": index}
        if effect.session not in self._queues:
            self._give(sink, member.uid, effect.session, header, [effect.message])
        else:
            self._queue(effect.session, _Item(member, header, len(effect.message), [effect.message]))

    def deliver(self, member: Member, index: int, effect: Deliver) -> None:
        """Records by reference: found and pinned now, read and sent by the session's task."""
        if effect.session not in self.sinks:
            return
        found = list(self._find(member, effect.refs))
        size = sum(one.pack.length if one.large is None else one.large.length for one in found)
        header = {"kind": "records", "index": index, "tag": effect.tag}
        self._queue(effect.session, _Item(member, header, size, (), found, _homes(found)))

    def _queue(self, session: int, item: _Item) -> None:
        waiting = self._waiting.get(session, 0)
        if waiting and waiting + item.size > self.system.config.delivery_queue_bytes:
            self.dropped += 1
            return
        self._waiting[session] = waiting + item.size
        for home in item.homes:
            self.system.storage.homes.pin(home)
        queue = self._queues.get(session)
        if queue is None:
            queue = self._queues[session] = deque()
            self.system.nursery.start_soon(self._run, session, queue)
        queue.append(item)

    async def _run(self, session: int, queue: deque[_Item]) -> None:
        """Works a session's queue off and ends; the next item starts another."""
        try:
            while queue:
                item = queue[0]
                try:
                    await self._push(session, item)
                except LogyardError as error:
                    log.warning("group %s: not delivered to a session: %s", item.member.spec.name, error)
                finally:
                    for home in item.homes:
                        self.system.storage.homes.unpin(home)
                queue.popleft()
                self._waiting[session] -= item.size
                await trio.lowlevel.checkpoint()
        finally:
            self._queues.pop(session, None)
            self._waiting.pop(session, None)

    async def _push(self, session: int, item: _Item) -> None:
        header, body = item.header, list(item.body)
        if header["kind"] == "records":
            rows, body = await self._read(item.member, item.found)
            header = {**header, "records": rows}
        sink = self.sinks.get(session)
        if sink is not None:
            self._give(sink, item.member.uid, session, header, body)

    async def _read(self, member: Member, found: Sequence[_Found]) -> tuple[list[list[int]], list[Buffer]]:
        wanted = []
        for one in found:
            wanted.append(Wanted(one.located, one.pack, 0, one.pack.length))
            if one.large is not None:
                wanted.append(Wanted(one.located, one.large, 0, one.large.length))
        data = iter(await self.system.reader.read(member, wanted))
        rows: list[list[int]] = []
        body: list[Buffer] = []
        for one in found:
            head, small = record_of(memoryview(next(data)), one.pack.records, one.ref.ordinal - one.pack.first_ordinal)
            whole = small if one.large is None else next(data)
            rows.append([one.ref.index, one.ref.ordinal, len(head), -1 if whole is None else len(whole)])
            body += [head] if whole is None else [head, whole]
        return rows, body

    def _find(self, member: Member, refs: Iterable[PayloadRef]) -> Iterable[_Found]:
        """Where each record is now; what is released is left out."""
        located: Located | None = None
        for ref in refs:
            if ref.uid != member.uid or not 0 < ref.index <= member.raft.commit:
                continue
            if member.liveness.is_dead_range((ref.index, ref.ordinal), (ref.index, ref.ordinal + 1)):
                continue
            if located is None or located.index != ref.index:
                located = next(iter(self.system.reader.payload_entries(member, ref.index, ref.index)), None)
            if located is None or located.index != ref.index:
                continue
            units = units_of(located.data)
            pack = next((one for one in units if _holds(one, ref.ordinal)), None)
            if pack is not None:
                large = next((one for one in units if not one.records and one.first_ordinal == ref.ordinal), None)
                yield _Found(ref, located, pack, large)


def record_of(pack: memoryview, records: int, number: int) -> tuple[memoryview, memoryview | None]:
    """Head and small body of the record `number` of a pack; None for a body that is absent or not in the pack."""
    table = table_of(pack, records)
    if max(table[::2]) & MARK:
        table = tuple(length if at % 2 else length & ~MARK for at, length in enumerate(table))
    heads_at = 8 * records
    head_at = heads_at + sum(table[: 2 * number : 2])
    head = pack[head_at : head_at + table[2 * number]]
    size = table[2 * number + 1]
    if size == ABSENT or size >= LARGE:
        return head, None
    at = heads_at + sum(table[::2]) + sum(one for one in table[1 : 2 * number : 2] if one < LARGE)
    return head, pack[at : at + size]


def _holds(unit: Unit, ordinal: int) -> bool:
    return unit.first_ordinal <= ordinal < unit.first_ordinal + unit.records


def _homes(found: Sequence[_Found]) -> list[tuple[str, int]]:
    """Also of what is in memory now: it may have to be read again by then."""
    homes: set[tuple[str, int]] = set()
    for one in found:
        if one.located.home is not None:
            homes.add(("generation", one.located.home.generation))
        elif one.located.entry is not None and one.located.entry.file:
            homes.add(("wal", one.located.entry.file))
    return sorted(homes)
