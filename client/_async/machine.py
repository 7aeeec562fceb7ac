"""A group of any machine, one's own too: commands and queries. Commands go the way of their face (`_send`).

Filled in by `machine.Machine` and `machine_sync.Machine`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from logyard.protocol.frame import Buffer

from ..log import query_call
from .caller import Caller


class MachineVerbs(ABC):
    """A group of any machine, of either face."""

    __slots__ = ("yard", "name")

    yard: Caller
    name: str

    @abstractmethod
    async def _send(self, command: bytes, metadata: Buffer, payload: Buffer | None, timeout: float | None) -> bytes:
        """Have a command applied; return its reply."""

    async def command(
        self, command: bytes, payload: Buffer | None = None, *, metadata: Buffer = b"", timeout: float | None = None
    ) -> bytes:
        """Have a command with one record applied, exactly once (at least once where the client is not `exactly_once`);
        return the machine's reply. Raises what the machine refused it with."""
        return await self._send(command, metadata, payload, timeout)

    async def query(
        self,
        request: bytes,
        *,
        node: int | None = None,
        consistency: str | None = None,
        staleness: float | None = None,
        index: int = 0,
        timeout: float | None = None,
    ) -> bytes:
        """Ask the machine's `query`. `node`, `consistency` and `staleness` as in `Log.poll`; `index`: not before it is
        applied there."""
        return await self.yard.run(query_call(self.name, request, node, consistency, index, staleness), timeout)

    async def describe(self, node: int | None = None) -> dict[str, Any]:
        """Describe everything about the group, as its leader (or member `node`) sees it."""
        return await self.yard.describe(self.name, node)
