"""Inputs that coverage finds: libFuzzer by atheris, one process a target; ``python -m tests.fuzz --atheris`` starts it.

``python -m tests.fuzz.guided TARGET SECONDS SEED DIRECTORY`` is one: it begins with the target's examples and keeps
what reaches new code in DIRECTORY. It ends with 0, or with the input that a parser must not have answered so.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

LONGEST = 4096
RSS_MB = 2048
SLACK_S = 60.0
DONE = re.compile(r"stat::number_of_executed_units:\s*(\d+)")
FAILED = ("AssertionError: ", "==", "nothing")
COVERED = re.compile(r"cov: (\d+)")


class Guided(NamedTuple):
    """What one target's process did: inputs, and edges that they reached; `wrong` is empty if nothing was."""

    inputs: int
    edges: int
    wrong: str


def reason_against() -> str:
    """Why it can't be run here; empty where it can."""
    return "" if importlib.util.find_spec("atheris") is not None else "atheris is not installed (the extra `fuzz`)"


def run(name: str, seconds: float, seed: int, directory: Path) -> Guided:
    """One target in a process of its own. BLOCKING."""
    directory.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "tests.fuzz.guided", name, str(max(1, round(seconds))), str(seed), str(directory)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=seconds + SLACK_S)
    except subprocess.TimeoutExpired:
        return Guided(0, 0, f"{name}: it does not end")
    said = done.stdout + done.stderr
    inputs = sum(map(int, DONE.findall(said)))
    edges = max(map(int, COVERED.findall(said)), default=0)
    why = [line for line in said.splitlines() if line.startswith(FAILED)] or [said[-1500:]]
    return Guided(inputs, edges, f"{name}: exit {done.returncode}: {why[0][:1500]}" if done.returncode else "")


def main(name: str, seconds: str, seed: str, directory: str) -> None:
    """In the process: never returns."""
    import atheris

    # What is imported in here is instrumented, so nothing of it may be there before.
    with atheris.instrument_imports(include=["logyard", "tests.fuzz.targets"]):
        from .targets import attempt, targets

    target = next((one for one in targets() if one.name == name), None)
    if target is None:
        sys.exit(f"nothing is called so: {name}")
    for number, sample in enumerate(target.samples):
        (Path(directory) / f"example-{number}").write_bytes(sample)

    def one(data: bytes) -> None:
        if said := attempt(target, data):
            raise AssertionError(said)

    options: list[Any] = [
        sys.argv[0], f"-max_total_time={seconds}", f"-seed={seed}", f"-max_len={LONGEST}", f"-rss_limit_mb={RSS_MB}",
        "-print_final_stats=1", f"-artifact_prefix={directory}/", directory,
    ]  # fmt: skip
    atheris.Setup(options, one)
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
