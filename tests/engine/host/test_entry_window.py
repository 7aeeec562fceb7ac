"""How many groups have entries under way at once, who is next, and how the limit follows from what an entry takes."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from logyard.engine.host.entry_window import STUCK_SECONDS, EntryWindow
from logyard.engine.raft.core import FOLLOWER, LEADER
from logyard.protocol.errors import NotLeader

from .test_ready_loop import Bench

QUEUEING_S = 0.008
GROUPS = 8


class Group:
    """A member as a window sees it."""

    def __init__(self) -> None:
        self.raft = SimpleNamespace(commit=0, log=SimpleNamespace(last_index=0), role=LEADER, stopped=False)

    def commit(self) -> None:
        self.raft.commit = self.raft.log.last_index


class Node:
    """What a ready loop does with a window, by a clock that tests advance."""

    def __init__(self, queueing_s: float = QUEUEING_S, groups: int = GROUPS) -> None:
        self.now = 0.0
        self.marked: list[Any] = []
        self.window = EntryWindow(queueing_s, groups, self.marked.append, lambda: self.now)

    @classmethod
    def slow(cls) -> Node:
        """One on which an entry took no time once, and takes a second since: the limit does not rise."""
        node, first = cls(), Group()
        node.offer(first)
        first.commit()
        node.window.settle([first])
        return node

    def offer(self, *members: Any) -> list[bool]:
        """Have members propose in one pass; whether each was let."""
        let = []
        for member in members:
            let.append(not self.window.closed or self.window.admits(member))
            if let[-1]:
                first = member.raft.commit == member.raft.log.last_index
                member.raft.log.last_index += 1
                if first:
                    self.window.enter(member)
            else:
                self.window.wait(member)
        self.window.settle(members)
        return let

    def commit(self, *members: Any) -> list[Any]:
        """Commit what members have under way; whose turn it is then."""
        self.marked.clear()
        self.now += 1.0
        for member in members:
            member.commit()
        self.window.settle(members)
        return list(self.marked)


def groups(count: int) -> list[Any]:
    return [Group() for _ in range(count)]


def test_up_to_so_many_groups_have_entries_under_way_and_the_others_wait() -> None:
    node, members = Node.slow(), groups(GROUPS + 2)
    assert node.offer(*members) == [True] * GROUPS + [False] * 2
    assert node.marked == [] and node.window.closed


def test_who_waits_longest_is_next_when_half_of_the_window_is_free() -> None:
    node, members = Node.slow(), groups(3 * GROUPS)
    node.offer(*members)
    assert node.commit(*members[:3]) == []
    assert node.commit(members[3]) == members[GROUPS : GROUPS + 4], "together, so that they share a frame"
    late = Group()
    assert node.offer(late, *members[GROUPS : GROUPS + 4]) == [False] + [True] * 4
    # One that leads no more gives its place to those behind it.
    for one in members[4:GROUPS]:
        one.raft.role = FOLLOWER
    node.window.settle(members[4:GROUPS])
    assert node.marked[-4:] == members[GROUPS + 4 : GROUPS + 8]


def test_the_window_opens_when_nobody_waits() -> None:
    node, members = Node.slow(), groups(GROUPS + 1)
    node.offer(*members)
    assert node.commit(*members[:GROUPS]) == [members[-1]] and not node.window.closed
    assert node.offer(members[-1], *members[:2]) == [True] * 3


def test_a_group_that_goes_on_before_its_entry_is_committed_counts_once_and_until_it_pauses() -> None:
    node, members = Node.slow(), groups(GROUPS)
    busy = members[0]
    assert node.offer(busy, busy, busy, *members[1:]) == [True] * (GROUPS + 2) and node.window.closed
    busy.raft.commit = 1
    node.window.settle([busy])
    busy.raft.commit = 2
    node.window.settle([busy])
    assert node.offer(Group()) == [False], "the third entry is under way"
    node.commit(busy, *members[1:4])
    assert len(node.marked) == 1


def test_any_number_without_a_limit() -> None:
    node = Node(queueing_s=0.0)
    assert all(node.offer(*groups(1000))) and not node.window.closed


async def test_groups_without_a_quorum_hold_nobody_up_for_long(autojump_clock: trio.testing.MockClock) -> None:
    node, stuck, late = Node(), groups(GROUPS), Group()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.window.run)
        await trio.testing.wait_all_tasks_blocked()
        node.offer(*stuck, late)
        began = trio.current_time()
        await trio.sleep(STUCK_SECONDS * 1.5)
        assert node.marked == []
        await trio.sleep(STUCK_SECONDS)
        assert node.marked == [late] and trio.current_time() - began <= 2.5 * STUCK_SECONDS
        assert node.offer(late) == [True]
        # They are not counted again for what is said behind the entry that is stuck, nor timed when it is committed.
        assert node.offer(*stuck, Group()) == [True] * (GROUPS + 1)
        node.now += 1000.0
        for one in (*stuck, late):
            node.commit(one)
        assert node.window.limit == GROUPS
        nursery.cancel_scope.cancel()


def simulate(node: Node, count: int, took_s: float, at_once: int, seconds: float) -> float:
    """Have `count` groups, each with a command to propose whenever its last is committed, on a way that takes `took_s`
    and an entry at most so many `at_once`, or none; return the entries a second."""
    ready, under_way, done = deque(groups(count)), deque[tuple[float, Any]](), 0
    until = node.now + seconds
    while node.now < until:
        members = [*node.marked, *ready]
        node.marked.clear()
        ready.clear()
        for member, let in zip(members, node.offer(*members), strict=True):
            if let:
                place = len(under_way) - at_once
                begins = max(node.now, under_way[place][0]) if at_once and place >= 0 else node.now
                under_way.append((begins + took_s, member))
        if not node.marked:
            node.now = max(node.now, under_way[0][0])
        while under_way and under_way[0][0] <= node.now:
            _, member = under_way.popleft()
            done += 1
            member.commit()
            node.window.settle([member])
            ready.append(member)
    node.commit(*(member for _, member in under_way))
    return done / seconds


@pytest.mark.parametrize("took_s", [0.0005, 0.05, 0.2])
def test_on_a_long_way_as_many_are_let_as_are_under_way_without_waiting(took_s: float) -> None:
    node = Node()
    simulate(node, 1000, took_s, 0, 100 * took_s)
    assert simulate(node, 1000, took_s, 0, 20 * took_s) > 0.9 * 1000 / took_s


def test_where_entries_wait_for_each_other_no_more_are_let_than_keep_everything_busy() -> None:
    node = Node(groups=4)
    # Two at once, 1 ms each: 2,000 a second at most, and 16 of them wait for 8 ms.
    assert simulate(node, 1000, 0.001, 2, 20.0) > 1950
    assert 4 <= node.window.limit <= 32, "also when it has been so for long"
    # The way is a long one from now on, for any number: it takes a while to know it.
    simulate(node, 1000, 0.02, 0, 20.0)
    assert simulate(node, 1000, 0.02, 0, 1.0) > 45000


async def test_a_turn_has_the_clients_frames_alone_wait(autojump_clock: trio.testing.MockClock) -> None:
    bench = Bench(QUEUEING_S)
    one, two, late, other = bench.member(), bench.member(), bench.member(), bench.member(role=FOLLOWER)
    members = (one, two, late, other)
    for member in members:
        member.proposals.queue = ["a frame"]
    told = bench.turn(*members)
    assert told.count(("proposed", 1000, "shape")) == 2, "as many as the window takes"
    assert NotLeader in told
    late.proposals.own = ["a command of the engine's"]
    told = bench.turn(late)
    assert ("own", 1000) in told and ("proposed", 1000, "shape") not in told
    late.proposals.own = []
    one.raft.commit = one.raft.log.last_index
    assert ("proposed", 1000, "shape") in bench.turn(one), "its own pass settles, the next one of the turn lets it"
