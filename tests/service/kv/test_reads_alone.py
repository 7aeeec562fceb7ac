"""Answers that name payloads, alone: the bytes come along, from a peer where they are not here, or it is said."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from logyard.machines.kv import KV
from logyard.machines.log import AppendLog
from logyard.protocol.errors import BadRequest, Corrupt, Gone, GroupStopped
from logyard.protocol.kv import Delete, Get, Put, encode
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
