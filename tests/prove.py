"""`python -m tests.prove [--only A,B] [--again] [--write] [--json]`: the long proofs, one after the other.

Each step is one of this tree's commands, of at most ten minutes or so, and says its seed. What a step printed goes to
`prove/NAME.json`, with its command, date, machine and commit; a step that passed at this commit is not run again, so a
run that was cut goes on where it was. `--write` puts what all steps counted into docs/reliability.md, as a table.
Exit code 1 when a step failed. Called by `make prove`.
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
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- made by `make prove` -->", "<!-- end of what `make prove` made -->"


class Step(NamedTuple):
    """A command without its interpreter: `-m module`, then arguments."""

    name: str
    arguments: tuple[str, ...]


SESSIONS = ("client/session.py", "client/session_keeper.py", "client/sync_session.py", "client/sequences.py")
STEPS = (
    Step("sim-recorded", ("-m", "tests.sim", "--regressions")),
    Step("sim", ("-m", "tests.sim", "--seed", "100000", "--seeds", "600", "--minutes", "1")),
    *(
        Step(
            f"sim-planted-{part}", ("-m", "tests.sim.planted", "--cpu", "60", "--seed", "100000", "--part", f"{part}/5")
        )
        for part in range(1, 6)
    ),
    Step("crash", ("-m", "tests.crash", "--states", "6000", "--wal-states", "14000", "--seed", "300")),
    *(
        Step(
            f"mutants-{name}", ("-m", "tests.mutants", "--seed", "1", "--count", "20", "--only", only, "--tests", tests)
        )
        for name, only, tests in (
            ("raft", "engine/raft", "tests/engine/raft"),
            ("payloads", "payloads", "tests/payloads"),
            ("sessions", ",".join(SESSIONS), "tests/client"),
            ("log", "engine/log,engine/disk", "tests/engine"),
            ("host", "engine/host,engine/replica,engine/quiesce,engine/repair,engine/transfer", "tests/engine"),
        )
    ),
    Step("catalog", ("-m", "tests.sim.catalog", "--seed", "100000", "--every", "10")),
    Step("fuzz", ("-m", "tests.fuzz", "--seconds", "60", "--golden", "--atheris", "--seed", "7")),
    Step("live", ("-m", "tests.fuzz.live", "--seconds", "600", "--seed", "100000")),
    Step("live-planted", ("-m", "tests.fuzz.live", "--seconds", "10", "--planted")),
    Step("matrix-leader", ("-m", "tests.matrix", "--seed", "1", "--only", "leader")),
    Step("matrix-follower", ("-m", "tests.matrix", "--seed", "1", "--only", "follower")),
    Step("etcd", ("-m", "tests.etcd", "--requests", "20000", "--seed", "100000")),
    *(
        Step(f"spark-kills-{part}", ("-m", "tests.pipeline.kills", "--seed", f"{1000 + 12 * part}", "--runs", "12"))
        for part in range(5)
    ),
    Step("spark-kills-executors", ("-m", "tests.pipeline.kills", "--executors", "--seed", "2000", "--runs", "8")),
    Step("powercut", ("-m", "tests.powercut", "--cycles", "150")),
    Step("chaos-1", ("-m", "tests.chaos", "--minutes", "7", "--seed", "3")),
    Step("chaos-2", ("-m", "tests.chaos", "--minutes", "7", "--seed", "4")),
    *(Step(f"groups-{seed}", ("-m", "tests.groups", "--minutes", "8", "--seed", f"{seed}")) for seed in range(1, 9)),
    Step("demo-cluster", ("-m", "logyard.service.cli", "demo", "--cluster")),
)


class Measure(NamedTuple):
    """A figure of the table: `keys` of the results of the steps whose names begin with `step`, added up."""

    name: str
    step: str
    keys: tuple[str, ...]


MEASURES = (
    Measure("hours simulated", "sim", ("sim_hours",)),
    Measure("seeds simulated", "sim", ("seeds",)),
    Measure("operations simulated", "sim", ("operations",)),
    Measure("faults in simulations", "sim", ("faults",)),
    Measure("planted bugs found", "sim-planted", ("caught",)),
    Measure("crash states recovered", "crash", ("states",)),
    Measure("power cuts", "powercut", ("cycles",)),
    Measure("bits flipped, inputs spoilt or made up", "fuzz", ("tried",)),
    Measure("connections of strangers to live nodes", "live", ("tried",)),
    Measure("damages on a live cluster that hit", "matrix", ("hits",)),
    Measure("operations on daemons under faults", "chaos", ("operations",)),
    Measure("kills of daemons", "chaos", ("faults.kill9", "faults.kill9_all", "faults.writer_kill")),
    Measure("kills of Spark's processes in exactly-once copies", "spark-kills", ("kills",)),
    Measure("records of consumer groups under faults", "groups", ("records",)),
    Measure("operations of histories checked", "chaos", ("histories",)),
    Measure("requests compared with etcd", "etcd", ("requests",)),
    Measure("mutants noticed", "mutants", ("noticed",)),
    Measure("lost", "", ("lost",)),
)


def figure(result: Any, key: str) -> float:
    """Return what a result holds under a dotted key: a number, the sum of a mapping, the length of a list, or 0."""
    for part in key.split("."):
        result = result.get(part) if isinstance(result, dict) else None
    return added_up(result)


def added_up(value: Any) -> float:
    """Return a number, the sum of a mapping's values, the length of a list, or 0."""
    if isinstance(value, dict):
        return sum(map(added_up, value.values()))
    if isinstance(value, list):
        return len(value)
    return float(value) if isinstance(value, int | float) else 0.0


