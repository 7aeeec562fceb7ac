"""What a node does for clients of KV groups: the engine's part of `kv_calls`. Made by `node`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from logyard.engine.types import Buffer
from logyard.machines.kv.command import Refusal, end_of, key_of
from logyard.protocol.errors import BadRequest

from . import kv_reads, kv_watch
from .kv_tracks import Watch

if TYPE_CHECKING:
    from logyard.engine.host.engine import System
    from logyard.engine.replica.member import Member

Consistent = Callable[[str, str], "Awaitable[Member]"]


class KvVerbs:
    """See the module. `consistent(name, consistency)` gives the member, when it may answer."""

    __slots__ = ("_system", "_consistent", "_watches")

    def __init__(self, system: System, consistent: Consistent) -> None:
        self._system = system
        self._consistent = consistent
        self._watches = kv_watch.Watches(system)

    async def fetch(self, name: str, requests: list[bytes], consistency: str) -> tuple[dict[str, Any], list[Buffer]]:
        """See `kv_reads.fetch`. `consistency`: local, leader, linearizable (one ReadIndex round for all)."""
        member = await self._consistent(name, consistency)
        answers = await kv_reads.fetch(self._system, member, requests)
        return kv_reads.header_of(answers, self._system.node_id, member.raft.term), answers.parts

    async def events(
        self, name: str, key: bytes, end: bytes, flags: int, start: int, wait_s: float, consistency: str
    ) -> tuple[dict[str, Any], list[Buffer]]:
        """See `kv_watch.events`."""
        try:
            watch = Watch(0, key_of(key), end_of(end), flags)
        except Refusal as refusal:
            raise BadRequest(refusal.message) from None
        member = await self._consistent(name, consistency)
        wait_s = min(wait_s, self._system.config.poll_wait_s_max)
        return await kv_watch.events(self._system, member, watch, start, wait_s)

    async def listen(self, name: str, stream: int, add: list[Any], local: bool, sink: kv_watch.WatchSink) -> object:
        """See `kv_watch.Watches.listen`."""
        return await self._watches.listen(name, stream, add, local, sink)

    def change(self, stream: int, add: list[Any], remove: list[int], close: bool) -> None:
        """See `kv_watch.Watches.change`."""
        self._watches.change(stream, add, remove, close)
