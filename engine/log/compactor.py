"""Moves payloads from sealed WAL files to generations, rewrites sparse generations, and gives the space back.

Order: generation durable -> one meta commit (homes, counters) -> pins drain -> recycle or unlink. Every
step may be done twice. Called by `janitor`; the copying itself runs in a thread.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

import trio

from logyard.protocol.errors import Corrupt, JobPoisoned, LogyardError, NoSpace

from ..config import SystemConfig
from ..ports import StorePort
from ..ranges import subtract
from ..replica.member import Member
from .location import Location, SealedFile
from .meta_batch import MetaBatch
from .payload_source import FileSource, LiveGroup
from .segment_files import SegmentFiles
from .space import Space

DYING_S = 10.0
"""A file in which something died more recently is not copied for its dead: the rest would follow, and was in vain."""
GROUPS_PER_JOB = 4096
"""Of one file: bounds a job's description, and what is done for it without a pause in the loop."""


def choose_victims(
    files: Iterable[SealedFile], now: float, budget_bytes: int, age_s: float, dead_ratio: float
) -> list[SealedFile]:
    """Return the least live first, while all files together exceed the budget; beyond that the too old, the dead, and
    the too dead in which nothing dies any more."""
    ordered = sorted(files, key=lambda file: file.live / file.length)
    total = sum(file.length for file in ordered)
    found = []
    for file in ordered:
        too_dead = file.dead_ratio >= dead_ratio and (not file.live or now - file.died_at >= DYING_S)
        if total > budget_bytes or now - file.sealed_at > age_s or too_dead:
            found.append(file)
            total -= file.length
    return found


def name_of(file: SealedFile) -> str:
    """Return what its migration is called in the log and in the status."""
    return f"migration of WAL file {file.file}"


