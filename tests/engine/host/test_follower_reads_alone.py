"""Reads with a bound on their age, alone: when somebody is asked, who shares the answer, and what an answer is good
for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.testing

from logyard.engine.host import follower_reads
from logyard.engine.host.follower_reads import PATIENCE_S, FollowerReads
from logyard.engine.raft.core import FOLLOWER, LEADER
from logyard.engine.replica.log_clock import Clocks
from logyard.engine.replica.member import Member
from logyard.engine.transport.blobs import READ_ASK, READ_INDEX
from logyard.protocol.errors import Busy, GroupStopped, NotLeader

from ..replica.doubles import UID, Core, Recorder, member_of

HOUR = 3600.0
Clock = trio.testing.MockClock


class Rig:
    """Node 1, which follows node 2 in one group. What the leader says is `index` or `error`, after `delay` seconds;
    nothing while it is `silent`."""

    def __init__(self) -> None:
        self.member: Member
        self.core: Core
        self.member, self.core = member_of(Recorder())
        self.core.role, self.core.leader = FOLLOWER, 2
        self.core.applied = 5
        self.sent: list[tuple[int, int, int, Any]] = []
        self.up = True
        self.silent = False
        self.index, self.delay = 5, 1.0
        self.error: str | None = None
        self.own: list[Exception | int] = []
        clocks = Clocks()
        clocks.boot_ns = self.boot_ns
        self.reads = FollowerReads(
            lambda uid: self.member if uid == UID else None, self.read_index, self.send, self.spawn, clocks
        )
        self.suspended_s = 0.0
        self.nursery: trio.Nursery

    def boot_ns(self) -> int:
        """trio's does not go on while the machine is suspended."""
        return round((trio.current_time() + self.suspended_s) * 1e9)

    def spawn(self, task: Callable[..., Any], *arguments: Any) -> None:
        self.nursery.start_soon(task, *arguments)

    def send(self, node: int, kind: int, request: int, header: Any, body: Any = ()) -> bool:
        self.sent.append((node, kind, request, header))
        if self.up and kind == READ_ASK and not self.silent:
            self.spawn(self.answer, request)
        return self.up

    async def answer(self, request: int) -> None:
        await trio.sleep(self.delay)
        self.reads.on_blob(2, READ_INDEX, request, {"uid": UID, "index": self.index, "error": self.error})

    async def read_index(self, member: Member) -> int:
        """The core's, which waits a second for its quorum."""
        await trio.sleep(1.0)
        outcome = self.own.pop(0) if self.own else self.index
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def within(self, *bounds: float) -> list[float]:
        """Reads with these bounds, begun together; after how many seconds each was answered."""
        began, took = trio.current_time(), [-1.0] * len(bounds)

        async def one(number: int, bound: float) -> None:
            await self.reads.within(self.member, bound)
            took[number] = trio.current_time() - began

        async with trio.open_nursery() as self.nursery:
            for number, bound in enumerate(bounds):
                self.nursery.start_soon(one, number, bound)
        return took

    async def refused(self, bound: float = 0.0) -> Exception:
        with pytest.raises(ExceptionGroup) as caught:
            await self.within(bound)
        (error,) = caught.value.exceptions
        assert isinstance(error, Exception)
        return error

    def apply(self, index: int) -> None:
        self.core.applied = index
        self.member.wake()


async def test_within_its_bound_a_read_asks_nobody(autojump_clock: Clock) -> None:
    rig = Rig()
    assert await rig.within(HOUR) == [1.0], "nothing is known yet, whatever the bound"
    assert rig.sent == [(2, READ_ASK, 1, {"uid": UID})]
    await trio.sleep(9.0)
    assert await rig.within(10.0, HOUR) == [0.0, 0.0], "its round began ten seconds ago"
    await trio.sleep(0.5)
    assert await rig.within(10.0) == [1.0] and len(rig.sent) == 2
    assert await rig.within(0.0) == [1.0] and len(rig.sent) == 3, "no bound at all is a round of its own"


async def test_an_answer_counts_from_when_it_was_asked_for(autojump_clock: Clock) -> None:
    rig = Rig()
    rig.delay = 1.5
    await rig.within(HOUR)
    # Half a second after the answer it is two seconds old.
    await trio.sleep(0.5)
    assert await rig.within(2.0) == [0.0]
    assert await rig.within(1.9) == [1.5]


async def test_time_in_which_the_machine_was_suspended_counts(autojump_clock: Clock) -> None:
    rig = Rig()
    await rig.within(HOUR)
    rig.suspended_s = HOUR
    assert await rig.within(10.0) == [1.0] and len(rig.sent) == 2, "what is known is an hour old"
    assert await rig.within(10.0) == [0.0]


async def test_who_waits_for_a_round_that_began_before_it_came_begins_the_next_one(autojump_clock: Clock) -> None:
    rig = Rig()
    took: list[float] = []

    async def late(bound: float) -> None:
        await trio.sleep(0.5)
        await rig.reads.within(rig.member, bound)
        took.append(trio.current_time())

    began = trio.current_time()
    async with trio.open_nursery() as rig.nursery:
        rig.nursery.start_soon(rig.reads.within, rig.member, 0.0)
        for bound in (0.0, 0.0, 0.6):
            rig.nursery.start_soon(late, bound)
    assert [moment - began for moment in took] == [1.0, 2.0, 2.0] and len(rig.sent) == 2
    assert await rig.within(*[HOUR] * 100) == [0.0] * 100


async def test_a_read_waits_until_what_the_leader_said_is_applied(autojump_clock: Clock) -> None:
    rig = Rig()
    rig.index = 8

    async def apply() -> None:
        for index in (6, 7, 8):
            await trio.sleep(0.5)
            rig.apply(index)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(apply)
        assert await rig.within(HOUR) == [1.5]
    rig.core.applied = 7
    rig.silent = True
    assert "what is committed" in str(await rig.refused(HOUR)), "what is known is not applied here any more"


