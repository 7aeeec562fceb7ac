"""Frames of a connection: every cut and flip refused, nothing allocated for a length above its limit."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logyard.protocol import wire
from logyard.protocol.frame import ABSENT, Buffer
from logyard.protocol.records import BlockError, Page, encode_block, records_of, split_blocks

RECORDS = st.lists(
    st.tuples(st.binary(max_size=40), st.one_of(st.none(), st.binary(max_size=60), st.just(b"L" * 4096))),
    min_size=1,
    max_size=12,
)


def frames_in(data: bytes, step: int, limits: tuple[int, ...]) -> list[wire.Received]:
    """What a receiver makes of `data` that arrives in pieces of `step` bytes."""
    receiver = wire.Receiver(limits)
    found: list[wire.Received] = []
    at = 0
    while at < len(data):
        buffer = receiver.buffer()
        count = min(step, len(buffer), len(data) - at)
        assert count
        buffer[:count] = data[at : at + count]
        at += count
        found += receiver.received(count)
    return found


@pytest.mark.parametrize("step", [1, 7, 15, 16, 17, 100_000, 131_072, 1 << 20])
def test_frames_survive_any_cut_of_the_stream(step: int) -> None:
    if step == 1:
        sizes = [0, 1, 15, 300]
    else:
        sizes = [0, 5, 65_519, 65_535, 65_536, 65_537, 9, 131_056, 131_072, 400_000, 3, 70_000, 64_000, 64_000, 64_000]
    bodies = [bytes([number % 251]) * size for number, size in enumerate(sizes)]
    stream = b"".join(b"".join(wire.encode(wire.APPEND, number, body)) for number, body in enumerate(bodies))
    found = frames_in(stream, step, wire.server_limits())
    assert [(frame.type, frame.request, bytes(frame.body)) for frame in found] == [
        (wire.APPEND, number, body) for number, body in enumerate(bodies)
    ]


def test_a_large_frame_is_received_into_its_own_memory() -> None:
    receiver = wire.Receiver(wire.server_limits())
    head = wire.HEADER.pack(200_000, wire.APPEND, 0, 0, 5) + b"begin"
    receiver.buffer()[: len(head)] = head
    assert receiver.received(len(head)) == []
    assert receiver.wanted == 200_000
    own = receiver.buffer()
    assert len(own) == 200_000 - 5
    assert receiver.wanted == 0
    own[:] = b"x" * len(own)
    (frame,) = receiver.received(len(own))
    assert isinstance(frame.body, memoryview)
    assert frame.body.obj is own.obj
    assert bytes(frame.body) == b"begin" + b"x" * (200_000 - 5)
    assert len(receiver.buffer()) == wire.BEGINNING, "of the next one only the beginning has to be moved"
    head = wire.HEADER.pack(100, wire.APPEND, 0, 0, 6)
    receiver.buffer()[: len(head)] = head
    assert receiver.received(len(head)) == []
    assert len(receiver.buffer()) > wire.DEDICATED, "it is small: what follows may come with it"


@pytest.mark.parametrize(
    ("length", "kind", "reserved"),
    [(1 << 31, wire.APPEND, 0), (wire.CALL_BYTES_MAX + 1, wire.CALL, 0), (1, wire.REPLIES, 0), (1, 99, 0), (1, 4, 1)],
)
def test_what_is_too_long_or_not_expected_is_refused_by_its_header(length: int, kind: int, reserved: int) -> None:
    receiver = wire.Receiver(wire.server_limits())
    head = wire.HEADER.pack(length, kind, 0, reserved, 5)
    receiver.buffer()[: len(head)] = head
    with pytest.raises(wire.ProtocolError):
        receiver.received(len(head))
    assert receiver.wanted == 0


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 1), st.binary(max_size=30)), max_size=20))
def test_replies_round_trip(items: list[tuple[int, int, Buffer]]) -> None:
    stream = b"".join(wire.encode_replies(items))
    (frame,) = frames_in(stream, 1 << 20, (0, 0, 0, 1 << 20))[:1] if items else [None]
    if frame is not None:
        assert wire.decode_replies(frame.body) == items


def test_large_replies_are_several_frames() -> None:
    items: list[tuple[int, int, Buffer]] = [(number, 0, bytes(600_000)) for number in range(4)]
    stream = b"".join(wire.encode_replies(items))
    frames = frames_in(stream, 50_000, wire.CLIENT_LIMITS)
    assert len(frames) == 4
    assert [item for frame in frames for item in wire.decode_replies(frame.body)] == items


def test_every_truncation_of_replies_and_data_is_refused() -> None:
    body = b"".join(wire.encode_replies([(1, 0, b"abc"), (2, 1, b"defg")]))[wire.HEADER_BYTES :]
    whole = {0, 16, len(body)}
    for cut in set(range(len(body))) - whole:
        with pytest.raises(wire.ProtocolError):
            wire.decode_replies(body[:cut])
    data = b"".join(wire.encode_data(1, {"a": 1}, [b"raw"]))[wire.HEADER_BYTES :]
    header, raw = wire.decode_data(data)
    assert (header, bytes(raw)) == ({"a": 1}, b"raw")
    for cut in range(len(data) - 3):
        with pytest.raises(wire.ProtocolError):
            wire.decode_data(data[:cut])


@given(st.binary(max_size=200))
def test_no_bytes_make_a_decoder_raise_anything_else(data: bytes) -> None:
    for decode in (wire.decode_hello, wire.decode_call, wire.decode_data, wire.decode_replies, split_blocks):
        try:
            decode(data)
        except (wire.ProtocolError, BlockError):
            continue


def test_deep_and_broad_values_of_a_stranger_are_refused() -> None:
    for data in (b"\x91" * 5000, struct.pack(">BI", 0xDD, 1 << 30), struct.pack(">BI", 0xDF, 1 << 30)):
        with pytest.raises(wire.ProtocolError):
            wire.unpack(data, strict=True)


def test_a_hello_says_who_is_there() -> None:
    frame = wire.encode_hello("yard", 3, {1: "127.0.0.1:7001", 3: "127.0.0.1:7003"}.items(), 99)
    hello = wire.decode_hello(frame[wire.HEADER_BYTES :])
    assert hello == wire.Hello("yard", 3, {1: "127.0.0.1:7001", 3: "127.0.0.1:7003"}, 99, 0)
    with pytest.raises(wire.ProtocolError, match="version"):
        wire.decode_hello(wire.pack([wire.VERSION + 1, "yard", 3, [], 0]))


@given(RECORDS, st.booleans(), st.integers(0, 5), st.integers(0, 12))
def test_blocks_round_trip(records: list[tuple[bytes, bytes | None]], bodies: bool, asked: int, limit: int) -> None:
    table: list[int] = []
    for head, body in records:
        table += (len(head), ABSENT if body is None else len(body))
    shown = [body for _, body in records if body is not None] if bodies else None
    data = b"".join(encode_block(0, 8, 2, 1234, table, [head for head, _ in records], shown))
    (block,) = split_blocks(data)
    found = list(records_of(block))
    assert [record.metadata for record in found] == [head for head, _ in records]
    assert [record.size for record in found] == [len(body or b"") for _, body in records]
    assert [record.payload for record in found] == [body if bodies else None for _, body in records]
    assert {(record.index, record.term, record.timestamp) for record in found} == {(8, 2, 1234)}
    # Whole entries may be answered: the page shows only what was asked for.
    page = Page(data, 0, len(records), 1, asked, limit)
    expected = list(range(len(records)))[asked : asked + limit]
    assert [record.offset for record in page] == expected
    assert len(page) == len(expected)
    assert not expected or page.next == expected[-1] + 1


def test_every_truncation_and_length_change_of_a_block_is_refused() -> None:
    data = b"".join(encode_block(5, 8, 2, 0, [1, 2, 3, ABSENT], [b"h", b"ead"], [b"xy"]))
    for cut in range(1, len(data)):
        with pytest.raises(BlockError):
            split_blocks(data[:cut])
    for at in (8, 40, 44, 48, 56):
        changed = bytearray(data)
        changed[at] ^= 1
        with pytest.raises(BlockError):
            split_blocks(changed)


def test_outgoing_goes_on_where_the_socket_stopped() -> None:
    outgoing = wire.Outgoing()
    pieces = [bytes([number % 256]) * (number % 5) for number in range(3000)]
    outgoing.push(pieces)
    taken = bytearray()
    while outgoing.size:
        window = outgoing.window()
        assert len(window) <= wire.IOV_MAX
        part = b"".join(window)[: 1 + len(taken) % 97]
        taken += part
        outgoing.sent(len(part))
    assert bytes(taken) == b"".join(pieces)
