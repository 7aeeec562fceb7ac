"""Machines by name: what `create --machine NAME` and a group's stored definition mean."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from logyard.engine.machine import Machine
from logyard.protocol.errors import BadRequest

from .kv import KV
from .log import AppendLog
from .queue import Queue
from .queue.options import queue_options

BUILT_IN: Mapping[str, type[Machine]] = MappingProxyType({"log": AppendLog, "kv": KV, "queue": Queue})
START_MAX = (1 << 62) - 1
NUMBER_MAX = (1 << 62) - 1


def create_machine(name: str, arguments: dict[str, Any]) -> Machine:
    """Return a fresh machine. Raises `BadRequest` for an unknown name or unknown arguments."""
    if name == "kv":
        return _kv(arguments)
    if name == "queue":
        return Queue(queue_options(arguments))
    if name != "log":
        raise BadRequest(f"no machine is called {name!r}; there are: kv, log, queue")
    # What clients do with payloads (`compress`) is told to them with the log's place; the machine knows nothing of it.
    unknown = sorted(arguments.keys() - {"start", "compress", "compact", "stage"})
    if unknown:
        raise BadRequest(f"the append log has no argument {unknown[0]!r}; there are: start, compress, compact, stage")
    if arguments.get("compact", "none") not in ("none", "key"):
        raise BadRequest("compact is 'key' or 'none'")
    if arguments.get("compress", "none") not in ("none", "zstd"):
        raise BadRequest("compress is 'zstd' or 'none'")
    start = arguments.get("start")
    if start is not None and not (type(start) is int and 0 <= start <= START_MAX):
        raise BadRequest(f"start is an offset from 0 to {START_MAX}")
    if type(stage := arguments.get("stage", False)) is not bool:
        raise BadRequest("stage is true or false")
    return AppendLog(start, arguments.get("compact") == "key", stage)


def _kv(arguments: dict[str, Any]) -> KV:
    unknown = sorted(arguments.keys() - {"history", "history_bytes"})
    if unknown:
        raise BadRequest(f"the KV machine has no argument {unknown[0]!r}; there are: history, history_bytes")
    for name, value in arguments.items():
        if not (type(value) is int and 0 <= value <= NUMBER_MAX):
            raise BadRequest(f"{name} is a number from 0 to {NUMBER_MAX}")
    return KV(**arguments)
