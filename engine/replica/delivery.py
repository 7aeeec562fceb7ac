"""To a client's session: messages of the machine, and payloads from their home to its connection (law 5).

Invariant: in order within a session, at most once, and never more than `delivery_queue_bytes` waiting for a session:
what is beyond that, or was released, is dropped. Payloads are read when their connection has room for them. One task a
session while something waits. Called by `effects`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import trio

from logyard.protocol.errors import LogyardError, PayloadMissing
from logyard.protocol.frame import LARGE, MARK, table_of

from ..entry import Unit, units_of
from ..machine import Deliver, PayloadRange, PayloadRef, Send
from ..types import Buffer
from .member import Member
from .reader import Located, Pins, Wanted

log = logging.getLogger(__name__)


LACKING_BYTES = 512 << 10
"""What an entry counts whose place is lost here, so that nobody knows its size: as much as entries are filled to."""


class SessionSink(Protocol):
    """The connection of a session's client, registered in `Delivery.sinks` under the session while it lasts."""

    def push(self, uid: int, session: int, header: Mapping[str, Any], body: Sequence[Buffer]) -> object:
        """Push something to the client, without having been asked; never blocks. False: dropped.

        `header`: kind "message" or "records", index, and for records tag and rows ``[index, ordinal, head bytes, body
        bytes or -1]``; `body` is the message, or heads and bodies in turn.
        """
        ...

    async def room(self, size: int) -> None:
        """Wait until about `size` bytes of records would not be dropped, or the connection ended."""
        ...

    def missed(self) -> None:
        """Take note that something for the client was dropped before it came here."""
        ...


class _Item(NamedTuple):
    member: Member
    header: dict[str, Any]
    size: int
    body: Sequence[Buffer]
    found: Sequence[_Found] = ()
    homes: Sequence[tuple[str, int]] = ()
    """What is pinned from now until it was read."""
    lacking: Sequence[int] = ()
    """Entries that can't be found here, to be fetched from a peer before `refs` are looked for again."""
    refs: Sequence[PayloadRef | PayloadRange] = ()


class _Found(NamedTuple):
    """Records of one pack, by ordinal from `first` up to, but without, `end`; `large` are the entry's large bodies."""

    located: Located
    pack: Unit
    first: int
    end: int
    large: Mapping[int, Unit]

    @property
    def size(self) -> int:
        """Bytes, about: the table says it exactly, when it was read."""
        size = self.pack.length * (self.end - self.first) // self.pack.records
        if self.large:
            size += sum(self.large[at].length for at in range(self.first, self.end) if at in self.large)
        return size


class Payloads(Protocol):
    """Where payloads are, and what they hold."""

    def payload_entries(self, member: Member, first: int, last: int) -> Iterator[Located]:
        """Yield the entries with payload, and where they are."""
        ...

    async def read(self, member: Member, wanted: Sequence[Wanted]) -> list[Buffer]:
        """Return the bytes of each wanted range, verified."""
        ...


