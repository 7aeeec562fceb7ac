"""What is durable beside the WAL's hot path, as whoever runs replicas sees it: when one goes, sleeps or is made anew,
and where the payloads go that come from elsewhere.

Invariant: a payload has its new home, durable and in the books, before its old one forgets it. The parts below are
composed by `system`, and shown here for the status.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import trio

from logyard.protocol.errors import LogyardError, NoSpace

from ..entry import Entry
from ..log import checkpoint_rows as rows
from ..log.compactor import Compactor
from ..log.gc_blockers import GcBlockers
from ..log.group_commit import GroupCommit
from ..log.janitor import Janitor
from ..log.liveness_accounting import LivenessAccounting
from ..log.location import Location, SealedFile
from ..log.meta_batch import MetaBatch
from ..log.segment_files import SegmentFiles
from ..log.segment_writer import SegmentWriter
from ..log.space import RETRY_S
from ..ports import SourceEntry, StorePort
from ..ranges import runs_of
from ..replica.member import Member


class Storage:
    """One node's. `forgotten(uid)`: nothing that came for a replica counts any more; `no_room(what, error)`: what has
    to be done found none."""

    def __init__(
        self,
        members: Mapping[int, Member],
        store: StorePort,
        durability: GroupCommit,
        books: MetaBatch,
        location: Location,
        segments: SegmentFiles,
        homes: LivenessAccounting,
        flush: SegmentWriter,
        migration: Compactor,
        holders: GcBlockers,
        janitor: Janitor,
        forgotten: Callable[[int], object],
        no_room: Callable[[str, NoSpace], object],
    ) -> None:
        self.jobs = store.jobs
        self.books = books
        self.location = location
        self.segments = segments
        self.homes = homes
        self.flush = flush
        self.migration = migration
        self.holders = holders
        self.janitor = janitor
        self.janitor_lock = janitor.lock
        self.look = janitor.look
        self.roll = janitor.roll
        self._members = members
        self._store = store
        self._durability = durability
        self._forgotten = forgotten
        self._no_room = no_room

    @property
    def files(self) -> dict[int, SealedFile]:
        """Sealed WAL files that are homes."""
        return self.location.files

    def unsealed(self) -> Iterator[tuple[int, Entry]]:
        """Yield (uid, entry) of every WAL file that has no segment yet."""
        return self.location.unsealed()

    def wal_live_bytes(self) -> int:
        """Return the live or pending payload bytes at home in WAL files."""
        return self.homes.live_bytes()

    def disk_bytes(self) -> int:
        """Return the allocated bytes of everything that holds payloads: WAL files (spares included) and generations."""
        return self._durability.wal.allocated_bytes() + self._store.disk_bytes()

    async def compact(self) -> dict[str, Any]:
        """Migrate and collect everything now; return what there is then."""
        files = await self.janitor.compact()
        return {
            "files": files,
            "live_bytes_in_wal": self.wal_live_bytes(),
            "live_bytes_in_generations": sum(one.live for one in self._store.generations()),
            "disk_bytes": self.disk_bytes(),
        }

    async def roll_out(self, member: Member) -> None:
        """Let a member's log go up to its snapshot: it goes as far as it is in segments, and who waits for that can't
        wait until a WAL file is full."""
        async with self.janitor_lock:
            if member.flushed < member.compactable and not member.raft.stopped:
                await self.roll()

    # Payloads that get a home in a generation

    async def store_payloads(self, member: Member, entries: Sequence[SourceEntry], dense: bool = False) -> None:
        """Store payloads that came from a peer, rising, durably in a generation, their home from now on. Between them
        nothing that has a home in a generation, or lives in this log, changes it; with `dense` nothing at all. Raises
        `NoSpace`, and `LogyardError` for a replica that went."""
        async with self.janitor_lock:
            if self._members.get(member.uid) is not member:
                raise LogyardError(f"group {member.uid:016x} does not run on this node any more")
            before = list(self._store.homes(member.uid))
            hides = self.homes.hidden_by(member, before, dense)
            runs = runs_of([one.index for one in entries], hides)
            self.homes.open_segments(member, runs)
            await self._store.write(
                [(member.uid, first, last) for first, last in runs],
                lambda _, low, high: [one for one in entries if low <= one.index <= high],
            )
            with self.jobs.switching(f"payloads of group {member.spec.name}"):
                for first, last in runs:
                    self.homes.rehomed(member, first, last, before)
                    self.homes.settle(member, first, last)

    async def write_back(self, member: Member, entries: Sequence[SourceEntry]) -> None:
        """Store repaired payloads, which bring all that lives of their entries, as `store_payloads`."""
        await self.store_payloads(member, entries, dense=True)
        await self.books.commit(tuple, store=True)
        mended = {run.segment for run in member.segments}
        for file in self.files.values():
            # Its damaged entries have another home now: it may be emptied after all.
            file.fail(file.failed and file.file not in mended)

    async def move(
        self,
        members: Sequence[Member],
        ranges: Sequence[tuple[int, int, int]],
        read: Callable[[int, int, int], Iterable[SourceEntry]],
    ) -> None:
        """Move payloads of several groups from WAL files to a generation: (uid, first, last) of each, one a member."""
        async with self.janitor_lock:
            here = [self._members.get(member.uid) is member for member in members]
            members = [member for member, is_here in zip(members, here, strict=True) if is_here]
            ranges = [one for one, is_here in zip(ranges, here, strict=True) if is_here]
            before = {member: list(self._store.homes(member.uid)) for member in members}
            for member, (_, first, last) in zip(members, ranges, strict=True):
                self.homes.open_segments(member, [(first, last)])
            await self._store.write(ranges, read)
            with self.jobs.switching("payloads of groups that go to sleep"):
                for member, (_, first, last) in zip(members, ranges, strict=True):
                    self.homes.rehomed(member, first, last, before[member])
                    self.homes.settle(member, first, last)

    # Replicas that go, sleep or are made anew

    async def forget(self, members: Sequence[Member], build: Callable[[], Iterable[rows.Put]]) -> None:
        """Let replicas go: `build` gives the rows that say so, their payloads are dead."""
        for member in members:
            self.flush.forget(member)
            self._forgotten(member.uid)
            self._store.delete_group(member.uid)
            self._durability.wal.forget(member.uid)
            for run in member.segments:
                file = self.files.get(run.segment)
                if file is not None:
                    file.remove(member.uid)
        await self._insist(build)
        for member in members:
            for run in member.segments:
                self.segments.leave(member, run.segment)

    async def _insist(self, build: Callable[[], Iterable[rows.Put]]) -> None:
        """Commit what is decided, and frees space: it waits for what it needs of it."""
        while True:
            try:
                await self.books.commit(build, store=True)
                return
            except NoSpace as error:
                self._no_room(str(error), error)
                self.look()
            await trio.sleep(RETRY_S)

    def slept(self, member: Member) -> None:
        """Store nothing more for a member that became a row."""
        self.flush.forget(member)
        self.books.forget(member)
        self.segments.forget(member)
        self._durability.wal.forget(member.uid)

    def forget_slept(self, count: int) -> None:
        """Let go of what the current WAL file still holds in memory of groups that became rows, `count` since the last
        time: when they may be a good part of it, as each look is at all of it."""
        wal, members = self._durability.wal, self._members
        entries = wal.current_entries
        if 16 * count >= len(entries) and not self._durability.busy:
            self._durability.let_go(pair for pair in entries if pair[0] not in members)
            wal.keep_only(members)

    async def void(self, uid: int) -> int:
        """Give up all that the WAL has of a group; return the newest batch's number. The janitor must rest."""
        return await self._durability.exclusive(lambda: self._void(uid))

    def restart(self, uid: int) -> int:
        """Let the log of a group, of which the WAL has nothing, begin anywhere; return the newest batch's number."""
        wal = self._durability.wal
        wal.restart(uid)
        return wal.position[0] - 1

    def _void(self, uid: int) -> int:
        wal = self._durability.wal
        wal.restart(uid)
        files = {file.file: file.entries for file in self.flush.unflushed.files()}
        files[wal.current] = wal.current_entries
        self._durability.leave_out(uid, files.values())
        self.segments.spoil(files.keys())
        return wal.position[0] - 1

    def take_over(self, old: Member, member: Member) -> None:
        """Put a member made anew, with less in segments, in an old one's place."""
        self.flush.forget(old)
        self.books.forget(old)
        self.segments.take_over(old, member)
        self.homes.recount(member)
