"""From a directory to living members: meta rows, then the WAL on top of them, then one core a group.

Invariant 7: nothing here depends on how often it ran before or where it was cut off; until `Wal.open` nothing is
written but the epoch and what copies of a row mend of one another. A group whose records are damaged comes up stopped,
with the reason, and takes no part (law 7, docs/internals/repair.md). Called once, by whoever composes the engine.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, Protocol, TypeVar

from logyard.protocol.errors import Busy, LogyardError

from ..disk.door import Disk, is_short
from ..log import meta_rows
from ..log.janitor import Janitor
from ..log.liveness_accounting import LivenessAccounting
from ..log.location import Location, SealedFile
from ..log.meta import MetaStore
from ..log.meta_rows import SegmentRun
from ..log.recovered import Recovered
from ..log.replay_result import ReplayResult
from ..log.ring_files import RingFiles
from ..log.segment_files import SegmentFiles
from ..log.segment_writer import SegmentWriter
from ..log.space import Space
from ..log.wal import Wal, WalItem
from ..ports import HomePort, StorePort
from ..ranges import Range, subtract, union
from ..repair.log_repair import LogRepair
from ..replica.member import STOPPED, Member
from ..types import Spec
from . import manifests
from .incarnation import Incarnation, revalidate
from .inspect import replay_wal
from .rebuild import log_base, never_used, placed_through, slept_on, spec_of

log = logging.getLogger(__name__)
R = TypeVar("R", bound="meta_rows.StateRow | meta_rows.SnapshotRow")
FRESH = 1024
"""Groups that nobody ever used, taken in together."""


class DataDirectory:
    """A node's directory: its lock, which the writer process inherits, and what is open in it."""

    def __init__(self, disk: Disk, path: Path) -> None:
        self.disk = disk
        self.path = path
        self.lock_fd = -1
        self._open: list[Callable[[], None]] = []

    def lock(self) -> None:
        """Make it, if it is not there, and have it alone. BLOCKING. Raises `DirectoryInUse`."""
        disk, path = self.disk, str(self.path)
        disk.make_directory(path)
        disk.hold()
        self.opened(disk.let_go)
        self.lock_fd = lock_fd = disk.lock_directory(path)
        self.opened(lambda: disk.close(lock_fd))

    def opened(self, close: Callable[[], None]) -> None:
        """Call `close` when the directory is given up: the last first."""
        self._open.append(close)

    def close(self) -> None:
        """Close what is open, the lock last; nothing is pending."""
        while self._open:
            self._open.pop()()


class Files(NamedTuple):
    """What keeps a node's bytes: opened by a start."""

    space: Space
    wal: Wal
    meta: MetaStore
    store: StorePort
    segments: SegmentFiles
    rings: RingFiles
    location: Location
    accounting: LivenessAccounting
    segment_writer: SegmentWriter
    janitor: Janitor


class Build(Protocol):
    """Build a member from its checkpoint, its snapshot and what the WAL says on top."""

    def __call__(
        self,
        spec: Spec,
        state: meta_rows.StateRow | None,
        snapshot_row: meta_rows.SnapshotRow | None,
        recovered: Recovered,
    ) -> Member:
        """Raise `Corrupt` when they leave a gap."""
        ...


class Groups(NamedTuple):
    """What a start fills with the groups it finds, and asks of whoever runs them."""

    members: dict[int, Member]
    names: MutableMapping[str, int]
    deleted: set[int]
    departed: dict[int, meta_rows.Departed]
    build: Build
    quiesced: Callable[[Spec, meta_rows.StateRow], None]
    """Take in a group that slept on."""
    fresh: Callable[[Sequence[Spec]], None] | None
    """Take in groups that nobody ever used; None where no group sleeps."""
    lose: Callable[[int, int, int], object]
    """Payloads of a group's entries, first to last, are on no file here."""
    tidy: Callable[[], None]
    """Drop what transfers left to nobody."""


