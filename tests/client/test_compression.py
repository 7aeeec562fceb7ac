"""Encoded payloads by themselves: round trips, ranges, and everything that a hostile or damaged one may claim."""

from __future__ import annotations

import random
import struct

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from logyard.client.upload import Upload
from logyard.engine import entry
from logyard.protocol.compression import (
    CHUNK_BYTES,
    SMALLEST,
    ZSTD,
    Encoding,
    encode,
    index_of,
    inflate,
    inflate_whole,
    parse,
    ranges_of,
    wants,
)
from logyard.protocol.errors import BadRequest, Corrupt
from logyard.protocol.errors import BadRequest as Refused
from logyard.protocol.frame import ENVELOPE, ENVELOPE_BYTES, MARKED, Frame, Marked, check_frame
from logyard.protocol.records import Record, encode_block, records_of, split_blocks


def text(size: int, seed: int = 1) -> bytes:
    """Bytes that get about four times smaller."""
    draw = random.Random(seed)
    words = [draw.randbytes(draw.randint(3, 9)).hex().encode() for _ in range(200)]
    parts, have = [], 0
    while have < size:
        parts.append(draw.choice(words))
        have += len(parts[-1])
    return b" ".join(parts)[:size]


def read(encoding: Encoding, stored: bytes, start: int, stop: int) -> tuple[bytes, int]:
    """A range of the original, and how many stored bytes it took."""
    steps, found, taken = ranges_of(encoding, len(stored), start, stop), [], 0
    step = next(steps, None)
    while step is not None:
        if isinstance(step, tuple):
            taken += step[1] - step[0]
            step = steps.send(stored[step[0] : step[1]])
        else:
            found.append(bytes(step))
            step = next(steps, None)
    return b"".join(found), taken


def encoded(body: bytes) -> tuple[Encoding, bytes]:
    head, stored = encode(b"head", body)
    assert isinstance(head, Marked) and head[ENVELOPE_BYTES:] == b"head"
    return parse(head), bytes(stored)


@pytest.mark.parametrize("size", [SMALLEST, 5000, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 7])
def test_what_gets_smaller_is_stored_compressed_and_read_back(size: int) -> None:
    body = text(size)
    encoding, stored = encoded(body)
    assert encoding.size == size and len(stored) < size * 0.8
    assert inflate_whole(encoding, memoryview(stored)) == body


@pytest.mark.parametrize("size", [0, 10, SMALLEST - 1, 5000, CHUNK_BYTES * 2])
def test_what_does_not_is_left_as_it_is(size: int) -> None:
    body = random.Random(3).randbytes(size)
    head, stored = encode(b"head", body)
    assert head == b"head" and not isinstance(head, Marked) and stored is body


def test_chunks_that_do_not_get_smaller_are_kept_beside_those_that_do() -> None:
    body = text(2 * CHUNK_BYTES) + random.Random(4).randbytes(CHUNK_BYTES) + text(100)
    encoding, stored = encoded(body)
    assert inflate_whole(encoding, memoryview(stored)) == body
    assert random.Random(4).randbytes(CHUNK_BYTES) in stored


SAMPLES = [(body, *encoded(body)) for body in (text(700), text(CHUNK_BYTES), text(3 * CHUNK_BYTES + 99))]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_range_is_that_of_the_original_and_reads_few_chunks(data: st.DataObject) -> None:
    body, encoding, stored = data.draw(st.sampled_from(SAMPLES))
    start = data.draw(st.integers(0, len(body)))
    stop = data.draw(st.integers(start, min(len(body), start + data.draw(st.sampled_from([1, 5000, 2 * CHUNK_BYTES])))))
    found, taken = read(encoding, stored, start, stop)
    assert found == body[start:stop]
    touched = (stop - 1) // CHUNK_BYTES - start // CHUNK_BYTES + 1 if stop > start else 0
    assert taken <= touched * CHUNK_BYTES + 8 * (touched + 1)


def bomb(size: int, declared: bool = True) -> bytes:
    return zstandard.ZstdCompressor(level=19, write_content_size=declared).compress(bytes(size))


@pytest.mark.parametrize(
    "stored",
    [
        bomb(1 << 30),
        bomb(1 << 20, declared=False),
        bomb(CHUNK_BYTES - 1),
        b"not zstd at all",
        bomb(CHUNK_BYTES)[:-3],
        bomb(CHUNK_BYTES) + b"more",
        b"",
    ],
    ids=["a gigabyte", "no size", "too short", "nonsense", "cut", "a tail", "nothing"],
)
def test_a_chunk_never_gets_more_memory_than_was_declared_for_it(stored: bytes) -> None:
    with pytest.raises(Corrupt):
        inflate(stored, CHUNK_BYTES)
    # The same behind an envelope that agrees with the record.
    with pytest.raises(Corrupt):
        inflate_whole(Encoding(CHUNK_BYTES, CHUNK_BYTES), memoryview(stored))


def test_a_frame_that_lies_about_its_size_is_found_out() -> None:
    """The header says 1,000 bytes, the blocks hold 100,000."""
    honest = zstandard.ZstdCompressor(write_content_size=True).compress(bytes(1000))
    whole = zstandard.ZstdCompressor(write_content_size=False, write_checksum=False).compress(bytes(100_000))
    said = zstandard.frame_header_size(honest)
    lying = honest[:said] + whole[zstandard.frame_header_size(whole) :]
    assert zstandard.frame_content_size(lying) == 1000
    with pytest.raises(Corrupt):
        inflate(lying, 1000)


