"""What machines send to clients' sessions, without a node: in order, never too much, and nothing that is released."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import trio
import trio.testing

from logyard.engine.entry import Entry, build_commands
from logyard.engine.machine import Deliver, PayloadRange, PayloadRef, Position, Send
from logyard.engine.replica.delivery import LACKING_BYTES, Delivery
from logyard.engine.replica.member import Member
from logyard.engine.replica.reader import Located, Wanted
from logyard.protocol.errors import Corrupt
from logyard.protocol.frame import LARGE, encode_frame

from .doubles import TERM, UID, Living, Recorder, member_of

SESSION, OTHER = 5, 6
RECORDS = 3
BIG = b"L" * LARGE


class Sink:
    """A client's connection; `full`: it takes nothing."""

    def __init__(self) -> None:
        self.got: list[tuple[Mapping[str, Any], bytes]] = []
        self.missed_ = 0
        self.full = False
        self.roomy = trio.Event()
        self.roomy.set()
        self.asked: list[int] = []

    async def room(self, size: int) -> None:
        self.asked.append(size)
        await self.roomy.wait()

    def push(self, uid: int, session: int, header: Mapping[str, Any], body: Sequence[Any]) -> bool:
        if not self.full:
            self.got.append((header, b"".join(bytes(part) for part in body)))
        return not self.full

    def missed(self) -> None:
        self.missed_ += 1


class Bench:
    """A group whose entries have three records each, all of which live: heads `h`, bodies that say what they are, the
    third one large where `big`."""

    def __init__(self, nursery: trio.Nursery, count: int = 4, queue_bytes: int = 1000, big: bool = False) -> None:
        self.big = big
        self.entries = {index: self.entry(index) for index in range(1, count + 1)}
        self.member: Member = member_of(Recorder())[0]
        self.member.raft.commit = count
        self.living = cast(Living, self.member.liveness)
        self.living.places = {(index, number) for index in self.entries for number in range(RECORDS)}
        self.lost: set[int] = set()
        self.damaged: set[int] = set()
        self.fetched: list[int] = []
        self.pinned: list[tuple[str, int]] = []
        self.gate = trio.Event()
        self.gate.set()
        self.sink = Sink()
        self.delivery = Delivery(self, self, self.fetch, nursery.start_soon, queue_bytes)
        self.delivery.sinks[SESSION] = self.sink

    def entry(self, index: int) -> Entry:
        bodies = [b"%d.%d" % (index, number) for number in range(RECORDS)]
        if self.big:
            bodies[-1] = BIG
        frame = memoryview(b"".join(encode_frame([(b"h", body) for body in bodies], command=b"put")))
        entry = build_commands(UID, index, TERM, 5, [frame])
        entry.file = 3
        return entry

    def payload_entries(self, member: Member, first: int, last: int) -> Iterator[Located]:
        if first in self.damaged:
            raise Corrupt("a segment", 0, "this", "that")
        if first not in self.lost:
            entry = self.entries[first]
            yield Located(first, TERM, entry.data, entry, None)

    async def read(self, member: Member, wanted: Sequence[Wanted]) -> list[Any]:
        await self.gate.wait()
        found = []
        for one in wanted:
            assert one.located.entry is not None and one.located.entry.bodies is not None
            found.append(memoryview(one.located.entry.bodies[one.unit.number])[one.start : one.stop])
        return found

    def pin(self, home: tuple[str, int]) -> None:
        self.pinned.append(home)

    def unpin(self, home: tuple[str, int]) -> None:
        self.pinned.remove(home)

    async def fetch(self, member: Member, first: int, last: int) -> None:
        self.fetched.append(first)
        self.lost.discard(first)
        self.damaged.discard(first)

    def deliver(self, *refs: PayloadRef | PayloadRange, session: int = SESSION) -> None:
        self.delivery.deliver(self.member, 9, Deliver(session, refs, b"t"))

    def send(self, message: bytes) -> None:
        self.delivery.send(self.member, 9, Send(SESSION, message))

    async def got(self) -> list[tuple[str, bytes]]:
        """What the client has when nothing is under way any more."""
        await trio.testing.wait_all_tasks_blocked()
        return [(header["kind"], body) for header, body in self.sink.got]


