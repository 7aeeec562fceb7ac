"""Histories: one JSON object a line, in history order; what a process invoked and what came of it.

A line has `process`, `type` (invoke, ok, fail, info), `f`, `key`, `value` and `time` (ns, for people: the order of
lines is the order of events). `fail` means that the operation did not happen, `info` that nobody knows; an operation
without an end is `info` too. A compare-and-set that answered "not equal" is `ok` with the value false: it happened, and
is as good as a read. A process has one operation at a time on a key; after `info` it may go on. Read by the
solvers, written by `tests.chaos`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

Value: TypeAlias = Hashable
NEVER = math.inf
"""The end of an operation that may take effect at any later time."""
FUNCTIONS = {
    "register": frozenset({"read", "write", "cas"}),
    "kv": frozenset({"put", "append", "get", "delete", "cas"}),
    "queue": frozenset({"enqueue", "dequeue"}),
    "txn": frozenset({"txn"}),
}


class BadHistory(Exception):
    """A file that is no history; the message names the line."""


@dataclass(slots=True)
class Operation:
    """`start` and `end` are line numbers, all different; `argument` was invoked, `result` answered."""

    process: Value
    f: str
    argument: Value
    start: int
    result: Value = None
    end: float = NEVER

    @property
    def pending(self) -> bool:
        """Whether nobody knows if it happened."""
        return self.end == NEVER

    def __str__(self) -> str:
        shown = self.argument if self.argument is not None else self.result
        return f"{self.f} {plain(shown)} of process {plain(self.process)} (line {self.start})"


@dataclass(frozen=True, slots=True)
class Truth:
    """JSON's true and false: 1 == True in Python, and they are different values."""

    value: bool


def freeze(value: Any) -> Value:
    """A JSON value as something hashable: lists become tuples, objects sorted pairs."""
    if isinstance(value, bool):
        return Truth(value)
    if isinstance(value, list):
        return tuple(freeze(item) for item in value)
    if isinstance(value, dict):
        return ("object", *sorted((key, freeze(item)) for key, item in value.items()))
    assert value is None or isinstance(value, str | int | float)
    return value


def plain(value: Any) -> str:
    """For messages, and short."""
    text = json.dumps(value, default=lambda found: getattr(found, "value", str(found)))
    return text if len(text) <= 60 else text[:57] + "..."


Histories: TypeAlias = dict[Value, list[Operation]]


def read_histories(lines: Iterable[str], model: str) -> tuple[Histories, int]:
    """(operations by key in order of their start, without those that failed; how many were invoked).

    Raises `BadHistory`."""
    functions = FUNCTIONS[model]
    found: Histories = {}
    open_: dict[tuple[Value, Value], Operation] = {}
    failed: set[int] = set()
    count = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        kind, process, f, key, row = _row(number, line, functions)
        if kind == "invoke":
            if (process, key) in open_:
                raise BadHistory(f"line {number}: process {plain(process)} has not ended its operation on that key")
            operation = Operation(process, f, freeze(row.get("value")), number)
            _check_argument(number, operation)
            open_[process, key] = operation
            found.setdefault(key, []).append(operation)
            count += 1
            continue
        if "key" not in row:
            # What has no key ends the only operation of its process.
            key = next((one for who, one in open_ if who == process), None)
        if (process, key) not in open_:
            raise BadHistory(f"line {number}: process {plain(process)} has invoked nothing on that key")
        operation = open_.pop((process, key))
        if operation.f != f:
            raise BadHistory(f"line {number}: process {plain(process)} ends something that it did not begin")
        if kind == "fail":
            failed.add(operation.start)
        elif kind == "ok":
            operation.end = number
            operation.result = freeze(row.get("value"))
    kept = {key: [item for item in items if item.start not in failed] for key, items in found.items()}
    return kept, count


def _row(number: int, line: str, functions: frozenset[str]) -> tuple[str, Value, str, Value, dict[str, Any]]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadHistory(f"line {number}: {error}") from error
    if not isinstance(row, dict):
        raise BadHistory(f"line {number}: not an object")
    kind, f = row.get("type"), row.get("f")
    if kind not in ("invoke", "ok", "fail", "info"):
        raise BadHistory(f"line {number}: type is {plain(kind)}, not invoke, ok, fail or info")
    if f not in functions:
        raise BadHistory(f"line {number}: f is {plain(f)}, not one of {', '.join(sorted(functions))}")
    if row.get("process") is None:
        raise BadHistory(f"line {number}: which process?")
    return kind, freeze(row["process"]), f, freeze(row.get("key")), row


def _check_argument(number: int, operation: Operation) -> None:
    argument = operation.argument
    if operation.f == "cas" and not (isinstance(argument, tuple) and len(argument) == 2):
        raise BadHistory(f"line {number}: the value of a cas is [expected, new]")
    if operation.f == "txn" and not _is_transaction(argument):
        raise BadHistory(f"line {number}: the value of a txn is [compares, then, else]")
    if operation.f in ("write", "put", "append", "enqueue") and argument is None:
        raise BadHistory(f"line {number}: {operation.f} of nothing")


def _is_transaction(argument: Value) -> bool:
    if not isinstance(argument, tuple) or len(argument) != 3 or not all(isinstance(part, tuple) for part in argument):
        return False
    compares, then, otherwise = argument
    return all(isinstance(one, tuple) and len(one) == 2 for one in compares) and all(
        isinstance(one, tuple) and one[:1] + (len(one),) in (("put", 3), ("get", 2)) for one in (*then, *otherwise)
    )
