"""Appends under way, as the asynchronous client hands them out: one small object an append, a view of its frame's
pending reply.

Invariant: what is asked of it before it is done is a bug of the caller's; when done its answer never changes. Made by
`aio.Log`.
"""

from __future__ import annotations

from collections.abc import Callable

from .lane import Batch
from .log import Place


class PendingAppend:
    """An append under way. Thousands share one `batch`: callbacks that need no single offset belong to its `pending`
    reply."""

    __slots__ = ("batch", "position")

    def __init__(self, batch: Batch, position: int) -> None:
        self.batch = batch
        self.position = position

    @property
    def done(self) -> bool:
        """Acknowledged or failed."""
        return self.batch.pending.done

    @property
    def offset(self) -> int:
        """The record's offset; raises what the append failed with. Only once `done`."""
        pending = self.batch.pending
        assert pending.done, "an append has its offset when it is done"
        if pending.error is not None:
            raise pending.error.again()
        first: int = pending.value[0]
        return first + self.position if first >= 0 else -1

    @property
    def place(self) -> Place:
        """Where the command lies, for ``reply="append"``; raises what it failed with. Only once `done`."""
        return Place(*self.batch.pending.result().place)

    def on_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` when done, from within the receiving task: it must not block."""
        self.batch.pending.on_done(callback)

    async def wait(self) -> int:
        """Wait for the offset."""
        await self.batch.wait()
        return self.offset
