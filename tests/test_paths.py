"""The program that measures the product's paths runs, and sees all three; its figures stand in docs/architecture.md."""

from __future__ import annotations

import json
import subprocess
import sys

from .source_tree import ROOT


def test_paths_are_measured() -> None:
    command = [sys.executable, "-m", "tests.paths", "--rounds", "2", "--json", "--files"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found["paths"]) == {"append", "release", "transfer"}
    for name, row in found["paths"].items():
        assert row["files"] > 10 and row["calls"] > row["changes"] > row["files"] and row["turns"] > 1, (name, row)
    assert any(path.startswith("engine/log/wal") for path in found["where"]["append"])