class _Beside(Generic[R]):
    """Rows in the order of their uids, read beside the groups': not all of them are in memory at once."""

    def __init__(self, rows_: Iterator[R]) -> None:
        self._rows: Iterator[R] = rows_
        self._next: R | None = next(rows_, None)

    def of(self, uid: int) -> R | None:
        """Return a group's; asked in the order of uids."""
        while self._next is not None and self._next.uid < uid:
            self._next = next(self._rows, None)
        return self._next if self._next is not None and self._next.uid == uid else None


class Start:
    """Opens a directory and builds what is in it."""

    def __init__(
        self, directory: DataDirectory, incarnation: Incarnation, files: Files, groups: Groups, repair: LogRepair
    ) -> None:
        self._directory = directory
        self._incarnation = incarnation
        self._files = files
        self._groups = groups
        self._repair = repair
        self.replay_ns = 0
        """Processor time of the WAL's replay and of building the members."""

    def run(self) -> None:
        """Lock, open, recover. BLOCKING. Raises `DirectoryInUse`, `WrongIdentity`, `Corrupt`; nothing is open then."""
        try:
            self._run()
        except BaseException:
            self._files.segments.close()
            self._files.rings.close()
            self._directory.close()
            raise

    def _run(self) -> None:
        directory, groups, repair = self._directory, self._groups, self._repair
        space, wal, meta, store, segments, rings, _, _, segment_writer, janitor = self._files
        disk, path = directory.disk, directory.path
        directory.lock()
        revalidate(disk, path)
        rings.scan()
        space.open()
        for name in ("wal", "segments"):
            disk.make_directory(str(path / name))
        directory.opened(meta.close)
        lives = self._incarnation.begin()
        for one in manifests.mend(meta):
            log.warning("%s: %s", meta.manifests.path(one.uid), one.message)
        directory.opened(store.close)
        store.open()
        store.restore((key[1:], value) for key, value in meta.scan(meta_rows.STORE))
        groups.deleted.update(int.from_bytes(key[1:], "big") for key, _ in meta.scan(meta_rows.DELETED))
        groups.departed.update(meta_rows.departed(meta.scan(meta_rows.DEPARTED)))
        flushed = next((int(row.fields["file"]) for row in meta_rows.file_rows(meta, "flushed")), 0)
        began = time.thread_time_ns()
        repair.load(self._incarnation.epoch)
        said, result = replay_wal(disk, str(path / "wal"), flushed, repair.known, lives)
        wal.adopt(result)
        directory.opened(wal.close)
        segments.spoil(result.spoiled)
        restarted, doubted = self._build_members(said, result)
        _leave_out(wal, segments, result, repair.blank)
        self.replay_ns = time.thread_time_ns() - began
        wal.open()
        janitor.adopt(result.sealed)
        if restarted:
            # A crash came between an installed snapshot and the marks of its log's new start (see
            # `Checkpoints.installed`).
            rolled = wal.write([WalItem(uid, truncate=index) for uid, at in restarted for index in (at, at + 1)])
            janitor.adopt(rolled.sealed if rolled is not None else ())
        for uid in {*said, *(uid for uid, _ in restarted)}:
            # What the WAL says of terms, votes, floors and new starts has no other place yet: when its files get their
            # segments, the checkpoint has to say it, as it would have in the life that wrote it.
            if uid in groups.members:
                segment_writer.hard_state_written(groups.members[uid])
        self._adopt_files(flushed, {*(uid for uid, one in said.items() if one.restart), *(uid for uid, _ in restarted)})
        if not meta.lost:
            rings.sweep(lambda uid: meta.get(meta_rows.group_key(uid)) is not None)
        for uid, through in doubted.items():
            for lost in _unplaced(groups.members[uid], through + 1, store.homes(uid)):
                groups.lose(uid, *lost)
        groups.tidy()
        self._incarnation.recovered(0 if result.damage else wal.next_batch)

    def _build_members(
        self, said: Mapping[int, Recovered], result: ReplayResult
    ) -> tuple[list[tuple[int, int]], dict[int, int]]:
        """Return (uid, snapshot index) of logs that start over above a snapshot without the WAL saying so; and of
        groups whose records are damaged up to where their payloads are where the rows say."""
        groups, repair, meta = self._groups, self._repair, self._files.meta
        states, snapshots = _Beside(meta_rows.state_rows(meta)), _Beside(meta_rows.snapshot_rows(meta))
        hard_states = {uid: one.hard_state for uid, one in said.items() if one.hard_state is not None}
        damaged = repair.judge(result, hard_states)
        defined: set[int] = set()
        restarted: list[tuple[int, int]] = []
        doubted: dict[int, int] = {}
        fresh: list[Spec] = []
        decoded: dict[bytes, tuple[int, ...]] = {}
        for row in meta_rows.group_rows(meta):
            spec = spec_of(row, decoded)
            if damaged:
                defined.add(spec.uid)
            if spec.uid in groups.deleted:
                continue
            known = damaged.get(spec.uid)
            state, snapshot_row = states.of(spec.uid), snapshots.of(spec.uid)
            if snapshot_row is not None and spec.is_system and spec.uid not in meta.manifests.uids:
                meta.keep_thrice(spec.uid)
            recovered, departed = said.get(spec.uid), groups.departed.get(spec.uid)
            unhurt = known is None and "asleep" in row.extra
            if unhurt and groups.fresh is not None and never_used(state, snapshot_row, recovered, departed):
                fresh.append(spec)
                if len(fresh) == FRESH:
                    groups.fresh(fresh)
                    fresh.clear()
                continue
            recovered = recovered or Recovered()
            if known is None and state is not None and slept_on(state, snapshot_row, recovered):
                groups.quiesced(spec, state)
                continue
            groups.names[spec.name] = spec.uid
            member = None
            if known is None:
                try:
                    member = groups.build(spec, state, snapshot_row, recovered)
                except Exception as error:
                    known = repair.unfit(spec, snapshot_row, error)
            if member is None or known is not None:
                assert known is not None
                member = repair.build(spec, known, state, snapshot_row, recovered)
            base = member.raft.log.snapshot_index
            # The WAL does not lead up to where the log starts: a snapshot was installed there, or the way is damaged.
            apart = base > log_base(state)[0] or (known is not None and 0 <= recovered.end < base)
            if (
                apart
                and base == member.snapshot_index
                and recovered.restart != base + 1
                and spec.uid not in repair.blank
                and member.state != STOPPED
            ):
                restarted.append((spec.uid, base))
            groups.members[spec.uid] = member
            if known is not None and state is not None:
                doubted[spec.uid] = placed_through(state, recovered)
        if fresh and groups.fresh is not None:
            groups.fresh(fresh)
        for uid, known in damaged.items():
            if uid not in defined and uid not in groups.deleted:
                repair.bar(uid, known, said.get(uid) or Recovered())
        return restarted, doubted

    def _adopt_files(self, flushed: int, installed: Collection[int]) -> None:
        """Take sealed WAL files that are homes for that, their shares counted anew, and note what was in those that are
        gone; recycle files that are nobody's home. `installed`: groups whose log starts over above an installed
        snapshot, as the WAL or their row says."""
        members, directory = self._groups.members, self._directory
        _, wal, meta, _, segments, _, location, accounting, _, _ = self._files
        lengths = {row.id: int(row.fields["length"]) for row in meta_rows.file_rows(meta, "wal")}
        sealed = set(lengths)
        users: dict[int, set[int]] = {}
        for uid, member in members.items():
            for run in member.segments:
                users.setdefault(run.segment, set()).add(uid)
        kept = self._kept(users)
        segments.recovered(users)
        present = dict(wal.files)
        lengths |= present
        if meta.lost:
            # Which files are homes is not known for certain: nothing is given away, and what is there is kept as one.
            sealed |= {number for number in present if number <= flushed and segments.path(number).exists()}
        for number in sorted(sealed):
            # One that is gone goes as any other of which nothing lives, with the rows that say what was lost.
            file = SealedFile(number, lengths[number])
            location.add(file)
            if number in kept:
                file.keep()
            for uid in list(users.get(number, ())):
                member = members[uid]
                for run in [run for run in member.segments if run.segment == number]:
                    if number not in present and not self._is_put_back(member, file, run):
                        continue
                    try:
                        accounting.book(member, file, run)
                        if number not in present and uid in file.shares:
                            said = "group %s: WAL file %d is gone, the only home of its payloads"
                            log.error(said, member.spec.name, number)
                            file.keep()
                    except (LogyardError, OSError) as error:
                        if isinstance(error, Busy) or is_short(error):
                            raise
                        if self._repair.later(member, f"segment {number}: {error}"):
                            # How much of it lives there is not known.
                            file.keep()
        for uid, member in members.items():
            accounting.look_for_lost(member)
            if uid in installed:
                accounting.settle_installed(member)
        for number in sorted(present):
            if number <= flushed and number not in sealed:
                wal.recycle(number)
        for name in os.listdir(directory.path / "segments"):
            number = _segment_number(name)
            if name.endswith(".tmp") or (0 < number <= flushed and number not in users and number not in sealed):
                directory.disk.unlink(str(directory.path / "segments" / name))
        for member in members.values():
            if not member.damaged:
                # Its row may be older than the end of a home, or than the log's new start.
                segments.shed(member)

    def _is_put_back(self, member: Member, file: SealedFile, run: SegmentRun) -> bool:
        """Return whether what lives of a run may be there again, as people put back the file that is gone: for groups
        that nobody else has it stays a home. For others that is lost."""
        placed = union((home.first, home.last) for home in self._files.store.homes(member.uid))
        lost = list(_alive(member, run.first, run.last, placed))
        if lost and self._repair.is_alone(member):
            return True
        for first, last in lost:
            self._groups.lose(member.uid, first, last)
        return False

    def _kept(self, users: dict[int, set[int]]) -> set[int]:
        """Return the segments that have something of groups which nobody can mend, by what they say themselves; such a
        group becomes a user of them."""
        left = {uid for uid, member in self._groups.members.items() if self._repair.is_left(member)}
        kept: set[int] = set()
        for name in os.listdir(self._directory.path / "segments") if left else ():
            number = _segment_number(name)
            try:
                here = left & self._files.segments.reader(number).groups.keys() if number else set()
            except Busy:
                raise
            except LogyardError:
                # What it had nobody can tell.
                here = left
            if here:
                users.setdefault(number, set()).update(here)
                kept.add(number)
        return kept


