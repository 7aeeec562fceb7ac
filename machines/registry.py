"""Machines by name: what `create --machine NAME` and a group's stored definition mean."""

from __future__ import annotations

from typing import Any

from logyard.engine.errors import BadRequest
from logyard.engine.machine import Machine

from .log import AppendLog


def create_machine(name: str, arguments: dict[str, Any]) -> Machine:
    """A fresh machine. Raises `BadRequest` for an unknown name or unknown arguments."""
    if name != "log":
        raise BadRequest(f"no machine is called {name!r}; there is: log")
    if arguments:
        raise BadRequest(f"the append log takes no arguments, not {sorted(arguments)}")
    return AppendLog()
