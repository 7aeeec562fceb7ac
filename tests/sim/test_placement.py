"""Where the reconciler puts many logs: even, with no more moves than need be, and then nothing is left to do.

`python -m tests.sim.catalog.placement` is the same with sixteen nodes and a hundred thousand logs.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from logyard.service.catalog import planner
from logyard.service.catalog.planner import Planner

from .catalog.placement import MOVES, STORIES, Placement, placed


@pytest.mark.parametrize("story", STORIES)
def test_sixteen_nodes(story: str) -> None:
    found = placed(story, 16, 3000, 3)
    assert found["wrong"] == [], found
    assert found["members_max_mean"] <= 1.05 and found["leaders_max_mean"] <= 1.05 and found["moved_share"] <= MOVES


@pytest.mark.long
@pytest.mark.parametrize("story", ["grow", "dead"])
def test_sixteen_nodes_and_forty_thousand_logs(story: str) -> None:
    found = placed(story, 16, 40_000, 4)
    assert found["wrong"] == [], found


@pytest.mark.parametrize("seed", range(30))
def test_random_clusters(seed: int) -> None:
    draw = random.Random(seed)
    found = placed(draw.choice(sorted(STORIES)), draw.randrange(6, 13), draw.randrange(100, 600), seed)
    assert found["wrong"] == [], found


@pytest.mark.parametrize("seed", range(15))
def test_random_clusters_of_equal_zones(seed: int) -> None:
    draw = random.Random(seed)
    zones = draw.choice([("a", "b", "c"), ("a", "b", "c", "d")])
    nodes = len(zones) * draw.randrange(2, 5)
    found = placed(draw.choice(["grow", "double", "skew"]), nodes, draw.randrange(100, 600), seed, zones)
    assert [one for one in found["wrong"] if "members moved" not in one] == [], "zones are a reason to move, too"


def test_more_things_at_once() -> None:
    """A node dies while another one is emptied and two are new."""
    one = Placement(12, 7)
    one.fill(900, lambda number: one.draw.sample(range(1, 11), 3))
    one.tell("nodes", "declare_dead", {"node": 3})
    one.tell("nodes", "drain", {"node": 4})
    above = one.above()
    one.settle()
    assert list(one.complaints(MOVES * above)) == []


def _lowest(self: Planner, row: Any, source: int, most: int = 0) -> int:
    return next((node for node in self._targets if node not in row.voters), 0)


def _forth(self: Planner) -> Any:
    """Plan a move for what lies well."""
    for row in self._rows[:50]:
        if not row.moved:
            self._move(row, planner.REPLACE, row.voters[0], self._target(row, row.voters[0]), "to and fro")
    yield None


@pytest.mark.parametrize(
    ("name", "bug"), [("_target", _lowest), ("_even_members", _forth), ("_even_leaders", lambda self: iter(()))]
)
def test_what_is_planted_shows(name: str, bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Planner, name, bug)
    monkeypatch.setattr("tests.sim.catalog.placement.SECONDS_MAX", 400)
    try:
        shows = bool(placed("skew", 8, 400, 5)["wrong"])
    except AssertionError as error:
        shows = "does not come to rest" in str(error)
    assert shows
