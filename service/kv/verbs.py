"""What a node does for clients of KV groups: the engine's part of `door.kv_calls`. Made by `node`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from logyard.engine.replica.member import Member
from logyard.engine.types import Buffer
from logyard.machines.kv.command import Refusal, end_of, key_of
from logyard.protocol.errors import BadRequest

from .reads import KvReads, header_of
from .tracks import Watch
from .watch import Watches, WatchSink

Consistent = Callable[[str, str], Awaitable[Member]]


class KvVerbs:
    """See the module. `consistent(name, consistency)` gives the member, when it may answer; a question waits for at
    most `wait_s_max`."""

    __slots__ = ("_consistent", "_node_id", "_reads", "_wait_s_max", "_watches")

    def __init__(
        self, node_id: int, wait_s_max: float, consistent: Consistent, reads: KvReads, watches: Watches
    ) -> None:
        self._node_id = node_id
        self._wait_s_max = wait_s_max
        self._consistent = consistent
        self._reads = reads
        self._watches = watches

    async def fetch(self, name: str, requests: list[bytes], consistency: str) -> tuple[dict[str, Any], list[Buffer]]:
        """See `KvReads.fetch`. `consistency`: local, leader, linearizable (one ReadIndex round for all)."""
        member = await self._consistent(name, consistency)
        answers = await self._reads.fetch(member, requests)
        return header_of(answers, self._node_id, member.raft.term), answers.parts

    async def events(
        self, name: str, key: bytes, end: bytes, flags: int, start: int, wait_s: float, consistency: str, skip: int = 0
    ) -> tuple[dict[str, Any], list[Buffer]]:
        """See `Watches.events`."""
        try:
            watch = Watch(0, key_of(key), end_of(end), flags)
        except Refusal as refusal:
            raise BadRequest(refusal.message) from None
        member = await self._consistent(name, consistency)
        return await self._watches.events(member, watch, start, min(wait_s, self._wait_s_max), skip)

    def listen(
        self, name: str, stream: int, add: list[Any], local: bool, sink: WatchSink
    ) -> Coroutine[Any, Any, object]:
        """See `Watches.listen`."""
        return self._watches.listen(name, stream, add, local, sink)

    def change(self, stream: int, add: list[Any], remove: list[int], close: bool) -> None:
        """See `Watches.change`."""
        self._watches.change(stream, add, remove, close)
