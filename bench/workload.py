"""Bodies for the load: distinct, incompressible, and cheap enough that the client is never what is measured.

A body is a window into one pool of random bytes with a unique 16-byte stamp in front (run, process, number), so it can
be rebuilt from its number alone and a read-back can be compared byte for byte. Called by `bench.load`.
"""

from __future__ import annotations

import random
import struct

STAMP = struct.Struct("<QQ")
STAMP_BYTES = STAMP.size
POOL_STEP = 61
"""Distance between the windows of consecutive bodies; odd and not a power of two, so windows repeat late."""


class Workload:
    """Bodies of `size` bytes. `lane` tells processes apart; the same (seed, lane, number) gives the same bytes."""

    __slots__ = ("lane", "pool", "rest", "seed", "size", "windows")

    def __init__(self, size: int, seed: int, lane: int) -> None:
        assert size >= STAMP_BYTES
        self.size = size
        self.seed = seed
        self.lane = lane
        self.rest = size - STAMP_BYTES
        pool_bytes = max(1 << 20, 2 * self.rest)
        self.pool = memoryview(random.Random(seed).randbytes(pool_bytes))
        self.windows = pool_bytes - self.rest

    def body(self, number: int) -> bytes:
        """Return body `number`: one join, no random draw."""
        at = number * POOL_STEP % self.windows
        stamp = STAMP.pack(self.seed << 16 & 0xFFFFFFFFFFFF0000 | self.lane, number)
        return b"".join((stamp, self.pool[at : at + self.rest]))

    def number_of(self, body: bytes | memoryview) -> int | None:
        """Return the number stamped on a body of this workload; None if it is another's or too short."""
        if len(body) != self.size:
            return None
        origin, number = STAMP.unpack_from(body)
        if origin != (self.seed << 16 & 0xFFFFFFFFFFFF0000 | self.lane):
            return None
        return int(number)
