"""What a group that goes to sleep still has in WAL files moves to a generation: a few payloads of many groups, in one
transaction.

Invariant: a payload has its new home, durable and in the books, before its old one forgets it; what is too much to copy
stays where it is until its file is migrated, and its group stays awake. Called by `quiesce`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Protocol

from ..entry import units_of
from ..ports import SourceEntry, StorePort
from ..replica.member import Member
from ..replica.reader import Located, Pins
from ..types import Buffer

Found = dict[Member, list[SourceEntry]]
Range = tuple[int, int, int]
"""(uid, first, last) of entries."""


class File(Protocol):
    """A sealed WAL file that is a home."""

    @property
    def shares(self) -> Container[int]:
        """Uids of the groups that have something in it."""
        ...

    @property
    def kept(self) -> bool:
        """Whether it stays for people to judge: it may be damaged, or gone."""
        ...


class Reader(Protocol):
    """What locates payloads."""

    def payload_entries(self, member: Member, first: int, last: int) -> Iterator[Located]:
        """Yield the entries with payload, and where they are."""
        ...


class PayloadFlush:
    """Moves what lives of some members in WAL files. `files`: those that are homes; `read(file, offset, length)` gives
    bytes of any; `move` makes entries durable in a generation, which is their home from then on."""

    def __init__(
        self,
        store: StorePort,
        files: Mapping[int, File],
        pins: Pins,
        reader: Reader,
        read: Callable[[int, int, int], Buffer],
        move: Callable[
            [Sequence[Member], Sequence[Range], Callable[[int, int, int], Iterable[SourceEntry]]], Awaitable[None]
        ],
        bytes_max: int,
    ) -> None:
        self._store = store
        self._files = files
        self._pins = pins
        self._reader = reader
        self._read = read
        self._move = move
        self._bytes_max = bytes_max

    def is_done(self, member: Member) -> bool:
        """Return whether nothing that lives is at home in a WAL file without a segment: only a member in memory can
        locate that."""
        if any(member.uid in one.shares for one in self._files.values()):
            # Migration needs its liveness.
            return False
        for entry in reversed(member.raft.log.entries):
            if entry.index <= member.flushed:
                break
            lives = entry.body_bytes and not entry.tombstone and not member.is_dead(entry)
            if lives and self._store.home(member.uid, entry.index) is None:
                return False
        return True

    async def run(self, members: Sequence[Member]) -> None:
        """Give what lives of these members in WAL files a home in the current generation, where it is at most
        `bytes_max` a group. Raises `NoSpace`, `Corrupt`."""
        found: Found = {}
        with ExitStack() as pins:
            for member in members:
                sources, files = self._find(member)
                for file in files:
                    self._pins.pin(("wal", file))
                    pins.callback(self._pins.unpin, ("wal", file))
                if sources:
                    found[member] = sources
            if found:
                ranges = [(one.uid, sources[0].index, sources[-1].index) for one, sources in found.items()]
                by_uid = {one.uid: sources for one, sources in found.items()}
                await self._move(
                    list(found), ranges,
                    lambda uid, first, last: [one for one in by_uid[uid] if first <= one.index <= last],
                )  # fmt: skip

    def _find(self, member: Member) -> tuple[list[SourceEntry], set[int]]:
        """Find what lives of a member in WAL files, and in which; nothing if it is more than `bytes_max`, lies among
        what was migrated or in a file that is kept, or is not all committed."""
        if member.raft.commit < member.raft.log.last_index:
            # It came while the group waited for its turn: another leader may overwrite it, and the group stays awake.
            return [], set()
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
            file = self._files.get(entry.file)
            stays = not entry.file or (file is not None and file.kept)
            if live and (entry.index <= above or stays or size > self._bytes_max):
                return [], set()
            if live:
                files.add(entry.file)
                found.append(self._source(member.uid, located, live))
        return found, files

    def _source(self, uid: int, located: Located, live: set[int]) -> SourceEntry:
        entry = located.entry
        assert entry is not None
        file, base, read = entry.file, entry.offset, self._read
        return SourceEntry(
            uid, entry.index, entry.term, entry.data, live, lambda offset, length: read(file, base + offset, length)
        )
