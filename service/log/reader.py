"""Reads records of an append log from the member of this node: the machine knows anchors, the engine knows where
bytes are.

Only applied records are visible, so only committed ones. Every answer is built from hash-checked units. Called by
`verbs`; `scan` reads by the same walk.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import trio

from logyard.engine.entry import Unit, frames_of, timestamp_of, units_of
from logyard.engine.replica.leadership import wait
from logyard.engine.replica.member import Member
from logyard.engine.replica.reader import Located, Wanted
from logyard.engine.replica.uploads import TABLE_BYTES, runs
from logyard.engine.types import Buffer
from logyard.machines.log import AppendLog
from logyard.machines.log.keyed import Keys
from logyard.machines.log.slices import Long, Slice, slices
from logyard.payloads.reference import Position
from logyard.protocol.errors import BadRequest, Busy, Corrupt, Gone, LogyardError, OutOfRange, WrongKind
from logyard.protocol.frame import ABSENT, ENVELOPE_BYTES, FRAME_BYTES_MAX, LARGE, MARK, MARKED, heads_bytes, table_of
from logyard.protocol.records import encode_block, encode_long

from ..door import answers

BODY_BYTES = 8 << 20
"""Room that is taken for a body at most: a larger one is answered alone."""

FILES = (".seg", ".ring")
"""How the names of files end that logs lie in."""
DAMAGE = ("corrupt", "error")
"""Codes of what a peer's copy may mend: damaged rows, a gap, an environment that fails."""


class Payloads(Protocol):
    """Where entries and their payloads are read, wherever they lie: `engine.replica.reader.Reader`."""

    def payload_entries(self, member: Member, first: int, last: int) -> Iterator[Located]:
        """Yield a group's entries with payload from `first` to `last`, in order."""
        ...

    async def read(self, member: Member, wanted: Sequence[Wanted]) -> list[Buffer]:
        """Return bytes of payloads, by whose hashes they were checked. What is pinned by this stays until it is
        read."""
        ...


class Piece(NamedTuple):
    """Records to answer from one frame: `skip` of them are left out at its front; `large` are the bodies wanted.

    `long`: it is one record whose payload came in pieces; `parts` are the bytes of it that go along.
    """

    located: Located
    offset: int
    skip: int
    records: int
    pack: Unit
    large: list[Unit]
    frame_records: int
    long: Long | None = None
    parts: Sequence[Wanted] = ()
    marked: bool = False
    """Some of the frame's payloads may be encoded."""


class Encoded(NamedTuple):
    """Instead of a body that is encoded: its envelope, and how many bytes are stored."""

    envelope: bytes
    stored: int


def append_log(member: Member) -> AppendLog:
    """Return the member's machine, if it is an append log. Raises `WrongKind`, `GroupStopped`."""
    member.check_running()
    if not isinstance(member.machine, AppendLog):
        raise WrongKind(member.spec.name, member.spec.machine, "log")
    return member.machine


