"""The rings of a node: one file for each system group, and which slots of it a job may write.

Invariant: a job writes free slots only. A slot is free when no row that a start may find names another entry of it, and
`Member.ring` has all that such rows name: it grows when a job is done, and shrinks from below only after the commit
that says so, which `plan` makes when it needs the slots. A ring that no row names and that was not made by a job of
this life is made anew before it gets a run: its name may not be durable, though it is there. One descriptor a group,
opened by its first reader. All calls on the loop; of a group that is gone, readers are closed. Called by
`segment_files`, `segment_writer`, readers, and by a start.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from logyard.protocol.errors import Busy, Corrupt, LogyardError

from ..disk.door import Disk, unreadable
from ..entry import Entry
from ..replica.member import Member
from .meta_rows import RingRun
from .ring import FOLDER, Geometry, RingReader, ring_name, uid_of
from .segment_job import RingJob

log = logging.getLogger(__name__)

DIRECTORY_FORMAT = 2
"""Of one with rings: an older program, which would not find what is in them, refuses it."""


class Planned(NamedTuple):
    """What the ring of a member is to take."""

    member: Member
    job: RingJob


class Shape(NamedTuple):
    """What a member's ring is like, `make`: once it is made; no geometry where it can't be written now, and `why` that
    is for people to know."""

    geometry: Geometry | None
    make: bool = False
    why: str = ""


class RingFiles:
    """One node's, in `directory`. New rings have this `geometry`; `commit` stores rows of members, `raise_format` says
    in the store that there are rings."""

    def __init__(
        self,
        directory: Path,
        disk: Disk,
        members: Mapping[int, Member],
        geometry: Geometry,
        commit: Callable[[Collection[Member]], Awaitable[None]],
        raise_format: Callable[[int], Awaitable[None]],
    ) -> None:
        self.geometry = geometry
        self.refused = 0
        """Entries of system groups that went to segments for want of a slot, or of a ring, since the start."""
        self._directory = directory / FOLDER
        self._disk = disk
        self._members = members
        self._commit = commit
        self._raise_format = raise_format
        self._readers: dict[int, RingReader] = {}
        # Groups whose ring is durable under its name: a row has named it, or a job of this life made it.
        self._named: set[int] = set()

    def path(self, uid: int) -> Path:
        """Return where a group's ring lies."""
        return self._directory / ring_name(uid)

    def names(self) -> list[str]:
        """Return what is in the directory of rings, if there is one."""
        return self._disk.list_directory(str(self._directory)) if self._directory.is_dir() else []

    def scan(self) -> None:
        """Look whether all rings are of a format that is known, before anything is touched. BLOCKING. Raises
        `WrongIdentity`."""
        for name in self.names():
            if uid := uid_of(name):
                try:
                    self.reader(uid)
                except (Busy, Corrupt):
                    # Who needs it meets it again.
                    continue
        self.close()

    def sweep(self, is_known: Callable[[int], bool]) -> None:
        """Remove at a start what is unfinished, and rings of groups that are not here any more. BLOCKING."""
        for name in self.names():
            uid = uid_of(name)
            if name.endswith(".tmp") or (uid and not is_known(uid)):
                self.close_one(uid)
                self._unlink(self._directory / name)

    def reader(self, uid: int) -> RingReader:
        """Return a group's ring, open. Raises `Corrupt`, `Busy`, and `WrongIdentity` for a newer format."""
        reader = self._readers.get(uid)
        if reader is None:
            path = str(self.path(uid))
            try:
                reader = self._readers[uid] = RingReader(self._disk, path, uid)
            except OSError as error:
                raise unreadable(path, 0, "a ring", error) from error
        return reader

    def has(self, uid: int, index: int) -> bool:
        """Return whether an entry of a group's log is in its ring, and so in no segment."""
        member = self._members.get(uid)
        return member is not None and any(run.first <= index <= run.last for run in member.ring_runs)

    async def plan(self, latest: Mapping[int, Sequence[Entry]]) -> list[Planned]:
        """Return what rings take of a sealed file, of which `latest` are each group's last writes; the rest is for the
        segment."""
        makes = False
        for uid, entries in latest.items():
            member = self._taking(uid)
            if member is None:
                continue
            geometry, make, _ = self._shape(member)
            wanted = _wanted(member, entries, geometry) if geometry is not None else []
            makes = makes or (make and bool(wanted))
            if geometry is not None and any(not _is_free(member, entry.index, geometry) for entry in wanted):
                await self._free(member)
        if makes:
            await self._raise_format(DIRECTORY_FORMAT)
        # While that was stored, groups may have gone, or their logs and rings be others: all is decided now, at once.
        found = [self._decide(uid, entries, makes) for uid, entries in latest.items()]
        return [one for one in found if one is not None]

    def _decide(self, uid: int, entries: Sequence[Entry], may_make: bool) -> Planned | None:
        """Return what a group's ring is to take now, without waiting for anything."""
        member = self._taking(uid)
        if member is None:
            return None
        geometry, make, why = self._shape(member)
        if why:
            log.error("group %s: its ring can't be used: %s", member.spec.name, why)
        if geometry is None or (make and not may_make):
            self.refused += len(entries)
            return None
        wanted = _wanted(member, entries, geometry)
        free = [entry for entry in wanted if _is_free(member, entry.index, geometry)]
        self.refused += len(wanted) - len(free)
        return Planned(member, RingJob(uid, str(self.path(uid)), *geometry, make, tuple(_runs(free)))) if free else None

    def _taking(self, uid: int) -> Member | None:
        """Return a member whose ring takes entries."""
        member = self._members.get(uid)
        if member is None or not member.spec.is_system or member.damaged or member.raft.stopped:
            return None
        return member

    def _shape(self, member: Member) -> Shape:
        """Return what a member's ring is like, and whether it is to be made."""
        if member.ring:
            self._named.add(member.uid)
        try:
            geometry = self.reader(member.uid).geometry
        except Busy:
            return Shape(None)
        except LogyardError as error:
            # A new file would have nothing of what a row names.
            return Shape(None, why=str(error)) if member.ring else Shape(self.geometry, make=True)
        return Shape(geometry) if member.uid in self._named else Shape(self.geometry, make=True)

    async def _free(self, member: Member) -> None:
        """Have the row say that the log begins where it does, so that what is below is needed no more."""
        base = member.raft.log.snapshot_index
        if member.ring and member.ring[0].first <= base:
            await self._commit([member])
            member.free_ring(base)

    def written(self, planned: Sequence[Planned], failed: Mapping[int, str]) -> dict[Member, list[RingRun]]:
        """Return what of finished jobs is the content of logs, which may be nothing: their rings have it now."""
        found: dict[Member, list[RingRun]] = {}
        for member, job in planned:
            uid = job.uid
            if job.make:
                self.close_one(uid)
                if uid not in failed:
                    self._named.add(uid)
            if self._members.get(uid) is not member:
                # It went while the job ran, and no row names anything of its ring.
                self.remove(uid)
            elif uid in failed:
                log.error("group %s: its ring can't be written: %s", member.spec.name, failed[uid])
                self.refused += sum(run.last - run.first + 1 for run in job.runs)
            elif not member.damaged:
                found[member] = [run for one in job.runs for run in _present(member, one)]
        return found

    def remove(self, uid: int) -> None:
        """Remove the ring of a group that is gone. What is left of it by a crash goes with the next start."""
        self.close_one(uid)
        self._named.discard(uid)
        self._unlink(self.path(uid))

    def _unlink(self, path: Path) -> None:
        """Remove a file that nobody needs; what can't be removed costs nobody else anything, and a start tries
        again."""
        try:
            self._disk.unlink(str(path))
        except OSError as error:
            log.warning("%s can't be removed: %s", path, error)

    def close_one(self, uid: int) -> None:
        """Close a group's ring: who reads next opens it again."""
        reader = self._readers.pop(uid, None)
        if reader is not None:
            reader.close()

    def close(self) -> None:
        """Close every ring."""
        for uid in list(self._readers):
            self.close_one(uid)

    def status(self) -> dict[str, int]:
        """Return how many there are, their bytes, and how many entries they did not take."""
        sizes = [os.path.getsize(self._directory / name) for name in self.names() if uid_of(name)]
        return {"files": len(sizes), "bytes": sum(sizes), "refused": self.refused}


