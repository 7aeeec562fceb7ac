"""Transactions over several keys of one group: a search over whole states, as Wing and Gong's with Lowe's memory.

An operation is ``txn`` of ``[compares, then, else]``: compares are ``[key, value]`` (null: absent), which all must
hold, operations ``["put", key, value]`` (null: delete) and ``["get", key]``. It answers ``[succeeded, [values of the
gets]]``. Histories are short (a group of keys has some hundred operations), so states are small and few.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from .history import NEVER, Operation, Truth, Value
from .verdict import CONFIGURATIONS_MAX, VALID, Verdict

State: TypeAlias = frozenset[tuple[Value, Value]]


def perform(argument: Any, state: Mapping[Value, Value]) -> tuple[Value, dict[Value, Value]]:
    """What a transaction answers, and what it leaves."""
    compares, then, otherwise = argument
    holds = all(state.get(key) == value for key, value in compares)
    after, read = dict(state), []
    for operation in then if holds else otherwise:
        if operation[0] == "get":
            read.append(after.get(operation[1]))
        elif operation[2] is None:
            after.pop(operation[1], None)
        else:
            after[operation[1]] = operation[2]
    return (Truth(holds), tuple(read)), after


def solve_transactions(operations: Sequence[Operation], configurations: int = CONFIGURATIONS_MAX) -> Verdict:
    """Whether a group of keys' history is that of transactions one after the other, from nothing."""
    steps = sorted((item for item in operations if not item.pending or _writes(item)), key=lambda item: item.start)
    required = sum(1 << at for at, item in enumerate(steps) if not item.pending)
    seen: set[tuple[int, State]] = set()
    stack: list[tuple[int, State]] = [(0, frozenset())]
    deepest, blocking = -1, ""
    while stack:
        done, state = stack.pop()
        branches: list[tuple[float, int, State]] = []
        taken = True
        while taken:
            taken, branches = False, []
            known = dict(state)
            for at in _enabled(steps, done):
                item = steps[at]
                result, after = perform(item.argument, known)
                if not item.pending and result != item.result:
                    continue
                if _reads_only(item):
                    # It fits, and changes nothing whenever it is: whatever else may come comes as well behind it.
                    done |= 1 << at
                    taken = True
                    break
                branches.append((item.end, done | 1 << at, frozenset(after.items())))
        if not required & ~done:
            return VALID
        if (done, state) in seen:
            continue
        seen.add((done, state))
        if len(seen) > configurations:
            return Verdict(None, f"not decided after {configurations} configurations")
        if done.bit_count() > deepest:
            deepest = done.bit_count()
            urgent = min((steps[at] for at in _enabled(steps, done)), key=lambda item: item.end)
            blocking = str(urgent)
        stack.extend((after, left) for _, after, left in sorted(branches, key=lambda one: one[0], reverse=True))
    return Verdict(False, f"{blocking} fits nowhere")


def _writes(item: Operation) -> bool:
    argument: Any = item.argument
    return any(operation[0] == "put" for branch in argument[1:] for operation in branch)


def _reads_only(item: Operation) -> bool:
    """Whether what is known to have been done has no put."""
    result: Any = item.result
    argument: Any = item.argument
    branch = not item.pending and argument[1 if result[0].value else 2]
    return branch is not False and all(operation[0] != "put" for operation in branch)


def _enabled(steps: Sequence[Operation], done: int) -> list[int]:
    """Steps that may be next: none that is left ended before they began."""
    found: list[int] = []
    first_end = NEVER
    for at, item in enumerate(steps):
        if item.start > first_end:
            break
        if not done >> at & 1:
            found.append(at)
            first_end = min(first_end, item.end)
    return [at for at in found if steps[at].start < first_end]
