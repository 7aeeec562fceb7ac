"""Reads a whole generation, in a process that may die of it: `python -m logyard.payloads.probe DIRECTORY NUMBER`.

A mapped page that cannot be read, or a damaged tree page, kills the process inside LMDB. So a generation under
suspicion is scanned here first. Called by `store` at open, only for generations that the journal names.
"""

from __future__ import annotations

import subprocess
import sys

from logyard.protocol.errors import FormatNewer, GenerationUnfinished, PayloadError

from .generation import Generation
from .writing import GenerationConfig

_NEWER = 2


def survives(path: str, number: int, timeout_s: float = 300.0) -> bool:
    """Return whether a child process can read all of a generation. Rows that do not verify are no reason to say no:
    they are typed errors."""
    command = [sys.executable, "-m", "logyard.payloads.probe", path, str(number)]
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s).returncode in (
            0,
            _NEWER,
        )
    except subprocess.TimeoutExpired:
        return False


def main(arguments: list[str]) -> int:
    """Return 0 when every page could be read; 2 for a newer format, which is for `open` to refuse and not for us to
    judge."""
    generation = Generation(arguments[0], int(arguments[1]), GenerationConfig())
    try:
        generation.open_reader()
        generation.measure()
    except FormatNewer:
        return _NEWER
    except GenerationUnfinished:
        return 0  # Nothing was ever stored there; whoever creates it anew replaces it.
    except PayloadError as error:
        print(error, file=sys.stderr)
        return 1
    generation.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
