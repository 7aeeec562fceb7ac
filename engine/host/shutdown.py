"""How a node ends that must not go on: its disk failed (law 7), or the others know a newer data directory of it (D12).

Invariants: from `begin` on nothing is written, acknowledged or voted; what still leaves says only that a leadership is
over, which needs no durability. All of it is best effort and bounded: who stops may not wait for a disk or a network
that does not answer. A disk's failure leaves the file `failed` behind, unsynced: it is for a restart on the same
kernel, whose page cache may hold what the disk does not (see `life`). Called by `system`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

from logyard.protocol.errors import LogyardError, Outdated, WalFailed

from ..log import meta_rows
from ..raft import election
from ..raft.core import LEADER
from ..raft.messages import LEADER_GONE, TIMEOUT_NOW, Message
from ..recovery.incarnation import MARK

if TYPE_CHECKING:
    from .system import System

log = logging.getLogger(__name__)

FAREWELL_SECONDS = 0.25
"""For the last words to leave: one liveness timeout is longer, so nothing is lost by it."""
MARK_SECONDS = 2.0
"""For the mark to be written by a disk that may hang."""
HEIRS_MAX = 1000
"""So many groups are handed to the best heir; the rest are told that their leader is gone, and campaign spread out."""
LOOK_SECONDS = 0.01


def begin(system: System, error: LogyardError) -> None:
    """Begin the end: nothing more is promised from here on, and `System.run` ends soon. The first reason stays."""
    if system.failure is not None:
        return
    system.failure = error
    system.durability.refuse(error)
    log.error("this node stops: %s", error)
    if isinstance(error, WalFailed):
        _hand_over(system)
    for member in system.members.values():
        member.proposals.fail(error)
        member.proposals.fail_proposed(error)
    system.ended.set()


async def finish(system: System) -> None:
    """Let the last words leave, and leave a mark for the next start."""
    error = system.failure
    with trio.move_on_after(MARK_SECONDS):
        if isinstance(error, Outdated):
            reason = error.reason
            try:
                await system.storage.books.commit(lambda: [(meta_rows.OUTDATED, reason.encode())])
            except (LogyardError, OSError) as failed:
                log.error("it is not marked as outdated: %s", failed)
        else:
            await trio.to_thread.run_sync(_mark, system, abandon_on_cancel=True)
    with trio.move_on_after(FAREWELL_SECONDS):
        while any(peer.up and peer.queued for peer in system.peers.status()):
            await trio.sleep(LOOK_SECONDS)


def _hand_over(system: System) -> None:
    """Ask the most advanced live voter of each group that this node leads to take over, and tell the others."""
    words: list[Message] = []
    handed = 0
    for member in system.members.values():
        raft = member.raft
        if raft.role != LEADER or raft.stopped:
            continue
        election.resign(raft, handed < HEIRS_MAX)
        handed += 1
        ready = raft.ready()
        if ready is not None:
            # Not its appends: nobody would store what they carry here, and a new leader decides about it anyway.
            words += [message for message in ready.messages if message.kind in (LEADER_GONE, TIMEOUT_NOW)]
    if words:
        log.warning("%d leaderships are handed over", handed)
        system.peers.send(words)


def _mark(system: System) -> None:
    """Leave the mark of a failed disk. Not synced: a restart of the machine forgets the page cache, and may forget this
    as well. BLOCKING."""
    disk, path = system.disk, str(system.path / MARK)
    try:
        disk.unlink(path)
        fd = disk.create(path)
        try:
            disk.gather_write(fd, [str(system.failure).encode()], 0)
        finally:
            disk.close(fd)
    except OSError as error:
        log.error("the mark of the failure was not left: %s", error)
