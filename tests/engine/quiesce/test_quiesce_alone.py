"""Going to sleep without a system: whom a leader offers it, what it makes of the answers, and what a follower says."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, cast

import pytest
import trio
import trio.testing

from logyard.engine.quiesce import quiesce
from logyard.engine.quiesce.quiesce import ANSWER_SECONDS, BATCH, PATIENCE, Quiesce
from logyard.engine.raft.core import FOLLOWER
from logyard.engine.replica.member import HALTED, Member
from logyard.engine.transport.blobs import AWAKE, SLEEP, SLEEPING
from logyard.protocol.errors import NoSpace

from .doubles import LAST, OWN, TERM, UID, Yard, member_of, row

AFTER_S = 10.0


class Retiring:
    """Lets members go that `awake` has not: what it stored, and whom it gave up."""

    def __init__(self, members: dict[int, Member]) -> None:
        self.members = members
        self.awake: set[Member] = set()
        self.gone: list[tuple[int, int, set[int], set[int]]] = []
        self.fault: Exception | None = None
        self.then: Any = lambda: None

    def may_sleep(self, member: Member) -> bool:
        return member not in self.awake

    async def prepare(self, members: Sequence[Member], leader: int) -> dict[Member, Any]:
        fault, self.fault = self.fault, None
        if fault is not None:
            raise fault
        self.then()
        return {member: (b"row", b"") for member in members if member not in self.awake}

    def give_up(
        self, member: Member, put: Any, leader: int, asleep: Iterable[int] = (), absent: Iterable[int] = ()
    ) -> bool:
        if member in self.awake:
            return False
        del self.members[member.uid]
        self.gone.append((member.uid, leader, set(asleep), set(absent)))
        return True

    def tidy(self) -> None:
        pass


class Bench(Yard):
    def __init__(self, live: tuple[int, ...] = (1, 2, 3)) -> None:
        super().__init__(live)
        self.active: set[Member] = set()
        self.hibernation = Retiring(self.members)
        self.asked: list[tuple[int, int, list[list[int]]]] = []
        self.spawned: list[Any] = []
        self.answers: dict[int, Any] = {}
        self.quiesce = Quiesce(
            OWN, AFTER_S, self.members, self.live, self.table, cast(Any, self.hibernation), self.unquiesce,
            quiesce.Host(self.active.__contains__, self.say, lambda *task: self.spawned.append(task)),
        )  # fmt: skip

    def say(self, node: int, kind: int, request: int, header: Any) -> bool:
        """Followers answer at once, with what `answers` has for them; nothing: they say nothing."""
        self.send(node, kind, request, header)
        if kind == SLEEP and node in self.live:
            self.asked.append((node, request, header["groups"]))
            if node in self.answers:
                answer = self.answers[node]
                self.spawned.append((self.quiesce.on_blob, node, SLEEPING, request, {"groups": answer}))
        return node in self.live

    def member(self, uid: int = UID, lead: bool = True, leader: int = 1) -> Member:
        member = self.members[uid] = member_of(self.live, uid, f"g{uid}")
        self.names[f"g{uid}"] = uid
        if lead:
            member.raft.resume_leader((1, 3))
        else:
            member.raft.resume_follower(leader)
        return member

    async def run(self, seconds: float) -> None:
        """Have it look after who rests; answers come with the next turn."""
        with trio.move_on_after(seconds):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.quiesce.run)
                while True:
                    await trio.testing.wait_all_tasks_blocked()
                    for task in self.take():
                        task[0](*task[1:])
                    await trio.sleep(0.5)

    def take(self) -> list[Any]:
        spawned, self.spawned = self.spawned, []
        return spawned

    async def hear(self, node: int, table: list[list[int]]) -> list[int]:
        """Have a leader ask whether groups may sleep here; which do."""
        self.quiesce.on_blob(node, SLEEP, 5, {"groups": table})
        for task in self.take():
            await task[0](*task[1:])
        (to, kind, header) = self.sent[-1]
        assert (to, kind) == (node, SLEEPING)
        return cast("list[int]", header["groups"])


@pytest.fixture
def clock(autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch) -> trio.testing.MockClock:
    """Time passes for `quiesce` as it does for trio."""
    monkeypatch.setattr(time, "monotonic", trio.current_time)
    return autojump_clock


async def test_a_leader_at_rest_sleeps_when_its_followers_do(clock: object) -> None:
    bench = Bench()
    bench.answers = {1: [UID], 3: [UID]}
    bench.quiesce.rest(bench.member())
    await bench.run(AFTER_S - 1)
    assert not bench.asked, "not before its time"
    bench.quiesce.rest(bench.members[UID])
    await bench.run(AFTER_S + 2)
    table = [[UID, TERM, LAST]]
    assert [(node, groups) for node, _, groups in bench.asked] == [(1, table), (3, table)]
    assert bench.hibernation.gone == [(UID, OWN, {1, 3}, set())] and not bench.members


async def test_who_rested_again_while_being_put_to_sleep_is_not_asked_again(
    clock: object,
) -> None:
    bench = Bench()
    bench.answers = {1: [UID], 3: [UID]}
    member = bench.member()
    bench.hibernation.then = lambda: bench.quiesce.rest(member)
    bench.quiesce.rest(member)
    await bench.run(AFTER_S + 2)
    assert not bench.members
    asked = list(bench.asked)
    await bench.run(AFTER_S + 2)
    assert bench.asked == asked, "whoever sleeps is asked again"


async def test_a_follower_that_declines_keeps_all_awake_and_who_slept_is_told(clock: object) -> None:
    bench = Bench()
    bench.answers = {1: [UID], 3: []}
    bench.quiesce.rest(bench.member())
    await bench.run(AFTER_S + 2)
    assert not bench.hibernation.gone and bench.quiesce._patient
    bench.unquiesce.tick()
    assert bench.sent[-1] == (1, AWAKE, {"groups": [UID]})


async def test_who_says_nothing_is_asked_again_when_some_time_has_passed(clock: object) -> None:
    bench = Bench()
    bench.answers = {1: [UID]}
    bench.quiesce.rest(bench.member())
    await bench.run(AFTER_S + ANSWER_SECONDS + 2)
    assert len(bench.asked) == 2 and not bench.hibernation.gone
    bench.answers[3] = [UID]
    await bench.run(PATIENCE * AFTER_S)
    assert bench.hibernation.gone == [(UID, OWN, {1, 3}, set())]


async def test_an_absent_member_makes_it_wait_longer_and_is_remembered(clock: object) -> None:
    bench = Bench(live=(2, 3))
    bench.answers = {3: [UID]}
    bench.quiesce.rest(bench.member())
    await bench.run(AFTER_S * (PATIENCE - 1))
    assert not bench.asked
    await bench.run(AFTER_S * PATIENCE)
    assert bench.hibernation.gone == [(UID, OWN, {3}, {1})]


async def test_who_comes_back_while_it_is_asked_is_not_taken_for_absent(clock: object) -> None:
    bench = Bench(live=(2, 3))
    bench.answers = {3: [UID]}
    bench.quiesce.rest(bench.member())

    def back(node: int, kind: int, request: int, header: Any) -> bool:
        bench.live.add(1)
        return Bench.say(bench, node, kind, request, header)

    bench.quiesce._host = bench.quiesce._host._replace(send_blob=back)
    await bench.run(AFTER_S * (PATIENCE + 2))
    assert bench.asked and not bench.hibernation.gone


async def test_who_dies_while_it_is_asked_did_not_agree(clock: object) -> None:
    bench = Bench()
    bench.answers = {1: [UID]}
    bench.quiesce.rest(bench.member())

    def dies(node: int, kind: int, request: int, header: Any) -> bool:
        sent = Bench.say(bench, node, kind, request, header)
        bench.live.discard(3)
        return sent or kind == SLEEP

    bench.quiesce._host = bench.quiesce._host._replace(send_blob=dies)
    await bench.run(AFTER_S + ANSWER_SECONDS + 2)
    assert bench.asked and not bench.hibernation.gone


async def test_of_a_group_that_was_deleted_meanwhile_nobody_is_told_that_it_is_awake(clock: object) -> None:
    bench = Bench()
    bench.answers = {1: [UID], 3: []}
    bench.quiesce.rest(bench.member())
    bench.hibernation.then = bench.members.clear
    await bench.run(AFTER_S + 2)
    assert bench.asked and not bench.unquiesce.is_busy


async def test_who_leads_no_more_tells_nobody_that_it_is_awake(clock: object) -> None:
    """Whoever slept would trust in the one that woke it."""
    bench = Bench()
    bench.answers = {1: [UID], 3: []}
    member = bench.member()
    bench.quiesce.rest(member)

    def stops(node: int, kind: int, request: int, header: Any) -> bool:
        member.raft.stop()
        return Bench.say(bench, node, kind, request, header)

    bench.quiesce._host = bench.quiesce._host._replace(send_blob=stops)
    await bench.run(AFTER_S + 2)
    assert bench.asked and UID in bench.members and not bench.unquiesce.is_busy


async def test_a_batch_that_could_not_be_stored_is_no_end_of_it(clock: object) -> None:
    bench = Bench()
    bench.answers = {1: [UID, UID + 1], 3: [UID, UID + 1]}
    bench.hibernation.fault = NoSpace("full")
    bench.quiesce.rest(bench.member())
    await bench.run(AFTER_S + 2)
    bench.quiesce.rest(bench.member(UID + 1))
    await bench.run(AFTER_S + 2)
    assert [uid for uid, *_ in bench.hibernation.gone] == [UID + 1]
    await bench.run((PATIENCE - 1) * AFTER_S)
    assert [uid for uid, *_ in bench.hibernation.gone] == [UID + 1, UID], "it is tried again"


async def test_of_a_batch_that_could_not_be_stored_who_is_gone_is_forgotten(clock: object) -> None:
    bench = Bench()
    for uid in (UID, UID + 1):
        bench.quiesce.rest(bench.member(uid))
    gone, another = bench.members[UID], member_of(bench.live)

    async def deleted(members: Sequence[Member], leader: int) -> dict[Member, Any]:
        bench.members[UID] = another
        raise NoSpace("full")

    bench.hibernation.prepare = deleted  # type: ignore[method-assign]
    await bench.run(AFTER_S + 2)
    assert list(bench.quiesce._patient) == [bench.members[UID + 1]] and gone is not another


async def test_only_a_leader_at_rest_is_put_to_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    member = bench.member()

    def due() -> bool:
        bench.quiesce._patient.clear()
        bench.quiesce._resting = {member: 0.0}
        return bench.quiesce._due_batch() == [member]

    assert due()
    bench.active.add(member)
    assert not due() and not bench.quiesce._patient, "it comes back when it rests again"
    bench.active.clear()
    bench.hibernation.awake.add(member)
    assert not due() and bench.quiesce._patient
    bench.hibernation.awake.clear()
    member.state = HALTED
    assert not due()
    member = bench.member(UID + 1, lead=False)
    assert not due() and member.raft.role == FOLLOWER
    bench.quiesce.rest(member)
    assert not bench.quiesce._resting, "whether its group may sleep is not a follower's to say"


def test_no_more_than_a_batch_is_put_to_sleep_at_once() -> None:
    bench = Bench()
    bench.quiesce._resting = {bench.member(uid): 0.0 for uid in range(1, BATCH + 10)}
    assert len(bench.quiesce._due_batch()) == BATCH and len(bench.quiesce._resting) == 9


def test_where_it_is_switched_off_nobody_rests() -> None:
    bench = Bench()
    bench.quiesce._after_s = 0.0
    bench.quiesce.rest(bench.member())
    assert not bench.quiesce._resting


async def test_a_follower_sleeps_under_the_leader_that_asks_with_the_very_log_that_it_has() -> None:
    bench = Bench()
    for uid in (UID, UID + 1, UID + 2):
        bench.member(uid, lead=False)
    bench.member(UID + 3, lead=False, leader=3)
    table = [[UID, TERM, LAST], [UID + 1, TERM + 1, LAST], [UID + 2, TERM, LAST + 1], [UID + 3, TERM, LAST], [99, 1, 1]]
    assert await bench.hear(1, table) == [UID]
    assert bench.hibernation.gone == [(UID, 1, set(), set())]


async def test_a_follower_that_sleeps_already_says_so_and_wakes_for_any_other_leader() -> None:
    bench = Bench()
    bench.table.add(UID, row(1))
    bench.table.add(UID + 1, row(3, name="b"))
    assert await bench.hear(1, [[UID, TERM, LAST], [UID + 1, TERM, LAST]]) == [UID]
    assert list(bench.members) == [UID + 1] and UID in bench.table


async def test_a_follower_that_can_store_nothing_sleeps_in_nothing() -> None:
    bench = Bench()
    bench.member(lead=False)
    bench.hibernation.fault = NoSpace("full")
    assert await bench.hear(1, [[UID, TERM, LAST]]) == [] and bench.members


async def test_a_follower_whose_leader_went_while_it_stored_that_it_sleeps_stays_awake() -> None:
    bench = Bench()
    member = bench.member(lead=False)
    bench.hibernation.then = lambda: setattr(member.raft, "leader", 0)
    assert await bench.hear(1, [[UID, TERM, LAST]]) == [] and bench.members


def test_a_word_that_nobody_waits_for_changes_nothing() -> None:
    bench = Bench()
    bench.quiesce.on_blob(1, SLEEPING, 77, {"groups": [UID]})
    bench.table.add(UID, row(1))
    bench.quiesce.on_blob(1, AWAKE, 0, {"groups": [UID]})
    assert bench.unquiesce.is_busy and not bench.spawned
