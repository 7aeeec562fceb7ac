"""``python -m tests.linearizability FILE --model register|kv|queue|txn [--json]``: is a recorded history linearizable?

Exit codes: 0 it is, 1 it is not, 2 not decided within the budget, or not a history. FILE may be ``-``. A register or
key begins as null, a delete leaves null, an append continues text and makes anything else a list; a queue is first in,
first out, and a dequeue that answers null found it empty. txn: transactions over several keys (`transactions`).
"""

from __future__ import annotations

import argparse
import json
import sys

from .check import SOLVERS, check
from .history import BadHistory
from .verdict import CONFIGURATIONS_MAX


def main(arguments: list[str] | None = None) -> int:
    """Check one file; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.linearizability", description=__doc__)
    parser.add_argument("file")
    parser.add_argument("--model", required=True, choices=sorted(SOLVERS))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--configurations", type=int, default=CONFIGURATIONS_MAX, help="of a key's search, at most")
    given = parser.parse_args(arguments)
    valid: bool | None = None
    operations, key, reason = 0, None, ""
    try:
        with sys.stdin if given.file == "-" else open(given.file, encoding="utf-8") as lines:
            valid, operations, _, key, reason = check(lines, given.model, given.configurations)
    except (BadHistory, OSError, UnicodeDecodeError) as error:
        reason = str(error)
    if given.json:
        row = {"valid": valid, "operations": operations, "key": key, "reason": reason}
        print(json.dumps(row, default=lambda found: getattr(found, "value", str(found))))
    else:
        word = {True: "valid", False: "NOT linearizable", None: "undecided"}[valid]
        where = f", key {json.dumps(key, default=str)}" if key is not None else ""
        print(f"{word}: {operations} operations{where}{': ' if reason else ''}{reason}")
    return {True: 0, False: 1, None: 2}[valid]


if __name__ == "__main__":
    raise SystemExit(main())
