"""``python -m tests.matrix [--seed S] [--only KIND,FAULT,ROLE...] [--cells N] [--directory DIR] [--json]``: damage of
every kind in every kind of file, on a leader and on a follower of a live cluster of three daemons.

Bytes are changed in the victim's own files, under the running node, which scrubs, and again after a kill -9; EIO and
ENOSPC are the kernel's answers to its calls, given by strace. Then each member is read and compared with what was
acknowledged. Prints a row a cell. Exit code 1 when anything was lost or wrong, when a cell did not come back whole, or
hit nothing; 2 when nothing ran.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

from .cells import CELLS, Result
from .run import run


def main() -> int:
    """Run; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="words that a cell must all have, with commas: wal,leader")
    parser.add_argument("--cells", type=int, default=len(CELLS), help="at most so many")
    parser.add_argument("--directory", type=Path, help="where the clusters live; kept, as is that of a failed run")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    wanted = [word for word in given.only.split(",") if word]
    cells = [cell for cell in CELLS if all(word in cell for word in wanted)][: given.cells]
    directory = given.directory or Path(tempfile.mkdtemp(prefix="logyard-matrix-"))
    found = run(cells, given.seed, directory)
    if given.directory is None and all(one.passed for one in found):
        shutil.rmtree(directory)
    show(found, given.seed, given.json)
    if not all(one.passed for one in found):
        return 1
    return 0 if any(not one.not_run for one in found) else 2


def show(found: list[Result], seed: int, as_json: bool) -> None:
    """Print what came out."""
    for line in table(found):
        print(line, file=sys.stderr if as_json else sys.stdout)
    if as_json:
        print(json.dumps(summary(found, seed)))


def summary(found: list[Result], seed: int) -> dict[str, object]:
    """One object."""
    return {
        "cells": len(found), "tried": sum(not one.not_run for one in found),
        "not_applicable": sum(bool(one.reason) and not one.not_run for one in found),
        "not_run": sum(one.not_run for one in found), "hits": sum(one.hits for one in found),
        "acknowledged": sum(one.acknowledged for one in found), "lost": sum(len(one.lost) for one in found),
        "wrong": sum(len(one.wrong) for one in found), "failed": [str(one.cell) for one in found if not one.passed],
        "seed": seed, "passed": all(one.passed for one in found), "outcomes": [one.row() for one in found],
    }  # fmt: skip


def table(found: list[Result]) -> list[str]:
    """For docs/reliability.md: a row for each file and fault, one for both roles where they ended alike."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for one in found:
        text = "; ".join(one.steps) + (f" ({one.reason})" if one.reason else "")
        rows.setdefault(one.cell[:2], {})[one.cell.role] = text.replace("|", "/") + ("" if one.passed else " FAILED")
    lines = ["| file | fault | on | outcome |", "| --- | --- | --- | --- |"]
    for (kind, fault), texts in rows.items():
        alike = len(texts) == 2 and len(set(texts.values())) == 1
        for role, text in list(texts.items())[: 1 if alike else None]:
            lines.append(f"| {kind} | {fault} | {'both' if alike else role} | {text} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
