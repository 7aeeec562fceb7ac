"""Machines by name: what `create --machine NAME` and a group's stored definition mean."""

from __future__ import annotations

from typing import Any

from logyard.engine.errors import BadRequest
from logyard.engine.machine import Machine

from .log import AppendLog
from .queue import Queue
from .queue_options import queue_options

START_MAX = (1 << 62) - 1


def create_machine(name: str, arguments: dict[str, Any]) -> Machine:
    """A fresh machine. Raises `BadRequest` for an unknown name or unknown arguments."""
    if name == "queue":
        return Queue(queue_options(arguments))
    if name != "log":
        raise BadRequest(f"no machine is called {name!r}; there are: log, queue")
    # What clients do with payloads (`compress`) is told to them with the log's place; the machine knows nothing of it.
    unknown = sorted(arguments.keys() - {"start", "compress", "compact"})
    if unknown:
        raise BadRequest(f"the append log has no argument {unknown[0]!r}; there are: start, compress, compact")
    if arguments.get("compact", "none") not in ("none", "key"):
        raise BadRequest("compact is 'key' or 'none'")
    if arguments.get("compress", "none") not in ("none", "zstd"):
        raise BadRequest("compress is 'zstd' or 'none'")
    start = arguments.get("start")
    if start is not None and not (type(start) is int and 0 <= start <= START_MAX):
        raise BadRequest(f"start is an offset from 0 to {START_MAX}")
    return AppendLog(start, arguments.get("compact") == "key")
