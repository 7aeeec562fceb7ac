"""Machines by name: what `create --machine NAME` and a group's stored definition mean."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from logyard.engine.machine import Machine
from logyard.protocol.errors import BadRequest

from .catalog import Catalog
from .catalog.topics_alone import TopicsAlone
from .groups import Groups
from .kv import KV
from .log import AppendLog
from .queue import Queue
from .queue.options import queue_options

BUILT_IN: Mapping[str, type[Machine]] = MappingProxyType(
    {"log": AppendLog, "kv": KV, "queue": Queue, "groups": Groups, "topics": TopicsAlone}
)
START_MAX = (1 << 62) - 1
NUMBER_MAX = (1 << 62) - 1


def create_machine(name: str, arguments: dict[str, Any]) -> Machine:
    """Return a fresh machine. Raises `BadRequest` for an unknown name or unknown arguments."""
    if name == "kv":
        return _kv(arguments)
    if name == "queue":
        return Queue(queue_options(arguments))
    if name == "catalog":
        return Catalog()
    if name == "groups":
        return Groups(**_numbers(name, arguments, ("rebalance_ms", "idle_ms")))
    if name == "topics":
        return TopicsAlone(**_numbers(name, arguments, ()))
    if name != "log":
        raise BadRequest(f"no machine is called {name!r}; there are: {', '.join(sorted(BUILT_IN))}")
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
    return KV(**_numbers("kv", arguments, ("history", "history_bytes")))


def _numbers(machine: str, arguments: dict[str, Any], known: tuple[str, ...]) -> dict[str, int]:
    """Return arguments that are all numbers. Raises `BadRequest`."""
    unknown = sorted(arguments.keys() - set(known))
    if unknown:
        said = f"; there are: {', '.join(known)}" if known else ""
        shown = {"kv": "the KV machine"}.get(machine, f"machine {machine!r}")
        raise BadRequest(f"{shown} has no argument {unknown[0]!r}{said}")
    for name, value in arguments.items():
        if not (type(value) is int and 0 <= value <= NUMBER_MAX):
            raise BadRequest(f"{name} is a number from 0 to {NUMBER_MAX}")
    return arguments
