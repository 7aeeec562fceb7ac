"""``python -m tests.fuzz [--seconds N] [--seed S] [--golden] [--json]``: spoilt and made-up bytes for every parser.

`--golden` tries every single bit and every truncation of the golden files instead of a sample. Prints how much was
tried by target; exit code 1 when a parser raised what it must not, or spoilt bytes were served.
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

from . import golden
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


def main() -> int:
    """Run; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="for the parsers")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--golden", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    row = run(given.seconds, given.seed, given.golden)
    if given.json:
        print(json.dumps(row))
    else:
        for key, value in row.items():
            print(f"{key:>10}: {value}")
    return 1 if row["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())
