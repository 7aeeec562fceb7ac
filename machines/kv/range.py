"""Reads of the KV machine: ranges now and as of an older revision, and compares.

A range answers rows ``[key, create, mod, version, lease, value]`` (a payload is named: ``[index, ordinal, size]``).
Costs: a single key or a count is a lookup; a range costs its rows; an older revision, or an order that is not the
keys', costs all keys of the range, unless an older revision is asked for in their order and without a count. Used by
`kv`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

from .budget import STEP_BYTES, Budget
from .command import (
    BY_CREATE,
    BY_KEY,
    BY_MOD,
    BY_VERSION,
    COUNT_ONLY,
    DESCENDING,
    EQUAL,
    GREATER,
    KEYS_ONLY,
    LESS,
    OF_CREATE,
    OF_LEASE,
    OF_MOD,
    OF_VERSION,
    UNCOUNTED,
    Compare,
    Range,
    Refusal,
    Value,
)
from .digest import digest
from .history import CREATE, KEY, LEASE, MOD, VALUE, VERSION, Version
from .state import State

Row: TypeAlias = tuple[Any, ...]
ROW_BYTES = 64
"""A row's share of an answer beside key and value."""

SORTED: dict[int, Callable[[Version], Any]] = {
    BY_KEY: lambda version: version[KEY],
    BY_VERSION: lambda version: (version[VERSION], version[KEY]),
    BY_CREATE: lambda version: (version[CREATE], version[KEY]),
    BY_MOD: lambda version: (version[MOD], version[KEY]),
}


def row(version: Version, flags: int = 0) -> Row:
    """Return a version as an answer has it."""
    key, mod, _, create, number, lease, value = version
    if flags & KEYS_ONLY:
        value = b""
    return key, create, mod, number, lease, value[:3] if type(value) is tuple else value


def row_bytes(version: Version) -> int:
    """Return about how long a version is as a row, in which a payload is named."""
    value = version[VALUE]
    return ROW_BYTES + len(version[KEY]) + (len(value) if type(value) is bytes else 0)


def select(state: State, asked: Range, budget: Budget) -> tuple[list[Row], bool, int]:
    """Return (rows, whether there are more, how many there are in all: 0 where that costs more than the rows and need
    not be said). Raises `Refusal`, also for more than `budget` has."""
    if asked.revision:
        state.check_revision(asked.revision)
    key, end = asked.key, asked.end
    # What the transaction under way has written belongs to the next revision.
    now = not asked.revision or (asked.revision >= state.revision and not state.changing)
    plain = now and not any(asked.bounds)
    if plain and asked.flags & COUNT_ONLY:
        return [], False, state.count(key, end)
    if plain and asked.sort == BY_KEY:
        found: Iterable[Version]
        if not end:
            version = state.keys.get(key)
            if version is None or version[VALUE] is None:
                return [], False, 0
            return *_taken([version], asked, budget), 1
        keys = state.keys
        found = (keys[one] for one in state.walk(key, end, asked.order == DESCENDING))
        return *_taken(found, asked, budget), state.count(key, end)
    if end and asked.flags & UNCOUNTED and not asked.flags & COUNT_ONLY and asked.sort == BY_KEY:
        return *_taken(_walked(state, asked, now, budget), asked, budget), 0
    versions = _as_of(state, asked, now, budget)
    if asked.flags & COUNT_ONLY:
        return [], False, len(versions)
    if asked.sort != BY_KEY or asked.order == DESCENDING:
        versions.sort(key=SORTED.get(asked.sort, _by_value), reverse=asked.order == DESCENDING)
    return *_taken(versions, asked, budget), len(versions)


def _as_of(state: State, asked: Range, now: bool, budget: Budget) -> list[Version]:
    if now:
        budget.walk(state.count(asked.key, asked.end))
        found = [state.keys[key] for key in state.selected(asked.key, asked.end)]
    else:
        at, revision = state.at, asked.revision
        budget.walk(state.count_ever(asked.key, asked.end))
        keys = state.ever(asked.key, asked.end)
        found = [version for key in keys if (version := at(key, revision, budget)) is not None]
    return list(_bounded(found, asked)) if any(asked.bounds) else found


