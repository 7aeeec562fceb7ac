"""The newest answers of the catalogue, for whoever asks again.

They lie in shards, in the order in which they came. A full shard is never changed, only dropped as a whole, when it is
the oldest and those after it are as many, or as large, as are kept; so a snapshot writes the newest shard alone.
Invariant: what is kept follows from the commands, and a restored copy goes on like the one that gave the shards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import msgpack

SHARDS = "answers-"
"""How the names of shards begin."""
ANSWERS_MAX = 1024
BYTES_MAX = 2 << 20
SHARD_ANSWERS = 64
SHARD_BYTES = 8 << 10
"""A shard with so many answers, or so many bytes of them, is full."""


class _Shard:
    """Replies by request: a map while some come, then the bytes of one, not both."""

    __slots__ = ("number", "count", "bytes", "_replies", "_encoded")

    def __init__(self, number: int, encoded: bytes | None = None) -> None:
        self.number = number
        self._encoded = encoded
        self._replies: dict[bytes, bytes] | None = {} if encoded is None else None
        found = self.replies()
        self.count = len(found)
        self.bytes = sum(map(len, found.values()))

    def replies(self) -> dict[bytes, bytes]:
        """Return them, not to be changed."""
        return _replies(self._encoded or b"") if self._replies is None else self._replies

    def add(self, request: bytes, reply: bytes) -> None:
        self._replies = self.replies()
        self._replies[request] = reply
        self._encoded = None
        self.count += 1
        self.bytes += len(reply)

    def encode(self) -> bytes:
        """Return it as bytes, the same object while nothing is added."""
        if self._encoded is None:
            self._encoded, self._replies = msgpack.packb(list(self.replies().items())), None
        return self._encoded

    @property
    def full(self) -> bool:
        return self.count >= SHARD_ANSWERS or self.bytes >= SHARD_BYTES


class Answers:
    """Replies by request: `ANSWERS_MAX`, or `BYTES_MAX` of them, and what is above that in the oldest shard."""

    def __init__(self, shards: Mapping[str, bytes] | None = None) -> None:
        """Begin with nothing, or with what `shards` gave. Raises ValueError for a shard's name without its number."""
        # Before there were shards, one section had them all: it has no number.
        found = [_Shard(int(name[len(SHARDS) :] or 0), data) for name, data in (shards or {}).items()]
        self._shards = deque(sorted(found, key=lambda shard: shard.number))
        self._of = {request: shard for shard in self._shards for request in shard.replies()}
        self._bytes = sum(shard.bytes for shard in self._shards)

    def get(self, request: bytes) -> bytes | None:
        """Return the reply of a request, or None: it is new, or too old."""
        shard = self._of.get(request)
        return None if shard is None else shard.replies()[request]

    def put(self, request: bytes, reply: bytes) -> None:
        """Keep the reply of a new request."""
        if not self._shards or self._shards[-1].full:
            self._shards.append(_Shard(self._shards[-1].number + 1 if self._shards else 0))
        self._shards[-1].add(request, reply)
        self._of[request] = self._shards[-1]
        self._bytes += len(reply)
        while len(self._shards) > 1 and self._has_enough_without(self._shards[0]):
            oldest = self._shards.popleft()
            self._bytes -= oldest.bytes
            for gone in oldest.replies():
                del self._of[gone]

    def _has_enough_without(self, oldest: _Shard) -> bool:
        return len(self._of) - oldest.count >= ANSWERS_MAX or self._bytes - oldest.bytes >= BYTES_MAX

    def shards(self) -> dict[str, bytes]:
        """Return all, by names that begin with `SHARDS`; a shard that nothing happened to is the same object again."""
        return {f"{SHARDS}{shard.number}": shard.encode() for shard in self._shards}


def _replies(data: bytes) -> dict[bytes, bytes]:
    return {bytes(request): bytes(reply) for request, reply in msgpack.unpackb(data)}
