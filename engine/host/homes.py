"""Which file is the home of which payloads, how much in it still lives, and who is reading it.

A sealed WAL file stays the home of its payloads until they are dead or migrated. Counters are exact per
(file, group): a
release that covers a group's whole run costs nothing per entry; one that ends inside it reads the sizes of that part
from the
segment. A home that is given up waits for its last pin. All calls on the loop.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import trio

from logyard.protocol.errors import Busy, Corrupt, LogyardError

from ..disk import is_short
from ..entry import Entry, records_in, units_of
from ..log.meta_rows import SegmentRun
from ..machine import Position
from ..ports import HomePort, LivenessPort
from ..replica.member import Member

if TYPE_CHECKING:
    from .system import System

log = logging.getLogger(__name__)

Home = tuple[str, int]
SCAN_BYTES = 1 << 30


class Share:
    """What one group has in one sealed WAL file: entries first..last, `live` payload bytes."""

    __slots__ = ("first", "last", "live")

    def __init__(self, first: int, last: int, live: int) -> None:
        self.first = first
        self.last = last
        self.live = live


class SealedFile:
    """A sealed WAL file that is the home of payloads. The segment of the same number holds its entries' metadata."""

    __slots__ = ("file", "length", "sealed_at", "died_at", "shares", "live", "total", "failed", "kept")

    def __init__(self, file: int, length: int) -> None:
        self.file = file
        self.length = length
        # When something of it died last; what is sealed with a part dead may go on dying.
        self.sealed_at = self.died_at = time.monotonic()
        self.shares: dict[int, Share] = {}
        self.live = 0
        # Payload bytes, dead ones included; and whether they could not be migrated.
        self.total = 0
        self.failed = False
        # A group that nobody can mend has something here: it is for people to judge.
        self.kept = False

    @property
    def dead_ratio(self) -> float:
        """The share of the file's payload bytes that is dead; 1 when it has none."""
        return 1 - self.live / self.total if self.total else 1.0

    def add(self, uid: int, share: Share, total: int) -> None:
        """Book a group's share of `total` bytes, unless all of it is dead."""
        self.total += total
        if share.live:
            self.shares[uid] = share
            self.live += share.live

    def reduce(self, uid: int, size: int) -> None:
        """`size` bytes of a group died here."""
        share = self.shares[uid]
        assert 0 <= size <= share.live, "more bytes died than lived"
        share.live -= size
        self.live -= size
        self.died_at = time.monotonic()
        if not share.live:
            del self.shares[uid]

    def remove(self, uid: int) -> None:
        """The group is gone, or all it had here is dead."""
        share = self.shares.pop(uid, None)
        if share is not None:
            self.live -= share.live
            self.died_at = time.monotonic()


class Pin:
    """How many read a home, and until when it waits for the last of them (monotonic seconds)."""

    __slots__ = ("count", "until")

    def __init__(self) -> None:
        self.count = 0
        self.until = 0.0


