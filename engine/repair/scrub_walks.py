"""What a scrub walks over, one walk for each kind of file: the meta store's rows in both copies, snapshots, segments,
rings, the payloads at home in sealed WAL files, generations.

Each walk has descriptors of its own, and reads as a start would: what a running reader keeps in memory does not hide
damage of the file. What LMDB keeps is read as bytes first, through the disk as far as nobody has it mapped: a page that
can't be read is then an error here, and never a signal that kills the node. A segment of which only the index is
damaged is written anew from its own rows, which verify one by one; that file is the same byte for byte. Called by
`scrub`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import trio

from logyard.protocol.errors import Busy, Corrupt, LogyardError

from ..disk.door import Disk, is_damage
from ..entry import Entry, Unit, unit_hash, units_of
from ..log import checkpoint_rows as rows
from ..log import meta_rows
from ..log.meta import MetaStore
from ..log.meta_rows import RingRun, SegmentRun, SnapshotRow
from ..log.ring import RingReader, write_heads
from ..log.segment import SegmentReader, write_segment
from ..log.wal_files import wal_name
from ..ports import StorePort
from ..replica.member import Member
from ..snapshot.format import Snapshot
from ..types import Spec
from .scrub import Repairs, always, never

READ_BYTES = 1 << 20
META_ROWS = 512
ROWS = 2048
SCAN_ENTRIES = 256
SLOTS = 64
"""Of a ring, read at once."""

Read = Callable[[str, int], Awaitable[None]]
"""So many bytes of a kind were read: waits as long as the rate asks for."""


class MetaBatch(Protocol):
    """What walks need of the meta store's batches."""

    meta: MetaStore

    async def commit(self, build: Callable[[], Iterable[rows.Put]]) -> None:
        """Store rows that are built under the lock."""
        ...

    def load_snapshot(self, row: SnapshotRow) -> Snapshot:
        """Return what a row says, with its chunks. Raises `Corrupt`."""
        ...

    def owe_store(self) -> None:
        """Let the payload store's rows go with whatever is next."""
        ...


class File(Protocol):
    """A sealed WAL file that is a home."""

    @property
    def file(self) -> int:
        """Its number."""
        ...

    @property
    def shares(self) -> Mapping[int, Share]:
        """By uid: what each group has in it."""
        ...


class Share(Protocol):
    """What a group has in one file."""

    @property
    def first(self) -> int:
        """First index."""
        ...

    @property
    def last(self) -> int:
        """Last index."""
        ...


class Segments(Protocol):
    """What walks need of the segments."""

    @property
    def users(self) -> Mapping[int, Collection[int]]:
        """By number: uids of the groups that need a segment."""
        ...

    def path(self, number: int) -> Path:
        """Return where a segment lies."""
        ...

    def opened(self, number: int) -> SegmentReader | None:
        """Return the reader in use, if there is one."""
        ...

    def renew(self, number: int) -> None:
        """Open a file again for who reads next."""
        ...

    def in_ring(self, uid: int, index: int) -> bool:
        """Return whether an entry of a group's log is in its ring, and so in no segment."""
        ...

    def drop_below(self, member: Member, run: SegmentRun, base: int) -> None:
        """Let go of what a run has up to `base`."""
        ...


class Groups(NamedTuple):
    """This node's groups."""

    members: Mapping[int, Member]
    """Those awake."""
    find: Callable[[int], Member | None]
    """Return a group's member, woken if it hibernates."""
    spec: Callable[[int], Spec | None]
    """Return a group's definition; wakes nobody."""


async def read_through(disk: Disk, read: Read, kind: str, path: str) -> str | None:
    """Read a file to its end. Returns "" when all of it could be read, else why not; None: it is not there. Raises
    OSError that is no damage."""
    try:
        fd = await trio.to_thread.run_sync(disk.open_file, path)
    except FileNotFoundError:
        return None
    except OSError as error:
        if not is_damage(error):
            raise
        return f"it can't be opened: {error.strerror}"

    offset = 0
    try:
        while size := await trio.to_thread.run_sync(_portion, disk, fd, offset):
            offset += size
            await read(kind, size)
    except OSError as error:
        if not is_damage(error):
            raise
        return f"it can't be read at byte {offset}: {error.strerror}"
    finally:
        disk.close(fd)
    return ""


