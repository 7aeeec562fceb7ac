"""``python -m tests.chaos --minutes M [--seed S] [--only KIND,...] [--directory DIR] [--json]``: three real daemons
under load, one fault after the other, then the judgement.

Prints operations, faults by kind (those that hit something), lost, undecided, violations. Exit code 1 when anything was
lost, undecided or violated, when a kind that was tried hit nothing, or when fewer than 100 operations a second were
done while a quorum was healthy. Needs no rights; traffic stays on loopback.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

from .run import Result, run


def main() -> int:
    """Run; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="kinds of faults, with commas")
    parser.add_argument("--directory", type=Path, help="where the cluster lives; kept, as is that of a failed run")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    only = tuple(filter(None, given.only.split(",")))
    directory = given.directory or Path(tempfile.mkdtemp(prefix="logyard-chaos-"))
    found = run(directory, given.minutes, given.seed, only)
    if found.passed and given.directory is None:
        shutil.rmtree(directory)
    show(found, given.json)
    return 0 if found.passed else 1


def show(found: Result, as_json: bool) -> None:
    """Print what came out."""
    row = found.row()
    if as_json:
        print(json.dumps(row))
        return
    for key, value in row.items():
        print(f"{key:>20}: {value}")


if __name__ == "__main__":
    sys.exit(main())
