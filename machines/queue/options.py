"""What a queue is created with: part of its group's definition, so the same on every member and for good.

Used by `machines.queue` and its parts, and by `machines.registry`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from logyard.protocol.errors import BadRequest

OVERFLOW = ("drop_head", "reject")
OPTION_MAX = (1 << 53) - 1


class QueueOptions(NamedTuple):
    """What a queue is created with. Times in ms, 0: never; lengths 0: no bound."""

    max_length: int = 0
    max_bytes: int = 0
    overflow: str = "drop_head"
    ttl_ms: int = 0
    expires_ms: int = 0
    delivery_limit: int = 20
    dead_letters: bool = True
    dead_max_length: int = 100_000
    delayed_max: int = 100_000
    single_active: bool = False
    lease_ms: int = 1_800_000


def queue_options(arguments: Mapping[str, Any]) -> QueueOptions:
    """Return the options by name. Raises `BadRequest` for one that is unknown or out of its range."""
    defaults = QueueOptions()._asdict()
    for name, value in arguments.items():
        default = defaults.get(name)
        if default is None:
            raise BadRequest(f"a queue has no argument {name!r}; there are: {', '.join(defaults)}")
        if name == "overflow":
            if value not in OVERFLOW:
                raise BadRequest(f"overflow is one of {', '.join(OVERFLOW)}, not {value!r}")
        elif type(value) is not type(default) or (type(value) is int and not 0 <= value <= OPTION_MAX):
            kind = "true or false" if type(default) is bool else f"a number from 0 to {OPTION_MAX}"
            raise BadRequest(f"{name} is {kind}, not {value!r}")
    if arguments.get("lease_ms") == 0:
        raise BadRequest("lease_ms is at least 1: a message is not held for ever")
    return QueueOptions(**{**defaults, **arguments})
