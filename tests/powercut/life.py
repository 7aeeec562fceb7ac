"""A node's life in a process that may be ended at any moment, what it said of it, and the recovery that must agree."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import trio

from tests.crash.verify import Expected, examine
from tests.crash.workload import Script

STEPS = 100_000


@dataclass
class Counts:
    """What was done and found. `not_run`: kinds that can't be tried here, and why."""

    cycles: int = 0
    acknowledged: int = 0
    lost: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    not_run: dict[str, str] = field(default_factory=dict)


def child(what: Callable[[], object]) -> int:
    """A process of its own for `what`: its id. It never returns here."""
    sys.stdout.flush()
    process = os.fork()
    if process:
        return process
    _leave(what)


def _leave(what: Callable[[], object]) -> NoReturn:
    code = 1
    try:
        what()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def live(path: Path, marks: Path, errors: Path, seed: int, greedy: bool) -> None:
    """In a child: use a node until something ends it; `greedy`: and free nothing."""
    log = os.open(errors, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(log, 2)
    script = Script(path, seed, os.open(marks, os.O_CREAT | os.O_WRONLY | os.O_APPEND))
    script.greedy = greedy
    trio.run(script.life, STEPS)


def check(path: Path, want: Expected, report: Path, room: bool) -> None:
    """In a child: recover twice, and say what is wrong. `room`: there is some to append a record in between."""
    extra: dict[str, int] = {}
    wrong: list[str] = []
    for again in (not room, True):
        try:
            wrong += trio.run(examine, path, want, again, extra)
        except BaseException as error:
            inner = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
            wrong.append(f"recovery {again + 1}: {type(inner).__name__}: {inner}")
            break
    report.write_text(json.dumps(wrong), "utf-8")


def told(marks: Path) -> tuple[Expected, int]:
    """What the node said before the cut; how many records it acknowledged."""
    want, count = Expected(), 0
    for line in marks.read_bytes().splitlines() if marks.exists() else ():
        want.take(line)
        count += b'"done": "append"' in line
    return want, count


def tally(counts: Counts, kind: str, acknowledged: int, wrong: list[str], which: str) -> None:
    """Count a cycle."""
    counts.cycles += 1
    counts.by_kind[kind] = counts.by_kind.get(kind, 0) + 1
    counts.acknowledged += acknowledged
    counts.lost += sum("was acknowledged" in what or what.endswith("is not there") for what in wrong)
    counts.violations += [f"{kind}, {which}: {what}" for what in wrong[:3]]
