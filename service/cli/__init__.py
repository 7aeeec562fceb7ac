"""The command line. `root` registers every verb and has the entry point; a module holds the verbs of one subject."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; what the console script calls. Imported late: `root` brings every verb."""
    try:
        from .root import main as run

        run()
    except KeyboardInterrupt:
        # While modules are loaded: later it is the commands' own, and ends so as well.
        if "--json" in sys.argv:
            print('{"ok": false, "error": {"code": "interrupted", "message": "interrupted before it began"}}')
        sys.exit("Aborted!")
