"""logyard: many small Raft groups in one process, one write-ahead log, large payloads kept apart.

This is the small public face. The errors are one family, whoever raises them: `except logyard.Busy` catches an embedded
engine's and the network's. Every other name is imported when it is first used (PEP 562): `import logyard.client.sync`,
which runs on Spark executors, loads neither lmdb, trio nor the engine. What is not here is reached by its module, for
instance `from logyard.engine.machine import Machine`.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

from .protocol import errors as _errors
from .protocol.errors import *  # noqa: F403

if TYPE_CHECKING:
    from .client.aio import connect
    from .client.sync import connect_sync
    from .machines.log import AppendLog
    from .service.embedded import open_system

__all__ = ["AppendLog", "__version__", "connect", "connect_sync", "open_system"]
__all__ += _errors.__all__

__version__ = "0.1.0.dev0"

_HOMES = MappingProxyType(
    {
        "AppendLog": "logyard.machines.log",
        "connect": "logyard.client.aio",
        "connect_sync": "logyard.client.sync",
        "open_system": "logyard.service.embedded",
    }
)


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'logyard' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
