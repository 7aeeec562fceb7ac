"""Read repair: a payload that is missing here or does not match its hash, and was not released, comes from a peer.

Invariant: no byte is served that did not verify against the hash in its entry; what a peer sent is verified against
the hash that is known *here* wherever the entry's metadata is still readable. What came is written back to the current
generation, as the entry's new home, so that the damage is met once. Without a peer that has it the reader gets the
typed error it would have got. Called by `reader` for single units, and by the service where a lost home left a gap.

Payloads whose home is gone come back without waiting for a reader (`Refill`): of a generation that was set aside or
fails (the journal of law 7), or of entries whose place in a sealed file can't be read any more. Invariant: which
entries are concerned is stored, in the payload store's rows, in the same commit as the rows that know their home no
more, and stays stored until all that lives of them is here again, or is dead: until then this member does not answer
for them (`snapshot_sender`), also after a restart. One task, one stretch at a time, at the rate of all pulls (`pull`).
Called by `liveness_accounting` and the ticker.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Container, Iterable, Iterator, Sequence
from typing import Protocol

import trio

from logyard.protocol.errors import Corrupt, Gone, LogyardError

from ..entry import units_of
from ..ports import SourceEntry, StorePort
from ..replica.member import RUNNING, Member
from ..replica.reader import Located, Wanted
from ..transfer.pull import Pulls, Sources, live_digest
from ..types import Buffer

log = logging.getLogger(__name__)

REPAIRS_MAX = 2
"""At a time; the others wait, and mostly find that what they miss is there again."""


class Reader(Protocol):
    """What repair needs of the reader."""

    def payload_entries(self, member: Member, first: int, last: int) -> Iterator[Located]:
        """Yield the entries with payload, and where they are."""
        ...

    async def read(self, member: Member, wanted: Sequence[Wanted], mend: bool = True) -> list[Buffer]:
        """Return the bytes of each wanted range, verified."""
        ...


class PayloadRepair:
    """Counters: entries fetched and written back, and reads that nobody could repair. `write_back` makes whole entries
    durable here, rising, as their only home."""

    def __init__(
        self,
        pulls: Pulls,
        reader: Reader,
        store: StorePort,
        write_back: Callable[[Member, Sequence[SourceEntry]], Awaitable[None]],
    ) -> None:
        self.fetched = 0
        self.failed = 0
        self._pulls = pulls
        self._reader = reader
        self._store = store
        self._store_rows = write_back
        self._limit = trio.CapacityLimiter(REPAIRS_MAX)

    async def unit(self, member: Member, want: Wanted, error: LogyardError) -> Buffer:
        """Return the bytes of one wanted range that could not be read, for the reason `error`: raised again if no
        peer has them, or if they were released."""
        located, unit, start, stop = want
        if not self._lives(member, located, unit.number):
            raise error
        async with self._limit:
            try:
                return await self._again(member, want)
            except LogyardError:
                pass
            row = await self._fetch(member, located, unit.number, error)
        data = row.read(unit.offset, unit.length)
        return memoryview(data)[start:stop]

    async def _again(self, member: Member, want: Wanted) -> Buffer:
        """Read once more: another reader may have repaired it while this one waited."""
        index = want.located.index
        found = next(self._reader.payload_entries(member, index, index), None)
        if found is None or found.index != index or found.data != want.located.data or found.home == want.located.home:
            raise Gone(f"the payload of entry {index} is still missing")
        return (await self._reader.read(member, [want._replace(located=found)], mend=False))[0]

    def _lives(self, member: Member, located: Located, number: int) -> bool:
        units = [(unit.number, unit.first_ordinal, unit.records) for unit in units_of(located.data)]
        return member.resolves and number in member.liveness.live_units(located.index, units)

    async def _fetch(self, member: Member, located: Located, number: int, error: LogyardError) -> SourceEntry:
        """Return the entry from a peer by which this unit of it lives: one that has applied more may have it no
        more."""
        sources, index = self._sources(member), located.index
        while node := sources.next():
            try:
                piece = await self._pulls.ask(node, member.uid, 0, [(index, index)])
                row = next((row for row in piece.rows if row.index == index and row.data == located.data), None)
                if row is None or number not in (row.live or ()):
                    raise Corrupt(f"an answer of node {node}", 0, f"unit {number} of entry {index}", "others")
            except LogyardError as failed:
                log.warning("group %s: entry %d from node %d: %s", member.spec.name, index, node, failed)
                sources.fail(node)
                continue
            await self._write_back(member, [row])
            return row
        self.failed += 1
        raise error

    def _sources(self, member: Member) -> Sources:
        return Sources(self._pulls.others(member.raft.configuration))

    async def stretch(self, member: Member, first: int, last: int) -> int:
        """Fetch everything that lives of the entries first..last anew: a home is lost, and nobody knows what was in it.
        Returns how many entries came; 0 when no peer has them."""
        if not member.resolves:
            return 0
        came = 0
        sources = self._sources(member)
        async with self._limit:
            while first <= last and (node := sources.next()):
                try:
                    piece = await self._pulls.ask(node, member.uid, 0, [(first, last)])
                    if piece.through < first:
                        raise Corrupt(f"an answer of node {node}", 0, f"entry {first}", piece.through)
                except LogyardError as failed:
                    log.warning("group %s: entries from %d from node %d: %s", member.spec.name, first, node, failed)
                    sources.fail(node)
                    continue
                came += len(piece.rows)
                stored = await self._write_back(member, piece.rows)
                # Entries without payload leave no trace: that the rest of a lost stretch is of those can only be said
                # by who has all that lives of it.
                there = [(first, min(last, piece.through))]
                if stored == len(piece.rows) and piece.live == live_digest(member.liveness, there):
                    self._store.found(member.uid, *there[0])
                first = piece.through + 1
                sources.came()
        self.failed += first <= last
        return came

    def _whole(self, member: Member, rows: Iterable[SourceEntry]) -> list[SourceEntry]:
        """Return those that bring all that lives here of the very entry that the log has, as far as that is known: what
        a home in a generation lacks is not looked for elsewhere."""
        found = []
        for row in rows:
            units = [(unit.number, unit.first_ordinal, unit.records) for unit in units_of(row.data)]
            live = member.liveness.live_units(row.index, units)
            if live and live <= (row.live or set()) and member.raft.log.term(row.index) in (None, row.term):
                found.append(row._replace(live=live))
        return found

    async def _write_back(self, member: Member, rows: Sequence[SourceEntry]) -> int:
        """Give them a home in the current generation; return how many got one. What can't be stored is served all the
        same."""
        found = self._whole(member, rows)
        self.fetched += len(rows)
        if not found or found[-1].index > member.raft.commit or member.raft.stopped:
            return 0
        try:
            await self._store_rows(member, found)
        except (LogyardError, OSError) as error:
            log.warning("group %s: what was repaired is not written back: %s", member.spec.name, error)
            return 0
        return len(found)


RETRY_SECONDS = 5.0


class Refill:
    """The way back of what the payload store has lost. `refilled`: stretches that are whole again; `at_work`: until
    all that came back is stored. `find` wakes a group's member, `commit` stores what the payload store has to say,
    `owe` lets it go with the next commit; `barred` groups wait for their definition."""

    def __init__(
        self,
        store: StorePort,
        repair: PayloadRepair,
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
        except (LogyardError, OSError) as error:
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
