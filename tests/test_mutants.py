"""The mutator: what it makes of a function, who judges it, and that a judgement changes nothing."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from . import mutants as module
from .mutants import EQUIVALENT, WHERE, Verdicts, drawn, judge, mutants, narrowest, reasons
from .source_tree import ROOT

SOURCE = '''"""Doc: not a statement to be left out."""

LIMIT = 5


def f(disk: object, numbers: list[int] = [1]) -> int:
    """Ä doc."""
    total = 0
    for number in numbers:
        if number < 0 and not (number == -5):
            continue
        if number is None or number > 100:
            break
        total += number
        print("ä", f"{number + 1}"); disk.sync_file(3)
    assert total < 10
    return total
'''.encode()


def test_each_kind_of_change_is_made_and_is_a_program() -> None:
    found = list(mutants("x.py", SOURCE))
    before = ast.dump(ast.parse(SOURCE))
    for one in found:
        assert ast.dump(ast.parse(one.apply(SOURCE))) != before, one
    said = {(one.line, one.kind, one.text) for one in found}
    assert {
        (10, "or for and", "(number < 0 or not number == -5)"),
        (10, "comparison", "(number <= 0)"),
        (10, "comparison", "(number != -5)"),
        (10, "condition turned", "(number == -5)"),
        (11, "break for continue", "break"),
        (12, "and for or", "(number is None and number > 100)"),
        (12, "comparison", "(number is not None)"),
        (12, "constant", "101"),
        (13, "continue for break", "continue"),
        (14, "statement left out", "pass"),
        (15, "statement left out", "pass"),
        (15, "sync left out", "pass"),
    } <= said
    assert not {one.line for one in found} & {1, 3, 6, 7, 16}, "no docstring, constant of a module, default or assert"
    printed = next(one for one in found if one[1:3] == (15, "statement left out"))
    assert b"        pass; disk.sync_file(3)\n" in printed.apply(SOURCE), "columns are counted in bytes"


def test_a_change_is_noticed_or_not_and_undone(tmp_path: Path) -> None:
    source = b"def f(a: int) -> int:\n    return a + 1\n"
    (tmp_path / "x.py").write_bytes(source)
    (tmp_path / "test_x.py").write_text("from x import f\n\ndef test_f(): assert f(1) == 2\n\ndef test_not(): f(1)\n")
    (one,) = mutants("x.py", source)
    assert judge(tmp_path, one, ["test_x.py::test_f"]) and not judge(tmp_path, one, ["test_x.py::test_not"])
    assert (tmp_path / "x.py").read_bytes() == source


def test_who_notices_a_change_is_found_behind_those_who_do_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "x.py").write_bytes(SOURCE)
    asked: list[list[str]] = []
    monkeypatch.setattr(module, "TESTS_AT_ONCE", 2)

    def run(root: Path, tests: Sequence[str]) -> int:
        asked.append([*tests])
        return int("c" in tests)

    monkeypatch.setattr(module, "run_pytest", run)
    assert judge(tmp_path, next(mutants("x.py", SOURCE)), ["a", "b", "c", "d", "e"])
    assert asked == [["a", "b"], ["c", "d"]]
    assert not judge(tmp_path, next(mutants("x.py", SOURCE)), ["a", "b", "d"])


def test_a_verdict_is_kept_for_its_commit(tmp_path: Path) -> None:
    one, other = list(mutants("x.py", SOURCE))[:2]
    path = tmp_path / "verdicts.json"
    asked: list[str] = []

    def judge(name: str, noticed: bool) -> bool:
        asked.append(name)
        return noticed

    for at in ("a", "a", "b", "b-dirty", "b-dirty", ""):
        verdicts = Verdicts(path, at)
        assert verdicts.of(one, lambda: judge("one", True)) and not verdicts.of(other, lambda: judge("other", False))
    assert asked == ["one", "other"] * 5


def test_the_narrowest_tests_judge_and_syncs_come_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "x.py").write_bytes(SOURCE)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    lines = {"x.py": {12: ["wide", "narrow"], 15: ["wide"]}}
    assert narrowest(lines) == {"x.py": {12: ["narrow", "wide"], 15: ["wide"]}}
    tried, unknown = drawn(["x.py"], lines, 1, 3)
    assert [one.kind == "sync left out" for one in tried] == [True, False, False]
    assert {one.line for one in tried} <= {12, 15} and unknown == sum(
        one.line not in (12, 15) for one in mutants("x.py", SOURCE)
    )
    again, other = (drawn(["x.py"], lines, seed, 6)[0] for seed in (1, 2))
    assert drawn(["x.py"], lines, 1, 6)[0] == again != other


def test_what_was_looked_at_is_still_there() -> None:
    assert EQUIVALENT.exists()
    for (path, _, after, line), reason in reasons().items():
        rows = [row.strip() for row in (ROOT / path).read_text("utf-8").splitlines()]
        assert reason and list(pairwise(rows)).count((after, line)) == 1, (path, after, line)
    assert all((ROOT / name).exists() for name in WHERE)
