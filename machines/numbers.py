"""Numbers that clients told, as a machine may keep them: those that a snapshot and a reply can hold.

A machine that keeps another one, or raises over it, stops its group: who asks is refused instead.
"""

from __future__ import annotations

from typing import Any

LEAST, MOST = -(1 << 63), (1 << 64) - 1


def whole(value: Any) -> int:
    """Return a whole number. Raises ValueError, and TypeError for what is no number at all."""
    try:
        found = int(value)
    except OverflowError as error:
        raise ValueError("a number has an end") from error
    if not LEAST <= found <= MOST:
        raise ValueError("a number has 64 bits")
    return found
