"""`python -m logyard.service.cli`: the command line, as the console script runs it."""

from __future__ import annotations

import sys

from . import main

main()
sys.exit(0)
