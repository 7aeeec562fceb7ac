"""From a directory to living members: meta rows, then the WAL on top of them, then one core a group.

Invariant 7: nothing here depends on how often it ran before or where it was cut off; until `Wal.open` nothing is
written but the epoch. A group whose records are damaged comes up stopped, with the reason, and takes no part (law 7,
docs/internals/repair.md). Called by `system`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Generic, TypeVar

from logyard.protocol.errors import Busy, LogyardError

from ..disk.door import is_short
from ..log import meta_rows
from ..log.location import SealedFile
from ..log.recovered import Recovered
from ..log.replay_result import ReplayResult
from ..log.segment_files import Segments
from ..log.wal import Wal, WalItem
from ..log.wal_files import wal_epochs
from ..ports import HomePort
from ..quiesce import unquiesce
from ..ranges import Range, subtract, union
from ..recovery.inspect import replay_wal
from ..recovery.rebuild import log_base, placed_through, slept_on, spec_of
from ..replica.member import STOPPED, Member
from . import life

if TYPE_CHECKING:
    from .system import System

log = logging.getLogger(__name__)
R = TypeVar("R", bound="meta_rows.StateRow | meta_rows.SnapshotRow")


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


def open_directory(system: System) -> None:
    """Lock, open, recover. BLOCKING. Raises `DirectoryInUse`, `WrongIdentity`, `Corrupt`; nothing is open then."""
    try:
        _open(system)
    except BaseException:
        system.close_directory()
        raise


def _open(system: System) -> None:
    storage = system.storage
    disk = system.disk
    path = system.path
    disk.make_directory(str(path))
    disk.hold()
    system.closing.append(disk.let_go)
    system.lock_fd = lock_fd = disk.lock_directory(str(path))
    system.closing.append(lambda: disk.close(lock_fd))
    life.revalidate(system)
    system.space.open()
    for name in ("wal", "segments"):
        disk.make_directory(str(path / name))
    meta = storage.books.meta
    system.closing.append(meta.close)
    # The log's first file is made after the first commit.
    meta.open(system.cluster_id, system.node_id, bool(wal_epochs(disk.list_directory(str(path / "wal")))))
    lived = life.begin(system, meta)
    system.closing.append(system.store.close)
    system.store.open()
    system.store.restore((key[1:], value) for key, value in meta.scan(meta_rows.STORE))
    system.directory.deleted = {int.from_bytes(key[1:], "big") for key, _ in meta.scan(meta_rows.DELETED)}
    system.departures.departed = meta_rows.departed(meta.scan(meta_rows.DEPARTED))
    flushed = next((int(row.fields["file"]) for row in meta_rows.file_rows(meta, "flushed")), 0)
    began = time.thread_time_ns()
    system.damages.load(system.epoch)
    said, result = replay_wal(disk, str(path / "wal"), flushed, system.damages.known, lived)
    system.wal.adopt(result)
    system.closing.append(system.wal.close)
    storage.segments.spoil(result.spoiled)
    restarted, doubted = _build_members(system, said, result)
    _leave_out(system.wal, storage.segments, result, system.damages.blank)
    system.counters.replay_nanoseconds = time.thread_time_ns() - began
    system.wal.open()
    storage.janitor.adopt(result.sealed)
    if restarted:
        # A crash came between an installed snapshot and the marks of its log's new start (see `Storage.installed`).
        rolled = system.wal.write([WalItem(uid, truncate=index) for uid, at in restarted for index in (at, at + 1)])
        storage.janitor.adopt(rolled.sealed if rolled is not None else ())
    for uid in {*said, *(uid for uid, _ in restarted)}:
        # What the WAL says of terms, votes, floors and new starts has no other place yet: when its files get their
        # segments, the checkpoint has to say it, as it would have in the life that wrote it.
        if uid in system.members:
            storage.flush.hard_state_written(system.members[uid])
    _adopt_files(system, flushed)
    for uid, through in doubted.items():
        for lost in _unplaced(system.members[uid], through + 1, system.store.homes(uid)):
            system.refill.lose(uid, *lost)
    system.chunks.recover(system.has, system.directory.deleted)
    life.recovered(system, bool(result.damage))


def _build_members(
    system: System, said: Mapping[int, Recovered], result: ReplayResult
) -> tuple[list[tuple[int, int]], dict[int, int]]:
    """Return (uid, snapshot index) of logs that start over above a snapshot without the WAL saying so; and of groups
    whose records are damaged up to where their payloads are where the rows say."""
    meta = system.storage.books.meta
    states, snapshots = _Beside(meta_rows.state_rows(meta)), _Beside(meta_rows.snapshot_rows(meta))
    hard_states = {uid: one.hard_state for uid, one in said.items() if one.hard_state is not None}
    damaged = system.damages.judge(result, hard_states)
    defined: set[int] = set()
    restarted: list[tuple[int, int]] = []
    doubted: dict[int, int] = {}
    for row in meta_rows.group_rows(meta):
        spec = spec_of(row)
        defined.add(spec.uid)
        if spec.uid in system.directory.deleted:
            continue
        known = damaged.get(spec.uid)
        recovered = said.get(spec.uid) or Recovered()
        state, snapshot_row = states.of(spec.uid), snapshots.of(spec.uid)
        if known is None and state is not None and slept_on(state, snapshot_row, recovered):
            unquiesce.adopt_row(system, spec, state)
            continue
        system.names[spec.name] = spec.uid
        member = None
        if known is None:
            try:
                member = system.builder.build(spec, state, snapshot_row, recovered)
            except Exception as error:
                known = system.damages.unfit(spec, snapshot_row, error)
        if member is None or known is not None:
            assert known is not None
            member = system.damages.build(spec, known, state, snapshot_row, recovered)
        base = member.raft.log.snapshot_index
        # The WAL does not lead up to where the log starts: a snapshot was installed there, or the way is damaged.
        apart = base > log_base(state)[0] or (known is not None and 0 <= recovered.end < base)
        if (
            apart
            and base == member.snapshot_index
            and recovered.restart != base + 1
            and spec.uid not in system.damages.blank
            and member.state != STOPPED
        ):
            restarted.append((spec.uid, base))
        system.members[spec.uid] = member
        if known is not None and state is not None:
            doubted[spec.uid] = placed_through(state, recovered)
    for uid, known in damaged.items():
        if uid not in defined and uid not in system.directory.deleted:
            system.damages.bar(uid, known, said.get(uid) or Recovered())
    return restarted, doubted


def _leave_out(wal: Wal, segments: Segments, result: ReplayResult, blank: set[int]) -> None:
    """Leave the groups that begin with nothing out of WAL files, too."""
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


def _adopt_files(system: System, flushed: int) -> None:
    """Adopt sealed WAL files that are homes, their shares counted anew; files that are nobody's home are recycled."""
    storage = system.storage
    homes = {row.id for row in meta_rows.file_rows(storage.books.meta, "wal")}
    users: dict[int, set[int]] = {}
    for uid, member in system.members.items():
        for run in member.segments:
            users.setdefault(run.segment, set()).add(uid)
    kept = _kept(system, users)
    storage.segments.recovered(users)
    present = dict(system.wal.files)
    if storage.books.meta.lost:
        # Which files are homes is not known for certain: nothing is given away, and what is there is kept as a home.
        homes |= {number for number in present if number <= flushed and storage.segments.path(number).exists()}
    for number in sorted(homes & present.keys()):
        file = SealedFile(number, present[number])
        storage.location.add(file)
        if number in kept:
            file.keep()
        for uid in list(users.get(number, ())):
            member = system.members[uid]
            for run in [run for run in member.segments if run.segment == number]:
                try:
                    storage.homes.book(member, file, run)
                except (LogyardError, OSError) as error:
                    if isinstance(error, Busy) or is_short(error):
                        raise
                    system.damages.later(member, f"segment {number}: {error}")
    for member in system.members.values():
        storage.homes.look_for_lost(member)
    for number in sorted(present):
        if number <= flushed and number not in homes:
            system.wal.recycle(number)
    for name in os.listdir(system.path / "segments"):
        number = _segment_number(name)
        if name.endswith(".tmp") or (0 < number <= flushed and number not in users and number not in homes):
            system.disk.unlink(str(system.path / "segments" / name))
    for member in system.members.values():
        if not member.damaged:
            # Its row may be older than the end of a home, or than the log's new start.
            storage.segments.shed(member)


