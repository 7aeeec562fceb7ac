"""A few power cuts where they can be tried; `python -m tests.powercut` tries more."""

from __future__ import annotations

import os

import pytest

from .image import MAKE, reason_against
from .run import Counts, row, run


@pytest.mark.skipif(bool(reason_against("ext4")), reason=reason_against("ext4") or "-")
def test_nothing_acknowledged_is_lost_by_a_power_cut_or_on_a_full_disk() -> None:
    found = run(cycles=4, seed=3)
    assert found.by_kind["ext4"] == 4 and found.by_kind["ext4 full"] == 1
    assert (found.lost, found.violations) == (0, []) and found.acknowledged > 100


def test_what_can_not_be_tried_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    found: Counts = run(cycles=1, seed=1)
    assert {kind: found.not_run[kind] for kind in MAKE} == dict.fromkeys(MAKE, "needs root")
    assert row(found)["cycles"] == 0
