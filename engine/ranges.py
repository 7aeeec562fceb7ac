"""Ranges of indexes: rising, disjoint, both ends included. Used by transfers and by who reads a stopped directory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

Range = tuple[int, int]
"""Indexes of entries: first, last."""


def covered(ranges: Iterable[Range], through: int) -> list[Range]:
    """Return the part of the ranges up to `through`."""
    return [(first, min(last, through)) for first, last in ranges if first <= through]


def subtract(ranges: Iterable[Range], held: Sequence[Range]) -> list[Range]:
    """Return what is in `ranges` and not in `held`; both rising and disjoint."""
    left: list[Range] = []
    start = 0
    for first, last in ranges:
        while start < len(held) and held[start][1] < first:
            start += 1
        at = start
        while at < len(held) and held[at][0] <= last:
            low, high = held[at]
            if low > first:
                left.append((first, low - 1))
            first = max(first, high + 1)
            at += 1
        if first <= last:
            left.append((first, last))
    return left


def union(ranges: Iterable[Range]) -> list[Range]:
    """Return the ranges rising, disjoint, and as few as possible."""
    found: list[Range] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        elif first <= last:
            found.append((first, last))
    return found


def runs_of(indexes: Iterable[int], hides: Callable[[int, int], bool]) -> list[Range]:
    """Return rising indexes as runs, each to be covered by one home: broken where a home over the gap (first, last)
    `hides` what is at home elsewhere."""
    found: list[Range] = []
    for index in indexes:
        low, high = (found[-1][1] + 1, index - 1) if found else (1, 0)
        if found and (low > high or not hides(low, high)):
            found[-1] = (found[-1][0], index)
        else:
            found.append((index, index))
    return found
