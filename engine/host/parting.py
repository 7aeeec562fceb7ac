"""The last word of a node that stops in order: how far each group was committed.

A log on disk ends with entries of which nothing there says whether a majority has them; members learn that from one
another when they start. Who reads the directory of a stopped node has nobody to ask, so a stop writes it down. Called
by `system` when no other write can come.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from logyard.protocol.errors import LogyardError

from ..log.record import WalItem

if TYPE_CHECKING:
    from .system import System

log = logging.getLogger(__name__)


def note_commits(system: System) -> None:
    """Make the commit index of every group durable. BLOCKING. Failing here costs a reader the newest records, no more:
    it is logged."""
    items = []
    for member in system.members.values():
        raft = member.raft
        commit = min(raft.commit, raft.log.stable)
        if not member.damaged and commit > member.snapshot_stored:
            items.append(WalItem(member.uid, hard_state=(raft.term, raft.vote, commit)))
    try:
        if items:
            system.wal.write(items)
    except LogyardError as error:
        log.warning("what is committed here could not be noted: %s", error)
