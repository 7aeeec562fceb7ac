"""How much of each group lives in which sealed WAL file: counters that are exact per (file, group).

A release that covers a group's whole run costs nothing per entry; one that ends inside it reads the sizes of that part
from the segment. What dies in a file is marked dead in the payload store's copies as well. All calls on the loop.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from errno import EIO
from typing import NamedTuple, Protocol

import trio

from logyard.protocol.errors import Busy, Corrupt, LogyardError

from ..disk.door import is_short
from ..entry import Entry, records_in, units_of
from ..machine import PayloadRange, Position
from ..ports import HomePort, LivenessPort, StorePort
from ..replica.member import Member
from .location import Location, SealedFile, Share
from .meta_rows import SegmentRun
from .segment_files import SegmentFiles

log = logging.getLogger(__name__)

SCAN_BYTES = 1 << 30
LOOKED_AT_MAX = 10_000
"""Entries whose life is looked up at once: ten milliseconds of the loop."""


class Found(Protocol):
    """An entry with payload, wherever that is."""

    @property
    def index(self) -> int:
        """Its place in the log."""
        ...

    @property
    def data(self) -> bytes:
        """It, without its payload."""
        ...


class Present(NamedTuple):
    """What of a new segment is the content of a log: a run, the share of it that lives, and the run's bytes."""

    member: Member
    run: SegmentRun
    share: Share
    size: int


