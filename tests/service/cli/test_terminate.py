"""SIGTERM ends a command as Ctrl-C does; what follows does not interrupt the end."""

from __future__ import annotations

import subprocess
import sys

import pytest

from logyard.service.cli import root

PROGRAM = """
import signal
import sys
from logyard.service.cli import root

def run(prog_name):
    print("running", flush=True)
    try:
        signal.pause()
    finally:
        print("cleaning", flush=True)
        print("clean", sys.stdin.readline(), flush=True)

root.cli = run
root.main()
"""


def test_a_second_one_does_not_interrupt_the_end() -> None:
    """`timeout` sends one to the process, and one to its group: servers of rivals were left behind."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "running\n"
        process.terminate()
        assert process.stdout.readline() == "cleaning\n"
        process.terminate()
        output, _ = process.communicate("up\n", timeout=60)
        assert output.split() == ["clean", "up"]
        assert process.returncode == root.EXIT_TERMINATED


def test_one_that_comes_late_ends_it_again() -> None:
    """An end that hangs can be ended."""
    now = 100.0
    terminate = root.Terminate(lambda: now)
    with pytest.raises(SystemExit):
        terminate()
    terminate()
    now += root.AGAIN_SECONDS
    with pytest.raises(SystemExit):
        terminate()