def _portion(disk: Disk, fd: int, offset: int) -> int:
    """Read a piece of a file from the disk; return its bytes."""
    disk.forget_pages(fd, offset, READ_BYTES)
    return len(disk.read(fd, READ_BYTES, offset))


class MetaWalk:
    """Both copies of every row. One that is bad or old is written over with the other."""

    def __init__(self, disk: Disk, meta_batch: MetaBatch, groups: Groups, read: Read, repairs: Repairs) -> None:
        self._disk = disk
        self._meta_batch = meta_batch
        self._groups = groups
        self._read = read
        self._repairs = repairs

    async def run(self) -> None:
        """Walk once."""
        store, found = self._meta_batch.meta, self._repairs.found
        for path in store.files():
            if failed := await read_through(self._disk, self._read, "meta", path):
                # What is mapped of it may kill the node: a start sets it aside, and fills it from the other copy.
                found("meta", "", f"{path}: {failed}; stop and start this node", never)
                return
        start: bytes | None = b""
        while start is not None:
            try:
                verified = await trio.to_thread.run_sync(store.verify, start, META_ROWS)
            except Corrupt as error:
                found("meta", "", f"{error}; stop and start this node", never)
                return
            for key, name in verified.mended:
                found("meta", self._group_of(key), f"row {key!r} in copy {name} of the meta store", always)
            for key in verified.lost:
                await self._lost_row(key)
            await self._read("meta", verified.size)
            start = verified.next

    def _group_of(self, key: bytes) -> str:
        """Return the group that a row is about; "" for none."""
        spec = self._groups.spec(int.from_bytes(key[-8:], "big")) if len(key) >= 9 else None
        return spec.name if spec is not None else ""

    async def _lost_row(self, key: bytes) -> None:
        """Write a row anew that verifies in no copy: this process knows what it said, or the group is mended."""
        uid, kind, members = int.from_bytes(key[-8:], "big"), key[:1], self._groups.members
        what = f"row {key!r} in both copies of the meta store"
        member = members.get(uid)
        if member is None or member.raft.stopped or kind not in (b"g", b"s", b"n", meta_rows.CHUNK):
            self._repairs.found("meta", self._group_of(key), what, never)
        elif kind in (b"g", b"s"):
            one = member

            def build() -> list[rows.Put]:
                if members.get(uid) is not one or one.is_gone or one.damaged:
                    return []
                return [rows.group(one.spec) if kind == b"g" else rows.state(one)]

            await self._meta_batch.commit(build)
            self._repairs.found("meta", member.spec.name, what, always)
        elif kind == b"n" or key[1:-8] in member.chunks:
            await self._repairs.renew("meta", member, Corrupt("the meta store", 0, what, "two bad copies"))


class SnapshotWalk:
    """Every group's newest snapshot with its chunks: that it is there, and what its sections' hashes say."""

    def __init__(self, meta_batch: MetaBatch, groups: Groups, read: Read, repairs: Repairs) -> None:
        self._meta_batch = meta_batch
        self._find = groups.find
        self._read = read
        self._repairs = repairs

    async def run(self) -> None:
        """Walk once."""
        keys = await trio.to_thread.run_sync(self._meta_batch.meta.keys, SnapshotRow.PREFIX)
        for key in keys:
            uid = int.from_bytes(key[1:], "big")
            size, error = await trio.to_thread.run_sync(self._load, uid)
            await self._read("snapshot", size)
            member = self._find(uid) if error is not None else None
            if error is not None and member is not None:
                await self._repairs.renew("snapshot", member, error)

    def _load(self, uid: int) -> tuple[int, LogyardError | None]:
        """Return a snapshot's bytes, and what is wrong with it. In a thread."""
        meta_batch, before = self._meta_batch, -1
        while True:
            try:
                value = meta_batch.meta.get(meta_rows.snapshot_key(uid))
            except Corrupt:
                # In both copies: the walk over rows has said so, or does the next time.
                return 0, None
            if value is None:
                return 0, None
            row = SnapshotRow.unpack(meta_rows.snapshot_key(uid), value)
            try:
                snapshot = meta_batch.load_snapshot(row)
                return len(row.data) + sum(map(len, snapshot.sections.values())), None
            except LogyardError as error:
                # A newer one may have taken its place, and its chunks away, in between.
                if row.index == before:
                    return len(row.data), error
                before = row.index


