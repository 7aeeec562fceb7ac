"""Payloads whose home is gone come back from peers without waiting for a reader: of a generation that was set aside or
fails (the journal of law 7), or of entries whose place in a sealed file can't be read any more.

Invariant: which entries are concerned is stored, in the payload store's rows, in the same commit as the rows that know
their home no more, and stays stored until all that lives of them is here again, or is dead: until then this member does
not answer for them (`serving`), also after a restart. One task, one stretch at a time, at the rate of all pulls
(`pulling`). Called by `homes` and the ticker.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Container

import trio

from logyard.protocol.errors import LogyardError

from ..ports import StorePort
from ..replica.member import RUNNING, Member
from .repair import Repair

log = logging.getLogger(__name__)

RETRY_SECONDS = 5.0


class Refill:
    """The way back of what the payload store has lost. `refilled`: stretches that are whole again; `at_work`: until
    all that came back is stored. `find` wakes a group's member, `commit` stores what the payload store has to say,
    `owe` lets it go with the next commit; `barred` groups wait for their definition."""

    def __init__(
        self,
        store: StorePort,
        repair: Repair,
        find: Callable[[int], Member | None],
        barred: Container[int],
        commit: Callable[[], Awaitable[None]],
        owe: Callable[[], None],
        spawn: Callable[..., None],
    ) -> None:
        self._store = store
        self._repair = repair
        self._find = find
        self._barred = barred
        self._commit = commit
        self._owe = owe
        self._spawn = spawn
        self.refilled = 0
        self.at_work = False
        self._not_before = 0.0

    def lose(self, uid: int, first: int, last: int) -> None:
        """Note that nobody can tell any more where the payloads of these entries are here."""
        log.error("group %016x: the places of the payloads of entries %d to %d are lost", uid, first, last)
        self._store.lose(uid, first, last)
        self._owe()

    def look(self) -> None:
        """Look, once a second, for something to do."""
        if not self.at_work and trio.current_time() >= self._not_before and self._store.lost_ranges():
            self.at_work = True
            self._spawn(self._run)

    async def _run(self) -> None:
        store = self._store
        try:
            before = store.lost_ranges()
            for uid, first, last in before:
                await self._stretch(uid, first, last)
            if store.lost_ranges() != before:
                await self._commit()
        except LogyardError as error:
            log.warning("payloads that were lost are not back yet: %s", error)
        finally:
            self.at_work = False
            self._not_before = trio.current_time() + RETRY_SECONDS * bool(store.lost_ranges())

    async def _stretch(self, uid: int, first: int, last: int) -> None:
        store = self._store
        member = self._find(uid)
        if member is None:
            if uid not in self._barred:
                store.found(uid, first, last)
        elif self._may_ask(member, last) and store.lost(uid, first, last):
            await self._repair.stretch(member, first, last)
            self.refilled += not store.lost(uid, first, last)

    def _may_ask(self, member: Member, last: int) -> bool:
        raft = member.raft
        return member.state == RUNNING and raft.mend is None and member.resolves and raft.applied >= last

    def status(self) -> dict[str, int]:
        """Count stretches of entries that are lost, and those that came back."""
        return {"lost": len(self._store.lost_ranges()), "refilled": self.refilled}
