"""A member is given up only when what is durable says all that it knows: each reason to stay, and each race."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from logyard.engine.log import checkpoint_rows as rows
from logyard.engine.log.meta_rows import StateRow
from logyard.engine.quiesce import quiesce
from logyard.engine.quiesce.quiesce import TIDY_MIN, Hibernation
from logyard.engine.raft.core import Raft
from logyard.engine.replica.member import ASLEEP, HALTED, Member
from logyard.protocol.pending import PendingReply

from .doubles import LAST, OWN, TERM, UID, Yard, member_of


class Bench(Yard):
    """A leader's members, each with a snapshot at its last entry; what is stored is kept in `stored`."""

    def __init__(self) -> None:
        super().__init__()
        self.did: list[str] = []
        self.stored: list[rows.Put] = []
        self.in_the_wal: set[Member] = set()
        self.heavy: set[Member] = set()
        self.wanted: set[Member] = set()
        self.held: set[Member] = set()
        self.forgotten: list[int] = []
        self.shrunk = 0
        storage = quiesce.Storage(
            lambda member: member not in self.in_the_wal, self.move_out, self.snapshot,
            lambda member: member not in self.wanted, self.leave_log, self.commit,
            lambda member: self.did.append("slept"), self.forgotten.append,
        )  # fmt: skip
        self.hibernation = Hibernation(
            self.members, self.transitions, storage, self.held.__contains__, lambda node: 60 + node,
            lambda member: self.did.append("left"), self.shrink,
        )  # fmt: skip

    def member(self, uid: int = UID) -> Member:
        member = self.members[uid] = member_of(self.live, uid, f"g{uid}")
        self.names[f"g{uid}"] = uid
        member.raft.resume_leader((1, 3))
        member.raft.ready()
        member.covered(LAST, TERM, 100)
        member.stored(LAST, ())
        return member

    async def move_out(self, members: Sequence[Member]) -> None:
        self.did.append("move out")
        self.in_the_wal.intersection_update(self.heavy)

    async def snapshot(self, members: Sequence[Member]) -> None:
        for member in members:
            self.did.append("snapshot")
            member.covered(LAST, TERM, 100)
            member.stored(LAST, ())

    def leave_log(self, member: Member) -> None:
        self.did.append("leave log")

    async def commit(self, build: Callable[[], Iterable[rows.Put]]) -> None:
        self.did.append("commit")
        self.stored += build()

    def shrink(self) -> None:
        self.shrunk += 1


async def test_what_is_stored_says_all_that_the_row_does() -> None:
    bench = Bench()
    member = bench.member()
    ((_, put),) = (await bench.hibernation.prepare([member], 1)).items()
    assert bench.stored == [put] and bench.did == ["commit", "leave log"] and put[1] is not None
    state = StateRow.unpack(put[0], put[1])
    assert (state.term, state.commit, state.extra["asleep"]) == (TERM, LAST, [1, 61, 0, 0, 0, 100])
    assert bench.hibernation.give_up(member, put, 1)
    assert bench.did[2:] == ["left", "slept"] and member.state == ASLEEP and not bench.members
    assert bench.table.row(UID).leader == 1 and bench.table.row(UID).name == f"g{UID}"
    assert not bench.hibernation.give_up(member, put, 1), "it is gone"


async def test_who_has_payloads_in_the_wal_moves_out_and_who_has_too_many_stays() -> None:
    bench = Bench()
    light, heavy = bench.member(1), bench.member(2)
    bench.in_the_wal = {light, heavy}
    bench.heavy = {heavy}
    light.covered(LAST - 1, TERM, 100)
    assert list(await bench.hibernation.prepare([light, heavy], OWN)) == [light]
    assert bench.did == ["move out", "snapshot", "commit", "leave log"]


async def test_who_has_entries_that_somebody_wants_stays() -> None:
    bench = Bench()
    member = bench.member()
    bench.wanted = {member}
    assert not await bench.hibernation.prepare([member], OWN) and bench.did == ["commit"]


