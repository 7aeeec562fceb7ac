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
