"""What only leading decides, alone: when a read is linearizable, what a leader knows, and to whom leadership goes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
import trio.testing

from logyard.engine.raft.core import FOLLOWER, LEADER
from logyard.engine.replica.leadership import TRANSFER_SECONDS, Leadership, wait
from logyard.engine.replica.member import Member
from logyard.protocol.errors import GroupStopped, LogyardError, NotLeader, Refused, UnknownGroup

from .doubles import Core, Recorder, member_of

ELECTION_S = 2.0
Clock = trio.testing.MockClock


class Asked(Core):
    """A core that notes what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[int] = []
        self.asked: list[Any] = []
        self.stopped_for = ""

    def read(self, context: int) -> None:
        self.reads.append(context)

    def transfer(self, to: int) -> None:
        if to == 9:
            raise Refused("node 9 is no voter")
        self.asked.append(to)
        self.transferring = True

    def campaign(self) -> None:
        self.asked.append("campaign")

    def force_shrink(self) -> int:
        self.asked.append("shrink")
        return 8

    def stop(self) -> None:
        self.stopped = True


class Rig:
    """One group, "a", led by this node, 1; all that is committed, up to entry 5, is applied."""

    def __init__(self) -> None:
        self.member: Member
        self.member, _ = member_of(Recorder())
        self.core = Asked()
        self.core.applied = self.core.lead_index = 5
        object.__setattr__(self.member, "raft", self.core)
        object.__setattr__(self.member.proposals, "raft", self.core)
        self.marked = 0
        self.leadership = Leadership(1, ELECTION_S, self.find, self.mark)
        self.outcomes: list[Any] = []

    def find(self, name: str) -> Member:
        if name != "a":
            raise UnknownGroup(name)
        return self.member

    def mark(self, member: Member) -> None:
        assert member is self.member
        self.marked += 1

    def apply(self, index: int) -> None:
        self.core.applied = index
        self.member.wake()

    def confirm(self, context: int, outcome: LogyardError | int) -> None:
        """As the ready loop does with the core's answer to a read."""
        pending = (self.member.reads or {}).pop(context)
        if isinstance(outcome, LogyardError):
            pending.fail(outcome)
        else:
            pending.set(outcome)

    async def do(self, work: Callable[[], Awaitable[Any]], *steps: Callable[[], None]) -> Any:
        """What `work` brings when these things happen meanwhile, one each half second."""

        async def run() -> None:
            try:
                self.outcomes.append(await work())
            except LogyardError as error:
                self.outcomes.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            for step in steps:
                await trio.sleep(0.5)
                assert not self.outcomes, "not before"
                step()
        return self.outcomes.pop()

    def check_nothing(self) -> None:
        assert not self.member.waiters and not self.member.reads, "nobody is left waiting"


# Waiting


async def test_what_holds_already_is_not_waited_for() -> None:
    rig = Rig()
    rig.member.state = "halted"
    await wait(rig.member, lambda: True)
    with pytest.raises(GroupStopped):
        await wait(rig.member, lambda: False)
    rig.check_nothing()


async def test_who_waits_hears_of_the_first_apply_at_which_it_holds(autojump_clock: Clock) -> None:
    rig = Rig()
    steps = [lambda at=at: rig.apply(at) for at in (6, 7, 8)]
    await rig.do(lambda: wait(rig.member, lambda: rig.core.applied >= 8), *steps)
    rig.check_nothing()


async def test_a_group_that_stops_leaves_nobody_waiting(autojump_clock: Clock) -> None:
    rig = Rig()
    error = await rig.do(lambda: wait(rig.member, lambda: False), lambda: rig.member.stop("a test"))
    assert isinstance(error, GroupStopped)
    rig.check_nothing()


async def test_who_gives_up_waits_no_more(autojump_clock: Clock) -> None:
    rig = Rig()
    with trio.move_on_after(1):
        await wait(rig.member, lambda: False)
    rig.check_nothing()


# Reads


async def test_a_read_is_confirmed_and_then_applied(autojump_clock: Clock) -> None:
    rig = Rig()
    index = await rig.do(
        lambda: rig.leadership.read_index(rig.member), lambda: rig.confirm(1, 7), lambda: rig.apply(6),
        lambda: rig.apply(7),
    )  # fmt: skip
    assert index == 7 and rig.core.reads == [1] and rig.marked == 1
    rig.check_nothing()


async def test_every_read_is_a_question_of_its_own(autojump_clock: Clock) -> None:
    rig = Rig()
    found: dict[int, int] = {}

    async def read(number: int) -> None:
        await trio.sleep(number)
        found[number] = await rig.leadership.read_index(rig.member)

    async with trio.open_nursery() as nursery:
        for number in (1, 2, 3):
            nursery.start_soon(read, number)
        await trio.sleep(4)
        assert rig.core.reads == [1, 2, 3]
        for context in (3, 1, 2):
            rig.confirm(context, context)
    assert found == {1: 1, 2: 2, 3: 3}


async def test_a_read_of_a_leader_that_was_deposed_is_refused(autojump_clock: Clock) -> None:
    rig = Rig()
    error = await rig.do(lambda: rig.leadership.read_index(rig.member), lambda: rig.confirm(1, NotLeader(2)))
    assert isinstance(error, NotLeader) and error.leader == 2
    rig.check_nothing()


@pytest.mark.parametrize("when", ["before", "before it is confirmed", "before it is applied"])
async def test_a_read_of_a_group_that_stops_is_refused(when: str, autojump_clock: Clock) -> None:
    rig = Rig()
    steps: list[Callable[[], None]] = [lambda: rig.member.stop("a test")]
    if when == "before":
        steps.pop()()
    elif when == "before it is applied":
        steps.insert(0, lambda: rig.confirm(1, 7))
    error = await rig.do(lambda: rig.leadership.read_index(rig.member), *steps)
    assert isinstance(error, GroupStopped) and bool(rig.core.reads) == (when != "before")
    rig.check_nothing()


