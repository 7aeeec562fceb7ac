"""A row's two copies in the meta store: its checksum, and which copy is right. Pure functions over bytes; `meta`'s."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from xxhash import xxh3_64_intdigest

HEADER_BYTES = 16
"""In front of every value: checksum and commit number, eight bytes each, little-endian."""

Fixes: TypeAlias = tuple[list[tuple[bytes, bytes | None]], list[tuple[bytes, bytes | None]]]
"""What to write to each of the two environments: (key, raw row, or None to delete it)."""


def seal(key: bytes, value: bytes, commit: int) -> bytes:
    """Return a raw row."""
    body = commit.to_bytes(8, "little") + value
    return xxh3_64_intdigest(body, xxh3_64_intdigest(key)).to_bytes(8, "little") + body


def holds(key: bytes, raw: bytes) -> bool:
    """Return whether a raw row verifies."""
    if len(raw) < HEADER_BYTES:
        return False
    return xxh3_64_intdigest(raw[8:], xxh3_64_intdigest(key)) == int.from_bytes(raw[:8], "little")


def commit_of(raw: bytes) -> int:
    """Return the number of the commit that wrote a row."""
    return int.from_bytes(raw[8:HEADER_BYTES], "little")


def judge(key: bytes, one: bytes | None, two: bytes | None, newest: Sequence[int]) -> tuple[int, bytes | None] | None:
    """Return (which environment is wrong, what belongs there) where the copies differ, or are both bad; None when
    neither verifies.

    `newest`: each environment's last commit. A missing row was deleted only if its side is newer as a whole."""
    sides = (one, two)
    good = [raw is not None and holds(key, raw) for raw in sides]
    if not any(good):
        return None
    if all(good):
        winner = 0 if commit_of(one or b"") >= commit_of(two or b"") else 1
    else:
        winner = 0 if good[0] else 1
        loser = 1 - winner
        if sides[loser] is None and newest[loser] > newest[winner]:
            return winner, None
    return 1 - winner, sides[winner]