class SegmentWalk:
    """Every segment that a log or a WAL file needs: its index, and each entry. Nothing is moved or removed while
    `resting` is held; `recount` books anew what a member has in WAL files, and has lost places looked for."""

    def __init__(
        self,
        disk: Disk,
        segments: Segments,
        files: Mapping[int, File],
        members: Mapping[int, Member],
        resting: trio.Lock,
        recount: Callable[[Member], None],
        read: Read,
        repairs: Repairs,
    ) -> None:
        self._disk = disk
        self._segments = segments
        self._files = files
        self._members = members
        self._resting = resting
        self._recount = recount
        self._read = read
        self._repairs = repairs

    async def run(self) -> None:
        """Walk once."""
        for number in sorted(self._segments.users):
            await self._segment(number)

    async def _segment(self, number: int) -> None:
        try:
            reader, size = await trio.to_thread.run_sync(self._open, number)
        except FileNotFoundError:
            if number in self._segments.users:
                await self._hurt(number, None, "it is gone")
            return
        except (OSError, LogyardError) as error:
            _check_damage(error)
            await self._hurt(number, None, str(error))
            return
        try:
            bad = 0
            for start in range(0, max(reader.rows, 1), ROWS):
                stop = min(start + ROWS, reader.rows)
                bad += len(await trio.to_thread.run_sync(reader.verify_rows, start, stop))
                await self._read("segment", size * (stop - start) // max(reader.rows, 1))
            if bad or reader.damaged:
                await self._hurt(number, reader, f"{bad} of {reader.rows} entries do not verify")
        except Corrupt as error:
            await self._hurt(number, reader, str(error))
        finally:
            reader.close()

    def _open(self, number: int) -> tuple[SegmentReader, int]:
        """Return a reader that has nothing in memory, and the file's bytes. In a thread."""
        disk, path = self._disk, str(self._segments.path(number))
        fd = disk.open_file(path)
        try:
            size = disk.size(fd)
            disk.forget_pages(fd, 0, size)
        finally:
            disk.close(fd)
        return SegmentReader(disk, path, number, self._segments.in_ring), size

    async def _hurt(self, number: int, reader: SegmentReader | None, reason: str) -> None:
        """Repair a damaged segment, while nothing is moved or removed: it is written anew if all of its rows can be
        read, else each group that needs one of the bad ones is mended, or gets the payload places that it lost."""
        segments, repairs, text = self._segments, self._repairs, f"segment {number}: {reason}"
        hurt: list[tuple[Member, list[int]]] = []
        async with self._resting:
            if number not in segments.users:
                return
            anew = await trio.to_thread.run_sync(self._write_anew, number, reader)
            # Who reads next meets what the file says now.
            segments.renew(number)
            if anew:
                repairs.found("segment", "", f"{text}; written anew from its rows", always)
                return
            for uid in sorted(segments.users[number]):
                member = self._members.get(uid)
                for run in list(member.segments) if member is not None else []:
                    if member is None or run.segment != number:
                        continue
                    bad = await trio.to_thread.run_sync(_unreadable, reader, uid, run)
                    bad = [one for one in bad if not self._segments.in_ring(uid, one)]
                    if not bad or run not in member.segments:
                        continue
                    needed = [one for one in bad if one > member.raft.log.snapshot_index]
                    if needed:
                        hurt.append((member, needed))
                    else:
                        self._lose_places(member, run, text)
        for member, needed in hurt:
            repairs.mend("segment", member, Corrupt(text, 0, f"entry {needed[-1]}", "damage"), needed[0], needed[-1])

    def _lose_places(self, member: Member, run: SegmentRun, text: str) -> None:
        """Take damage below the log as a start does: the places of all that lives there of a run are lost, and the run
        is the rest of it. Where nothing lives it is let go, as it is in the way of who walks over it, and of its
        file."""
        repairs, uid, name = self._repairs, member.uid, member.spec.name
        file = self._files.get(run.segment)
        if file is None or uid not in file.shares:
            self._segments.drop_below(member, run, member.raft.log.snapshot_index)
            repairs.found("segment", name, f"{text}; nothing needs them, and their group has let go", always)
            return
        first, last = run.first, min(run.last, member.snapshot_index)
        what = f"places of payloads of entries {first} to {last}, {text}"
        if repairs.is_alone(member):
            repairs.found("segment", name, f"{what}; no other node has this group", never)
            return
        self._recount(member)
        repairs.found("segment", name, what, repairs.until_found([(uid, first, last)]))

    def _write_anew(self, number: int, reader: SegmentReader | None) -> bool:
        """Write the same file again, from the damaged one's rows or from what a reader that was open before knows of
        it; return whether that could be done. In a thread."""
        for known in (reader, self._segments.opened(number)):
            if known is None:
                continue
            try:
                contents = known.contents()
            except (LogyardError, OSError):
                continue
            write_segment(self._disk, str(self._segments.path(number)), number, contents)
            return True
        return False


def _unreadable(reader: SegmentReader | None, uid: int, run: SegmentRun) -> list[int]:
    """Return the entries of a group's run that a segment does not give any more. In a thread."""
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


class RingWalk:
    """Every slot that a log needs of a system group's ring, in both places where its header is. `path(uid)`: where the
    ring lies; nothing is written to it while `resting` is held."""

    def __init__(
        self,
        disk: Disk,
        path: Callable[[int], Path],
        members: Mapping[int, Member],
        resting: trio.Lock,
        read: Read,
        repairs: Repairs,
    ) -> None:
        self._disk = disk
        self._path = path
        self._members = members
        self._resting = resting
        self._read = read
        self._repairs = repairs

    async def run(self) -> None:
        """Walk once."""
        for uid in [uid for uid, member in self._members.items() if member.ring_runs]:
            await self._ring(uid)

    async def _ring(self, uid: int) -> None:
        try:
            sound = await self._is_sound(uid)
        except (OSError, LogyardError) as error:
            _check_damage(error)
            sound = False
        if not sound:
            await self._hurt(uid)

    async def _is_sound(self, uid: int) -> bool:
        reader = await trio.to_thread.run_sync(self._open, uid)
        try:
            sound = reader.heads == 2
            for first, last, term in self._runs(uid):
                for at in range(first, last + 1, SLOTS):
                    stop = min(last, at + SLOTS - 1)
                    seen = await trio.to_thread.run_sync(reader.verify, at, stop, term)
                    sound = sound and not seen.torn and not seen.bad
                    await self._read("ring", (stop - at + 1) * reader.geometry.slot_bytes)
            return sound
        finally:
            reader.close()

    def _runs(self, uid: int) -> list[RingRun]:
        member = self._members.get(uid)
        return list(member.ring_runs) if member is not None and not member.damaged else []

    def _open(self, uid: int) -> RingReader:
        """Return a reader of the disk, and not of memory. In a thread."""
        reader = RingReader(self._disk, str(self._path(uid)), uid)
        reader.forget_pages()
        return reader

    async def _hurt(self, uid: int) -> None:
        """Look again while nothing is written, at the file that is there now: what was read may have been written over
        meanwhile, and the file have gone or be another. Headers of which the other copy is good are written anew, and
        who needs a slot that is bad is mended."""
        async with self._resting:
            member, runs = self._members.get(uid), self._runs(uid)
            if member is None or not runs:
                return
            try:
                reader = await trio.to_thread.run_sync(self._open, uid)
            except (OSError, LogyardError) as error:
                _check_damage(error)
                bad = {index: Corrupt.told(str(error)) for index in (runs[0].first, runs[-1].last)}
            else:
                try:
                    bad = await self._renewed(member, runs, reader)
                finally:
                    reader.close()
        if bad:
            self._repairs.mend("ring", member, bad[min(bad)], min(bad), max(bad))

    async def _renewed(self, member: Member, runs: Sequence[RingRun], reader: RingReader) -> dict[int, Corrupt]:
        """Write headers and heads anew from their other copies; return what is bad, by index."""
        torn: list[Entry] = []
        bad: dict[int, Corrupt] = {}
        for first, last, term in runs:
            seen = await trio.to_thread.run_sync(reader.verify, first, last, term)
            torn += seen.torn
            bad |= seen.bad
        if torn or reader.heads < 2:
            await trio.to_thread.run_sync(write_heads, self._disk, reader.path, reader.uid, reader.geometry, torn)
            text = f"{reader.path}: {len(torn)} headers, {2 - reader.heads} heads; written anew from the other copy"
            self._repairs.found("ring", member.spec.name, text, always)
        return bad


def _check_damage(error: Exception) -> None:
    """Raise what says nothing of a file: it is met again later."""
    if isinstance(error, Busy) or (isinstance(error, OSError) and not is_damage(error)):
        raise error


class WalWalk:
    """The payloads that live in sealed WAL files, in `directory`. `is_moved(uid, index)`: they have a home in a
    generation."""

    def __init__(
        self,
        disk: Disk,
        directory: Path,
        segment_path: Callable[[int], Path],
        files: Mapping[int, File],
        members: Mapping[int, Member],
        is_moved: Callable[[int, int], bool],
        read: Read,
        repairs: Repairs,
    ) -> None:
        self._disk = disk
        self._directory = directory
        self._segment_path = segment_path
        self._files = files
        self._members = members
        self._is_moved = is_moved
        self._read = read
        self._repairs = repairs

    async def run(self) -> None:
        """Walk once."""
        for file in list(self._files.values()):
            await self._file(file)

    async def _file(self, file: File) -> None:
        number = file.file
        sealed = _SealedFile(
            self._disk, str(self._directory / wal_name(number)), str(self._segment_path(number)), number
        )
        try:
            if not await trio.to_thread.run_sync(sealed.open):
                return
            for uid in list(file.shares):
                member, share = self._members.get(uid), file.shares.get(uid)
                if member is None or share is None:
                    continue
                first = max(share.first, member.liveness.released_before.index)
                entries = sealed.entries(uid, first, share.last)
                while (size := await trio.to_thread.run_sync(sealed.portion, uid, entries)) >= 0:
                    await self._read("wal", size)
                bad = sealed.take_bad()
                # A file that is still the home it was has not been used again since it was read.
                if bad and self._files.get(number) is file:
                    here = [index for index in bad if not self._is_moved(uid, index)]
                    self._repairs.lose("wal", uid, here, f"in WAL file {number}")
        finally:
            sealed.close()


class _SealedFile:
    """Reads one sealed file's payloads, by its segment. All but the constructor, `take_bad` and `close` in a thread."""

    def __init__(self, disk: Disk, path: str, segment_path: str, number: int) -> None:
        self._disk = disk
        self._path = path
        self._segment_path = segment_path
        self._number = number
        self._segment: SegmentReader | None = None
        self._fd = -1
        self._bad: list[int] = []

    def open(self) -> bool:
        """Open both files. False where there is nothing to read, or no segment to read it by: that is found elsewhere.
        Raises OSError that is no damage."""
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
        """Close both files."""
        if self._segment is not None:
            self._segment.close()
        if self._fd >= 0:
            self._disk.close(self._fd)

    def entries(self, uid: int, first: int, last: int) -> Iterator[Entry]:
        """Yield those of a group that had a payload here; an entry that its segment does not give ends them."""
        assert self._segment is not None
        while first <= last:
            try:
                found = self._segment.entries(uid, first, min(last, first + SCAN_ENTRIES - 1))
            except LogyardError:
                return
            yield from (entry for entry in found if entry.body_bytes and not entry.tombstone)
            first += SCAN_ENTRIES

    def portion(self, uid: int, entries: Iterator[Entry]) -> int:
        """Verify entries of about `READ_BYTES`; return the bytes read, -1 when there are no more."""
        size = 0
        for entry in entries:
            size += entry.body_bytes
            if not all(self._holds(uid, entry, unit) for unit in units_of(entry.data)):
                self._bad.append(entry.index)
            if size >= READ_BYTES:
                return size
        return size or -1

    def take_bad(self) -> list[int]:
        """Return the entries that did not verify since this was asked last."""
        bad, self._bad = self._bad, []
        return bad

    def _holds(self, uid: int, entry: Entry, unit: Unit) -> bool:
        try:
            data = self._disk.read(self._fd, unit.length, entry.offset + unit.offset)
        except OSError as error:
            if not is_damage(error):
                raise
            return False
        return unit_hash(uid, entry.index, entry.term, unit.number, data) == unit.hash


class GenerationWalk:
    """Every row of every generation, in a process of its own."""

    def __init__(
        self, disk: Disk, store: StorePort, meta_batch: MetaBatch, groups: Groups, read: Read, repairs: Repairs
    ) -> None:
        self._disk = disk
        self._store = store
        self._meta_batch = meta_batch
        self._find = groups.find
        self._read = read
        self._repairs = repairs

    async def run(self) -> None:
        """Walk once."""
        store = self._store
        for number in [one.id for one in store.generations()]:
            reason = await read_through(self._disk, self._read, "generation", store.data_file(number))
            if reason is None:
                continue
            entries: Sequence[tuple[int, int]] = ()
            if not reason:
                await self._bodies(store.bodies_file(number))
                entries, reason = await store.verify(number)
            damaged: dict[int, list[int]] = {}
            for uid, index in entries:
                damaged.setdefault(uid, []).append(index)
            for uid, indexes in damaged.items():
                self._repairs.lose("generation", uid, indexes, f"at home in generation {number}")
            if reason and any(one.id == number for one in store.generations()):
                self._fail(number, reason)

    async def _bodies(self, path: str) -> None:
        """Have memory hold of the large bodies what the disk says, for whoever verifies them. What can't be read there
        is damage of its entry and of no other, which that finds."""
        disk = self._disk
        try:
            fd = await trio.to_thread.run_sync(disk.open_file, path)
        except OSError as error:
            if not is_damage(error):
                raise
            return
        try:
            for offset in range(0, disk.size(fd), READ_BYTES):
                size = 0
                try:
                    size = await trio.to_thread.run_sync(_portion, disk, fd, offset)
                except OSError as error:
                    if not is_damage(error):
                        raise
                await self._read("generation", size)
        finally:
            disk.close(fd)

    def _fail(self, number: int, reason: str) -> None:
        """Trust nothing of a generation: all that is at home there comes from peers, if each group has some."""
        store, repairs = self._store, self._repairs
        homes = store.at_home(number)
        members = {uid: self._find(uid) for uid, _, _ in homes}
        what = f"generation {number}: {reason}"
        alone = [member.spec.name for member in members.values() if member is not None and repairs.is_alone(member)]
        if alone:
            # What can still be read of it is all that there is.
            repairs.found("generation", "", f"{what}; no other node has {', '.join(alone[:8])}", never)
            return
        store.fail(number, reason)
        self._meta_batch.owe_store()
        repairs.found("generation", "", what, repairs.until_found(homes))
