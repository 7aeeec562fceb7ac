"""The command line. `root` registers every verb and has the entry point; a module holds the verbs of one subject."""

from __future__ import annotations


def main() -> None:
    """Run the command line; what the console script calls. Imported late: `root` brings every verb."""
    from .root import main as run

    run()
