"""How many groups have entries under way at once, who is next, and how the limit follows from what an entry takes."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from logyard.engine.host.entry_window import BEST_SECONDS, TICK_SECONDS, TIMED_ONE_IN, WAIT_SECONDS, EntryWindow
from logyard.engine.raft.core import FOLLOWER, LEADER
from logyard.protocol.errors import NotLeader

from .cluster import cluster, until
from .test_admission import push
from .test_ready_loop import Bench

QUEUEING_S = 0.008
GROUPS = 8


class Group:
    """A member as a window sees it. `far`: seconds from when its entries are durable here until they are committed."""

    def __init__(self, far: float = 0.0) -> None:
        self.raft = SimpleNamespace(commit=0, log=SimpleNamespace(last_index=0, stable=0), role=LEADER, stopped=False)
        self.far = far
        self.waits = self.began = 0.0


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
        node.persist(first)
        node.commit(first)
        node.now += 1.0
        return node

    def offer(self, *members: Any) -> list[bool]:
        """Have members propose in one pass; whether each was let."""
        let = []
        for member in members:
            let.append(not self.window.closed or self.window.admits(member))
            if let[-1]:
                member.raft.log.last_index += 1
                self.window.enter(member)
            else:
                self.window.wait(member)
        self.window.settle(members)
        return let

    def persist(self, member: Any) -> None:
        """What a member has is durable here."""
        member.raft.log.stable = member.raft.log.last_index
        if self.window.timed == member:
            self.window.persisted(member)

    def commit(self, *members: Any) -> list[Any]:
        """Commit what members have under way; whose turn it is then."""
        self.marked.clear()
        for member in members:
            member.raft.commit = member.raft.log.last_index
        self.window.settle(members)
        return list(self.marked)


def groups(count: int) -> list[Any]:
    return [Group() for _ in range(count)]


def test_up_to_so_many_groups_have_entries_under_way_and_the_others_wait() -> None:
    node, members = Node(), groups(GROUPS + 2)
    assert node.offer(*members) == [True] * GROUPS + [False] * 2
    assert node.marked == [] and node.window.closed


def test_who_waits_longest_is_next_when_half_of_the_window_is_free() -> None:
    node, members = Node(), groups(3 * GROUPS)
    node.offer(*members)
    assert node.commit(*members[:3]) == []
    assert node.commit(members[3]) == members[GROUPS : GROUPS + 4], "together, so that they share a frame"
    late = Group()
    assert node.offer(late, *members[GROUPS : GROUPS + 4]) == [False] + [True] * 4
    # One that leads no more, or is stopped, gives its place to those behind it.
    for one in members[4:6]:
        one.raft.role = FOLLOWER
    for one in members[6:GROUPS]:
        one.raft.stopped = True
    node.window.settle(members[4:GROUPS])
    assert node.marked[-4:] == members[GROUPS + 4 : GROUPS + 8]


def test_the_window_opens_when_nobody_waits() -> None:
    node, members = Node(), groups(GROUPS + 1)
    node.offer(*members)
    assert node.commit(*members[:GROUPS]) == [members[-1]] and not node.window.closed
    assert node.offer(members[-1], *members[:2]) == [True] * 3


def test_places_of_those_whose_turn_it_is_are_not_given_to_others() -> None:
    node, members = Node(), groups(2 * GROUPS)
    node.offer(*members)
    assert node.commit(*members[:GROUPS]) == members[GROUPS:] and node.window.closed
    assert node.offer(Group(), *members[GROUPS:]) == [False] + [True] * GROUPS


def test_a_group_that_goes_on_before_its_entry_is_committed_counts_once_until_it_pauses() -> None:
    node, members = Node(), groups(GROUPS)
    busy = members[0]
    assert node.offer(busy, busy, busy, *members[1:]) == [True] * (GROUPS + 2) and node.window.closed
    busy.raft.commit = 1
    node.window.settle([busy])
    busy.raft.commit = 2
    node.window.settle([busy])
    assert node.offer(Group()) == [False], "the third entry is under way"
    node.commit(busy, *members[1:4])
    assert len(node.marked) == 1


def test_a_group_counts_whose_first_entry_under_way_was_not_a_clients() -> None:
    node, members = Node(), groups(GROUPS)
    for one in members:
        one.raft.log.last_index += 1
    node.offer(*members)
    assert node.window.closed


def test_what_was_refused_neither_counts_nor_is_timed() -> None:
    node, (one,) = Node(), groups(1)
    node.window.enter(one)
    assert node.window.timed is None and not node.window.closed
    node.window.settle([one])
    assert node.offer(*groups(GROUPS - 1), Group()) == [True] * GROUPS


@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize("end", [{"role": FOLLOWER}, {"stopped": True}])
def test_what_ends_without_being_written_is_not_timed(end: dict[str, Any], committed: bool) -> None:
    """Also where the others had it durable first, so that nothing is under way any more."""
    node = Node(groups=100)
    one, other = groups(2)
    node.offer(one)
    assert node.window.timed == one
    if committed:
        node.commit(one)
        assert node.window.timed == one and node.window.busy
    vars(one.raft).update(end)
    node.window.settle([one])
    node.offer(*groups(TIMED_ONE_IN - 1), other)
    assert node.window.timed == other


def test_any_number_without_a_limit() -> None:
    node = Node(queueing_s=0.0)
    assert all(node.offer(*groups(1000))) and not node.window.closed


def test_nothing_is_kept_of_who_waits_for_nothing() -> None:
    node, members = Node.slow(), groups(3 * GROUPS)
    node.offer(*members)
    node.persist(members[0])
    for at in range(0, 3 * GROUPS, GROUPS):
        node.commit(*members[at : at + GROUPS])
        node.offer(*members[at + GROUPS : at + 2 * GROUPS])
        for one in members:
            node.persist(one)
    (one,) = groups(1)
    node.offer(one)
    one.raft.stopped = True
    node.window.settle([one])
    assert not node.window.busy
    kept = [weakref.ref(member) for member in (*members, one)]
    node.marked.clear()
    del members, one
    gc.collect()
    assert [ref() for ref in kept if ref() is not None] == []


async def test_nobody_waits_for_long_however_many_others_are_stuck(autojump_clock: trio.testing.MockClock) -> None:
    node, stuck, late = Node(), groups(GROUPS * 20), Group()
    node.window._clock = trio.current_time
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.window.run)
        await trio.testing.wait_all_tasks_blocked()
        node.offer(*stuck, late)
        began = trio.current_time()
        while late not in node.marked:
            node.offer(*node.marked)
            node.marked.clear()
            await trio.sleep(TICK_SECONDS / 4)
        assert trio.current_time() - began <= WAIT_SECONDS + 1.5 * TICK_SECONDS
        assert node.offer(late) == [True]
        nursery.cancel_scope.cancel()


async def test_what_is_stuck_is_not_counted_for_long(autojump_clock: trio.testing.MockClock) -> None:
    node, stuck = Node(), groups(GROUPS)
    node.window._clock = trio.current_time
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.window.run)
        await trio.testing.wait_all_tasks_blocked()
        node.offer(*stuck, Group())
        await trio.sleep(2 * WAIT_SECONDS + 3 * TICK_SECONDS)
        assert not node.window.closed
        assert node.offer(*groups(GROUPS - 1)) == [True] * (GROUPS - 1)
        nursery.cancel_scope.cancel()


def simulate(node: Node, members: list[Group], seconds: float, local_s: float = 0.0002, at_once: int = 0) -> None:
    """Have groups propose a command whenever their last is committed, on a node that takes `local_s` to write an entry,
    so many `at_once` or any number; `waits` of each group: how long its last command took."""
    ready, writing, far = deque(members), deque[tuple[float, Group]](), list[tuple[float, int, Group]]()
    until, ends = node.now + seconds, deque[float]()
    for one in members:
        one.began = node.now
    while node.now < until:
        offered = [*node.marked, *ready]
        node.marked.clear()
        ready.clear()
        for member, let in zip(offered, node.offer(*offered), strict=True):
            if let:
                begins = max(node.now, ends[-at_once]) if at_once and len(ends) >= at_once else node.now
                ends.append(begins + local_s)
                writing.append((ends[-1], member))
        if not node.marked:
            soonest = [writing[0][0]] if writing else []
            node.now = max(node.now, min([*soonest, *(at for at, _, _ in far[:1])], default=node.now + TICK_SECONDS))
        while writing and writing[0][0] <= node.now:
            at, member = writing.popleft()
            node.persist(member)
            far.append((at + member.far, id(member), member))
        far.sort(key=lambda one: one[0])
        node.window._admit()
        while far and far[0][0] <= node.now:
            member = far.pop(0)[2]
            member.raft.commit = member.raft.log.last_index
            node.window.settle([member])  # type: ignore[list-item]
            member.waits, member.began = node.now - member.began, node.now
            ready.append(member)
    for _, member in writing:
        node.persist(member)
    node.commit(*(member for _, member in writing), *(member for _, _, member in far))
    node.marked.clear()
    node.window._waiting.clear()


@pytest.mark.parametrize("far", [0.0005, 0.05, 0.6])
def test_however_far_other_nodes_are_nobody_waits_on_a_node_that_has_time(far: float) -> None:
    node, members = Node(), [Group(far) for _ in range(200)]
    simulate(node, members, 30 * far)
    assert max(one.waits for one in members) < far + 0.002


def test_groups_with_near_members_do_not_wait_for_those_with_far_ones() -> None:
    node, near, far = Node(), [Group(0.0005) for _ in range(4)], [Group(0.2) for _ in range(200)]
    simulate(node, near + far, 4.0)
    assert max(one.waits for one in near) < 0.002 and max(one.waits for one in far) < 0.202


def test_where_entries_wait_for_each_other_no_more_are_let_than_keep_the_node_busy() -> None:
    node, members = Node(groups=4), groups(100)
    # Two at once, 1 ms each: who begins while 16 are under way waits for 8 ms, and half of the window begin at a time.
    simulate(node, members, 2 * BEST_SECONDS, 0.001, 2)
    assert 4 <= node.window.limit <= 64, "also when it has been so for long"
    # The disk takes a long time from now on, for any number at once: it is another one.
    simulate(node, members, 5 * BEST_SECONDS, 0.2)
    assert max(one.waits for one in members) < 0.21


async def test_nothing_is_kept_of_a_group_that_is_stopped(tmp_path: Path) -> None:
    async with cluster(tmp_path, election_ticks=1000) as c:
        leader = await c.leader()
        await c.append(leader, [(b"", b"x")])
        for number in set(c.ids) - {leader}:
            await c.crash(number)
        member, window = c.member(leader), c.system(leader).ready_loop.window
        push(c, 10, number=leader)
        await until(lambda: member.raft.commit < member.raft.log.last_index and window.busy)
        c.system(leader).replicas.retire.stop(member, "a test")
        await until(lambda: not window.busy and window.timed is None)


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
    late.proposals.urgent = True
    assert ("proposed", 1000, "shape") in bench.turn(late), "what frees space does not wait"
    late.proposals.urgent = False
    bench.turn(late)
    late.raft.commit = two.raft.commit = one.raft.commit = one.raft.log.last_index + 1
    assert ("proposed", 1000, "shape") in bench.turn(one, two, late), (
        "the pass settles, the next one of the turn lets it"
    )
