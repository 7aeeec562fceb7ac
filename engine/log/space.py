"""What a full disk stops and what goes on: ordinary writes wait, reads, truncations, deletions and votes do not.

Invariant: space is claimed before it is promised. The next WAL file and the reserve (spare WAL files, and one file that
is given up so that segments and rows have somewhere to go) are allocated while there is room; when they can't be,
ordinary writes are refused (`NoSpace`) or, from a leader elsewhere, not taken, and only what frees space or keeps
groups going is written. When all of it can be had again, writes go on. Asked by `admission` and `inbound`,
driven by `janitor`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import trio

from logyard.protocol.errors import NoSpace

from ..config import SystemConfig
from ..disk.door import Disk, is_full
from ..entry import Entry
from .group_commit import GroupCommit
from .wal_files import SPARE

T = TypeVar("T")
log = logging.getLogger(__name__)

DISK: Final = "the node's disk"
RETRY_S: Final = 1.0
"""The janitor looks once a second; sooner nothing can have changed."""
COPY_RETRY_S: Final = 30.0
"""Between two tries to copy what there was no room for: each may fill the disk again before it gives up."""
MARGIN_BYTES: Final = 64 * 1024
"""Of the last file: heads, directories and alignment of what is on its way there."""
LOW_BYTES: Final = 1 << 20
"""Enough for a start, a segment, some commits of the meta store."""
SMALL_BODY: Final = 256
"""A truncation has some bytes of payload: its argument."""
ENTRY_BYTES: Final = 128
"""Of a record's head and alignment, about."""


