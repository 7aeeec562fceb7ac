"""Finds entries and payload bytes wherever they live: memory, WAL file, segment or generation.

An entry's payload has one home at a time: a generation once its WAL file was migrated, else the WAL file (and the
cache).
Locating happens on the loop and pins the home in the same turn (law 4); bytes are then read, and their hashes
checked, in a
thread. Called by `applier`, `outbound`, snapshots and the service's readers.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import trio

from logyard.protocol.errors import Busy, Corrupt, Gone, LogyardError, PayloadCorrupt

from ..entry import Entry, Unit, timestamp_of, unit_hash, units_of
from ..log.ring import RingReader
from ..log.segment import SegmentReader
from ..ports import HomePort, StorePort
from ..types import Buffer
from .member import Member

log = logging.getLogger(__name__)

SCAN_BYTES = 1024 * 1024
SCAN_ENTRIES = 1024
"""What is looked at in one go: who needs few entries must not pay for a megabyte of small ones."""
THREAD_BYTES = 64 * 1024


class Located(NamedTuple):
    """An entry with payload and where its bytes are: in `entry` (memory or WAL file), else in a generation, `home`."""

    index: int  # type: ignore[assignment]  # tuple.index is not missed
    term: int
    data: bytes
    entry: Entry | None
    home: HomePort | None


class Wanted(NamedTuple):
    """Bytes `start`..`stop` of one unit of a located entry."""

    located: Located
    unit: Unit
    start: int
    stop: int


class Segments(Protocol):
    """The files that entries went to when they left memory."""

    def reader(self, number: int) -> SegmentReader:
        """Return one of them, open. Raises `Corrupt`."""
        ...


class Rings(Protocol):
    """The files that entries of system groups went to."""

    def reader(self, uid: int) -> RingReader:
        """Return one of them, open. Raises `Corrupt`."""
        ...


class Pins(Protocol):
    """Who destroys what holds payloads: not what is pinned."""

    def pin(self, home: tuple[str, int]) -> None:
        """Keep a home until `unpin`."""
        ...

    def unpin(self, home: tuple[str, int]) -> None:
        """Let it go."""
        ...


class Reader:
    """Read access to everything a member stores. `read_wal(file, offset, length)` gives bytes of a WAL file; `mend` is
    asked, with the error, for bytes that are missing or damaged here."""

    def __init__(
        self,
        store: StorePort,
        segments: Segments,
        rings: Rings,
        pins: Pins,
        read_wal: Callable[[int, int, int], Buffer],
        mend: Callable[[Member, Wanted, LogyardError], Awaitable[Buffer]],
    ) -> None:
        self._store = store
        self._segments = segments
        self._rings = rings
        self._pins = pins
        self._read_wal = read_wal
        self._mend = mend

    def log_entries(self, member: Member, first: int, last: int, bytes_max: int) -> list[Entry]:
        """Return entries of the Raft log from `first`, at least one; from segments where they left memory. Raises
        `Corrupt`."""
        found = member.raft.log.slice(first, last, bytes_max)
        if found is not None:
            return found
        return self.stored_entries(member, first, last, bytes_max)

    def stored_entries(self, member: Member, first: int, last: int, bytes_max: int = SCAN_BYTES) -> list[Entry]:
        """Return entries of the log from `first` as segments or a ring have them, at least one. Raises `Corrupt`."""
        found = self._from_files(member, first, last, bytes_max)
        if found and found[0].index == first:
            return found
        raise Corrupt(f"group {member.spec.name}", 0, f"entry {first}", "no segment that holds it")

    def newest_time(self, member: Member) -> int | None:
        """Return the newest log time (ms) of a group's log: what is not applied here yet counts, and no entry is ever
        stamped lower than the one before it. None while that can't be read."""
        last = member.raft.log.last_index
        stamp = member.log_time
        if last > member.raft.applied:
            try:
                stamp = max(stamp, timestamp_of(self.log_entries(member, last, last, 1)[0].data))
            except LogyardError as error:
                # Apply meets the same damage, and says so.
                log.warning("group %s: its newest log time can't be read: %s", member.spec.name, error)
                return None
        return stamp

    def payload_entries(self, member: Member, first: int, last: int) -> Iterator[Located]:
        """Yield entries with payload from `first` to `last`, in order; entries without payload may be among them.

        Read in chunks on the loop: stop asking when enough was seen.
        """
        index = max(first, 1)
        store = self._store
        while index <= last:
            home = store.home(member.uid, index)
            near = min(last, index + SCAN_ENTRIES - 1)
            if home is not None:
                stop = min(near, home.last)
                try:
                    for stored in store.scan(member.uid, index, stop):
                        yield Located(stored.index, stored.term, stored.data, None, home)
                except PayloadCorrupt as error:
                    damaged = error.index
                    known = error.uid == member.uid and index <= damaged <= stop
                    if not known or member.liveness.live_within((damaged, 0), (damaged + 1, 0)):
                        raise
                    # Nobody has what does not live any more, and nobody needs it.
                    index = damaged + 1
                    continue
                index = stop + 1
                continue
            later = [home.first for home in store.homes(member.uid) if home.first > index]
            stop = min([near, *(first - 1 for first in later)])
            raft_log = member.raft.log
            if index >= raft_log.memory_first:
                entries = raft_log.slice(index, stop, SCAN_BYTES) if index <= raft_log.last_index else []
            else:
                entries = self._from_files(member, index, stop, SCAN_BYTES)
            if not entries:
                # A hole: released and given back, or entries below what this member ever stored.
                following = [run.first for run in member.segments if run.first > index]
                following += [run.first for run in member.ring_runs if run.first > index]
                index = min([last + 1, *later, *following, max(index + 1, member.raft.log.memory_first)])
                continue
            for entry in entries:
                yield Located(entry.index, entry.term, entry.data, entry, None)
            index = entries[-1].index + 1

    def _from_files(self, member: Member, index: int, stop: int, bytes_max: int) -> list[Entry]:
        """Return entries from `index` of the one file that has it; none where no file has."""
        for one in member.ring_runs:
            if one.first <= index <= one.last:
                return self._rings.reader(member.uid).entries(index, min(stop, one.last), one.term, bytes_max)
            if one.first > index:
                # A segment has nothing of what the ring has.
                stop = min(stop, one.first - 1)
                break
        for run in reversed(member.segments):
            if run.first <= index <= run.last:
                reader = self._segments.reader(run.segment)
                return reader.entries(member.uid, index, min(stop, run.last), bytes_max)
        return []

    async def read(self, member: Member, wanted: Sequence[Wanted], mend: bool = True) -> list[Buffer]:
        """Return the bytes of each wanted range, verified by unit hash. Raises `Gone`, `Corrupt`, `Busy`. `mend`: what
        is missing or damaged here comes from a peer, unless it was released.

        Pins every home before the first await, so that nothing asked for here can be destroyed while it is read.
        """
        if not member.resolves:
            raise _behind(member)
        return await self._read(member, wanted, mend)

    async def read_all(self, parts: Sequence[tuple[Member, Sequence[Wanted]]]) -> list[list[Buffer] | LogyardError]:
        """Return the same of several members, or why one's can't be read, for one hand-over to a thread."""
        there = [member.resolves for member, _ in parts]
        asked = [(member.uid, wanted) for (member, wanted), resolves in zip(parts, there, strict=True) if resolves]
        loaded = iter(await self._load_parts(asked))
        done: list[list[Buffer] | LogyardError] = []
        for (member, wanted), resolves in zip(parts, there, strict=True):
            try:
                if not resolves:
                    raise _behind(member)
                done.append(await self._mended(member, wanted, next(loaded), True))
            except LogyardError as error:
                done.append(error)
        return done

    async def _read(self, member: Member, wanted: Sequence[Wanted], mend: bool) -> list[Buffer]:
        (found,) = await self._load_parts([(member.uid, wanted)])
        return await self._mended(member, wanted, found, mend)

    async def _load_parts(self, parts: Sequence[tuple[int, Sequence[Wanted]]]) -> list[list[Buffer | LogyardError]]:
        """Return the bytes that are there of several groups, by uid; what could not be read is its error."""
        homes = {home for _, wanted in parts for want in wanted if (home := _home(want.located)) is not None}
        for home in homes:
            self._pins.pin(home)
        try:
            size, in_memory = 0, True
            held = []
            for uid, wanted in parts:
                bodies = [want.located.entry.bodies if want.located.entry else None for want in wanted]
                held.append((uid, wanted, bodies))
                size += sum(want.stop - want.start for want in wanted)
                in_memory = in_memory and all(bodies)
            if in_memory or size <= THREAD_BYTES:
                return self._load_held(held)
            return await trio.to_thread.run_sync(self._load_held, held)
        finally:
            for home in homes:
                self._pins.unpin(home)

    def _load_held(
        self, parts: Sequence[tuple[int, Sequence[Wanted], Sequence[Sequence[Buffer] | None]]]
    ) -> list[list[Buffer | LogyardError]]:
        return [self._load_all(uid, wanted, bodies) for uid, wanted, bodies in parts]

    async def _mended(
        self, member: Member, wanted: Sequence[Wanted], found: Sequence[Buffer | LogyardError], mend: bool
    ) -> list[Buffer]:
        """Return what was read; what was not comes from a peer, or is raised."""
        data: list[Buffer] = []
        for want, one in zip(wanted, found, strict=True):
            if isinstance(one, LogyardError):
                if not mend or isinstance(one, Busy):
                    # A process that lacks descriptors or memory has lost nothing.
                    raise one
                one = await self._mend(member, want, one)
            data.append(one)
        return data

    def _load_all(
        self, uid: int, wanted: Sequence[Wanted], bodies: Sequence[Sequence[Buffer] | None]
    ) -> list[Buffer | LogyardError]:
        """Return the bytes; what could not be read is its error."""
        found: list[Buffer | LogyardError] = []
        for want, held in zip(wanted, bodies, strict=True):
            try:
                found.append(self._load(uid, want, held))
            except LogyardError as error:
                found.append(error)
        return found

    def _load(self, uid: int, want: Wanted, held: Sequence[Buffer] | None = None) -> Buffer:
        located, unit, start, stop = want
        entry = located.entry
        if entry is not None:
            held = held or entry.bodies
            if held:
                return memoryview(held[unit.number])[start:stop]
            if not entry.file:
                raise Gone(f"the payload of entry {located.index} was not sent to this member: it is released")
            data: Buffer = self._read_wal(entry.file, entry.offset + unit.offset, unit.length)
            if unit_hash(uid, located.index, located.term, unit.number, data) != unit.hash:
                raise Corrupt(f"wal file {entry.file}", entry.offset + unit.offset, unit.hash.hex(), "another hash")
            return memoryview(data)[start:stop]
        return self._store.read_unit(uid, located.index, unit.number, start, stop)

    async def whole(self, member: Member, located: Sequence[Located]) -> list[tuple[Buffer, ...]]:
        """Return all units of each entry, for the log of another member: also below the floor, where what is there may
        be released. Raises as `read`."""
        wanted = [Wanted(one, unit, 0, unit.length) for one in located for unit in units_of(one.data)]
        data = iter(await self._read(member, wanted, member.resolves))
        return [tuple(next(data) for _ in units_of(one.data)) for one in located]


def _behind(member: Member) -> Gone:
    return Gone(f"group {member.spec.name!r} on this node has not caught up with a release yet; ask another member")


def _home(located: Located) -> tuple[str, int] | None:
    if located.home is not None:
        return "generation", located.home.generation
    entry = located.entry
    return ("wal", entry.file) if entry is not None and entry.file and not entry.bodies else None
