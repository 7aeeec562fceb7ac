"""The program that tells what an entry costs runs, and counts what it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .entry_cost import main

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.long
def test_an_entry_is_a_handful_of_messages() -> None:
    # In a process of its own: it sets what the collector looks at.
    command = [sys.executable, "-m", "tests.entry_cost", "--logs", "3", "--seconds", "0.5", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ok"] and found["us"] > 0 and found["entries_per_s"] > 0
    # Two appends and two acknowledgements; a commit index may go alone, twice, and is answered.
    assert 3.5 < found["per_entry"]["step"] < 9


def test_bad_numbers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--logs", "0"])
    assert ended.value.code == 2 and "above 0" in capsys.readouterr().err
