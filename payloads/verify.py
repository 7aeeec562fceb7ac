"""Verifies every row of a generation in a process of its own: `python -m logyard.payloads.verify DIRECTORY NUMBER
MAP_BYTES RUN...`.

Unlike `probe` it looks beside a running node, for damage that nobody has met yet: a page that can't be read, or a
damaged tree, kills this process and not the node. What ends it before it reads, or from outside, says nothing of the
generation: it may hit the verifying processes of all nodes at once. What the ledgers list is read before the rows, so
that what a job adds meanwhile is not missed. Prints one JSON object, `Verified`. Called by the scrub, through
`service.payload_port`.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterable
from signal import SIGABRT, SIGBUS, SIGFPE, SIGSEGV
from typing import NamedTuple

import lmdb

from logyard.protocol.errors import FormatNewer, GenerationUnfinished, PayloadError, StoreFull, StoreShort

from .generation import Generation
from .ledger import Columns
from .writing import GenerationConfig

NICE = 19
READING = b"reading\n"
DEADLY = frozenset(-number for number in (SIGABRT, SIGBUS, SIGFPE, SIGSEGV))
"""How a process ends that meets a page it can't read, or a tree that leads nowhere."""
PASSING = (lmdb.MemoryError, lmdb.ReadersFullError, lmdb.LockError, lmdb.TlsFullError, lmdb.BadRslotError,
           lmdb.ReadonlyError, lmdb.DiskError, lmdb.MapResizedError)  # fmt: skip
"""Of LMDB's errors those that say nothing about a file. The last: it grew beyond the map of who reads it."""
LASTING = (errno.EIO, errno.ENOENT, errno.ENODATA, errno.EBADMSG, errno.EUCLEAN, errno.EREMOTEIO, errno.EILSEQ)
"""Of the system's those that do: those of `engine.disk.door.is_damage`, which this package, importing nothing of ours,
can't ask."""


class Verified(NamedTuple):
    """(run, uid, index) of entries that are damaged or gone, and why nothing of the generation can be trusted."""

    entries: list[tuple[int, int, int]]
    reason: str = ""

    @classmethod
    def of_process(cls, code: int, output: bytes) -> Verified:
        """Return what such a process printed; one that a generation killed says so by that. Raises OSError when nothing
        is known of the generation."""
        if not output.startswith(READING) or (code and code not in DEADLY):
            raise OSError(f"a generation was not verified: the process that reads it ended with code {code}")
        if code:
            return cls([], f"the process that read it ended with code {code}")
        entries, reason = json.loads(output[len(READING) :])
        return cls([(run, uid, index) for run, uid, index in entries], reason)


def command(path: str, number: int, map_bytes: int, runs: Iterable[int]) -> list[str]:
    """Return the command of the process that verifies generation `number` at `path`. `map_bytes` is its map's size, as
    its writer has it; `runs` are those that are homes."""
    numbers = map(str, (number, map_bytes, *sorted(runs)))
    return [sys.executable, "-m", "logyard.payloads.verify", path, *numbers]


def environment() -> dict[str, str]:
    """Return the environment of a process that runs our own code, wherever this process has that from."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(part) for part in sys.path)}


def verify(path: str, number: int, map_bytes: int, runs: Iterable[int]) -> Verified:
    """Read everything. Rows that do not verify are named. Raises `PayloadError` for what is not the file's fault."""
    generation = Generation(path, number, GenerationConfig(map_bytes))
    try:
        generation.open_reader()
        listed = {run: generation.columns(run) for run in runs}
        measured = generation.measure()
    except (FormatNewer, GenerationUnfinished):
        return Verified([])
    except PayloadError as error:
        if is_passing(error):
            raise
        return Verified([], str(error))
    finally:
        generation.close()
    if (0, 0, 0) in measured.bad:
        return Verified([], next(iter(measured.damage)))
    bad = set(measured.bad)
    for run, columns in listed.items():
        there = measured.runs.get(run) or Columns()
        for uid, slots in columns.groups.items():
            rows = set(zip(*there.groups[uid], strict=True)) if uid in there.groups else set()
            bad |= {(run, uid, slot[0]) for slot in zip(*slots, strict=True) if slot not in rows}
    return Verified(sorted(bad))


def is_passing(error: PayloadError) -> bool:
    """Return whether it is the process or the machine that lacks something, and not the file."""
    cause = error.__cause__
    code = getattr(cause, "errno", None) or getattr(cause, "code", 0)
    system = isinstance(cause, OSError) or type(cause) is lmdb.Error
    return isinstance(error, StoreFull | StoreShort) or isinstance(cause, PASSING) or (system and code not in LASTING)


def main(arguments: list[str]) -> int:
    """Return 0, whatever was found."""
    os.nice(NICE)
    path, *numbers = arguments
    number, map_bytes, *runs = map(int, numbers)
    os.write(1, READING)
    print(json.dumps(verify(path, number, map_bytes, runs)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
