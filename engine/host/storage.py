"""Everything durable beside the WAL's hot path: sealed files become segments, state rows go to the meta store, files
are given back.

One janitor task does it all, one job at a time, the blocking part of each in a thread; so a job is never under way
twice. Order of every job: new data durable -> one meta commit -> switch in memory -> pins drain -> recycle or unlink.
Invariants 3 and 6 are kept here.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import trio

from logyard.protocol.errors import LogyardError, NoSpace

from ..entry import Entry
from ..log.meta_rows import SegmentRun, cut_runs
from ..log.wal import Rolled, Sealed, WalItem
from ..ports import LivenessPort, SourceEntry
from ..ranges import runs_of
from ..replica.member import RUNNING, Member
from ..snapshot.format import Encoded, Snapshot
from ..types import Spec
from . import rows
from .books import Books
from .holders import Holders
from .homes import Homes, SealedFile, Share
from .migration import Migration, name_of
from .segments import Segments
from .space import RETRY_S, SNAPSHOT_ENTRIES

if TYPE_CHECKING:
    from .system import System

log = logging.getLogger(__name__)

RESERVE = "the reserve of the write-ahead log is in use"
QUIET_SECONDS = 5.0
"""Without a full file for so long, the disk has time to fill the next one with zeros ahead."""


class Storage:
    """The janitor and its files."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.jobs = system.store.jobs
        self.homes = Homes(system)
        self.migration = Migration(system)
        self.books = Books(system, system.meta)
        self.holders = Holders(system)
        self.wal = system.wal
        # The directory's lock, which the writer process inherits.
        self.lock_fd = -1
        self.closing: list[Callable[[], None]] = []
        self.segments = Segments(system)
        self._sealed: deque[Sealed] = deque()
        self._sealing: Sealed | None = None
        self._half_adopted = False
        self._last_rolled = 0.0
        self._hard_states: set[Member] = set()
        self.janitor_lock = trio.Lock()
        self._wake = trio.Event()

    def rolled(self, rolled: Rolled) -> None:
        """The WAL sealed files: they want segments. Called by `durability`."""
        self._sealed.extend(rolled.sealed)
        self._last_rolled = trio.current_time()
        for gap in rolled.gaps:
            member = self.system.members.get(gap.uid)
            if member is not None:
                self.system.stop_member(member, f"the write-ahead log expected entry {gap.expected} of this group next")
        if self.wal.stock.short:
            self.system.space.note(RESERVE)
        self._wake.set()

    def look(self) -> None:
        """Once a second: is anything due?"""
        self._wake.set()

    def hard_state_written(self, member: Member) -> None:
        """This member's hard state is in the current WAL file: before that goes, the meta store must have it."""
        self._hard_states.add(member)

    def is_open_file(self, file: int) -> bool:
        """Whether a WAL file has no segment yet: it is then the home of all its entries."""
        return file == self.wal.current or any(sealed.file == file for sealed in self._unsealed_files())

    @property
    def backlog_files(self) -> int:
        """Sealed WAL files that have no segment yet."""
        return len(self._sealed)

    def _unsealed_files(self) -> Iterator[Sealed]:
        if self._sealing is not None:
            yield self._sealing
        yield from self._sealed

    def unsealed(self) -> Iterator[tuple[int, Entry]]:
        """(uid, entry) of every WAL file that has no segment yet."""
        for sealed in self._unsealed_files():
            yield from sealed.entries
        yield from list(self.wal.current_entries)

    def wal_live_bytes(self) -> int:
        """Live or pending payload bytes at home in WAL files."""
        return self.homes.live_bytes()

    @property
    def files(self) -> dict[int, SealedFile]:
        """Sealed WAL files that are homes."""
        return self.homes.files

    def disk_bytes(self) -> int:
        """Allocated bytes of everything that holds payloads: WAL files (spares included) and generations."""
        return self.wal.allocated_bytes() + self.system.store.disk_bytes()

    def adopt_recovered(self, sealed: Sequence[Sealed]) -> None:
        """Files that recovery found without a segment."""
        self._sealed.extend(sealed)
        if sealed:
            self._wake.set()

    # The janitor

    async def run(self) -> None:
        """Seal, migrate, collect, until cancelled. A failing job is reported and tried again at the next look, and
        stops no other."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            async with self.janitor_lock:
                await self._try_anew("sealing", self.seal_all)
                for file in self.migration.victims():
                    await self._try(name_of(file), self.migration.migrate, file)
                    if self._sealed:
                        # Files without segments hold up more than files with: what filled up meanwhile comes first.
                        await self._try_anew("sealing", self.seal_all)
                self.migration.book()
                if not self.jobs.frozen:
                    ratio = self.system.config.rewrite_live_ratio
                    await self._try_anew("collection", self.migration.collect, ratio)
                await self._try("removal of segments", self.segments.remove_unused)
            await self._try("removal of what transfers left", self._collect_transfers)
            await self._try("snapshots", self._take_due_snapshots)
            await self._try("snapshots for old segments", self.holders.ask)
            await self._try("preparation of a WAL file", self.system.space.look, self._is_quiet())

    def _is_quiet(self) -> bool:
        """Whether the disk has time to fill the next file with zeros ahead."""
        return trio.current_time() - self._last_rolled >= QUIET_SECONDS

    async def _try(self, what: str, job: Callable[..., Awaitable[Any]], *arguments: Any) -> None:
        try:
            await job(*arguments)
        except (LogyardError, OSError) as error:
            log.error("storage: %s failed: %s", what, error)
            if self.system.space.found(what, error):
                # No promise holds up the space that a full disk needs.
                self.system.chunks.give_up()
                self.homes.expire(math.inf)

    async def _try_anew(self, what: str, job: Callable[..., Awaitable[Any]], *arguments: Any) -> None:
        """The same, for jobs that change nothing before their switch: a defect is counted, and tried again later."""
        if not self.jobs.is_due(what):
            return

        async def counted() -> None:
            try:
                await job(*arguments)
            except (LogyardError, OSError):
                raise
            except Exception as error:
                raise self.jobs.fail(what, error) from error
            self.jobs.done(what)

        await self._try(what, counted)

    async def _collect_transfers(self) -> None:
        """What was kept for other members' transfers, or for one that came to nothing."""
        self.homes.expire(time.monotonic())
        self.system.chunks.expire(trio.current_time())
        await self.system.receiving.collect(self.system.has)
        await self.system.chunks.collect()

    async def compact(self) -> dict[str, Any]:
        """Migrate and collect everything now."""
        async with self.janitor_lock:
            done = await self.migration.compact()
            await self.segments.remove_unused()
            return done

    async def roll(self) -> None:
        """Seal the current WAL file, whatever room is left, and make its segment."""
        sealed = await self.system.durability.exclusive(self.wal.roll)
        if self.wal.stock.short:
            self.system.space.note(RESERVE)
        if sealed is not None:
            # A later file may have filled up before this task went on; its row would say that this one is flushed.
            self._sealed = deque(sorted([sealed, *self._sealed], key=lambda one: one.file))
        await self.seal_all()

    async def roll_out(self, member: Member) -> None:
        """Let a member's log go up to its snapshot: it goes as far as it is in segments, and who waits for that can't
        wait until a WAL file is full."""
        async with self.janitor_lock:
            if member.flushed < member.compactable and not member.raft.stopped:
                await self.roll()

    async def seal_all(self) -> None:
        """Segments for all files that have none."""
        # What a switch left half adopted is not adopted once more: a restart reads it anew from the file.
        while self._sealed and not self._half_adopted:
            self._sealing = self._sealed.popleft()
            try:
                await self._seal(self._sealing)
            except BaseException:
                self._sealed.appendleft(self._sealing)
                raise
            finally:
                self._sealing = None

    async def _seal(self, sealed: Sealed) -> None:
        """A sealed WAL file's metadata becomes a segment; the file stays as the home of its payloads."""
        hard_states, self._hard_states = self._hard_states, set()
        try:
            found = await self.system.space.out_of_reserve("a segment", lambda: self.segments.write(sealed))
            file = SealedFile(sealed.file, sealed.length)
            touched = {member for member in hard_states if self.system.members.get(member.uid) is member}
            present = self._present(file, found)
            self._half_adopted = True
            with self.jobs.switching(f"the segment of WAL file {file.file}"):
                self._adopt_segment(file, found, present, touched)
            self._half_adopted = False
            await self.books.commit_members(touched, sealed_files=[file])
        except BaseException:
            # The file is sealed again later, and what it says of terms and votes must be stored then.
            self._hard_states |= hard_states
            raise
        for member in touched:
            if member.flushed and not member.raft.stopped:
                member.raft.log.release_memory(member.flushed)
                self.compact_log(member)
        if not file.live and not file.kept:
            await self.migration.migrate(file)
        self.migration.book()
        self.system.durability.let_go(sealed.entries)

    def _present(
        self, file: SealedFile, found: dict[int, tuple[int, int, int, int]]
    ) -> list[tuple[Member, SegmentRun, Share, int]]:
        """What of a new segment is the content of logs: a run, the share of it that lives, and its bytes. Reads the
        segment where it must, and so may fail: it changes nothing."""
        present = []
        for uid, (first, last, last_term, size) in found.items():
            member = self.system.members.get(uid)
            if member is None or member.damaged:
                continue
            low = max(first, member.raft.log.snapshot_index + 1)
            # The log may have been overwritten, or replaced by a snapshot: only what is its present content counts.
            moved = self.system.store.homes(uid)
            if low != first or member.raft.log.term(last) != last_term or (moved and moved[-1].last >= low):
                last, size = self.segments.current_part(member, file.file, low, last)
            if last >= low:
                share = self.homes.share_of(member, file, low, last, size)
                present.append((member, SegmentRun(low, last, file.file), share, size))
        return present

    def _adopt_segment(
        self,
        file: SealedFile,
        found: Iterable[int],
        present: Sequence[tuple[Member, SegmentRun, Share, int]],
        touched: set[Member],
    ) -> None:
        """Switch to a segment that is durable, of the groups in `found`; the members it speaks of go to `touched`."""
        users: set[int] = set()
        for uid in found:
            member = self.system.members.get(uid)
            if member is not None and self.system.damages.is_left(member):
                users.add(uid)
                file.kept = True
            if member is not None and not member.damaged:
                # Its floor and its truncations are in the file as well.
                touched.add(member)
        for member, run, share, size in present:
            users.add(member.uid)
            member.add_segment(run)
            member.flushed = max(member.flushed, run.last)
            file.add(member.uid, share, size)
        self.segments.users[file.file] = users
        self.homes.files[file.file] = file

    def overwritten(self, member: Member, index: int) -> None:
        """Entries from `index` on were replaced: nothing of them lives in sealed files. (Only committed entries ever
        migrate.)"""
        self.homes.cut(member, index - 1)

    def compact_log(self, member: Member) -> None:
        """Forget log entries that the snapshot covers, once they are in a segment: memory still locates their
        payloads until then."""
        raft_log = member.raft.log
        index = min(member.compactable, member.flushed)
        if self.system.chunks.leases:
            index = min(index, self.system.chunks.log_kept_above(member))
        if index <= raft_log.snapshot_index:
            return
        term = raft_log.term(index)
        if term is None:
            return
        raft_log.compact(index, term)
        self.segments.shed(member)

    def move_out(self, member: Member) -> None:
        """A group of which nothing lives in WAL files is about to hibernate: its snapshot at the last entry is all it
        needs, so its log starts there and it leaves its segments."""
        assert member.snapshot_index == member.raft.log.last_index
        member.flushed = max(member.flushed, member.snapshot_index)
        self.let_log_go(member)
        runs, member.segments = member.segments, []
        for run in runs:
            self.segments.leave(member, run.segment)

    def slept(self, member: Member) -> None:
        """A member became a row, which is stored: nothing more is to be stored for it."""
        self._hard_states.discard(member)
        self.books.floors.discard(member)
        self.segments.forget(member)
        self.wal.forget(member.uid)

    def forget_slept(self, count: int) -> None:
        """Let go of what the current WAL file still holds in memory of groups that became rows, `count` since the last
        time: when they may be a good part of it, as each look is at all of it."""
        entries, members = self.wal.current_entries, self.system.members
        if 16 * count >= len(entries) and not self.system.durability.busy:
            self.system.durability.let_go(pair for pair in entries if pair[0] not in members)
            self.wal.keep_only(members)

    def raise_floors(self, uids: Iterable[int]) -> None:
        """Before payload bytes of these groups are destroyed: the floor covers every release that made any of them
        dead (law 4).

        The next commit stores it: make one before the bytes go. A floor at or below the snapshot means nothing any
        more.
        """
        for uid in uids:
            member = self.system.members.get(uid)
            if member is not None and member.last_release > max(member.floor, member.snapshot_index):
                member.floor = member.last_release
                self.books.floors.add(member)

    def recycle(self, file: int) -> None:
        """A WAL file that nobody needs goes back to the stock. Its entries in memory must not name it any more. May be
        called by a reader that gives its pin back: nothing of the janitor's trouble is the reader's."""
        if self.jobs.frozen:
            return
        try:
            self.wal.recycle(file)
        except OSError as error:
            log.error("storage: WAL file %d could not be recycled: %s", file, error)
        except Exception as error:
            self.jobs.freeze(f"the recycling of WAL file {file}", error)

    async def _take_due_snapshots(self) -> None:
        entries = self.system.config.snapshot_entries
        if self.system.space.full:
            entries = min(entries, SNAPSHOT_ENTRIES)
        due = [
            member
            for member in self.system.members.values()
            if member.state == RUNNING and member.raft.applied - member.compactable >= entries
        ]
        if due:
            await self.system.snapshots.take(due)

    # Groups and snapshots

    def start_member(self, spec: Spec) -> Member:
        """A group that was just registered comes alive."""
        from . import recovery

        member = recovery.fresh_member(self.system, spec)
        recovery.enliven(self.system, member, fresh=True)
        return member

    async def store_snapshots(self, captured: Sequence[rows.Captured]) -> None:
        """Snapshots durable first, then the logs below them may go (invariant 3)."""
        stored = await self.books.commit_snapshots(captured)
        for member, snapshot, encoded, keep_log, _ in stored:
            if not member.raft.stopped and snapshot.index > member.snapshot_index:
                member.snapshot_index, member.snapshot_term = snapshot.index, snapshot.term
                member.snapshot_bytes = encoded.size
                if not keep_log:
                    self.let_log_go(member)

    def let_log_go(self, member: Member) -> None:
        """The log up to the snapshot, which may have been a checkpoint until now, is not needed any more."""
        member.compactable = member.snapshot_index
        self.compact_log(member)

    async def store_payloads(self, member: Member, entries: Sequence[SourceEntry], dense: bool = False) -> None:
        """Payloads that came from a peer, rising, durable in a generation; their home from now on. Between them nothing
        that has a home in a generation, or lives in this log, changes it; with `dense` nothing at all. Raises
        `NoSpace`, and `LogyardError` for a replica that went."""
        async with self.janitor_lock:
            if self.system.members.get(member.uid) is not member:
                raise LogyardError(f"group {member.uid:016x} does not run on this node any more")
            before = list(self.system.store.homes(member.uid))
            hides = self.homes.hidden_by(member, before, dense)
            runs = runs_of([one.index for one in entries], hides)
            self.homes.open_segments(member, runs)
            await self.system.store.write(
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
            file.failed = file.failed and file.file not in mended

    async def move(
        self,
        members: Sequence[Member],
        ranges: Sequence[tuple[int, int, int]],
        read: Callable[[int, int, int], Iterable[SourceEntry]],
    ) -> None:
        """Payloads of several groups from WAL files to a generation: (uid, first, last) of each, one a member."""
        async with self.janitor_lock:
            here = [self.system.members.get(member.uid) is member for member in members]
            members = [member for member, is_here in zip(members, here, strict=True) if is_here]
            ranges = [one for one, is_here in zip(ranges, here, strict=True) if is_here]
            before = {member: list(self.system.store.homes(member.uid)) for member in members}
            for member, (_, first, last) in zip(members, ranges, strict=True):
                self.homes.open_segments(member, [(first, last)])
            await self.system.store.write(ranges, read)
            with self.jobs.switching("payloads of groups that go to sleep"):
                for member, (_, first, last) in zip(members, ranges, strict=True):
                    self.homes.rehomed(member, first, last, before[member])
                    self.homes.settle(member, first, last)

    async def store_installed(self, member: Member, snapshot: Snapshot, encoded: Encoded) -> None:
        """A snapshot from another member, and the homes of the payloads that came with it, in one commit."""
        await self.books.commit_snapshots([rows.Captured(member, snapshot, encoded)])

    def installed(self, member: Member, before: LivenessPort, snapshot: Snapshot, size: int, keep: int) -> None:
        """Switch to what `store_installed` stored. Payloads up to `keep` are where they were, of what lived `before`;
        those above came with the snapshot."""
        self.homes.replaced(member, before, snapshot.index)
        member.snapshot_index, member.snapshot_term, member.snapshot_bytes = snapshot.index, snapshot.term, size
        member.compactable = snapshot.index
        if member.raft.log.snapshot_index != snapshot.index:
            # The log has the snapshot's last entry and goes on as it is.
            return
        self.homes.cut(member, keep)
        member.segments = cut_runs(member.segments, keep + 1)
        self.segments.shed(member)
        member.flushed = snapshot.index
        # Two marks, the first one void by itself: so that replay knows a log that starts over from one that was
        # overwritten.
        for index in (snapshot.index, snapshot.index + 1):
            self.system.scheduler.persist_alone(member, WalItem(member.uid, truncate=index))
        # When the file with the marks is sealed, the checkpoint has to say what they say.
        self._hard_states.add(member)

    async def forget(self, members: Sequence[Member], build: Callable[[], Iterable[rows.Put]]) -> None:
        """Replicas go: `build` gives the rows that say so, their payloads are dead."""
        for member in members:
            self._hard_states.discard(member)
            self.system.chunks.forget(member.uid)
            self.system.store.delete_group(member.uid)
            self.wal.forget(member.uid)
            for run in member.segments:
                file = self.homes.files.get(run.segment)
                if file is not None:
                    file.remove(member.uid)
        # It is decided, and frees space: it waits for what it needs of it.
        await self._insist(lambda: self.books.commit(build, store=True))
        for member in members:
            for run in member.segments:
                self.segments.leave(member, run.segment)

    async def _insist(self, job: Callable[[], Awaitable[Any]]) -> None:
        """Do `job` until there is room for it: for what was decided already and can't be refused any more."""
        while True:
            try:
                await job()
                return
            except NoSpace as error:
                self.system.space.found(str(error), error)
                self.look()
            await trio.sleep(RETRY_S)

    async def void(self, uid: int) -> int:
        """Give up all that the WAL has of a group; return the newest batch's number. The janitor must rest."""
        return await self.system.durability.exclusive(lambda: self._void(uid))

    def restart(self, uid: int) -> int:
        """Let the log of a group, of which the WAL has nothing, begin anywhere; return the newest batch's number."""
        self.wal.restart(uid)
        return self.wal.position[0] - 1

    def _void(self, uid: int) -> int:
        self.wal.restart(uid)
        files = {file.file: file.entries for file in self._unsealed_files()}
        files[self.wal.current] = self.wal.current_entries
        self.system.durability.leave_out(uid, files.values())
        self.segments.spoiled |= files.keys()
        return self.wal.position[0] - 1

    def take_over(self, old: Member, member: Member) -> None:
        """A member made anew, with less in segments, stands for an old one."""
        self._hard_states.discard(old)
        self.books.floors.discard(old)
        self.segments.take_over(old, member)
        self.homes.recount(member)

    def close(self) -> None:
        """Close what is open, the lock last; nothing is pending."""
        self.segments.close()
        while self.closing:
            self.closing.pop()()