def table(found: Sequence[dict[str, Any]]) -> str:
    """Return what the steps counted and how each ended, as Markdown."""
    lines = ["| measure | figure |", "| --- | --- |"]
    for measure in MEASURES:
        rows = [row for row in found if row["name"].startswith(measure.step)]
        if rows:
            total = sum(figure(row["result"], key) for row in rows for key in measure.keys)
            lines.append(f"| {measure.name} | {total:,.1f} |".replace(".0 |", " |"))
    lines += ["", "| step | command | began | seconds | exit |", "| --- | --- | --- | --- | --- |"]
    for row in found:
        lines.append(f"| {row['name']} | `{row['command']}` | {row['date']} | {row['seconds']:.0f} | {row['exit']} |")
    commits = sorted({row["commit"] for row in found})
    said = f"Commit {', '.join(commits)}; {found[0]['cores']} cores, Linux {found[0]['kernel']}."
    return "\n".join([said, "", *lines])


def write(text: str, page: Path) -> None:
    """Replace what an earlier run put between the page's two marks."""
    before, begin, rest = page.read_text("utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"{page} has no place for the table"
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", "utf-8")


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


def main(arguments: Sequence[str], steps: Sequence[Step] = STEPS, directory: Path = RESULTS, page: Path = PAGE) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser("python -m tests.prove", description=__doc__)
    parser.add_argument("--only", default="", help="names of steps, with commas: " + ", ".join(s.name for s in steps))
    parser.add_argument("--again", action="store_true", help="also what passed at this commit")
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.name}; needs every step")
    parser.add_argument("--json", action="store_true", help="one object, the last line")
    options = parser.parse_args(arguments)
    names = [name for name in options.only.split(",") if name]
    unknown = sorted({*names} - {step.name for step in steps})
    if unknown:
        parser.error(f"no step is called {', '.join(unknown)}")
    if options.write and names:
        parser.error("--write needs every step: leave --only out")
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
    if options.write:
        write(table(found), page)
    if options.json:
        print(json.dumps({"ok": not failed, "failed": failed, "steps": found}))
    else:
        print("failed: " + ", ".join(failed) if failed else f"{len(found)} steps passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
