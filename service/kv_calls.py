"""The verbs of the KV machine's clients: questions, watches.

Commands are frames like any others; these are what needs more than the machine: payloads of values, and time to wait.
Used by `rpc_calls`, and by `rpc` for the one that listens.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

from logyard.engine.types import Buffer
from logyard.protocol.errors import BadRequest

from .kv_watch import WatchSink
from .rpc_arguments import Asked
from .rpc_scans import Data

REQUESTS_MAX = 4096


class KvPort(Protocol):
    """What these verbs need of a node; `service.kv_verbs.KvVerbs` is it."""

    async def fetch(self, name: str, requests: list[bytes], consistency: str) -> tuple[dict[str, Any], list[Buffer]]:
        """Ask a group's machine questions whose answers name payloads."""

    async def events(
        self, name: str, key: bytes, end: bytes, flags: int, start: int, wait_s: float, consistency: str
    ) -> tuple[dict[str, Any], list[Buffer]]:
        """What a watch sees from a revision on."""

    async def listen(self, name: str, stream: int, add: list[Any], local: bool, sink: WatchSink) -> object:
        """Push what watches see."""

    def change(self, stream: int, add: list[Any], remove: list[int], close: bool) -> object:
        """More watches for a stream, or less, or the end of it."""


class HasKv(Protocol):
    """A node."""

    kv: KvPort


def _list(asked: Asked, key: str, kind: type, limit: int) -> list[Any]:
    found = asked.any(key, [])
    if type(found) is not list or len(found) > limit or not all(type(one) is kind for one in found):
        raise BadRequest(f"{key} is a list of at most {limit} of type {kind.__name__}")
    return found


async def _fetch(system: HasKv, asked: Asked) -> Data:
    requests = _list(asked, "requests", bytes, REQUESTS_MAX)
    return Data(*await system.kv.fetch(asked.text("name"), requests, asked.text("consistency", "linearizable")))


async def _events(system: HasKv, asked: Asked) -> Data:
    return Data(
        *await system.kv.events(
            asked.text("name"), asked.raw("key"), asked.raw("end"), asked.number("flags", 0),
            asked.number("start", 0), asked.seconds("wait_s"), asked.text("consistency", "leader"),
        )
    )  # fmt: skip


async def _change(system: HasKv, asked: Asked) -> object:
    add, remove = _list(asked, "add", list, 65_536), _list(asked, "remove", int, 65_536)
    return system.kv.change(asked.number("stream", least=1), add, remove, asked.flag("close", False))


async def serve_watch(system: HasKv, asked: Asked, sink: WatchSink) -> object:
    """The verb that has a sink of its own. Raises when it is over."""
    add, local = _list(asked, "add", list, 65_536), asked.flag("local", False)
    return await system.kv.listen(asked.text("name"), asked.number("stream", least=1), add, local, sink)


Handler: TypeAlias = Callable[[Any, Asked], Awaitable[object]]

KV_CALLS: Mapping[str, Handler] = MappingProxyType({"fetch": _fetch, "kv_events": _events, "kv_change": _change})
