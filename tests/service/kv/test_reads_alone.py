"""Answers that name payloads, alone: the bytes come along, from a peer where they are not here, or it is said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack
import pytest

from logyard.client import kv_requests
from logyard.engine.replica.member import Member
from logyard.engine.replica.reader import Wanted
from logyard.engine.types import Buffer
from logyard.machines.kv import KV
from logyard.machines.kv.state import State
from logyard.machines.log import AppendLog
from logyard.protocol.errors import BadRequest, Corrupt, Gone, GroupStopped, LogyardError
from logyard.protocol.frame import encode_frame
from logyard.protocol.kv import FROM_KEY, PUT, VALUES, Delete, Get, GetResult, Put, Txn, bodies_of, encode
from logyard.service.door import answers
from logyard.service.kv import reads as kv_reads
from logyard.service.kv.reads import KvReads

from ..rig import Group
from .test_watch_alone import frame_of

LARGE = b"L" * 5000


class Rig(Group):
    def __init__(self) -> None:
        super().__init__(KV())
        self.reads = KvReads(self, self.stretch, lambda member: 77)

    async def run(self, steps: kv_requests.Steps[GetResult], most: int = 1 << 30) -> GetResult:
        """What a client makes of the answers, none of which may be longer than `most`, with what comes along."""
        answer: Any = None
        while True:
            try:
                asked = steps.send(answer)
            except StopIteration as done:
                found: GetResult = done.value
                return found
            fetched = await self.reads.fetch(self.member, [asked.data])
            bodies = bodies_of(fetched.places, memoryview(b"".join(fetched.parts)))
            answer = fetched.answers[0], bodies
            assert len(fetched.answers[0]) + sum(map(len, fetched.parts)) <= most

    async def get(self, *keys: bytes) -> tuple[list[bytes], list[Any]]:
        """(the values that came along, all answers)."""
        found = await self.reads.fetch(self.member, [encode(Get(key))[0] for key in keys])
        assert [len(part) for part in found.parts] == [size for _, _, size in found.places]
        return [bytes(part) for part in found.parts], [msgpack.unpackb(one) for one in found.answers]


async def test_large_values_come_along_each_once() -> None:
    rig = Rig()
    index = rig.apply(frame_of(Put(b"a", LARGE)))
    rig.apply(frame_of(Put(b"b", b"small")), frame_of(Put(b"c", b"C" * 2000)))
    bodies, answers = await rig.get(b"a", b"b", b"c", b"a")
    assert bodies == [LARGE, b"C" * 2000] and len(answers) == 4
    assert [bytes(body) for body in (await rig.reads.read(rig.member, [(index, 0)])).values()] == [LARGE]


async def test_a_call_answers_what_fits_and_at_least_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_reads, "ANSWER_BYTES", 6000)
    rig = Rig()
    rig.apply(frame_of(Put(b"a", LARGE)), frame_of(Put(b"b", LARGE)), frame_of(Put(b"c", LARGE)))
    assert len((await rig.get(b"a", b"b", b"c"))[1]) == 2
    monkeypatch.setattr(kv_reads, "ANSWER_BYTES", 1)
    assert len((await rig.get(b"a", b"b"))[1]) == 1


def lie(key: bytes, body: bytes = LARGE) -> memoryview:
    """A put whose writer says that its value is empty."""
    command: bytes = msgpack.packb((PUT, key, (0, 0, b"d" * 16), 0, 0))
    return memoryview(b"".join(encode_frame([(b"", body)], command=command)))


async def test_what_is_asked_for_by_its_place_counts_as_long_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_reads, "ANSWER_BYTES", 6000)
    rig = Rig()
    places = [(rig.apply(frame_of(Put(key, LARGE))), 0) for key in (b"a", b"b", b"c")]
    asked = [msgpack.packb((VALUES, [place])) for place in places]
    assert len((await rig.reads.fetch(rig.member, asked)).answers) == 2
    monkeypatch.setattr(kv_reads, "QUESTION_BYTES_MAX", 12_000)
    with pytest.raises(LogyardError) as refused:
        await rig.reads.fetch(rig.member, [msgpack.packb((VALUES, places))])
    assert refused.value.code == "too_large"


async def test_a_value_is_as_long_as_it_is_whatever_its_writer_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_reads, "ANSWER_BYTES", 6000)
    rig = Rig()
    places = [(rig.apply(lie(key)), 0) for key in (b"a", b"b", b"c")]
    assert [len(some) for some in await rig.get(b"a", b"b", b"c")] == [2, 2]
    assert len(await rig.reads.read(rig.member, places)) == 1, "the client asks for the others"
    monkeypatch.setattr(kv_reads, "QUESTION_BYTES_MAX", 9000)
    everything = encode(Get(FROM_KEY, FROM_KEY))[0]
    one = await rig.reads.fetch(rig.member, [encode(Get(b"a"))[0], everything])
    assert len(one.answers) == len(one.parts) == 1
    with pytest.raises(LogyardError) as refused:
        await rig.reads.fetch(rig.member, [everything])
    assert refused.value.code == "too_large"


async def test_a_call_names_a_bounded_number_of_payloads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_reads, "PLACES_MAX", 2)
    rig = Rig()
    rig.apply(*[frame_of(Put(key, b"x" * 1024)) for key in (b"a", b"b", b"c")])
    assert len((await rig.get(b"a", b"b", b"c"))[1]) == 2
    with pytest.raises(LogyardError) as refused:
        await rig.reads.fetch(rig.member, [encode(Get(FROM_KEY, FROM_KEY))[0]])
    assert refused.value.code == "too_large"


async def test_an_answer_takes_room_for_what_it_reads_before_it_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    for key, size in ((b"a", 3 << 20), (b"b", 20 << 20)):
        rig.apply(frame_of(Put(key, bytes(size))))
    log: list[Any] = []

    async def take(size: int) -> None:
        log.append(size)

    tokens = answers.TAKE.set(take), answers.GIVE_BACK.set(lambda: log.append("back"))
    try:
        for key in (b"a", b"b"):
            await rig.get(key)
    finally:
        answers.TAKE.reset(tokens[0])
        answers.GIVE_BACK.reset(tokens[1])
    first = ["back", kv_reads.ABOUT_BYTES, "back"]
    assert log == [*first, 3 << 20, *first, kv_reads.ROOM_BYTES], "a call that waits holds no room itself"


async def test_small_values_are_read_pack_by_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_reads, "ROUND_BYTES", 5000)
    read: list[int] = []

    class Counting(Rig):
        async def read(self, member: Member, wanted: Sequence[Wanted]) -> list[Buffer]:
            read.append(sum(want.stop - want.start for want in wanted))
            return await super().read(member, wanted)

    rig = Counting()
    keys = [b"k%d" % number for number in range(9)]
    for key in keys:
        rig.apply(frame_of(Put(key, key * 1000)))
    assert (await rig.get(*keys))[0] == [key * 1000 for key in keys]
    assert len(read) == 5 and max(read) <= 5000


async def test_what_is_released_between_two_reads_of_an_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_reads, "ROUND_BYTES", 5000)

    class Releasing(Rig):
        async def read(self, member: Member, wanted: Sequence[Wanted]) -> list[Buffer]:
            found = await super().read(member, wanted)
            if not self.liveness.released:
                self.liveness.released = member.raft.applied
                self.apply(*[frame_of(Put(key, b"N" * 2000)) for key in (b"a", b"b", b"c")])
            return found

    rig = Releasing()
    rig.apply(*[frame_of(Put(key, LARGE)) for key in (b"a", b"b", b"c")])
    assert (await rig.get(b"a", b"b", b"c"))[0] == [b"N" * 2000] * 3


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("keys_only", [False, True])
@pytest.mark.parametrize("sort", ["version", "create", "mod", "value"])
async def test_a_long_range_in_another_order_comes_in_pages_too(
    sort: str, keys_only: bool, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came in one answer of any length, which no client takes above 128 MiB."""
    rig = Rig()
    for number in range(90):
        value = b"%03d" % (number * 37 % 50) * (1000 if large and sort != "value" else 100)
        rig.apply(frame_of(Put(b"k%02d" % (number * 7 % 40), value)))
    rig.apply(frame_of(Txn((), [Put(b"k%02d" % number, b"v" * 300) for number in (3, 33, 21)])))
    for descending in (False, True):
        for limit in (0, 1, 30, 40, 50):
            for bounds in ((0, 0, 0, 0), (30, 0, 0, 0)):
                get = Get(b"k", b"l", 0, limit, sort, descending, keys_only, False, bounds)
                whole = await rig.run(kv_requests.read(get))
                with monkeypatch.context() as patch:
                    patch.setattr(kv_requests, "ORDERED_BYTES", 2000, raising=False)
                    patch.setattr(kv_requests, "PAGE_BYTES", 2000)
                    assert await rig.run(kv_requests.read(get), most=4000) == whole
                    if whole.kvs and not keys_only:
                        size = sum(len(one.key) + len(one.value) for one in whole.kvs)
                        assert await rig.run(kv_requests.read(get, size)) == whole
                        with pytest.raises(LogyardError, match="larger than"):
                            await rig.run(kv_requests.read(get, size - 1))