@pytest.mark.parametrize(
    "head",
    [
        b"short",
        ENVELOPE.pack(2, CHUNK_BYTES, 10),
        ENVELOPE.pack(ZSTD, 0, 10),
        ENVELOPE.pack(ZSTD, 17 << 20, 10),
        ENVELOPE.pack(ZSTD, CHUNK_BYTES, 0),
        ENVELOPE.pack(ZSTD, CHUNK_BYTES, (4 << 30) + 1),
        ENVELOPE.pack(ZSTD, 1, 1 << 63),
    ],
)
def test_an_envelope_that_asks_for_too_much_is_refused(head: bytes) -> None:
    with pytest.raises(Corrupt):
        parse(head)


def test_a_damaged_index_is_found_before_anything_is_read_by_it() -> None:
    encoding, stored = encoded(text(3 * CHUNK_BYTES))
    ends = list(struct.unpack("<3Q", stored[-24:]))
    for wrong in ([ends[1], ends[0], ends[2]], [ends[0], ends[0], ends[2]], [ends[0], ends[1], 1 << 60], [0, 0, 0]):
        with pytest.raises(Corrupt):
            read(encoding, stored[:-24] + struct.pack("<3Q", *wrong), 0, encoding.size)
    with pytest.raises(Corrupt):
        read(encoding, b"tiny", 0, encoding.size)


def test_a_record_shows_sizes_at_once_and_inflates_when_it_is_looked_at() -> None:
    body, plain = text(9000), b"as it is"
    head, stored = encode(b"m", body)
    table = [len(head) | 1 << 31, len(stored), 2, len(plain)]
    for bodies in (None, [stored, plain]):
        data = b"".join(encode_block(7, 1, 1, 0, table, [head, b"pl"], bodies, True))
        first, second = records_of(split_blocks(data)[0])
        assert (first.metadata, first.size, first.stored) == (b"m", len(body), len(stored))
        assert (second.metadata, second.size, second.stored, second.encoding) == (b"pl", len(plain), len(plain), None)
        assert (first.payload, second.payload) == ((body, plain) if bodies else (None, None))
    # Few bytes that stand for very many are not inflated because somebody polled.
    huge = Record(0, b"", 9, 1, 1, 0, memoryview(b"123456789"), encoding=Encoding(16 << 20, 4 << 30))
    assert huge.left_out
    with pytest.raises(BadRequest, match="body_pieces"):
        assert huge.payload


def frame_of(head: bytes, body: bytes | None) -> memoryview:
    frame = Frame()
    frame.put(head, body)
    return memoryview(b"".join(frame.encode()))


def test_servers_take_marked_frames_and_refuse_odd_ones() -> None:
    head, stored = encode(b"m", text(9000))
    good = frame_of(bytes(head), bytes(stored))
    marked = frame_of(Marked(head), bytes(stored))
    assert check_frame(good)[0] == check_frame(marked)[0] == 1
    for odd in (frame_of(Marked(b"too short"), b"x"), frame_of(Marked(head), None)):
        with pytest.raises(Refused, match="envelope"):
            check_frame(odd)
    unflagged = bytearray(marked)
    unflagged[1] &= ~16
    with pytest.raises(Refused):
        check_frame(memoryview(unflagged))
    made = entry.build_commands(5, 1, 1, 0, [marked, good])
    entry.verify_bodies(5, made)
    assert [frame.flags & MARKED for frame in entry.frames_of(made.data)] == [16, 0]


def test_an_upload_whose_first_piece_does_not_get_smaller_stays_plain() -> None:
    draw = random.Random(5)
    plain = Upload("log", b"m", draw, compress=True)
    noise = draw.randbytes(CHUNK_BYTES)
    assert plain.stored(noise) is noise and plain.stored(b"\0" * 5000) == b"\0" * 5000 and not list(plain.index())
    small = Upload("log", b"m", draw, compress=True)
    assert len(small.stored(b"\0" * CHUNK_BYTES)) < 1000
    # Later ones may be as they are.
    assert small.stored(noise) is noise and len(b"".join(map(bytes, small.index()))) == 16
    assert small.original == 2 * CHUNK_BYTES


def test_options() -> None:
    assert wants("zstd", False) and wants(None, True) and not wants("none", True) and not wants(None, False)
    with pytest.raises(BadRequest):
        wants("gzip", False)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_chunk_longer_than_its_original_is_refused_before_it_is_fetched(number: int) -> None:
    """The last one too, which is shorter than the others."""
    encoding = Encoding(CHUNK_BYTES, 2 * CHUNK_BYTES + 1000)
    for more in (0, 1):
        lengths = [encoding.length(at) + (more if at == number else 0) for at in range(3)]
        steps = ranges_of(encoding, sum(lengths) + encoding.index_bytes, 0, encoding.size)
        asked = next(steps)
        assert isinstance(asked, tuple) and asked[1] - asked[0] == encoding.index_bytes
        if more:
            with pytest.raises(Corrupt, match=f"chunk {number} "):
                steps.send(index_of(lengths))
        else:
            assert steps.send(index_of(lengths)) == (0, sum(lengths)), "all of it is one range"
