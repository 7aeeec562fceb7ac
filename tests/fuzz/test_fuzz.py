"""Hypothesis on every parser, and a sample of the golden files' spoilt copies; `python -m tests.fuzz` tries more."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from . import golden, guided
from .__main__ import find_by_coverage
from .targets import Target, attempt, mutate, targets

TARGETS = targets()


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_whole_examples_are_read(target: Target) -> None:
    for sample in target.samples:
        target.parse(sample)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=300), seed=st.integers(0, 1 << 30))
def test_any_bytes_are_refused_with_a_typed_error_or_read(target: Target, data: bytes, seed: int) -> None:
    assert attempt(target, data) == ""
    assert attempt(target, mutate(random.Random(seed), target)) == ""


@pytest.mark.parametrize(("name", "step"), [("wal", 151), ("segment", 7), ("ring", 61), ("manifest", 3)])
def test_spoilt_golden_files_are_detected_and_never_served(tmp_path: Path, name: str, step: int) -> None:
    data, judge = golden.targets(tmp_path / "golden")[name]
    cuts = range(0, len(data), 97 if name in ("wal", "ring") else 1)
    tried, _, wrong = golden.sweep(name, data, judge, range(0, 8 * len(data), step), cuts)
    assert wrong == [] and tried > 1500


@pytest.mark.skipif(bool(guided.reason_against()), reason=guided.reason_against() or "-")
def test_coverage_leads_to_inputs(tmp_path: Path) -> None:
    found = guided.run("writer header", 1, 1, tmp_path / "corpus")
    assert found.wrong == "" and found.inputs > 0 and found.edges > 0
    assert "nothing is called so" in guided.run("nonsense", 1, 1, tmp_path / "none").wrong


def test_without_atheris_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    row: dict[str, Any] = {"violations": [], "tried": 0}
    find_by_coverage(1, 1, row)
    assert "atheris" in row["not_run"]["atheris"] and not row["violations"]


def test_the_judges_know_what_is_not_what_was_written(tmp_path: Path) -> None:
    """A judge that calls everything detected would prove nothing."""
    for name, (data, judge) in golden.targets(tmp_path / "golden").items():
        assert judge(data, False) == "same", name
    data, judge = golden.targets(tmp_path / "again")["segment"]
    assert isinstance(judge, golden.SegmentJudge)
    judge.known = {key: (term + 1, body, dead) for key, (term, body, dead) in judge.known.items()}
    assert "not what was written" in judge(data, False)


def test_the_highest_bit_of_a_place_in_a_segments_index(tmp_path: Path) -> None:
    """No file is so long that it can be read there: that is damage like any other."""
    data, judge = golden.targets(tmp_path / "golden")["segment"]
    tried, _, wrong = golden.sweep("segment", data, judge, (36343, 36983, 37623), ())
    assert (tried, wrong) == (3, [])
