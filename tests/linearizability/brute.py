"""The definition itself, for histories of a few operations, and histories of simulated objects to judge."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from .cell import appended
from .history import Operation, Value

State = Any


def outcomes(state: State, item: Operation) -> Iterator[State]:
    """States that `item` may lead to, given what it answered."""
    if item.f in ("read", "get"):
        if item.pending or item.result == state:
            yield state
    elif item.f in ("write", "put"):
        yield item.argument
    elif item.f == "delete":
        yield None
    elif item.f == "append":
        yield appended(state, item.argument)
    elif item.f == "cas":
        assert isinstance(item.argument, tuple)
        if state == item.argument[0]:
            yield item.argument[1]
    elif item.f == "enqueue":
        yield (*(state or ()), item.argument)
    elif state:
        if item.pending or item.result == state[0]:
            yield state[1:] or None
    elif item.pending or item.result is None:
        yield None


def linearizable(items: Sequence[Operation], state: State = None) -> bool:
    """By trying every order."""
    if all(item.pending for item in items):
        return True
    first_end = min(item.end for item in items)
    return any(
        linearizable([other for other in items if other is not item], after)
        for item in items
        if item.start < first_end
        for after in outcomes(state, item)
    )


FUNCTIONS = {
    "register": ("read", "write", "cas"),
    "kv": ("put", "append", "get", "delete"),
    "queue": ("enqueue", "dequeue"),
}


def ask(draw: random.Random, model: str, number: int, values: int, state: State) -> tuple[str, Value]:
    """A function and its argument; `values` 0: every value is new."""

    def value() -> Value:
        new = number if not values else draw.randrange(values)
        return "abcdefgh"[new % 8] if model == "kv" and values else f"<{number}>" if model == "kv" else new

    f = draw.choice(FUNCTIONS[model])
    if f == "cas":
        return f, (state, value())
    return f, value() if f in ("write", "put", "append", "enqueue") else None


def simulate(
    draw: random.Random, model: str, processes: int, count: int, *, values: int = 0, unknown: float = 0.1
) -> list[dict[str, Any]]:
    """Events of `count` operations on one object that is linearizable: each takes effect once between its ends. Some
    answers are lost, with or without their effect."""
    state: State = None
    events: list[dict[str, Any]] = []
    busy: dict[int, dict[str, Any]] = {}
    number = 0
    while number < count or busy:
        process = draw.randrange(processes)
        if process not in busy:
            if number < count:
                f, argument = ask(draw, model, number, values, state)
                number += 1
                shown = list(argument) if isinstance(argument, tuple) else argument
                busy[process] = {"f": f, "argument": argument, "value": shown, "kind": None}
                events.append({"process": process, "type": "invoke", "f": f, "value": shown})
            continue
        row = busy[process]
        if row["kind"] is None:
            item = Operation(process, row["f"], row["argument"], 0)
            found = list(outcomes(state, item))
            row["kind"] = "ok" if found else "fail"
            if row["f"] in ("read", "get"):
                row["value"] = state
            elif row["f"] == "dequeue":
                row["value"] = state[0] if state else None
            if found:
                state = found[0]
            continue
        kind = row["kind"] if draw.random() >= unknown else "info"
        value = list(row["value"]) if isinstance(row["value"], tuple) else row["value"]
        events.append({"process": process, "type": kind, "f": row["f"], "value": None if kind == "info" else value})
        del busy[process]
    return [{"key": "k", "time": at, **event} for at, event in enumerate(events)]


def spoil(draw: random.Random, model: str, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same history with one answer exchanged for another one's."""
    reads = [
        at for at, event in enumerate(events) if event["type"] == "ok" and event["f"] in ("read", "get", "dequeue")
    ]
    if len(reads) < 2:
        return events
    one, other = draw.sample(reads, 2)
    found = [dict(event) for event in events]
    found[one]["value"] = events[other]["value"]
    return found