class LogReader:
    """Answers from members of this node. `stretch` has entries whose payloads are lost here stored anew, and returns
    how many came; `damaged` hears of what only the log of a peer can mend."""

    def __init__(
        self,
        node_id: int,
        payloads: Payloads,
        stretch: Callable[[Member, int, int], Awaitable[int]],
        damaged: Callable[[Member, Corrupt], None],
    ) -> None:
        self._node_id = node_id
        self._payloads = payloads
        self._stretch = stretch
        self._damaged = damaged

    async def poll(
        self, member: Member, offset: int, max_records: int, max_bytes: int, wait_s: float, bodies: bool
    ) -> tuple[dict[str, int], list[Buffer]]:
        """Return blocks of at least one record from `offset`, up to about `max_bytes`; empty at the end of the log
        after `wait_s`. The header of a topic's partition has the epoch since which that has slots of others, `joined`.

        Raises `OutOfRange` (with start and end), `Gone` (this member is below its payload floor), `Corrupt`.
        """
        machine = append_log(member)
        if offset == machine.end and wait_s > 0:
            with trio.move_on_after(wait_s):
                await wait(member, lambda: machine.end > offset)
            machine = append_log(member)
        await answers.take(max_bytes if offset < machine.end else 0)
        machine = append_log(member)
        if offset != machine.end or offset < machine.start:
            machine.anchor(offset)
        pieces = await self._mended(member, machine, offset, max_records, max_bytes, bodies)
        bounds = {"start": machine.start, "end": machine.end, "node": self._node_id, "uid": member.uid}
        if machine.partition is not None and machine.partition.joined:
            # Of what is read here, or of a later state: a record that lies behind a fence never comes without it.
            bounds["joined"] = machine.partition.joined
        wanted = []
        for piece in pieces:
            wanted.append(Wanted(piece.located, piece.pack, 0, piece.pack.length))
            if bodies:
                wanted += (Wanted(piece.located, unit, 0, unit.length) for unit in piece.large)
                wanted += piece.parts
        data = iter(await self._payloads.read(member, wanted))
        blocks: list[Buffer] = []
        for piece in pieces:
            pack = memoryview(next(data))
            if piece.long is not None:
                body = [next(data) for _ in piece.parts] if bodies else []
                blocks += _long_block(piece, pack, body, bodies)
                continue
            large = [next(data) for _ in piece.large] if bodies else []
            blocks += _block(piece, pack, large, bodies)
        return bounds, blocks

    async def read_body(
        self, member: Member, offset: int, start: int, stop: int | None, stored: bool = False
    ) -> Buffer | Encoded:
        """Return bytes `start`..`stop` of one record's body; if it is encoded, how, or bytes of what is `stored` of it.
        Raises `OutOfRange` for a range outside of the body."""
        await answers.take(BODY_BYTES if stop is None else max(0, min(stop - start, BODY_BYTES)))
        machine = append_log(member)
        machine.anchor(offset)
        plan = await self._mended(member, machine, offset, 1, 1)
        if not plan:
            raise _behind(member)
        piece = plan[0]
        if piece.offset != offset:
            raise _replaced(member, offset)
        pack = memoryview(b"")
        table: tuple[int, ...] = ()
        if piece.marked or not (piece.long or piece.large):
            wanted = Wanted(piece.located, piece.pack, 0, piece.pack.length)
            pack = memoryview((await self._payloads.read(member, [wanted]))[0])
            table = table_of(pack, piece.frame_records)
        if piece.marked and not stored and table[2 * piece.skip] & MARK:
            at = 8 * piece.frame_records + heads_bytes(table[: 2 * piece.skip], True)
            size = piece.long.size if piece.long else table[2 * piece.skip + 1]
            return Encoded(bytes(pack[at : at + ENVELOPE_BYTES]), size)
        if piece.long is not None:
            stop = _range(offset, start, stop, piece.long.size)
            if stop - start > FRAME_BYTES_MAX:
                raise BadRequest(f"{stop - start} bytes at once are too many; read at most {FRAME_BYTES_MAX}")
            read = await self._payloads.read(member, await self._parts(member, offset, piece.long, start, stop))
            return read[0] if len(read) == 1 else b"".join(read)
        if piece.large:
            size = piece.large[0].length
            stop = _range(offset, start, stop, size)
            return (await self._payloads.read(member, [Wanted(piece.located, piece.large[0], start, stop)]))[0]
        body_at, size = _small_body(table, piece.skip, piece.marked)
        stop = _range(offset, start, stop, size)
        return pack[body_at + start : body_at + stop]

    async def _parts(self, member: Member, offset: int, long: Long, start: int, stop: int) -> list[Wanted]:
        """Return what `long_parts` does; entries of pieces that are damaged or lost here come from a peer. They lie in
        front of the record's own, often before its anchor."""
        try:
            return long_parts(self._payloads, member, long, start, stop)
        except LogyardError as error:
            if error.code not in DAMAGE:
                raise
            if not member.resolves:
                raise _behind(member) from error
        for first, end in runs(lost_pieces(self._payloads, member, long, start, stop)):
            await self._stretch(member, first, end - 1)
        # What was truncated or replaced meanwhile has no pieces any more.
        machine = append_log(member)
        machine.anchor(offset)
        if machine.long.get(offset) != long:
            raise _replaced(member, offset)
        return long_parts(self._payloads, member, long, start, stop)

    async def offset_since(self, member: Member, stamp: int) -> int:
        """Return the first offset there is that is stamped at `stamp` (ms since 1970) or later, or the log's end.
        Entries that are damaged or lost here come from a peer. Raises `Corrupt` where nobody has them."""
        tried: set[tuple[int, int]] = set()
        while True:
            search = Search(self._payloads, member, append_log(member), stamp)
            try:
                return search.run()
            except LogyardError as error:
                if error.code not in DAMAGE:
                    raise
                if not member.resolves:
                    raise _behind(member) from error
                place = (search.index, search.reached)
                if place in tried or not await self._stretch(member, *search.stretch()):
                    raise
                tried.add(place)

    async def position_of(self, member: Member, offset: int) -> Position:
        """Return where the record at `offset` lies; for the end of the log, a position no later record lies before.
        Raises `Corrupt` where nobody has what is damaged on the way to it, `Busy` below the payload floor."""
        machine = append_log(member)
        if offset <= machine.start:
            return machine.start_position
        if offset == machine.end:
            return Position(member.raft.applied + 1, 0)
        try:
            plan = await self._mended(member, machine, offset, 1, 1)
        except Gone as error:
            raise Busy("the way to the payload floor", 0.1) from error
        for piece in plan:
            return Position(piece.located.index, piece.pack.first_ordinal + piece.skip)
        raise Busy("the way to the payload floor", 0.1)

    def _plan(
        self,
        member: Member,
        machine: AppendLog,
        offset: int,
        max_records: int,
        max_bytes: int,
        bodies: bool = False,
    ) -> list[Piece]:
        """Return what to read for records from `offset` on: at least one, then whole frames while they fit; a payload
        that came in pieces only if it fits. Raises `Corrupt`."""
        walk = Walk(self._payloads, member, machine, offset)
        pieces = _collect(walk, offset, max_records, max_bytes, bodies)
        walk.verify()
        if bodies:
            pieces = [
                piece._replace(parts=long_parts(self._payloads, member, piece.long, 0, piece.long.size))
                if piece.long is not None and piece.long.size <= max_bytes
                else piece
                for piece in pieces
            ]
        if not pieces and member.resolves:
            raise Corrupt(f"log {member.spec.name}", offset, "a record", "nothing at its place")
        return pieces

    async def _mended(
        self,
        member: Member,
        machine: AppendLog,
        offset: int,
        max_records: int,
        max_bytes: int,
        bodies: bool = False,
    ) -> list[Piece]:
        """Return what `_plan` does; where entries are damaged or lost here, everything up to the next anchor comes from
        a peer, and as few records are planned as can be: one, without its long payload where nobody has that."""
        if offset >= machine.end:
            return []
        try:
            return self._plan(member, machine, offset, max_records, max_bytes, bodies)
        except LogyardError as error:
            if error.code not in DAMAGE:
                raise
            if not member.resolves:
                # Nothing is damaged: what is missing was released.
                raise _behind(member) from error
        long = machine.long.get(offset)
        if bodies and long is not None and long.size <= max_bytes:
            try:
                await self._parts(member, offset, long, 0, long.size)
                return self._plan(member, append_log(member), offset, 1, max_bytes, bodies)
            except LogyardError as error:
                if error.code not in DAMAGE and not isinstance(error, (Gone, OutOfRange)):
                    raise
            machine = append_log(member)
            machine.anchor(offset)
        try:
            return self._plan(member, machine, offset, 1, 1, bodies)
        except LogyardError as error:
            if error.code not in DAMAGE:
                raise
            _, position = machine.anchor(offset)
            last = next((index - 1 for at, index in machine.anchors if at > offset), member.raft.applied)
            if not await self._stretch(member, position.index, last):
                raise
        try:
            return self._plan(member, machine, offset, 1, 1, bodies)
        except Corrupt as error:
            if str(error.details.get("path", "")).endswith(FILES):
                # An entry without payload, which comes from a peer with the log only.
                self._damaged(member, error)
            raise


