"""Some cells of the matrix, and the judgement by itself. `python -m tests.matrix` tries all of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.crash.trace import available

from . import damage
from .__main__ import summary, table
from .cells import CELLS, FAULTS, INJECTED, KINDS, Cell, Result
from .damage import Place, spoil
from .run import run

QUICK = (
    Cell("wal", "bit flip", "leader"),
    Cell("segment index", "truncation", "follower"),
    Cell("ring", "zeroed block", "follower"),
    Cell("meta", "zeroed block", "leader"),
    Cell("generation", "EIO on read", "follower"),
    Cell("config", "bit flip", "follower"),
)


@pytest.mark.sample(1)
@pytest.mark.parametrize("cell", QUICK, ids=str)
def test_a_cell(tmp_path: Path, cell: Cell) -> None:
    if cell.fault in INJECTED and not available():
        pytest.skip("no strace that may trace")
    (found,) = run([cell], 1, tmp_path)
    assert found.passed, found.row()
    # What a ring needs to have entries is released before the damage.
    assert found.acknowledged > (10 if cell.kind == "ring" else 100) and found.hits and found.steps
    json.dumps(summary([found], 1))


def test_every_cell_is_tried_once() -> None:
    assert len(set(CELLS)) == len(CELLS) == 126
    assert {cell.kind for cell in CELLS} == set(KINDS) and {cell.fault for cell in CELLS} == set(FAULTS)


def test_a_cell_fails_for_losses_and_for_silence() -> None:
    found = Result(CELLS[0], hits=1)
    assert found.passed
    assert not Result(CELLS[0]).passed, "nothing was hit"
    assert Result(CELLS[0], reason="never written").passed
    for name in ("lost", "wrong", "problems"):
        bad = Result(CELLS[0], hits=1)
        getattr(bad, name).append("one")
        assert not bad.passed
    rows = [found, Result(CELLS[1], reason="no strace", not_run=True), Result(CELLS[2], hits=2, lost=["one"])]
    said = summary(rows, 1)
    assert (said["cells"], said["tried"], said["not_run"], said["lost"], said["passed"]) == (3, 2, 1, 1, False)
    assert len(table(rows)) == 5


@pytest.mark.parametrize("fault", ["bit flip", "zeroed block", "truncation"])
def test_what_is_done_to_bytes(tmp_path: Path, fault: str) -> None:
    path = tmp_path / "file"
    good = bytes(range(1, 251)) * 40
    path.write_bytes(good)
    (place, *_) = damage.find([path, tmp_path / "none"], good[4800:4820])
    spoil(Place(path, 4800), fault)
    now = path.read_bytes()
    assert place.path == path and now != good
    if fault == "truncation":
        assert now == good[:4800]
    elif fault == "zeroed block":
        assert now == good[:4096] + bytes(4096) + good[8192:]
    else:
        assert [at for at in range(len(good)) if now[at] != good[at]] == [4800]
