"""Roaring bitmaps by their unbroken rows of ones: what liveness and marks consist of are ranges, sometimes of millions.

Invariant: the cost of each function is in rows (times a logarithm), not in bits. Called by `liveness` and `ledger`.
"""

from __future__ import annotations

from collections.abc import Iterator

from pyroaring import BitMap, BitMap64


def stretch_end(bits: BitMap | BitMap64, at: int) -> int:
    """Return where the row of ones that begins at `at` ends (`at` itself if that bit is zero), by doubling and
    halving."""
    step = 1
    while bits.contains_range(at, at + step):
        at += step
        step *= 2
    while step > 1:
        step //= 2
        if bits.contains_range(at, at + step):
            at += step
    return at


def stretches(bits: BitMap64 | None, low: int = 0, high: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of each row of ones, or of what of it lies from `low` on, as long as it begins before
    `high`."""
    if not bits:
        return
    end, highest = low, bits.max()
    while end <= highest and (high is None or end < high):
        first = bits.next_set_bit(end)
        if high is not None and first >= high:
            return
        end = stretch_end(bits, first)
        yield first, end


def clear(bits: BitMap64, first: int, end: int) -> None:
    """Remove a range, in steps of 2**32: the library walks every multiple of that in a range, whether anything is
    there or not."""
    while bits and bits.max() >= first:
        at = bits.next_set_bit(first)
        if at >= end:
            return
        first = min(end, (at >> 32) + 1 << 32)
        bits.remove_range(at, first)


def canonical(bits: BitMap64 | None, end: int) -> bytes:
    """Return the bits below `end`, serialised so that equal sets are equal bytes; nothing at all for none.

    The library keeps emptied parts and the kinds of containers that a bitmap's history left, so this builds a fresh
    one.
    """
    fresh = BitMap64()
    for first, last in stretches(bits):
        if first >= end:
            break
        fresh.add_range(first, min(last, end))
    fresh.run_optimize()
    return fresh.serialize() if fresh else b""
