"""A node process on a slow disk: ``python -m tests.service.slow_node CONFIG SECONDS`` serves until its input ends."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from logyard.service import node
from logyard.service.daemon import run_node
from tests.engine.host.slow_disk import SlowDisk


def main() -> int:
    """Serve with every sync of data `SECONDS` late."""
    config, seconds = sys.argv[1:]
    setattr(node, "Disk", partial(SlowDisk, float(seconds)))  # noqa: B010  # a class is no place to assign to for mypy
    return run_node(Path(config), until_eof=True)


if __name__ == "__main__":
    raise SystemExit(main())
