"""Timers without a system: when each rings, on whose node, and by which clock its group's log time goes on."""

from __future__ import annotations

import math
from typing import Any

import pytest

from logyard.engine.quiesce.timers import AGAIN_NS, Timers
from logyard.engine.replica.log_time import LogTime

from .doubles import MS, OWN, UID, VOTERS, S, SetClocks, member_of


class Bench:
    """Timers, and by group whom it sleeps under; `fresh` is the log time at which a follower's clock begins."""

    def __init__(self) -> None:
        self.clocks = SetClocks()
        self.leaders: dict[int, int] = {}
        self.stirred = 0
        self.fresh = 1_000_000_000
        self.timers = Timers(OWN, self.clocks, lambda uid: self.leaders.get(uid, OWN), self.clock, self.stir)

    def stir(self) -> None:
        self.stirred += 1

    def clock(self, member: Any) -> LogTime:
        return LogTime(self.fresh, self.clocks.wall, self.clocks.monotonic)

    def sleep(self, uid: int, due_s: float, terms: bool = False) -> None:
        """A group falls asleep that has a timer so far ahead of its log time; `terms`: and a term that runs."""
        member = member_of(set(VOTERS), uid)
        member.machine.has_terms = lambda: terms  # type: ignore[attr-defined]
        self.timers.set(uid, self.fresh + int(1000 * due_s), member)

    def ring(self) -> list[int]:
        return list(self.timers.due())


def test_they_ring_in_order_once_each_and_the_first_one_says_when() -> None:
    bench = Bench()
    assert bench.timers.next_s() == math.inf and not bench.ring()
    for uid, due_s in ((1, 30.0), (2, 10.0), (3, 20.0)):
        bench.sleep(uid, due_s)
    assert bench.timers.next_s() == 10.0 and bench.stirred == 2, "only who comes before all others changes that"
    bench.clocks.move(9.9)
    assert bench.ring() == []
    bench.clocks.move(10.1)
    assert bench.ring() == [2, 3] and bench.ring() == [] and bench.timers.next_s() == 10.0


def test_of_a_group_that_woke_or_slept_again_only_the_newest_counts() -> None:
    bench = Bench()
    bench.sleep(UID, 10.0)
    assert bench.timers.pop(UID) is not None and bench.timers.pop(UID) is None
    bench.sleep(UID, 30.0)
    bench.clocks.move(20.0)
    assert bench.ring() == []
    bench.clocks.move(10.0)
    assert bench.ring() == [UID]


def test_a_group_that_wakes_often_before_its_timer_leaves_nothing_behind() -> None:
    """A timer a week ahead of a group that was used each minute left 10,000 old times to that day."""
    bench = Bench()
    week = 7 * 86_400.0
    bench.sleep(UID + 1, week / 2)
    for cycle in range(2000):
        bench.sleep(UID, week - cycle * 60)
        bench.clocks.move(60)
        if cycle < 1999:
            bench.timers.pop(UID)
    assert len(bench.timers._due) < 200 and bench.stirred == 1
    for uid in (UID + 1, UID):
        bench.clocks.move(bench.timers.next_s())
        assert bench.ring() == [uid]


def test_a_group_without_a_leader_rings_and_a_followers_is_looked_at_again() -> None:
    bench = Bench()
    bench.leaders = {1: 3, 2: 0}
    for uid in (1, 2):
        bench.sleep(uid, 10.0)
    bench.clocks.move(10.0)
    assert bench.ring() == [2] and bench.timers.next_s() == AGAIN_NS / S
    bench.leaders[1] = 0
    bench.clocks.move(AGAIN_NS / S)
    assert bench.ring() == [1]


def test_a_clock_goes_on_over_the_sleep_by_the_monotonic_clock_where_a_term_runs() -> None:
    bench = Bench()
    bench.fresh -= 7_000
    bench.sleep(UID, 10.0, terms=True)
    bench.clocks.move(5.0, step=-3600)
    assert not bench.timers.stepped() and bench.timers.next_s() == 5.0
    bench.clocks.move(5.0)
    assert bench.ring() == [UID]
    clock = bench.timers.pop(UID)
    assert clock is not None and clock.now(bench.clocks.monotonic) == bench.fresh + 10_000


def test_where_no_term_runs_the_wall_clock_says_when() -> None:
    bench = Bench()
    bench.fresh -= 7_000
    bench.sleep(UID, 10.0)
    assert bench.timers.next_s() == 3.0, "log time is behind the wall clock, and may jump"


@pytest.mark.parametrize(("leader", "woken", "rung"), [(OWN, [UID], []), (0, [], [UID]), (3, [], [])])
def test_a_wall_clock_that_is_set_forward_is_noticed(leader: int, woken: list[int], rung: list[int]) -> None:
    bench = Bench()
    bench.leaders = {UID: leader}
    bench.sleep(UID, 3600.0)
    assert not bench.timers.stepped()
    bench.clocks.move(0.1, step=0.9)
    assert not bench.timers.stepped(), "that may be drift"
    bench.clocks.move(0.1, step=1.0)
    assert bench.timers.stepped() == woken and bench.ring() == rung
    assert not bench.timers.stepped(), "once"
    assert leader != 3 or bench.timers.next_s() > 3500, "whose leader lives is that one's to wake"


def test_a_step_is_one_only_while_somebody_is_looked_after() -> None:
    bench = Bench()
    bench.timers.stepped()
    bench.clocks.move(0.1, step=3600)
    bench.sleep(UID, 3600.0)
    assert not bench.timers.stepped()


@pytest.mark.parametrize(
    ("wall_s", "slept_s", "wait"),
    [(60.0, 90.0, 60.0), (90.0, 60.0, 60.0), (-5.0, 60.0, 0.0)],
)  # fmt: skip
def test_after_a_restart_either_clock_may_say_that_it_is_due(wall_s: float, slept_s: float, wait: float) -> None:
    bench = Bench()
    due_ms = bench.clocks.wall // MS + int(1000 * wall_s)
    bench.timers.adopt(UID, due_ms, due_ms - int(1000 * slept_s))
    assert bench.timers.next_s() == wait and bench.stirred == 1
    assert bench.timers.pop(UID) is None, "what passed meanwhile nobody knows"