class Walk:
    """Counts records from an anchor on, or from where an earlier walk was. `offset` is the one after the current entry;
    `gap`: indexes were passed over unseen.

    Entries without payload have no rows in a generation, so a gap may be harmless; a lost entry would make every
    later record's offset wrong. Which of the two it was, the next anchor tells (`verify`). In a keyed log nothing is
    counted: the machine knows every live record and its offset.
    """

    def __init__(
        self,
        payloads: Payloads,
        member: Member,
        machine: AppendLog,
        offset: int,
        at: tuple[int, Position] | None = None,
    ) -> None:
        self.name = member.spec.name
        self.machine = machine
        self._payloads, self._member = payloads, member
        self.offset, self.position = machine.anchor(offset) if at is None else at
        self.index = self.position.index
        self.gap = False
        self._lost = self._over = False
        self._last = member.raft.applied
        self._end = machine.end
        self._entries = payloads.payload_entries(member, self.index, self._last)

    def __iter__(self) -> Iterator[tuple[Located, list[Slice]]]:
        if self.machine.keys is not None:
            yield from self._keyed(self.machine.keys)
            return
        seen = False
        for located in self._entries:
            self.gap = self.gap or located.index > (self.index + 1 if seen else self.index)
            seen = True
            first = self.position.ordinal if located.index == self.position.index else 0
            self.index = located.index
            holes = self.machine.holes_of(located.index)
            found, self.offset = slices(frames_of(located.data), self.offset, first, holes)
            yield located, found

    def _keyed(self, keys: Keys) -> Iterator[tuple[Located, list[Slice]]]:
        at = self.index
        for located in self._entries:
            self._lost = self._lost or (located.index > at and keys.lives_between(at, located.index - 1))
            self.index, at = located.index, located.index + 1
            found = keys.slices(located.index, frames_of(located.data))
            if found:
                self.offset = max(self.offset, found[-1].offset + found[-1].records)
                yield located, found
        self._over = True

    def verify(self) -> None:
        """Raise `Corrupt` when the count does not meet the next anchor, or the end of the log."""
        if self.machine.keys is not None:
            # The last record of a log lives.
            if self._lost or (self._over and self.offset < self._end):
                raise Corrupt(f"log {self.name}", self.offset, "every live record", "some are not there")
            return
        if not self.gap:
            return
        index, offset = next(
            ((index, offset) for offset, index in self.machine.anchors if index > self.index),
            (self._last + 1, self._end),
        )
        # Not the anchor's own entry: if that is damaged, it is not of what is counted here.
        for located in self._payloads.payload_entries(self._member, self.index + 1, index - 1):
            self.index = located.index
            holes = self.machine.holes_of(located.index)
            _, self.offset = slices(frames_of(located.data), self.offset, 0, holes)
        if self.offset != offset:
            raise Corrupt(f"log {self.name}", self.offset, f"offset {offset} at entry {index}", self.offset)


