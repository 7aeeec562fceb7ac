"""A sealed WAL file's metadata becomes a segment, and slots of rings; the file stays as the home of its payloads.

Order: rings and segment durable -> the switch in memory -> one meta commit. A flush that failed is done again from
where it was: what was switched to is not written anew, as readers and logs go by it, and once it is stored none of it
is done again. A start that finds it not stored writes it anew, and counts what lives by the log as it is then: until
the commit no log begins above the segment (`SegmentFiles.stored_through`). What a switch left half adopted is not
adopted once more: a restart reads it anew from the file. Driven by `janitor`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from ..jobs import Jobs
from ..replica.member import Member
from .liveness_accounting import LivenessAccounting, Present
from .location import Location, SealedFile, Unflushed
from .meta_batch import MetaBatch
from .segment_files import Flushed, SegmentFiles
from .space import Space
from .wal import Sealed


class SegmentWriter:
    """One node's. `adopted(sealed, file, members)` hears of each flushed file and of the members it speaks of."""

    def __init__(
        self,
        members: Mapping[int, Member],
        unflushed: Unflushed,
        space: Space,
        meta_batch: MetaBatch,
        location: Location,
        segments: SegmentFiles,
        accounting: LivenessAccounting,
        jobs: Jobs,
        adopted: Callable[[Sealed, SealedFile, set[Member]], Awaitable[None]],
    ) -> None:
        self._members = members
        self.unflushed = unflushed
        self._space = space
        self._meta_batch = meta_batch
        self._location = location
        self._segments = segments
        self._accounting = accounting
        self._jobs = jobs
        self._adopted = adopted
        self._half_adopted = False
        # By number: files that were switched to and are not stored yet, and the members that each speaks of.
        self._switched: dict[int, tuple[SealedFile, set[Member]]] = {}
        # Members whose hard state is in a file without a segment: before that goes, the meta store must have it.
        self._hard_states: set[Member] = set()

    def hard_state_written(self, member: Member) -> None:
        """Note that this member's hard state is in the current WAL file."""
        self._hard_states.add(member)

    def forget(self, member: Member) -> None:
        """Forget a member, of which nothing more is to be stored."""
        self._hard_states.discard(member)

    async def run(self) -> None:
        """Write segments for all files that have none."""
        while self.unflushed.backlog_files and not self._half_adopted:
            sealed, stored = self.unflushed.begin(), None
            try:
                stored = await self._flush(sealed)
            finally:
                self.unflushed.end(stored is not None)
            await self._adopted(sealed, *stored)

    async def _flush(self, sealed: Sealed) -> tuple[SealedFile, set[Member]]:
        hard_states, self._hard_states = self._hard_states, set()
        try:
            if sealed.file not in self._switched:
                self._switched[sealed.file] = await self._switch(sealed)
            file, found = self._switched[sealed.file]
            # Who was in the file may have become a row and a member again since.
            touched = {member for one in found if (member := self._members.get(one.uid)) is not None}
            touched |= {member for member in hard_states if self._members.get(member.uid) is member}
            bases = {member: member.raft.log.snapshot_index for member in touched if member.ring}
            await self._meta_batch.commit_members(touched, sealed_files=[file])
            del self._switched[file.file]
            self._segments.stored(file.file)
            for member, base in bases.items():
                member.free_ring(base)
        except BaseException:
            # The file is sealed again later, and what it says of terms and votes must be stored then.
            self._hard_states |= hard_states
            raise
        return file, touched

    async def _switch(self, sealed: Sealed) -> tuple[SealedFile, set[Member]]:
        """Write the segment of a file and its slots of rings, and go by them; return the members that it speaks of."""
        written = await self._space.out_of_reserve("a segment", lambda: self._segments.write(sealed))
        file, touched = SealedFile(sealed.file, sealed.length), set[Member]()
        present = self._accounting.present(file.file, written.found)
        self._half_adopted = True
        with self._jobs.switching(f"the segment of WAL file {file.file}"):
            self._adopt(file, written, present, touched)
        self._half_adopted = False
        # Law 4: a ring has no payloads, and those of the file go with it.
        self._meta_batch.raise_floors(member.uid for member in written.ring)
        return file, touched

    def _adopt(self, file: SealedFile, written: Flushed, present: Sequence[Present], touched: set[Member]) -> None:
        """Switch to a segment and slots that are durable; the members that they speak of go to `touched`."""
        users: set[int] = set()
        for uid in written.found:
            member = self._members.get(uid)
            if member is not None and self._segments.is_left(member):
                users.add(uid)
                file.keep()
            if member is not None and not member.damaged:
                # Its floor and its truncations are in the file as well.
                touched.add(member)
        rings = dict(written.ring)
        for member, run, share, size in present:
            users.add(member.uid)
            member.add_segment(run, rings.pop(member, ()))
            file.add(member.uid, share, size)
        for member, ring in rings.items():
            if ring:
                member.add_segment(None, ring)
        touched.update(written.ring)
        self._segments.adopt(file.file, users)
        self._location.add(file)
