"""Streams of watches, alone: what is pushed in which order, and why a stream ends."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
import trio
import trio.testing

from logyard.engine.raft.state import FOLLOWER
from logyard.engine.replica.member import Member
from logyard.machines.kv import KV
from logyard.machines.kv.command import COMPACT
from logyard.protocol.errors import BadRequest, LogyardError, NotLeader, Refused, UnknownGroup
from logyard.protocol.frame import Buffer, encode_frame
from logyard.protocol.kv import PUT, Operation, Parts, Put, Txn, encode, encode_numbers
from logyard.service.door import answers
from logyard.service.door.pushes import LISTENING, Pushing
from logyard.service.kv import reads as kv_reads
from logyard.service.kv import tracks
from logyard.service.kv import watch as kv_watch
from logyard.service.kv.reads import KvReads
from logyard.service.kv.tracks import PARTS, Watch, prefix_end
from logyard.service.kv.verbs import KvVerbs
from logyard.service.kv.watch import Groups, Watches

from ..rig import Group


def frame_of(operation: Operation) -> memoryview:
    """A change as a client's frame."""
    command, bodies = encode(operation)
    records: list[tuple[bytes, Buffer | None]] = [(b"", body) for body in bodies]
    return memoryview(b"".join(encode_frame(records or [(b"", None)], command=command)))


class Sink:
    """A connection; it takes nothing while it is `full`."""

    def __init__(self) -> None:
        self.pushed: list[Mapping[str, Any]] = []
        self.bytes = 0
        self.free = trio.Event()
        self.free.set()

    def push(self, header: Mapping[str, Any], parts: Sequence[Any]) -> None:
        self.pushed.append(dict(header))
        self.bytes += sum(map(len, parts))

    async def room(self, size: int) -> None:
        await self.free.wait()

    def kinds(self) -> list[str]:
        return [header["kind"] for header in self.pushed]

    def revisions(self) -> list[int]:
        return [one[0] for header in self.pushed for one in header.get("revisions", ())]


class Taking:
    """A connection that has sent all that there was."""

    unsent = 0

    async def drained(self, size: int) -> None:
        """Wait for nothing."""

    def queue(self, frame: list[Buffer]) -> None:
        """Take a frame."""


class Rig(Group):
    def __init__(self) -> None:
        super().__init__(KV(), "kv")
        self.here = True
        self.sink = Sink()
        self.ended: list[LogyardError] = []
        reads = KvReads(self, self.stretch, lambda member: 0)
        self.watches = Watches(Groups(7, self.find, lambda uid: self.here), reads.read)

    def put(self, key: bytes, value: bytes = b"v") -> None:
        self.apply(frame_of(Put(key, value)))

    def row(self, number: int, prefix: bytes, revision: int = 0) -> list[Any]:
        return [number, prefix, prefix_end(prefix), revision, 0]

    async def consistent(self, name: str, consistency: str) -> Member:
        return self.member

    @asynccontextmanager
    async def listening(self, *rows: list[Any], local: bool = False) -> AsyncIterator[None]:
        async def listen() -> None:
            try:
                await self.watches.listen("kv", 5, rows, local, self.sink)
            except LogyardError as error:
                self.ended.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(listen)
            await settled()
            yield
            await settled()
            nursery.cancel_scope.cancel()


async def settled() -> None:
    await trio.testing.wait_all_tasks_blocked()


async def test_a_watch_is_told_where_it_begins_and_then_what_happens() -> None:
    rig = Rig()
    rig.put(b"a/1")
    async with rig.listening(rig.row(1, b"a/"), rig.row(2, b"a/", 2)):
        assert rig.sink.pushed[0] == {
            "kind": "created", "watches": [(1, 3), (2, 2)], "revision": 2, "uid": rig.member.uid,
        }  # fmt: skip
        assert rig.sink.revisions() == [2]
        rig.put(b"b")
        rig.put(b"a/2", b"L" * 3000)
        await settled()
    assert rig.sink.revisions() == [2, 4] and rig.sink.bytes == 3000
    last = rig.sink.pushed[-1]["revisions"][0]
    assert sorted(last[1][0][0]) == [1, 2], "one event for both watches"