class Search:
    """The way to the first offset stamped at `stamp` (ms since 1970) or later. It reads from `index`, an anchor's, and
    came as far as `reached`."""

    def __init__(self, payloads: Payloads, member: Member, machine: AppendLog, stamp: int) -> None:
        self._payloads = payloads
        self._member = member
        self._machine = machine
        self._stamp = stamp
        self.index = self.reached = machine.start_position.index

    def run(self) -> int:
        """Return that offset, or the log's end. Raises `Corrupt`.

        Log time never goes back, so anchors are searched by halves and the way from the best one is walked.
        """
        machine, stamp = self._machine, self._stamp
        places = [(machine.start, machine.start_position)]
        places += ((offset, Position(index, 0)) for offset, index in machine.anchors if offset > machine.start)
        last = max(0, bisect_left(places, stamp, key=self._time_of) - 1)
        self.index = self.reached = places[last][1].index
        walk = Walk(self._payloads, self._member, machine, machine.start, places[last])
        for located, found in walk:
            self.reached = located.index
            if found and timestamp_of(located.data) >= stamp:
                walk.verify()
                return max(found[0].offset, machine.start)
            if walk.offset >= machine.end:
                break
            self.reached += 1
        walk.verify()
        return machine.end

    def _time_of(self, place: tuple[int, Position]) -> int:
        self.index = self.reached = place[1].index
        # Of an entry of which nothing lives there may be nothing left: the next one that is there is no earlier.
        for located in self._payloads.payload_entries(self._member, place[1].index, self._member.raft.applied):
            return timestamp_of(located.data)
        return sys.maxsize

    def stretch(self) -> tuple[int, int]:
        """Return the entries of which one could not be read: from the anchor on, up to the next one behind where it
        came to."""
        following = (index for _, index in self._machine.anchors if index > self.reached)
        return self.index, next(following, self._member.raft.applied + 1) - 1


