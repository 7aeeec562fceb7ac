"""SIGTERM ends a command as Ctrl-C does; what follows does not interrupt the end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner

from logyard.service.cli import root

PROGRAM = """
import signal
import sys
from logyard.service.cli import root

def run(prog_name):
    try:
        print("running", flush=True)
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
        assert process.returncode == 128 + signal.SIGTERM


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


INTERRUPTED = {"ok": False, "error": {"code": "interrupted", "message": "interrupted before it was done"}}
WAITING = """
import contextlib, signal, sys, threading
from logyard.service.cli import logs, main

@contextlib.contextmanager
def opened(servers):
    print("running", file=sys.stderr, flush=True)
    threading.Event().wait()
    yield

logs.opened = opened
sys.argv = ["logyard", "list", "--json"]
main()
"""
LOADING = """
import signal, sys

class Finder:
    def find_spec(self, name, *more):
        if name == "logyard.service.cli.kv":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Finder())
from logyard.service.cli import main
main()
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 1), (signal.SIGTERM, 128 + signal.SIGTERM)], ids=["SIGINT", "SIGTERM"]
)
def test_an_interrupted_command_says_so_in_json(number: signal.Signals, code: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WAITING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "running\n"
        process.send_signal(number)
        output, said = process.communicate(timeout=60)
    assert json.loads(output) == INTERRUPTED
    assert process.returncode == code and "Traceback" not in said


def test_a_question_that_is_not_confirmed_says_so_in_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda self: True)
    ended = CliRunner().invoke(root.cli, ["delete", "orders", "--json"], input="n\n")
    assert ended.exit_code == 1 and json.loads(ended.stdout.splitlines()[-1]) == INTERRUPTED


@pytest.mark.parametrize("words", [[], ["list", "--json"]], ids=["text", "json"])
def test_ctrl_c_while_modules_are_loaded_leaves_no_traceback(words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", LOADING, *words], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "Aborted!\n")
    assert done.stdout == "" if not words else json.loads(done.stdout)["error"]["code"] == "interrupted"