def _leave_out(wal: Wal, segments: SegmentFiles, result: ReplayResult, blank: set[int]) -> None:
    """Let groups that begin with nothing have no entries in WAL files either."""
    if not blank:
        return
    lists = [sealed.entries for sealed in result.sealed]
    lists += [result.current.entries] if result.current is not None else []
    for entries in lists:
        entries[:] = [pair for pair in entries if pair[0] not in blank]
    for uid in blank:
        wal.restart(uid)
    segments.spoil([sealed.file for sealed in result.sealed])
    if result.current is not None:
        segments.spoil([result.current.head.epoch])


def _unplaced(member: Member, first: int, homes: Iterable[HomePort]) -> Iterator[Range]:
    """Find the payloads that a group's own snapshot covers and that lay in what it lost: from `first` on no segment had
    them. Who does not say so would answer others as if they had never been."""
    last = min(member.snapshot_index, member.raft.log.memory_first - 1)
    placed = union([*((home.first, home.last) for home in homes), *((run.first, run.last) for run in member.segments)])
    return _alive(member, first, last, placed)


def _alive(member: Member, first: int, last: int, placed: Sequence[Range]) -> Iterator[Range]:
    """Yield what is not dead of entries first..last, and not among those that are `placed`."""
    for lives in member.liveness.live_within((first, 0), (last + 1, 0)) if first <= last else ():
        yield from subtract([(lives.first.index, lives.end.index - (lives.end.ordinal == 0))], placed)


def _segment_number(name: str) -> int:
    """Return a segment's number, 0 for any other name: what is not ours is left alone."""
    stem, _, kind = name.partition(".")
    try:
        return int(stem, 16) if kind == "seg" else 0
    except ValueError:
        return 0
