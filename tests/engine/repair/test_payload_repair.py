"""Payload repair, alone: who is asked for what is missing, and what is stored of what came."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from logyard.engine.entry import build_commands, units_of
from logyard.engine.ports import SourceEntry
from logyard.engine.raft.membership import Configuration
from logyard.engine.ranges import Range
from logyard.engine.repair.payload_repair import PayloadRepair, Refill
from logyard.engine.replica.reader import Located, Wanted
from logyard.engine.transfer.pull import Piece, live_digest
from logyard.payloads.liveness import Liveness
from logyard.protocol.errors import Corrupt, Gone, LogyardError
from logyard.protocol.frame import encode_frame

UID = 7


def entry(index: int) -> SourceEntry:
    frame = memoryview(b"".join(encode_frame([(b"", b"payload of %d" % index)], command=b"")))
    made = build_commands(UID, index, 1, 0, [frame])
    payload = b"".join(made.bodies or ())
    return SourceEntry(UID, index, 1, made.data, {0}, lambda at, size: payload[at : at + size])


class Rig:
    """Repair on node 3. `pieces`: by node, what it answers, or why it does not."""

    def __init__(self) -> None:
        self.liveness = Liveness()
        log = SimpleNamespace(term=lambda index: 1)
        raft = SimpleNamespace(
            configuration=Configuration((1, 2, 3)), log=log, commit=9, applied=9, stopped=False, mend=None
        )
        self.member = cast(
            Any,
            SimpleNamespace(
                uid=UID, spec=SimpleNamespace(name="log"), raft=raft, liveness=self.liveness, resolves=True,
                state="running",
            ),
        )  # fmt: skip
        self.asked: list[tuple[int, list[Range]]] = []
        self.stored: list[list[int]] = []
        self.lost: list[tuple[int, int, int]] = []
        self.liar = 0
        self.silent: set[int] = set()
        self.repair = PayloadRepair(cast(Any, self), cast(Any, self), cast(Any, self), self.write_back)

    # The pulls

    def others(self, configuration: Configuration) -> list[int]:
        return [1, 2]

    async def ask(self, node: int, uid: int, index: int, ranges: Sequence[Range]) -> Piece:
        self.asked.append((node, list(ranges)))
        await trio.lowlevel.checkpoint()
        if node in self.silent:
            raise LogyardError(f"node {node} does not answer")
        first, last = ranges[0]
        rows = [entry(at) for at in range(first, last + 1) if self.liveness.is_live(at, 0)]
        if node == self.liar:
            rows = [row._replace(live=set()) for row in rows]
        return Piece(rows, last, 0, live_digest(self.liveness, ranges), {}, 1)

    # The reader and the stores

    def payload_entries(self, member: Any, first: int, last: int) -> Iterator[Located]:
        yield Located(first, 1, entry(first).data, None, None)

    async def read(self, member: Any, wanted: Sequence[Wanted], mend: bool = True) -> list[bytes]:
        raise Gone("still missing")

    async def write_back(self, member: Any, found: Sequence[SourceEntry]) -> None:
        self.stored.append([one.index for one in found])

    def found(self, uid: int, first: int, last: int) -> None:
        self.lost = [one for one in self.lost if one != (uid, first, last)]

    def lost_ranges(self) -> list[tuple[int, int, int]]:
        return list(self.lost)

    def lose(self, uid: int, first: int, last: int) -> None:
        self.lost.append((uid, first, last))

    def wanted(self, index: int) -> Wanted:
        data = entry(index).data
        (unit,) = units_of(data)
        return Wanted(Located(index, 1, data, None, None), unit, 0, unit.length)

    async def unit(self, index: int) -> bytes:
        return bytes(await self.repair.unit(self.member, self.wanted(index), Corrupt("here", 0, "it", "rot")))


async def test_what_is_damaged_comes_from_a_peer_and_is_written_back() -> None:
    rig = Rig()
    rig.silent = {1}
    assert b"payload of 4" in await rig.unit(4)
    assert rig.asked == [(1, [(4, 4)]), (2, [(4, 4)])] and rig.stored == [[4]] and rig.repair.fetched == 1


async def test_who_brings_nothing_of_it_is_passed_over() -> None:
    rig = Rig()
    rig.liar = 1
    assert b"payload of 4" in await rig.unit(4)
    assert [node for node, _ in rig.asked] == [1, 2] and rig.stored == [[4]]


async def test_without_a_peer_that_has_it_the_reader_gets_its_own_error() -> None:
    rig = Rig()
    rig.silent = {1, 2}
    with pytest.raises(Corrupt, match="rot"):
        await rig.unit(4)
    assert rig.repair.failed == 1 and not rig.stored


async def test_nobody_is_asked_for_what_was_released() -> None:
    rig = Rig()
    rig.liveness.release((0, 0), (5, 0))
    with pytest.raises(Corrupt, match="rot"):
        await rig.unit(4)
    rig.member.resolves = False
    with pytest.raises(Corrupt, match="rot"):
        await rig.unit(6)
    assert not rig.asked


@pytest.mark.parametrize("below_floor", [False, True])
async def test_what_was_lost_comes_back_without_a_reader(below_floor: bool) -> None:
    rig = Rig()
    rig.member.resolves = not below_floor
    events: list[str] = []

    async def commit() -> None:
        events.append("stored")

    async with trio.open_nursery() as nursery:

        def spawn(task: Callable[..., Any], *arguments: Any) -> None:
            nursery.start_soon(task, *arguments)

        store = SimpleNamespace(
            lost=lambda uid, first, last: (uid, first, last) in rig.lost, lost_ranges=rig.lost_ranges, lose=rig.lose,
            found=rig.found,
        )  # fmt: skip
        refill = Refill(
            cast(Any, store), rig.repair, {UID: rig.member}.get, set(), commit, lambda: events.append("owed"), spawn
        )
        refill.lose(UID, 2, 4)
        refill.lose(UID + 1, 1, 1)
        assert events == ["owed", "owed"] and refill.status() == {"lost": 2, "refilled": 0}
        refill.look()
    # A group that is not here any more has lost nothing.
    assert refill.status() == ({"lost": 1, "refilled": 0} if below_floor else {"lost": 0, "refilled": 1})
    assert rig.stored == ([] if below_floor else [[2, 3, 4]]) and events[2:] == ["stored"]
