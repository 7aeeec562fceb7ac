"""The product's KV machine and queue, which also say a hash of their whole state: what every member must agree on."""

from __future__ import annotations

import hashlib

import msgpack

from logyard.machines.kv import KV
from logyard.machines.queue import Queue
from logyard.machines.queue.options import queue_options

HASH = b""
"""The question for it."""


class HashedKV(KV):
    """A snapshot's history is cut into sections by what was restored: the revisions in it are hashed one by one."""

    def query(self, request: bytes) -> bytes:
        """As `KV`, and `HASH`."""
        if request != HASH:
            return super().query(request)
        frozen = self.freeze()
        state = (
            frozen.numbers, sorted(frozen.keys.items()), sorted(frozen.leases.items()),
            list(frozen.history.revisions()), [list(span) for one in self.live_refs() for span in one],
        )  # fmt: skip
        return hashlib.sha256(msgpack.packb(state)).digest()


class HashedQueue(Queue):
    """Its one section is its state."""

    def __init__(self, **arguments: object) -> None:
        super().__init__(queue_options(arguments))

    def query(self, request: bytes) -> bytes:
        """As `Queue`, and `HASH`."""
        if request != HASH:
            return super().query(request)
        return hashlib.sha256(b"".join(bytes(data) for data in self.snapshot().values())).digest()
