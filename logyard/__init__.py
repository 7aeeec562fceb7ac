"""logyard: many small Raft groups in one process, one write-ahead log, large payloads kept apart.

This is the small public face; each name is imported when it is first used (PEP 562). So `import logyard.client.sync`,
which runs on Spark executors, loads neither lmdb, trio nor the engine. Everything else is reached by its module, for
instance `from logyard.engine.machine import Machine`. Errors are one family, whoever raises them: `except logyard.Busy`
catches an embedded engine's and the network's.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .client.aio import connect
    from .client.sync import connect_sync
    from .machines.log import AppendLog
    from .protocol.errors import (
        BadRequest,
        Busy,
        Corrupt,
        DirectoryInUse,
        Gone,
        GroupExists,
        GroupStopped,
        JobFailed,
        JobPoisoned,
        LogyardError,
        NoSpace,
        NotLeader,
        Outdated,
        OutOfRange,
        Refused,
        SessionExpired,
        Unknown,
        UnknownGroup,
        WalFailed,
        WrongIdentity,
        WrongKind,
    )  # fmt: skip
    from .service.embedded import open_system

__all__ = [
    "AppendLog", "__version__", "connect", "connect_sync", "open_system",
    "BadRequest", "Busy", "Corrupt", "DirectoryInUse", "Gone", "GroupExists", "GroupStopped", "JobFailed",
    "JobPoisoned", "LogyardError", "NoSpace", "NotLeader", "OutOfRange", "Outdated", "Refused", "SessionExpired",
    "Unknown", "UnknownGroup", "WalFailed", "WrongIdentity", "WrongKind",
]  # fmt: skip

__version__ = "0.1.0.dev0"

_HOMES = MappingProxyType(
    {name: "logyard.protocol.errors" for name in __all__[5:]}
    | {
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
