"""Questions to machines whose answers name payloads: the answer, and the bytes from wherever they lie.

Invariant: the machine answers and the payloads are located and pinned in one turn, so what an answer names can be read,
whatever is released meanwhile. Any machine with a `fetch(request, now)` is asked. Used by `verbs` and `watch`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

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

Place = tuple[int, int]
"""The index and ordinal of a payload."""

ABOUT_BYTES = 1 << 20
"""Room that is taken for an answer, whose size is known only when it is there."""


class Fetched(NamedTuple):
    """The answers to the first questions; `places` names the payloads, whose bytes are `parts`, in order."""

    answers: list[bytes]
    places: list[tuple[int, int, int]]
    parts: list[Buffer]


class _Answered(NamedTuple):
    """The answers to the first questions, and the payloads that they name."""

    answers: list[bytes]
    named: dict[Place, None]


class _Body(NamedTuple):
    """Where one payload is: the unit to read, and its number in the pack if it has no unit of its own."""

    place: Place
    located: Located
    unit: Unit
    number: int


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
        `GroupStopped`."""
        found = self._ask(member, requests)
        if not found.named:
            return Fetched(found.answers, [], [])
        applied = member.raft.applied
        await answers.take(ABOUT_BYTES)
        if member.raft.applied != applied:
            # What was named may have been released while this waited for room.
            found = self._ask(member, requests)
        bodies = await self._read(member, found.named)
        return Fetched(found.answers, [(*place, len(body)) for place, body in bodies.items()], list(bodies.values()))

    def _ask(self, member: Member, requests: Sequence[bytes]) -> _Answered:
        member.check_running()
        ask = getattr(member.machine, "fetch", None)
        if ask is None:
            raise BadRequest(f"a {member.spec.machine} answers no such questions")
        now = self._now(member) if member.leading else member.log_time
        found = _Answered([], {})
        size = 0
        for request in requests:
            one = ask(request, now)
            found.answers.append(one.answer)
            found.named.update(dict.fromkeys(one.payloads))
            size += len(one.answer) + one.size
            if size >= ANSWER_BYTES:
                break
        return found

    async def read(self, member: Member, places: Iterable[Place]) -> Mapping[Place, Buffer]:
        """Return the bytes of payloads, by (index, ordinal). What is damaged or lost here comes from a peer. Raises
        `Gone` for one that is released, `Corrupt` where nobody has it."""
        await answers.take(ABOUT_BYTES)
        return await self._read(member, places)

    async def _read(self, member: Member, places: Iterable[Place]) -> Mapping[Place, Buffer]:
        wanted = sorted(places)
        try:
            found = list(self._locate(member, wanted))
        except LogyardError as error:
            if error.code not in DAMAGE or not member.resolves:
                raise
            await self._mend(member, wanted)
            # From here to the reader's pins nothing waits.
            found = list(self._locate(member, wanted))
        units: dict[tuple[int, int], Wanted] = {}
        for body in found:
            units.setdefault(
                (body.located.index, body.unit.number), Wanted(body.located, body.unit, 0, body.unit.length)
            )
        data = dict(zip(units, await self._payloads.read(member, list(units.values())), strict=True))
        return {body.place: _cut(data[body.located.index, body.unit.number], body.unit, body.number) for body in found}

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

    def _locate(self, member: Member, places: Iterable[Place]) -> Iterable[_Body]:
        located: Located | None = None
        packs: list[tuple[Unit, list[Unit]]] = []
        for index, ordinal in places:
            if not 0 < index <= member.raft.applied or member.liveness.is_dead_range(
                (index, ordinal), (index, ordinal + 1)
            ):
                raise Gone(f"group {member.spec.name!r}: the payload ({index}, {ordinal}) is released")
            if located is None or located.index != index:
                located = next(iter(self._payloads.payload_entries(member, index, index)), None)
                packs = list(packs_of(located.data)) if located is not None and located.index == index else []
            for pack, large in packs:
                if pack.first_ordinal <= ordinal < pack.first_ordinal + pack.records:
                    assert located is not None
                    own = next((unit for unit in large if unit.first_ordinal == ordinal), None)
                    yield _Body((index, ordinal), located, own or pack, ordinal - pack.first_ordinal)
                    break
            else:
                raise Corrupt(f"group {member.spec.name}", index, f"the payload ({index}, {ordinal})", "none")


def _cut(data: Buffer, unit: Unit, number: int) -> Buffer:
    """Return one record's body of what was read."""
    if not unit.records:
        return data
    table = table_of(data, unit.records)
    sizes = table[1::2]
    at = 8 * unit.records + sum(table[::2]) + sum(size for size in sizes[:number] if size < LARGE)
    size = sizes[number]
    return memoryview(data)[at : at + size] if size != ABSENT else b""


def header_of(answers: Fetched, node: int, term: int) -> dict[str, Any]:
    """Return what goes before the bytes. `term`: the one in which it is answered."""
    return {"node": node, "term": term, "answers": answers.answers, "places": answers.places}