async def test_a_read_that_is_given_up_is_forgotten(autojump_clock: Clock) -> None:
    rig = Rig()
    with trio.move_on_after(1):
        await rig.leadership.read_index(rig.member)
    rig.check_nothing()


# Leading


async def test_who_has_applied_what_was_before_its_term_leads_at_once() -> None:
    rig = Rig()
    await rig.leadership.led(rig.member)
    rig.core.role, rig.core.leader = FOLLOWER, 2
    with pytest.raises(NotLeader):
        await rig.leadership.led(rig.member)


async def test_a_new_leader_waits_for_what_was_before_it(autojump_clock: Clock) -> None:
    rig = Rig()
    rig.core.applied = 3
    assert await rig.do(lambda: rig.leadership.led(rig.member), lambda: rig.apply(4), lambda: rig.apply(5)) is None
    rig.check_nothing()


@pytest.mark.parametrize("what", ["nothing", "deposed", "led again", "stopped"])
async def test_a_leader_that_does_not_get_there_says_so(what: str, autojump_clock: Clock) -> None:
    rig = Rig()
    rig.core.applied = 3

    def happen() -> None:
        if what == "stopped":
            rig.member.stop("a test")
        elif what != "nothing":
            rig.core.term += 1
            if what == "deposed":
                rig.core.role, rig.core.leader = FOLLOWER, 2
            rig.core.applied = 4
            rig.member.wake()

    began = trio.current_time()
    error = await rig.do(lambda: rig.leadership.led(rig.member), happen)
    took = trio.current_time() - began
    assert isinstance(error, GroupStopped if what == "stopped" else NotLeader)
    assert took == (ELECTION_S if what == "nothing" else 0.5)
    if isinstance(error, NotLeader):
        assert error.leader == (2 if what == "deposed" else 0), "of a later term it knows nothing yet"
    rig.check_nothing()


# Transfers


async def test_a_transfer_ends_when_this_member_follows(autojump_clock: Clock) -> None:
    rig = Rig()

    def step_down() -> None:
        rig.core.role, rig.core.leader = FOLLOWER, 0
        rig.member.wake()

    def follow() -> None:
        rig.core.leader = 2
        rig.member.wake()

    assert await rig.do(lambda: rig.leadership.transfer("a", 2), step_down, follow) is None
    assert rig.core.asked == [2] and rig.marked == 1
    rig.check_nothing()


@pytest.mark.parametrize(("what", "after"), [("given up", 0.5), ("another", 0.5), ("nobody", TRANSFER_SECONDS)])
async def test_a_transfer_that_came_to_nothing_is_refused(what: str, after: float, autojump_clock: Clock) -> None:
    rig = Rig()

    def happen() -> None:
        if what == "given up":
            rig.core.transferring = False
        else:
            rig.core.role, rig.core.leader = FOLLOWER, 3 if what == "another" else 0
        rig.member.wake()

    began = trio.current_time()
    error = await rig.do(lambda: rig.leadership.transfer("a", 2), happen)
    assert isinstance(error, Refused) and trio.current_time() - began == after
    rig.check_nothing()


async def test_only_a_leader_transfers_and_only_to_whom_it_may() -> None:
    rig = Rig()
    with pytest.raises(UnknownGroup):
        await rig.leadership.transfer("b", 2)
    with pytest.raises(Refused):
        await rig.leadership.transfer("a", 9)
    rig.core.role, rig.core.leader = FOLLOWER, 2
    with pytest.raises(NotLeader) as caught:
        await rig.leadership.transfer("a", 3)
    assert caught.value.leader == 2 and not rig.core.asked and not rig.marked


async def test_a_transfer_to_who_leads_already_is_done_when_the_core_gives_it_up(autojump_clock: Clock) -> None:
    rig = Rig()
    rig.core.transfer = lambda to: None  # type: ignore[method-assign]
    await rig.leadership.transfer("a", 1)
    rig.check_nothing()


# Campaigns, and the last resort


def test_a_member_campaigns_while_it_runs() -> None:
    rig = Rig()
    rig.core.role = FOLLOWER
    rig.leadership.campaign("a")
    assert rig.core.asked == ["campaign"] and rig.marked == 1
    rig.member.stop("a test")
    with pytest.raises(GroupStopped):
        rig.leadership.campaign("a")
    with pytest.raises(UnknownGroup):
        rig.leadership.campaign("b")
    assert rig.core.asked == ["campaign"] and rig.marked == 1


async def test_a_member_is_the_only_voter_when_that_is_applied(autojump_clock: Clock) -> None:
    rig = Rig()
    steps = [lambda at=at: rig.apply(at) for at in (6, 8)]
    assert await rig.do(lambda: rig.leadership.force_shrink("a"), *steps) == 8
    assert rig.core.asked == ["shrink"] and rig.marked == 1
    rig.check_nothing()


async def test_a_member_that_lacks_payloads_does_not_become_the_only_voter() -> None:
    rig = Rig()
    rig.member.floor = 6
    with pytest.raises(Refused, match="lacks payloads"):
        await rig.leadership.force_shrink("a")
    rig.member.floor = 5
    rig.member.stop("a test")
    with pytest.raises(GroupStopped):
        await rig.leadership.force_shrink("a")
    assert not rig.core.asked and not rig.marked
    assert rig.core.role == LEADER
