"""Machines of a daemon's operator: the table [machines] of node.toml, names and the classes that they stand for.

Only the configuration names code, never a client: what it may load is what the account that starts the node may run.
The classes are loaded before anything is opened, so that a wrong name refuses the start. Called by `service.node`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from logyard.engine.machine import Machine
from logyard.machines.registry import create_machine
from logyard.protocol.errors import BadRequest

MachineFactory: TypeAlias = Callable[[str, dict[str, Any]], Machine]
REQUIRED = ("version", "apply", "snapshot", "restore", "live_refs")


def machine_factory(own: Mapping[str, str]) -> MachineFactory:
    """Return machines by name: the built-in ones, and `own`, each "module:Class", made with a group's arguments by
    keyword.

    Raises `BadRequest` naming the key."""
    classes = {name: _load(name, place) for name, place in own.items()}

    def made(name: str, arguments: dict[str, Any]) -> Machine:
        if name not in classes:
            return create_machine(name, arguments)
        try:
            return classes[name](**arguments)
        except TypeError as error:
            raise BadRequest(f"machine {name!r}: {error}") from error

    return made


def _load(name: str, place: str) -> type[Machine]:
    key = f"machines.{name}"
    if _is_built_in(name):
        raise BadRequest(f"{key}: logyard has a machine of that name", key=key)
    module, _, attribute = place.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise BadRequest(f"{key} = {place!r}: {error}", key=key) from error
    missing = [part for part in REQUIRED if not hasattr(found, part)]
    if not isinstance(found, type) or missing:
        lacks = f", it lacks {' and '.join(missing)}" if missing else ""
        raise BadRequest(
            f"{key} = {place!r}: not a machine's class{lacks} (see docs/guides/writing-a-machine.md)", key=key
        )
    return found


def _is_built_in(name: str) -> bool:
    """Return whether the registry knows a name, with whatever arguments."""
    try:
        create_machine(name, {})
    except BadRequest as error:
        return not str(error).startswith(f"no machine is called {name!r}")
    return True
