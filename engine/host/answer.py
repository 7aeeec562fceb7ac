"""The sink of a caller inside this process: one frame's outcome, awaited.

Invariant: it is answered once, in a turn; waiting raises what the answer says went wrong. Called by `system` for
commands of the engine's own and by `service.node`.
"""

from __future__ import annotations

import trio

from logyard.protocol.errors import decode_error


class Answer:
    """A sink for one frame."""

    __slots__ = ("_event", "_status", "_data")

    def __init__(self) -> None:
        self._event = trio.Event()
        self._status = 0
        self._data = b""

    def reply(self, request: int, status: int, data: bytes) -> None:
        """Called once, in a turn."""
        self._status, self._data = status, data
        self._event.set()

    async def wait(self) -> bytes:
        """The machine's reply. Raises the error that came instead."""
        await self._event.wait()
        if self._status:
            raise decode_error(self._data)
        return self._data
