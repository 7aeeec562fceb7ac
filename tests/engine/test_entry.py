"""The entry codec: what a stranger sends never crashes it, what was built comes back, bytes elsewhere never verify."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logyard.engine.entry import (
    CONFIGURATION,
    NOOP,
    Entry,
    build_commands,
    build_plain,
    frames_of,
    parse_entry,
    plain_content,
    records_in,
    split_bodies,
    timestamp_of,
    unit_hash,
    unit_seed,
    units_of,
    verify_bodies,
)
from logyard.protocol.errors import BadRequest, Corrupt
from logyard.protocol.frame import FRAME, FRAME_BYTES, LARGE, check_frame, encode_frame, table_of

bodies = st.one_of(
    st.none(),
    st.binary(max_size=40),
    st.integers(LARGE - 1, LARGE + 3).map(lambda size: bytes([size % 251]) * size),
)
records = st.lists(st.tuples(st.binary(max_size=12), bodies), min_size=1, max_size=6)


@st.composite
def frames(draw: st.DrawFn) -> tuple[bytes, list[tuple[bytes, bytes | None]], list[bytes]]:
    """A valid frame, its records and its commands."""
    found = draw(records)
    session, sequence = draw(st.integers(0, 2**64 - 1)), draw(st.integers(0, 2**64 - 1))
    if draw(st.booleans()):
        command = draw(st.binary(max_size=9))
        parts = encode_frame(found, command=command, session=session, sequence=sequence)
        commands = [command] * len(found)
    else:
        commands = draw(st.lists(st.binary(max_size=9), min_size=len(found), max_size=len(found)))
        parts = encode_frame(found, commands=commands, session=session, sequence=sequence)
    return b"".join(parts), found, commands


def unpack(frame: bytes) -> list[tuple[bytes, bytes | None]]:
    """An independent reading of a frame's records."""
    _, _, _, count, command_bytes, pack_bytes, _, _, _ = FRAME.unpack_from(frame)
    at = FRAME_BYTES + command_bytes
    pack, rest = frame[at : at + pack_bytes], frame[at + pack_bytes :]
    table = table_of(pack, count)
    heads_at, found = 8 * count, []
    small_at = heads_at + sum(table[::2])
    large_at = 0
    for head, size in zip(table[::2], table[1::2], strict=True):
        body: bytes | None = None
        if size < LARGE:
            body = pack[small_at : small_at + size]
            small_at += size
        elif size != 0xFFFFFFFF:
            body = rest[large_at : large_at + size]
            large_at += size
        found.append((pack[heads_at : heads_at + head], body))
        heads_at += head
    return found


@given(frames())
def test_a_frame_says_what_it_was_made_of(made: tuple[bytes, list[tuple[bytes, bytes | None]], list[bytes]]) -> None:
    frame, wanted, _ = made
    count, pack_at, pack_end, large, _ = check_frame(memoryview(frame))
    assert unpack(frame) == wanted and count == len(wanted)
    assert large == sum(1 for _, body in wanted if body is not None and len(body) >= LARGE)
    assert FRAME_BYTES <= pack_at <= pack_end <= len(frame)


@given(frames(), st.data())
def test_a_frame_that_was_tampered_with_is_refused_or_adds_up(
    made: tuple[bytes, list[tuple[bytes, bytes | None]], list[bytes]], data: st.DataObject
) -> None:
    frame = bytearray(made[0])
    for _ in range(data.draw(st.integers(1, 3))):
        match data.draw(st.sampled_from(["flip", "cut", "grow", "word"])):
            case "flip" if frame:
                frame[data.draw(st.integers(0, min(len(frame), 120) - 1))] ^= 1 << data.draw(st.integers(0, 7))
            case "cut":
                del frame[data.draw(st.integers(0, len(frame))) :]
            case "word" if len(frame) >= 8:
                at = data.draw(st.integers(0, min(len(frame), 200) - 8))
                frame[at : at + 4] = data.draw(st.sampled_from((0, 1, 2**31, 2**32 - 1))).to_bytes(4, "little")
            case _:
                frame += data.draw(st.binary(max_size=9))
    try:
        count, _, _, large, _ = check_frame(memoryview(frame))
    except BadRequest:
        return
    found = unpack(bytes(frame))
    assert len(found) == count and sum(body is not None and len(body) >= LARGE for _, body in found) == large
    # Whatever passes is encoded, applied and split without a surprise.
    entry = build_commands(7, 3, 2, 1, [memoryview(frame)])
    assert [len(one.split_commands()) for one in frames_of(entry.data)] == [count]
    verify_bodies(7, entry)


