"""What a node's log keeps of one group, when its replica goes, sleeps, is made anew, or has lost records.

Invariant: what says that a replica is gone is durable before its segments and its ring are let go, and it waits for the
room that it needs: it was decided, and frees space. Called by `replica_gc`, `quiesce` and `log_repair`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import trio

from logyard.protocol.errors import Busy, Corrupt, NoSpace

from ..entry import Entry
from ..replica.member import Member
from .checkpoint_rows import Put
from .group_commit import GroupCommit
from .janitor import Janitor
from .liveness_accounting import LivenessAccounting
from .meta_batch import MetaBatch
from .ring_files import RingFiles
from .segment_files import SegmentFiles
from .segment_writer import SegmentWriter
from .space import RETRY_S


class GroupLogs:
    """One node's. `forgotten(uid)`: nothing that came for a replica, and no payload of it, counts any more;
    `chunks_left(uid, names)`: the snapshot that named them is stored no more. Who holds `janitor_lock` has the files
    to itself."""

    def __init__(
        self,
        members: Mapping[int, Member],
        group_commit: GroupCommit,
        meta_batch: MetaBatch,
        segment_writer: SegmentWriter,
        segments: SegmentFiles,
        rings: RingFiles,
        accounting: LivenessAccounting,
        janitor: Janitor,
        forgotten: Callable[[int], object],
        chunks_left: Callable[[int, Sequence[bytes]], None],
    ) -> None:
        self.janitor_lock = janitor.lock
        self._members = members
        self._group_commit = group_commit
        self._meta_batch = meta_batch
        self._segment_writer = segment_writer
        self._segments = segments
        self._rings = rings
        self._accounting = accounting
        self._janitor = janitor
        self._forgotten = forgotten
        self._chunks_left = chunks_left

    async def forget(self, members: Sequence[Member], rows: Mapping[int, Callable[[], Iterable[Put]]]) -> None:
        """Let replicas go: `rows`, by uid, give the rows that say so, their payloads are dead. A uid may have none."""
        gone = {member.uid: member for member in members}
        for member in members:
            self._segment_writer.forget(member)
            self._forgotten(member.uid)
            self._group_commit.wal.forget(member.uid)
            self._accounting.forget(member)
        for uid, build in rows.items():
            # Not later: somebody may be made in its place as soon as that is stored.
            self._meta_batch.decide(build, partial(self._let_go, gone[uid]) if uid in gone else None)
        await self._insist()

    def _let_go(self, member: Member) -> None:
        """Give back what a replica had whose row is gone."""
        for run in member.segments:
            self._segments.leave(member, run.segment)
        if member.spec.is_system:
            self._rings.remove(member.uid)
        self.leave_chunks(member.uid, member.chunks)

    def leave_chunks(self, uid: int, names: Sequence[bytes]) -> None:
        """Let the chunks go that a snapshot named which is stored no more. Some at a time: a commit with all of them
        would hold up everybody."""
        self._chunks_left(uid, names)

    async def _insist(self) -> None:
        """Commit what is decided, whatever it takes."""
        while True:
            try:
                await self._meta_batch.commit_store()
                return
            except NoSpace as error:
                self._janitor.make_room(error)
            await trio.sleep(RETRY_S)

    def slept(self, member: Member) -> None:
        """Store nothing more for a member that became a row."""
        self._segment_writer.forget(member)
        self._meta_batch.forget(member)
        self._segments.forget(member)
        self._group_commit.wal.forget(member.uid)
        if member.spec.is_system:
            # A log that starts at its end has nothing in a ring.
            self._rings.remove(member.uid)

    def forget_slept(self, count: int) -> None:
        """Let go of what the current WAL file still holds in memory of groups that became rows, `count` since the last
        time: when they may be a good part of it, as each look is at all of it."""
        wal, members = self._group_commit.wal, self._members
        entries = wal.current_entries
        if 16 * count >= len(entries) and not self._group_commit.busy:
            self._group_commit.let_go(pair for pair in entries if pair[0] not in members)
            wal.keep_only(members)

    async def roll_out(self, member: Member) -> None:
        """Let a member's log go up to its snapshot: it goes as far as it is in segments, and who waits for that can't
        wait until a WAL file is full."""
        async with self.janitor_lock:
            if self._segments.stored_through(member) < member.compactable and not member.raft.stopped:
                await self._janitor.try_roll()

    async def void(self, uid: int) -> tuple[int, Callable[[], None]]:
        """Give up all that the WAL has of a group; return the newest batch's number, and what takes that back. The
        janitor must rest until one of both is for good."""
        return await self._group_commit.exclusive(lambda: self._void(uid))

    def restart(self, uid: int) -> int:
        """Let the log of a group, of which the WAL has nothing, begin anywhere; return the newest batch's number."""
        wal = self._group_commit.wal
        wal.restart(uid)
        return wal.next_batch - 1

    def _void(self, uid: int) -> tuple[int, Callable[[], None]]:
        through = self.restart(uid)
        files = self._unflushed()
        kept = [(entries, [pair for pair in entries if pair[0] == uid]) for entries in files.values()]
        self._group_commit.leave_out(uid, files.values())
        self._segments.spoil(files.keys())

        def take_back() -> None:
            # The lists themselves: of a file that the WAL's thread has just sealed nobody knows here. In each of them
            # what a group wrote is in its order still.
            for entries, pairs in kept:
                self._group_commit.put_back(pairs, entries)

        return through, take_back

    def _unflushed(self) -> dict[int, list[tuple[int, Entry]]]:
        """Return what each WAL file without a segment has for it."""
        wal = self._group_commit.wal
        return {file.file: file.entries for file in self._segment_writer.unflushed.files()} | {
            wal.current: wal.current_entries
        }

    def stored_through(self, member: Member) -> int:
        """Return up to which entry a log is in segments that are stored as such."""
        return self._segments.stored_through(member)

    def take_over(self, old: Member, member: Member) -> None:
        """Put a member made anew, with less in segments, in an old one's place."""
        self._segment_writer.forget(old)
        self._meta_batch.forget(old)
        self._segments.take_over(old, member)
        try:
            self._accounting.recount(member)
        except (Busy, Corrupt) as error:
            # It stands in the old one's place by now, and is mended by what counting meets.
            self._accounting.count_later(member, error)
