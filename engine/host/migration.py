"""Moves payloads from sealed WAL files to generations, rewrites sparse generations, and gives the space back.

Order: generation durable -> one meta commit (homes, counters) -> pins drain -> recycle or unlink. Every
step may be done
twice. Called by the janitor of `storage`; the copying itself runs in a thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import trio

from logyard.protocol.errors import Corrupt, JobPoisoned, LogyardError, NoSpace

from ..log.payload_source import FileSource, LiveGroup
from ..ranges import subtract
from .homes import SealedFile
from .pace import Pace

if TYPE_CHECKING:
    from .system import System

DYING_S = 10.0
"""A file in which something died more recently is not copied for its dead: the rest would follow, and was in vain."""
GROUPS_PER_JOB = 4096
"""Of one file: bounds a job's description, and what is done for it without a pause in the loop."""


def choose_victims(
    files: Iterable[SealedFile], now: float, budget_bytes: int, age_s: float, dead_ratio: float
) -> list[SealedFile]:
    """The least live first, while all files together exceed the budget; beyond that the too old, the dead, and the too
    dead in which nothing dies any more."""
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
    """What its migration is called in the log and in the status."""
    return f"migration of WAL file {file.file}"


class Migration:
    """Decides what moves, and moves it."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.pace = Pace(system.config)
        # Bytes of sealed files above the budget that could move and have not: clients wait while they are too many.
        self.debt = 0

    def victims(self) -> list[SealedFile]:
        """Sealed files to migrate now, by this node's limits. One that failed waits until nothing in it lives, for
        a repair, a start, or `compact`."""
        config = self.system.config
        jobs = self.system.storage.jobs
        if jobs.frozen:
            return []
        files = [
            one
            for one in self.system.storage.files.values()
            if not one.kept and not (one.failed and one.live) and jobs.is_due(name_of(one))
        ]
        found = choose_victims(
            files, time.monotonic(), config.migrate_budget_bytes, config.migrate_age_s, config.migrate_dead_ratio
        )
        space = self.system.space
        # Dropping whole files is always possible; what is copied needs room.
        return [file for file in found if self._may_go(file) and (not file.live or space.may_copy(file.live))]

    def book(self) -> None:
        """Add up the debt: what is above the budget, as far as it can move."""
        movable = sum(file.length for file in self.victims())
        held = sum(file.length for file in self.system.storage.files.values() if not file.failed)
        self.debt = max(0, min(held - self.system.config.migrate_budget_bytes, movable))

    def _may_go(self, file: SealedFile) -> bool:
        """Whether the books have its segment (a commit may have failed after the switch), and all in it is committed: a
        generation never holds what another leader may overwrite."""
        if file.kept or self.system.storage.is_open_file(file.file):
            return False
        members = self.system.members
        shares = [(members.get(uid), share) for uid, share in file.shares.items()]
        return all(member is None or member.damaged or member.raft.commit >= share.last for member, share in shares)

    async def migrate(self, file: SealedFile, paced: bool = True) -> None:
        """Copy what lives in one sealed file to the current generation, then let the file go. Raises `Corrupt` for
        damaged bytes, `JobPoisoned`, and `JobFailed` for a defect."""
        jobs, what = self.system.storage.jobs, name_of(file)
        jobs.check()
        try:
            await self._migrate(file, paced)
        except (LogyardError, OSError):
            raise
        except Exception as error:
            failed = jobs.fail(what, error)
            file.failed = jobs.is_hopeless(what)
            raise failed from error
        jobs.done(what)

    async def _migrate(self, file: SealedFile, paced: bool) -> None:
        system = self.system
        storage = system.storage
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

                    await system.store.migrate(build, self._limit() if paced else 0)
                    with storage.jobs.switching(name_of(file)):
                        for uid in some:
                            file.remove(uid)
            except (Corrupt, JobPoisoned):
                # Trying again would fill a generation with half copies each time; the file stays the home of what is
                # good in it.
                file.failed = True
                raise
            except NoSpace:
                system.space.defer_copies()
                raise
        # Law 4: what is destroyed with the file is dead by releases that a restart may not have applied yet.
        storage.raise_floors(storage.segments.users.get(file.file, ()))
        storage.files.pop(file.file, None)
        try:
            await storage.books.commit_members((), gone_files=[file.file])
        except BaseException:
            # A home by what is stored, so it is one still: the next look lets it go.
            storage.files[file.file] = file
            raise
        with storage.jobs.switching(name_of(file)):
            self.debt = max(0, self.debt - file.length)
            system.counters.migrated_files += 1
            system.counters.migrated_bytes += live
            storage.homes.give_up(("wal", file.file), lambda: storage.recycle(file.file))
            storage.segments.release(file.file)

    def _limit(self) -> int:
        """Bytes a second for the next job; 0: as fast as it can."""
        storage = self.system.storage
        self.pace.sample(self.system.durability.batch_bytes)
        return self.pace.limit(self.debt, storage.backlog_files)

    def _source(self, file: SealedFile, uids: Sequence[int]) -> FileSource:
        """What to copy of these groups: each one's share, without its dead prefix, and what of it lives now."""
        storage = self.system.storage
        groups = []
        for uid in uids:
            share = file.shares[uid]
            member = self.system.members.get(uid)
            if member is None:
                continue
            first = max(share.first, member.liveness.released_before.index)
            # What has a home in a generation already was mended (`payload_repair`): the file's copy of it is damaged.
            homed = [(home.first, home.last) for home in self.system.store.homes(uid) if home.last >= first]
            for low, high in subtract([(first, share.last)], homed):
                spans = member.liveness.live_within((low, 0), (high + 1, 0))
                live = tuple((start.index, start.ordinal, end.index, end.ordinal) for start, end in spans)
                groups.append(LiveGroup(uid, low, high, live))
        segment = str(storage.segments.path(file.file))
        return FileSource(segment, str(self.system.path / "wal"), file.file, tuple(groups))

    async def collect(self, live_ratio: float, paced: bool = True) -> None:
        """Rewrite generations below a live ratio, unlink those with nothing live. These go also where there is no room
        for a copy of those, and where one of those is damaged; raises `NoSpace`, `Corrupt`, `JobPoisoned` then."""
        system = self.system
        system.storage.jobs.check()
        trouble: LogyardError | None = None
        rewritten = 0
        try:
            if live_ratio and system.space.may_copy(0):
                rewritten = await system.store.rewrite_sparse(live_ratio, self._limit() if paced else 0)
        except LogyardError as error:
            trouble = error
            if isinstance(error, NoSpace):
                system.space.defer_copies()
        # Those that die from here on are not covered by the floors stored here (law 4): they go another time.
        dead = system.store.dead_generations()
        if rewritten or dead:
            system.storage.raise_floors(system.members)
            await system.storage.books.commit_members(())
            await trio.to_thread.run_sync(system.store.unlink_dead, dead)
        if trouble is not None:
            raise trouble

    async def compact(self) -> dict[str, Any]:
        """Everything at once: every live payload into generations, sparse generations rewritten, dead space given
        back. On a full disk what can be dropped goes first. Raises at the end for what could not be copied (`NoSpace`)
        or is damaged (`Corrupt`): that holds up nothing else."""
        system = self.system
        storage = system.storage
        storage.jobs.check()
        trouble: LogyardError | None = None
        system.space.allow_copies()
        try:
            await self._roll()
        except NoSpace as error:
            trouble = error
        files = sorted(
            (file for file in storage.files.values() if self._may_go(file)),
            key=lambda file: (file.live > 0, file.file),
        )
        for file in files:
            try:
                await self.migrate(file, paced=False)
            except LogyardError as error:
                trouble = error
        try:
            if trouble is None:
                await trio.to_thread.run_sync(system.store.seal_current)
            # Asked for by hand, so every dead byte is worth the copying.
            await self.collect(1.0, paced=False)
        except LogyardError as error:
            trouble = error
        storage.look()
        if trouble is not None:
            raise trouble
        return {
            "files": len(files),
            "live_bytes_in_wal": storage.wal_live_bytes(),
            "live_bytes_in_generations": sum(one.live for one in system.store.generations()),
            "disk_bytes": storage.disk_bytes(),
        }

    async def _roll(self) -> None:
        """Seal the current file. Without room for the next one what is dead already is dropped first."""
        system = self.system
        storage = system.storage
        # A file of the reserve is not put aside for another one of it.
        if system.wal.stock.short or (system.space.full and system.space.is_low()):
            return
        try:
            await storage.roll()
        except NoSpace:
            await storage.seal_all()
            for file in [file for file in storage.files.values() if not file.live and self._may_go(file)]:
                await self.migrate(file)
            await storage.roll()
