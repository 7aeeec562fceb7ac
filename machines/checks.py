"""Checks of a machine by rehearsal: is it deterministic, and is its snapshot all of its state?

`check_deterministic` runs one script in processes whose hash seeds differ, so that an order that comes from a set
or from an address shows; `check_restore` restores a machine from its own snapshot at every index. Both compare replies,
effects, live sets and sections, and name the first step at which they part. Shipped in `logyard.testing`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgpack

from logyard.engine.machine import Machine, Reject

from .rehearsal import Command, EndSession, Entry, Refused, Rehearsal, Seen, Step, Upgrade, Wait

KINDS = (Command, Entry, Wait, EndSession, Upgrade, Refused)
SEEDS = ("1", "2", "3")
"""A small set may have the same order under two of them."""
SHOWN = 2000


class Parted(AssertionError):
    """Two runs of one script differ: `step` is the number of the first step at which they do."""

    def __init__(self, step: int, what: str, one: str, other: str) -> None:
        super().__init__(f"step {step}: {what} differ:\n  {one[:SHOWN]}\n  {other[:SHOWN]}")
        self.step = step


def _told(seen: Seen) -> str:
    """Return replies and effects as text: equal texts are equal."""
    replies = [(one.code, one.message) if isinstance(one, Reject) else one for one in seen.replies]
    return f"index {seen.index}: replies {replies!r}, effects {list(seen.effects)!r}"


def trace(run: Rehearsal, step: Step) -> list[str]:
    """Let a step happen; return what came of it: replies and effects, the live set, what the machine claims, its
    sections."""
    seen = [_told(one) for one in run.step(step)]
    live = sorted(tuple(at) for at in run.live)
    claims = sorted((tuple(one.first), tuple(one.end)) for one in run.machine.live_refs())
    return ["; ".join(seen), repr(live), repr(claims), repr(list(run.snapshot().items()))]


WHAT = ("replies and effects", "live sets", "live_refs", "sections")


def check_restore(make: Callable[[], Machine], steps: Sequence[Step], *, check_live: bool = True) -> Rehearsal:
    """Run a script on a machine, and beside it on one that is restored from its own snapshot at every index. Raises
    `Parted`; what the machine raises for an empty batch, tried at every index on one that is thrown away;
    AssertionError when a section changes after it was given, or when what is released and `live_refs` do not say the
    same (unless `check_live` is False). Returns the first one's rehearsal, for more."""
    whole = Rehearsal(make)
    again = Rehearsal(make)
    for number, step in enumerate(steps):
        held = whole.machine.snapshot()
        copy = {name: bytes(data) for name, data in held.items()}
        again = again.restored()
        again.restored().step(Refused())
        for what, one, other in zip(WHAT, trace(whole, step), trace(again, step), strict=True):
            if one != other:
                raise Parted(number, f"{what} of a restored machine", one, other)
        assert {name: bytes(data) for name, data in held.items()} == copy, f"step {number} changed an older snapshot"
        if check_live:
            whole.check()
    return whole


def check_deterministic(make: Callable[[], Machine], steps: Sequence[Step]) -> None:
    """Run a script in processes with different hash seeds. Raises `Parted`, RuntimeError when one of them fails.

    `make` is a class or a function at the top of a module that can be imported or is a file; it gives a fresh machine.
    """
    job = msgpack.packb([_place(make), [_packed(step) for step in steps], sys.path])
    traces = [_child(seed, job) for seed in SEEDS]
    for number, told in enumerate(zip(*traces, strict=True)):
        for what, (mine, *others) in zip(WHAT, zip(*told, strict=True), strict=True):
            for theirs in others:
                if theirs != mine:
                    raise Parted(number, f"{what} in two processes", mine, theirs)


def _child(seed: str, job: bytes) -> list[list[str]]:
    program = "from logyard.machines.checks import child; child()"
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], input=job, capture_output=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"the machine failed:\n{done.stderr.decode(errors='replace')}")
    found: list[list[str]] = msgpack.unpackb(done.stdout)
    return found


def child() -> None:
    """Run one of the processes: the job on standard input, traces on standard output. What the machine prints goes to
    standard error."""
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    place, packed, path = msgpack.unpackb(sys.stdin.buffer.read())
    sys.path[:] = path
    run = Rehearsal(_found(*place))
    traces = [trace(run, _unpacked(one)) for one in packed]
    with answer:
        answer.write(msgpack.packb(traces))


def _place(make: Callable[[], Machine]) -> list[str]:
    """Return (module, its file, name): where another process finds it."""
    name, module = make.__qualname__, sys.modules[make.__module__]
    if "<" in name:
        raise ValueError(f"{name} is inside of a function: another process can't find it, put it at a module's top")
    file = getattr(module, "__file__", None)
    if make.__module__ == "__main__" and not file:
        raise ValueError(f"{name} was typed in: another process can't find it, put it into a file")
    return [make.__module__, str(file or ""), name]


def _found(module: str, file: str, name: str) -> Callable[[], Machine]:
    if module == "__main__":
        spec = importlib.util.spec_from_file_location(Path(file).stem, file)
        assert spec is not None and spec.loader is not None
        at: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(at)
    else:
        at = importlib.import_module(module)
    for part in name.split("."):
        at = getattr(at, part)
    found: Callable[[], Machine] = at
    return found


def _packed(step: Step) -> list[Any]:
    kind = next(number for number, one in enumerate(KINDS) if type(step) is one)
    if isinstance(step, Entry):
        return [kind, [list(one) for one in step.commands]]
    return [kind, *step]


def _unpacked(packed: Sequence[Any]) -> Step:
    kind, *fields = packed
    if KINDS[kind] is Entry:
        return Entry(tuple(_command(*one) for one in fields[0]))
    if KINDS[kind] is Command:
        return _command(*fields)
    made: Step = KINDS[kind](*fields)
    return made


def _command(command: bytes, payloads: Sequence[int | None], session: int) -> Command:
    return Command(command, tuple(payloads), session)
