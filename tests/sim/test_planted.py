"""Bugs planted in product code are found: by the recorded seeds, or, where draws have moved since, by the next ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from logyard.engine.raft import election

from .bugs import Bug, Stale, edited, planted, unplanted
from .planted import BUGS, RECORDED, broke_at, complaint, run_of

SEEDS = 8
ROWS: list[dict[str, Any]] = json.loads(RECORDED.read_text())


@pytest.mark.sample(4)
@pytest.mark.parametrize("row", ROWS, ids=[row["bug"] for row in ROWS])
def test_a_planted_bug_is_found(row: dict[str, Any]) -> None:
    bug = next(bug for bug in BUGS if bug.name == row["bug"])
    for seed in range(row["seed"], row["seed"] + SEEDS):
        with planted(bug):
            found = run_of(seed, row["minutes"], bug.featured).go().violations
        if found:
            end = broke_at(found[0])
            assert not complaint(seed, row["minutes"], bug.featured, end), "the product itself does not pass this seed"
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


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_each_bug_can_still_be_planted(bug: Bug) -> None:
    with planted(bug):
        assert all(owner.__dict__[name].original for owner, name, _ in bug.swaps)


@pytest.mark.parametrize(
    "swap",
    [
        (election, "on_vote", edited(("raft.vote = m.somebody", "pass"))),
        (election, "on_vote_of_old", edited(("raft.vote", "pass"))),
    ],
)
def test_a_bug_that_does_not_fit_the_product_any_more_is_an_error(swap: Any) -> None:
    before = dict(election.__dict__)
    good = (election, "refuse", edited(("True))", "False))")))
    with pytest.raises(Stale), planted(Bug("stale", "none", [good, swap])):
        pass
    assert election.__dict__ == before