BUSY: list[tuple[str, Callable[[Bench, Member], object]]] = [
    ("halted", lambda _, member: setattr(member, "state", HALTED)),
    ("has something to do", lambda _, member: setattr(member, "dirty", True)),
    ("waits for the disk", lambda _, member: setattr(member, "unpersisted", 1)),
    ("has waiters", lambda _, member: member.add_waiter((lambda: False, lambda: None))),
    ("is read", lambda _, member: member.add_read(1, PendingReply())),
    ("sends a snapshot", lambda _, member: member.begin_transfer(3)),
    ("sends slowly", lambda _, member: member.slow_messages(3)),
    ("has a queue", lambda _, member: setattr(member, "proposals", SimpleNamespace(is_idle=False))),
    ("has uploads", lambda _, member: setattr(member, "uploads", SimpleNamespace(open={1}))),
    ("has effects to perform", lambda _, member: setattr(member, "kept", kept(todo=[1]))),
    ("has appends to make", lambda _, member: setattr(member, "kept", kept(appends=[1]))),
    ("is held", lambda bench, member: bench.held.add(member)),
    ("may not resolve", lambda _, member: member.raise_floor(LAST + 1)),
    ("has nothing yet", lambda _, member: setattr(member.raft.log, "last_index", 0)),
    ("has a follower behind", lambda _, member: setattr(member.raft.progress[3], "match", LAST - 1)),
    ("has not the commit", lambda _, member: setattr(member.raft, "commit", LAST - 1)),
]  # fmt: skip


def kept(**has: Any) -> Any:
    return SimpleNamespace(**{"timers": {}, "todo": [], "appends": [], **has})


@pytest.mark.parametrize(("what", "make"), BUSY, ids=[what for what, _ in BUSY])
async def test_who_has_anything_to_do_stays_awake_before_and_after_the_commit(
    what: str, make: Callable[[Bench, Member], object]
) -> None:
    bench = Bench()
    member = bench.member()
    member.kept = kept()
    member.uploads = cast(Any, SimpleNamespace(open=set()))
    assert bench.hibernation.may_sleep(member)
    ready = await bench.hibernation.prepare([member], OWN)
    make(bench, member)
    assert not bench.hibernation.may_sleep(member)
    assert not bench.hibernation.give_up(member, ready[member], OWN) and bench.members == {UID: member}
    assert not await bench.hibernation.prepare([member], OWN) and len(bench.stored) == 1


async def test_a_member_of_which_more_is_known_than_was_stored_stays() -> None:
    bench = Bench()
    member = bench.member()
    ready = await bench.hibernation.prepare([member], OWN)
    changes: list[Callable[[], object]] = [lambda: member.raise_floor(3), lambda: member.covered(LAST, TERM, 101)]
    for change in changes:
        put = ready[member]
        change()
        assert bench.hibernation.may_sleep(member) and not bench.hibernation.give_up(member, put, OWN)
        ready = await bench.hibernation.prepare([member], OWN)
    assert bench.hibernation.give_up(member, ready[member], OWN, {1, 3})
    assert bench.table.row(UID).shape.asleep == (1, 3)


async def test_who_sleeps_gives_back_what_is_under_way_to_an_absent_member() -> None:
    bench = Bench()
    member = bench.member()
    bench.live.discard(3)
    raft = cast(Raft, member.raft)
    progress, window = raft.progress[3], raft.windows[3]
    # It was sent a probe with entries, and its node was gone before it answered.
    progress.probe(LAST)
    progress.paused = True
    progress.take_probe(500)
    ready = await bench.hibernation.prepare([member], OWN)
    assert bench.hibernation.give_up(member, ready[member], OWN, {1}, {3})
    assert window.bytes == 0, "or it stays closed to all groups of this process"


async def test_another_object_of_the_same_group_is_not_given_up() -> None:
    bench = Bench()
    member = bench.member()
    ready = await bench.hibernation.prepare([member], OWN)
    again = bench.member()
    assert not bench.hibernation.give_up(member, ready[member], OWN) and bench.members == {UID: again}


async def test_who_has_no_snapshot_at_its_end_is_not_stored_asleep() -> None:
    bench = Bench()
    member = bench.member()
    member.doubt_snapshot(LAST)
    assert not await bench.hibernation.prepare([member], OWN) and not bench.stored


def test_memory_is_given_back_when_most_of_it_is_of_groups_that_sleep() -> None:
    bench = Bench()
    for uid in range(1, TIDY_MIN // 4 + 11):
        bench.member(uid)
    bench.hibernation.tidy()
    assert not bench.forgotten
    bench.transitions.slept = TIDY_MIN
    bench.hibernation.tidy()
    assert bench.forgotten == [TIDY_MIN], "as many are awake"
    for _ in range(20):
        bench.members.popitem()
    bench.hibernation.tidy()
    bench.hibernation.tidy()
    assert bench.forgotten[1:] == [TIDY_MIN] and bench.shrunk == 1
