"""Questions to machines whose answers name payloads: the answer, and the bytes from wherever they lie.

Invariants: the machine answers and the payloads are located and pinned in one turn, so what an answer names can be
read, whatever is released meanwhile (what is too long to be read at once is asked again where that happens); how long
they are is what the log says, never what their writer said. Any machine with a `fetch(request, now)` is asked. Used by
`verbs` and `watch`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import trio

from logyard.engine.entry import Unit
from logyard.engine.replica.member import Member
from logyard.engine.replica.reader import Located, Wanted
from logyard.engine.types import Buffer
from logyard.protocol.errors import BadRequest, Corrupt, Gone, LogyardError
from logyard.protocol.frame import ABSENT, LARGE, table_of

from ..door import answers
from ..log.reader import DAMAGE, Payloads, packs_of

ANSWER_BYTES = 8 << 20
"""Of one call's answers with their payloads, unless the first one alone is longer: the client asks the rest again."""
QUESTION_BYTES_MAX = 64 << 20
"""Of one answer with its payloads: clients ask for 8 MiB, or for one payload."""
PLACES_MAX = 16_384
"""Payloads of one call: they are looked for in one turn."""
TURN_S = 0.05
"""So long the questions of one call are answered in one turn, and at least one is."""
SMALL_BYTES = 1024
"""What a payload counts for at least."""
ROUND_BYTES = 16 << 20
"""Read at once, unless one unit is longer: a small payload is cut out of a pack that may be much longer."""

Place = tuple[int, int]
"""The index and ordinal of a payload."""

ABOUT_BYTES = 1 << 20
"""Room that is taken for an answer, whose size is known only when it is there."""
ROOM_BYTES = 8 << 20
"""Room that is taken for an answer at most: a larger one is answered alone."""
TRIES = 3


class Fetched(NamedTuple):
    """The answers to the first questions; `places` names the payloads, whose bytes are `parts`, in order."""

    answers: list[bytes]
    places: list[tuple[int, int, int]]
    parts: list[Buffer]


class _Answered(NamedTuple):
    """The answers to the first questions, and the payloads that each names."""

    answers: list[bytes]
    named: list[Sequence[Place]]


