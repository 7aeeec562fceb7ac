"""The janitor: sealed files become segments, what lives in old files moves to generations, files are given back.

One task does it all, one job at a time, the blocking part of each in a thread; so a job is never under way twice.
A failing job is reported and tried again at the next look, and stops no other. Order of every job: new
data durable -> one meta commit -> switch in memory -> pins drain -> recycle or unlink.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import trio

from logyard.protocol.errors import LogyardError, NoSpace

from ..jobs import Jobs
from .compactor import Compactor, name_of
from .group_commit import GroupCommit
from .meta_batch import MetaBatch
from .segment_files import SegmentFiles
from .segment_writer import SegmentWriter
from .space import Space
from .wal import Sealed

log = logging.getLogger(__name__)

RESERVE = "the reserve of the write-ahead log is in use"
QUIET_SECONDS = 5.0
"""Without a full file for so long, the disk has time to fill the next one with zeros ahead."""

Job = tuple[str, Callable[[], Awaitable[Any]]]


class Janitor:
    """One node's. Who holds `lock` has the files to itself. `later` are jobs that are done without it, after the
    others; `no_room()`: no promise may hold up the space that a full disk needs."""

    def __init__(
        self,
        group_commit: GroupCommit,
        space: Space,
        meta_batch: MetaBatch,
        segments: SegmentFiles,
        segment_writer: SegmentWriter,
        compactor: Compactor,
        jobs: Jobs,
        later: Sequence[Job],
        no_room: Callable[[], None],
    ) -> None:
        self.lock = trio.Lock()
        self._group_commit = group_commit
        self._space = space
        self._meta_batch = meta_batch
        self._segments = segments
        self._segment_writer = segment_writer
        self._compactor = compactor
        self._jobs = jobs
        self._later = later
        self._no_room = no_room
        self._last_rolled = 0.0
        self._wake = trio.Event()

    def look(self) -> None:
        """Look soon whether anything is due."""
        self._wake.set()

    def make_room(self, error: NoSpace) -> None:
        """Look soon for what gives room: something that is decided, and frees space itself, found none."""
        self._space.found(str(error), error)
        self._wake.set()

    def adopt(self, sealed: Sequence[Sealed]) -> None:
        """Take in files that a start found without a segment."""
        self._segment_writer.unflushed.add(sealed)
        if sealed:
            self._wake.set()

    def rolled(self, sealed: Sequence[Sealed]) -> None:
        """Take in files that the WAL sealed: they want segments."""
        self._segment_writer.unflushed.add(sealed)
        self._last_rolled = trio.current_time()
        self._note_reserve()
        self._wake.set()

    def _note_reserve(self) -> None:
        if self._space.is_short:
            self._space.note(RESERVE)

    async def run(self) -> None:
        """Flush, migrate, collect, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            async with self.lock:
                await self._try("a look at the files", self._look)
            for what, job in self._later:
                await self._try(what, job)
            quiet = trio.current_time() - self._last_rolled >= QUIET_SECONDS
            await self._try("preparation of a WAL file", self._space.look, quiet)

    async def _look(self) -> None:
        compactor = self._compactor
        await self._try_anew("sealing", self._segment_writer.run)
        for file in compactor.victims():
            await self._try(name_of(file), compactor.migrate, file)
            if self._segment_writer.unflushed.backlog_files:
                # Files without segments hold up more than files with: what filled up meanwhile comes first.
                await self._try_anew("sealing", self._segment_writer.run)
        compactor.book()
        if not self._jobs.frozen:
            await self._try_anew("collection", compactor.collect)
            await self._try("removal of segments", self._segments.remove_unused, self._meta_batch.commit_members)

    async def _try(self, what: str, job: Callable[..., Awaitable[Any]], *arguments: Any) -> None:
        try:
            await job(*arguments)
        except (LogyardError, OSError) as error:
            log.error("storage: %s failed: %s", what, error)
            if self._space.found(what, error):
                self._no_room()

    async def _try_anew(self, what: str, job: Callable[[], Awaitable[Any]]) -> None:
        """Try the same for jobs that change nothing before their switch: a defect is counted, and tried again later."""
        if not self._jobs.is_due(what):
            return

        async def counted() -> None:
            try:
                await job()
            except (LogyardError, OSError):
                raise
            except Exception as error:
                raise self._jobs.fail(what, error) from error
            self._jobs.done(what)

        await self._try(what, counted)

    async def roll(self) -> None:
        """Seal the current WAL file, whatever room is left, and make its segment. Its caller holds `lock`."""
        sealed = await self._group_commit.exclusive(self._group_commit.wal.roll)
        self._note_reserve()
        if sealed is not None:
            self._segment_writer.unflushed.add([sealed])
        await self._segment_writer.run()

    async def try_roll(self) -> None:
        """Do the same where it may as well be done later: a failure of the disk, or a want of descriptors, is said."""
        await self._try("sealing", self.roll)

    async def compact(self) -> int:
        """Migrate and collect everything now; return how many files that were."""
        async with self.lock:
            files, trouble = await self._compactor.compact(self.roll, self._segment_writer.run)
            self.look()
            if trouble is not None:
                raise trouble
            await self._segments.remove_unused(self._meta_batch.commit_members)
            return files
