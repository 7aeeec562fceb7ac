"""Strangers at every door of a live node for some seconds; `python -m tests.fuzz.live` takes as long as it is told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .live_bugs import BUGS

ROOT = Path(__file__).resolve().parents[2]


def strangers(*words: str) -> dict[str, Any]:
    """What a run in a process of its own says: it lowers that process's limits."""
    command = [sys.executable, "-m", "tests.fuzz.live", "--json", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.timeout(120)
@pytest.mark.parametrize("door", ["client", "peers", "gateway", "crowd"])
def test_strangers_at_a_door(door: str) -> None:
    found = strangers("--seconds", "5", "--doors", door, "--seed", "3")
    assert found["violations"] == [] and found["by_door"][door] > 5 and found["answered"] > 5


@pytest.mark.long
@pytest.mark.timeout(300)
def test_strangers_at_every_door_for_a_minute() -> None:
    found = strangers("--seconds", "60", "--seed", "11")
    assert found["violations"] == [] and all(found["by_door"].values())


@pytest.mark.timeout(120)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_mending_undone_is_found(bug: Any) -> None:
    found = strangers("--planted", bug.name, "--seconds", "10")
    assert found["missed"] == [] and found["bugs"][bug.name]["cpu_s"] < 60
