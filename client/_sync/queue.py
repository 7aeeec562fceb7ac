# Made from client/_async/queue.py by `python -m logyard.client._async.generate`: change that file.
"""A queue: publish, cancel, purge, stats. Publications go the way of their face (`_send`, `_send_many`).

Filled in by `queue.Queue` and `queue_sync.Queue`, which have the consumers too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from logyard.protocol import queue as qw
from logyard.protocol.frame import Buffer

from ..log import query_call
from .caller import Caller


class QueueVerbs(ABC):
    """A queue of either face."""

    __slots__ = ("yard", "name")

    yard: Caller
    name: str

    # What a face fills in.

    @abstractmethod
    def _send(
        self, metadata: Buffer, body: Buffer | None, command: bytes, timeout: float | None
    ) -> int:  # fmt: skip
        """Send a message with that command; return its id."""

    @abstractmethod
    def _send_many(
        self, messages: Iterable[tuple[Buffer, Buffer | None]], command: bytes, timeout: float | None
    ) -> tuple[int, int]:
        """Send messages as one frame; return the first id (or what else the command counts), and how many were
        taken."""

    # Verbs.

    def publish(
        self,
        body: Buffer | None,
        *,
        metadata: Buffer = b"",
        priority: str = "normal",
        ttl: float | None = None,
        delay: float | None = None,
        at: float | None = None,
        timeout: float | None = None,
    ) -> int:
        """Publish a message; return its id once a quorum has it.

        `priority` ``normal`` or ``high``. Times in seconds: `ttl` how long it may wait; `delay`, or `at` (since 1970):
        when it becomes ready. Raises a `LogyardError`; with code ``queue_full`` where the queue refuses.
        """
        command = qw.publish_command(priority, ttl, delay, at)
        return self._send(metadata, body, command, timeout)

    def publish_many(
        self,
        messages: Iterable[tuple[Buffer, Buffer | None]],
        *,
        priority: str = "normal",
        ttl: float | None = None,
        delay: float | None = None,
        at: float | None = None,
        publisher: int = 0,
        sequence: int = 0,
        timeout: float | None = None,
    ) -> range:
        """Publish (metadata, body) pairs together or not at all; return their ids.

        With a `publisher` (its number) and the `sequence` of the first message, what the queue has had of that
        publisher already is not taken again: the ids are those of the others. What is not above its highest sequence
        counts as that, so await each publication of a publisher before you send its next one.
        """
        command = qw.publish_command(priority, ttl, delay, at, publisher, sequence)
        first, taken = self._send_many(messages, command, timeout)
        return range(first, first + taken)

    def cancel(self, *ids: int, timeout: float | None = None) -> int:
        """Take delayed messages back; return how many of them were not due yet."""
        return (self._send_many([(b"", None)], qw.cancel_command(ids), timeout))[0]

    def purge(
        self, *, ready: bool = True, delayed: bool = False, dead: bool = False, timeout: float | None = None
    ) -> int:
        """Drop what waits; return how many messages that were. What consumers hold stays."""
        return (self._send_many([(b"", None)], qw.purge_command(ready, delayed, dead), timeout))[0]

    def stats(self, *, timeout: float | None = None) -> dict[str, Any]:
        """Count messages and bytes by where they are, and all that came and went since the queue's beginning."""
        call = query_call(self.name, qw.STATS, None, "linearizable", 0, kind="queue")
        return qw.stats_of(self.yard.run(call, timeout))
