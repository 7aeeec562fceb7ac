"""A frame of the wire made of two Arrow columns, and the hash of what it brings. Pure; used by `rows`."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from xxhash import xxh3_128, xxh3_128_digest

from logyard.client.numbering import LENGTHS
from logyard.protocol.frame import ABSENT, LARGE, Buffer, Frame, encode_pack

Array: TypeAlias = np.ndarray[Any, Any]
NONE = pa.array([], pa.binary())
LENGTHS_TYPE = np.dtype([("meta", "<u4"), ("payload", "<i8")])
assert LENGTHS_TYPE.itemsize == LENGTHS.size
FEW = 256
"""So many rows or fewer are hashed one by one, with no copy of their bytes."""


class Block(Frame):
    """Rows that share one command: append's, unless another one is given."""

    __slots__ = ("_count", "_pack")

    def __init__(self, metas: pa.BinaryArray, payloads: pa.BinaryArray, command: bytes = b"") -> None:
        super().__init__(None, command)
        payloads, there = filled(payloads), valid(payloads)
        heads, bodies = offsets_of(metas), offsets_of(payloads)
        lengths = np.diff(bodies)
        table = np.empty((len(metas), 2), "<u4")
        table[:, 0] = np.diff(heads)
        table[:, 1] = lengths if there is None else np.where(there, lengths, ABSENT)
        data, small, at = bytes_of(payloads), list[Buffer](), int(bodies[0])
        for row in np.flatnonzero(lengths >= LARGE).tolist():
            small.append(data[at : int(bodies[row])])
            at = int(bodies[row + 1])
            self.large.append(data[int(bodies[row]) : at])
        small.append(data[at : int(bodies[-1])])
        self._count = len(metas)
        self._pack: list[Buffer] = [table.tobytes(), bytes_of(metas)[int(heads[0]) : int(heads[-1])], *small]
        self.size = sum(map(len, self._pack)) + sum(map(len, self.large))

    @property
    def count(self) -> int:
        """Return the number of records in it."""
        return self._count

    def encode(self, session: int = 0, sequence: int = 0) -> list[Buffer]:
        """Return the frame's buffers."""
        return encode_pack(self._count, self._pack, self.large, self.command, session=session, sequence=sequence)


def content_of(metas: pa.BinaryArray, payloads: pa.BinaryArray) -> bytes:
    """Return what `client.numbering.content_hash` does of these records."""
    payloads, there = filled(payloads), valid(payloads)
    heads, bodies = offsets_of(metas), offsets_of(payloads)
    lengths = np.empty(len(metas), LENGTHS_TYPE)
    lengths["meta"] = np.diff(heads)
    lengths["payload"] = np.diff(bodies)
    if there is not None:
        lengths["payload"][~there] = -1
    if len(metas) > FEW:
        ends = np.arange(0, LENGTHS.size * (len(metas) + 1), LENGTHS.size, dtype=np.int32)
        first = pa.Array.from_buffers(pa.binary(), len(metas), [None, pa.py_buffer(ends), pa.py_buffer(lengths)])
        whole = pc.binary_join_element_wise(first, metas, payloads, b"")
        at = offsets_of(whole)
        return xxh3_128_digest(bytes_of(whole)[int(at[0]) : int(at[-1])])
    found = xxh3_128()
    said, head, body = memoryview(lengths.tobytes()), bytes_of(metas), bytes_of(payloads)
    for row in range(len(metas)):
        found.update(said[LENGTHS.size * row : LENGTHS.size * (row + 1)])
        found.update(head[int(heads[row]) : int(heads[row + 1])])
        found.update(body[int(bodies[row]) : int(bodies[row + 1])])
    return found.digest()


def offsets_of(array: pa.BinaryArray) -> Array:
    """Return where each value of an array begins in its bytes, and the end of the last one."""
    (_, ends, _) = array.buffers()
    if ends is None or not ends.size:
        return np.zeros(1, np.int32)
    found: Array = np.frombuffer(ends, np.int32)[array.offset : array.offset + len(array) + 1]
    return found


def bytes_of(array: pa.BinaryArray) -> memoryview:
    """Return all bytes that an array's offsets point into."""
    data = array.buffers()[2]
    return memoryview(data if data is not None else b"")


def valid(array: pa.BinaryArray) -> Array | None:
    """Return which values are there; None: all."""
    return array.is_valid().to_numpy(zero_copy_only=False) if array.null_count else None


def filled(array: pa.BinaryArray) -> pa.BinaryArray:
    """Return an array with no bytes where it has no value."""
    return array.fill_null(b"") if array.null_count else array
