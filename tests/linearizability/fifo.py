"""One FIFO queue. Values that are enqueued once are decided by what may never be seen; the rest by a search.

A history of different values is linearizable if and only if (Henzinger, Sezgin, Vafeiadis 2013) no value is dequeued
that was not enqueued before, none twice, none before a value that was enqueued earlier, and every answer "empty" fits a
moment at which no value was certainly there. Dequeues whose answer is not known may have taken values that nobody else
has: those that must be gone are given to them, the most urgent first.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from .history import NEVER, Operation, Value, plain
from .verdict import CONFIGURATIONS_MAX, VALID, Verdict


def solve_queue(operations: Sequence[Operation], configurations: int = CONFIGURATIONS_MAX) -> Verdict:
    """Whether one queue's history is that of a queue that begins empty."""
    taken: dict[Value, list[Operation]] = {}
    for item in operations:
        if item.f == "dequeue" and not item.pending and item.result is not None:
            taken.setdefault(item.result, []).append(item)
    puts: dict[Value, list[Operation]] = {}
    for item in operations:
        if item.f == "enqueue" and not (item.pending and item.argument not in taken):
            puts.setdefault(item.argument, []).append(item)
    found = impossible(puts, taken)
    if found is not None:
        return found
    empties = [item for item in operations if item.f == "dequeue" and not item.pending and item.result is None]
    unknown = sorted(item.start for item in operations if item.f == "dequeue" and item.pending)
    if all(len(group) == 1 for group in puts.values()):
        found = solve_different(puts, taken, empties, unknown)
        if found is not None:
            return found
    kept = {item.start for group in puts.values() for item in group}
    return search([item for item in operations if item.f == "dequeue" or item.start in kept], configurations)


def impossible(puts: dict[Value, list[Operation]], taken: dict[Value, list[Operation]]) -> Verdict | None:
    """What is wrong however often a value was enqueued."""
    for value, dequeues in taken.items():
        made = sorted(item.start for item in puts.get(value, []))
        if len(made) < len(dequeues):
            return Verdict(False, f"{dequeues[-1]}: dequeued {len(dequeues)} times, enqueued {len(made)} times")
        for start, end in zip(made, sorted(item.end for item in dequeues), strict=False):
            if end < start:
                return Verdict(False, f"{plain(value)} was dequeued before it was enqueued")
    return None


def solve_different(
    puts: dict[Value, list[Operation]],
    taken: dict[Value, list[Operation]],
    empties: Sequence[Operation],
    unknown: list[int],
) -> Verdict | None:
    """All values differ. None: unknown dequeues and answers "empty" together need the search."""
    starts = {value: float(taken[value][0].start) if value in taken else NEVER for value in puts}
    rows = [(made[0], starts[value], taken[value][0].end if value in taken else NEVER) for value, made in puts.items()]
    deadlines: dict[Value, float] = {}
    waiting = sorted(((made.end, start, made) for made, start, _ in rows), key=lambda row: row[0])
    at = 0
    latest = (-1.0, waiting[0][2]) if waiting else None
    left: list[Operation] = []
    for made, _, end in sorted(rows, key=lambda row: row[0].start):
        while at < len(waiting) and waiting[at][0] < made.start:
            _, start, earlier = waiting[at]
            if start == NEVER:
                left.append(earlier)
            elif latest is None or start > latest[0]:
                latest = (start, earlier)
            at += 1
        if latest is not None and end < latest[0]:
            return Verdict(
                False, f"{plain(made.argument)} was dequeued before {plain(latest[1].argument)}, enqueued earlier"
            )
        if end != NEVER:
            for earlier in left:
                deadlines[earlier.argument] = min(end, deadlines.get(earlier.argument, NEVER))
    free = list(unknown)
    for value, deadline in sorted(deadlines.items(), key=lambda row: row[1]):
        if not free or free[0] > deadline:
            return Verdict(False, f"{plain(value)} was lost: values enqueued after it were dequeued")
        starts[value] = free.pop(0)
    covered = uncovered(
        [(made[0].end, starts[value]) for value, made in puts.items() if made[0].end < starts[value]], empties
    )
    if covered is None:
        return VALID
    if unknown:
        return None
    return Verdict(False, f"{covered}: the queue was not empty at any moment of it")


def uncovered(present: Sequence[tuple[float, float]], empties: Sequence[Operation]) -> Operation | None:
    """The first answer "empty" all of whose moments (between lines n and n + 1) have a value that was certainly there:
    from the end of its enqueue to the start of its dequeue."""
    merged: list[tuple[float, float]] = []
    for first, after in sorted(present):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], after))
        else:
            merged.append((first, after))
    for item in sorted(empties, key=lambda item: item.start):
        for first, after in merged:
            if first <= item.start and item.end <= after:
                return item
    return None


def search(operations: Sequence[Operation], configurations: int) -> Verdict:
    """Wing and Gong's search with Lowe's memory, most urgent operation first."""
    items = sorted(operations, key=lambda item: item.start)
    required = sum(1 << at for at, item in enumerate(items) if not item.pending)
    seen: set[tuple[int, tuple[Value, ...]]] = set()
    stack: list[tuple[int, tuple[Value, ...]]] = [(0, ())]
    deepest, blocking = -1, items[0] if items else None
    while stack:
        done, queue = stack.pop()
        if not required & ~done:
            return VALID
        if (done, queue) in seen:
            continue
        seen.add((done, queue))
        if len(seen) > configurations:
            return Verdict(None, f"not decided after {configurations} configurations")
        enabled = may_begin(items, done)
        if done.bit_count() > deepest:
            deepest, blocking = done.bit_count(), min(enabled, key=lambda row: row[1].end)[1]
        shapes: set[tuple[str, Value, Value, bool]] = set()
        branches = []
        for at, item in sorted(enabled, key=lambda row: urgency(row[1], items, done)):
            shape = (item.f, item.argument, item.result, item.pending)
            if shape in shapes:
                continue
            shapes.add(shape)
            after = done | 1 << at
            if item.f == "enqueue":
                branches.append((after, (*queue, item.argument)))
            elif item.pending:
                if queue:
                    branches.append((after, queue[1:]))
            elif item.result is None:
                if not queue:
                    branches.append((after, queue))
            elif queue and queue[0] == item.result:
                branches.append((after, queue[1:]))
        stack.extend(reversed(branches))
    return Verdict(False, f"{blocking} fits nowhere")


def urgency(item: Operation, items: Sequence[Operation], done: int) -> tuple[float, float]:
    """Smaller is sooner: an operation by its own end, an enqueue by the end of the first dequeue that waits for it."""
    if item.f == "dequeue":
        return -1.0, item.end
    waiting = (
        other.end
        for at, other in enumerate(items)
        if not done >> at & 1 and other.f == "dequeue" and not other.pending and other.result == item.argument
    )
    return min(waiting, default=NEVER), item.end


def may_begin(items: Sequence[Operation], done: int) -> list[tuple[int, Operation]]:
    """What may be next, with its number: nothing that is left ended before it began."""
    found: list[tuple[int, Operation]] = []
    ends: list[float] = []
    for at in range((~done & (done + 1)).bit_length() - 1, len(items)):
        item = items[at]
        if ends and item.start > ends[0]:
            break
        if not done >> at & 1:
            found.append((at, item))
            heapq.heappush(ends, item.end)
    return [row for row in found if row[1].start < ends[0]]
