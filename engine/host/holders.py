"""Who holds up the oldest files: the groups for which a WAL file or a segment can't go yet, by name, and what is asked
of them.

A sealed WAL file is held by what it is the home of: payloads move to a generation by size, age and share of dead bytes
(`migration`), but not while an entry in the file is uncommitted, and not of a group whose records are damaged. A
segment is held by logs that no snapshot covers: beyond `segments_max` of them the groups that need the oldest are asked
for one. Reading costs the oldest files' groups only. Called by `storage` and for the status.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from ..replica.member import RUNNING, Member

if TYPE_CHECKING:
    from .system import System

NAMED_MAX = 8
ASKED_MAX = 500
"""Groups that are asked for a snapshot in one look: some 50 ms of the loop."""


class Holders:
    """One node's. `asked` counts snapshots that were taken for the sake of an old segment."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.asked = 0

    def status(self) -> dict[str, Any]:
        """For `logyard status`: the oldest WAL file without or with a segment and the oldest segment (0: none), with
        how many groups hold each and the first few as (name, reason)."""
        storage = self.system.storage
        wal_file, segment = min(storage.files, default=0), min(storage.segments.users, default=0)
        wal = list(islice(self._of_file(wal_file), NAMED_MAX))
        logs = list(islice(self._of_segment(segment), NAMED_MAX))
        return {
            "unflushed_files": storage.backlog_files,
            "wal_file": wal_file,
            "wal_groups": len(storage.files[wal_file].shares) if wal_file else 0,
            "wal_names": [[member.spec.name, reason] for member, reason in wal],
            "segment": segment,
            "segment_groups": len(storage.segments.users.get(segment, ())),
            "segment_names": [[member.spec.name, reason] for member, reason in logs],
            "asked": self.asked,
        }

    def _of_file(self, number: int) -> Iterator[tuple[Member, str]]:
        """Those that hold it against migration come first."""
        file = self.system.storage.files.get(number)
        shares = () if file is None else file.shares.items()
        holding = [(member, share) for uid, share in shares if (member := self.system.members.get(uid)) is not None]
        for member, share in holding:
            if member.damaged:
                yield member, "its records are damaged"
            elif member.raft.commit < share.last:
                yield member, f"entry {share.last} is not committed"
        for member, share in holding:
            if not member.damaged and member.raft.commit >= share.last:
                yield member, f"{share.live} bytes of payload"

    def _of_segment(self, number: int) -> Iterator[tuple[Member, str]]:
        for uid in self.system.storage.segments.users.get(number, ()):
            member = self.system.members.get(uid)
            if member is None:
                continue
            last = max((run.last for run in member.segments if run.segment == number), default=0)
            if last > member.snapshot_index:
                yield member, f"no snapshot at {last}"
            elif last > member.compactable:
                yield member, "its snapshot is a checkpoint"

    async def ask(self) -> None:
        """With more than `segments_max` segments: a snapshot of the groups that need the oldest, so that it can go."""
        system = self.system
        users = system.storage.segments.users
        for number in sorted(users)[: max(0, len(users) - system.config.segments_max)]:
            asked = list(islice((one for one, _ in self._of_segment(number) if one.state == RUNNING), ASKED_MAX))
            if asked:
                taken = await system.snapshots.take(asked)
                self.asked += taken["taken"]
                # As the stored row says now, their logs need nothing of it.
                system.storage.segments.release(number)
            if len(asked) == ASKED_MAX:
                return
