"""``python -m tests.powercut --cycles N [--seed S] [--json]``: cut the power under a node N times.

A loop image of each file system is shut down by its ioctl while a node writes to it: what was not synced is gone. The
file system recovers, the node recovers, and everything it had acknowledged must be there. Beside it small images are
filled, and strace lets syncs fail with EIO. The images need root; what can't be
tried here is named under ``not_run`` and counted nowhere. Exit code 1 for a loss or violation, 2 where nothing ran.
"""

from __future__ import annotations

import argparse
import json
import sys

from .run import row, run


def main() -> int:
    """Run; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.powercut", description=__doc__)
    parser.add_argument("--cycles", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = row(run(given.cycles, given.seed))
    if given.json:
        print(json.dumps(found))
    else:
        for key, value in found.items():
            print(f"{key:>13}: {value}")
    if found["lost"] or found["violations"]:
        return 1
    return 0 if found["cycles"] else 2


if __name__ == "__main__":
    sys.exit(main())
