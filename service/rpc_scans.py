"""The verbs of a CALL frame that concern many logs at once (see `client.scans`): arguments checked, one call each."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias

from logyard.client.scans import LOG_ROWS, Range
from logyard.engine.types import Buffer
from logyard.protocol.errors import BadRequest

from .rpc_arguments import Asked


class Data(NamedTuple):
    """An answer with raw bytes."""

    header: dict[str, Any]
    parts: Sequence[Buffer]


class ScanPort(Protocol):
    """What these verbs need of a node."""

    node_id: int

    async def log_rows(self, after: str, names: Sequence[str] | None, limit: int) -> Sequence[Sequence[Any]]:
        """The append logs of this node, by name."""

    async def scan(
        self, ranges: Sequence[Range], max_bytes: int, max_records: int, body_bytes: int | None
    ) -> tuple[dict[str, Any], Sequence[Buffer]]:
        """Columns of records of many logs."""

    async def audit(self, name: str, uid: int, index: int, offset: int, max_bytes: int) -> Mapping[str, Any]:
        """A step of an audit."""

    async def seek(self, times: Sequence[tuple[str, int, int]]) -> Sequence[object]:
        """Offsets by time."""


async def _logs(system: ScanPort, asked: Asked) -> object:
    limit = min(asked.number("limit", LOG_ROWS, least=1), LOG_ROWS)
    return await system.log_rows(asked.text("after", " "), asked.optional_names("names"), limit)


async def _scan(system: ScanPort, asked: Asked) -> Data:
    ranges, body_bytes = asked.ranges("ranges"), asked.optional_number("body_bytes")
    size, records = asked.number("max_bytes", least=1), asked.number("max_records", least=1)
    header, parts = await system.scan(ranges, size, records, body_bytes)
    return Data(header, parts)


async def _seek(system: ScanPort, asked: Asked) -> object:
    return await system.seek([(name, uid, stamp) for name, uid, stamp, _ in asked.ranges("times", 3)])


async def _audit(system: ScanPort, asked: Asked) -> object:
    found = asked.ranges("range")
    if len(found) != 1:
        raise BadRequest("an audit is of one range")
    return await system.audit(*found[0], asked.number("max_bytes", least=1))


ScanHandler: TypeAlias = Callable[[ScanPort, Asked], Awaitable[object]]

SCANS: Mapping[str, ScanHandler] = MappingProxyType({"logs": _logs, "scan": _scan, "seek": _seek, "audit": _audit})
