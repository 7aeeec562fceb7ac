"""Payloads whose home is gone come back from peers without waiting for a reader: of a generation that was set aside or
fails (the journal of law 7), or of entries whose place in a sealed file can't be read any more.

Invariant: which entries are concerned is stored in the same commit as, or before, the rows that know their home no
more, and stays stored until all that lives of them is here again: until then this member does not answer for them
(`serving`), also after a restart. One task, one stretch at a time, at the rate of all pulls (`pulling`). Called by
`books`, `homes`, `recovery` and the ticker.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgpack
import trio

from ..errors import LogyardError
from . import rows
from .member import RUNNING, Member
from .pieces import Range, union

if TYPE_CHECKING:
    from .system import System

log = logging.getLogger(__name__)

RETRY_SECONDS = 5.0


class Refill:
    """What is lost of which group, and its way back. `refilled`: stretches that are whole again."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.refilled = 0
        self._stored: dict[int, list[Range]] = {}
        self._at_work = False
        self._not_before = 0.0

    def load(self) -> None:
        """At a start, when the store has its rows: what was lost before and is not back, and what is found lost now.
        BLOCKING."""
        meta = self.system.storage.books.meta
        for key, value in meta.scan(rows.LOST):
            uid = int.from_bytes(key[1:], "big")
            self._stored[uid] = [(first, last) for first, last in msgpack.unpackb(value)]
            for first, last in self._stored[uid]:
                self.system.store.lose(uid, first, last)
        puts = self.changes()
        if puts:
            meta.commit(puts)
            self.commit(puts)

    def lose(self, uid: int, first: int, last: int) -> None:
        """Nobody can tell any more where the payloads of these entries are here."""
        log.error("group %016x: the places of the payloads of entries %d to %d are lost", uid, first, last)
        self.system.store.lose(uid, first, last)

    def _lost(self) -> dict[int, list[Range]]:
        found: dict[int, list[Range]] = {}
        for uid, first, last in self.system.store.lost_ranges():
            found.setdefault(uid, []).append((first, last))
        return {uid: union(ranges) for uid, ranges in found.items()}

    def changes(self) -> list[rows.Put]:
        """Rows that differ from the stored ones."""
        lost = self._lost()
        uids = [uid for uid in lost.keys() | self._stored.keys() if lost.get(uid) != self._stored.get(uid)]
        return [rows.lost(uid, lost.get(uid, [])) for uid in sorted(uids)]

    def commit(self, puts: list[rows.Put]) -> None:
        """These are durable."""
        for key, value in puts:
            uid = int.from_bytes(key[1:], "big")
            self._stored.pop(uid, None)
            if value is not None:
                self._stored[uid] = [(first, last) for first, last in msgpack.unpackb(value)]

    def look(self) -> None:
        """Once a second: is there something to do?"""
        if not self._at_work and trio.current_time() >= self._not_before and self.system.store.lost_ranges():
            self._at_work = True
            self.system.nursery.start_soon(self._run)

    async def _run(self) -> None:
        try:
            for uid, ranges in self._lost().items():
                for first, last in ranges:
                    await self._stretch(uid, first, last)
            if self.changes():
                await self.system.storage.books.commit(tuple, store=True)
        except LogyardError as error:
            log.warning("payloads that were lost are not back yet: %s", error)
        finally:
            self._at_work = False
            self._not_before = trio.current_time() + RETRY_SECONDS * bool(self.system.store.lost_ranges())

    async def _stretch(self, uid: int, first: int, last: int) -> None:
        member = self.system.hibernation.find(uid)
        if member is None:
            if uid not in self.system.directory.barred:
                self.system.store.regained(uid, first, last)
            return
        if self._may_ask(member, last) and (
            not self.system.store.lost(uid, first, last) or await self.system.repair.whole(member, first, last)
        ):
            self.system.store.regained(uid, first, last)
            self.refilled += 1

    def _may_ask(self, member: Member, last: int) -> bool:
        raft = member.raft
        return member.state == RUNNING and raft.mend is None and member.resolves and raft.applied >= last

    def status(self) -> dict[str, int]:
        """Stretches of entries that are lost, and those that came back."""
        return {"lost": sum(map(len, self._lost().values())), "refilled": self.refilled}