@pytest.mark.parametrize("why", ["nobody leads", "the link is down", "silent", "refused", "not applied"])
async def test_while_nobody_can_say_what_is_committed_a_read_is_refused(why: str, autojump_clock: Clock) -> None:
    rig = Rig()
    if why == "nobody leads":
        rig.core.leader = 0
    elif why == "the link is down":
        rig.up = False
    elif why == "silent":
        rig.silent = True
    elif why == "refused":
        rig.error = "node 2 does not lead"
    else:
        rig.index = 6
    began = trio.current_time()
    error = await rig.refused()
    assert isinstance(error, Busy) and error.retry_after > 0
    waited = {"silent": PATIENCE_S, "not applied": PATIENCE_S, "refused": 1.0}.get(why, 0.0)
    assert trio.current_time() - began == waited
    assert not rig.reads._rounds and not rig.reads._asked, "nothing is left of it"
    rig.core.leader, rig.up, rig.silent, rig.error, rig.index = 2, True, False, None, 5
    assert await rig.within(0.0) == [1.0]


async def test_a_leader_asks_its_own_core_and_one_that_lost_its_quorum_says_so(autojump_clock: Clock) -> None:
    rig = Rig()
    rig.core.role = LEADER
    assert await rig.within(0.0) == [1.0] and not rig.sent
    rig.own = [NotLeader(2)]
    assert isinstance(await rig.refused(), Busy), "another member can be asked: that is no reason to go elsewhere"


async def test_a_stopped_group_answers_nobody_not_even_within_the_bound(autojump_clock: Clock) -> None:
    rig = Rig()
    await rig.within(HOUR)
    rig.member.state = "stopped"
    assert isinstance(await rig.refused(HOUR), GroupStopped)


async def test_a_reader_that_gives_up_does_not_take_the_others_along(autojump_clock: Clock) -> None:
    rig = Rig()
    began = trio.current_time()
    async with trio.open_nursery() as rig.nursery:
        with trio.move_on_after(0.5):
            # It has the round, which goes with it: another one begins its own.
            rig.nursery.start_soon(waiter, rig)
            await rig.reads.within(rig.member, 0.0)
    assert trio.current_time() - began == 1.5 and len(rig.sent) == 2


async def waiter(rig: Rig) -> None:
    await trio.sleep(0.1)
    await rig.reads.within(rig.member, 0.0)


async def test_answers_that_nobody_waits_for_do_nothing(autojump_clock: Clock) -> None:
    rig = Rig()
    rig.reads.on_blob(2, READ_INDEX, 1, {"uid": UID, "index": 99, "error": None})
    assert await rig.within(HOUR) == [1.0]
    rig.reads.on_blob(2, READ_INDEX, 1, {"uid": UID, "index": 99, "error": None})
    assert await rig.within(HOUR) == [0.0]


async def test_only_so_many_groups_are_remembered_the_oldest_rounds_go_first(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: Clock
) -> None:
    monkeypatch.setattr(follower_reads, "KNOWN_MAX", 2)
    rig = Rig()
    members = []
    for uid in (1, 2, 1, 3):
        member, core = member_of(Recorder())
        core.role, core.leader, core.applied = FOLLOWER, 2, 5
        member.spec = member.spec._replace(uid=uid)
        members.append(member)
        async with trio.open_nursery() as rig.nursery:
            await rig.reads.within(member, 0.0)
    assert sorted(rig.reads._known) == [1, 3], "the newer round of group 1 is the one that counts"


# As the one who is asked


async def asked(rig: Rig, uid: int = UID) -> tuple[float, dict[str, Any]]:
    """What node 3 hears, and after how long."""
    began = trio.current_time()
    async with trio.open_nursery() as rig.nursery:
        rig.reads.on_blob(3, READ_ASK, 42, {"uid": uid})
    if not rig.sent:
        return trio.current_time() - began, {}
    ((node, kind, request, header),) = rig.sent
    rig.sent.clear()
    assert (node, kind, request, header["uid"]) == (3, READ_INDEX, 42, uid)
    return trio.current_time() - began, header


async def test_who_is_asked_says_what_a_quorum_confirmed_or_why_not(autojump_clock: Clock) -> None:
    rig = Rig()
    assert await asked(rig) == (1.0, {"uid": UID, "index": 5, "error": None})
    assert await asked(rig, 8) == (0.0, {"uid": 8, "index": 0, "error": "the group is not here"})
    rig.own = [NotLeader(2)]
    took, header = await asked(rig)
    assert (took, header["index"]) == (1.0, 0) and header["error"] == str(NotLeader(2))
    assert rig.reads._answering == 0


async def test_who_is_asked_gives_up_with_the_one_who_asks(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: Clock
) -> None:
    monkeypatch.setattr(follower_reads, "PATIENCE_S", 0.5)
    rig = Rig()
    assert await asked(rig) == (0.5, {}), "nobody waits for the answer any more"
    assert rig.reads._answering == 0


async def test_too_many_questions_are_refused_at_once(monkeypatch: pytest.MonkeyPatch, autojump_clock: Clock) -> None:
    monkeypatch.setattr(follower_reads, "ANSWERS_MAX", 2)
    rig = Rig()
    async with trio.open_nursery() as rig.nursery:
        for request in range(3):
            rig.reads.on_blob(3, READ_ASK, request, {"uid": UID})
        assert [(request, header["error"]) for _, _, request, header in rig.sent] == [(2, "too many ask")]
    assert len(rig.sent) == 3 and not rig.reads._answering
    rig.sent.clear()
    assert (await asked(rig))[1]["error"] is None
