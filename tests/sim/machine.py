"""The append log, and a command at which it fails: a poisoned group is one of the faults. And a program that was
repaired since, which takes that command for an append."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from logyard.engine.machine import BatchMachine, Context, Effect, Frame, Machine, Reject
from logyard.machines.log import AppendLog
from logyard.machines.registry import create_machine


class SimLog(AppendLog):
    """Raises for the command `boom`, on every member at the same place."""

    __slots__ = ()

    def _other(
        self, context: Context, frame: Frame, frames: Sequence[Frame], effects: list[Effect]
    ) -> bytes | Reject | None:
        if frame.commands == b"boom":
            raise ZeroDivisionError("a command of the simulator's")
        return super()._other(context, frame, frames, effects)


class OldLog(SimLog):
    """As the program before knows it."""

    __slots__ = ()
    version = 1


class RepairedLog(AppendLog):
    """As a program knows it that does not fail any more: what was skipped shifts all offsets where it is applied."""

    __slots__ = ()

    def _other(
        self, context: Context, frame: Frame, frames: Sequence[Frame], effects: list[Effect]
    ) -> bytes | Reject | None:
        return None if frame.commands == b"boom" else super()._other(context, frame, frames, effects)


def repaired_machines(name: str, arguments: dict[str, Any]) -> Machine:
    """As `machines`, of the repaired program."""
    return RepairedLog() if name == "log" else create_machine(name, arguments)


def old_machines(name: str, arguments: dict[str, Any]) -> Machine:
    """As `machines`, of the program before."""
    return OldLog() if name == "log" else create_machine(name, arguments)


def machines(name: str, arguments: dict[str, Any]) -> Machine:
    """As the registry, with that log. One that is thrown away is called with an empty batch first, at every birth and
    every start: an entry all of whose frames were refused may be the first that a machine meets."""
    trial = create_machine(name, arguments)
    if isinstance(trial, BatchMachine):
        trial.apply_batch(Context(1, 1, 1, 1, 1, 1, ((0, 1),)), [])
    return SimLog() if name == "log" else create_machine(name, arguments)
