"""The catalogue under faults at the steps of what changes a cluster; what is planted there shows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .bugs import planted
from .catalog.cases import Case, cases_of, tell
from .catalog.planted import PLANTED, RECORDED, hunt
from .catalog.stories import STORIES, told
from .catalog.yard import Fault

ROOT = Path(__file__).resolve().parents[2]
FEW = 4
"""Cases of each story in `make test`; `make test-all` has more, and the command all of them."""
MORE = 60
ROWS: dict[str, str] = json.loads(RECORDED.read_text())
FAULTY = [name for name, story in STORIES.items() if story.faults]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", STORIES)
def test_a_story_without_faults(name: str) -> None:
    assert told(name, 3, check=True).wrong == []


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", FAULTY)
def test_a_fault_at_a_step_leaves_nothing_half_made(name: str) -> None:
    cases = cases_of(name, 5)
    for case in cases[:: len(cases) // FEW]:
        found = tell(case)
        assert found.wrong == [], str(case)


@pytest.mark.long
@pytest.mark.parametrize("name", FAULTY)
def test_faults_at_many_steps_leave_nothing_half_made(name: str) -> None:
    cases = cases_of(name, 6)
    for case in cases[1 :: len(cases) // MORE]:
        found = tell(case)
        assert found.wrong == [], str(case)


def test_every_kind_of_fault_comes() -> None:
    kinds = [Fault(kind, 2, 20) for kind in ("kill", "power", "stop")] + [Fault("lose", 0, 20)]
    assert all(told("create", 1, fault).hit for fault in kinds)
    assert not told("create", 1, Fault("kill", 2, 10_000)).hit


def test_a_case_is_told_again_by_its_name() -> None:
    case = Case("create", 1, Fault("lose", 0, 7, 0.5), False)
    assert Case.of(str(case)) == case
    command = [sys.executable, "-m", "tests.sim.catalog", "--again", str(case), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["ok"] and report["faults"] == {"lose": 1}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [one.bug.name for one in PLANTED])
def test_what_is_planted_shows(name: str) -> None:
    """By the recorded case, or, where draws have moved since, by others."""
    one = next(one for one in PLANTED if one.bug.name == name)
    recorded = ROWS[name]
    case = Case.of(recorded) if ":" in recorded else recorded
    with planted(one.bug):
        shows = bool((told(case, 1) if isinstance(case, str) else tell(case)).wrong)
    if shows:
        assert not (told(case, 1) if isinstance(case, str) else tell(case)).wrong, "the product itself does not pass"
        return
    assert hunt(one, 1)[0] is not None, f"nobody noticed: {one.bug.rule}"
