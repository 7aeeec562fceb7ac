"""Appends under way, as the asynchronous client hands them out: one small object an append, all its state in its batch.

Invariant: what is asked of it before it is done is a bug of the caller's; when done its answer never changes. Made by
`aio.Log`.
"""

from __future__ import annotations

from collections.abc import Callable

from .lane import Batch
from .log import Place


class PendingAppend:
    """An append under way. Thousands share one `batch`: callbacks that need no single offset belong there."""

    __slots__ = ("batch", "position")

    def __init__(self, batch: Batch, position: int) -> None:
        self.batch = batch
        self.position = position

    @property
    def done(self) -> bool:
        """Acknowledged or failed."""
        return self.batch.done

    @property
    def offset(self) -> int:
        """The record's offset; raises what the append failed with. Only once `done`."""
        assert self.batch.done, "an append has its offset when it is done"
        if self.batch.error is not None:
            raise self.batch.error.again()
        return self.batch.first + self.position if self.batch.first >= 0 else -1

    @property
    def place(self) -> Place:
        """Where the command lies, for ``reply="append"``; raises what it failed with. Only once `done`."""
        if self.batch.error is not None:
            raise self.batch.error.again()
        return Place(*self.batch.place)

    def on_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` when done, from within the receiving task: it must not block."""
        if self.batch.done:
            callback()
        else:
            self.batch.callbacks.append(callback)

    async def wait(self) -> int:
        """Wait for the offset."""
        await self.batch.wait()
        return self.offset