async def test_watches_come_and_go_while_the_stream_lasts() -> None:
    rig = Rig()
    async with rig.listening(rig.row(1, b"a")):
        rig.watches.change(5, [rig.row(2, b"b")], [1])
        await settled()
        rig.put(b"a")
        rig.put(b"b")
        await settled()
    assert rig.sink.revisions() == [3] and rig.sink.kinds().count("created") == 2


async def test_a_slow_listener_misses_nothing() -> None:
    rig = Rig()
    async with rig.listening(rig.row(1, b"k")):
        rig.put(b"k0")
        rig.sink.free = trio.Event()
        await settled()
        for number in range(1, 9):
            rig.put(b"k%d" % number)
        await settled()
        before = rig.sink.revisions()
        assert len(before) <= 1
        rig.sink.free.set()
        await settled()
    assert rig.sink.revisions() == list(range(2, 11))


KEYS = (b"k", prefix_end(b"k"))


def long_revision(rig: Rig) -> None:
    """Revision 3, of 40 events; nine go into a part."""
    rig.put(b"k")
    rig.apply(frame_of(Txn([], [Put(b"k%02d" % number, b"v" * 50) for number in range(40)])))


async def test_a_long_revision_goes_in_parts_to_who_joins_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracks, "PART_BYTES", 1000)
    rig = Rig()
    long_revision(rig)
    rig.put(b"k")
    async with rig.listening([1, *KEYS, 2, PARTS]):
        pass
    sent = [header for header in rig.sink.pushed if header["kind"] == "events"]
    assert [header.get("rest", 0) for header in sent] == [0, 9, 18, 27, 36, 0, 0]
    assert [header["low"] for header in sent] == [3, 3, 3, 3, 3, 4, 5], "a part of it is not all of it"
    rig.sink = Sink()
    async with rig.listening([1, *KEYS, 2, 0]):
        pass
    assert rig.sink.revisions() == [2, 3, 4] and not any("rest" in header for header in rig.sink.pushed)


class Stopping(Sink):
    """It takes one part, and then nothing until it is told to."""

    def push(self, header: Mapping[str, Any], parts: Sequence[Any]) -> None:
        super().push(header, parts)
        if [one for one in self.pushed if "rest" in one] == [header]:
            self.free = trio.Event()


async def test_who_joins_in_the_midst_of_a_long_revision_sees_it_from_its_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracks, "PART_BYTES", 1000)
    rig = Rig()
    rig.sink = Stopping()
    long_revision(rig)
    async with rig.listening([1, *KEYS, 2, PARTS]):
        assert rig.sink.pushed[-1]["rest"] == 9
        rig.watches.change(5, [[2, *KEYS, 3, PARTS], [3, *KEYS, 4, PARTS]], [])
        rig.put(b"k")
        await settled()
        assert rig.sink.pushed[-1]["rest"] == 9
        rig.sink.free.set()
    seen: dict[int, list[tuple[int, int]]] = {}
    joined = Parts()
    for header in rig.sink.pushed:
        if header["kind"] == "created":
            seen |= {number: [] for number, _ in header["watches"]}
        elif header["kind"] == "events":
            for revision, shown in joined.add(header, {})[0]:
                for number in seen:
                    events = [one for one in shown if number in one[0]]
                    seen[number] += [(revision, len(events))] if events else []
    assert seen == {1: [(2, 1), (3, 40), (4, 1)], 2: [(3, 40), (4, 1)], 3: [(4, 1)]}


