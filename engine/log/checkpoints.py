"""Snapshots first, then the logs below them may go (invariant 3).

Invariant: a log entry is forgotten only when a durable snapshot covers it, a segment has it (memory still locates its
payloads until then), and no transfer needs it. Called by `snapshot_store`, `snapshot_receiver`, `quiesce` and
the janitor.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import trio

from logyard.protocol.errors import NoSpace

from ..ports import LivenessPort
from ..replica.member import RUNNING, Member
from ..snapshot.format import Encoded, Snapshot
from . import checkpoint_rows as rows
from .liveness_accounting import LivenessAccounting
from .meta_batch import MetaBatch
from .meta_rows import cut_runs
from .segment_files import SegmentFiles
from .segment_writer import SegmentWriter
from .wal import WalItem

FULL_ENTRIES = 64
"""While the disk is full a snapshot is due after so many entries: with it the segments below can go."""


class Checkpoints:
    """One node's. `kept_above(member)`: the log may go up to here; `persist(member, item)` queues a record of its own
    for the WAL."""

    def __init__(
        self,
        meta_batch: MetaBatch,
        segments: SegmentFiles,
        accounting: LivenessAccounting,
        segment_writer: SegmentWriter,
        kept_above: Callable[[Member], int],
        persist: Callable[[Member, WalItem], None],
    ) -> None:
        self._meta_batch = meta_batch
        self._segments = segments
        self._accounting = accounting
        self._segment_writer = segment_writer
        self._kept_above = kept_above
        self._persist = persist

    async def store_snapshots(self, captured: Sequence[rows.Captured]) -> None:
        """Store snapshots of this node's own, and let the logs below them go."""
        stored = await self._meta_batch.commit_snapshots(captured)
        for member, snapshot, encoded, keep_log, _ in stored:
            if not member.raft.stopped and snapshot.index > member.snapshot_index:
                member.covered(snapshot.index, snapshot.term, encoded.size)
                if not keep_log:
                    self.let_log_go(member)

    async def store_installed(self, member: Member, snapshot: Snapshot, encoded: Encoded) -> None:
        """Commit a snapshot from another member with the homes of the payloads that came with it."""
        await self._meta_batch.commit_snapshots([rows.Captured(member, snapshot, encoded)])

    def installed(self, member: Member, before: LivenessPort, snapshot: Snapshot, size: int, keep: int) -> None:
        """Switch to what `store_installed` stored. Payloads up to `keep` are where they were, of what lived `before`;
        those above came with the snapshot."""
        self._accounting.replaced(member, before, snapshot.index)
        member.covered(snapshot.index, snapshot.term, size)
        member.need_no_log()
        if member.raft.log.snapshot_index != snapshot.index:
            # The log has the snapshot's last entry and goes on as it is.
            return
        self._accounting.cut(member, keep)
        member.keep_runs(cut_runs(member.segments, keep + 1))
        member.cut_ring(snapshot.index + 1)
        self._segments.shed(member)
        member.restart_flush()
        # Two marks, the first one void by itself: so that replay knows a log that starts over from one that was
        # overwritten.
        for index in (snapshot.index, snapshot.index + 1):
            self._persist(member, WalItem(member.uid, truncate=index))
        # When the file with the marks is sealed, the checkpoint has to say what they say.
        self._segment_writer.hard_state_written(member)

    async def settle_installed(self) -> None:
        """Store what died by the snapshot: a restart begins at it and marks nothing again. Without room for these rows
        they go with whatever is next."""
        with suppress(NoSpace):
            await self._meta_batch.commit_store()

    def let_log_go(self, member: Member) -> None:
        """Keep the log up to the snapshot, which may have been a checkpoint until now, no longer."""
        member.need_no_log()
        self.compact_log(member)

    async def flushed(self, members: Sequence[Member]) -> None:
        """Let go of what a new segment has of these logs, of all of them: nobody comes by again."""
        for number, member in enumerate(members, 1):
            if number % self._segment_writer.groups_per_step == 0:
                await trio.lowlevel.cancel_shielded_checkpoint()
            if member.flushed and not member.raft.stopped:
                member.raft.log.release_memory(member.flushed)
                self.compact_log(member)

    def stored_through(self, member: Member) -> int:
        """Return up to which entry a log is in segments, and its payloads where the stored rows say."""
        return self._segments.stored_through(member)

    def compact_log(self, member: Member) -> None:
        """Forget log entries that the snapshot covers, once they are in a segment."""
        raft_log = member.raft.log
        index = min(member.compactable, self.stored_through(member))
        if index <= raft_log.snapshot_index:
            return
        index = min(index, self._kept_above(member))
        if index <= raft_log.snapshot_index:
            return
        term = raft_log.term(index)
        if term is None:
            return
        raft_log.compact(index, term)
        self._segments.shed(member)

    def may_move_out(self, member: Member) -> bool:
        """Return whether nobody wants entries of a log whose snapshot is at its end."""
        return self._kept_above(member) >= member.raft.log.last_index

    def move_out(self, member: Member) -> None:
        """Let a group of which nothing lives in WAL files hibernate: its snapshot at the last entry is all it needs, so
        its log starts there and it leaves its segments."""
        assert member.snapshot_index == member.raft.log.last_index and self.may_move_out(member)
        member.flush_through(member.snapshot_index)
        runs = member.segments
        member.keep_runs([])
        self.let_log_go(member)
        for run in runs:
            self._segments.leave(member, run.segment)


class DueSnapshots:
    """Whose snapshot is due: `entries` after the last one (`ring_entries` where a ring holds the log), or sooner while
    the disk `is_full()`."""

    def __init__(
        self,
        members: Mapping[int, Member],
        entries: int,
        ring_entries: int,
        is_full: Callable[[], bool],
        take: Callable[[Sequence[Member]], Awaitable[Any]],
    ) -> None:
        self._members = members
        self._entries = entries
        self._ring_entries = ring_entries
        self._is_full = is_full
        self._take = take

    async def run(self) -> None:
        """Take them."""
        entries, least = self._entries, self._ring_entries
        if self._is_full():
            entries, least = min(entries, FULL_ENTRIES), min(least, FULL_ENTRIES)
        due = [
            member
            for member in self._members.values()
            if (done := member.raft.applied - member.compactable) >= least
            and member.state == RUNNING
            and (done >= entries or member.spec.is_system)
        ]
        if due:
            await self._take(due)
