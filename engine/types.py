"""Names of what travels through the engine. Indexes and terms are plain integers from 1 up (0: none), node ids are 1 to
2**32 - 1 and never reused for another machine, group uids are 64 random bits, one incarnation each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview
Bodies: TypeAlias = Sequence[Buffer]


class Spec(NamedTuple):
    """What a group is: written to the meta store before its first WAL record (invariant 6)."""

    uid: int
    name: str
    machine: str
    arguments: dict[str, Any]
    voters: tuple[int, ...]
    created: int
