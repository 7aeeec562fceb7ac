"""The program that measures the product's paths runs, and sees all three; an append makes no more calls, of ours and of
the system, than is recorded for this version of Python."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from .paths import NODES, RECORDED, SYSTEM_CALLS, VERSION
from .source_tree import ROOT

MORE = 1.03
"""A tick that comes by in each of the rounds adds so much."""


@pytest.mark.long
def test_paths_are_measured() -> None:
    command = [sys.executable, "-m", "tests.paths", "--rounds", "10", "--json", "--files"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found["paths"]) == {"append", "release", "transfer"}
    for name, row in found["paths"].items():
        assert row["files"] > 10 and row["calls"] > row["changes"] > row["files"] and row["turns"] > 1, (name, row)
    assert any(path.startswith("engine/log/wal") for path in found["where"]["append"])
    recorded = json.loads(RECORDED.read_text()).get(VERSION)
    if recorded is None:
        pytest.skip(f"nothing is recorded for Python {VERSION}: python -m tests.paths --record")
    now = found["paths"]["append"]
    assert now["calls"] <= recorded["calls"] * MORE and now["changes"] <= recorded["changes"] * MORE, now
    # The slower follower's write may come behind the acknowledgement, or before it in all rounds.
    disk = {"pwritev": len(NODES), "fdatasync": len(NODES), "pwrite": 0, "fsync": 0}
    most = {name: disk.get(name, recorded.get(name, 0) + 1) for name in SYSTEM_CALLS}
    more = {name: count for name, count in now.items() if count > most.get(name, count)}
    assert not more, f"more system calls an append than {recorded}: {more}"