@given(st.binary(max_size=300))
def test_any_bytes_are_refused_or_add_up(data: bytes) -> None:
    try:
        check_frame(memoryview(data))
    except BadRequest:
        return
    assert len(unpack(data)) == FRAME.unpack_from(data)[3]


@given(
    st.lists(frames(), min_size=1, max_size=4), st.integers(1, 2**64 - 1), st.integers(1, 2**40), st.integers(1, 2**40)
)
def test_an_entry_comes_back_from_its_bytes(
    made: list[tuple[bytes, list[tuple[bytes, bytes | None]], list[bytes]]], uid: int, index: int, term: int
) -> None:
    entry = build_commands(uid, index, term, 99, [memoryview(frame) for frame, _, _ in made])
    verify_bodies(uid, entry)
    assert records_in(entry.data) == sum(len(found) for _, found, _ in made) and timestamp_of(entry.data) == 99
    payload = b"".join(entry.bodies or ())
    assert len(payload) == entry.body_bytes
    back = parse_entry(entry.data)
    assert (back.index, back.term, back.kind, back.body_bytes, back.bodies) == (index, term, 1, entry.body_bytes, None)
    back.bodies = split_bodies(back.data, memoryview(payload))
    verify_bodies(uid, back)
    assert [list(frame.split_commands()) for frame in frames_of(back.data)] == [commands for _, _, commands in made]
    ordinal = 0
    for frame, (_, found, _) in zip(frames_of(back.data), made, strict=True):
        assert frame.records == len(found) and frame.first == ordinal
        pack = next(unit for unit in units_of(back.data) if unit.records and unit.first_ordinal == ordinal)
        assert pack.records == frame.records and pack.length == frame.pack_bytes
        ordinal += frame.records


@given(st.tuples(st.integers(0, 5), st.integers(1, 5), st.integers(1, 5), st.integers(0, 5)), st.data())
def test_bytes_moved_to_another_place_never_verify(place: tuple[int, int, int, int], data: st.DataObject) -> None:
    other = data.draw(st.tuples(st.integers(0, 5), st.integers(1, 5), st.integers(1, 5), st.integers(0, 5)))
    if other != place:
        assert unit_seed(*place) != unit_seed(*other)
        assert unit_hash(*place, b"some bytes") != unit_hash(*other, b"some bytes")


@pytest.mark.parametrize("moved", ["uid", "index", "term", "swapped units", "one bit", "one unit less"])
def test_a_payload_that_is_not_its_entrys_is_damage(moved: str) -> None:
    frame = b"".join(encode_frame([(b"", b"A" * LARGE), (b"", b"B" * LARGE), (b"h", b"s")], command=b"\1"))
    entry = build_commands(7, 3, 2, 0, [memoryview(frame)])
    uid, parts = 7, [bytes(part) for part in entry.bodies or ()]
    match moved:
        case "uid":
            uid = 8
        case "index":
            entry.index = 4
        case "term":
            entry.term = 3
        case "swapped units":
            parts[1], parts[2] = parts[2], parts[1]
        case "one bit":
            parts[1] = bytes([parts[1][0] ^ 1]) + parts[1][1:]
        case _:
            parts.pop()
    entry.bodies = parts
    with pytest.raises(Corrupt):
        verify_bodies(uid, entry)


@given(st.binary(max_size=200))
def test_entry_bytes_of_a_stranger_are_refused_or_bounded(data: bytes) -> None:
    try:
        entry = parse_entry(data)
    except Corrupt:
        return
    assert len(units_of(entry.data)) * 32 <= len(data)


def test_plain_entries_carry_their_content() -> None:
    for kind, content in ((NOOP, b""), (CONFIGURATION, b"who is in")):
        entry = build_plain(5, 2, kind, 77, content)
        back = parse_entry(entry.data)
        assert plain_content(back) == content and (back.kind, back.index, back.term, back.bodies) == (kind, 5, 2, ())
        assert timestamp_of(back.data) == 77 and not units_of(back.data) and back.size == len(entry.data)
        verify_bodies(1, back)
    assert "Entry(5@2" in repr(Entry(5, 2, NOOP, b""))