async def test_a_long_revision_is_asked_for_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracks, "PART_BYTES", 1000)
    rig = Rig()
    long_revision(rig)
    joined, nexts = Parts(), list[int]()
    found: list[Any] = []
    while not found:
        header, _ = await rig.watches.events(rig.member, Watch(0, *KEYS, PARTS), 3, 3.0, joined.rest)
        found, _ = joined.add(header, {})
        nexts.append(header["next"])
    assert [(revision, len(shown)) for revision, shown in found] == [(3, 40)] and nexts == [3, 3, 3, 3, 4]


async def test_who_asks_in_the_midst_of_a_long_revision_keeps_its_place_where_that_is_not_known_yet(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    monkeypatch.setattr(tracks, "PART_BYTES", 1000)
    ahead, behind = Rig(), Rig()
    long_revision(ahead)
    behind.put(b"k")
    joined, at = Parts(), 3
    found: list[Any] = []
    # As after a change of leader: the second answer is of a member that has not applied so much.
    for rig in (ahead, behind, *[ahead] * 4):
        assert not found
        header, _ = await rig.watches.events(rig.member, Watch(0, *KEYS, PARTS), at, 1.0, joined.rest)
        found, _ = joined.add(header, {})
        at = header["next"]
    assert [(revision, len(shown)) for revision, shown in found] == [(3, 40)] and at == 4


async def test_what_is_compacted_is_told_and_the_others_go_on() -> None:
    rig = Rig()
    for _ in range(4):
        rig.put(b"k")
    rig.apply(memoryview(b"".join(encode_frame([(b"", None)], command=encode_numbers(COMPACT, 4)))))
    async with rig.listening(rig.row(1, b"k", 2), rig.row(2, b"k", 5)):
        pass
    gone = [header for header in rig.sink.pushed if header["kind"] == "compacted"]
    assert gone == [{"kind": "compacted", "watches": [1], "compacted": 4}] and rig.sink.revisions() == [5]


async def test_silence_says_how_far_it_is(autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig()
    async with rig.listening(rig.row(1, b"k")):
        await trio.sleep(2.5 * kv_watch.ALIVE_S)
        assert rig.sink.kinds() == ["created", "alive", "alive"]
    assert rig.sink.pushed[-1] == {"kind": "alive", "next": 2, "revision": 1}


@pytest.mark.parametrize("why", ["closed", "deposed", "deleted"])
async def test_why_a_stream_ends(why: str) -> None:
    rig = Rig()
    async with rig.listening(rig.row(1, b"k")):
        if why == "closed":
            rig.watches.change(5, [], [], close=True)
        elif why == "deposed":
            rig.core.role, rig.core.leader = FOLLOWER, 2
        else:
            rig.here = False
        rig.put(b"k")
        await settled()
    kinds = {"closed": Refused, "deposed": NotLeader, "deleted": UnknownGroup}
    assert [type(one) for one in rig.ended] == [kinds[why]] and not rig.watches.streams
    with pytest.raises(Refused):
        rig.watches.change(5, [], [])


async def test_any_member_serves_who_says_so() -> None:
    rig = Rig()
    rig.core.role, rig.core.leader = FOLLOWER, 2
    async with rig.listening(rig.row(1, b"k"), local=True):
        rig.put(b"k")
    assert rig.sink.revisions() == [2] and not rig.ended


async def test_a_stream_keeps_its_watches_and_not_the_arguments_that_it_was_opened_with() -> None:
    """Lists of lists, which took as much again as the watches that came of them."""
    rig = Rig()
    verbs = KvVerbs(7, 1.0, rig.consistent, KvReads(rig, rig.stretch, lambda member: 0), rig.watches)
    system: Any = SimpleNamespace(kv=verbs)
    row = rig.row(1, b"a/")
    arguments = {"name": "kv", "stream": 5, "add": [row]}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(LISTENING["kv_watch"], system, arguments, Pushing(1, Taking()))
        del arguments
        await settled()
        assert rig.watches.streams[5].tracks.place
        assert not [one for one in gc.get_referrers(row) if isinstance(one, list)]
        nursery.cancel_scope.cancel()


async def test_two_streams_have_two_numbers() -> None:
    rig = Rig()
    async with rig.listening(rig.row(1, b"k")):
        with pytest.raises(BadRequest):
            await rig.watches.listen("kv", 5, [], False, Sink())
    with pytest.raises(BadRequest):
        await rig.watches.listen("kv", 6, [["no number"]], False, Sink())
    assert not rig.watches.streams


async def test_asking_again_and_again(autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig()
    watch = Watch(0, b"k", b"", 0)
    header, _ = await rig.watches.events(rig.member, watch, 0, 3.0)
    assert header == {"kind": "events", "uid": rig.member.uid, "revisions": [], "next": 2, "places": []}
    assert trio.current_time() >= 3
    rig.put(b"other")
    rig.put(b"k", b"L" * 3000)
    header, parts = await rig.watches.events(rig.member, watch, header["next"], 3.0)
    assert [one[0] for one in header["revisions"]] == [3] == [header["next"] - 1] and [len(one) for one in parts] == [
        3000
    ]


@pytest.mark.parametrize("wait_s", [0.0, 3.0])
async def test_who_asks_again_and_again_gets_values_however_long_they_are_read(
    wait_s: float, autojump_clock: trio.testing.MockClock
) -> None:
    rig = Rig()

    async def slow(size: int) -> None:
        await trio.sleep(10.0)

    rig.put(b"k", b"L" * 3000)
    token = answers.TAKE.set(slow)
    try:
        header, parts = await rig.watches.events(rig.member, Watch(0, b"k", b"", 0), 2, wait_s)
    finally:
        answers.TAKE.reset(token)
    assert [one[0] for one in header["revisions"]] == [2] and [len(one) for one in parts] == [3000]


async def test_a_push_holds_what_it_is_and_not_what_writers_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_reads, "ANSWER_BYTES", 6000)
    rig = Rig()
    for key in (b"k1", b"k2", b"k3"):
        command: bytes = msgpack.packb((PUT, key, (0, 0, b"d" * 16), 0, 0))
        rig.apply(memoryview(b"".join(encode_frame([(b"", b"L" * 5000)], command=command))))
    async with rig.listening(rig.row(1, b"k", 2)):
        pass
    assert rig.sink.revisions() == [2, 3, 4] and rig.sink.bytes == 5000, "clients ask for the others"


async def test_what_is_compacted_while_it_waits_for_room_ends_no_stream() -> None:
    rig = Rig()
    rig.put(b"k", b"L" * 3000)

    async def busy(size: int) -> None:
        if not rig.liveness.released:
            rig.put(b"k", b"small")
            rig.apply(memoryview(b"".join(encode_frame([(b"", None)], command=encode_numbers(COMPACT, 3)))))
            rig.liveness.released = rig.member.raft.applied

    token = answers.TAKE.set(busy)
    try:
        async with rig.listening(rig.row(1, b"k", 2)):
            pass
        assert rig.sink.revisions() == [2] and not rig.sink.bytes and not rig.ended
    finally:
        answers.TAKE.reset(token)


async def test_who_asks_is_told_of_what_is_compacted_while_it_waits_for_room() -> None:
    rig = Rig()
    rig.put(b"k", b"L" * 3000)

    async def busy(size: int) -> None:
        rig.put(b"k", b"small")
        rig.apply(memoryview(b"".join(encode_frame([(b"", None)], command=encode_numbers(COMPACT, 3)))))
        rig.liveness.released = rig.member.raft.applied

    token = answers.TAKE.set(busy)
    try:
        header, _ = await rig.watches.events(rig.member, Watch(0, b"k", b"", 0), 2, 3.0)
    finally:
        answers.TAKE.reset(token)
    assert header == {"kind": "compacted", "compacted": 3}