class LivenessAccounting:
    """The counters of every sealed file on this node. `payload_entries(member, first, last)` finds entries wherever
    they are; `lose(uid, first, last)`: nobody can tell any more where their payloads are; `uncounted(member, seconds)`:
    for want of descriptors its files count as fuller than they are, until `recount`."""

    def __init__(
        self,
        members: Mapping[int, Member],
        store: StorePort,
        location: Location,
        segments: SegmentFiles,
        payload_entries: Callable[[Member, int, int], Iterator[Found]],
        lose: Callable[[int, int, int], None],
        uncounted: Callable[[Member, float], None],
    ) -> None:
        self._members = members
        self._store = store
        self._location = location
        self._files = location.files
        self._segments = segments
        self._payload_entries = payload_entries
        self._lose = lose
        self._uncounted = uncounted

    def book(self, member: Member, file: SealedFile, run: SegmentRun) -> None:
        """Count a run anew. Where the places of payloads that the snapshot covers can't be read, those are lost, and
        the run is the rest. Raises `Corrupt` for damage above that; and where the disk can't read what nobody else has,
        for it may be readable again."""
        counted = self._book(member, run)
        if counted is not None:
            file.add(member.uid, *counted)

    def _book(self, member: Member, run: SegmentRun) -> tuple[Share, int] | None:
        base = member.snapshot_index
        try:
            return self._count(member, run)
        except (LogyardError, OSError) as error:
            if run.first > base or isinstance(error, Busy) or is_short(error):
                raise
            cause = error.__cause__ or error
            if isinstance(cause, OSError) and cause.errno == EIO and len(member.raft.configuration.nodes()) == 1:
                raise
            self._lose(member.uid, run.first, min(run.last, base))
            if member.raft.log.snapshot_index < base:
                member.raft.log.compact(base, member.snapshot_term)
            self._segments.drop_below(member, run, base)
            return self._count(member, run._replace(first=base + 1)) if run.last > base else None

    def forget(self, member: Member) -> None:
        """Let nothing of a replica that goes live any more."""
        for run in member.segments:
            file = self._files.get(run.segment)
            if file is not None:
                file.remove(member.uid)

    def count_later(self, member: Member, error: LogyardError) -> None:
        """Count a member's shares anew when that can be done: damage has the member mended."""
        self._uncounted(member, _retry_after(error))

    def recount(self, member: Member) -> None:
        """Book the shares of a member that was made anew, or that are not known. Raises `Corrupt` and `Busy`; then the
        files count as they did."""
        for run in member.segments:
            if run.segment in self._files:
                with suppress(Corrupt):
                    self._segments.reader(run.segment)
        runs = [(file, run) for run in member.segments if (file := self._files.get(run.segment)) is not None]
        booked = [(file, self._book(member, run)) for file, run in runs]
        for file in self._files.values():
            file.remove(member.uid)
        for file, counted in booked:
            if counted is not None:
                file.put(member.uid, counted[0])

    def _count(self, member: Member, run: SegmentRun) -> tuple[Share, int]:
        """Return what a group still has in a sealed WAL file: entries not dead here and not migrated; and the bytes of
        all of its entries."""
        size = total = 0
        position = run.first
        reader = self._segments.reader(run.segment)
        home = self._store.home
        while position <= run.last:
            entries = reader.entries(member.uid, position, run.last, 1 << 24)
            if not entries:
                break
            for entry in entries:
                if entry.body_bytes and not entry.tombstone:
                    total += entry.body_bytes
                    if not member.is_dead(entry) and home(member.uid, entry.index) is None:
                        size += entry.body_bytes
            position = entries[-1].index + 1
        return Share(run.first, run.last, size), total

    def released(self, member: Member, died: Sequence[PayloadRange]) -> None:
        """Book a release: these ranges, rising and disjoint, lived until just now, all of them, and are dead."""
        self._book_dead(member, died, (Busy,))

    def _book_dead(
        self, member: Member, died: Sequence[PayloadRange], uncounted: tuple[type[LogyardError], ...]
    ) -> None:
        """Book a release; what can't be read for one of these reasons is counted later."""
        # Of an entry that died in several parts the bytes go once: a file that counts as emptier than it is goes early.
        counted: set[int] = set()
        try:
            for first, end in died:
                self._take_out(member, first, end, counted)
        except uncounted as error:
            self._uncounted(member, _retry_after(error))
        # Also before anything of the group was migrated: what is being copied just now has no home yet, and must be
        # dead in its copy.
        for first, end in died:
            self._mark(member, first, end)

    def _take_out(self, member: Member, first: Position, end: Position, counted: set[int]) -> None:
        """Take what died from `first` up to, but without, `end` out of sealed files; entries at ends that are `counted`
        are out."""
        uid = member.uid
        # What lies in between died whole; of the two at the ends some records may live, or have died before.
        low, high = first.index + (first.ordinal > 0), end.index - 1
        ends = {at.index for at in (first, end) if at.ordinal}
        for run in member.segments:
            file = self._files.get(run.segment)
            share = file.shares.get(uid) if file is not None else None
            if file is None or share is None or end <= (share.first, 0) or first.index > share.last:
                continue
            if end.index > share.last and first <= (share.first, 0):
                file.remove(uid)
                continue
            size = self._bytes(member, file.file, max(low, share.first), min(high, share.last))
            for index in sorted(ends - counted):
                if share.first <= index <= share.last and (gone := self._died(member, file, index, first, end)):
                    counted.add(index)
                    size += gone
            file.reduce(uid, min(share.live, size))

    def _mark(self, member: Member, first: Position, end: Position) -> None:
        """Mark as dead in every copy: whole entries, and of those at the ends the units of which nothing lives."""
        low, high = first.index + (first.ordinal > 0), end.index - 1
        if low <= high:
            self._store.mark_dead(member.uid, (low, 0), (high + 1, 0))
        for index in {at.index for at in (first, end) if at.ordinal}:
            self._part(member, index)

    def hidden_by(self, member: Member, before: Sequence[HomePort], dense: bool) -> Callable[[int, int], bool]:
        """Return whether a new home over a gap (first, last) would hide what is stored elsewhere: has a home already,
        or lives in this member's own log. `dense`: it always would."""
        end = member.raft.log.last_index

        def hides(first: int, last: int) -> bool:
            at = bisect_right(before, last, key=_first) - 1
            if dense or (at >= 0 and before[at].last >= first):
                return True
            return first <= end and bool(member.liveness.live_within((first, 0), (min(last, end) + 1, 0)))

        return hides

    def look_for_lost(self, member: Member) -> None:
        """Settle after a start what was lost: what is dead is not."""
        last = member.raft.log.last_index
        if not member.damaged and self._store.lost(member.uid, 1, last):
            self.settle(member, 1, last)

    def settle_installed(self, member: Member) -> None:
        """Settle after a start what died by a snapshot that was installed: a crash may have come before the rows of
        the store said so, and nothing below it is applied again."""
        if not member.damaged:
            for home in list(self._store.homes(member.uid)):
                if home.first <= member.snapshot_index:
                    self.settle(member, home.first, min(home.last, member.snapshot_index))

    def settle(self, member: Member, first: int, last: int) -> None:
        """Mark what died of entries first..last while a job copied them, built after their source, as dead in the copy,
        too."""
        at, stop = Position(first, 0), Position(last + 1, 0)
        for lives in member.liveness.live_within(at, stop):
            if at < lives.first:
                self._mark(member, at, lives.first)
            at = lives.end
        if at < stop:
            self._mark(member, at, stop)

    def replaced(self, member: Member, old: LivenessPort, upto: int) -> None:
        """Book what died as a snapshot's live set took the place of `old`, up to and with an index."""
        died = []
        for lived in old.live_ranges(upto):
            at = lived.first
            for lives in member.liveness.live_within(lived.first, lived.end):
                if at < lives.first:
                    died.append(PayloadRange(at, lives.first))
                at = lives.end
            if at < lived.end:
                died.append(PayloadRange(at, lived.end))
        # The snapshot is installed: damage that counting meets must not end that half done.
        self._book_dead(member, died, (Busy, Corrupt))

    def cut(self, member: Member, last: int) -> None:
        """Cut a group's payloads above `last` from sealed files: overwritten, or stored anew with a snapshot."""
        for file in self._files.values():
            share = file.shares.get(member.uid)
            if share is None or share.last <= last:
                continue
            if share.first > last:
                file.remove(member.uid)
                continue
            try:
                gone = self._bytes(member, file.file, last + 1, share.last, living=True)
            except (Busy, Corrupt) as error:
                # What is counted anew finds the damage as well, and has the member mended.
                gone = 0
                self._uncounted(member, _retry_after(error))
            file.shorten(member.uid, last, gone)

    def _shares(self, member: Member, first: int, last: int) -> list[tuple[SealedFile, Share]]:
        """Return a member's shares in which entries of first..last are."""
        found = [(file, file.shares.get(member.uid)) for file in self._files.values()]
        return [(file, share) for file, share in found if share and share.last >= first and share.first <= last]

    def open_segments(self, member: Member, runs: Sequence[tuple[int, int]]) -> None:
        """Open what `rehomed` is about to read of these entries: a want of descriptors ends a job before it changed
        anything."""
        for first, last in runs:
            for file, _ in self._shares(member, first, last):
                self._segments.reader(file.file)

    def rehomed(self, member: Member, first: int, last: int, before: Sequence[HomePort]) -> None:
        """Take entries first..last, which were stored in a generation, from sealed files: those that had no home in one
        (`before`) lived there until now."""
        for file, share in self._shares(member, first, last):
            reader = self._segments.reader(file.file)
            try:
                entries = reader.entries(member.uid, max(first, share.first), min(last, share.last))
            except Corrupt:
                # What is counted anew finds the damage as well, and has the member mended.
                self._uncounted(member, 0.0)
                continue
            gone = sum(
                entry.body_bytes
                for entry in entries
                if not entry.tombstone
                and not member.is_dead(entry)
                and not any(home.first <= entry.index <= home.last for home in before)
            )
            file.reduce(member.uid, min(share.live, gone))

    def _part(self, member: Member, index: int) -> None:
        """Mark the units of an entry, of which some records died, whose records are all dead."""
        if not member.liveness.live_within((index, 0), (index + 1, 0)):
            self._store.mark_dead(member.uid, (index, 0), (index + 1, 0))
            return
        try:
            found = next(self._payload_entries(member, index, index), None)
        except LogyardError as error:
            # A copy that is damaged: its unit dies with the whole entry.
            log.warning("group %s: entry %d, of which a part died: %s", member.spec.name, index, error)
            return
        if found is None or found.index != index:
            return
        units = units_of(found.data)
        live = member.liveness.live_units(index, [(unit.number, unit.first_ordinal, unit.records) for unit in units])
        for unit in units:
            if unit.number not in live:
                self._store.mark_dead(member.uid, (index, unit.number), (index, unit.number + 1))

    def _died(self, member: Member, file: SealedFile, index: int, first: Position, end: Position) -> int:
        """Return the payload bytes that died of an entry at an end of a release: an entry counts as dead when its last
        living record dies. Positions behind its last record never existed, so nothing died with them."""
        entries = self._segments.reader(file.file).entries(member.uid, index, index, SCAN_BYTES)
        if not entries or entries[0].tombstone or self._store.home(member.uid, index) is not None:
            return 0
        entry = entries[0]
        begin = first.ordinal if first.index == index else 0
        stop = end.ordinal if end.index == index else records_in(entry.data)
        return entry.body_bytes if begin < min(stop, records_in(entry.data)) and member.is_dead(entry) else 0

    def _bytes(self, member: Member, number: int, low: int, high: int, living: bool = False) -> int:
        """Return the payload bytes of a group's entries low..high in a sealed file, but for those at home in a
        generation; of the `living` ones only."""
        if high < low:
            return 0
        size = 0
        reader = self._segments.reader(number)
        home = self._store.home
        while low <= high:
            entries = reader.entries(member.uid, low, high, SCAN_BYTES)
            if not entries:
                break
            size += sum(
                entry.body_bytes
                for entry in entries
                if not entry.tombstone
                and home(member.uid, entry.index) is None
                and not (living and member.is_dead(entry))
            )
            low = entries[-1].index + 1
        return size

    def present(self, number: int, found: Mapping[int, tuple[int, int, int, int]]) -> list[Present]:
        """Return what of a new segment is the content of logs; `found` says of each group (first, last, term of the
        last, payload bytes). Reads the segment where it must, and so may fail: it changes nothing."""
        present = []
        for uid, (first, last, last_term, size) in found.items():
            member = self._members.get(uid)
            if member is None or member.damaged:
                continue
            low = max(first, member.raft.log.snapshot_index + 1)
            # The log may have been overwritten, or replaced by a snapshot: only what is its present content counts.
            moved = self._store.homes(uid)
            if low != first or member.raft.log.term(last) != last_term or (moved and moved[-1].last >= low):
                last, size = self._current_part(member, number, low, last)
            if last >= low:
                share = self._share_of(member, number, low, last, size)
                present.append(Present(member, SegmentRun(low, last, number), share, size))
        return present

    def _current_part(self, member: Member, segment: int, first: int, last: int) -> tuple[int, int]:
        """Return the longest prefix of a segment's run that is still the log's content: its last index and its payload
        bytes at home here."""
        size = 0
        good = first - 1
        home = self._store.home
        while good < last:
            entries = self._segments.reader(segment).entries(member.uid, good + 1, last, 1 << 22)
            if not entries:
                break
            for entry in entries:
                if member.raft.log.term(entry.index) != entry.term:
                    return good, size
                good = entry.index
                if not entry.tombstone and home(member.uid, good) is None:
                    size += entry.body_bytes
        return good, size

    def _share_of(self, member: Member, number: int, first: int, last: int, size: int) -> Share:
        """Return a freshly sealed run's share: `size` payload bytes, less what was released, or stored in a generation,
        before it was booked."""
        lives = member.liveness.live_within((first, 0), (last + 1, 0))
        if not lives:
            size = 0
        elif lives != [((first, 0), (last + 1, 0))] or any(
            home.first <= last and home.last >= first for home in self._store.homes(member.uid)
        ):
            size = self._bytes(member, number, first, last, living=True)
        return Share(first, last, size)

    def live_bytes(self) -> int:
        """Return the live or pending payload bytes whose home is the WAL: sealed files by counter, unsealed ones by
        looking, at each of up to `LOOKED_AT_MAX` entries and at some as many of more: the others are taken to live in
        the same part, as a look takes microseconds and there may be hundreds of thousands."""
        size = sum(file.live for file in self._files.values())
        unsealed = [(uid, entry) for uid, entry in self._location.unsealed() if entry.body_bytes]
        one_in = len(unsealed) // LOOKED_AT_MAX + 1
        # By a hash: groups may take turns, so that each so-and-so-many-th entry is of the same one.
        looked_at = [(uid, entry) for uid, entry in unsealed if one_in == 1 or _mixed(uid, entry.index) % one_in == 0]
        living = sum(entry.body_bytes for uid, entry in looked_at if self._lives(uid, entry))
        if one_in > 1:
            seen = sum(entry.body_bytes for _, entry in looked_at)
            living = living * sum(entry.body_bytes for _, entry in unsealed) // max(1, seen)
        return size + living

    def _lives(self, uid: int, entry: Entry) -> bool:
        """Return whether an entry of an unsealed file is the content of a log, is at home there, and is not all
        dead."""
        member = self._members.get(uid)
        if member is None or entry.tombstone or member.raft.log.term(entry.index) != entry.term:
            return False
        return self._store.home(uid, entry.index) is None and not member.is_dead(entry)


