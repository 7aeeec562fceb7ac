"""What the scrub walks over that lies in plain files: segments, and the payloads at home in sealed WAL files.

Each walk has descriptors of its own, and reads as a start would: what a running reader keeps in memory does not hide
damage of the file. A segment of which only the index is damaged is written anew from its own rows, which verify one by
one; that file is the same byte for byte. Called by `scrub`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import trio

from logyard.protocol.errors import Corrupt, LogyardError

from ..disk import Disk, is_damage
from ..entry import Entry, Unit, unit_hash, units_of
from ..log.meta_rows import SegmentRun
from ..log.segment import SegmentReader, write_segment
from ..log.wal_files import wal_name
from ..replica.member import Member
from .scrub import always, is_alone, never

if TYPE_CHECKING:
    from .location import SealedFile
    from .scrub import Scrub
    from .system import System

ROWS = 2048
SCAN_ENTRIES = 256
READ_BYTES = 1 << 20


async def segments(scrub: Scrub) -> None:
    """Every segment that a log or a WAL file needs: its index, and each entry."""
    for number in sorted(scrub.system.storage.segments.users):
        await _segment(scrub, number)


async def _segment(scrub: Scrub, number: int) -> None:
    system = scrub.system
    path = str(system.storage.segments.path(number))
    try:
        reader, size = await trio.to_thread.run_sync(_open, system.disk, path, number)
    except FileNotFoundError:
        if number in system.storage.segments.users:
            await _hurt(scrub, number, None, "it is gone")
        return
    except (OSError, LogyardError) as error:
        if isinstance(error, OSError) and not is_damage(error):
            raise
        await _hurt(scrub, number, None, str(error))
        return
    try:
        bad = 0
        for start in range(0, max(reader.rows, 1), ROWS):
            stop = min(start + ROWS, reader.rows)
            bad += len(await trio.to_thread.run_sync(reader.verify_rows, start, stop))
            await scrub.read("segment", size * (stop - start) // max(reader.rows, 1))
        if bad or reader.damaged:
            await _hurt(scrub, number, reader, f"{bad} of {reader.rows} entries do not verify")
    except Corrupt as error:
        await _hurt(scrub, number, reader, str(error))
    finally:
        reader.close()


def _open(disk: Disk, path: str, number: int) -> tuple[SegmentReader, int]:
    """In a thread: a reader that has nothing in memory, and the file's bytes."""
    fd = disk.open_file(path)
    try:
        size = disk.size(fd)
        disk.forget_pages(fd, 0, size)
    finally:
        disk.close(fd)
    return SegmentReader(disk, path, number), size


async def _hurt(scrub: Scrub, number: int, reader: SegmentReader | None, reason: str) -> None:
    """A damaged segment, while nothing is moved or removed: written anew if all of its rows can be read, else each
    group that needs one of the bad ones is mended, or gets the payload places that it lost."""
    system = scrub.system
    storage = system.storage
    text = f"segment {number}: {reason}"
    hurt: list[tuple[Member, list[int]]] = []
    async with storage.janitor_lock:
        if number not in storage.segments.users:
            return
        anew = await trio.to_thread.run_sync(_write_anew, system, number, reader)
        # Who reads next meets what the file says now.
        storage.segments.renew(number)
        if anew:
            scrub.found("segment", "", f"{text}; written anew from its rows", always)
            return
        for uid in sorted(storage.segments.users[number]):
            member = system.members.get(uid)
            for run in list(member.segments) if member is not None else []:
                if member is None or run.segment != number:
                    continue
                bad = await trio.to_thread.run_sync(_unreadable, reader, uid, run)
                if not bad or run not in member.segments:
                    continue
                needed = [one for one in bad if one > member.raft.log.snapshot_index]
                if needed:
                    hurt.append((member, needed))
                else:
                    _lose_places(scrub, member, run, text)
    for member, needed in hurt:
        scrub.mend("segment", member, Corrupt(text, 0, f"entry {needed[-1]}", "damage"), needed[0], needed[-1])


def _lose_places(scrub: Scrub, member: Member, run: SegmentRun, text: str) -> None:
    """Damage below the log. As at a start: the places of all that lives there of a run are lost, and the run is the
    rest of it. Where nothing lives it is let go, as it is in the way of who walks over it, and of its file."""
    system, uid = scrub.system, member.uid
    file = system.storage.files.get(run.segment)
    if file is None or uid not in file.shares:
        system.storage.segments.drop_below(member, run, member.raft.log.snapshot_index)
        scrub.found("segment", member.spec.name, f"{text}; nothing needs them, and their group has let go", always)
        return
    first, last = run.first, min(run.last, member.snapshot_index)
    what = f"places of payloads of entries {first} to {last}, {text}"
    if is_alone(system, member):
        scrub.found("segment", member.spec.name, f"{what}; no other node has this group", never)
        return
    system.storage.homes.recount(member)
    scrub.found("segment", member.spec.name, what, lambda: not system.store.lost(uid, first, last))


