"""The runner of the long proofs: what it writes down, what it does not run twice, and that its commands are there."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from . import prove
from .prove import MEASURES, STEPS, Step, main

FINE = Step("fine", ("-c", "import sys; print('words'); print('{\"operations\": 3}')"))
FAILS = Step("fails", ("-c", "raise SystemExit(1)"))


def rows(text: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(text.splitlines()[-1])
    return found


def test_a_step_that_passed_is_not_run_again_at_the_same_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at = ["one"]
    monkeypatch.setattr(prove, "commit", lambda: at[0])
    ran: list[str] = []
    inner = prove.run

    def run(step: Step, at: str, directory: Path) -> dict[str, Any]:
        ran.append(step.name)
        return inner(step, at, directory)

    monkeypatch.setattr(prove, "run", run)
    assert main(["--json"], [FINE, FAILS], tmp_path) == 1
    said = rows(capsys.readouterr().out)
    assert said["failed"] == ["fails"] and not said["ok"]
    assert json.loads((tmp_path / "fine.json").read_text())["result"] == {"operations": 3}
    assert main([], [FINE, FAILS], tmp_path) == 1
    assert ran == ["fine", "fails", "fails"]
    assert main(["--only", "fine", "--again"], [FINE, FAILS], tmp_path) == 0
    for other in ("two", "two-dirty", "two-dirty", ""):
        at[0] = other
        assert main(["--only", "fine"], [FINE], tmp_path) == 0
    assert ran[3:] == ["fine"] * 5


def test_the_table_adds_up_what_the_steps_counted(tmp_path: Path) -> None:
    result = {"operations": 1200, "faults": {"kill9": 2, "pause": 3}, "histories": [1, 2], "lost": 0}
    chaos = [Step(name, ("-c", f"print({json.dumps(json.dumps(result))})")) for name in ("chaos-1", "chaos-2")]
    simulated = json.dumps({"faults": {"C1.drift": 2, "D1.power_cut": 3}})
    sim = Step("sim", ("-c", f"print({json.dumps(simulated)})"))
    page = tmp_path / "page.md"
    page.write_text(f"before\n{prove.BEGIN}\nold\n{prove.END}\nafter\n")
    assert main(["--write"], [*chaos, sim, FINE], tmp_path / "prove", page) == 0
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text
    for line in ("| operations on daemons under faults | 2,400 |", "| kills of daemons | 4 |", "| lost | 0 |"):
        assert line in text.splitlines()
    assert "| operations of histories checked | 4 |" in text and "| fine |" in text and "power cuts" not in text
    assert "| faults in simulations | 5 |" in text


def test_a_table_of_some_steps_is_bad_usage(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--write", "--only", "fine"], [FINE], tmp_path)
    assert ended.value.code == 2


def test_the_page_has_a_place_for_the_table() -> None:
    text = prove.PAGE.read_text()
    assert text.index(prove.BEGIN) < text.index(prove.END)


def state_of(pid: int) -> str:
    """A process' state, as the kernel names it; X where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def test_a_step_that_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys, threading; one = subprocess.Popen(['cat'], stdin=subprocess.PIPE);"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(one.pid)); threading.Event().wait()"
    )
    for patience in (2.0, 8.0, 32.0, 120.0):
        # On a busy machine a step may not come to its hanging in time: then it has more.
        found = prove.run(Step("hangs", ("-c", program)), "", tmp_path, patience_s=patience)
        assert found["exit"] == -signal.SIGKILL and found["result"] is None
        if (tmp_path / "pid").exists() and (pid := (tmp_path / "pid").read_text()):
            break
    # Killed: it ends when it has the processor next, and whoever adopted it may not have collected it yet.
    deadline = time.monotonic() + 60
    while state_of(int(pid)) not in "ZX":
        assert time.monotonic() < deadline, "what the step started lives on"
        threading.Event().wait(0.01)


def test_an_unknown_step_is_bad_usage(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--only", "nonsense"], [FINE], tmp_path)
    assert ended.value.code == 2


def test_the_steps_are_commands_of_this_tree() -> None:
    assert len({step.name for step in STEPS}) == len(STEPS)
    for step in STEPS:
        assert step.arguments[0] == "-m" and importlib.util.find_spec(step.arguments[1]) is not None


def test_the_figures_of_the_table_are_what_the_steps_print() -> None:
    for measure in MEASURES:
        for key in {key.split(".")[0] for key in measure.keys}:
            # A key of an object, or a field of a tuple of results.
            told = re.compile(rf'"{key}":|^    {key}: int$', re.MULTILINE)
            counted = [step for step in STEPS if step.name.startswith(measure.step)]
            printed = any(told.search(program_of(step)) for step in counted)
            assert printed, f"no step that {measure.name!r} counts prints {key!r}"


def program_of(step: Step) -> str:
    """The source of a step's command, with that of the package beside it."""
    found = importlib.util.find_spec(step.arguments[1])
    assert found is not None and found.origin is not None
    path = Path(found.origin)
    sources = path.parent.glob("*.py") if path.name == "__init__.py" else [path]
    return "".join(source.read_text("utf-8") for source in sources)