class Homes:
    """Counters and pins of every home on this node."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.files: dict[int, SealedFile] = {}
        self.expired = 0
        self._pins: dict[Home, Pin] = {}
        # Of pins that ended by themselves: how many will still be taken off.
        self._late: dict[Home, int] = {}
        self._doomed: dict[Home, Callable[[], None]] = {}
        # Groups whose shares are to be counted anew, for want of descriptors just now.
        self._uncounted: set[int] = set()

    def pin(self, home: Home) -> None:
        """Promise not to destroy a home until `unpin`, or for `pin_ms` at most. A slower reader hears `Gone`, and never
        gets other bytes: each single read holds the file or environment itself."""
        pin = self._pins.get(home)
        if pin is None:
            pin = self._pins[home] = Pin()
            if home[0] == "generation":
                self.system.store.pin(home[1])
        pin.count += 1
        pin.until = time.monotonic() + self.system.config.pin_ms / 1000

    def unpin(self, home: Home) -> None:
        """End of the promise; what waited for it happens now."""
        late = self._late.get(home, 0)
        if late:
            self._late[home] = late - 1
            if late == 1:
                del self._late[home]
            return
        pin = self._pins[home]
        pin.count -= 1
        if not pin.count:
            self._let_go(home)

    def expire(self, now: float) -> None:
        """End the promises that were not kept in time: nobody waits for a stuck reader."""
        for home, pin in list(self._pins.items()):
            if pin.until <= now:
                self._late[home] = self._late.get(home, 0) + pin.count
                self.expired += 1
                self._let_go(home)

    def _let_go(self, home: Home) -> None:
        del self._pins[home]
        if home[0] == "generation":
            self.system.store.unpin(home[1])
        give_up = self._doomed.pop(home, None)
        if give_up is not None:
            give_up()

    def give_up(self, home: Home, act: Callable[[], None]) -> None:
        """Do `act` (recycle, unlink) when nobody reads the home."""
        if home in self._pins:
            self._doomed[home] = act
        else:
            act()

    def book(self, member: Member, file: SealedFile, run: SegmentRun) -> None:
        """Count a run anew. Where the places of payloads that the snapshot covers can't be read, those are lost, and
        the run is the rest. Raises `Corrupt` for damage above that."""
        base = member.snapshot_index
        try:
            share, total = self._count(member, run)
        except (LogyardError, OSError) as error:
            if run.first > base or isinstance(error, Busy) or is_short(error):
                raise
            self.system.refill.lose(member.uid, run.first, min(run.last, base))
            if member.raft.log.snapshot_index < base:
                member.raft.log.compact(base, member.snapshot_term)
            self.system.storage.segments.drop_below(member, run, base)
            if run.last <= base:
                return
            share, total = self._count(member, run._replace(first=base + 1))
        file.add(member.uid, share, total)

    def _count_later(self, member: Member, seconds: float) -> None:
        """Have a member's shares counted anew when the segment that tells what died can be opened: until then its file
        counts as fuller than it is, and nobody's command is at fault."""
        if member.uid not in self._uncounted:
            self._uncounted.add(member.uid)
            self.system.nursery.start_soon(self._count_again, member, seconds)

    async def _count_again(self, member: Member, seconds: float) -> None:
        """Count a member's shares anew, as soon as the segments can be opened."""
        uid, storage = member.uid, self.system.storage
        while uid in self._uncounted:
            await trio.sleep(seconds)
            # Who stores payloads elsewhere counts what that takes from here when it is stored: not twice.
            async with storage.janitor_lock:
                try:
                    if self.system.members.get(uid) is member and not member.raft.stopped:
                        self.recount(member)
                    self._uncounted.discard(uid)
                except Busy as error:
                    seconds = error.retry_after
                except Corrupt as error:
                    self._uncounted.discard(uid)
                    self.system.damages.found(member, error)
        storage.look()

    def recount(self, member: Member) -> None:
        """Book the shares of a member that was made anew, or that are not known. Raises `Corrupt`; with `Busy` nothing
        changed."""
        for run in member.segments:
            if run.segment in self.files:
                with suppress(Corrupt):
                    self.system.storage.segments.reader(run.segment)
        for file in self.files.values():
            file.remove(member.uid)
        for run in list(member.segments):
            found = self.files.get(run.segment)
            if found is not None:
                total = found.total
                self.book(member, found, run)
                found.total = total

    def _count(self, member: Member, run: SegmentRun) -> tuple[Share, int]:
        """What a group still has in a sealed WAL file: entries not dead here and not migrated; and the bytes of all of
        its entries."""
        size = total = 0
        position = run.first
        reader = self.system.storage.segments.reader(run.segment)
        home = self.system.store.home
        while position <= run.last:
            entries = reader.entries(member.uid, position, run.last, 1 << 24)
            if not entries:
                if reader.damaged:
                    raise Corrupt(reader.path, 0, f"entry {position} of group {member.uid:016x}", "no row of it")
                break
            for entry in entries:
                if entry.body_bytes and not entry.tombstone:
                    total += entry.body_bytes
                    if not member.is_dead(entry) and home(member.uid, entry.index) is None:
                        size += entry.body_bytes
            position = entries[-1].index + 1
        return Share(run.first, run.last, size), total

    def released(self, member: Member, first: Position, end: Position) -> None:
        """Book a release: `first` up to, but without, `end` lived until just now, all of it, and is dead."""
        uid = member.uid
        # What lies in between died whole; of the two at the ends some records may live, or have died before.
        low, high = first.index + (first.ordinal > 0), end.index - 1
        ends = [index for index, cut in ((first.index, first.ordinal), (end.index, end.ordinal)) if cut]
        try:
            for run in member.segments:
                file = self.files.get(run.segment)
                share = file.shares.get(uid) if file is not None else None
                if file is None or share is None or end <= (share.first, 0) or first.index > share.last:
                    continue
                if end.index > share.last and first <= (share.first, 0):
                    file.remove(uid)
                    continue
                size = self._bytes(member, file, max(low, share.first), min(high, share.last))
                for index in dict.fromkeys(ends):
                    if share.first <= index <= share.last:
                        size += self._died(member, file, index, first, end)
                file.reduce(uid, min(share.live, size))
        except Busy as error:
            self._count_later(member, error.retry_after)
        # Also before anything of the group was migrated: what is being copied just now has no home yet, and must be
        # dead in its copy.
        self._mark(member, first, end)

    def _mark(self, member: Member, first: Position, end: Position) -> None:
        """Dead in every copy: whole entries, and of those at the ends the units of which nothing lives."""
        low, high = first.index + (first.ordinal > 0), end.index - 1
        if low <= high:
            self.system.store.mark_dead(member.uid, (low, 0), (high + 1, 0))
        for index in {at.index for at in (first, end) if at.ordinal}:
            self._part(member, index)

    def hidden_by(self, member: Member, before: Sequence[HomePort], dense: bool) -> Callable[[int, int], bool]:
        """Whether a new home over a gap (first, last) would hide what is stored elsewhere: has a home already, or lives
        in this member's own log. `dense`: it always would."""
        end = member.raft.log.last_index

        def hides(first: int, last: int) -> bool:
            at = bisect_right(before, last, key=_first) - 1
            if dense or (at >= 0 and before[at].last >= first):
                return True
            return first <= end and bool(member.liveness.live_within((first, 0), (min(last, end) + 1, 0)))

        return hides

    def look_for_lost(self, member: Member) -> None:
        """After a start: what is dead is not lost."""
        last = member.raft.log.last_index
        if not member.damaged and self.system.store.lost(member.uid, 1, last):
            self.settle(member, 1, last)

    def settle(self, member: Member, first: int, last: int) -> None:
        """Entries first..last were copied by a job that was built after their source: what died in between is dead in
        the copy, too."""
        at, stop = Position(first, 0), Position(last + 1, 0)
        for lives in member.liveness.live_within(at, stop):
            if at < lives.first:
                self._mark(member, at, lives.first)
            at = lives.end
        if at < stop:
            self._mark(member, at, stop)

    def replaced(self, member: Member, old: LivenessPort, upto: int) -> None:
        """A snapshot's live set took the place of `old`: book what died by it up to and with an index."""
        for lived in old.live_ranges(upto):
            at = lived.first
            for lives in member.liveness.live_within(lived.first, lived.end):
                if at < lives.first:
                    self.released(member, at, lives.first)
                at = lives.end
            if at < lived.end:
                self.released(member, at, lived.end)

    def cut(self, member: Member, last: int) -> None:
        """Above `last`, a group's payloads have no home in sealed files any more: overwritten, or stored anew with a
        snapshot."""
        for file in self.files.values():
            share = file.shares.get(member.uid)
            if share is None or share.last <= last:
                continue
            if share.first > last:
                file.remove(member.uid)
                continue
            try:
                gone = self._bytes(member, file, last + 1, share.last, living=True)
            except Busy as error:
                gone = 0
                self._count_later(member, error.retry_after)
            share.last = last
            file.reduce(member.uid, min(share.live, gone))

    def _shares(self, member: Member, first: int, last: int) -> list[tuple[SealedFile, Share]]:
        """A member's shares in which entries of first..last are."""
        found = [(file, file.shares.get(member.uid)) for file in self.files.values()]
        return [(file, share) for file, share in found if share and share.last >= first and share.first <= last]

    def open_segments(self, member: Member, runs: Sequence[tuple[int, int]]) -> None:
        """Open what `rehomed` is about to read of these entries: a want of descriptors ends a job before it changed
        anything."""
        for first, last in runs:
            for file, _ in self._shares(member, first, last):
                self.system.storage.segments.reader(file.file)

    def rehomed(self, member: Member, first: int, last: int, before: Sequence[HomePort]) -> None:
        """Entries first..last were stored in a generation: those that had no home in one (`before`) lived in sealed
        files until now."""
        for file, share in self._shares(member, first, last):
            reader = self.system.storage.segments.reader(file.file)
            gone = sum(
                entry.body_bytes
                for entry in reader.entries(member.uid, max(first, share.first), min(last, share.last))
                if not entry.tombstone
                and not member.is_dead(entry)
                and not any(home.first <= entry.index <= home.last for home in before)
            )
            file.reduce(member.uid, min(share.live, gone))

    def _part(self, member: Member, index: int) -> None:
        """Some records of an entry died: units whose records are all dead die with them."""
        if not member.liveness.live_within((index, 0), (index + 1, 0)):
            self.system.store.mark_dead(member.uid, (index, 0), (index + 1, 0))
            return
        try:
            found = next(self.system.reader.payload_entries(member, index, index), None)
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
                self.system.store.mark_dead(member.uid, (index, unit.number), (index, unit.number + 1))

    def _died(self, member: Member, file: SealedFile, index: int, first: Position, end: Position) -> int:
        """Payload bytes of an entry at an end of a release: an entry counts as dead when its last living record dies.
        Positions behind its last record never existed, so nothing died with them."""
        entries = self.system.storage.segments.reader(file.file).entries(member.uid, index, index, SCAN_BYTES)
        if not entries or entries[0].tombstone or self.system.store.home(member.uid, index) is not None:
            return 0
        entry = entries[0]
        begin = first.ordinal if first.index == index else 0
        stop = end.ordinal if end.index == index else records_in(entry.data)
        return entry.body_bytes if begin < min(stop, records_in(entry.data)) and member.is_dead(entry) else 0

    def _bytes(self, member: Member, file: SealedFile, low: int, high: int, living: bool = False) -> int:
        """Payload bytes of a group's entries low..high in a sealed file, but for those at home in a generation; of
        the `living` ones only."""
        if high < low:
            return 0
        size = 0
        reader = self.system.storage.segments.reader(file.file)
        home = self.system.store.home
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

    def share_of(self, member: Member, file: SealedFile, first: int, last: int, size: int) -> Share:
        """A freshly sealed run's share: `size` payload bytes, less what was released, or stored in a generation, before
        it was booked."""
        lives = member.liveness.live_within((first, 0), (last + 1, 0))
        if not lives:
            size = 0
        elif lives != [((first, 0), (last + 1, 0))] or any(
            home.first <= last and home.last >= first for home in self.system.store.homes(member.uid)
        ):
            size = self._bytes(member, file, first, last, living=True)
        return Share(first, last, size)

    def holds(self, entry: Entry | None) -> bool:
        """Whether an entry's bytes are in memory or in a WAL file that is still a home."""
        if entry is None or entry.tombstone:
            return False
        return bool(entry.bodies) or entry.file in self.files or self.system.storage.is_open_file(entry.file)

    def live_bytes(self) -> int:
        """Live or pending payload bytes whose home is the WAL: sealed files by counter, unsealed ones by looking."""
        size = sum(file.live for file in self.files.values())
        members = self.system.members
        for uid, entry in self.system.storage.unsealed():
            member = members.get(uid)
            if member is None or not entry.body_bytes or entry.tombstone:
                continue
            if member.raft.log.term(entry.index) != entry.term or self.system.store.home(uid, entry.index) is not None:
                continue
            if not member.is_dead(entry):
                size += entry.body_bytes
        return size


def _first(home: HomePort) -> int:
    return home.first