def _walked(state: State, asked: Range, now: bool, budget: Budget) -> Iterator[Version]:
    """Yield the same, lazily, in the order of their keys that is asked for."""
    found: Iterator[Version]
    reverse = asked.order == DESCENDING
    if now:
        found = (state.keys[key] for key in state.walk(asked.key, asked.end, reverse))
    else:
        at, revision = state.at, asked.revision
        keys = state.walk_ever(asked.key, asked.end, reverse)
        found = (version for key in keys if (version := at(key, revision, budget)) is not None)
    return _bounded(found, asked) if any(asked.bounds) else found


def _bounded(versions: Iterable[Version], asked: Range) -> Iterator[Version]:
    low, high, least, most = asked.bounds
    return (
        version
        for version in versions
        if version[MOD] >= low
        and (not high or version[MOD] <= high)
        and version[CREATE] >= least
        and (not most or version[CREATE] <= most)
    )


def _taken(versions: Iterable[Version], asked: Range, budget: Budget) -> tuple[list[Row], bool]:
    """Return as many rows as the limits allow, at least one, and whether some are left."""
    rows: list[Row] = []
    left = asked.max_bytes or 1 << 62
    limit = asked.limit or 1 << 62
    bodies = not asked.flags & KEYS_ONLY
    size, room, more = 0, budget.bytes, False
    for version in versions:
        own = row_bytes(version) if bodies else ROW_BYTES + len(version[KEY])
        shown = own + version[VALUE][2] if bodies and type(version[VALUE]) is tuple else own
        if len(rows) >= limit or (shown > left and rows):
            more = True
            break
        left -= shown
        size += own
        if size > room:
            break
        rows.append(row(version, asked.flags))
    budget.walk(len(rows))
    budget.answer(size)
    return rows, more


def _by_value(version: Version) -> tuple[bytes, bytes]:
    if type(version[VALUE]) is not bytes:
        raise Refusal("value_is_payload", "large values are not in the state: they can't be sorted there")
    return version[VALUE], version[KEY]


def holds(state: State, compare: Compare, budget: Budget) -> bool:
    """Return whether a compare is true now. Raises `Refusal`."""
    if not compare.end:
        version = state.keys.get(compare.key)
        return _true(None if version is None or version[VALUE] is None else version, compare, budget)
    keys = state.keys
    empty = True
    for key in state.walk(compare.key, compare.end):
        empty = False
        budget.walk()
        if not _true(keys[key], compare, budget):
            return False
    # As in etcd: a range without keys is compared as a missing key.
    return not empty or _true(None, compare, budget)


def _true(version: Version | None, compare: Compare, budget: Budget) -> bool:
    target, relation, operand = compare.target, compare.relation, compare.operand
    have: Any
    if target == OF_VERSION:
        have = 0 if version is None else version[VERSION]
    elif target == OF_CREATE:
        have = 0 if version is None else version[CREATE]
    elif target == OF_MOD:
        have = 0 if version is None else version[MOD]
    elif target == OF_LEASE:
        have = 0 if version is None else version[LEASE]
    else:
        # A missing key has no value, so nothing is true of it: it is not an empty one.
        return version is not None and _value_true(version[VALUE], relation, operand, budget)
    return bool(_related(have, relation, operand))


def _value_true(have: Value, relation: int, operand: Any, budget: Budget) -> bool:
    if type(have) is bytes and type(operand) is bytes:
        return _related(have, relation, operand)
    if relation in (GREATER, LESS):
        raise Refusal("value_is_payload", "a large value is compared with equal or different only")
    mine = _named(have, budget) if type(have) is bytes else have[2:] if have is not None else None
    theirs = _named(operand, budget) if type(operand) is bytes else tuple(operand)
    return (mine == theirs) == (relation == EQUAL)


def _named(value: bytes, budget: Budget) -> tuple[int, bytes]:
    """Return the size and digest of a value. Raises `Refusal`."""
    budget.walk(len(value) // STEP_BYTES)
    return len(value), digest(value)


def _related(have: Any, relation: int, operand: Any) -> bool:
    if relation == EQUAL:
        return bool(have == operand)
    if relation == GREATER:
        return bool(have > operand)
    if relation == LESS:
        return bool(have < operand)
    return bool(have != operand)