def _behind(member: Member) -> Gone:
    return Gone(f"log {member.spec.name!r} on this node has not caught up with a release yet; ask another member")


def _replaced(member: Member, offset: int) -> Gone:
    return Gone(f"log {member.spec.name!r}: the record at {offset} gave way to a newer one with its key")


def long_parts(payloads: Payloads, member: Member, long: Long, start: int, stop: int) -> list[Wanted]:
    """Return the units that hold bytes `start`..`stop` of a payload that came in pieces. Raises `Corrupt`."""
    found: list[Wanted] = []
    at = 0
    for first, size, count in long.runs:
        skipped = min(count, max(0, start - at) // size)
        at += skipped * size
        needed = min(count - skipped, max(0, -(-(stop - at) // size)))
        index = first + skipped
        for located in payloads.payload_entries(member, index, index + needed - 1) if needed else ():
            if located.index != index:
                break
            unit, base = _piece_in(located)
            if unit.length - base != size:
                break
            low, high = max(start - at, 0), min(stop - at, size)
            found.append(Wanted(located, unit, base + low, base + high))
            index += 1
            at += size
        if index != first + skipped + needed:
            raise Corrupt(f"log {member.spec.name}", at, f"a piece of {size} bytes at entry {index}", "none")
        at += (count - skipped - needed) * size
    return found


def lost_pieces(payloads: Payloads, member: Member, long: Long, start: int, stop: int) -> list[int]:
    """Return the indexes, rising, of the pieces with bytes `start`..`stop` of a payload that can't be found here."""
    lost: list[int] = []
    at = 0
    for first, size, count in long.runs:
        for index in range(first, first + count):
            if start < at + size and at < stop and not _is_there(payloads, member, index, size):
                lost.append(index)
            at += size
    return sorted(lost)


def _is_there(payloads: Payloads, member: Member, index: int, size: int) -> bool:
    try:
        located = next(payloads.payload_entries(member, index, index), None)
    except LogyardError as error:
        if error.code not in DAMAGE:
            raise
        return False
    if located is None or located.index != index:
        return False
    unit, base = _piece_in(located)
    return unit.length - base == size


def _piece_in(located: Located) -> tuple[Unit, int]:
    """Return the unit that a piece is alone in, and where it begins there: a small one lies in its pack, behind the one
    row of its table."""
    unit = units_of(located.data)[-1]
    return unit, TABLE_BYTES if unit.records else 0


def _collect(walk: Walk, offset: int, max_records: int, max_bytes: int, bodies: bool) -> list[Piece]:
    pieces: list[Piece] = []
    left_bytes, left_records = max_bytes, max(1, max_records)
    for located, found in walk:
        if walk.offset <= offset:
            continue
        packs = list(packs_of(located.data))
        flags = [frame.flags for frame in frames_of(located.data)]
        for piece in found:
            if piece.offset + piece.records <= offset:
                continue
            back = max(0, offset - piece.offset)
            pack, large = packs[piece.frame]
            taken, size = _fit(pack, large, piece.skip + back, piece.records - back, left_records, left_bytes)
            long = walk.machine.long.get(piece.offset)
            if long is not None and bodies and long.size <= max_bytes:
                size += long.size
            if size > left_bytes and pieces:
                return pieces
            first = pack.first_ordinal + piece.skip + back
            wanted = [unit for unit in large if first <= unit.first_ordinal < first + taken]
            pieces.append(
                Piece(
                    located, piece.offset + back, piece.skip + back, taken, pack, wanted, pack.records, long,
                    marked=bool(flags[piece.frame] & MARKED),
                )
            )  # fmt: skip
            left_records -= taken
            left_bytes -= size
            if left_records <= 0 or left_bytes <= 0 or taken < piece.records - back:
                return pieces
        if walk.offset >= walk.machine.end:
            break
    return pieces


def packs_of(data: bytes) -> Iterator[tuple[Unit, list[Unit]]]:
    """Yield the pack of each frame and its large bodies."""
    pack: Unit | None = None
    large: list[Unit] = []
    for unit in units_of(data):
        if unit.records:
            if pack is not None:
                yield pack, large
            pack, large = unit, []
        else:
            large.append(unit)
    if pack is not None:
        yield pack, large


def _fit(pack: Unit, large: list[Unit], skip: int, records: int, max_records: int, max_bytes: int) -> tuple[int, int]:
    """Return how many of `records` fit, and their bytes (the pack counts whole): all, or the longest prefix, at least
    one."""
    records = min(records, max_records)
    first = pack.first_ordinal + skip
    size = pack.length
    for unit in large:
        if first <= unit.first_ordinal < first + records:
            if size + unit.length > max_bytes and unit.first_ordinal > first:
                return unit.first_ordinal - first, size
            size += unit.length
    return records, size


def _block(piece: Piece, pack: memoryview, large: list[Buffer], bodies: bool) -> list[Buffer]:
    table = table_of(pack, piece.frame_records)
    part = table[2 * piece.skip : 2 * (piece.skip + piece.records)]
    heads_at = 8 * piece.frame_records + heads_bytes(table[: 2 * piece.skip], piece.marked)
    heads = pack[heads_at : heads_at + heads_bytes(part, piece.marked)]
    found: list[Buffer] | None = None
    if bodies:
        smalls_at, _ = _small_body(table, piece.skip, piece.marked)
        if not large and not piece.large:
            found = [pack[smalls_at : smalls_at + sum(size for size in part[1::2] if size != ABSENT)]]
        else:
            found, rest = [], iter(zip(piece.large, large, strict=True))
            following = next(rest, None)
            base = piece.pack.first_ordinal + piece.skip
            for number, size in enumerate(part[1::2]):
                if following is not None and following[0].first_ordinal == base + number:
                    found.append(following[1])
                    following = next(rest, None)
                elif size != ABSENT:
                    found.append(pack[smalls_at : smalls_at + size])
                    smalls_at += size
    stamp = timestamp_of(piece.located.data)
    place = (piece.offset, piece.located.index, piece.located.term, stamp)
    return encode_block(*place, part, [heads], found, piece.marked)


def _long_block(piece: Piece, pack: memoryview, body: list[Buffer], bodies: bool) -> list[Buffer]:
    assert piece.long is not None
    length = table_of(pack, 1)[0]
    head = pack[TABLE_BYTES : TABLE_BYTES + (length & ~MARK)]
    left_out = bodies and not body
    stamp = timestamp_of(piece.located.data)
    place = (piece.offset, piece.located.index, piece.located.term, stamp)
    return encode_long(*place, head, piece.long.size, body or None, left_out, bool(length & MARK))


def _small_body(table: tuple[int, ...], record: int, marked: bool) -> tuple[int, int]:
    """Return where a record's small body starts in its pack, and its size."""
    at = 4 * len(table) + heads_bytes(table, marked) + sum(size for size in table[1 : 2 * record : 2] if size < LARGE)
    size = table[2 * record + 1] if 2 * record < len(table) else 0
    return at, 0 if size == ABSENT else size


def _range(offset: int, start: int, stop: int | None, size: int) -> int:
    stop = size if stop is None else stop
    if not 0 <= start <= stop <= size:
        raise OutOfRange(f"bytes {start}..{stop} of record {offset}: its body has {size} bytes", start=0, end=size)
    return stop
