"""How fast the simulator is, at options that never change: `python -m tests.sim.speed [--json]`.

`work_per_cpu_s` is client operations and faults for one second of CPU, all checks on; `real_time` is simulated cluster
seconds for one. Both are of CPU time, so that whoever shares the machine changes them little; the best of `--rounds`
counts. One process; the seeds draw as recorded ones do.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from .run import Run

SEEDS = (1, 2, 3, 4, 5, 6)
MINUTES = 1.0
GROUPS = 4


def measure() -> dict[str, float]:
    """Run the fixed seeds once."""
    found = [Run(seed, MINUTES, GROUPS).go() for seed in SEEDS]
    cpu = sum(result.cpu_s for result in found)
    simulated = sum(result.simulated_s for result in found)
    work = sum(result.operations + sum(result.faults.values()) for result in found)
    return {
        "work_per_cpu_s": round(work / cpu, 1),
        "real_time": round(simulated / cpu, 1),
        "work": work,
        "simulated_s": round(simulated, 1),
        "events": sum(result.events for result in found),
        "cpu_s": round(cpu, 2),
        "violations": sum(bool(result.violations) for result in found),
    }


def main(arguments: Sequence[str]) -> int:
    """Measure, print."""
    parser = argparse.ArgumentParser("python -m tests.sim.speed", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    best = max((measure() for _ in range(options.rounds)), key=lambda one: one["work_per_cpu_s"])
    print(json.dumps(best) if options.json else "\n".join(f"{key}: {value}" for key, value in best.items()))
    return 1 if best["violations"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
