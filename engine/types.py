"""Names of what travels through the engine. Indexes and terms are plain integers from 1 up (0: none), node ids are 1 to
2**32 - 1 and never reused for another machine, group uids are 64 random bits, one incarnation each; those of a batch
follow one another, in the last `BATCH_BITS` of them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview
Bodies: TypeAlias = Sequence[Buffer]


BATCH_BITS = 12
FORCED_TERMS = 1 << 20
"""How far `raft.election.force` raises the term: above whatever the others may have reached or will reach by
themselves."""
INDEX_BITS = 48


def position(term: int, index: int) -> int:
    """Return a number by which a group's configurations are compared: that of the index, unless members were ever
    forced (`raft.election.force`): then a later one may have a lower index than one before. It has 64 bits
    whatever a peer says of terms, as it is stored and sent."""
    times, place = term // FORCED_TERMS, (1 << INDEX_BITS) - 1
    return (min(times, (1 << 64 - INDEX_BITS) - 1) << INDEX_BITS) + min(index, place)


def times_forced(place: int) -> int:
    """Return how often members had been forced before a configuration at that position."""
    return place >> INDEX_BITS


def draw_uid() -> int:
    """Return a new group's uid: all of its bits are drawn, as they pick who leads the group first."""
    return int.from_bytes(os.urandom(8), "little") or 1


def draw_batch() -> int:
    """Return the first uid of a batch: the others are next to it, so that their rows are next to one another, too."""
    return int.from_bytes(os.urandom(8), "little") >> BATCH_BITS << BATCH_BITS or 1 << BATCH_BITS


class Spec(NamedTuple):
    """What a group is: written to the meta store before its first WAL record (invariant 6)."""

    uid: int
    name: str
    machine: str
    arguments: dict[str, Any]
    voters: tuple[int, ...]
    created: int

    @property
    def is_system(self) -> bool:
        """Whether the cluster keeps its own affairs in it."""
        return self.name.startswith("_")
