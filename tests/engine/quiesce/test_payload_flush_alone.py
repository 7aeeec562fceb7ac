"""What a group that goes to sleep has in WAL files, alone: what is moved, what is too much, what is held meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from logyard.engine.entry import Entry
from logyard.engine.ports import SourceEntry
from logyard.engine.quiesce.payload_flush import PayloadFlush
from logyard.engine.replica.reader import Located
from logyard.protocol.errors import NoSpace

from ..log.model import command

UID = 7
BODY = 1000


class Rig:
    """Members with entries in WAL file 3, of which those in `dead` are released; `homes` are their homes in
    generations."""

    def __init__(self, bytes_max: int = 100_000) -> None:
        self.events: list[Any] = []
        self.dead: set[int] = set()
        self.homes: list[Any] = []
        self.files: dict[int, Any] = {}
        self.entries: dict[int, list[Entry]] = {}
        self.moved: dict[int, list[SourceEntry]] = {}
        self.fails = False
        self.flush = PayloadFlush(
            cast(Any, SimpleNamespace(homes=lambda uid: self.homes, home=self.home)), self.files, cast(Any, self),
            cast(Any, self), lambda file, offset, length: b"%d:%d:%d" % (file, offset, length), self.move, bytes_max,
        )  # fmt: skip

    def member(self, *entries: Entry, uid: int = UID, flushed: int = 0) -> Any:
        for at, entry in enumerate(entries):
            if not entry.file:
                entry.file, entry.offset = 3, 10_000 * at
        self.entries[uid] = list(entries)
        liveness = SimpleNamespace(
            released_before=SimpleNamespace(index=0),
            live_units=lambda index, units: set() if index in self.dead else {number for number, _, _ in units},
        )
        raft = SimpleNamespace(commit=len(entries), log=SimpleNamespace(last_index=len(entries), entries=list(entries)))
        return SimpleNamespaceMember(
            uid=uid, liveness=liveness, raft=raft, flushed=flushed, is_dead=lambda one: one.index in self.dead
        )

    def home(self, uid: int, index: int) -> Any:
        return next((one for one in self.homes if one.first <= index <= one.last), None)

    def payload_entries(self, member: Any, first: int, last: int) -> Iterator[Located]:
        for entry in self.entries[member.uid]:
            if first <= entry.index <= last and entry.body_bytes:
                yield cast(Any, SimpleNamespace(entry=entry, index=entry.index))

    def pin(self, home: tuple[str, int]) -> None:
        self.events.append(("pin", home))

    def unpin(self, home: tuple[str, int]) -> None:
        self.events.append(("unpin", home))

    async def move(
        self, members: Sequence[Any], ranges: Sequence[tuple[int, int, int]],
        read: Callable[[int, int, int], Iterable[SourceEntry]],
    ) -> None:  # fmt: skip
        self.events.append(("move", [*ranges]))
        assert [member.uid for member in members] == [uid for uid, _, _ in ranges]
        if self.fails:
            raise NoSpace("no room for a generation")
        for one in ranges:
            self.moved[one[0]] = list(read(*one))


class SimpleNamespaceMember(SimpleNamespace):
    __hash__ = object.__hash__  # type: ignore[assignment]


def entry(index: int, uid: int = UID, size: int = BODY, **more: Any) -> Entry:
    return command(uid, index, bodies=[b"x" * size], **more)


async def test_what_lives_of_several_groups_moves_in_one_step_and_is_held_meanwhile() -> None:
    rig = Rig()
    rig.dead = {2}
    one = rig.member(entry(1), entry(2), entry(3))
    two = rig.member(entry(1, 8), uid=8)
    await rig.flush.run([one, two])
    pin, unpin = ("pin", ("wal", 3)), ("unpin", ("wal", 3))
    assert rig.events == [pin, pin, ("move", [(UID, 1, 3), (8, 1, 1)]), unpin, unpin]
    assert [(source.index, source.live) for source in rig.moved[UID]] == [(1, {0}), (3, {0})]
    source = rig.moved[UID][1]
    assert source.read(5, 9) == b"3:20005:9" and source.data == rig.entries[UID][2].data


async def test_nothing_is_asked_of_the_store_where_nothing_lives() -> None:
    rig = Rig()
    rig.dead = {1}
    await rig.flush.run([rig.member(entry(1)), rig.member(entry(1, 8, tombstone=3), uid=8)])
    assert not rig.events


@pytest.mark.parametrize("why", ["too much", "among what was migrated", "not in a file yet", "not committed", "kept"])
async def test_such_a_group_stays_as_it_is_and_the_others_go(why: str) -> None:
    rig = Rig(2500)
    found = [entry(1), entry(2), entry(3)] if why == "too much" else [entry(1), entry(2)]
    if why == "among what was migrated":
        rig.homes = [SimpleNamespace(first=1, last=1)]
    one = rig.member(*found)
    if why == "not in a file yet":
        found[1].file = 0
    if why == "not committed":
        one.raft.commit = 1
    if why == "kept":
        # It may be gone: reading it would fail all the others, again and again.
        rig.files[3] = SimpleNamespace(shares={UID}, kept=True)
    other = rig.member(uid=8)
    await rig.flush.run([one, other])
    assert not rig.moved and not rig.events


async def test_who_fails_holds_nothing_any_more() -> None:
    rig = Rig()
    rig.fails = True
    with pytest.raises(NoSpace):
        await rig.flush.run([rig.member(entry(1))])
    assert rig.events[-1] == ("unpin", ("wal", 3)) and not rig.moved


def test_a_group_is_done_when_nothing_that_lives_is_in_wal_files_alone() -> None:
    rig = Rig()
    member = rig.member(entry(1), entry(2), entry(3, tombstone=9))
    assert not rig.flush.is_done(member)
    member.flushed = 1
    rig.dead = {2}
    assert rig.flush.is_done(member), "what is in a segment anybody can locate, and the rest is dead"
    rig.dead = set()
    rig.homes = [SimpleNamespace(first=2, last=2)]
    assert rig.flush.is_done(member)
    rig.files[3] = SimpleNamespace(shares={UID: 1})
    assert not rig.flush.is_done(member), "migration needs its liveness"
