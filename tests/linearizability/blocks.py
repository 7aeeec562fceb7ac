"""Registers whose values are all different, decided in n log n steps (Gibbons and Korach 1997, with compare-and-set).

Where every value is written once, it is known which write each read saw. The operations of a value, and those of a
value that a cas made of it, stand next to each other in every linearization: they are a block. Block A stands before
block B if an operation of A ended before one of B began: f(A) < s(B), with f the first end and s the last start. No
two blocks may stand before each other; longer circles contain such a pair. `overlap` is also a necessary condition
where only some values are written once, and so the early exit of `cell`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from .history import Operation, Value, plain
from .verdict import VALID, Verdict


class Step(NamedTuple):
    """An operation on one cell. `kind`: read (needs `expected`), write (leaves `new`), cas (both), append (`new`)."""

    kind: str
    expected: Value
    new: Value
    start: float
    end: float
    source: Operation | None


class Zone(NamedTuple):
    """A block's f and s, and one of its values for messages."""

    first_end: float
    last_start: float
    value: Value


def overlap(zones: Sequence[Zone]) -> tuple[Zone, Zone] | None:
    """Two blocks that would have to stand before each other."""
    forward = sorted((zone for zone in zones if zone.first_end < zone.last_start), key=lambda zone: zone[:2])
    for one, other in pairwise(forward):
        if other.first_end < one.last_start:
            return one, other
    begins = [zone.first_end for zone in forward]
    for zone in zones:
        if zone.first_end >= zone.last_start:
            # Forward zones don't overlap: only the last that begins before can hold this one.
            at = bisect_left(begins, zone.last_start) - 1
            if at >= 0 and forward[at].last_start > zone.first_end:
                return forward[at], zone
    return None


def clash(one: Zone, other: Zone) -> str:
    """Why two zones can't be."""
    return f"{plain(one.value)} and {plain(other.value)} would each have to be there before and after the other"


def needed_values(steps: Sequence[Step]) -> set[Value]:
    """Values that something that happened has seen; an unknown cas happened if its value is one of them."""
    needed = {step.expected for step in steps if step.kind in ("read", "cas") and step.source and not _pending(step)}
    unknown = [step for step in steps if step.kind == "cas" and _pending(step)]
    grown = True
    while grown:
        grown = False
        for step in unknown:
            if step.new in needed and step.expected not in needed:
                needed.add(step.expected)
                grown = True
    return needed


def _pending(step: Step) -> bool:
    return step.source is not None and step.source.pending


def solve_blocks(steps: Sequence[Step]) -> Verdict | None:
    """A verdict, or None where a value is written more than once (then this is no proof of anything).

    `steps` hold no append and no unknown write whose value is not needed; the first value is None."""
    writers: dict[Value, Step] = {None: Step("write", None, None, -1, -1, None)}
    for step in steps:
        if step.kind != "read":
            if step.new in writers:
                return None
            writers[step.new] = step
    readers: dict[Value, list[Step]] = {}
    followers: dict[Value, Step] = {}
    for step in steps:
        if step.kind == "write":
            continue
        if step.expected not in writers:
            return Verdict(False, f"{step.source}: {plain(step.expected)} was never written")
        if step.kind == "read":
            readers.setdefault(step.expected, []).append(step)
        elif step.expected in followers:
            return Verdict(False, f"{step.source}: another cas took {plain(step.expected)} as well")
        else:
            followers[step.expected] = step
    zones = []
    placed = 0
    for value, writer in writers.items():
        if writer.kind != "write":
            continue
        row: list[list[Step]] = [[writer]]
        while True:
            row.append(readers.get(value, []))
            after = followers.get(value)
            if after is None:
                break
            row.append([after])
            value = after.new
        latest = -1.0
        for group in row:
            for step in group:
                if step.end < latest:
                    return Verdict(False, f"{step.source} ended before what it depends on began, or saw what was gone")
            latest = max([latest, *(step.start for step in group)])
        placed += sum(map(len, row))
        zones.append(Zone(min(step.end for group in row for step in group), latest, writer.new))
    if placed != len(steps) + 1:
        return Verdict(False, "compare-and-sets that only follow each other in a circle")
    found = overlap(zones)
    return Verdict(False, clash(*found)) if found else VALID
