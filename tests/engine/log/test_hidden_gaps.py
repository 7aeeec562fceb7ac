"""A table of conditions that random histories rarely reach: which homes hide what is stored elsewhere."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from logyard.engine.log.liveness_accounting import LivenessAccounting
from logyard.payloads.homes import Home
from logyard.payloads.liveness import Liveness

HIDES = [
    # homes, log's end, released before, gap, dense -> does a new home over the gap hide what is stored elsewhere?
    ([], 0, 0, (5, 6), False, False),
    ([], 0, 0, (5, 6), True, True),
    ([(5, 6)], 0, 0, (5, 6), False, True),
    ([(1, 5)], 0, 0, (5, 9), False, True),
    ([(9, 12)], 0, 0, (5, 9), False, True),
    ([(1, 4)], 0, 0, (5, 9), False, False),
    ([(10, 12)], 0, 0, (5, 9), False, False),
    ([(1, 4), (10, 12)], 0, 0, (5, 9), False, False),
    ([], 9, 0, (5, 9), False, True),
    ([], 5, 0, (5, 9), False, True),
    ([], 4, 0, (5, 9), False, False),
    ([], 9, 10, (5, 9), False, False),
    ([], 9, 9, (5, 9), False, True),
]


@pytest.mark.parametrize(("homes", "end", "released", "gap", "dense", "hides"), HIDES)
def test_what_a_new_home_would_hide(
    homes: list[tuple[int, int]], end: int, released: int, gap: tuple[int, int], dense: bool, hides: bool
) -> None:
    liveness = Liveness()
    if released:
        liveness.release((1, 0), (released, 0))
    member: Any = SimpleNamespace(raft=SimpleNamespace(log=SimpleNamespace(last_index=end)), liveness=liveness)
    nothing: Any = None
    location: Any = SimpleNamespace(files={})
    counters = LivenessAccounting({}, nothing, location, nothing, nothing, nothing, nothing)
    before = [Home(first, last, 1, 1) for first, last in homes]
    assert counters.hidden_by(member, before, dense)(*gap) is hides
