"""How a node ends: in order, or because it must not go on, as its disk failed (law 7) or the others know a newer data
directory of it (D12).

Invariants of an end by failure: from `begin` on nothing is written, acknowledged or voted; what still leaves says only
that a leadership is over, which needs no durability. All of it is best effort and bounded: who stops may not wait for a
disk or a network that does not answer. A disk's failure leaves the file `failed` behind, unsynced: it is for a restart
on the same kernel, whose page cache may hold what the disk does not (see `recovery.incarnation`).

A stop in order has a last word: how far each group was committed. A log on disk ends with entries of which nothing
there says whether a majority has them; members learn that from one another when they start. Who reads the directory of
a stopped node has nobody to ask, so it is written down when no other write can come.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import trio

from logyard.protocol.errors import LogyardError, Outdated, WalFailed

from ..disk.door import Disk
from ..log import meta_rows
from ..log.checkpoint_rows import Put
from ..log.wal import Wal, WalItem
from ..raft.messages import LEADER_GONE, TIMEOUT_NOW, Message
from ..raft.state import LEADER
from ..recovery.incarnation import MARK
from ..replica.member import Member

log = logging.getLogger(__name__)

FAREWELL_SECONDS = 0.25
"""For the last words to leave: one liveness timeout is longer, so nothing is lost by it."""
MARK_SECONDS = 2.0
"""For the mark to be written by a disk that may hang."""
HEIRS_MAX = 1000
"""So many groups are handed to the best heir; the rest are told that their leader is gone, and campaign spread out."""
LOOK_SECONDS = 0.01


class MetaBatch(Protocol):
    """What an end needs of the meta store's batches."""

    async def commit(self, build: Callable[[], Iterable[Put]]) -> None:
        """Store rows that are built under the lock."""
        ...


class FailStop:
    """The end by failure. `over` are called when it begins; `send` are last words, and `talking` says that some have
    not left."""

    def __init__(
        self,
        disk: Disk,
        path: Path,
        members: Mapping[int, Member],
        meta_batch: MetaBatch,
        over: Callable[[LogyardError], None],
        send: Callable[[Sequence[Message]], None],
        talking: Callable[[], bool],
    ) -> None:
        self.failure: LogyardError | None = None
        self.begun = trio.Event()
        self._disk = disk
        self._path = path
        self._members = members
        self._meta_batch = meta_batch
        self._over = over
        self._send = send
        self._talking = talking

    def begin(self, error: LogyardError) -> None:
        """Begin the end: nothing more is promised from here on. The first reason stays."""
        if self.failure is not None:
            return
        if not isinstance(error, WalFailed | Outdated):
            error = WalFailed(str(error))
        self.failure = error
        self._over(error)
        log.error("this node stops: %s", error)
        if isinstance(error, WalFailed):
            self._hand_over()
        for member in self._members.values():
            member.proposals.fail(error)
            member.proposals.fail_proposed(error)
        self.begun.set()

    async def finish(self) -> LogyardError:
        """Wait for it; let the last words leave, and leave a mark for the next start. Returns why."""
        await self.begun.wait()
        error = self.failure
        assert error is not None
        with trio.move_on_after(MARK_SECONDS):
            if isinstance(error, Outdated):
                reason = error.reason
                try:
                    await self._meta_batch.commit(lambda: [(meta_rows.OUTDATED, reason.encode())])
                except (LogyardError, OSError) as failed:
                    log.error("it is not marked as outdated: %s", failed)
            else:
                await trio.to_thread.run_sync(self._mark, abandon_on_cancel=True)
        with trio.move_on_after(FAREWELL_SECONDS):
            while self._talking():
                await trio.sleep(LOOK_SECONDS)
        return error

    def _hand_over(self) -> None:
        """Ask the most advanced live voter of each group that this node leads to take over, and tell the others."""
        words: list[Message] = []
        handed = 0
        for member in self._members.values():
            raft = member.raft
            if raft.role != LEADER or raft.stopped:
                continue
            raft.resign(handed < HEIRS_MAX)
            handed += 1
            ready = raft.ready()
            if ready is not None:
                # Not its appends: nobody would store what they carry here, and a new leader decides about it anyway.
                words += [message for message in ready.messages if message.kind in (LEADER_GONE, TIMEOUT_NOW)]
        if words:
            log.warning("%d leaderships are handed over", handed)
            self._send(words)

    def _mark(self) -> None:
        """Mark the directory. Not synced: a restart of the machine forgets the page cache, and may forget this as well.
        BLOCKING."""
        disk, path = self._disk, str(self._path / MARK)
        try:
            disk.unlink(path)
            fd = disk.create(path)
            try:
                disk.gather_write(fd, [str(self.failure).encode()], 0)
            finally:
                disk.close(fd)
        except OSError as error:
            log.error("the mark of the failure was not left: %s", error)


def note_commits(members: Iterable[Member], wal: Wal) -> None:
    """Make the commit index of every group durable, as the last word of a stop in order. BLOCKING. Failing here costs a
    reader the newest records, no more: it is logged."""
    items = []
    for member in members:
        raft = member.raft
        commit = min(raft.commit, raft.log.stable)
        if not member.damaged and commit > member.snapshot_stored:
            items.append(WalItem(member.uid, hard_state=(raft.term, raft.vote, commit)))
    try:
        if items:
            wal.write(items)
    except LogyardError as error:
        log.warning("what is committed here could not be noted: %s", error)