def _mixed(uid: int, index: int) -> int:
    """Return a number that looks drawn: the upper bits of a product (Knuth's multiplicative hashing)."""
    return ((uid + index) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF) >> 40


def _retry_after(error: LogyardError) -> float:
    """Return in how many seconds to count anew what could not be counted."""
    return error.retry_after if isinstance(error, Busy) else 0.0


class Recount:
    """Has shares counted anew when the segments that tell what died can be opened: until then a file counts as fuller
    than it is, and nobody's command is at fault. `damaged(member, error)`: they never can."""

    def __init__(
        self,
        members: Mapping[int, Member],
        accounting: LivenessAccounting,
        lock: trio.Lock,
        spawn: Callable[[Callable[[Member, float], Awaitable[None]], Member, float], None],
        look: Callable[[], None],
        damaged: Callable[[Member, Corrupt], None],
    ) -> None:
        self._members = members
        self._accounting = accounting
        self._lock = lock
        self._spawn = spawn
        self._look = look
        self._damaged = damaged
        self._uncounted: set[int] = set()

    def later(self, member: Member, seconds: float) -> None:
        """Count a member's shares anew, not before so many seconds."""
        if member.uid not in self._uncounted:
            self._uncounted.add(member.uid)
            self._spawn(self._run, member, seconds)

    async def _run(self, member: Member, seconds: float) -> None:
        uid = member.uid
        while uid in self._uncounted:
            await trio.sleep(seconds)
            # Who stores payloads elsewhere counts what that takes from here when it is stored: not twice.
            async with self._lock:
                try:
                    if self._members.get(uid) is member and not member.raft.stopped:
                        self._accounting.recount(member)
                    self._uncounted.discard(uid)
                except Busy as error:
                    seconds = error.retry_after
                except Corrupt as error:
                    self._uncounted.discard(uid)
                    self._damaged(member, error)
        self._look()


def _first(home: HomePort) -> int:
    return home.first
