"""`python -m tests.prove [--only A,B] [--again] [--json]`: the long proofs, one after the other.

Each step is one of this tree's commands, of at most ten minutes or so, and says its seed. What a step printed goes to
`prove/NAME.json`, with its command, date, machine and commit; a step that passed at this commit is not run again, so a
run that was cut goes on where it was. Exit code 1 when a step failed. Called by `make prove`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "prove"
PATIENCE_S = 1800.0


class Step(NamedTuple):
    """A command without its interpreter: `-m module`, then arguments."""

    name: str
    arguments: tuple[str, ...]


STEPS = (
    Step("sim-recorded", ("-m", "tests.sim", "--regressions")),
    Step("sim", ("-m", "tests.sim", "--seed", "100000", "--seeds", "600", "--minutes", "1")),
    Step("sim-planted", ("-m", "tests.sim.planted", "--cpu", "60", "--seed", "100000")),
    Step("crash", ("-m", "tests.crash", "--states", "6000", "--wal-states", "14000", "--seed", "300")),
    Step("fuzz", ("-m", "tests.fuzz", "--seconds", "60", "--golden", "--atheris", "--seed", "7")),
    Step("matrix-leader", ("-m", "tests.matrix", "--seed", "1", "--only", "leader")),
    Step("matrix-follower", ("-m", "tests.matrix", "--seed", "1", "--only", "follower")),
    Step("powercut", ("-m", "tests.powercut", "--cycles", "150")),
    Step("chaos-1", ("-m", "tests.chaos", "--minutes", "7", "--seed", "3")),
    Step("chaos-2", ("-m", "tests.chaos", "--minutes", "7", "--seed", "4")),
)


def commit() -> str:
    """Of the tree; "" where git does not know it, and a mark where files differ from it."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def last_object(text: str) -> Any:
    """The JSON object that a command's last line is; None: it is none."""
    lines = text.strip().splitlines()
    try:
        return json.loads(lines[-1]) if lines else None
    except ValueError:
        return None


def run(step: Step, at: str, directory: Path = RESULTS, patience_s: float = PATIENCE_S) -> dict[str, Any]:
    """Run a step and write down what came of it."""
    command = [sys.executable, *step.arguments, "--json"]
    began, clock = datetime.now(UTC), time.monotonic()
    # A session of its own: daemons and workers that it started end with it.
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    output = ""
    try:
        output, _ = child.communicate(timeout=patience_s)
    except subprocess.TimeoutExpired:
        print(f"{step.name}: stopped after {patience_s:g} s", file=sys.stderr)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    code = child.returncode
    found = {
        "name": step.name, "command": " ".join(["python", *command[1:]]), "date": began.isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - clock, 1), "commit": at, "cores": os.cpu_count(),
        "kernel": platform.release(), "exit": code, "result": last_object(output),
    }  # fmt: skip
    directory.mkdir(exist_ok=True)
    path = directory / f"{step.name}.json"
    path.with_suffix(".new").write_text(json.dumps(found, indent=1))
    path.with_suffix(".new").replace(path)
    return found


def passed(step: Step, at: str, directory: Path = RESULTS) -> dict[str, Any] | None:
    """What came of a step, if it passed at this commit."""
    try:
        found: dict[str, Any] = json.loads((directory / f"{step.name}.json").read_text())
    except (OSError, ValueError):
        return None
    same = bool(at) and not at.endswith("-dirty") and found.get("commit") == at
    return found if same and found.get("exit") == 0 else None


def main(arguments: Sequence[str], steps: Sequence[Step] = STEPS, directory: Path = RESULTS) -> int:
    """The command."""
    parser = argparse.ArgumentParser("python -m tests.prove", description=__doc__)
    parser.add_argument("--only", default="", help="names of steps, with commas: " + ", ".join(s.name for s in steps))
    parser.add_argument("--again", action="store_true", help="also what passed at this commit")
    parser.add_argument("--json", action="store_true", help="one object, the last line")
    options = parser.parse_args(arguments)
    names = [name for name in options.only.split(",") if name]
    unknown = sorted({*names} - {step.name for step in steps})
    if unknown:
        parser.error(f"no step is called {', '.join(unknown)}")
    at, found = commit(), []
    for step in steps:
        if names and step.name not in names:
            continue
        known = None if options.again else passed(step, at, directory)
        print(f"{step.name}: " + ("passed before" if known else "runs"), file=sys.stderr, flush=True)
        row = known or run(step, at, directory)
        print(f"{step.name}: exit {row['exit']}, {row['seconds']} s", file=sys.stderr, flush=True)
        found.append(row)
    failed = [row["name"] for row in found if row["exit"]]
    if options.json:
        print(json.dumps({"ok": not failed, "failed": failed, "steps": found}))
    else:
        print("failed: " + ", ".join(failed) if failed else f"{len(found)} steps passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
