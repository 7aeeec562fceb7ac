"""`python -m logyard.bench.suite.checkouts BEFORE AFTER [--case NAME]... [--pairs N] [--seconds S] [--json]`: processor
time of an operation in one checkout against another.

Each case runs in pairs that alternate, in the one checkout and in the other, with this interpreter. Counted is what all
processes of a run used, from the kernel's account of children that ended; what a run of a tenth of a second takes
(start, end, and its operations) is taken off. The figure is the median of the pairs' ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from ..settings import flag_of
from .ours import KINDS
from .table import BadSuite, Case, case_of

CASES = (
    "pipelined-256", "closed-256", "logs-1000", "pipelined-64k", "alone-256", "one-alone-256", "kv-put", "queue-256",
)  # fmt: skip
"""Rows of the suite's table that are compared unless it is said which; `--case` takes any whose load has an end."""
LOADS = ("append", "kv", "queue")
WARMUP_S = "0.2"
SHORT_S = 0.1
SHORT_RUNS = 2


class Cost(NamedTuple):
    """What a run used, in seconds, for so many operations."""

    cpu_s: float
    operations: int


def words_of(case: Case) -> list[str]:
    """Return the words of `logyard bench` that run a case. Raises `BadSuite` for one that is no load: what it does is
    not counted in operations, or needs what the command does not give."""
    if case.kind not in LOADS or case.sync_delay_ms:
        raise BadSuite(f"the case {case.name} is no load of the command line's: give one of {', '.join(CASES)}")
    told = [(flag_of(KINDS[case.kind].settings, key), str(value)) for key, value in case.settings.items()]
    return [case.kind, "--nodes", str(case.nodes), *chain.from_iterable(told)]


def used() -> float:
    """Return the seconds of all children that ended."""
    found = resource.getrusage(resource.RUSAGE_CHILDREN)
    return found.ru_utime + found.ru_stime


def run(checkout: Path, arguments: Sequence[str], seconds: float) -> Cost:
    """Run a case in a checkout. Raises SystemExit with its last words when it fails."""
    before = used()
    command = [sys.executable, "-m", "logyard.service.cli", "bench", *arguments]
    done = subprocess.run(
        [*command, "--warmup", WARMUP_S, "--seconds", str(seconds), "--json"], cwd=checkout, text=True, check=False,
        capture_output=True, env={**os.environ, "PYTHONPATH": str(checkout)},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{checkout}: {' '.join(arguments)} failed: {(done.stderr or done.stdout)[-500:]}")
    report: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return Cost(used() - before, int(report["acknowledged"]))


def microseconds(long: Cost, short: Cost) -> float:
    """Return the microseconds of an operation."""
    return (long.cpu_s - short.cpu_s) / max(1, long.operations - short.operations) * 1e6


def compared(before: Sequence[float], after: Sequence[float]) -> dict[str, Any]:
    """Return the medians, and the median of the ratios of pairs."""
    ratios = [two / one for one, two in zip(before, after, strict=True)]
    return {
        "ratio": round(statistics.median(ratios), 3), "ratios": [round(one, 3) for one in ratios],
        "us_before": round(statistics.median(before), 2), "us_after": round(statistics.median(after), 2),
    }  # fmt: skip


def measure(checkouts: tuple[Path, Path], arguments: Sequence[str], pairs: int, seconds: float) -> dict[str, Any]:
    """Run one case in pairs; every other one begins with the second checkout."""
    short = [min(run(one, arguments, SHORT_S) for _ in range(SHORT_RUNS)) for one in checkouts]
    found: tuple[list[float], list[float]] = ([], [])
    for number in range(pairs):
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            found[side].append(microseconds(run(checkouts[side], arguments, seconds), short[side]))
    return compared(*found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m logyard.bench.suite.checkouts", description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--case", action="append", metavar="NAME", help="only these of the suite's table")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--json", action="store_true", help="one object instead of lines")
    given = parser.parse_args(arguments)
    checkouts = (given.before.resolve(), given.after.resolve())
    for one in checkouts:
        if not (one / "logyard").is_dir():
            parser.error(f"{one} is no checkout of logyard")
    try:
        words = {name: words_of(case_of(name)) for name in given.case or CASES}
    except BadSuite as error:
        parser.error(str(error))
    cases = {}
    for name, load in words.items():
        cases[name] = found = measure(checkouts, load, given.pairs, given.seconds)
        if not given.json:
            print(f"{name}: {found['us_before']} us before, {found['us_after']} us after, {found['ratio']}", flush=True)
    if given.json:
        print(json.dumps({"ok": True, "cases": cases}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
