"""``python -m tests.fuzz [--seconds N] [--seed S] [--golden] [--atheris] [--json]``: spoilt and made-up bytes.

`--golden` tries every single bit and every truncation of the golden files instead of a sample. `--atheris` gives as
much time again to inputs that coverage finds, where atheris is installed; otherwise it is named under ``not_run``.
Prints how much was tried by target; exit code 1 when a parser raised what it must not, or spoilt bytes were served.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.crash.run import place

from . import golden, guided
from .targets import attempt, mutate, targets

SAMPLE = 211
"""Every so many bits and bytes of the golden files without `--golden`."""
ROUND = 200
KEPT = 10


def run(seconds: float, seed: int, every: bool) -> dict[str, Any]:
    """Everything. BLOCKING."""
    tried: dict[str, int] = {}
    harmless: dict[str, int] = {}
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="logyard-fuzz-", dir=place()) as name:
        for what, (data, judge) in golden.targets(Path(name) / "golden").items():
            bits = range(0, 8 * len(data), 1 if every else SAMPLE)
            cuts = range(0, len(data), 1 if every else SAMPLE)
            tried[f"golden {what}"], harmless[what], found = golden.sweep(what, data, judge, bits, cuts)
            wrong += found[:KEPT]
    draw = random.Random(seed)
    deadline = time.monotonic() + seconds
    for target in itertools.cycle(targets()):
        if time.monotonic() > deadline and len(tried) > len(harmless) + 1:
            break
        for _ in range(ROUND):
            if said := attempt(target, mutate(draw, target)):
                wrong.append(said)
        tried[target.name] = tried.get(target.name, 0) + ROUND
    return {"tried": sum(tried.values()), "by_target": tried, "harmless": harmless, "violations": wrong[: 2 * KEPT]}


def find_by_coverage(seconds: float, seed: int, row: dict[str, Any]) -> None:
    """The same parsers once more, led by what their code does with an input."""
    if why := guided.reason_against():
        row["not_run"] = {"atheris": why}
        return
    all_targets = targets()
    row["guided"], row["edges"] = {}, {}
    with tempfile.TemporaryDirectory(prefix="logyard-fuzz-", dir=place()) as name:
        for number, target in enumerate(all_targets):
            corpus = Path(name) / str(number)
            found = guided.run(target.name, seconds / len(all_targets), seed, corpus)
            row["guided"][target.name], row["edges"][target.name] = found.inputs, found.edges
            if found.wrong:
                row["violations"].append(found.wrong)
    row["tried"] += sum(row["guided"].values())


def main() -> int:
    """Run; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="for the parsers")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--golden", action="store_true")
    parser.add_argument("--atheris", action="store_true", help="also what coverage finds, for as long again")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    row = run(given.seconds, given.seed, given.golden)
    if given.atheris:
        find_by_coverage(given.seconds, given.seed, row)
    if given.json:
        print(json.dumps(row))
    else:
        for key, value in row.items():
            print(f"{key:>10}: {value}")
    return 1 if row["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
