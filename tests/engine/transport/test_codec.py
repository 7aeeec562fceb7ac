"""Frames and message sections: round trips, the limits, and that nothing damaged or cut gets through."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logyard.engine.entry import NOOP, Entry, build_plain, verify_bodies
from logyard.engine.raft.messages import APPEND, SNAPSHOT, Message
from logyard.engine.transport import codec, frame
from logyard.engine.transport.config import TransportConfig
from logyard.protocol.errors import BadRequest, Corrupt, LogyardError, WrongIdentity

from .recorder import append, entry_values, make_entry, reply, values

CONFIG = TransportConfig()
U64 = st.integers(0, 2**64 - 1)
BODIES = st.lists(st.binary(max_size=6000), min_size=1, max_size=4)


@st.composite
def messages(draw: st.DrawFn) -> Message:
    kind = draw(st.integers(1, 11).filter(lambda number: number != SNAPSHOT))
    uid, term, index, log_term, commit, context = (draw(U64) for _ in range(6))
    if kind != APPEND:
        first, last = draw(U64), draw(U64)
        return Message(kind, uid, 2, 1, term, index, log_term, commit, context, draw(st.booleans()), None, first, last)
    first = draw(st.integers(1, 2**40))
    entries: list[Entry] = []
    # No leader has entries of later terms than its own, nor one before them of a later term than theirs.
    term, log_term = max(term, 5), min(log_term, 5)
    for number in range(draw(st.integers(0, 4))):
        shape = draw(st.integers(0, 2))
        if shape == 0:
            entries.append(build_plain(first + number, 5, NOOP, 1, draw(st.binary(max_size=20))))
        else:
            entries.append(make_entry(uid, first + number, list(draw(BODIES)), term=5))
        if shape == 2:
            entries[-1].bodies = None
            entries[-1].tombstone = draw(st.integers(1, 2**64 - 1))
    last = first + len(entries) - 1
    return Message(kind, uid, 2, 1, term, index, log_term, commit, context, False, entries, first, last)


def wire(found: list[bytes | bytearray | memoryview]) -> bytes:
    return b"".join(found)


def decode(data: bytes, lane: int = frame.BULK) -> list[Message]:
    header = frame.parse_header(data[: frame.HEADER_BYTES], lane, CONFIG)
    if len(data) != header.total:
        raise BadRequest("cut")
    section = memoryview(data)[frame.HEADER_BYTES : frame.HEADER_BYTES + header.section]
    frame.check_section(header, section)
    body = memoryview(data)[frame.HEADER_BYTES + header.section :]
    return codec.decode_messages(section, body, 1, 2)


@settings(max_examples=80)
@given(st.lists(messages(), min_size=1, max_size=6), st.sampled_from([1, 500, 10_000, 8 << 20]))
def test_messages_come_back_as_they_were(sent: list[Message], limit: int) -> None:
    frames = list(codec.encode_messages(sent, limit))
    back = [message for found in frames for message in decode(wire(found))]
    assert list(map(values, back)) == list(map(values, sent))
    for got, want in zip(back, sent, strict=True):
        assert (got.sender, got.to) == (1, 2)
        assert [entry_values(e) for e in got.entries or ()] == [entry_values(e) for e in want.entries or ()]
        assert (got.entries is None) == (want.kind != APPEND)
        for entry in got.entries or ():
            if not entry.tombstone:
                verify_bodies(got.uid, entry)


def test_a_thousand_replies_are_one_frame_of_one_buffer() -> None:
    found = list(codec.encode_messages([reply(2, uid) for uid in range(1000)], 8 << 20))
    assert len(found) == 1 and len(found[0]) == 1
    assert [m.uid for m in decode(wire(found[0]))] == list(range(1000))


def test_frames_are_split_between_messages_and_a_larger_one_goes_alone() -> None:
    small = [append(2, n, [make_entry(n, 10, [bytes(400)])]) for n in range(10)]
    large = append(2, 99, [make_entry(99, 10, [bytes(5000)])])
    frames = [decode(wire(found)) for found in codec.encode_messages([*small[:5], large, *small[5:]], 2000)]
    assert [m.uid for found in frames for m in found] == [0, 1, 2, 3, 4, 99, 5, 6, 7, 8, 9]
    assert [len(found) for found in frames if found[0].uid == 99] == [1]
    assert all(len(wire(found)) <= 2000 + 100 for found in codec.encode_messages(small, 2000))


def test_large_bodies_are_gathered_and_small_ones_joined() -> None:
    entry = make_entry(1, 10, [b"a", b"b" * 10_000, b"c"])
    assert entry.bodies is not None and len(entry.bodies) == 4
    (found,) = codec.encode_messages([append(2, 1, [entry])], 8 << 20)
    large = max(entry.bodies, key=len)
    assert any(buffer is large for buffer in found), "a large body is passed on, never copied"
    assert len(found) == 4, "head, joined small bodies, the large one, the last small one"


def test_decoded_bodies_are_slices_of_the_frame() -> None:
    (found,) = codec.encode_messages([append(2, 1, [make_entry(1, 10, [bytes(9000), b"x" * 5000])])], 8 << 20)
    section, body = bytes(found[0])[frame.HEADER_BYTES :], bytearray(b"".join(found[1:]))
    (message,) = codec.decode_messages(section, memoryview(body), 1, 2)
    assert message.entries is not None
    for entry in message.entries:
        assert all(isinstance(part, memoryview) and part.obj is body for part in entry.bodies or ())


def small_frame() -> bytes:
    tombstone = make_entry(5, 12, [b"dead"])
    tombstone.bodies, tombstone.tombstone = None, 40
    sent = [reply(2, 4), append(2, 5, [make_entry(5, 11, [b"body", b"z" * 4096]), tombstone]), append(2, 6, [])]
    (found,) = codec.encode_messages(sent, 8 << 20)
    return wire(found)


def test_every_truncation_is_refused() -> None:
    data = small_frame()
    assert len(decode(data)) == 3
    for size in range(frame.HEADER_BYTES, len(data)):
        with pytest.raises(LogyardError):
            decode(data[:size])
    # A section that its own header calls whole, but that is cut, is refused by its tables.
    header = frame.parse_header(data[: frame.HEADER_BYTES], frame.BULK, CONFIG)
    section = data[frame.HEADER_BYTES : frame.HEADER_BYTES + header.section]
    body = memoryview(data)[frame.HEADER_BYTES + header.section :]
    for size in range(len(section)):
        with pytest.raises(LogyardError):
            codec.decode_messages(section[:size], body, 1, 2)
    for size in range(len(body)):
        with pytest.raises(LogyardError):
            codec.decode_messages(section, body[:size], 1, 2)


def test_every_bit_flip_of_header_and_section_is_refused_and_of_bodies_found_by_their_hash() -> None:
    data = small_frame()
    header = frame.parse_header(data[: frame.HEADER_BYTES], frame.BULK, CONFIG)
    body_at = frame.HEADER_BYTES + header.section
    tracemalloc.start()
    for bit in range(8 * body_at):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(LogyardError):
            decode(bytes(flipped))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
    for at in random.Random(1).sample(range(body_at, len(data)), 200):
        flipped = bytearray(data)
        flipped[at] ^= 1
        found = decode(bytes(flipped))
        with pytest.raises(Corrupt):
            for message in found:
                for entry in message.entries or ():
                    if not entry.tombstone:
                        verify_bodies(message.uid, entry)


def test_a_lying_section_never_raises_anything_else_nor_takes_memory() -> None:
    """Flips in a section whose hash is right, as a hostile peer would send them."""
    data = small_frame()
    header = frame.parse_header(data[: frame.HEADER_BYTES], frame.BULK, CONFIG)
    section = data[frame.HEADER_BYTES : frame.HEADER_BYTES + header.section]
    body = memoryview(data)[frame.HEADER_BYTES + header.section :]
    refused = 0
    tracemalloc.start()
    for bit in range(8 * len(section)):
        flipped = bytearray(section)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            codec.decode_messages(flipped, body, 1, 2)
        except (BadRequest, Corrupt):
            refused += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert refused > 500 and peak < 1 << 20


def craft(rows: list[tuple[int, ...]], entry_rows: list[tuple[int, ...]], data: bytes) -> bytes:
    parts = [codec.SECTION.pack(len(rows), len(entry_rows))]
    parts += (codec.MESSAGE.pack(*row) for row in rows)
    parts += (codec.ENTRY_ROW.pack(*row) for row in entry_rows)
    return b"".join(parts) + data


NOOP_DATA = build_plain(10, 3, NOOP, 1).data
BODY_DATA = make_entry(1, 10, [bytes(10)]).data


@pytest.mark.parametrize(
    ("rows", "entry_rows", "data", "body"),
    [
        ([], [], b"", 0),
        ([(16, 0, 0, 0, *[0] * 8)], [], b"", 0),
        ([(0, 0, 0, 0, *[0] * 8)], [], b"", 0),
        ([(7, 0, 0, 0, *[0] * 8)], [], b"", 0),
        ([(6, 2, 0, 0, *[0] * 8)], [], b"", 0),
        ([(6, 0, 0, 1, *[0] * 8)], [], b"", 0),
        ([(5, 0, 0, 0, 1, 3, 9, 1, 1, 0, 10, 10)], [], b"", 0),
        ([(5, 0, 0, 2, 1, 3, 9, 1, 1, 0, 10, 11)], [(len(NOOP_DATA), 0, 0, 0)], NOOP_DATA, 0),
        ([(5, 0, 0, 1, 1, 3, 9, 1, 1, 0, 11, 11)], [(len(NOOP_DATA), 0, 0, 0)], NOOP_DATA, 0),
        ([(5, 0, 0, 0, 1, 3, 9, 1, 1, 0, 10, 9)], [(len(NOOP_DATA), 0, 0, 0)], NOOP_DATA, 0),
        ([(6, 0, 0, 1, 1, 3, 9, 1, 1, 0, 10, 10)], [(len(NOOP_DATA), 0, 0, 0)], NOOP_DATA, 0),
        ([(5, 0, 0, 1, 1, 3, 9, 1, 1, 0, 10, 10)], [(len(NOOP_DATA), 0, 0, 5)], NOOP_DATA, 5),
        ([(5, 0, 0, 1, 1, 3, 9, 1, 1, 0, 10, 10)], [(len(NOOP_DATA), 2, 0, 0)], NOOP_DATA, 0),
        ([(5, 0, 0, 1, 1, 3, 9, 1, 1, 0, 10, 10)], [(len(NOOP_DATA), 1, 0, 0)], NOOP_DATA, 0),
        ([(5, 0, 0, 1, 1, 3, 9, 1, 1, 0, 10, 10)], [(len(BODY_DATA), 0, 0, 0)], BODY_DATA, 0),
        ([(5, 0, 0, 1, 1, 3, 9, 1, 1, 0, 10, 10)], [(10, 0, 0, 0)], NOOP_DATA[:10], 0),
        ([(5, 0, 0, 1, 1, 2, 9, 1, 1, 0, 10, 10)], [(len(NOOP_DATA), 0, 0, 0)], NOOP_DATA, 0),
        ([(5, 0, 0, 1, 1, 4, 9, 4, 1, 0, 10, 10)], [(len(NOOP_DATA), 0, 0, 0)], NOOP_DATA, 0),
        ([(5, 0, 0, 1, 1, 3, 9, 1, 1, 0, 10, 10)], [(2**32 - 1, 0, 0, 2**63)], NOOP_DATA, 0),
    ],
)
def test_sections_that_do_not_add_up(
    rows: list[tuple[int, ...]], entry_rows: list[tuple[int, ...]], data: bytes, body: int
) -> None:
    with pytest.raises((BadRequest, Corrupt)):
        codec.decode_messages(craft(rows, entry_rows, data), memoryview(bytes(body)), 1, 2)


def test_the_crafted_section_without_a_fault_is_accepted() -> None:
    section = craft([(5, 0, 0, 1, 1, 3, 9, 1, 1, 0, 10, 10)], [(len(NOOP_DATA), 0, 0, 0)], NOOP_DATA)
    assert codec.decode_messages(section, memoryview(b""), 1, 2)[0].last == 10


@pytest.mark.parametrize(
    ("lane", "kind", "count", "section", "body", "fits"),
    [
        (frame.CONTROL, frame.MESSAGES, 5, 1 << 20, 0, True),
        (frame.CONTROL, frame.MESSAGES, 1, (1 << 20) + 1, 0, False),
        (frame.BULK, frame.MESSAGES, 2, 1000, (8 << 20) - 1000, True),
        (frame.BULK, frame.MESSAGES, 2, 1000, 8 << 20, False),
        (frame.BULK, frame.MESSAGES, 1, 1000, 64 << 20, True),
        (frame.BULK, frame.MESSAGES, 1, 1000, 72 << 20, False),
        (frame.BULK, frame.BLOB, 1, 1000, 2**63, False),
        (frame.BULK, frame.HELLO, 0, 1025, 0, False),
        (frame.BULK, frame.LIVENESS, 0, 40, 1, False),
        (frame.BULK, 9, 0, 40, 0, False),
    ],
)
def test_header_limits(lane: int, kind: int, count: int, section: int, body: int, fits: bool) -> None:
    head = frame.HEADER.pack(frame.MAGIC, frame.VERSION, kind, 0, count, section, body, 0)
    data = head + frame.HASH.pack(frame.hash64(head))
    if fits:
        assert frame.parse_header(data, lane, CONFIG).total == frame.HEADER_BYTES + section + body
    else:
        with pytest.raises(BadRequest):
            frame.parse_header(data, lane, CONFIG)


def test_hello_round_trip_and_refusals() -> None:
    hello = frame.Hello("höme", 3, 4, 2**60, frame.BULK)
    data = frame.encode_hello(hello)
    section = data[frame.HEADER_BYTES :]
    assert frame.decode_hello(section) == hello
    for size in range(len(section)):
        with pytest.raises(BadRequest):
            frame.decode_hello(section[:size])
    with pytest.raises(WrongIdentity):
        frame.decode_hello(b"\x09" + section[1:])
    with pytest.raises(BadRequest):
        frame.decode_hello(section[:-1] + b"\xff")


def test_renewal_round_trip() -> None:
    renewal = frame.Renewal(1, 2, 3, 4, 2**64 - 1)
    section = frame.encode_renewal(renewal)[frame.HEADER_BYTES :]
    assert frame.decode_renewal(section) == renewal
    with pytest.raises(BadRequest):
        frame.decode_renewal(section[:-1])


PLAIN = st.one_of(U64, st.binary(max_size=9), st.text(max_size=9), st.none(), st.lists(U64, max_size=3))


@given(
    st.integers(0, 2**16 - 1),
    U64,
    st.dictionaries(st.text(max_size=5), PLAIN, max_size=4),
    st.lists(st.binary(max_size=3000), max_size=4),
)
def test_blob_round_trip_and_a_flipped_body_is_found(
    kind: int, request: int, header: dict[str, object], body: list[bytes]
) -> None:
    data = wire(frame.encode_blob(kind, request, header, body))
    head = frame.parse_header(data[: frame.HEADER_BYTES], frame.BULK, CONFIG)
    assert head.total == len(data)
    section = data[frame.HEADER_BYTES : frame.HEADER_BYTES + head.section]
    whole = b"".join(body)
    blob = frame.decode_blob(section, memoryview(whole))
    assert blob[:3] == (kind, request, header) and bytes(blob.body) == whole
    if whole:
        with pytest.raises(Corrupt):
            frame.decode_blob(section, memoryview(whole[:-1] + bytes([whole[-1] ^ 1])))
    with pytest.raises(BadRequest):
        frame.decode_blob(section[:-1], memoryview(whole))


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xc1",
        b"\x01",
        b"\x80\x80",
        b"\x81\x01\x01",
        b"\x81\xa1a\xdd\xff\xff\xff\xff",
        b"\x91" * 5000,
        b"\x81\xa1a\xd4\x01\x00",
    ],
)
def test_blob_headers_that_are_no_plain_map(header: bytes) -> None:
    data = wire(frame.encode_blob(1, 1, header))
    with pytest.raises(BadRequest):
        frame.decode_blob(data[frame.HEADER_BYTES :], memoryview(b""))


def test_a_blob_header_too_large_is_refused_at_home() -> None:
    with pytest.raises(BadRequest):
        frame.encode_blob(1, 1, {"large": bytes(8 << 20)})
