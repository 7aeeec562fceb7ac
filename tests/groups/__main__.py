"""``python -m tests.groups --minutes M [--seed S] [--only KIND,...] [--directory DIR] [--json]``: consumer groups under
faults, then the judgement. Exit code 1 when anything was lost, skipped, doubled without cause or out of order."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

from .run import KINDS, run


def main() -> int:
    """Run; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.groups", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default=",".join(KINDS), help="kinds of faults, with commas")
    parser.add_argument("--directory", type=Path, help="where it lives; kept, as is that of a failed run")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    directory = given.directory or Path(tempfile.mkdtemp(prefix="logyard-groups-"))
    found = run(directory, given.minutes * 60, given.seed, tuple(given.only.split(",")))
    if found.passed and given.directory is None:
        shutil.rmtree(directory)
    row = found.row()
    if given.json:
        print(json.dumps(row))
    else:
        for key, value in row.items():
            print(f"{key:>24}: {value}")
    return 0 if found.passed else 1


if __name__ == "__main__":
    sys.exit(main())