class Compactor:
    """Decides what moves, and moves it. `limit(debt)`: how many bytes a second may be copied beside the clients'
    writes, 0 for any. `files` and `bytes` count what was emptied, and what of it lived; `repaid` the lengths of files
    in which something did."""

    def __init__(
        self,
        config: SystemConfig,
        members: Mapping[int, Member],
        store: StorePort,
        space: Space,
        meta_batch: MetaBatch,
        location: Location,
        segments: SegmentFiles,
        limit: Callable[[int], int],
    ) -> None:
        self.files = self.bytes = self.repaid = 0
        self._config = config
        self._members = members
        self._store = store
        self._space = space
        self._meta_batch = meta_batch
        self._location = location
        self._segments = segments
        self._limit = limit
        self._jobs = store.jobs
        # Bytes of sealed files above the budget that could move and have not: clients wait while they are too many.
        self.debt = 0

    def victims(self) -> list[SealedFile]:
        """Return the sealed files to migrate now, by this node's limits. One that failed waits until nothing in it
        lives, for a repair, a start, or `compact`."""
        config, jobs = self._config, self._jobs
        if jobs.frozen:
            return []
        files = [
            one
            for one in self._location.files.values()
            if not one.kept and not (one.failed and one.live) and jobs.is_due(name_of(one))
        ]
        found = choose_victims(
            files, time.monotonic(), config.migrate_budget_bytes, config.migrate_age_s, config.migrate_dead_ratio
        )
        space = self._space
        # Dropping whole files is always possible; what is copied needs room.
        return [file for file in found if self._may_go(file) and (not file.live or space.may_copy(file.live))]

    def book(self) -> None:
        """Add up the debt: what is above the budget, as far as it can move."""
        movable = sum(file.length for file in self.victims())
        held = sum(file.length for file in self._location.files.values() if not file.failed)
        self.debt = max(0, min(held - self._config.migrate_budget_bytes, movable))

    def _may_go(self, file: SealedFile) -> bool:
        """Return whether the books have its segment (a commit may have failed after the switch), and all in it is
        committed: a generation never holds what another leader may overwrite."""
        if file.kept or self._location.is_open(file.file):
            return False
        members = self._members
        shares = [(members.get(uid), share) for uid, share in file.shares.items()]
        return all(member is None or member.damaged or member.raft.commit >= share.last for member, share in shares)

    async def migrate(self, file: SealedFile, paced: bool = True) -> None:
        """Copy what lives in one sealed file to the current generation, then let the file go. Raises `Corrupt` for
        damaged bytes, `JobPoisoned`, and `JobFailed` for a defect."""
        jobs, what = self._jobs, name_of(file)
        jobs.check()
        try:
            await self._migrate(file, paced)
        except (LogyardError, OSError):
            raise
        except Exception as error:
            failed = jobs.fail(what, error)
            file.fail(jobs.is_hopeless(what))
            raise failed from error
        jobs.done(what)

    async def _migrate(self, file: SealedFile, paced: bool) -> None:
        live = file.live
        if live:
            try:
                while file.shares:
                    # In portions: what the loop does for each group is done for some, and then others get their turn.
                    some: list[int] = []

                    def build(some: list[int] = some) -> FileSource:
                        # Chosen when it is this job's turn: what was released while it waited has no share any more.
                        some += sorted(file.shares)[:GROUPS_PER_JOB]
                        return self._source(file, some)

                    await self._store.migrate(build, self._limit(self.debt) if paced else 0)
                    with self._jobs.switching(name_of(file)):
                        for uid in some:
                            file.remove(uid)
            except (Corrupt, JobPoisoned):
                # Trying again would fill a generation with half copies each time; the file stays the home of what is
                # good in it.
                file.fail()
                raise
            except NoSpace:
                self._space.defer_copies()
                raise
        # Law 4: what is destroyed with the file is dead by releases that a restart may not have applied yet.
        self._meta_batch.raise_floors(self._segments.users.get(file.file, ()))
        self._location.files.pop(file.file, None)
        try:
            await self._meta_batch.commit_members((), gone_files=[file.file])
        except BaseException:
            # A home by what is stored, so it is one still: the next look lets it go.
            self._location.add(file)
            raise
        with self._jobs.switching(name_of(file)):
            self.debt = max(0, self.debt - file.length)
            self.files += 1
            self.bytes += live
            self.repaid += file.length if live else 0
            self._location.recycle(file.file)
            self._segments.release(file.file)

    async def flushed(self, file: SealedFile) -> None:
        """Let a file that got its segment go at once when nothing in it lives."""
        if not file.live and not file.kept:
            await self.migrate(file)
        self.book()

    def _source(self, file: SealedFile, uids: Sequence[int]) -> FileSource:
        """Return what to copy of these groups: each one's share, without its dead prefix, and what of it lives now."""
        groups = []
        for uid in uids:
            share = file.shares[uid]
            member = self._members.get(uid)
            if member is None:
                continue
            first = max(share.first, member.liveness.released_before.index)
            # What has a home in a generation already was mended (`payload_repair`): the file's copy of it is damaged.
            homed = [(home.first, home.last) for home in self._store.homes(uid) if home.last >= first]
            for low, high in subtract([(first, share.last)], homed):
                spans = member.liveness.live_within((low, 0), (high + 1, 0))
                live = tuple((start.index, start.ordinal, end.index, end.ordinal) for start, end in spans)
                groups.append(LiveGroup(uid, low, high, live))
        return self._segments.source(file.file, groups)

    async def collect(self, live_ratio: float | None = None, paced: bool = True) -> bool:
        """Unlink generations with nothing live, rewrite those below a live ratio as far as there is room, and unlink
        each before the next is copied: what is needed besides is one of them, however many there are. Return False
        where there was no room for some. Raises `NoSpace`, which ends it; `Corrupt` and `JobPoisoned` when all others
        are done."""
        self._jobs.check()
        if self._store.dead_generations():
            await self._drop_dead()
        live_ratio = self._config.rewrite_live_ratio if live_ratio is None else live_ratio
        if not live_ratio:
            return True
        bytes_s = self._limit(self.debt) if paced else 0
        try:
            return await self._store.rewrite_sparse(live_ratio, bytes_s, self._space.may_copy, self._drop_dead)
        except NoSpace:
            self._space.defer_copies()
            raise

    async def _drop_dead(self) -> None:
        """Store where everything is, and unlink generations with nothing live. Those that die once the floors are
        stored are not covered by these (law 4): they go another time."""
        dead = self._store.dead_generations()
        self._meta_batch.raise_floors(self._members)
        await self._meta_batch.commit_members(())
        await trio.to_thread.run_sync(self._store.unlink_dead, dead)

    async def compact(
        self, roll: Callable[[], Awaitable[None]], flush: Callable[[], Awaitable[None]]
    ) -> tuple[int, LogyardError | None]:
        """Move every live payload into generations, rewrite sparse ones, give dead space back; return how many files
        that were, and the last of what could not be copied (`NoSpace`) or is damaged (`Corrupt`): it held up nothing
        else. `roll` seals the current file, `flush` makes segments of those that are sealed. On a full disk what can
        be dropped goes first."""
        self._jobs.check()
        trouble: LogyardError | None = None
        self._space.allow_copies()
        try:
            await self._roll(roll, flush)
        except NoSpace as error:
            trouble = error
        files = sorted(
            (file for file in self._location.files.values() if self._may_go(file)),
            key=lambda file: (file.live > 0, file.file),
        )
        for file in files:
            try:
                await self.migrate(file, paced=False)
            except LogyardError as error:
                trouble = error
        try:
            if trouble is None:
                await trio.to_thread.run_sync(self._store.seal_current)
            # Asked for by hand, so every dead byte is worth the copying.
            if not await self.collect(1.0, paced=False):
                trouble = NoSpace("there is no room for copies of what still lives in generations with dead bytes")
        except LogyardError as error:
            trouble = error
        return len(files), trouble

    async def _roll(self, roll: Callable[[], Awaitable[None]], flush: Callable[[], Awaitable[None]]) -> None:
        """Seal the current file. Without room for the next one what is dead already is dropped first."""
        # A file of the reserve is not put aside for another one of it.
        if self._space.is_short or (self._space.full and self._space.is_low()):
            return
        try:
            await roll()
        except NoSpace:
            await flush()
            for file in [file for file in self._location.files.values() if not file.live and self._may_go(file)]:
                await self.migrate(file)
            await roll()
