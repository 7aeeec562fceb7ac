"""What a group that goes to sleep still has in WAL files moves to a generation: a few payloads of many groups, in one
transaction.

Invariant: a payload has its new home, durable and in the books, before its old one forgets it; what is too much to copy
stays where it is until its file is migrated, and its group stays awake. Called by `quiesce`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..entry import units_of
from ..log.location import Location
from ..log.wal import Wal
from ..ports import SourceEntry, StorePort
from ..replica.member import Member
from ..replica.reader import Located, Reader
from .storage import Storage


def has_moved_out(store: StorePort, location: Location, member: Member) -> bool:
    """Return whether nothing that lives is at home in a WAL file without a segment: only a member in memory can locate
    that."""
    if any(member.uid in one.shares for one in location.files.values()):
        # Migration needs its liveness.
        return False
    for entry in reversed(member.raft.log.entries):
        if entry.index <= member.flushed:
            break
        lives = entry.body_bytes and not entry.tombstone and not member.is_dead(entry)
        if lives and store.home(member.uid, entry.index) is None:
            return False
    return True


class Leftovers:
    """The live payloads of some members at home in WAL files, found and pinned."""

    def __init__(self, store: StorePort, wal: Wal, location: Location, reader: Reader) -> None:
        self._store = store
        self._wal = wal
        self._location = location
        self._reader = reader
        self.sources: dict[Member, list[SourceEntry]] = {}
        self._pins: list[tuple[str, int]] = []

    def find(self, member: Member, bytes_max: int) -> bool:
        """Take a member's along, unless they are more than `bytes_max`, lie among what was migrated, or are not all
        committed."""
        if member.raft.commit < member.raft.log.last_index:
            # It came while the group waited for its turn: another leader may overwrite it, and the group stays awake.
            return False
        homes = self._store.homes(member.uid)
        above = homes[-1].last if homes else 0
        first = max(member.liveness.released_before.index, 1)
        found: list[SourceEntry] = []
        files: set[int] = set()
        size = 0
        for located in self._reader.payload_entries(member, first, member.raft.log.last_index):
            entry = located.entry
            if entry is None or entry.tombstone or not entry.body_bytes:
                continue
            units = [(unit.number, unit.first_ordinal, unit.records) for unit in units_of(entry.data)]
            live = member.liveness.live_units(entry.index, units)
            size += entry.body_bytes
            if live and (entry.index <= above or not entry.file or size > bytes_max):
                return False
            if live:
                files.add(entry.file)
                found.append(self._source(member.uid, located, live))
        for file in files:
            self._location.pin(("wal", file))
            self._pins.append(("wal", file))
        if found:
            self.sources[member] = found
        return True

    def _source(self, uid: int, located: Located, live: set[int]) -> SourceEntry:
        entry = located.entry
        assert entry is not None
        file, base = entry.file, entry.offset

        def read(offset: int, length: int) -> bytes:
            return self._wal.read_payload(file, base + offset, length)

        return SourceEntry(uid, entry.index, entry.term, entry.data, live, read)

    def ranges(self) -> list[tuple[int, int, int]]:
        """Return (uid, first, last) of what is to be copied."""
        return [(one.uid, found[0].index, found[-1].index) for one, found in self.sources.items()]

    def read(self, uid: int, first: int, last: int) -> Iterable[SourceEntry]:
        """Return the entries, in a thread."""
        by_uid = {member.uid: found for member, found in self.sources.items()}
        return [one for one in by_uid[uid] if first <= one.index <= last]

    def close(self) -> None:
        """End the pins."""
        for home in self._pins:
            self._location.unpin(home)
        self._pins.clear()


async def move_out(leftovers: Leftovers, storage: Storage, members: Sequence[Member], bytes_max: int) -> None:
    """Give what lives of these members in WAL files a home in the current generation, where it is at most `bytes_max`
    a group. Raises `NoSpace`, `Corrupt`."""
    try:
        for member in members:
            leftovers.find(member, bytes_max)
        if leftovers.sources:
            await storage.move(list(leftovers.sources), leftovers.ranges(), leftovers.read)
    finally:
        leftovers.close()