def _unplaced(member: Member, first: int, homes: Iterable[HomePort]) -> Iterator[Range]:
    """Find the payloads that a group's own snapshot covers and that lay in what it lost: from `first` on no segment had
    them. Who does not say so would answer others as if they had never been."""
    last = min(member.snapshot_index, member.raft.log.memory_first - 1)
    placed = union([*((home.first, home.last) for home in homes), *((run.first, run.last) for run in member.segments)])
    for lives in member.liveness.live_within((first, 0), (last + 1, 0)) if first <= last else ():
        yield from subtract([(lives.first.index, lives.end.index - (lives.end.ordinal == 0))], placed)


def _kept(system: System, users: dict[int, set[int]]) -> set[int]:
    """Return the segments that have something of groups which nobody can mend, by what they say themselves; such a
    group becomes a user of them."""
    left = {uid for uid, member in system.members.items() if system.damages.is_left(member)}
    kept: set[int] = set()
    for name in os.listdir(system.path / "segments") if left else ():
        number = _segment_number(name)
        try:
            here = left & system.storage.segments.reader(number).groups.keys() if number else set()
        except Busy:
            raise
        except LogyardError:
            # What it had nobody can tell.
            here = left
        if here:
            users.setdefault(number, set()).update(here)
            kept.add(number)
    return kept


def _segment_number(name: str) -> int:
    """Return a segment's number, 0 for any other name: what is not ours is left alone."""
    stem, _, kind = name.partition(".")
    try:
        return int(stem, 16) if kind == "seg" else 0
    except ValueError:
        return 0


def start_groups(system: System) -> None:
    """Let all recovered members begin to run."""
    for member in list(system.members.values()):
        if member.state != STOPPED:
            system.enliven(member)
    system.damages.start()
