"""The verbs of the KV machine's clients: questions, watches.

Commands are frames like any others; these are what needs more than the machine: payloads of values, and time to wait.
Used by `dispatch`; `pushes` has the one that listens.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

from logyard.engine.types import Buffer

from ..kv.watch import WatchSink
from .scan_calls import Data


class KvPort(Protocol):
    """What these verbs need of a node; `service.kv.verbs.KvVerbs` is it."""

    async def fetch(self, name: str, requests: list[bytes], consistency: str) -> tuple[dict[str, Any], list[Buffer]]:
        """Ask a group's machine questions whose answers name payloads."""

    async def events(
        self, name: str, key: bytes, end: bytes, flags: int, start: int, wait_s: float, consistency: str, skip: int = 0
    ) -> tuple[dict[str, Any], list[Buffer]]:
        """Return what a watch sees from a revision on."""

    async def listen(self, name: str, stream: int, add: list[Any], local: bool, sink: WatchSink) -> object:
        """Push what watches see."""

    def change(self, stream: int, add: list[Any], remove: list[int], close: bool) -> object:
        """Give a stream more watches, or less, or end it."""


class HasKv(Protocol):
    """A node."""

    kv: KvPort


async def _fetch(system: HasKv, name: str, requests: list[bytes], consistency: str) -> Data:
    return Data(*await system.kv.fetch(name, requests, consistency))


async def _events(
    system: HasKv, name: str, key: bytes, end: bytes, flags: int, start: int, wait_s: float, consistency: str, skip: int
) -> Data:
    return Data(*await system.kv.events(name, key, end, flags, start, wait_s, consistency, skip))


async def _change(system: HasKv, stream: int, add: list[Any], remove: list[int], close: bool) -> object:
    return system.kv.change(stream, add, remove, close)


KV_CALLS: Mapping[str, Callable[..., Awaitable[object]]] = MappingProxyType(
    {"fetch": _fetch, "kv_events": _events, "kv_change": _change}
)