class Space:
    """One node's. `full`: there is no room for another WAL file. `free` is as of the last look, -1 before the first.
    `waiting()` gives the bytes that were admitted and are not with `group_commit` yet; `counted(cause)` hears of each
    refusal."""

    __slots__ = (
        "full", "free", "reason", "refused", "failed", "_directory", "_disk", "_config", "_group_commit", "_waiting",
        "_counted", "_copy_at", "_since", "_held",
    )  # fmt: skip

    def __init__(
        self,
        directory: Path,
        disk: Disk,
        config: SystemConfig,
        group_commit: GroupCommit,
        waiting: Callable[[], int],
        counted: Callable[[str], None],
    ) -> None:
        self._directory = str(directory)
        self._disk = disk
        self._config = config
        self._group_commit = group_commit
        self._waiting = waiting
        self._counted = counted
        self.full = False
        self.free = -1
        self.reason = ""
        # Messages of leaders elsewhere that were not taken.
        self.refused = 0
        # A job of the janitor's present round found no room.
        self.failed = False
        # Not before this time (monotonic, s) is anything copied by itself.
        self._copy_at = 0.0
        self._since = 0.0
        # The file that is given up exists.
        self._held = False

    @property
    def _path(self) -> str:
        return os.path.join(self._directory, "reserve")

    def open(self) -> None:
        """Open the reserve before recovery, which writes: a node that stopped on a full disk starts on one.
        BLOCKING."""
        self._held = os.path.exists(self._path)
        disk, path = self._disk, self._directory
        if self._held and disk.free_bytes(path) < self._config.disk_reserve_bytes:
            self._give_up()
        if disk.free_bytes(path) < LOW_BYTES and os.path.exists(wal := os.path.join(path, "wal")):
            # Somebody else's files took the room: one spare WAL file is enough to start with.
            spares = [name for name in disk.list_directory(wal) if name.endswith(SPARE)]
            for name in spares[:1]:
                disk.unlink(os.path.join(wal, name))

    def is_low(self) -> bool:
        """Return whether there is next to nothing left."""
        return self._disk.free_bytes(self._directory) < LOW_BYTES

    @property
    def is_short(self) -> bool:
        """Whether the reserve of the WAL is in use."""
        return self._group_commit.wal.stock.short

    # Asked in turns

    def takes(self, size: int) -> bool:
        """Return whether an ordinary write of `size` bytes still has room in the WAL file in use, behind all that is
        queued. Asked only while `full`."""
        group_commit = self._group_commit
        if group_commit.wal.stock.short or group_commit.held:
            return False
        return size + group_commit.queued_bytes + self._waiting() + MARGIN_BYTES <= group_commit.wal.room

    def refusal(self) -> NoSpace:
        """Return what an ordinary write gets."""
        self._counted(DISK)
        return NoSpace(
            f"the disk of this node is full ({self.reason}): reads, truncation and deletion go on, writes wait",
            cause=DISK,
            retry_after=RETRY_S,
        )

    def accepts(self, entries: Sequence[Entry]) -> int:
        """Return how many of a leader's entries a follower writes while `full`. What carries next to no payload may be
        what frees space, and all but half a file of the reserve is for it; that half is for terms and votes, and for
        what this node's leaders owe."""
        total = own = 0
        wal = self._group_commit.wal
        left = wal.room + wal.stock.spare_bytes - self._group_commit.queued_bytes
        for number, entry in enumerate(entries):
            size = len(entry.data) + ENTRY_BYTES
            body = 0 if entry.tombstone else entry.body_bytes
            total += size + body
            own += size + body
            if not self.takes(total) and (body > SMALL_BODY or left - own < self._config.wal_file_bytes // 2):
                self.refused += 1
                return number
        return len(entries)

    def note(self, reason: str) -> None:
        """Note that there is no room for another WAL file: from now on ordinary writes wait."""
        if not self.full:
            self.full = True
            self.reason = reason
            self._since = time.monotonic()
            log.error("no room on the disk (%s): reads and deletions go on, writes wait for it", reason)

    # The janitor's

    def found(self, what: str, error: BaseException) -> bool:
        """Return whether a job failed for want of space: then it is done again out of the reserve."""
        if not (isinstance(error, NoSpace) or is_full(error)):
            return False
        self.failed = True
        self.note(what)
        return True

    async def out_of_reserve(self, what: str, job: Callable[[], Awaitable[T]]) -> T:
        """Do `job`; without room for it the reserve is given up, and it is done once more. Raises `NoSpace`."""
        try:
            return await job()
        except (NoSpace, OSError) as error:
            if not self.found(what, error):
                raise
        if self._held:
            await trio.to_thread.run_sync(self._give_up)
        try:
            return await job()
        except OSError as error:
            if not is_full(error):
                raise
            raise NoSpace(f"no room on the disk for {what}") from error

    def may_copy(self, size: int) -> bool:
        """Return whether `size` bytes may be copied to a generation now, and leave what is claimed untouched."""
        if time.monotonic() < self._copy_at:
            return False
        return 2 * size < self._disk.free_bytes(self._directory)

    def defer_copies(self) -> None:
        """Begin no copy by itself for a while, as one found no room."""
        self._copy_at = time.monotonic() + COPY_RETRY_S

    def allow_copies(self) -> None:
        """Begin copies again: somebody asks for one."""
        self._copy_at = 0.0

    async def look(self, quiet: bool) -> None:
        """Look once a second, after the jobs: claim what is to be held, or give up what they need. `quiet`: the disk
        has time to fill the next file with zeros ahead."""
        if self.failed or not await trio.to_thread.run_sync(self._claim, quiet):
            self.note("no room for the next WAL file")
            if self._held:
                await trio.to_thread.run_sync(self._give_up)
        elif self.full:
            self.full = False
            self.reason = ""
            log.warning("there is room on the disk again after %.1f s: writes go on", time.monotonic() - self._since)
        self.failed = False
        # Also while full: what the janitor gave back may be enough for what waits.
        self._group_commit.resume()

    def _claim(self, quiet: bool) -> bool:
        """Return whether the reserve and the next WAL file are there, made where missing. BLOCKING."""
        config, wal = self._config, self._group_commit.wal
        self.free = self._disk.free_bytes(self._directory)
        size = 0 if self._held else config.disk_reserve_bytes
        missing = wal.stock.missing * config.wal_file_bytes
        if not size and not missing:
            return True
        if size + missing > self.free:
            return False
        try:
            if size:
                self._hold(size)
            return missing == 0 or wal.prepare_next(quiet)
        except OSError as error:
            if not is_full(error):
                raise
            return False

    def _hold(self, size: int) -> None:
        disk = self._disk
        disk.unlink(self._path)
        fd = disk.create(self._path)
        try:
            disk.preallocate(fd, size, False)
        except OSError:
            disk.unlink(self._path)
            raise
        finally:
            disk.close(fd)
        self._held = True
        self._group_commit.wal.stock.economize(False)

    def _give_up(self) -> None:
        self._held = False
        # Segments and rows get it, which free space: a WAL file would take all of it.
        self._group_commit.wal.stock.economize(True)
        self._disk.unlink(self._path)

    def status(self) -> dict[str, Any]:
        """Return what `logyard status` shows: `full_s` since when writes are refused, `free_bytes` as of the last
        look."""
        return {
            "full": self.full,
            "full_s": round(time.monotonic() - self._since, 1) if self.full else 0.0,
            "reason": self.reason,
            "free_bytes": self.free,
            "reserve_bytes": self._config.disk_reserve_bytes if self._held else 0,
            "entries_refused": self.refused,
        }