class Delivery:
    """What is under way to sessions. `sinks`: by session, of the connections to this node."""

    def __init__(
        self,
        reader: Payloads,
        pins: Pins,
        fetch: Callable[[Member, int, int], Awaitable[object]],
        spawn: Callable[..., None],
        queue_bytes: int,
    ) -> None:
        """Take what it needs: `fetch` brings entries first..last anew whose place is lost here; `spawn` runs a task
        until it ends."""
        self._reader = reader
        self._pins = pins
        self._fetch = fetch
        self._spawn = spawn
        self._queue_bytes = queue_bytes
        self.sinks: dict[int, SessionSink] = {}
        self.dropped = 0
        self._queues: dict[int, deque[_Item]] = {}
        self._waiting: dict[int, int] = {}
        self._lots: dict[int, trio.lowlevel.ParkingLot] = {}

    def stir(self, uid: int) -> None:
        """Wake who listens to a group, whose leader or sessions changed: it looks again."""
        lot = self._lots.pop(uid, None)
        if lot is not None:
            lot.unpark_all()

    async def stirred(self, uid: int, patience_s: float) -> None:
        """Wait until `stir`, or for so many seconds."""
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

    def _missed(self, session: int) -> None:
        self.dropped += 1
        sink = self.sinks.get(session)
        if sink is not None:
            sink.missed()

    def send(self, member: Member, index: int, effect: Send) -> None:
        """Send a message: at once, unless something of the same session waits."""
        sink = self.sinks.get(effect.session)
        if sink is None:
            return
        header = {"kind": "message", "index": index}
        # The machine may use its buffer again, and its list of refs.
        message = bytes(effect.message)
        if effect.session not in self._queues:
            self._give(sink, member.uid, effect.session, header, [message])
        else:
            self._queue(effect.session, _Item(member, header, len(message), [message]))

    def deliver(self, member: Member, index: int, effect: Deliver) -> None:
        """Deliver records by reference: found and pinned now, read and sent by the session's task."""
        if effect.session not in self.sinks:
            return
        lacking: set[int] = set()
        found = list(self._find(member, effect.refs, lacking))
        size = sum(one.size for one in found) + LACKING_BYTES * len(lacking)
        header = {"kind": "records", "index": index, "tag": bytes(effect.tag)}
        refs = tuple(effect.refs) if lacking else ()
        item = _Item(member, header, size, (), found, _homes(found), sorted(lacking), refs)
        self._queue(effect.session, item)

    def _queue(self, session: int, item: _Item) -> None:
        waiting = self._waiting.get(session, 0)
        if waiting and waiting + item.size > self._queue_bytes:
            self._missed(session)
            return
        self._waiting[session] = waiting + item.size
        for home in item.homes:
            self._pins.pin(home)
        queue = self._queues.get(session)
        if queue is None:
            queue = self._queues[session] = deque()
            self._spawn(self._run, session, queue)
        queue.append(item)

    async def _run(self, session: int, queue: deque[_Item]) -> None:
        """Work a session's queue off and end; the next item starts another."""
        try:
            while queue:
                item = queue[0]
                try:
                    await self._push(session, item)
                except (LogyardError, OSError) as error:
                    log.warning("group %s: not delivered to a session: %s", item.member.spec.name, error)
                    self._missed(session)
                finally:
                    for home in item.homes:
                        self._pins.unpin(home)
                queue.popleft()
                self._waiting[session] -= item.size
                await trio.lowlevel.checkpoint()
        finally:
            self._queues.pop(session, None)
            self._waiting.pop(session, None)

    async def _push(self, session: int, item: _Item) -> None:
        header, body = item.header, list(item.body)
        if header["kind"] == "records":
            await self._room(session, item.size)
            found = item.found
            if item.lacking:
                for index in item.lacking:
                    await self._fetch(item.member, index, index)
                # From here to the reader's pins nothing waits.
                still = set[int]()
                found = list(self._find(item.member, item.refs, still))
                if still:
                    # Without them it would look as if they had been settled.
                    raise PayloadMissing(item.member.uid, min(still))
            rows, body = await self._read(item.member, found)
            header = {**header, "records": rows}
            # Others of its connection may have read meanwhile.
            await self._room(session, item.size)
        sink = self.sinks.get(session)
        if sink is not None:
            self._give(sink, item.member.uid, session, header, body)

    async def _room(self, session: int, size: int) -> None:
        sink = self.sinks.get(session)
        if sink is not None:
            await sink.room(size)

    async def _read(self, member: Member, found: Sequence[_Found]) -> tuple[list[list[int]], list[Buffer]]:
        wanted: list[Wanted] = []
        for at, one in enumerate(found):
            if not at or one.pack is not found[at - 1].pack:
                wanted.append(Wanted(one.located, one.pack, 0, one.pack.length))
            for ordinal in range(one.first, one.end) if one.large else ():
                if ordinal in one.large:
                    unit = one.large[ordinal]
                    wanted.append(Wanted(one.located, unit, 0, unit.length))
        data = iter(await self._reader.read(member, wanted))
        rows: list[list[int]] = []
        body: list[Buffer] = []
        pack = memoryview(b"")
        for at, one in enumerate(found):
            if not at or one.pack is not found[at - 1].pack:
                pack = memoryview(next(data))
            start = one.pack.first_ordinal
            large = {ordinal: next(data) for ordinal in range(one.first, one.end) if ordinal in one.large}
            sizes, parts = records_of(pack, one.pack.records, one.first - start, one.end - start, start, large)
            index = one.located.index
            rows += [[index, one.first + number, head, size] for number, (head, size) in enumerate(sizes)]
            body += parts
        return rows, body

    def _find(self, member: Member, refs: Iterable[PayloadRef | PayloadRange], lacking: set[int]) -> Iterable[_Found]:
        """Yield where records are now; what is released is left out. `lacking` gets the entries whose place is lost or
        damaged here."""
        located: Located | None = None
        packs: list[Unit] = []
        large: dict[int, Unit] = {}
        for ref in refs:
            if isinstance(ref, PayloadRange):
                (index, ordinal), (last, stop) = ref
                if last != index:
                    log.error("group %s: a delivery's range %s leaves its entry, it is ignored", member.spec.name, ref)
                    continue
            else:
                index, ordinal, stop = ref.index, ref.ordinal, ref.ordinal + 1
                if ref.uid != member.uid:
                    continue
            if not 0 < index <= member.raft.commit:
                continue
            living = member.liveness.live_within((index, ordinal), (index, stop))
            if living and (located is None or located.index != index):
                try:
                    located = next(iter(self._reader.payload_entries(member, index, index)), None)
                except LogyardError as error:
                    log.warning("group %s: entry %d is not found: %s", member.spec.name, index, error)
                    located = None
                units = units_of(located.data) if located is not None and located.index == index else []
                packs = [one for one in units if one.records]
                large = {one.first_ordinal: one for one in units if not one.records}
            if located is None or located.index != index:
                if living:
                    lacking.add(index)
                continue
            for live in living:
                end = live.end.ordinal if live.end.index == index else stop
                for pack in packs:
                    first, after = max(pack.first_ordinal, live.first.ordinal), pack.first_ordinal + pack.records
                    if first < min(after, end):
                        yield _Found(located, pack, first, min(after, end), large)


