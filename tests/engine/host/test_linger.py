"""When proposals gather, for how long, and when that is given up."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing

from logyard.engine.host.linger import REST_SECONDS, SATURATED, Linger
from logyard.engine.raft.core import FOLLOWER
from logyard.protocol.errors import NotLeader

from .test_ready_loop import Bench

INTERVAL_S = 0.02


class Node:
    """A loop that is `busy` for some share of the time, by a clock that tests advance."""

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self.now = self.waited = 0.0
        self.marked: list[Any] = []
        self.linger = Linger(interval_s, 32, self.marked.append, lambda: self.now)
        self.linger.watch(lambda: self.waited)

    def turn(self, groups: int, commands: int, waited: float = 0.0) -> bool:
        """A turn 10 ms later; whether proposals are taken at once from then on."""
        self.now += 0.01
        self.waited += waited
        self.linger.end_turn(groups, commands)
        return self.linger.open


def test_a_node_that_has_no_moment_to_lose_lets_proposals_gather() -> None:
    node = Node()
    assert node.linger.open and node.linger.is_on
    assert not node.turn(32, 40)


@pytest.mark.parametrize(("waited", "open_"), [(0.0019, False), (0.0021, True)])
def test_a_loop_that_waits_now_and_then_takes_them_at_once(waited: float, open_: bool) -> None:
    assert pytest.approx(0.2) == 1 - SATURATED
    assert Node().turn(50, 60, waited) is open_


def test_what_was_waited_before_the_turns_that_are_judged_does_not_count() -> None:
    node = Node()
    assert node.turn(50, 60, 0.01)
    assert not node.turn(50, 60)


def test_it_is_off_without_an_interval_or_without_knowing_whether_the_loop_waits() -> None:
    off, unknown = Node(0.0), Linger(INTERVAL_S, 32, lambda member: None)
    assert off.turn(1000, 1000) and not off.linger.is_on
    unknown.end_turn(1000, 1000)
    assert unknown.open and not unknown.is_on


async def test_what_was_put_off_is_looked_at_one_interval_later(autojump_clock: trio.testing.MockClock) -> None:
    node = Node()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.linger.run)
        await trio.testing.wait_all_tasks_blocked()
        assert not node.turn(32, 40)
        began = trio.current_time()
        members: list[Any] = ["a", "b"]
        node.linger.put_off(members[0])
        await trio.sleep(INTERVAL_S / 2)
        for member in members:
            node.linger.put_off(member)
        assert node.marked == [] and not node.linger.open
        await trio.sleep(INTERVAL_S)
        assert node.marked == members, "each once, and the later one with the first"
        assert node.linger.open and trio.current_time() - began == INTERVAL_S * 1.5
        nursery.cancel_scope.cancel()


async def test_where_commands_still_come_one_a_group_it_is_given_up_for_a_while(
    autojump_clock: trio.testing.MockClock,
) -> None:
    node = Node()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.linger.run)

        async def gather() -> None:
            await trio.testing.wait_all_tasks_blocked()
            member: Any = "a"
            node.linger.put_off(member)
            await trio.sleep(2 * INTERVAL_S)

        assert not node.turn(100, 100), "nothing is known yet"
        await gather()
        assert not node.turn(100, 120), "worth it"
        await gather()
        assert node.turn(100, 119)
        node.now += REST_SECONDS - 0.011
        assert node.turn(100, 100)
        node.now += 0.01
        assert not node.turn(100, 100), "tried again"
        nursery.cancel_scope.cancel()


async def test_a_turn_puts_off_the_clients_frames_alone(autojump_clock: trio.testing.MockClock) -> None:
    bench = Bench(INTERVAL_S)
    waited = [0.0]
    bench.loop.share(lambda call: call(), lambda: waited[0])
    one, two, other = bench.member(), bench.member(), bench.member(role=FOLLOWER)
    for member in (one, two, other):
        member.proposals.queue = ["a frame"]
    assert [what[0] for what in bench.turn(one, two) if what[0] == "proposed"] == ["proposed"] * 2
    assert not bench.loop.linger.open
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.loop.linger.run)
        await trio.testing.wait_all_tasks_blocked()
        one.proposals.own = ["a command of the engine's"]
        told = bench.turn(one, other)
        assert ("own", 1000) in told and NotLeader in told
        assert not any(what[0] == "proposed" for what in told if isinstance(what, tuple))
        await trio.sleep(2 * INTERVAL_S)
        assert bench.loop.dirty == [one]
        one.proposals.own = []
        assert ("proposed", 1000, "shape") in bench.turn(one)
        nursery.cancel_scope.cancel()


def test_few_groups_never_gather() -> None:
    bench = Bench(INTERVAL_S)
    bench.loop.share(lambda call: call(), lambda: 0.0)
    member = bench.member()
    member.proposals.queue = ["a frame"]
    for _ in range(3):
        assert ("proposed", 1000, "shape") in bench.turn(member)
        assert bench.loop.linger.open
