"""Rates between two looks, and the screen that shows them; the command itself is in admin/test_verbs."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from logyard.service.status_watch import RATES, missing, rate_rows, rates, rows, screen


def row(pid: int = 7, **more: Any) -> dict[str, Any]:
    base = {"pid": pid, "groups": 3, "led": 1, "fdatasyncs": 100, "bytes_written": 1000, "commit": 50, "elections": 2}
    return {**base, "busy": {}, "stopped": 0, "wal": {"stalled_ms": 0}, "followers": [], **more}


def test_rates_are_differences_a_second() -> None:
    now = row(fdatasyncs=300, bytes_written=1000 + 4096, commit=150, busy={"a": 3, "b": 1})
    found = rates({1: row()}, {1: now}, 2.0)[1]
    assert found == {
        "fdatasyncs_per_s": 100.0,
        "bytes_written_per_s": 2048.0,
        "commit_per_s": 50.0,
        "elections_per_s": 0.0,
        "busy_per_s": 2.0,
    }
    # A deleted group takes its commits along: that is no negative rate.
    assert rates({1: row()}, {1: row(commit=10)}, 1.0)[1]["commit_per_s"] == 0


def test_a_restarted_new_or_silent_node_has_no_rates() -> None:
    gone = {"node": 1, "error": "error", "message": "cannot reach it"}
    assert rates({}, {1: row()}, 1.0) == {}
    assert rates({1: row(7)}, {1: row(8)}, 1.0) == {}
    assert rates({1: gone}, {1: row()}, 1.0) == rates({1: row()}, {1: gone}, 1.0) == {}
    assert missing({1: gone, 2: row()}) == [1]


def test_a_node_is_shown_with_the_name_that_it_was_given() -> None:
    found = {1: row(name="berlin"), 2: row(name="node-2"), 3: row()}
    assert [cells[0] for cells in rows(found)] == ["1 berlin", 2, 3]


def test_the_screen_names_what_is_short() -> None:
    busy = row(busy={"the group": 2, "the [node]": 9}, followers=[{"node": 3, "pulling": True}], stopped=4)
    found = {1: busy, 2: {"node": 2, "error": "error", "message": "cannot reach it"}}
    (cells,) = rate_rows(found, {1: dict.fromkeys(RATES, 2048.0)})
    assert cells == [1, "2048", "2.0 KiB", "2048", "2048", "2048", 4, "0", "3", "the [node]"]
    console = Console(width=250, record=True, file=io.StringIO())
    console.print(screen(found, {}))
    text = console.export_text()
    assert "the [node]" in text and "node 2 does not answer: cannot reach it" in text
