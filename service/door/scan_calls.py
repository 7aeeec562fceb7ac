"""The verbs of a CALL frame that concern many logs at once (see `client.scans`): one call each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from logyard.engine.types import Buffer
from logyard.protocol.verbs import Range


class Data(NamedTuple):
    """An answer with raw bytes."""

    header: dict[str, Any]
    parts: Sequence[Buffer]


class ScanPort(Protocol):
    """What these verbs need of a node."""

    node_id: int

    async def log_rows(self, after: str, names: Sequence[str] | None, limit: int) -> Sequence[Sequence[Any]]:
        """Return the append logs of this node, by name."""

    async def changed_logs(self, since: int) -> Sequence[object]:
        """Return the append logs of this node that changed since a mark."""

    async def scan(
        self, ranges: Sequence[Range], max_bytes: int, max_records: int, body_bytes: int | None
    ) -> tuple[dict[str, Any], Sequence[Buffer]]:
        """Return columns of records of many logs."""

    async def audit(self, name: str, uid: int, index: int, offset: int, max_bytes: int) -> Mapping[str, Any]:
        """Take a step of an audit."""

    async def seek(self, times: Sequence[tuple[str, int, int]]) -> Sequence[object]:
        """Return offsets by time."""


async def _scan(
    system: ScanPort, ranges: Sequence[Range], max_bytes: int, max_records: int, body_bytes: int | None
) -> Data:
    return Data(*await system.scan(ranges, max_bytes, max_records, body_bytes))


async def _seek(system: ScanPort, times: Sequence[Range]) -> object:
    return await system.seek([(name, uid, stamp) for name, uid, stamp, _ in times])


async def _audit(system: ScanPort, found: Sequence[Range], max_bytes: int) -> object:
    return await system.audit(*found[0], max_bytes)


SCANS: Mapping[str, Callable[..., Awaitable[object]]] = MappingProxyType(
    {"scan": _scan, "seek": _seek, "audit": _audit}
)
