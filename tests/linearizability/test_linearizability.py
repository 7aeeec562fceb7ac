"""The checker against the definition, against known histories of every model, and its command line."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .brute import linearizable, simulate, spoil
from .check import SOLVERS, check
from .history import BadHistory, read_histories

Rows = list[dict[str, Any]]
MODELS = sorted(SOLVERS)


def lines(rows: Rows) -> list[str]:
    return [json.dumps(row) for row in rows]


def history(text: str, key: str = "k") -> Rows:
    """Rows from ``p f value -> answer`` words: ``1+`` invokes, ``1-`` ends: "1+ write 5", "1- write", "2- read 5"."""
    rows: Rows = []
    for at, part in enumerate(filter(None, map(str.strip, text.split(";")))):
        process, f, *value = part.split(maxsplit=2)
        kind = {"+": "invoke", "-": "ok", "!": "fail", "?": "info"}[process[-1]]
        given = json.loads(value[0]) if value else None
        rows.append({"process": process[:-1], "type": kind, "f": f, "key": key, "value": given, "time": at})
    return rows


@pytest.mark.parametrize("model", MODELS)
def test_it_agrees_with_the_definition(model: str) -> None:
    counts = {True: 0, False: 0}
    for seed in range(2500):
        draw = random.Random(f"{model} {seed}")
        rows = simulate(
            draw, model, draw.choice([2, 3, 4, 6]), draw.choice([3, 5, 6, 7]),
            values=draw.choice([0, 2, 3]), unknown=draw.choice([0, 0.2, 0.4]),
        )  # fmt: skip
        if seed % 2:
            rows = spoil(draw, model, rows)
        for items in read_histories(lines(rows), model)[0].values():
            want = linearizable(items)
            counts[want] += 1
            assert SOLVERS[model](items, 100_000).valid is want, (seed, rows)
    assert min(counts.values()) >= 40, counts


GOOD = {
    "register": [
        "1+ read; 1- read null",
        "1+ write 1; 2+ read; 2- read 1; 3+ read; 3- read 1; 1- write",
        "1+ write 1; 1- write; 2+ cas [1, 2]; 3+ read; 3- read 2; 2- cas; 4+ write 3; 4? write; 5+ read; 5- read 3",
        "1+ write 1; 1? write; 2+ read; 2- read null; 3+ read; 3- read 1",
        "1+ write 1; 1! write; 2+ read; 2- read null",
        "1+ write true; 1- write; 2+ read; 2- read true",
        "1+ cas [5, 6]; 1- cas false; 2+ read; 2- read null",
        "1+ write 1; 2+ cas [1, 2]; 2- cas false; 1- write; 3+ read; 3- read 1",
        "1+ write 1; 1- write; 2+ write 3; 3+ cas [1, 2]; 3- cas false; 2? write",
        "1+ write 1; 1- write; 2+ write 3; 2- write; 3+ cas [1, 2]; 3- cas false; 4+ read; 4- read 3",
        "1+ write 1; 2+ write 3; 3+ cas [1, 2]; 3- cas false; 4+ cas [3, 2]; 4- cas false; 1- write; 2- write",
    ],
    "txn": [
        '1+ txn [[["a", null]], [["put", "a", 1], ["put", "b", 1]], []]; 1- txn [true, []]; '
        '2+ txn [[], [["get", "a"], ["get", "b"]], []]; 2- txn [true, [1, 1]]',
        '1+ txn [[["a", 5]], [["put", "a", 1]], [["get", "a"]]]; 1- txn [false, [null]]',
        '1+ txn [[], [["put", "a", 1]], []]; 1? txn; 2+ txn [[["a", 1]], [], []]; 2- txn [false, []]; '
        '3+ txn [[["a", 1]], [], []]; 3- txn [true, []]',
    ],
    "kv": [
        '1+ put "a"; 1- put; 1+ append "b"; 1- append; 2+ get; 2- get "ab"; 1+ delete; 1- delete; 2+ get; 2- get null',
        '1+ append "x"; 2+ append "y"; 1- append; 2- append; 3+ get; 3- get "yx"',
        '1+ append "x"; 1? append; 2+ get; 2- get null; 3+ get; 3- get "x"',
        "1+ append 1; 1- append; 2+ append 2; 2- append; 3+ get; 3- get [1, 2]",
    ],
    "queue": [
        "1+ enqueue 1; 1- enqueue; 1+ enqueue 2; 1- enqueue; 2+ dequeue; 2- dequeue 1; 2+ dequeue; 2- dequeue 2",
        "1+ dequeue; 1- dequeue null; 1+ enqueue 1; 2+ dequeue; 2- dequeue null; 1- enqueue",
        "1+ enqueue 1; 1- enqueue; 2+ dequeue; 2? dequeue; 1+ enqueue 2; 1- enqueue; 3+ dequeue; 3- dequeue 2",
        "1+ enqueue 1; 1? enqueue; 2+ dequeue; 2- dequeue null; 3+ dequeue; 3- dequeue 1",
    ],
}
BAD = {
    "register": [
        "1+ read; 1- read 7",
        "1+ write 1; 1- write; 2+ read; 2- read null",
        "1+ write 1; 2+ read; 2- read 1; 3+ read; 3- read null; 1- write",
        "1+ write 1; 1- write; 2+ cas [2, 3]; 2- cas",
        "1+ write 1; 1! write; 2+ read; 2- read 1",
        "1+ write 1; 1- write; 2+ cas [1, 2]; 3+ cas [1, 3]; 2- cas; 3- cas",
        "1+ write 1; 1- write; 1+ write 2; 1- write; 2+ read; 2- read 1",
        "1+ write true; 1- write; 2+ read; 2- read 1",
        # What a stale leader answers: nothing, or something older, was there.
        "1+ write 1; 1- write; 2+ cas [1, 2]; 2- cas false; 3+ read; 3- read 1",
        "1+ cas [null, 1]; 1- cas false",
        "1+ write 1; 1- write; 2+ write 3; 3+ cas [1, 2]; 3- cas false; 4+ read; 4- read 1; 2! write",
        "1+ write 1; 1- write; 2+ cas [1, 2]; 2- cas; 3+ cas [2, 4]; 3- cas false; 3+ read; 3- read 2",
        "1+ write 1; 1- write; 2+ cas [1, 2]; 3+ cas [1, 4]; 2- cas false; 3- cas false",
    ],
    "txn": [
        # Half of a transaction, a lost update, two that each saw the other's absence, a stale refusal, one undone.
        '1+ txn [[], [["put", "a", 1], ["put", "b", 1]], []]; 1- txn [true, []]; '
        '2+ txn [[], [["get", "a"], ["get", "b"]], []]; 2- txn [true, [1, null]]',
        '1+ txn [[], [["put", "a", 1]], []]; 1- txn [true, []]; '
        '2+ txn [[["a", 1]], [["put", "a", 2]], []]; 3+ txn [[["a", 1]], [["put", "a", 3]], []]; '
        "2- txn [true, []]; 3- txn [true, []]",
        '1+ txn [[["b", null]], [["put", "a", 1]], []]; 2+ txn [[["a", null]], [["put", "b", 1]], []]; '
        "1- txn [true, []]; 2- txn [true, []]",
        '1+ txn [[], [["put", "a", 1]], []]; 1- txn [true, []]; 2+ txn [[["a", 1]], [], [["get", "a"]]]; '
        "2- txn [false, [null]]",
        '1+ txn [[], [["put", "a", 1], ["put", "b", 1]], []]; 1? txn; '
        '2+ txn [[], [["get", "a"]], []]; 2- txn [true, [1]]; 3+ txn [[], [["get", "b"]], []]; 3- txn [true, [null]]',
    ],
    "kv": [
        '1+ put "a"; 1- put; 1+ delete; 1- delete; 2+ get; 2- get "a"',
        '1+ append "x"; 1- append; 1+ append "y"; 1- append; 2+ get; 2- get "yx"',
        '1+ append "x"; 1- append; 2+ append "y"; 2- append; 3+ get; 3- get "y"',
        '1+ append "x"; 1? append; 2+ get; 2- get "x"; 3+ get; 3- get null',
    ],
    "queue": [
        "1+ enqueue 1; 1- enqueue; 1+ enqueue 2; 1- enqueue; 2+ dequeue; 2- dequeue 2; 2+ dequeue; 2- dequeue 1",
        "1+ enqueue 1; 1- enqueue; 2+ dequeue; 2- dequeue 1; 2+ dequeue; 2- dequeue 1",
        "1+ enqueue 1; 1- enqueue; 2+ dequeue; 2- dequeue null",
        "1+ enqueue 1; 1- enqueue; 1+ enqueue 2; 1- enqueue; 3+ dequeue; 3- dequeue 2; 2+ dequeue; 2? dequeue",
        "2+ dequeue; 2- dequeue 9",
    ],
}


@pytest.mark.parametrize(("model", "text"), [(model, text) for model in MODELS for text in GOOD[model]])
def test_known_good_histories(model: str, text: str) -> None:
    assert check(lines(history(text)), model).valid is True


@pytest.mark.parametrize(("model", "text"), [(model, text) for model in MODELS for text in BAD[model]])
def test_known_bad_histories(model: str, text: str) -> None:
    """Also when it is one key among good ones: that key is named."""
    rows = history(GOOD[model][0], "fine") + history(text, "wrong")
    found = check(lines(rows), model)
    assert (found.valid, found.key) == (False, "wrong") and found.reason


@pytest.mark.parametrize("model", MODELS)
def test_many_processes_and_a_hundred_operations_a_key_are_decided(model: str) -> None:
    """A budget of configurations stands for the time: one that is not enough says so."""
    # Transactions write the same few values again and again: to refuse one, every order of what is open is tried.
    processes, unknown = (5, [0]) if model == "txn" else (50, [0, 0.05, 0.2])
    bad = 0
    for seed in range(12):
        draw = random.Random(f"{model} {seed}")
        rows = simulate(draw, model, processes, 100, unknown=draw.choice(unknown))
        assert check(lines(rows), model, 5_000).valid is True
        wrong = check(lines(spoil(draw, model, rows)), model, 5_000).valid
        assert wrong is not None
        bad += not wrong
    assert bad >= 2


def test_many_keys_are_checked_in_parallel_and_the_first_bad_one_ends_it() -> None:
    rows: Rows = []
    for key in range(60):
        draw = random.Random(key)
        one = simulate(draw, "register", 10, 100)
        rows += [{**row, "key": key, "process": f"{key}-{row['process']}"} for row in one]
    assert check(lines(rows), "register").valid is True
    rows += [{**row, "process": f"x{row['process']}"} for row in history(BAD["register"][0], "wrong")]
    found = check(lines(rows), "register")
    assert (found.valid, found.key, found.operations) == (False, "wrong", 6001)


@pytest.mark.parametrize(
    "text",
    [
        "not json", "[]", '{"process": 1, "type": "invoke", "f": "jump"}',
        '{"process": 1, "type": "maybe", "f": "read"}',
        '{"process": 1, "type": "ok", "f": "read"}', '{"type": "invoke", "f": "read"}',
        '{"process": 1, "type": "invoke", "f": "cas", "value": 5}',
        '{"process": 1, "type": "invoke", "f": "read"}\n{"process": 1, "type": "invoke", "f": "read"}',
        '{"process": 1, "type": "invoke", "f": "read"}\n{"process": 1, "type": "ok", "f": "write"}',
        '{"process": 1, "type": "invoke", "f": "cas", "value": [1]}',
    ],
)  # fmt: skip
def test_what_is_no_history_is_refused(text: str) -> None:
    with pytest.raises(BadHistory, match="line"):
        check(text.splitlines(), "register")


def test_a_budget_that_does_not_suffice_is_no_verdict() -> None:
    rows = [row for p in range(9) for row in history(f"{p}+ write {p % 3}")]
    rows += [row for p in range(9) for row in history(f"{p}- write; r+ read; r- read {p % 3}")]
    assert check(lines(rows), "register", 3).valid is None


def test_the_command_line(tmp_path: Path) -> None:
    def run(rows: list[str], *more: str) -> tuple[int, dict[str, Any]]:
        path = tmp_path / "history.jsonl"
        path.write_text("\n".join(rows))
        command = [sys.executable, "-m", "tests.linearizability", str(path), "--model", "queue", "--json", *more]
        done = subprocess.run(command, capture_output=True, text=True)
        return done.returncode, json.loads(done.stdout)

    good, bad = lines(history(GOOD["queue"][0])), lines(history(BAD["queue"][0]))
    assert run(good) == (0, {"valid": True, "operations": 4, "key": None, "reason": ""})
    code, found = run(bad)
    assert (code, found["valid"], found["key"]) == (1, False, "k") and "before" in found["reason"]
    code, found = run(["no"])
    assert (code, found["valid"]) == (2, None) and "line 1" in found["reason"]
