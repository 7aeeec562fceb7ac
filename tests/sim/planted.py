"""Planted bugs: one override of product code each, which the simulator has to find from seeds it never saw.

`python -m tests.sim.planted [--bug NAME] [--seed S] [--cpu SECONDS] [--json]` tries fresh seeds until a check speaks.
Each bug names the rule that it breaks (`bugs_raft`, `bugs_disk`, `bugs_state`, `bugs_machines`); `test_planted` replays
the seeds that are recorded in `planted.json`.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from . import bugs_disk, bugs_machines, bugs_mutants, bugs_raft, bugs_state, bugs_terms
from .bugs import Bug, planted, unplanted
from .features import recorded
from .run import Result, Run

MINUTES = 1.0
RECORDED = Path(__file__).with_name("planted.json")
BUGS = (*bugs_raft.BUGS, *bugs_disk.BUGS, *bugs_state.BUGS, *bugs_machines.BUGS, *bugs_terms.BUGS, *bugs_mutants.BUGS)


def run_of(seed: int, minutes: float, featured: bool | frozenset[str]) -> Run:
    """A seed, with the features it draws, with those named, or as before there were any."""
    if featured is True:
        featured = recorded(seed)
    return Run(seed, minutes, features=featured or None)


@cache
def complaint(seed: int, minutes: float, featured: bool | frozenset[str], end: float = math.inf) -> str:
    """What the product itself, nothing being planted, violates with a seed until `end`; nothing when it passes."""
    run = run_of(seed, minutes, featured)
    run.end = end
    return "; ".join(run.go().violations)


def broke_at(violation: str) -> float:
    """When the first promise was broken: a violation begins with its time."""
    return float(violation.removeprefix("t=").split(maxsplit=1)[0])


def hunt(bug: Bug, seed: int, cpu_s: float, minutes: float = MINUTES) -> tuple[Result | None, float, int]:
    """Fresh seeds until a check speaks: the failing result, the CPU it took, the seeds tried. A seed that the product
    itself does not pass counts for nothing."""
    began, tried = time.process_time(), 0
    with planted(bug):
        while time.process_time() - began < cpu_s:
            tried += 1
            gc.collect()
            result = run_of(seed, minutes, bug.featured).go()
            if result.violations:
                with unplanted(bug):
                    if not complaint(seed, minutes, bug.featured):
                        return result, time.process_time() - began, tried
            seed += 1
    return None, time.process_time() - began, tried


def main(arguments: Sequence[str]) -> int:
    """Hunt, print, judge."""
    parser = argparse.ArgumentParser("python -m tests.sim.planted", description=__doc__)
    parser.add_argument("--bug", default="", help="only these, comma-separated")
    parser.add_argument("--part", default="1/1", help="I/N: of them every Nth, from the Ith on")
    parser.add_argument("--seed", type=int, default=1000, help="the first seed")
    parser.add_argument("--cpu", type=float, default=60.0, help="seconds of CPU for each")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--record", action="store_true", help="write the seeds that found something for the replay")
    options = parser.parse_args(arguments)
    rows = []
    first_bug, parts = map(int, options.part.split("/"))
    for bug in BUGS[first_bug - 1 :: parts]:
        if options.bug and bug.name not in options.bug.split(","):
            continue
        result, spent, tried = hunt(bug, options.seed, options.cpu)
        first = result.violations[0].splitlines()[0] if result is not None else ""
        seed = result.seed if result is not None else None
        rows.append(
            {"bug": bug.name, "rule": bug.rule, "seed": seed, "cpu_s": round(spent, 2), "seeds": tried, "found": first}
        )
        if not options.json:
            print(f"{bug.name:28} {spent:6.1f} s  seed {seed}  {first[:150] or 'NOT FOUND'}", flush=True)
    if options.json:
        print(json.dumps({"bugs": rows, "caught": sum(row["seed"] is not None for row in rows)}))
    if options.record:
        found = [
            {"bug": row["bug"], "seed": row["seed"], "minutes": MINUTES} for row in rows if row["seed"] is not None
        ]
        new = {row["bug"] for row in found}
        found = [row for row in json.loads(RECORDED.read_text()) if row["bug"] not in new] + found
        RECORDED.write_text("[\n" + ",\n".join(f"  {json.dumps(row)}" for row in found) + "\n]\n")
    return 0 if all(row["seed"] is not None for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
