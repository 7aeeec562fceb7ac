"""What a receiver of a snapshot lacks, and in what portions to ask for it: pure functions over ranges of positions.

Invariant: what is asked for is live in the snapshot and not among what the receiver named; nothing live is left
out. Called by the host's snapshot transfer on both sides. Terms are the caller's: `have` may name only payloads of
entries known to be the snapshot's (committed here).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .liveness import LiveSet
from .reference import PayloadRange


def merge(ranges: Iterable[PayloadRange]) -> list[PayloadRange]:
    """Return the ranges rising, disjoint and as few as possible."""
    found: list[PayloadRange] = []
    for piece in sorted(ranges):
        if piece.first >= piece.end:
            continue
        if found and piece.first <= found[-1].end:
            found[-1] = PayloadRange(found[-1].first, max(found[-1].end, piece.end))
        else:
            found.append(piece)
    return found


def subtract(wanted: Iterable[PayloadRange], held: Iterable[PayloadRange]) -> list[PayloadRange]:
    """Return what is in `wanted` and not in `held`. Cost: sorting both."""
    rest = merge(held)
    left: list[PayloadRange] = []
    at = 0
    for first, end in merge(wanted):
        while at < len(rest) and rest[at].end <= first:
            at += 1
        over = at
        while over < len(rest) and rest[over].first < end:
            if first < rest[over].first:
                left.append(PayloadRange(first, rest[over].first))
            first = max(first, rest[over].end)
            over += 1
        if first < end:
            left.append(PayloadRange(first, end))
    return left


def missing(live_set: LiveSet, have: Iterable[PayloadRange]) -> list[PayloadRange]:
    """Return what a receiver with `have` needs before it may install a snapshot with this live set: rising,
    disjoint."""
    return subtract(live_set.ranges(), have)


def portions(units: Iterable[tuple[int, int, int]], limit_bytes: int) -> Iterator[list[tuple[int, int, int, int]]]:
    """Cut (index, unit, length) into requests of at most `limit_bytes`, each a list of (index, unit, start, stop):
    resumable pieces."""
    assert limit_bytes > 0
    batch: list[tuple[int, int, int, int]] = []
    room = limit_bytes
    for index, unit, length in units:
        start = 0
        while True:
            stop = min(length, start + room)
            batch.append((index, unit, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield batch
                batch, room = [], limit_bytes
            if start >= length:
                break
    if batch:
        yield batch