def records_of(
    pack: memoryview, records: int, first: int, end: int, start: int = 0, large: Mapping[int, Buffer] | None = None
) -> tuple[list[tuple[int, int]], list[Buffer]]:
    """Return the records `first` up to `end` of a pack of so many: (head bytes, body bytes or -1) of each, and buffers
    with heads and bodies in turn. `large` are bodies that are not in the pack, by number behind `start`."""
    table = table_of(pack, records)
    heads, bodies = table[::2], table[1::2]
    if max(heads) & MARK:
        heads = tuple(length & ~MARK for length in heads)
    small = bodies if max(bodies) < LARGE else tuple(size if size < LARGE else 0 for size in bodies)
    head_at = 8 * records + sum(heads[:first])
    body_at = 8 * records + sum(heads) + sum(small[:first])
    found = list(zip(heads[first:end], bodies[first:end], strict=True))
    if small is bodies and not any(heads[first:end]):
        # Nothing stands between the bodies.
        return found, [pack[body_at : body_at + sum(small[first:end])]]
    sizes: list[tuple[int, int]] = []
    parts: list[Buffer] = []
    for number, (head, size) in enumerate(found, start + first):
        if head:
            parts.append(pack[head_at : head_at + head])
            head_at += head
        if size < LARGE:
            parts.append(pack[body_at : body_at + size])
            body_at += size
        elif large and number in large:
            parts.append(large[number])
        else:
            size = -1
        sizes.append((head, size))
    return sizes, [b"".join(parts)] if small is bodies else parts


def _homes(found: Sequence[_Found]) -> list[tuple[str, int]]:
    """Return the homes also of what is in memory now: it may have to be read again by then."""
    homes: set[tuple[str, int]] = set()
    for one in found:
        if one.located.home is not None:
            homes.add(("generation", one.located.home.generation))
        elif one.located.entry is not None and one.located.entry.file:
            homes.add(("wal", one.located.entry.file))
    return sorted(homes)
