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
    # What clients do with payloads is no business of the machine's: it is told to them with the log's place.
    if arguments.keys() - {"compress"} or arguments.get("compress", "none") not in ("none", "zstd"):
        raise BadRequest(f"the append log takes compress ('zstd' or 'none') and nothing else, not {arguments}")
    return AppendLog()