def ref(index: int, ordinal: int, uid: int = UID) -> PayloadRef:
    return PayloadRef(uid=uid, index=index, term=TERM, ordinal=ordinal, size=3, hash=b"")


def span(index: int, first: int, end: int, last: int = 0) -> PayloadRange:
    return PayloadRange(Position(index, first), Position(last or index, end))


async def test_records_come_with_their_places_and_sizes() -> None:
    async with trio.open_nursery() as nursery:
        bench = Bench(nursery)
        bench.deliver(ref(1, 1), span(2, 0, 2))
        assert bench.pinned == [("wal", 3)], "from now on"
        assert await bench.got() == [("records", b"h1.1h2.0h2.1")] and not bench.pinned
        header = bench.sink.got[0][0]
        assert header["records"] == [[1, 1, 1, 3], [2, 0, 1, 3], [2, 1, 1, 3]]
        assert (header["index"], header["tag"]) == (9, b"t")


async def test_large_bodies_are_units_of_their_own() -> None:
    async with trio.open_nursery() as nursery:
        bench = Bench(nursery, big=True)
        bench.deliver(span(1, 1, 3))
        assert await bench.got() == [("records", b"h1.1h" + BIG)]
        assert bench.sink.got[0][0]["records"] == [[1, 1, 1, 3], [1, 2, 1, LARGE]]


async def test_what_is_released_not_committed_or_anothers_is_left_out() -> None:
    async with trio.open_nursery() as nursery:
        bench = Bench(nursery)
        bench.living.places -= {(1, 1), (2, 0)}
        bench.member.raft.commit = 3
        bench.deliver(span(1, 0, 3), ref(2, 0), ref(4, 0), ref(3, 0, UID + 1), span(2, 0, 3, last=3), ref(3, 2))
        assert await bench.got() == [("records", b"h1.0h1.2h3.2")]


async def test_a_message_goes_at_once_and_waits_for_records_before_it() -> None:
    async with trio.open_nursery() as nursery:
        bench = Bench(nursery)
        bench.send(b"first")
        assert len(bench.sink.got) == 1
        bench.gate = trio.Event()
        bench.deliver(ref(1, 0))
        used_again = bytearray(b"last")
        bench.delivery.send(bench.member, 9, Send(SESSION, cast(bytes, used_again)))
        used_again[:] = b"over"
        assert len(await bench.got()) == 1
        bench.gate.set()
        assert await bench.got() == [("message", b"first"), ("records", b"h1.0"), ("message", b"last")]


async def test_no_more_than_a_queue_waits_but_one_of_any_size_does() -> None:
    async with trio.open_nursery() as nursery:
        bench = Bench(nursery, queue_bytes=10)
        bench.gate = trio.Event()
        bench.deliver(span(1, 0, 3))
        bench.deliver(ref(2, 0))
        bench.send(b"no room")
        assert (bench.delivery.dropped, bench.sink.missed_) == (2, 2) and len(bench.pinned) == 1
        bench.gate.set()
        assert await bench.got() == [("records", b"h1.0h1.1h1.2")]
        bench.send(b"again")
        assert (await bench.got())[-1] == ("message", b"again") and not bench.pinned


async def test_nothing_is_read_for_who_is_not_here_and_who_takes_nothing_has_missed_it() -> None:
    async with trio.open_nursery() as nursery:
        bench = Bench(nursery)
        bench.deliver(ref(1, 0), session=OTHER)
        assert not bench.pinned and not bench.sink.missed_
        bench.gate = trio.Event()
        bench.deliver(ref(1, 0))
        del bench.delivery.sinks[SESSION]
        bench.gate.set()
        assert not await bench.got() and not bench.pinned
        bench.delivery.sinks[SESSION] = bench.sink
        bench.sink.full = True
        bench.send(b"x")
        assert bench.delivery.dropped == 1


