"""Operations on the keys: decided first, checked second, done last, so that a refusal has changed nothing; what a read
behind writes refuses is undone by the caller.

A transaction's compares, also those of transactions within it, are decided on the state before it; its operations are
then done in order at one revision, and a read among them sees the writes before it. No key may be written twice.
Used by `kv`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Any, TypeAlias, cast

from .budget import Budget
from .command import (
    DELETE,
    FROM_KEY,
    KEEP_LEASE,
    PREVIOUS,
    PUT,
    RANGE,
    TXN,
    Delete,
    Operation,
    Put,
    Range,
    Refusal,
)
from .history import LEASE, VALUE
from .range import holds, row, row_bytes, select
from .state import State

Plan: TypeAlias = "Put | Delete | Range | tuple[bool, list[Plan]]"
"""What is to be done: of a transaction, whether its compares hold, and the operations of that branch."""


def plan(state: State, operation: Operation, budget: Budget) -> Plan:
    """Decide the compares, up to the first one that does not hold. Raises `Refusal`."""
    if isinstance(operation, Put | Delete | Range):
        return operation
    succeeded = all(holds(state, compare, budget) for compare in operation.compares)
    return succeeded, [plan(state, one, budget) for one in (operation.then if succeeded else operation.other)]


def leaves(planned: Plan) -> Iterator[Put | Delete | Range]:
    """Yield the operations of a plan, in order."""
    if isinstance(planned, Put | Delete | Range):
        yield planned
    else:
        for one in planned[1]:
            yield from leaves(one)


def check(state: State, planned: Plan) -> None:
    """Raise `Refusal` for what can't be done, whatever comes before it."""
    if type(planned) is Put:
        _check_put(state, planned)
        return
    written: set[bytes] = set()
    payloads: set[int] = set()
    deleted: list[Delete] = []
    for one in leaves(planned):
        if isinstance(one, Put):
            if one.key in written:
                raise Refusal("duplicate_key", "a key can't be put twice in one transaction")
            written.add(one.key)
            if type(one.value) is tuple:
                if one.value[1] in payloads:
                    raise Refusal("bad_request", "a payload is the value of one key only")
                payloads.add(one.value[1])
            _check_put(state, one)
        elif isinstance(one, Delete):
            deleted.append(one)
        else:
            state.check_revision(one.revision)
    ordered = sorted(written) if deleted else []
    if any(_overlaps(one, ordered) for one in deleted):
        raise Refusal("duplicate_key", "a key can't be put and deleted in one transaction")


def _check_put(state: State, put: Put) -> None:
    if put.lease:
        state.leases.check(put.lease)
    if put.value is None or put.flags & KEEP_LEASE:
        before = state.keys.get(put.key)
        if before is None or before[VALUE] is None:
            raise Refusal("key_not_found", "a key that is not there has no value and no lease to keep")


def _overlaps(one: Delete, written: list[bytes]) -> bool:
    """Return whether any of the keys that are written, in order, is deleted."""
    at = bisect_left(written, one.key)
    if at == len(written):
        return False
    return written[at] < one.end or one.end == FROM_KEY if one.end else written[at] == one.key


def perform(state: State, planned: Plan, budget: Budget) -> tuple[Any, ...]:
    """Do it; return the reply behind status and revision. Raises `Refusal` for a read that can't be sorted, or where
    `budget` is used up: what came before it is to be abandoned then."""
    if type(planned) is Put:
        return (_put(state, planned, budget),)
    if type(planned) is Delete:
        return _delete(state, planned, budget)
    if type(planned) is Range:
        return select(state, planned, budget)
    succeeded, steps = cast("tuple[bool, list[Plan]]", planned)
    return succeeded, [(_code(one), *perform(state, one, budget)) for one in steps]


def _code(planned: Plan) -> int:
    if type(planned) is Put:
        return PUT
    if type(planned) is Delete:
        return DELETE
    return RANGE if type(planned) is Range else TXN


def _put(state: State, put: Put, budget: Budget) -> tuple[Any, ...] | None:
    value, lease = put.value, put.lease
    if value is None or put.flags & KEEP_LEASE:
        before = state.keys[put.key]
        if value is None:
            value = before[VALUE]
        if put.flags & KEEP_LEASE:
            lease = before[LEASE]
    previous = state.put(put.key, value, lease)
    if not put.flags & PREVIOUS or previous is None:
        return None
    budget.answer(row_bytes(previous))
    return row(previous)


def _delete(state: State, one: Delete, budget: Budget) -> tuple[int, list[tuple[Any, ...]]]:
    if one.end:
        budget.walk(state.count(one.key, one.end))
    keys = state.selected(one.key, one.end)
    if not one.flags & PREVIOUS:
        for key in keys:
            state.delete(key)
        return len(keys), []
    found = [state.keys[key] for key in keys]
    budget.answer(sum([row_bytes(version) for version in found]))
    for key in keys:
        state.delete(key)
    return len(keys), [row(version) for version in found]
