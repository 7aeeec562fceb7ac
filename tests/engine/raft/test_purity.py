"""Law 1 as a test: the core imports nothing that waits, reads a clock, opens a file or draws a number by itself."""

from __future__ import annotations

import subprocess
import sys


def test_importing_the_core_loads_nothing_impure() -> None:
    """In an interpreter of its own, so that what the tests import does not count."""
    code = (
        "import sys; before = set(sys.modules); import logyard.engine.raft.core; "
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before}))"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "logyard" in found
    assert not {"trio", "asyncio", "random", "socket", "ssl", "threading", "selectors", "lmdb", "secrets"} & set(found)