@pytest.mark.parametrize("descending", [False, True])
async def test_the_pages_of_a_long_range_beside_a_writer_look_at_each_key_about_once(
    descending: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each page counted all keys behind it again."""
    monkeypatch.setattr(kv_requests, "PAGE_BYTES", 1000)
    rig = Rig()
    for number in range(200):
        rig.apply(frame_of(Put(b"k%03d" % number, b"v")))
    at, looked, pages = State.at, [0], [0]

    def look(self: State, *asked: Any) -> Any:
        looked[0] += 1
        return at(self, *asked)

    def beside(steps: kv_requests.Steps[GetResult]) -> kv_requests.Steps[GetResult]:
        asked = next(steps)
        while True:
            pages[0] += 1
            answer = yield asked
            rig.apply(frame_of(Put(b"k%03d" % (pages[0] % 200), b"new")), frame_of(Delete(b"k%03d" % (199 - pages[0]))))
            try:
                asked = steps.send(answer)
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]

    monkeypatch.setattr(State, "at", look)
    found = await rig.run(beside(kv_requests.read(Get(b"k", b"l", descending=descending))))
    assert sorted(one.key for one in found.kvs) == [b"k%03d" % number for number in range(200)] and found.count == 200
    assert {one.value for one in found.kvs} == {b"v"} and not found.more
    assert pages[0] > 9 and looked[0] <= 200 + pages[0]


async def test_a_lost_payload_is_stored_anew_and_read() -> None:
    rig = Rig()
    first, second = (rig.apply(frame_of(Put(key, key * 5000))) for key in (b"a", b"b"))
    rig.lost = {second}
    assert (await rig.get(b"a", b"b"))[0] == [b"a" * 5000, b"b" * 5000] and rig.fetched == [(second, second)]
    rig.lost = rig.absent = {first}
    with pytest.raises(Corrupt):
        await rig.get(b"a")


async def test_what_is_released_is_gone_and_nobody_is_asked() -> None:
    rig = Rig()
    index = rig.apply(frame_of(Put(b"a", LARGE)))
    rig.apply(frame_of(Delete(b"a")))
    rig.liveness.released = rig.member.raft.applied
    for place in ((index, 0), (99, 0)):
        with pytest.raises(Gone):
            await rig.reads.read(rig.member, [place])
    assert not rig.fetched


async def test_what_is_released_while_an_answer_waits_for_room_is_asked_again() -> None:
    rig = Rig()
    rig.apply(frame_of(Put(b"a", LARGE)))

    async def busy(size: int) -> None:
        rig.liveness.released = rig.member.raft.applied
        rig.apply(frame_of(Put(b"a", b"N" * 2000)))

    token = answers.TAKE.set(busy)
    try:
        bodies, said = await rig.get(b"a")
    finally:
        answers.TAKE.reset(token)
    assert bodies == [b"N" * 2000] and said[0][1] == 3


async def test_a_member_below_its_floor_asks_no_peer() -> None:
    rig = Rig()
    index = rig.apply(frame_of(Put(b"a", LARGE)))
    rig.lost = {index}
    rig.member.raise_floor(99)
    with pytest.raises(Corrupt):
        await rig.get(b"a")
    assert not rig.fetched


async def test_a_leader_answers_by_its_clock_and_a_follower_by_what_it_applied() -> None:
    asked: list[int] = []

    class Asked(AppendLog):
        def fetch(self, request: bytes, now: int) -> Any:
            asked.append(now)
            return type("Found", (), {"answer": b"", "payloads": (), "size": 0})

    group = Group(Asked())
    reads = KvReads(group, group.stretch, lambda member: 77)
    group.member.log_time = 33
    await reads.fetch(group.member, [b"?"])
    group.member.lead()
    await reads.fetch(group.member, [b"?"])
    assert asked == [33, 77]


async def test_who_can_not_answer_says_so() -> None:
    log = Group(AppendLog())
    with pytest.raises(BadRequest, match="answers no such questions"):
        await KvReads(log, log.stretch, lambda member: 0).fetch(log.member, [b"?"])
    rig = Rig()
    rig.member.state, rig.member.reason = "stopped", "a test"
    with pytest.raises(GroupStopped):
        await rig.get(b"a")
