"""Appends whose order the reads show: they become compare-and-sets, so that a key with appends is a register.

If every value that was read is a put value (or nothing) and appended ones after it in exactly one way, and none of
those was appended twice, then the value before each of these appends is known: the append is a cas from it. Any other
append leaves a value that nobody saw: it is an unread write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from .blocks import Step
from .history import Value

TRIES_MAX = 10_000
Row: TypeAlias = str | tuple[Value, ...]
Way: TypeAlias = dict[Row, tuple[Value, Value]]
"""Of one value: each appended part with the values before and after it."""


def untangle(steps: Sequence[Step]) -> list[Step] | None:
    """The steps without appends; None where the order of the appends is not plain to see, or text and lists mix."""
    puts = {step.new for step in steps if step.kind == "write"} - {None}
    reads = {step.expected for step in steps if step.kind == "read"} - {None}
    appends = [step.new for step in steps if step.kind == "append"]
    if appends and any(step.kind == "cas" for step in steps):
        return None
    text = all(isinstance(value, str) for value in (*puts, *reads, *appends))
    lists = all(isinstance(value, tuple) for value in (*puts, *reads)) and not any(
        isinstance(value, str) for value in appends
    )
    if not (text or lists):
        return None
    parts = [_row(value) for value in appends]
    known = set(parts)
    twice = {part for part in known if parts.count(part) > 1 or not part}
    before: Way = {}
    for whole in reads:
        way = _only_way(_row(whole), [_row(put) for put in puts], known)
        if way is None:
            return None
        for part, pair in way.items():
            if part in twice or before.setdefault(part, pair) != pair:
                return None
    found = []
    for step in steps:
        known_pair = before.get(_row(step.new)) if step.kind == "append" else None
        if known_pair is not None:
            step = step._replace(kind="cas", expected=known_pair[0], new=known_pair[1])
        elif step.kind == "append":
            step = step._replace(kind="write", new=("unread", step.start))
        found.append(step)
    return found


def _row(value: Value) -> Row:
    return value if isinstance(value, str | tuple) else (value,)


def _only_way(whole: Row, puts: Sequence[Row], known: set[Row]) -> Way | None:
    """The way to make `whole`; None if there is none, or another one."""
    lengths = sorted({len(part) for part in known if part})
    stack: list[tuple[int, Value, Way]] = [(0, None, {})] if whole else []
    stack += [(len(put), put, {}) for put in puts if whole[: len(put)] == put]
    only: Way | None = None
    for _ in range(TRIES_MAX):
        if not stack:
            return only
        at, value, way = stack.pop()
        if at == len(whole) and value is not None:
            if only is not None:
                return None
            only = way
            continue
        for length in lengths:
            part = whole[at : at + length]
            if len(part) == length and part in known and part not in way:
                after = whole[: at + length]
                stack.append((at + length, after, {**way, part: (value, after)}))
    return None