def _wanted(member: Member, entries: Sequence[Entry], geometry: Geometry) -> list[Entry]:
    """Return the entries that a ring is to have: the newest of what is the log's content, as many as there are slots.
    Not what is larger than a slot, and not what has payload that lives or is not applied: a segment says where that
    is."""
    raft_log = member.raft.log
    now = [one for one in entries if one.index > raft_log.snapshot_index and raft_log.term(one.index) == one.term]
    if not now:
        return []
    first = now[-1].index - geometry.slots + 1
    return [
        one
        for one in now
        if one.index >= first
        and len(one.data) <= geometry.data_bytes_max
        and (not one.body_bytes or one.tombstone or member.is_dead(one))
    ]


def _is_free(member: Member, index: int, geometry: Geometry) -> bool:
    """Return whether no stored row names an entry of this entry's slot."""
    return all(run.first + (index - run.first) % geometry.slots > run.last for run in member.ring)


def _present(member: Member, run: RingRun) -> list[RingRun]:
    """Return what of a run is the log's content still: it may have been overwritten, or have begun anew."""
    raft_log = member.raft.log
    indexes = range(max(run.first, raft_log.snapshot_index + 1), min(run.last, raft_log.last_index) + 1)
    last = max((index for index in indexes if raft_log.term(index) == run.term), default=0)
    return [RingRun(indexes[0], last, run.term)] if last else []


def _runs(entries: Sequence[Entry]) -> list[RingRun]:
    found: list[RingRun] = []
    for entry in entries:
        if found and (found[-1].last + 1, found[-1].term) == (entry.index, entry.term):
            found[-1] = found[-1]._replace(last=entry.index)
        else:
            found.append(RingRun(entry.index, entry.index, entry.term))
    return found
