"""Which sealed WAL files are migrated: a table."""

from __future__ import annotations

import pytest

from logyard.engine.log.compactor import DYING_S, choose_victims
from logyard.engine.log.location import SealedFile, Share

NOW = 1000.0
TABLE = [
    # (files: id, live of 50 bytes, age), budget, age, dead ratio -> victims, in order
    ([], 100, 60, 0.5, []),
    ([(1, 50, 1), (2, 50, 1)], 100, 60, 0.5, []),
    ([(1, 50, 1), (2, 40, 1), (3, 45, 1)], 100, 60, 0.5, [2]),
    ([(1, 50, 1), (2, 40, 1), (3, 45, 1)], 50, 60, 0.5, [2, 3]),
    ([(1, 50, 1), (2, 40, 1), (3, 45, 1)], 0, 60, 0.5, [2, 3, 1]),
    ([(1, 50, 61), (2, 40, 1)], 100, 60, 0.5, [1]),
    ([(1, 25, 1), (2, 26, 1)], 100, 60, 0.5, [1]),
    ([(1, 0, 1), (2, 50, 1)], 100, 60, 0.5, [1]),
    ([(1, 50, 61), (2, 10, 1), (3, 50, 1)], 100, 60, 0.5, [2, 1]),
]


@pytest.mark.parametrize(("files", "budget", "age", "ratio", "want"), TABLE)
def test_victims(files: list[tuple[int, int, int]], budget: int, age: float, ratio: float, want: list[int]) -> None:
    sealed = []
    for number, live, seconds in files:
        file = SealedFile(number, 50)
        file.sealed_at = NOW - seconds
        file.died_at = NOW - DYING_S
        file.add(7, Share(1, 9, live), 50)
        sealed.append(file)
    assert [file.file for file in choose_victims(sealed, NOW, budget, age, ratio)] == want


def test_a_file_that_is_still_dying_is_not_copied_for_its_dead() -> None:
    file = SealedFile(1, 100)
    file.add(7, Share(1, 9, 80), 100)
    file.reduce(7, 60)
    assert file.dead_ratio == 0.8
    died = file.died_at = file.sealed_at = NOW
    assert died >= file.sealed_at
    assert not choose_victims([file], died + DYING_S - 0.1, 1000, 3600, 0.5)
    assert choose_victims([file], died + DYING_S, 1000, 3600, 0.5) == [file]
    assert choose_victims([file], died, 50, 3600, 0.5) == [file], "not when its space is needed"
    file.remove(7)
    assert choose_victims([file], died, 1000, 3600, 0.5) == [file], "what is dead as a whole costs no copy"
