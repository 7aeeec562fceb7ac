"""zstd for single payloads, sans-IO: what a client stores instead of a payload, and how any part of it is read back.

Who appends decides; a server stores, hashes and serves the encoded bytes and never inflates anything. An encoded
payload is cut into chunks of one size (of the original), each compressed by itself, or kept as it is where that is no
smaller; behind more than one chunk stands an index of their ends. The original's size and the chunk's stand in front
of the record's metadata (`ENVELOPE`). Invariant: nothing is inflated beyond the size declared for that chunk, which is
bounded and checked before any memory is taken. docs/wire-client.md has the tables.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Iterator
from typing import NamedTuple, TypeAlias

from .errors import BadRequest, Corrupt
from .frame import ENVELOPE, ENVELOPE_BYTES, PAYLOAD_BYTES_MAX, PIECE_BYTES_MAX, Buffer, Marked, view_of

ZSTD = 1
CHUNK_BYTES = PIECE_BYTES_MAX
"""What one chunk of the original has: also the piece of a large payload, so each piece is a chunk."""
CHUNK_BYTES_MAX = 16 << 20
"""The most memory that a chunk may ask a reader for, whatever its envelope says."""
SIZE_MAX = PAYLOAD_BYTES_MAX
WHOLE_BYTES_MAX = 64 << 20
"""The largest payload that is inflated into one buffer."""
SMALLEST = 512
"""A payload below this is stored as it is: its envelope alone is a good part of what could be won."""
WORTH = 15 / 16
"""Encoded bytes above this share of the original are not worth reading through zstd."""
LEVEL = 1
INDEX = struct.Struct("<Q")
READ_BYTES = 8 << 20
"""Chunks are fetched in ranges of at most about so many stored bytes."""
OPTIONS = (None, "none", "zstd")


class Encoding(NamedTuple):
    """What an envelope says: sizes in bytes."""

    chunk: int
    size: int

    @property
    def chunks(self) -> int:
        """How many chunks there are."""
        return -(-self.size // self.chunk)

    @property
    def index_bytes(self) -> int:
        """Of the index behind the chunks."""
        return INDEX.size * self.chunks if self.chunks > 1 else 0

    def length(self, number: int) -> int:
        """Return the original bytes of a chunk."""
        return min(self.chunk, self.size - number * self.chunk)


def wants(compress: str | None, by_option: bool) -> bool:
    """Return whether an append is to be compressed: as it says itself, or as the log's option says. Raises
    `BadRequest`."""
    if compress not in OPTIONS:
        raise BadRequest(f"compress is 'zstd' or 'none', not {compress!r}")
    return by_option if compress is None else compress == "zstd"


def envelope(head: Buffer, size: int) -> Marked:
    """Return metadata that says that the payload is encoded, and had `size` bytes."""
    return Marked(ENVELOPE.pack(ZSTD, CHUNK_BYTES, size) + bytes(head))


def shrink(chunk: Buffer) -> Buffer:
    """Return one chunk as it is stored: compressed, or as it is."""
    import zstandard

    found = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True).compress(chunk)
    return found if len(found) < len(chunk) * WORTH else chunk


def index_of(lengths: list[int]) -> bytes:
    """Return the index of stored chunks: where each ends. Nothing for a single one."""
    if len(lengths) < 2:
        return b""
    ends, at = [], 0
    for length in lengths:
        at += length
        ends.append(at)
    return struct.pack(f"<{len(ends)}Q", *ends)


def encode(head: Buffer, body: Buffer) -> tuple[Buffer, Buffer]:
    """Return (metadata, payload) to store instead, or the same where compression does not pay. BLOCKING: about 2 ms a
    MiB."""
    view = view_of("a payload", body)
    size = len(view)
    if size < SMALLEST:
        return head, body
    chunks = [shrink(view[at : at + CHUNK_BYTES]) for at in range(0, size, CHUNK_BYTES)]
    lengths = [len(chunk) for chunk in chunks]
    index = index_of(lengths)
    if sum(lengths) + len(index) + ENVELOPE_BYTES > size * WORTH:
        return head, body
    return envelope(head, size), chunks[0] if len(chunks) == 1 else b"".join((*chunks, index))


def parse(head: Buffer) -> Encoding:
    """Return the envelope in front of some metadata. Raises `Corrupt` for one that asks for too much, or is none."""
    if len(head) < ENVELOPE_BYTES:
        raise Corrupt.told("an encoded payload without an envelope")
    kind, chunk, size = ENVELOPE.unpack_from(head)
    if kind != ZSTD or not 0 < chunk <= CHUNK_BYTES_MAX or not 0 < size <= SIZE_MAX:
        raise Corrupt.told(f"a payload's envelope is not one of ours: encoding {kind}, {chunk} of {size} bytes")
    return Encoding(chunk, size)


def inflate(stored: Buffer, length: int) -> Buffer:
    """Return one chunk's original of `length` bytes. Raises `Corrupt` before anything larger is made."""
    if len(stored) == length:
        return stored
    import zstandard

    try:
        said = zstandard.get_frame_parameters(stored)
        if said.content_size != length or said.window_size > CHUNK_BYTES_MAX:
            raise Corrupt.told(f"a compressed chunk declares {said.content_size} bytes and not {length}")
        found = zstandard.ZstdDecompressor(max_window_size=CHUNK_BYTES_MAX).decompress(
            stored, max_output_size=length, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise Corrupt.told(f"a compressed chunk can't be read: {error}") from None
    if len(found) != length:
        raise Corrupt.told(f"a compressed chunk has {len(found)} bytes and not {length}")
    return found


def inflate_whole(encoding: Encoding, stored: memoryview) -> Buffer:
    """Return a whole payload that fits into memory. Raises `Corrupt`, `BadRequest` for one that is too large for
    that."""
    if encoding.size > WHOLE_BYTES_MAX:
        raise BadRequest(f"a payload of {encoding.size} bytes is read with body_pieces")
    found = list(originals(encoding, len(stored), lambda first, end: stored[first:end]))
    return found[0] if len(found) == 1 else b"".join(found)


def originals(encoding: Encoding, stored: int, read: Callable[[int, int], Buffer]) -> Iterator[Buffer]:
    """Yield the original in pieces of at most a chunk. `read` gives bytes of the `stored` ones from, and up to. Raises
    `Corrupt`, and what `read` raises."""
    plan = ranges_of(encoding, stored, 0, encoding.size)
    step = next(plan, None)
    while step is not None:
        if isinstance(step, tuple):
            step = plan.send(read(*step))
        else:
            yield step
            step = next(plan, None)


Step: TypeAlias = tuple[int, int] | Buffer


def ranges_of(encoding: Encoding, stored: int, start: int, stop: int) -> Generator[Step, Buffer, None]:
    """Yield bytes start..stop of the original, of which `stored` bytes are kept.

    Yields (first, end) ranges of the stored bytes, to be sent in, and between them the original's bytes in order.
    Raises `Corrupt`.
    """
    if start >= stop:
        return
    first, last = start // encoding.chunk, (stop - 1) // encoding.chunk
    if encoding.chunks == 1:
        ends = [0, stored]
    else:
        base = stored - encoding.index_bytes
        if base < 0:
            raise Corrupt.told("an encoded payload is shorter than its index")
        raw = yield base + INDEX.size * max(first - 1, 0), base + INDEX.size * (last + 1)
        found = [end for (end,) in INDEX.iter_unpack(raw)]
        ends = found if first else [0, *found]
        if len(ends) != last - first + 2 or ends[-1] > base:
            raise Corrupt.told("the index of an encoded payload does not add up")
    for number in range(first, last + 1):
        length = ends[number - first + 1] - ends[number - first]
        if not 0 < length <= encoding.length(number):
            raise Corrupt.told(f"chunk {number} of an encoded payload has {length} bytes")
    number = first
    while number <= last:
        # As many chunks as one range may have.
        end = number + 1
        while end <= last and ends[end - first + 1] - ends[number - first] <= READ_BYTES:
            end += 1
        at = ends[number - first]
        data = memoryview((yield at, ends[end - first]))
        if len(data) != ends[end - first] - at:
            raise Corrupt.told("an encoded payload ends too early")
        yield from _originals(encoding, data, [one - at for one in ends[number - first : end - first + 1]], number,
                              start, stop)  # fmt: skip
        number = end


def _originals(
    encoding: Encoding, data: memoryview, ends: list[int], number: int, start: int, stop: int
) -> Iterator[Buffer]:
    for position in range(len(ends) - 1):
        begins = (number + position) * encoding.chunk
        whole = inflate(data[ends[position] : ends[position + 1]], encoding.length(number + position))
        low, high = max(start - begins, 0), min(stop - begins, len(whole))
        yield whole if (low, high) == (0, len(whole)) else memoryview(whole)[low:high]