def _write_anew(system: System, number: int, reader: SegmentReader | None) -> bool:
    """In a thread: the same file again, from the damaged one's rows or from what a reader that was open before knows of
    it."""
    segments = system.storage.segments
    for known in (reader, segments.opened(number)):
        if known is None:
            continue
        try:
            contents = known.contents()
        except (LogyardError, OSError):
            continue
        write_segment(system.disk, str(segments.path(number)), number, contents)
        return True
    return False


def _unreadable(reader: SegmentReader | None, uid: int, run: SegmentRun) -> list[int]:
    """In a thread: the entries of a group's run that a segment does not give any more."""
    if reader is None:
        return list(range(run.first, run.last + 1))
    bad: list[int] = []
    index, step = run.first, SCAN_ENTRIES
    while index <= run.last:
        try:
            found = reader.entries(uid, index, min(run.last, index + step - 1))
        except Corrupt:
            if step == 1:
                bad.append(index)
                index, step = index + 1, SCAN_ENTRIES
            else:
                step = 1
            continue
        stop = min(run.last, index + step - 1)
        if reader.damaged:
            # The log has no gaps but those of a sparse run, which nobody can tell from damage now.
            there = {entry.index for entry in found}
            bad += [one for one in range(index, stop + 1) if one not in there]
        index, step = stop + 1, SCAN_ENTRIES
    return bad


async def wal(scrub: Scrub) -> None:
    """The payloads that live in sealed WAL files."""
    for file in list(scrub.system.storage.files.values()):
        await _wal_file(scrub, file)


async def _wal_file(scrub: Scrub, file: SealedFile) -> None:
    system = scrub.system
    walk = _Walk(system, file.file)
    try:
        if not await trio.to_thread.run_sync(walk.open):
            return
        for uid in list(file.shares):
            member, share = system.members.get(uid), file.shares.get(uid)
            if member is None or share is None:
                continue
            first = max(share.first, member.liveness.released_before.index)
            entries = walk.entries(uid, first, share.last)
            while (size := await trio.to_thread.run_sync(walk.portion, uid, entries)) >= 0:
                await scrub.read("wal", size)
            bad, walk.bad = walk.bad, []
            # A file that is still the home it was has not been used again since it was read.
            if bad and system.storage.files.get(file.file) is file:
                here = [index for index in bad if system.store.home(uid, index) is None]
                scrub.lose("wal", uid, here, f"in WAL file {file.file}")
    finally:
        walk.close()


class _Walk:
    """Reads one sealed file's payloads, by its segment. All but the constructor and `close` in a thread."""

    def __init__(self, system: System, number: int) -> None:
        self._disk = system.disk
        self._number = number
        self._path = str(system.path / "wal" / wal_name(number))
        self._segment_path = str(system.storage.segments.path(number))
        self._segment: SegmentReader | None = None
        self._fd = -1
        self.bad: list[int] = []

    def open(self) -> bool:
        """False where there is nothing to read, or no segment to read it by: that is found elsewhere. Raises OSError
        that is no damage."""
        try:
            self._segment = SegmentReader(self._disk, self._segment_path, self._number)
            self._fd = self._disk.open_file(self._path)
            self._disk.forget_pages(self._fd, 0, 0)
        except (OSError, LogyardError) as error:
            if isinstance(error, OSError) and not is_damage(error):
                raise
            return False
        return True

    def close(self) -> None:
        """Both files."""
        if self._segment is not None:
            self._segment.close()
        if self._fd >= 0:
            self._disk.close(self._fd)

    def entries(self, uid: int, first: int, last: int) -> Iterator[Entry]:
        """Those of a group that had a payload here; an entry that its segment does not give ends them."""
        assert self._segment is not None
        while first <= last:
            try:
                found = self._segment.entries(uid, first, min(last, first + SCAN_ENTRIES - 1))
            except LogyardError:
                return
            yield from (entry for entry in found if entry.body_bytes and not entry.tombstone)
            first += SCAN_ENTRIES

    def portion(self, uid: int, entries: Iterator[Entry]) -> int:
        """Verify entries of about `READ_BYTES`; the bytes read, -1 when there are no more."""
        size = 0
        for entry in entries:
            size += entry.body_bytes
            if not all(self._holds(uid, entry, unit) for unit in units_of(entry.data)):
                self.bad.append(entry.index)
            if size >= READ_BYTES:
                return size
        return size or -1

    def _holds(self, uid: int, entry: Entry, unit: Unit) -> bool:
        try:
            data = self._disk.read(self._fd, unit.length, entry.offset + unit.offset)
        except OSError as error:
            if not is_damage(error):
                raise
            return False
        return unit_hash(uid, entry.index, entry.term, unit.number, data) == unit.hash