class _Body(NamedTuple):
    """Where one payload is: the unit to read, and its number in the pack if it has no unit of its own."""

    place: Place
    located: Located
    unit: Unit
    number: int

    @property
    def key(self) -> tuple[int, int]:
        """The entry and the number of the unit within it."""
        return self.located.index, self.unit.number

    @property
    def size(self) -> int:
        """Bytes of the payload; about, where it has no unit of its own."""
        unit = self.unit
        return min(LARGE, max(SMALL_BYTES, unit.length // unit.records)) if unit.records else unit.length


class KvReads:
    """Asks members of this node. `stretch` has entries whose payloads are lost here stored anew; `now` gives a leader's
    log time, which its machine may answer by."""

    __slots__ = ("_now", "_payloads", "_stretch")

    def __init__(
        self,
        payloads: Payloads,
        stretch: Callable[[Member, int, int], Awaitable[object]],
        now: Callable[[Member], int],
    ) -> None:
        self._payloads = payloads
        self._stretch = stretch
        self._now = now

    async def fetch(self, member: Member, requests: Sequence[bytes]) -> Fetched:
        """Ask `requests` of a member, in order; stops when `ANSWER_BYTES` are together. Raises `Gone`, `BadRequest`,
        `GroupStopped`, a `LogyardError` of code ``too_large``."""
        tries = TRIES
        while True:
            applied = member.raft.applied
            try:
                return await self._fetch(member, requests)
            except Gone:
                # It may be what was named, and released before it was read.
                tries -= 1
                if not tries or member.raft.applied == applied:
                    raise

    async def _fetch(self, member: Member, requests: Sequence[bytes]) -> Fetched:
        found = self._ask(member, requests)
        if not any(found.named):
            return Fetched(found.answers, [], [])
        told: list[bytes] = []
        bodies: list[_Body] = []
        taken, needed = 0, ABOUT_BYTES
        while taken < needed:
            applied = member.raft.applied
            taken = await _take(needed)
            if member.raft.applied != applied:
                # What was named may have been released while this waited for room.
                found = self._ask(member, requests)
            located = await self._located(member, {place for named in found.named for place in named})
            told, bodies = _fitting(found, located)
            needed = _room(bodies)
        read = await self._load(member, bodies)
        return Fetched(told, [(*place, len(body)) for place, body in read.items()], list(read.values()))

    def _ask(self, member: Member, requests: Sequence[bytes]) -> _Answered:
        member.check_running()
        ask = getattr(member.machine, "fetch", None)
        if ask is None:
            raise BadRequest(f"a {member.spec.machine} answers no such questions")
        now = self._now(member) if member.leading else member.log_time
        found = _Answered([], [])
        size = named = 0
        began = trio.current_time()
        for request in requests:
            one = ask(request, now)
            named += len(one.payloads)
            if named > PLACES_MAX:
                if found.answers:
                    break
                raise _too_large(f"{named} payloads, more than {PLACES_MAX}")
            found.answers.append(one.answer)
            found.named.append(one.payloads)
            size += len(one.answer) + one.size
            if size >= ANSWER_BYTES or trio.current_time() - began > TURN_S:
                break
        return found

    async def read(self, member: Member, places: Iterable[Place]) -> Mapping[Place, Buffer]:
        """Return the bytes of payloads, by (index, ordinal): of as many of the first ones, as they lie, as an answer
        holds. What is damaged or lost here comes from a peer. Raises `Gone` for one that is released, `Corrupt` where
        nobody has it."""
        wanted = sorted(places)[:PLACES_MAX]
        bodies: list[_Body] = []
        taken, needed = 0, ABOUT_BYTES
        while taken < needed:
            taken = await _take(needed)
            bodies = _first(await self._located(member, wanted))
            needed = _room(bodies)
        return await self._load(member, bodies)

    async def _located(self, member: Member, places: Iterable[Place]) -> list[_Body]:
        """Return where payloads are, in order: until something is waited for."""
        wanted = sorted(places)
        try:
            return list(self._locate(member, wanted))
        except LogyardError as error:
            if error.code not in DAMAGE or not member.resolves:
                raise
            await self._mend(member, wanted)
            # From here to the reader's pins nothing waits.
            return list(self._locate(member, wanted))

    async def _load(self, member: Member, bodies: list[_Body]) -> dict[Place, Buffer]:
        """Return the bytes of payloads that were located in this turn."""
        found: dict[Place, Buffer] = {}
        for some in _rounds(bodies):
            if found:
                # They may lie elsewhere by now.
                some = await self._located(member, [body.place for body in some])
            units = {body.key: Wanted(body.located, body.unit, 0, body.unit.length) for body in some}
            data = dict(zip(units, await self._payloads.read(member, list(units.values())), strict=True))
            found |= {body.place: _cut(data[body.key], body.unit, body.number) for body in some}
        return found

    async def _mend(self, member: Member, places: Iterable[Place]) -> None:
        """Have the entries that can't be found here stored anew."""
        for index in dict.fromkeys(index for index, _ in places):
            try:
                for _ in self._locate(member, [place for place in places if place[0] == index]):
                    pass
            except LogyardError as error:
                if error.code not in DAMAGE:
                    raise
                await self._stretch(member, index, index)

    def _locate(self, member: Member, places: Iterable[Place]) -> Iterator[_Body]:
        """Yield where payloads are, which are given in order."""
        located: Located | None = None
        packs: list[tuple[Unit, dict[int, Unit]]] = []
        at = 0
        for index, ordinal in places:
            if not 0 < index <= member.raft.applied or member.liveness.is_dead_range(
                (index, ordinal), (index, ordinal + 1)
            ):
                raise Gone(f"group {member.spec.name!r}: the payload ({index}, {ordinal}) is released")
            if located is None or located.index != index:
                located = next(iter(self._payloads.payload_entries(member, index, index)), None)
                units = packs_of(located.data) if located is not None and located.index == index else iter(())
                packs, at = [(pack, {unit.first_ordinal: unit for unit in large}) for pack, large in units], 0
            while at < len(packs) and packs[at][0].first_ordinal + packs[at][0].records <= ordinal:
                at += 1
            if at == len(packs) or ordinal < packs[at][0].first_ordinal:
                raise Corrupt(f"group {member.spec.name}", index, f"the payload ({index}, {ordinal})", "none")
            assert located is not None
            pack, large = packs[at]
            yield _Body((index, ordinal), located, large.get(ordinal, pack), ordinal - pack.first_ordinal)


async def _take(size: int) -> int:
    """Wait for room for an answer, without what was taken for it before; return how much that is."""
    answers.give_back()
    await answers.take(size)
    return size


def _room(bodies: Iterable[_Body]) -> int:
    return min(ROOM_BYTES, sum([body.size for body in bodies]))


def _fitting(found: _Answered, located: list[_Body]) -> tuple[list[bytes], list[_Body]]:
    """Return as many of the answers as go together, at least one, with their payloads. Raises `LogyardError`."""
    sizes = {body.place: body.size for body in located}
    kept: set[Place] = set()
    size = 0
    told: list[bytes] = []
    for answer, named in zip(found.answers, found.named, strict=True):
        own = len(answer) + sum([sizes[place] for place in {*named} - kept])
        if named and own > QUESTION_BYTES_MAX:
            if told:
                break
            raise _too_large(f"{own} bytes, more than {QUESTION_BYTES_MAX}")
        told.append(answer)
        kept.update(named)
        size += own
        if size >= ANSWER_BYTES:
            break
    return told, [body for body in located if body.place in kept]


def _too_large(what: str) -> LogyardError:
    return LogyardError(f"the answer has {what}: ask for less at once", code="too_large")


def _first(bodies: list[_Body]) -> list[_Body]:
    """Return as many of the first payloads as an answer holds, at least one."""
    size = 0
    for number, body in enumerate(bodies):
        size += body.size
        if size > ANSWER_BYTES and number:
            return bodies[:number]
    return bodies


def _rounds(bodies: Iterable[_Body]) -> Iterator[list[_Body]]:
    """Yield the payloads that are read at once: of units of `ROUND_BYTES` together, or of a longer one."""
    some: list[_Body] = []
    units: set[tuple[int, int]] = set()
    size = 0
    for body in bodies:
        if body.key not in units:
            if some and size + body.unit.length > ROUND_BYTES:
                yield some
                some, units, size = [], set(), 0
            units.add(body.key)
            size += body.unit.length
        some.append(body)
    if some:
        yield some


def _cut(data: Buffer, unit: Unit, number: int) -> Buffer:
    """Return one record's body of what was read: small ones are copied, which keep no pack."""
    if not unit.records:
        return data
    table = table_of(data, unit.records)
    sizes = table[1::2]
    at = 8 * unit.records + sum(table[::2]) + sum(size for size in sizes[:number] if size < LARGE)
    size = sizes[number]
    return bytes(memoryview(data)[at : at + size]) if size != ABSENT else b""


def header_of(answers: Fetched, node: int, term: int) -> dict[str, Any]:
    """Return what goes before the bytes. `term`: the one in which it is answered."""
    return {"node": node, "term": term, "answers": answers.answers, "places": answers.places}
