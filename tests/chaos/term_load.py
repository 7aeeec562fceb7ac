"""Leases and delays under chaos, in groups of their own: none is over before its time, by the clock of its client."""

from __future__ import annotations

import trio

from logyard.bench.terms import Terms
from logyard.protocol.errors import LogyardError

from .trio_load import STEP_S, TrioLoad

TERM_KV, TERM_QUEUE = "k-terms", "q-terms"


class TermLoad(TrioLoad):
    """Until the storm is over."""

    def prepare(self) -> None:
        """Before it starts: what the judge reads."""
        self.terms = Terms()

    async def work(self) -> None:
        """Both kinds, with a client each: one that waits does not hold up the other."""
        async with self.client() as one, self.client() as other, trio.open_nursery() as nursery:
            nursery.start_soon(self.terms.leases, one, TERM_KV, self.failed)
            nursery.start_soon(self.terms.deliveries, other, TERM_QUEUE, self.failed)
            while not self.stop.is_set():
                await trio.sleep(STEP_S)
            nursery.cancel_scope.cancel()

    def failed(self, error: LogyardError) -> None:
        """Count it."""
        self.journal.refusal(error)
