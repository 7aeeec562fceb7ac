"""A sealed WAL file's metadata becomes a segment, and slots of rings; the file stays as the home of its payloads.

Order: rings and segment durable -> the switch in memory -> meta commits, the last of which says that the file has its
segment. A file may have entries of very many groups, so the switch and the rows go in steps of `groups_per_step`, and
others get their turn in between: a group that the switch did not come to yet is where it was, one that it came to is as
between switch and commit, and the file is open to the end. A flush that failed is done again from where it was: what
was switched to is not written anew, as readers and logs go by it, unless a step can't read it, and once it is stored
none of it is done again. A start that finds it not stored writes it anew, and counts what lives by the log as it is
then: until the last commit no log begins above the segment (`SegmentFiles.stored_through`). What a step left half
adopted is not adopted once more: a restart reads it anew from the file. Driven by `janitor`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

import trio

from logyard.protocol.errors import Busy

from ..jobs import Jobs
from ..replica.member import Member
from .liveness_accounting import LivenessAccounting, Present
from .location import Location, SealedFile, Unflushed
from .meta_batch import MetaBatch
from .segment_files import Flushed, SegmentFiles
from .space import Space
from .wal import Sealed

GROUPS_PER_STEP = 1000
"""Groups that are switched to a segment, or whose rows are built, at once: some 20 ms of the loop."""


class Switch:
    """A file on its way to its segment: which of its groups went by it already, and whom its rows speak of."""

    __slots__ = ("done", "file", "groups", "members", "rings", "touched", "unreadable", "users")

    def __init__(self, file: SealedFile, written: Flushed, members: Mapping[int, Member]) -> None:
        self.file = file
        self.rings = dict(written.ring)
        self.groups = list(written.found.items())
        self.touched = [member.uid for member in written.ring]
        if written.ring:
            # Those of rings first: the first step takes all of these.
            ringed = {*self.touched}
            self.groups.sort(key=lambda one: one[0] not in ringed)
        # Of a log that is made anew from here on, the file has nothing any more.
        self.members = {uid: members.get(uid) for uid in written.found}
        self.done = 0
        self.users: set[int] = set()
        # A step could not read the segment: it is to be written anew before the next one.
        self.unreadable = False

    @property
    def is_done(self) -> bool:
        """Whether all groups went by it."""
        return self.done == len(self.groups)

    def went(self, count: int) -> None:
        """Note that the next `count` groups go by it, and all rings that it was written with."""
        self.done += count
        self.rings.clear()

    def read(self, well: bool) -> None:
        """Note whether it can be read."""
        self.unreadable = not well


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
        adopted: Callable[[Sealed, SealedFile, Sequence[Member]], Awaitable[None]],
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
        self.groups_per_step = GROUPS_PER_STEP
        self._half_adopted = False
        # By number: files whose switch began, and that are not stored yet.
        self._switches: dict[int, Switch] = {}
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

    async def _flush(self, sealed: Sealed) -> tuple[SealedFile, list[Member]]:
        hard_states, self._hard_states = self._hard_states, set()
        try:
            switch = self._switches.get(sealed.file) or await self._begin(sealed)
            if switch.unreadable:
                await self._space.out_of_reserve("a segment", lambda: self._segments.write_anew(sealed))
                switch.read(True)
            while not switch.is_done:
                await trio.lowlevel.checkpoint()
                self._step(switch)
            members = await self._store(switch, hard_states)
        except BaseException:
            # The file is sealed again later, and what it says of terms and votes must be stored then.
            self._hard_states |= hard_states
            raise
        return switch.file, members

    async def _store(self, switch: Switch, hard_states: set[Member]) -> list[Member]:
        """Store the rows of all whom the file speaks of, and with the last of them that it has its segment; return
        them."""
        members, step = self._members, self.groups_per_step
        changed = sorted(one.uid for one in hard_states if members.get(one.uid) is one)
        uids = list(dict.fromkeys([*switch.touched, *changed]))
        stored: list[Member] = []
        bases: dict[Member, int] = {}
        while True:
            # Who was in the file may have become a row and a member again since.
            some = [member for uid in uids[:step] if (member := members.get(uid)) is not None]
            del uids[:step]
            bases |= {member: member.raft.log.snapshot_index for member in some if member.ring}
            stored += some
            if not uids:
                break
            await self._meta_batch.commit_members(some)
        await self._meta_batch.commit_members(some, sealed_files=[switch.file])
        del self._switches[switch.file.file]
        self._segments.stored(switch.file.file)
        for member, base in bases.items():
            member.free_ring(base)
        return stored

    async def _begin(self, sealed: Sealed) -> Switch:
        """Write the segment of a file and its slots of rings, and take the first step of the switch to them."""
        written = await self._space.out_of_reserve("a segment", lambda: self._segments.write(sealed))
        switch = Switch(SealedFile(sealed.file, sealed.length), written, self._members)
        # What the rings took is the content of logs now, and may not be when others had their turn.
        self._step(switch, len(written.ring))
        # Law 4: a ring has no payloads, and those of the file go with it.
        self._meta_batch.raise_floors(member.uid for member in written.ring)
        return switch

    def _step(self, switch: Switch, least: int = 0) -> None:
        """Let the next groups, at least so many, go by the segment and the slots, which are durable."""
        members, file, has_begun = self._members, switch.file, switch.file.file in self._switches
        some = switch.groups[switch.done : switch.done + max(least, self.groups_per_step)]
        try:
            present = self._accounting.present(
                file.file, {uid: found for uid, found in some if members.get(uid) is switch.members[uid]}
            )
        except Busy:
            raise
        except Exception:
            switch.read(False)
            raise
        self._half_adopted = True
        with self._jobs.switching(f"the segment of WAL file {file.file}"):
            if not has_begun:
                # From the first group on: logs and counters go by both.
                self._location.add(file)
                self._segments.adopt(file.file, switch.users)
            self._adopt(switch, [uid for uid, _ in some], present)
        self._switches[file.file] = switch
        self._half_adopted = False

    def _adopt(self, switch: Switch, uids: Sequence[int], present: Sequence[Present]) -> None:
        for uid in uids:
            member = self._members.get(uid)
            if member is not None and self._segments.is_left(member):
                switch.users.add(uid)
                switch.file.keep()
            if member is not None and not member.damaged:
                # Its floor and its truncations are in the file as well.
                switch.touched.append(uid)
        for member, run, share, size in present:
            switch.users.add(member.uid)
            member.add_segment(run, switch.rings.pop(member, ()))
            switch.file.add(member.uid, share, size)
        for member, ring in switch.rings.items():
            if ring:
                member.add_segment(None, ring)
        switch.went(len(uids))
