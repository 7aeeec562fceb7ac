"""Reads a whole generation, in a process that may die of it: `python -m logyard.payloads.probe DIRECTORY NUMBER
MAP_BYTES`.

A mapped page that cannot be read, or a damaged tree page, kills the process inside LMDB. So a generation under
suspicion is scanned here first. Called by `store` at open, only for generations that the journal names.
"""

from __future__ import annotations

import subprocess
import sys

from logyard.protocol.errors import FormatNewer, GenerationUnfinished, PayloadError

from .generation import Generation
from .verify import DEADLY, environment, is_passing
from .writing import GenerationConfig

_NEWER = 2
_PASSING = 3
_DAMAGED = 4
"""Not 1: with that Python ends that finds no module, or can't read one."""


def survives(path: str, number: int, map_bytes: int, timeout_s: float = 300.0) -> bool:
    """Return whether a child process can read all of a generation, as far as that can be told now: one that was ended
    from outside, did not get to reading, took too long or found no memory says nothing against it, and who dies of it
    has it probed again. Rows that do not verify are no reason to say no: they are typed errors."""
    command = [sys.executable, "-m", "logyard.payloads.probe", path, str(number), str(map_bytes)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, env=environment()
        )
    except (subprocess.TimeoutExpired, OSError):
        return True
    return done.returncode != _DAMAGED and done.returncode not in DEADLY


def main(arguments: list[str]) -> int:
    """Return 0 when every page could be read, 4 for damage; 2 for a newer format, which is for `open` to refuse and not
    for us to judge, 3 for what is not the file's fault."""
    path, number, map_bytes = arguments
    generation = Generation(path, int(number), GenerationConfig(int(map_bytes)))
    try:
        generation.open_reader()
        generation.measure()
    except FormatNewer:
        return _NEWER
    except GenerationUnfinished:
        return 0  # Nothing was ever stored there; whoever creates it anew replaces it.
    except PayloadError as error:
        print(error, file=sys.stderr)
        return _PASSING if is_passing(error) else _DAMAGED
    generation.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
