"""The definition itself, for histories of a few operations, and histories of simulated objects to judge."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from .cell import appended
from .history import Operation, Truth, Value

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
        if not item.pending and item.result == Truth(False):
            if state != item.argument[0]:
                yield state
        elif state == item.argument[0]:
            yield item.argument[1]
    elif item.f == "txn":
        answer, after = transacted(item.argument, state or ())
        if item.pending or item.result == answer:
            yield after
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


def transacted(argument: Any, state: tuple[tuple[Value, Value], ...]) -> tuple[Value, State]:
    """A transaction by the letter: pairs of key and value, in order of the keys."""
    compares, *branches = argument
    differing = [key for key, value in compares if dict(state).get(key) != value]
    answers = []
    for operation in branches[1 if differing else 0]:
        key = operation[1]
        if operation[0] == "get":
            answers.append(next((value for name, value in state if name == key), None))
        else:
            rest = [pair for pair in state if pair[0] != key]
            state = tuple(sorted(rest if operation[2] is None else [*rest, (key, operation[2])]))
    return (Truth(not differing), tuple(answers)), state or None


SMALL = 10
FUNCTIONS = {
    "txn": ("txn",),
    "register": ("read", "write", "cas"),
    "kv": ("put", "append", "get", "delete", "cas"),
    "queue": ("enqueue", "dequeue"),
}


def ask(
    draw: random.Random, model: str, functions: Sequence[str], number: int, values: int, state: State
) -> tuple[str, Value]:
    """A function and its argument; `values` 0: every value is new."""

    def value() -> Value:
        new = number if not values else draw.randrange(values)
        return "abcdefgh"[new % 8] if model == "kv" and values else f"<{number}>" if model == "kv" else new

    f = draw.choice(functions)
    if f == "cas":
        # Of what is there, or of something that was written: then it says that it differs.
        return f, (state if draw.random() < 0.6 else value(), value())
    if f == "txn":
        keys = ["a", "b", "c"]
        draw.shuffle(keys)
        now = dict(state or ())
        guess = now.get(keys[0]) if draw.random() < 0.7 else draw.randrange(4)
        compares = ((keys[0], guess),) if draw.random() < 0.7 else ()
        new = draw.choice([None, draw.randrange(4), 100 + number])
        then = (("put", keys[0], new), ("get", keys[1]), ("put", keys[1], new))[: draw.randrange(4)]
        return f, (compares, then, (("get", keys[0]), ("get", keys[2]))[: draw.randrange(3)])
    return f, value() if f in ("write", "put", "append", "enqueue") else None


def listed(value: Any) -> Any:
    """As JSON has it."""
    return [listed(one) for one in value] if isinstance(value, tuple) else value


def simulate(
    draw: random.Random, model: str, processes: int, count: int, *, values: int = 0, unknown: float = 0.1
) -> list[dict[str, Any]]:
    """Events of `count` operations on one object that is linearizable: each takes effect once between its ends. Some
    answers are lost, with or without their effect."""
    state: State = None
    functions = list(FUNCTIONS[model])
    if model == "kv" and count > SMALL:
        # The order of many appends is plain to see only without.
        functions.remove(draw.choice(("append", "cas")))
    events: list[dict[str, Any]] = []
    busy: dict[int, dict[str, Any]] = {}
    number = 0
    while number < count or busy:
        process = draw.randrange(processes)
        if process not in busy:
            if number < count:
                f, argument = ask(draw, model, functions, number, values, state)
                number += 1
                shown = listed(argument)
                busy[process] = {"f": f, "argument": argument, "value": shown, "kind": None}
                events.append({"process": process, "type": "invoke", "f": f, "value": shown})
            continue
        row = busy[process]
        if row["kind"] is None:
            item = Operation(process, row["f"], row["argument"], 0)
            found = list(outcomes(state, item))
            row["kind"] = "ok" if found else "fail"
            if row["f"] == "cas" and state != row["argument"][0]:
                row["kind"], row["value"], found = "ok", False, []
            if row["f"] == "txn":
                answer = transacted(row["argument"], state or ())[0]
                assert isinstance(answer, tuple) and isinstance(answer[0], Truth)
                row["value"] = [answer[0].value, list(answer[1])]
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
    answering = ("read", "get", "dequeue", "txn")
    reads = [at for at, event in enumerate(events) if event["type"] == "ok" and event["f"] in answering]
    if len(reads) < 2:
        return events
    one, other = draw.sample(reads, 2)
    found = [dict(event) for event in events]
    found[one]["value"] = events[other]["value"]
    return found
