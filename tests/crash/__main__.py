"""``python -m tests.crash [--states N] [--wal-states N] [--seed S] [--steps K] [--around PATH] [--json]``: recover what
power cuts could have left.

A node's whole life is recorded as the kernel sees it (strace, LMDB included), the log's as the disk door sees it;
behind every event the states that a cut there may leave are made, and the real recovery must bring back what was
acknowledged and nothing else. Both records of the same life are compared. Without strace the node's part is not run,
and says so.
Exit code 1 for a violation, or where the door and the kernel differ.
"""

from __future__ import annotations

import argparse
import json
import sys

from .run import run


def main() -> int:
    """Run; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__)
    parser.add_argument("--states", type=int, default=2000, help="of whole nodes")
    parser.add_argument("--wal-states", type=int, default=5000, help="of the log alone")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60, help="of each of a node's two lives")
    parser.add_argument(
        "--around", default="", help="of nodes only what is soon behind a call about such files: rings/"
    )
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    row = run(given.states, given.wal_states, given.seed, given.steps, given.around).row()
    if given.json:
        print(json.dumps(row))
    else:
        for key, value in row.items():
            print(f"{key:>14}: {value}")
        if not row["traced"]:
            print("no strace here: whole nodes were not run")
    return 1 if row["violations"] or row["door_differs"] else 0


if __name__ == "__main__":
    sys.exit(main())
