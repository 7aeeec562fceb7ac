"""The segment files of a node: who still needs which, and the order in which one goes.

Invariant: a segment is unlinked only after the stored rows that referred to it say so no more, so a restart never looks
for it. All calls on the loop; readers may be used by the copying thread, which runs beside no removal (one janitor).
Called by `janitor`, `segment_writer` and readers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import trio

from ..disk.door import Disk, unreadable
from ..replica.member import Member
from .meta_rows import RingRun, SegmentRun
from .payload_source import FileSource, LiveGroup
from .ring_files import Planned, RingFiles
from .segment import SegmentReader
from .segment_job import (
    Latest,
    SegmentJob,
    SegmentRunner,
    SegmentWritten,
    build_segment_job,
    latest_entries,
    run_segment_job,
)
from .wal import Sealed


class Flushed(NamedTuple):
    """What became of a sealed file. `found`: (first, last, term of the last, payload bytes) of each group in its
    segment; `ring`: what the rings of system groups took."""

    found: dict[int, tuple[int, int, int, int]]
    ring: dict[Member, list[RingRun]]


class SegmentFiles:
    """Readers and users of every segment. `is_home(number)`: the WAL file of that number is one still;
    `is_left(member)`: nobody can mend it, so what it has stays for people; `look` asks the janitor to come by;
    `elsewhere` writes segments instead of a thread of this process; `rings` take what system groups have."""

    def __init__(
        self,
        directory: Path,
        disk: Disk,
        members: Mapping[int, Member],
        is_home: Callable[[int], bool],
        is_left: Callable[[Member], bool],
        look: Callable[[], None],
        elsewhere: SegmentRunner | None,
        rings: RingFiles,
    ) -> None:
        self.is_left = is_left
        self.users: dict[int, set[int]] = {}
        self._directory = directory
        self._disk = disk
        self._members = members
        self._is_home = is_home
        self._look = look
        self._elsewhere = elsewhere
        self._rings = rings
        self._readers: dict[int, SegmentReader] = {}
        # Segments that nobody needs any more, and the members whose stored rows may still refer to them.
        self._unused: list[int] = []
        self._unreferring: set[Member] = set()
        # Segments that were switched to, and that no commit has stored yet.
        self._unstored: set[int] = set()
        # WAL files without segment of which something is left out: nobody else reads them as this process does.
        self.spoiled: set[int] = set()

    def adopt(self, number: int, users: set[int]) -> None:
        """Take in a segment that is durable, and the groups that need it; `stored` follows."""
        self.users[number] = users
        self._unstored.add(number)

    def stored(self, number: int) -> None:
        """Know that the switch to a segment is in the meta store."""
        self._unstored.discard(number)

    def stored_through(self, member: Member) -> int:
        """Return up to which entry a log is in segments that are stored as such. What lies behind is in a WAL file
        that gets its segment once more, after a failed commit or a start, and what lives there is counted by the log
        as it is then: until that is done, the log must not begin above it."""
        if self._unstored:
            for run in member.segments:
                if run.segment in self._unstored:
                    return min(member.flushed, run.first - 1)
        return member.flushed

    def recovered(self, users: dict[int, set[int]]) -> None:
        """Take over what a start found in the rows of the groups."""
        self.users = users

    def spoil(self, files: Collection[int]) -> None:
        """Have the segments of these WAL files written here: something is left out of them."""
        self.spoiled |= set(files)

    def source(self, file: int, groups: Sequence[LiveGroup]) -> FileSource:
        """Return what to copy of a sealed WAL file, as whoever does it finds it."""
        return FileSource(str(self.path(file)), str(self._directory / "wal"), file, tuple(groups))

    def status(self) -> dict[str, int]:
        """Return how many there are, and their bytes."""
        paths = [self.path(one) for one in self.users]
        return {"files": len(paths), "bytes": sum(path.stat().st_size for path in paths if path.exists())}

    def path(self, number: int) -> Path:
        """Return where a segment lies."""
        return self._directory / "segments" / f"{number:016x}.seg"

    def reader(self, number: int) -> SegmentReader:
        """Return an open segment. Raises `Corrupt`."""
        reader = self._readers.get(number)
        if reader is None:
            path = str(self.path(number))
            try:
                reader = self._readers[number] = SegmentReader(self._disk, path, number, self.in_ring)
            except OSError as error:
                raise unreadable(path, 0, "a segment", error) from error
        return reader

    def in_ring(self, uid: int, index: int) -> bool:
        """Return whether an entry of a group's log is in its ring, and so in no segment."""
        return self._rings.has(uid, index)

    def opened(self, number: int) -> SegmentReader | None:
        """Return the reader in use, if there is one."""
        return self._readers.get(number)

    def renew(self, number: int) -> None:
        """Close a file that was written anew: who reads next opens it again."""
        reader = self._readers.pop(number, None)
        if reader is not None:
            reader.close()

    async def write(self, sealed: Sealed) -> Flushed:
        """Write the segment, and the rings of the system groups in the file."""
        written = await trio.to_thread.run_sync(self._write_in_thread, sealed)
        planned: list[Planned] = []
        if isinstance(written, dict):
            planned = await self._rings.plan(written)
            written = await trio.to_thread.run_sync(self._write_in_thread, sealed, written, planned)
        info, sizes, failed = await self._finish(sealed, written)
        if sealed.file not in self.users:
            # What was read of an earlier try's file, which nobody took over, is read of this one.
            self.renew(sealed.file)
        found = {uid: (first, last, info.terms[uid][-1][1], sizes[uid]) for uid, (first, last) in info.runs.items()}
        return Flushed(found, self._rings.written(planned, failed))

    async def write_anew(self, sealed: Sealed) -> None:
        """Write a segment that was switched to, and can't be read, once more, with what rings took as well."""
        latest = await trio.to_thread.run_sync(latest_entries, sealed.entries)
        await self._finish(sealed, await trio.to_thread.run_sync(self._write_in_thread, sealed, latest))
        self.renew(sealed.file)

    async def _finish(self, sealed: Sealed, written: SegmentWritten | SegmentJob | Latest) -> SegmentWritten:
        """Have a job done elsewhere that was not done here."""
        if isinstance(written, SegmentJob):
            assert self._elsewhere is not None
            written = await self._elsewhere(written, sealed.entries)
        assert isinstance(written, SegmentWritten)
        return written

    def _write_in_thread(
        self, sealed: Sealed, latest: Latest | None = None, planned: Sequence[Planned] = ()
    ) -> SegmentWritten | SegmentJob | Latest:
        """Write the segment, or return the job for who else runs such jobs; or, where system groups have something in
        the file, each group's last writes, so that their rings are planned first."""
        members = self._members
        if latest is None:
            latest = latest_entries(sealed.entries)
            if any(member.spec.is_system for uid in latest if (member := members.get(uid)) is not None):
                return latest
        job = build_segment_job(
            sealed, lambda uid, index, term: uid in members, segment=sealed.file,
            path=str(self.path(sealed.file)), directory=str(self._directory / "wal"), latest=latest,
            rings=[one.job for one in planned],
        )  # fmt: skip
        here = self._elsewhere is None or sealed.file in self.spoiled
        return run_segment_job(self._disk, job, sealed.entries) if here else job

    def leave(self, member: Member, number: int) -> None:
        """Note that a group needs nothing of a segment any more, and that its runs do not name it."""
        self._unreferring.add(member)
        users = self.users.get(number)
        if users is not None:
            users.discard(member.uid)
            if not users:
                self.release(number)

    def take_over(self, old: Member, member: Member) -> None:
        """Put a member made anew, with less in segments, in the place of an old one."""
        self.shed(member)
        self._unreferring.discard(old)
        kept = {run.segment for run in member.segments}
        for run in old.segments:
            if run.segment not in kept:
                self.leave(member, run.segment)

    def shed(self, member: Member) -> None:
        """Drop runs that lie below the log and say nothing, as the segment's WAL file is no home; the others say where
        payloads are. Called wherever a log gets a new start."""
        base = member.raft.log.snapshot_index
        gone = [run for run in member.segments if run.last <= base and not self._is_home(run.segment)]
        if gone:
            member.keep_runs([run for run in member.segments if run not in gone])
            for segment in {run.segment for run in gone} - {run.segment for run in member.segments}:
                self.leave(member, segment)

    def drop_below(self, member: Member, run: SegmentRun, base: int) -> None:
        """Drop a run of which nothing up to `base` is of use any more."""
        rest = [run._replace(first=base + 1)] if run.last > base else []
        member.keep_runs([part for one in member.segments for part in (rest if one == run else [one])])
        if not rest:
            self.leave(member, run.segment)

    def forget(self, member: Member) -> None:
        """Forget a member, whose stored row refers to no segment."""
        self._unreferring.discard(member)

    def release(self, number: int) -> None:
        """Remove a segment, unless its WAL file is a home still, as soon as no log needs its entries."""
        if self._is_home(number):
            return
        users = self.users.get(number, set())
        for uid in list(users):
            member = self._members.get(uid)
            if member is not None and self.is_left(member):
                continue
            runs = [run for run in member.segments if run.segment == number] if member is not None else []
            if member is None or not runs:
                users.discard(uid)
            elif all(run.last <= member.raft.log.snapshot_index for run in runs):
                member.keep_runs([run for run in member.segments if run.segment != number])
                self._unreferring.add(member)
                users.discard(uid)
        if not users:
            self.users.pop(number, None)
            self._unused.append(number)
            self._look()

    async def remove_unused(self, commit: Callable[[Collection[Member]], Awaitable[None]]) -> None:
        """Unlink what nobody needs, after the rows that referred to it, which `commit` stores, say so no more."""
        if not self._unused:
            return
        changed, self._unreferring = self._unreferring, set()
        unused, self._unused = self._unused, []
        try:
            await commit(changed)
        except BaseException:
            self._unreferring |= changed
            self._unused += unused
            raise
        for number in unused:
            reader = self._readers.pop(number, None)
            if reader is not None:
                reader.close()
            self._disk.unlink(str(self.path(number)))

    def close(self) -> None:
        """Close every reader."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
