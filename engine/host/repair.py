"""Read repair: a payload that is missing here or does not match its hash, and was not released, comes from a peer.

Invariant: no byte is served that did not verify against the hash in its entry; what a peer sent is verified against
the hash that is known *here* wherever the entry's metadata is still readable. What came is written back to the current
generation, as the entry's new home, so that the damage is met once. Without a peer that has it the reader gets the
typed error it would have got. Called by `reader` for single units, and by the service where a lost home left a gap.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import trio

from ..entry import units_of
from ..errors import Corrupt, Gone, LogyardError
from ..ports import SourceEntry
from ..types import Buffer
from .member import Member
from .pieces import Piece
from .pulling import Sources, others
from .reader import Located, Wanted

if TYPE_CHECKING:
    from .system import System

log = logging.getLogger(__name__)

REPAIRS_MAX = 2
"""At a time; the others wait, and mostly find that what they miss is there again."""


class Repair:
    """Counters: entries fetched and written back, and reads that nobody could repair."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.fetched = 0
        self.failed = 0
        self._limit = trio.CapacityLimiter(REPAIRS_MAX)

    async def unit(self, member: Member, want: Wanted, error: LogyardError) -> Buffer:
        """The bytes of one wanted range that could not be read, for the reason `error`: raised again if no peer has
        them, or if they were released."""
        located, unit, start, stop = want
        if not self._lives(member, located, unit.number):
            raise error
        async with self._limit:
            try:
                return await self._again(member, want)
            except LogyardError:
                pass
            row = await self._fetch(member, located.index, located.data, error)
        data = row.read(unit.offset, unit.length)
        return memoryview(data)[start:stop]

    async def _again(self, member: Member, want: Wanted) -> Buffer:
        """Another reader may have repaired it while this one waited."""
        index = want.located.index
        found = next(self.system.reader.payload_entries(member, index, index), None)
        if found is None or found.index != index or found.data != want.located.data or found.home == want.located.home:
            raise Gone(f"the payload of entry {index} is still missing")
        return (await self.system.reader.read(member, [want._replace(located=found)], mend=False))[0]

    def _lives(self, member: Member, located: Located, number: int) -> bool:
        units = [(unit.number, unit.first_ordinal, unit.records) for unit in units_of(located.data)]
        return member.resolves and number in member.liveness.live_units(located.index, units)

    async def _fetch(self, member: Member, index: int, data: bytes, error: LogyardError) -> SourceEntry:
        sources = self._sources(member)
        while node := sources.next():
            try:
                piece = await self.system.pulls.ask(node, member.uid, 0, [(index, index)])
                row = next((row for row in piece.rows if row.index == index and row.data == data), None)
                if row is None:
                    raise Corrupt(f"an answer of node {node}", 0, f"entry {index}", "another")
            except LogyardError as failed:
                log.warning("group %s: entry %d from node %d: %s", member.spec.name, index, node, failed)
                sources.fail(node)
                continue
            await self._write_back(member, [row])
            return row
        self.failed += 1
        raise error

    def _sources(self, member: Member) -> Sources:
        return Sources(others(self.system, member.raft.configuration))

    async def stretch(self, member: Member, first: int, last: int) -> int:
        """Fetch everything that lives of the entries first..last anew: a home is lost, and nobody knows what was in it.
        Returns how many entries came; 0 when no peer has them."""
        return (await self._stretch(member, first, last))[0]

    async def whole(self, member: Member, first: int, last: int) -> bool:
        """The same; whether all of it came, and is stored."""
        return (await self._stretch(member, first, last))[1]

    async def _stretch(self, member: Member, first: int, last: int) -> tuple[int, bool]:
        if not member.resolves:
            return 0, False
        came, stored = 0, True
        sources = self._sources(member)
        async with self._limit:
            while first <= last and (node := sources.next()):
                try:
                    piece = await self.system.pulls.ask(node, member.uid, 0, [(first, last)])
                    if piece.through < first:
                        raise Corrupt(f"an answer of node {node}", 0, f"entry {first}", piece.through)
                except LogyardError as failed:
                    log.warning("group %s: entries from %d from node %d: %s", member.spec.name, first, node, failed)
                    sources.fail(node)
                    continue
                found = self._alive(member, piece)
                if found:
                    came += len(found)
                    stored = await self._write_back(member, found) and stored
                first = piece.through + 1
        self.failed += first <= last
        return came, stored and first > last

    def _alive(self, member: Member, piece: Piece) -> list[SourceEntry]:
        """What of a piece lives here, and is of the very entry that the log has, as far as that is known."""
        found = []
        for row in piece.rows:
            units = [(unit.number, unit.first_ordinal, unit.records) for unit in units_of(row.data)]
            live = member.liveness.live_units(row.index, units) & (row.live or set())
            if live and member.raft.log.term(row.index) in (None, row.term):
                found.append(row._replace(live=live))
        return found

    async def _write_back(self, member: Member, found: Sequence[SourceEntry]) -> bool:
        """A home in the current generation. What can't be stored is served all the same. False: it is not stored."""
        self.fetched += len(found)
        if found[-1].index > member.raft.commit or member.raft.stopped:
            return False
        storage = self.system.storage
        try:
            await storage.store_payloads(member, found, dense=True)
            await storage.books.commit(tuple, store=True)
            for file in storage.files.values():
                # Its damaged entries have another home now: it may be emptied after all.
                file.failed = file.failed and member.uid not in file.shares
        except LogyardError as error:
            log.warning("group %s: what was repaired is not written back: %s", member.spec.name, error)
            return False
        return True
