"""Verifies every row of a generation in a process of its own: `python -m logyard.payloads.verify DIRECTORY NUMBER`.

Unlike `probe` it looks beside a running node, for damage that nobody has met yet: a page that can't be read, or a
damaged tree, kills this process and not the node. What the ledgers list is read before the rows, so that what a job
adds meanwhile is not missed. Prints one JSON object, `Verified`. Called by the scrub, through `service.payload_port`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from typing import NamedTuple

from .errors import FormatNewer, GenerationUnfinished, PayloadError
from .generation import Generation
from .ledger import Columns
from .writing import GenerationConfig

NICE = 19


class Verified(NamedTuple):
    """(run, uid, index) of entries that are damaged or gone, and why nothing of the generation can be trusted."""

    entries: list[tuple[int, int, int]]
    reason: str = ""

    @classmethod
    def of_process(cls, code: int, output: bytes) -> Verified:
        """From what such a process printed; one that died says so by that."""
        if code:
            return cls([], f"the process that read it ended with code {code}")
        entries, reason = json.loads(output)
        return cls([(run, uid, index) for run, uid, index in entries], reason)


def command(path: str, number: int, runs: Iterable[int]) -> list[str]:
    """Of the process that verifies generation `number` at `path`; `runs` are those that are homes."""
    return [sys.executable, "-m", "logyard.payloads.verify", path, str(number), *map(str, sorted(runs))]


def verify(path: str, number: int, runs: Iterable[int]) -> Verified:
    """Read everything. Rows that do not verify are named; `PayloadError` where the rest can't be read either."""
    generation = Generation(path, number, GenerationConfig())
    try:
        generation.open_reader()
        listed = {run: generation.columns(run) for run in runs}
        measured = generation.measure()
    except (FormatNewer, GenerationUnfinished):
        return Verified([])
    except PayloadError as error:
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


def main(arguments: list[str]) -> int:
    """0, whatever was found."""
    os.nice(NICE)
    path, number, *runs = arguments
    print(json.dumps(verify(path, int(number), map(int, runs))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
