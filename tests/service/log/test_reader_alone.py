"""Reading one log, alone: what is visible, what is fetched when it is not here, and what is refused."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from logyard.engine.replica.member import Member
from logyard.machines.log import AppendLog
from logyard.machines.log.command import KEYED
from logyard.machines.log.slices import Long
from logyard.machines.queue import Queue
from logyard.payloads.reference import Position
from logyard.protocol.errors import Busy, Corrupt, Gone, OutOfRange, WrongKind
from logyard.protocol.frame import PIECE, PIECED, UNIFORM, encode_frame, encode_parts
from logyard.protocol.records import Page
from logyard.service.log.reader import LogReader, append_log

from ..rig import Group

LARGE = b"L" * 10_000


class Rig(Group):
    def __init__(self) -> None:
        super().__init__(AppendLog())
        self.reader = LogReader(7, self, self.stretch, self.found)

    async def page(self, offset: int, records: int = 100, size: int = 1 << 20, wait_s: float = 0.0) -> Page:
        header, blocks = await self.reader.poll(self.member, offset, records, size, wait_s, True)
        assert header["node"] == 7 and (header["start"], header["end"]) == (self.machine.start, self.machine.end)
        return Page(b"".join(blocks), header["start"], header["end"], 7, offset, records)

    async def poll(self, offset: int, records: int = 100, size: int = 1 << 20, wait_s: float = 0.0) -> list[bytes]:
        return [record.payload or b"" for record in await self.page(offset, records, size, wait_s)]


async def test_records_are_what_is_applied_from_an_offset_on() -> None:
    rig = Rig()
    rig.append(b"0", b"1", b"2")
    rig.append(LARGE, LARGE)
    assert await rig.poll(1) == [b"1", b"2", LARGE, LARGE]
    assert await rig.poll(1, records=2) == [b"1", b"2"] and await rig.poll(5) == []
    assert await rig.poll(3, size=1) == [LARGE], "one at least"
    for offset in (-1, 6):
        with pytest.raises(OutOfRange):
            await rig.poll(offset)


async def test_a_poll_at_the_end_waits_for_the_next_record(autojump_clock: trio.testing.MockClock) -> None:
    rig = Rig()
    rig.append(b"0")
    got: list[bytes] = []

    async def follow() -> None:
        got.extend(await rig.poll(1, wait_s=60.0))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(follow)
        await trio.testing.wait_all_tasks_blocked()
        assert not got
        rig.append(b"1")
    assert got == [b"1"]
    assert await rig.poll(2, wait_s=60.0) == [], "and not for ever"
    assert trio.current_time() == pytest.approx(60, abs=1)


async def test_parts_of_a_body() -> None:
    rig = Rig()
    rig.append(b"small", LARGE)
    read = rig.reader.read_body
    assert bytes(await read(rig.member, 0, 1, 3)) == b"ma"  # type: ignore[arg-type]
    assert bytes(await read(rig.member, 1, 9_998, None)) == b"LL"  # type: ignore[arg-type]
    for start, stop in ((0, 6), (4, 3), (-1, 2)):
        with pytest.raises(OutOfRange) as refused:
            await read(rig.member, 0, start, stop)
        assert refused.value.details["end"] == 5


async def test_a_lost_entry_comes_from_a_peer_with_all_up_to_the_next_anchor() -> None:
    rig = Rig()
    for number in range(4):
        rig.append(b"%d" % number)
    rig.lost = {2, 3}
    assert await rig.poll(1) == [b"1"], "as few as can be"
    assert rig.fetched == [(0, 4)]
    assert await rig.poll(0) == [b"0", b"1", b"2", b"3"] and len(rig.fetched) == 1


async def test_what_no_peer_has_is_said_and_never_skipped() -> None:
    rig = Rig()
    for number in range(3):
        rig.append(b"%d" % number)
    rig.lost = rig.absent = {2}
    with pytest.raises(Corrupt):
        await rig.poll(0)
    assert rig.fetched == [(0, 3)] and not rig.damaged


@pytest.mark.parametrize(("path", "mended"), [("7.seg", True), ("7.ring", True), ("generation-1", False)])
async def test_a_damaged_entry_without_payload_has_its_group_mended(path: str, mended: bool) -> None:
    """No peer gives it alone; what is damaged in a generation is of payloads, which peers do give."""
    rig = Rig()
    rig.append(b"0")
    damage = Corrupt(path, 4096, "entry 1", "other bytes")

    def payload_entries(*_: object) -> object:
        raise damage

    rig.payload_entries = payload_entries  # type: ignore[assignment]
    # What a peer gives beside it is not all that is missing.
    rig.lost = {1}
    with pytest.raises(Corrupt):
        await rig.poll(0)
    assert rig.damaged == ([damage] if mended else [])


def in_pieces(rig: Rig, *bodies: bytes) -> bytes:
    """A record whose payload came in pieces of one size, in entries of their own before others; its bytes."""
    offset, first = rig.machine.end, len(rig.entries.entries) + 1
    for number, body in enumerate(bodies):
        region = PIECED.pack(1, number * len(body))
        parts = encode_parts([0, len(body)], [b""], [], [body], region, flags=UNIFORM | PIECE, session=1)
        rig.core.on_applied(rig.entries.add_frames(memoryview(b"".join(parts))))
    rig.append(b"")
    rig.machine.long[offset] = Long(sum(map(len, bodies)), ((first, len(bodies[0]), len(bodies)),))
    return b"".join(bodies)


async def test_pieces_of_a_long_payload_that_are_lost_come_from_a_peer() -> None:
    rig = Rig()
    body = in_pieces(rig, *(bytes([number]) * 5000 for number in range(4)))
    rig.lost = {2, 4}
    read = rig.reader.read_body
    assert bytes(await read(rig.member, 0, 10_000, 15_000)) == body[10_000:15_000]  # type: ignore[arg-type]
    assert not rig.fetched, "what nobody asks for is not looked for"
    assert bytes(await read(rig.member, 0, 4000, 9000)) == body[4000:9000]  # type: ignore[arg-type]
    assert rig.fetched == [(2, 2)]
    rig.lost |= {1, 2}
    assert bytes(await read(rig.member, 0, 0, None)) == body  # type: ignore[arg-type]
    assert rig.fetched[1:] == [(1, 2), (4, 4)] and not rig.lost
    rig.lost = {3}
    assert await rig.poll(0) == [body] and not rig.lost
    rig.lost, rig.absent = {3}, {3}
    assert [one.left_out for one in await rig.page(0)] == [True], "a poll goes on past what nobody has"
    with pytest.raises(Corrupt, match="a piece of 5000 bytes at entry 3"):
        await read(rig.member, 0, 0, None)


async def test_a_long_record_that_goes_while_its_pieces_are_fetched_is_gone_and_not_damaged() -> None:
    rig = Rig()
    in_pieces(rig, b"a" * 5000, b"b" * 5000)
    in_pieces(rig, b"c" * 5000, b"d" * 5000)
    rig.lost = {2, 5}

    async def truncated(member: Member, first: int, last: int) -> int:
        rig.machine.start = 1
        return 0

    rig.reader._stretch = truncated
    with pytest.raises(OutOfRange):
        await rig.reader.read_body(rig.member, 0, 0, None)
    rig.machine.start = 0
    long = rig.machine.long[1]

    async def replaced(member: Member, first: int, last: int) -> int:
        del rig.machine.long[1]
        return 0

    rig.reader._stretch = replaced
    with pytest.raises(Gone, match="gave way"):
        await rig.reader.read_body(rig.member, 1, 0, None)
    rig.machine.long[1] = long
    rig.member.raise_floor(99)
    with pytest.raises(Gone, match="has not caught up"):
        await rig.reader.read_body(rig.member, 1, 0, None)


async def test_below_the_payload_floor_nothing_is_damaged_but_gone() -> None:
    rig = Rig()
    rig.append(b"0")
    rig.append(b"1")
    rig.lost = {1}
    rig.member.raise_floor(99)
    with pytest.raises(Gone, match="has not caught up"):
        await rig.poll(0)
    assert not rig.fetched
    rig.lost = {1, 2}
    with pytest.raises(Busy):
        await rig.reader.position_of(rig.member, 1)


async def test_positions_at_the_start_in_the_middle_and_at_the_end() -> None:
    rig = Rig()
    where = rig.reader.position_of
    assert await where(rig.member, 0) == Position(0, 0)
    first = rig.append(b"a", b"a", b"a")
    rig.append(b"b", b"b")
    assert await where(rig.member, 2) == Position(first, 2) and await where(rig.member, 3) == Position(first + 1, 0)
    assert await where(rig.member, 5) == Position(first + 2, 0), "no later record lies before it"


async def test_the_first_offset_of_a_time() -> None:
    rig = Rig()
    for number in range(5):
        rig.append(b"x", b"y", stamp=10 * number)
    found = [await rig.reader.offset_since(rig.member, stamp) for stamp in (0, 1, 10, 39, 40, 41)]
    assert found == [0, 2, 2, 8, 8, 10]


async def test_the_way_to_a_position_and_to_a_time_is_mended_as_a_read_is() -> None:
    """A leader with a damaged row could truncate its log at no offset of that stretch."""
    rig = Rig()
    for number in range(9):
        rig.append(b"%d" % number, stamp=10 * number)
    rig.machine.anchors = [(3, 4), (6, 7)]
    rig.lost = {5}
    assert await rig.reader.position_of(rig.member, 5) == Position(6, 0) and rig.fetched == [(4, 6)]
    rig.fetched.clear()
    # Without its own entry an anchor seems to be later than it is.
    rig.lost = {4, 5, 8}
    assert await rig.reader.offset_since(rig.member, 45) == 5
    assert rig.fetched == [(0, 6)] and rig.lost == {8}
    assert await rig.reader.offset_since(rig.member, 75) == 8
    assert rig.fetched == [(0, 6), (7, 9)] and not rig.lost
    rig.lost, rig.absent = {5, 8}, {5}
    assert await rig.reader.offset_since(rig.member, 75) == 8
    with pytest.raises(Corrupt):
        await rig.reader.position_of(rig.member, 5)
    with pytest.raises(Corrupt):
        await rig.reader.offset_since(rig.member, 45)


async def test_below_the_payload_floor_a_truncation_waits_and_a_time_is_asked_elsewhere() -> None:
    rig = Rig()
    for number in range(3):
        rig.append(b"%d" % number, stamp=10 * number)
    rig.lost = {2}
    rig.member.raise_floor(99)
    with pytest.raises(Busy):
        await rig.reader.position_of(rig.member, 2)
    with pytest.raises(Gone):
        await rig.reader.offset_since(rig.member, 15)
    assert not rig.fetched


async def test_what_a_peer_gives_and_does_not_help_ends_the_search() -> None:
    rig = Rig()
    for number in range(3):
        rig.append(b"%d" % number, stamp=10 * number)
    rig.lost = {2}

    async def other(member: Member, first: int, last: int) -> int:
        rig.fetched.append((first, last))
        rig.append(b"more", stamp=30)
        return 5

    rig.reader._stretch = other
    with pytest.raises(Corrupt):
        await rig.reader.offset_since(rig.member, 15)
    assert len(rig.fetched) == 1


def test_another_kind_of_group_is_no_log() -> None:
    with pytest.raises(WrongKind):
        append_log(Group(Queue()).member)


async def test_the_first_offset_of_a_time_where_entries_of_which_nothing_lives_are_gone() -> None:
    """A keyed log that was compacted: what lived in front of them was passed over."""
    rig = Group(AppendLog(start=0, keyed=True))
    reader = LogReader(7, rig, rig.stretch, rig.found)
    for number in range(1, 10):
        # a, b and c once, then z again and again, which lets the one before go.
        key = {1: b"a", 2: b"b", 3: b"c"}.get(number, b"z")
        frame = encode_frame([(b"m", b"v")], command=bytes([KEYED]) + key)
        rig.apply(memoryview(b"".join(frame)), stamp=10 * number)
    rig.machine.anchors = [(number, number + 1) for number in range(9)]
    before = [await reader.offset_since(rig.member, stamp) for stamp in (10, 20, 30)]
    assert before == [0, 1, 2]
    # A generation was rewritten, or a file was migrated.
    rig.lost = {4, 5, 6, 7, 8}
    assert [await reader.offset_since(rig.member, stamp) for stamp in (10, 20, 30)] == before
