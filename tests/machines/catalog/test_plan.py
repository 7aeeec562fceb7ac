"""The plan: one move a log, steps, ends, a pause; and the cursors."""

from __future__ import annotations

import pytest

from logyard.protocol.errors import BadRequest, Refused

from .told import Told


def test_moves() -> None:
    told = Told()
    move = {"uid": 7, "kind": "replace", "source": 1, "target": 4, "why": "node 1 is dead"}
    assert told("plan", "propose", moves=[move, move, {**move, "uid": 8}]) == [1, 0, 2]
    with pytest.raises(BadRequest, match="no move"):
        told("plan", "propose", moves=[{**move, "kind": "boom"}])
    assert told("plan", "step", number=1, step="joined") == 1
    assert told("plan", "finish", number=1, outcome="done") == 1
    with pytest.raises(Refused, match="no move 1"):
        told("plan", "step", number=1, step="left")
    assert told("plan", "propose", moves=[move]) == [3], "numbers are not used again"
    assert told("plan", "pause", why="a restore") == "a restore"
    assert told("plan", "cancel") == [2, 3]
    shown = told.ask("plan", "list")
    assert shown["paused"] == "a restore" and shown["moves"] == []
    assert [(one["number"], one["outcome"], one["step"]) for one in shown["ended"]] == [
        (1, "done", "joined"), (2, "cancelled", "proposed"), (3, "cancelled", "proposed"),
    ]  # fmt: skip
    assert told("plan", "resume") == ""


def test_many_moves_end_at_once_and_one_that_is_over_ends_none_of_them() -> None:
    told = Told()
    move = {"uid": 7, "kind": "replace", "source": 1, "target": 4, "why": "node 1 is dead"}
    assert told("plan", "propose", moves=[{**move, "uid": uid} for uid in (7, 8, 9)]) == [1, 2, 3]
    assert told("plan", "finish", moves=[(1, "done"), (1, "done"), (3, "its log is gone")]) == [1, 0, 3]
    shown = told.ask("plan", "list")
    assert [one["number"] for one in shown["moves"]] == [2]
    assert [(one["number"], one["outcome"]) for one in shown["ended"]] == [(1, "done"), (3, "its log is gone")]


def test_cursors_only_move_on() -> None:
    told = Told()
    assert told("cursors", "advance", name="place", by=3) == 0
    assert told("cursors", "advance", name="place", by=2) == 3
    with pytest.raises(BadRequest):
        told("cursors", "advance", name="place", by=-1)
    assert told.ask("cursors", "read", name="place") == 5
