"""Who holds up the oldest files: the groups for which a WAL file or a segment can't go yet, by name, and what is asked
of them.

A sealed WAL file is held by what it is the home of: payloads move to a generation by size, age and share of dead bytes
(`compactor`), but not while an entry in the file is uncommitted, and not of a group whose records are damaged. A
segment is held by logs that no snapshot covers: beyond `segments_max` of them the groups that need the oldest are asked
for one. Reading costs the oldest files' groups only. Called by `janitor` and for the status.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from ..replica.member import RUNNING, Member
from .location import Location, Unflushed
from .segment_files import SegmentFiles

NAMED_MAX = 8
ASKED_MAX = 500
"""Groups that are asked for a snapshot in one look: some 50 ms of the loop."""


class GcBlockers:
    """One node's. `asked` counts snapshots that were taken for the sake of an old segment; `take` takes them."""

    def __init__(
        self,
        members: Mapping[int, Member],
        unflushed: Unflushed,
        location: Location,
        segments: SegmentFiles,
        segments_max: int,
        take: Callable[[Sequence[Member]], Awaitable[Mapping[str, int]]],
    ) -> None:
        self.asked = 0
        self._members = members
        self._unflushed = unflushed
        self._files = location.files
        self._segments = segments
        self._segments_max = segments_max
        self._take = take

    def status(self) -> dict[str, Any]:
        """Return, for `logyard status`, the oldest WAL file without or with a segment and the oldest segment (0: none),
        with how many groups hold each and the first few as (name, reason)."""
        users = self._segments.users
        wal_file, segment = min(self._files, default=0), min(users, default=0)
        wal = list(islice(self._of_file(wal_file), NAMED_MAX))
        logs = list(islice(self._of_segment(segment), NAMED_MAX))
        return {
            "unflushed_files": self._unflushed.backlog_files,
            "wal_file": wal_file,
            "wal_groups": len(self._files[wal_file].shares) if wal_file else 0,
            "wal_names": [[member.spec.name, reason] for member, reason in wal],
            "segment": segment,
            "segment_groups": len(users.get(segment, ())),
            "segment_names": [[member.spec.name, reason] for member, reason in logs],
            "asked": self.asked,
        }

    def _of_file(self, number: int) -> Iterator[tuple[Member, str]]:
        """Yield those that hold a file, the ones that hold it against migration first."""
        file = self._files.get(number)
        shares = () if file is None else file.shares.items()
        holding = [(member, share) for uid, share in shares if (member := self._members.get(uid)) is not None]
        for member, share in holding:
            if member.damaged:
                yield member, "its records are damaged"
            elif member.raft.commit < share.last:
                yield member, f"entry {share.last} is not committed"
        for member, share in holding:
            if not member.damaged and member.raft.commit >= share.last:
                yield member, f"{share.live} bytes of payload"

    def _of_segment(self, number: int) -> Iterator[tuple[Member, str]]:
        for uid in self._segments.users.get(number, ()):
            member = self._members.get(uid)
            if member is None:
                continue
            last = max((run.last for run in member.segments if run.segment == number), default=0)
            if last > member.snapshot_index:
                yield member, f"no snapshot at {last}"
            elif last > member.compactable:
                yield member, "its snapshot is a checkpoint"

    async def ask(self) -> None:
        """Ask, with more than `segments_max` segments, for a snapshot of the groups that need the oldest, so that it
        can go."""
        users = self._segments.users
        for number in sorted(users)[: max(0, len(users) - self._segments_max)]:
            asked = list(islice((one for one, _ in self._of_segment(number) if one.state == RUNNING), ASKED_MAX))
            if asked:
                taken = await self._take(asked)
                self.asked += taken["taken"]
                # As the stored row says now, their logs need nothing of it.
                self._segments.release(number)
            if len(asked) == ASKED_MAX:
                return
