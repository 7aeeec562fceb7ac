"""The rig that kills Spark's processes: what it draws, what it sees, and a run of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from . import kills
from .crashing import EXECUTOR, GROUP, PROCESS


def test_sixty_seeds_kill_everything_at_every_step() -> None:
    drawn = [kills.drawn(seed) for seed in range(1000, 1060)]
    assert {(one.guarantee, one.step) for one in drawn} == {
        (guarantee, step) for guarantee, steps in kills.STEPS.items() for step in steps
    }
    assert {(one.guarantee, one.victim) for one in drawn} == {
        (guarantee, victim) for guarantee in kills.STEPS for victim in (GROUP, PROCESS)
    }
    of_executors = [kills.drawn(seed, True) for seed in range(2000, 2008)]
    assert {(one.guarantee, one.step, one.victim) for one in of_executors} == {
        (guarantee, step, EXECUTOR) for guarantee in kills.STEPS for step in kills.IN_TASKS
    }


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (["a", "b"], ""),
        (["a"], "1 lost, 0 twice"),
        (["a", "b", "b"], "0 lost, 1 twice"),
        (["b", "a"], "0 lost, 0 twice, or their order"),
    ],
)
def test_what_is_lost_twice_or_out_of_order_is_seen(found: list[str], said: str) -> None:
    logs = {"from-1": ["a", "b"], "to-1": found}

    class Yard:
        def log(self, name: str) -> Any:
            rows = [SimpleNamespace(metadata=one.encode(), payload=None) for one in logs[name]]
            return SimpleNamespace(records=lambda: rows)

    rig: Any = object.__new__(kills.Rig)
    rig.yard = Yard()
    different = rig.different("from-1")
    assert said in different and bool(different) == bool(said)


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.timeout(300)
def test_a_driver_that_is_killed_with_all_it_started_leaves_each_record_once() -> None:
    with kills.rig() as rig:
        assert rig.run(1) == ""
        assert sum(rig.told.values()) == 1
