"""`python -m tests.sim.catalog [--story A,B] [--seed S] [--every N] [--workers W] [--json]`: every story of the
catalogue with one fault at every Nth of its steps: each node killed, killed with the power, or standing still there,
and each frame lost. Who asked goes on asking in one half of them, and in the other never comes back.

`--again CASE` tells one case again; each complaint says which one it is. Exit 1 on a complaint.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence

from .cases import Case, cases_of, tell_all
from .stories import STORIES


def main(arguments: Sequence[str]) -> int:
    """Tell them, print, judge."""
    parser = argparse.ArgumentParser("python -m tests.sim.catalog", description=__doc__)
    parser.add_argument("--story", default=",".join(STORIES), help=f"of {', '.join(STORIES)}")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=int, default=1, help="only every Nth step")
    parser.add_argument("--workers", type=int, default=0, help="processes; 0: one a core")
    parser.add_argument("--again", default="", help="one case, as a complaint names it")
    parser.add_argument("--json", action="store_true", help="one object instead of lines")
    options = parser.parse_args(arguments)
    names = options.story.split(",")
    if unknown := sorted({*names} - {*STORIES}):
        parser.error(f"no story is called {', '.join(unknown)}; there are {', '.join(STORIES)}")
    if options.again:
        cases = [Case.of(options.again)]
    else:
        cases = [case for name in names for case in cases_of(name, options.seed, options.every)]
    told: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    wrong: list[dict[str, object]] = []
    seconds = cpu = 0.0
    for case, found in tell_all(cases, options.workers):
        told[case.story] += 1
        seconds, cpu = seconds + found.simulated_s, cpu + found.cpu_s
        if found.hit:
            faults[case.fault.kind] += 1
        if found.wrong:
            wrong.append({"case": str(case), "what": found.wrong})
            if not options.json:
                print(
                    f"{case}: {'; '.join(found.wrong)}\n  again: python -m tests.sim.catalog --again {case}", flush=True
                )
    report = {
        "ok": not wrong, "cases": len(cases), "stories": dict(told), "faults": dict(faults),
        "sim_hours": round(seconds / 3600, 3), "cpu_s": round(cpu, 1), "violations": wrong,
    }  # fmt: skip
    if options.json:
        print(json.dumps(report))
    else:
        for key, value in report.items():
            print(f"{key}: {value if key != 'violations' else len(wrong)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
