"""What the demo of the cluster makes of a run: its accounting notices what is planted, its table and picture say who
had what when. The run itself, on real processes, is a step of `make prove`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from logyard.service.demo.cluster_report import Found, account
from logyard.service.demo.consumer import Journal
from logyard.service.demo.timeline import Event, Journals, Span, lanes, owners, picture, spans, table

RECORDS = 8
Rows = list[tuple[Any, ...]]


def journals() -> dict[int, Rows]:
    """Consumer 1 has partitions 0 and 1 of a topic, is killed at 10 with two records not committed, and consumer 2 has
    them then."""
    first: Rows = [("owns", 1.0, "t", [0, 1])]
    first += [("given", 2.0 + at, "t", 0, 1, at, 0, at) for at in range(RECORDS)]
    first += [("given", 2.5 + at, "t", 1, 1, at, 1, at) for at in range(4)]
    first.append(("commit", 9.8, 9.9, "t", [[0, 1, RECORDS], [1, 1, 2]]))
    second: Rows = [("owns", 12.0, "t", [0, 1])]
    second += [("given", 13.0 + at, "t", 1, 2, at, 1, at) for at in range(2, RECORDS)]
    second += [("commit", 20.0, 20.1, "t", [[1, 2, RECORDS]]), ("end", 21.0)]
    return {1: first, 2: second}


def found(directory: Path, rows: dict[int, Rows], **other: Any) -> Found:
    """What a run with these journals left behind."""
    killed = other.pop("killed", {1: 10.0})
    read = Journals()
    for number, lines in rows.items():
        journal = Journal(str(directory / f"{number}.jsonl"))
        for line in lines:
            journal.write(*line)
        read.read(number, directory / f"{number}.jsonl", killed.get(number, 30.0))
    sent = {"t": {(partition, at): (partition, at) for partition in (0, 1) for at in range(RECORDS)}}
    moves = [
        {"kind": "replace", "outcome": "done", "why": "node 3 is dead"},
        {"kind": "replace", "outcome": "done", "why": "node 1 drains"},
        {"kind": "replace", "outcome": "cancelled", "why": "node 3 is dead"},
        {"kind": "lead", "outcome": "done", "why": "node 2 leads more than 3"},
    ]
    seen = [(1.0, ("t", 0), frozenset({1, 2, 3})), (8.0, ("t", 0), frozenset({1, 2, 4}))]
    whole = Found(read, sent, killed, moves, {("t", 0): {2, 4, 5}, ("t", 1): {2, 4, 5}}, {2, 4, 5}, seen, 1.0, 30.0, [])
    return whole._replace(**other)


def test_a_good_run(tmp_path: Path) -> None:
    said = account(found(tmp_path, journals()), 3)
    assert said["ok"] is True and said["problems"] == []
    assert (said["records"], said["consumed"], said["doubled"]) == (2 * RECORDS, 2 * RECORDS + 2, 2)
    assert said["lost"] == said["skipped"] == said["doubled_without_crash"] == said["violations"] == 0
    assert said["members_replaced"] == said["members_drained"] == 1
    assert said["owned"] == [
        ("t", 0, 1, 0.0, 9.0),
        ("t", 0, 2, 11.0, 20.0),
        ("t", 1, 1, 0.0, 9.0),
        ("t", 1, 2, 11.0, 20.0),
    ]
    assert set(said["held"]) == {
        ("t", 0, 1, 0.0, 29.0),
        ("t", 0, 2, 0.0, 29.0),
        ("t", 0, 3, 0.0, 7.0),
        ("t", 0, 4, 7.0, 29.0),
    }


def _lost(rows: dict[int, Rows]) -> None:
    rows[2].remove(("given", 13.0 + 5, "t", 1, 2, 5, 1, 5))


def _skipped(rows: dict[int, Rows]) -> None:
    rows[1].append(("commit", 9.91, 9.92, "t", [[1, 1, 6]]))


def _doubled(rows: dict[int, Rows]) -> None:
    """The first one goes on after it was said to be dead: its partition is the other one's."""
    rows[1].append(("end", 30.0))


def _out_of_order(rows: dict[int, Rows]) -> None:
    rows[1].append(("given", 9.0, "t", 0, 1, 99, 1, 7))


@pytest.mark.parametrize(
    ("plant", "other", "key", "goal"),
    [
        (_lost, {}, "lost", "everything acknowledged was consumed"),
        (_skipped, {}, "skipped", "nothing was skipped"),
        (_doubled, {"killed": {}}, "doubled_without_crash", "nothing was read twice but after a crash"),
        (_out_of_order, {}, "violations", "each key in order, by one owner at a time"),
        (None, {"moves": []}, "", "members of the dead node were replaced"),
        (None, {"here": {2, 4}}, "", "every partition has 3 members on nodes that are there"),
        (None, {"voters": {("t", 0): {2, 4}}}, "", "every partition has 3 members on nodes that are there"),
        (None, {"problems": ["consumer 1 ended with code 1"]}, "", "all processes ended in order"),
        (None, {"sent": {"t": {}}}, "", "everything acknowledged was consumed"),
    ],
)  # fmt: skip
def test_what_is_planted_is_noticed(
    tmp_path: Path, plant: Callable[[dict[int, Rows]], None] | None, other: dict[str, Any], key: str, goal: str
) -> None:
    rows = journals()
    if plant is not None:
        plant(rows)
    said = account(found(tmp_path, rows, **other), 3)
    assert said["ok"] is False and said["goals"][goal] is False
    assert not key or (said[key] > 0 and said["problems"])


def test_a_line_that_was_cut_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "1.jsonl"
    path.write_text('["owns", 1.0, "t", [0]]\n["given", 2.0, "t", 0, 1, 0, 0, 0]\n["given", 3.0, "t"')
    read = Journals()
    read.read(1, path, 5.0)
    assert len(read.given["t"]) == 1
    assert owners(read, 0.0, 9.0) == [Span("t", 0, 1, 1.0, 5.0)]


def test_spans_and_lanes() -> None:
    seen = [(1.0, "a", frozenset({1, 2})), (3.0, "a", frozenset({2, 3})), (2.0, "b", frozenset({1}))]
    assert sorted(spans(seen, 9.0)) == [("a", 1, 1.0, 3.0), ("a", 2, 1.0, 9.0), ("a", 3, 3.0, 9.0), ("b", 1, 2.0, 9.0)]
    assert lanes([(0.0, 2.0), (1.0, 3.0), (2.0, 4.0), (2.5, 3.0)]) == [0, 1, 0, 2]


def test_who_sees_late_that_it_gave_up_has_it_no_longer_than_until_the_next_one() -> None:
    read = Journals()
    read.owns = [(1.0, (1, "t"), frozenset({0})), (4.0, (2, "t"), frozenset({0})), (4.2, (1, "t"), frozenset())]
    assert owners(read, 1.0, 9.0) == [Span("t", 0, 1, 0.0, 3.0), Span("t", 0, 2, 3.0, 8.0)]
    assert table(owners(read, 1.0, 9.0), [Span("t", 0, 5, 0.0, 8.0)]) == [("t.0", "1 (0-3), 2 (3-8)", "5 (0-8)")]


def test_the_picture_is_drawn_where_it_is_told(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "picture.png"
    picture(path, [Span("t", 0, 1, 0.0, 3.0)], [Span("t", 0, 5, 0.0, 8.0)], [Event(1.0, "a node is killed")])
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000
