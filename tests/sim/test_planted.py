"""Bugs planted in product code are found: by the recorded seeds, or, where draws have moved since, by the next ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from logyard.engine.raft import election

from .bugs import planted, unplanted
from .planted import BUGS, RECORDED, complaint
from .run import Run

SEEDS = 8
ROWS: list[dict[str, Any]] = json.loads(RECORDED.read_text())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["bug"])
def test_a_planted_bug_is_found(row: dict[str, Any]) -> None:
    bug = next(bug for bug in BUGS if bug.name == row["bug"])
    for seed in range(row["seed"], row["seed"] + SEEDS):
        with planted(bug):
            found = Run(seed, row["minutes"]).go().violations
        if found:
            assert not complaint(seed, row["minutes"]), "the product itself does not pass this seed"
            return
    raise AssertionError(f"{bug.name} was not found: {bug.rule}")


def test_planting_leaves_nothing_behind() -> None:
    bug = next(bug for bug in BUGS if bug.name == "votes_twice")
    before = election.on_vote
    with planted(bug):
        assert election.on_vote is not before
        with unplanted(bug):
            assert election.on_vote is before
    assert election.on_vote is before
    assert len({bug.name for bug in BUGS}) == len(BUGS)
    assert {row["bug"] for row in ROWS} <= {bug.name for bug in BUGS} and len(ROWS) >= 25