async def test_what_is_lost_or_damaged_here_is_fetched_first_and_counts_as_much_as_it_may_be() -> None:
    async with trio.open_nursery() as nursery:
        bench = Bench(nursery, queue_bytes=LACKING_BYTES)
        bench.lost, bench.damaged = {2}, {3}
        bench.deliver(ref(1, 0), ref(2, 1), ref(3, 2))
        bench.send(b"no room")
        assert bench.delivery.dropped == 1
        assert await bench.got() == [("records", b"h1.0h2.1h3.2")] and bench.fetched == [2, 3]


async def test_what_could_not_be_fetched_is_missed_and_never_left_out() -> None:
    """The client of a queue takes what a delivery leaves out for settled, and asks for it no more (seed 4311757)."""
    async with trio.open_nursery() as nursery:
        bench = Bench(nursery, queue_bytes=LACKING_BYTES)
        bench.lost = {2}

        async def in_vain(member: Member, first: int, last: int) -> None:
            bench.fetched.append(first)

        bench.delivery._fetch = in_vain
        bench.deliver(ref(1, 0), ref(2, 1))
        assert not await bench.got() and bench.sink.missed_ == 1 and bench.fetched == [2] and not bench.pinned
        bench.lost.clear()
        bench.deliver(ref(1, 0), ref(2, 1))
        assert await bench.got() == [("records", b"h1.0h2.1")]


async def test_what_cannot_be_read_is_missed_and_what_follows_is_not() -> None:
    async with trio.open_nursery() as nursery:
        bench = Bench(nursery)
        read = bench.read

        async def fails(member: Member, wanted: Sequence[Wanted]) -> list[Any]:
            bench.delivery._reader = cast(Any, SimpleNamespace(payload_entries=bench.payload_entries, read=read))
            raise Corrupt("a generation", 0, "this", "that")

        bench.delivery._reader = cast(Any, SimpleNamespace(payload_entries=bench.payload_entries, read=fails))
        bench.deliver(ref(1, 0))
        bench.deliver(ref(2, 0))
        assert await bench.got() == [("records", b"h2.0")] and bench.sink.missed_ == 1 and not bench.pinned


async def test_who_listens_wakes_when_the_group_stirs_or_its_patience_ends(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with trio.open_nursery() as nursery:
        bench = Bench(nursery)
        nursery.start_soon(bench.delivery.stirred, UID, 100.0)
        nursery.start_soon(bench.delivery.stirred, UID, 200.0)
        began = trio.current_time()
        await trio.testing.wait_all_tasks_blocked()
        bench.delivery.stir(UID)
        bench.delivery.stir(UID + 1)
    assert trio.current_time() == began and not bench.delivery._lots
    await bench.delivery.stirred(UID, 3.0)
    assert trio.current_time() == began + 3.0 and not bench.delivery._lots


async def test_payloads_are_read_when_their_connection_has_room() -> None:
    async with trio.open_nursery() as nursery:
        bench = Bench(nursery)
        bench.sink.roomy = trio.Event()
        read = bench.gate = trio.Event()
        bench.deliver(ref(1, 1))
        assert await bench.got() == [] and bench.sink.asked == [bench.sink.asked[0]], "nothing is read yet"
        bench.sink.roomy.set()
        await trio.testing.wait_all_tasks_blocked()
        bench.sink.roomy = trio.Event()
        read.set()
        assert await bench.got() == [], "others took the room meanwhile"
        bench.sink.roomy.set()
        assert await bench.got() == [("records", b"h1.1")] and not bench.pinned and not bench.sink.missed_
